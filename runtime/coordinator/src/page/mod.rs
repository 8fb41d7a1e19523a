//! The live page of a job, on the port of its metrics: `/` for people, and `/job.json`, which the
//! page polls every second.
//! It shows the contents of metrics and events and changes nothing.

mod curve;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use parking_lot::Mutex;
use rectrain_proto::{member_role, v1};
use serde::Serialize;

use self::curve::{Curve, Point};
use super::Coordinator;
use rectrain_protocol::Role;
use rectrain_protocol::events::Logged;

/// The time between two points of the curves.
const EVERY: Duration = Duration::from_secs(1);
/// Events in one response, at most. Older ones are left out.
const MAX_EVENTS: usize = 200;
const HTML: &str = include_str!("page.html");
/// The page may load nothing but itself, and call nothing but the coordinator.
const POLICY: &str =
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:";

/// The live page. It exists before the coordinator, which may have to find a checkpoint first.
#[derive(Clone, Default)]
pub struct LivePage(Arc<OnceLock<Attached>>);

struct Attached {
    coordinator: Arc<Coordinator>,
    since: Instant,
    curve: Mutex<Curve>,
}

impl LivePage {
    /// Shows the job of `coordinator` from now on. A page shows only one job.
    pub fn show(&self, coordinator: Arc<Coordinator>) {
        let _shows_one = self.0.set(Attached { coordinator, since: Instant::now(), curve: Mutex::default() });
    }

    pub fn router(&self) -> Router {
        let page = || async {
            ([(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CONTENT_SECURITY_POLICY, POLICY)], HTML)
        };
        Router::new().route("/", get(page)).route("/job.json", get(job)).with_state(self.clone())
    }

    /// Adds a point to the curves every second. Never returns.
    pub async fn follow(&self) {
        loop {
            tokio::time::sleep(EVERY).await;
            if let Some(shown) = self.0.get() {
                shown.note();
            }
        }
    }
}

impl Attached {
    fn note(&self) {
        let status = self.coordinator.status();
        if status.phase() == v1::Phase::Training {
            let point = Point {
                seconds: self.since.elapsed().as_secs_f64(),
                step: status.step,
                samples_per_second: status.samples_per_second,
                loss: Some(status.loss).filter(|loss| loss.is_finite() && status.step > 0),
                auc: status.auc,
                mode: status.mode,
            };
            self.curve.lock().push(point);
        }
    }
}

/// The present state of a job.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Job<'a> {
    name: &'a str,
    phase: &'static str,
    message: String,
    mode: String,
    step: u64,
    total_steps: Option<u64>,
    samples: u64,
    samples_per_second: f64,
    loss: Option<f64>,
    auc: Option<f64>,
    map_epoch: u64,
    /// Wanted members of each role.
    wanted: BTreeMap<Role, u32>,
    last_checkpoint: Option<String>,
    /// From the last evaluation: the share of unseen test ids, by feature.
    unseen: BTreeMap<String, f64>,
    all_reduce_seconds: Option<f64>,
    /// The member that slows training the most.
    slowest: Option<Slowest>,
    /// Seconds without a step, while training makes none for longer than usual.
    no_step_seconds: Option<f64>,
    /// The member that training then waits for, as "ps 1".
    waits_for: Option<String>,
    members: Vec<Member>,
    curve: &'a [Point],
    events: Vec<Logged>,
}

/// A slow member.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Slowest {
    role: &'static str,
    index: u32,
    /// The share of a step's time that its slowness costs.
    share: f64,
    /// When it became slow, in seconds since 1970.
    since_seconds: u64,
}

impl Slowest {
    fn read(slowest: &v1::Slowest) -> Option<Self> {
        let role = member_role(slowest.role())?.name();
        Some(Self { role, index: slowest.index, share: slowest.share, since_seconds: slowest.since_seconds })
    }
}

/// A member of the job.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Member {
    role: &'static str,
    index: usize,
    address: String,
    /// Slots of a parameter server.
    #[serde(skip_serializing_if = "Option::is_none")]
    slots: Option<usize>,
    /// Mean compute time of a dense worker's latest batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    compute_seconds: Option<f64>,
}

/// Serves the job as JSON. With `?after=N`, only events after number N.
async fn job(State(page): State<LivePage>, RawQuery(query): RawQuery) -> Response {
    let Some(shown) = page.0.get() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "the coordinator is starting\n").into_response();
    };
    let coordinator = &shown.coordinator;
    let status = coordinator.status();
    let after = query.as_deref().and_then(|query| query.strip_prefix("after=")?.parse().ok());
    let events = coordinator.events.after(after.unwrap_or(0), MAX_EVENTS);
    let curve = shown.curve.lock();
    let some = |text: String| Some(text).filter(|text| !text.is_empty());
    let waits_for = status.no_step.as_ref().and_then(|no_step| no_step.waits_for.as_ref());
    let job = serde_json::to_vec(&Job {
        slowest: status.slowest.as_ref().and_then(Slowest::read),
        no_step_seconds: status.no_step.as_ref().map(|no_step| no_step.seconds),
        waits_for: waits_for
            .and_then(|member| Some(format!("{} {}", member_role(member.role())?.name(), member.index))),
        name: &coordinator.plan.name,
        phase: phase_name(status.phase()),
        members: coordinator.members(&status.workers),
        message: status.message,
        mode: status.mode,
        step: status.step,
        total_steps: Some(status.total_steps).filter(|steps| *steps > 0),
        samples: status.samples,
        samples_per_second: status.samples_per_second,
        loss: Some(status.loss).filter(|loss| loss.is_finite() && status.step > 0),
        auc: status.auc,
        map_epoch: status.map_epoch,
        wanted: status.replicas.iter().filter_map(|role| Some((member_role(role.role())?, role.wanted))).collect(),
        last_checkpoint: some(status.last_checkpoint),
        unseen: status.unseen.into_iter().collect(),
        all_reduce_seconds: Some(status.all_reduce_seconds).filter(|seconds| *seconds > 0.0),
        curve: curve.points(),
        events,
    });
    match job {
        Ok(job) => ([(header::CONTENT_TYPE, "application/json")], job).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

fn phase_name(phase: v1::Phase) -> &'static str {
    match phase {
        v1::Phase::Unspecified | v1::Phase::Starting => "Starting",
        v1::Phase::Training => "Training",
        v1::Phase::Evaluating => "Evaluating",
        v1::Phase::Complete => "Complete",
        v1::Phase::Failed => "Failed",
    }
}

impl Coordinator {
    /// The members of the job, once all have joined.
    fn members(&self, workers: &[v1::WorkerSpeed]) -> Vec<Member> {
        let Ok(Some(roster)) = self.lock().roster() else { return Vec::new() };
        let placement = self.placement().ok();
        let map = placement.as_ref().map(|placement| &placement.map);
        let number = |place: usize| map.and_then(|map| map.servers().get(place)).copied();
        let slots = |place: usize| Some(map?.slots_of(number(place)?).count());
        let seconds = |rank: usize| {
            let worker = workers.iter().find(|worker| worker.rank as usize == rank)?;
            let batches = &worker.compute_seconds;
            let sum: f32 = batches.iter().sum();
            (!batches.is_empty()).then(|| f64::from(sum) / batches.len() as f64)
        };
        // Cuts off the ID of the process, which only members need.
        let place = |address: String| address.split('#').next().unwrap_or_default().to_owned();
        let member = |role, (index, address): (usize, String)| Member {
            role,
            index: if role == "ps" { number(index).map_or(index, usize::from) } else { index },
            address: place(address),
            slots: (role == "ps").then(|| slots(index)).flatten(),
            compute_seconds: (role == "dense-worker").then(|| seconds(index)).flatten(),
        };
        [
            ("ps", roster.ps),
            ("embedding-worker", roster.embedding_workers),
            ("dense-worker", roster.dense_workers),
            ("loader", roster.loaders),
        ]
        .into_iter()
        .flat_map(|(role, addresses)| addresses.into_iter().enumerate().map(move |address| member(role, address)))
        .collect()
    }
}
