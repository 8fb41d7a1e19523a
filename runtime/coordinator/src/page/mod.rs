//! The page of a job. While the job runs it is on the port of its metrics: `/` for people, and
//! `/job.json`, which the page polls every second. It shows the contents of metrics and events and
//! changes nothing.
//!
//! [`page_of_runs`] writes the same page with the data of runs that have ended, as one file.
//! [`forwarded_page`] is the live page of a job that runs elsewhere.

mod curve;
mod document;
mod facts;
mod forwarded;
mod gauges;
mod kept;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use parking_lot::Mutex;
use prometheus::Registry;
use rectrain_proto::{member_role, v1};
use serde::Serialize;
use serde_json::Value;

pub use self::curve::{Columns, Point};
use self::curve::{Curve, NewPoints};
pub use self::document::page_of_runs;
pub use self::facts::{PlanFacts, RunFacts};
pub use self::forwarded::forwarded_page;
use self::gauges::Gauges;
pub use self::kept::{MAX_PAGE_RECORD_BYTES, PAGE_RECORD};
use super::Coordinator;
use rectrain_protocol::Role;
use rectrain_protocol::events::{Logged, WindowQuality};

/// The time between two looks whether the page has a job.
const EVERY: Duration = Duration::from_millis(100);
/// Events in one response, at most. Older ones are left out.
const MAX_EVENTS: usize = 2000;
/// The failure of a job that a signal ends, as `rectrain run` reports it to the coordinator.
pub const INTERRUPTED: &str = "interrupted";
/// The page may load nothing but itself, and call nothing but the coordinator.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:";

/// The live page. It exists before the coordinator, which may have to find a checkpoint first.
#[derive(Clone, Default)]
pub struct LivePage(Arc<Shown>);

#[derive(Default)]
struct Shown {
    attached: OnceLock<Attached>,
    run: OnceLock<RunFacts>,
    registry: OnceLock<Registry>,
}

struct Attached {
    coordinator: Arc<Coordinator>,
    since: f64,
    curve: Mutex<Curve>,
}

impl LivePage {
    /// Shows the job of `coordinator` from now on. A page shows only one job.
    pub fn show(&self, coordinator: Arc<Coordinator>) {
        let _shows_one = self.0.attached.set(Attached { coordinator, since: now(), curve: Mutex::default() });
    }

    /// Shows how the run was started.
    pub fn describe(&self, run: RunFacts) {
        let _has_one = self.0.run.set(run);
    }

    /// Shows the figures of the members in this process.
    pub fn observe(&self, registry: &Registry) {
        let _has_one = self.0.registry.set(registry.clone());
    }

    pub fn router(&self) -> Router {
        Router::new().route("/", get(live)).route("/job.json", get(job)).with_state(self.clone())
    }

    /// Adds each report of progress to the curves. Never returns.
    pub async fn follow(&self) {
        let shown = loop {
            match self.0.attached.get() {
                Some(shown) => break shown,
                None => tokio::time::sleep(EVERY).await,
            }
        };
        let mut events = shown.coordinator.follow();
        while let Some(logged) = events.next_logged().await {
            if let Some(point) = Point::of(logged.at, &logged.event) {
                shown.curve.lock().push(point);
            }
        }
        std::future::pending().await
    }

    /// The present state of the job, without its events and curves; `None` before there is a job.
    #[must_use]
    pub fn state(&self) -> Option<Value> {
        let latest = Seen { event: u64::MAX, point: u64::MAX };
        let mut state = serde_json::to_value(self.job(latest)?).ok()?;
        let fields = state.as_object_mut()?;
        fields.remove("events");
        fields.remove("curve");
        Some(state)
    }

    fn job(&self, seen: Seen) -> Option<Job> {
        let shown = self.0.attached.get()?;
        let gauges = self.0.registry.get().map(Gauges::read).unwrap_or_default();
        // Later answers need not repeat what the page has.
        let run = self.0.run.get().filter(|_| seen.event == 0).cloned().unwrap_or_default();
        Some(shown.job(seen, gauges, run))
    }
}

/// The numbers of the last event and of the last point that a page has.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Seen {
    event: u64,
    point: u64,
}

impl Seen {
    /// Reads the query `after=N&points=N`. Missing or unreadable numbers are 0.
    fn parse(query: &str) -> Self {
        let number = |name: &str| {
            let values = query.split('&').filter_map(|pair| pair.split_once('='));
            values.filter(|(key, _)| *key == name).find_map(|(_, value)| value.parse().ok()).unwrap_or(0)
        };
        Self { event: number("after"), point: number("points") }
    }
}

/// The present state of a job.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Job {
    name: String,
    phase: &'static str,
    message: String,
    mode: String,
    step: u64,
    total_steps: Option<u64>,
    /// Epochs trained, with the present one as a fraction. Known once an epoch was read.
    epoch: Option<f64>,
    steps_per_epoch: Option<u64>,
    samples: u64,
    samples_per_second: f64,
    loss: Option<f64>,
    auc: Option<f64>,
    /// L2 norm of the dense gradients of the last step. `null` in JSON if it is not finite.
    #[serde(skip_serializing_if = "Option::is_none")]
    gradient_norm: Option<f64>,
    map_epoch: u64,
    /// When the coordinator started, and the present time, in seconds since 1970.
    started_at: f64,
    now: f64,
    /// Wanted members of each role.
    wanted: BTreeMap<Role, u32>,
    last_checkpoint: Option<String>,
    /// From the last evaluation: the share of unseen test ids, by feature.
    unseen: BTreeMap<String, f64>,
    quality: Quality,
    all_reduce_seconds: Option<f64>,
    /// In `shadow`: the mean number of batches of a worker between two exchanges.
    average_sync_gap: Option<f64>,
    /// The member that slows training the most.
    slowest: Option<Slowest>,
    /// Seconds without a step, while training makes none for longer than usual.
    no_step_seconds: Option<f64>,
    /// The member that training then waits for, as "ps 1".
    waits_for: Option<String>,
    members: Vec<Member>,
    plan: PlanFacts,
    version: &'static str,
    #[serde(flatten)]
    run: RunFacts,
    state: Gauges,
    curve: NewPoints,
    events: Vec<Logged>,
}

/// The quality of the latest predictions on training rows.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Quality {
    /// Of the model that trains.
    window: Option<WindowQuality>,
    /// Of the frozen model.
    #[serde(skip_serializing_if = "Option::is_none")]
    baseline: Option<WindowQuality>,
    /// Whether training waits because the quality has fallen.
    is_held: bool,
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
    /// Rows and bytes of a parameter server in this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    /// Mean compute time of a dense worker's latest batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    compute_seconds: Option<f64>,
}

impl Attached {
    fn job(&self, seen: Seen, gauges: Gauges, run: RunFacts) -> Job {
        let coordinator = &self.coordinator;
        let status = coordinator.status();
        let gauges = gauges.with_reported(coordinator.table_sizes.lock().by_server(), status.budget);
        let (epoch, steps_per_epoch, quality, gradient_norm) = {
            let state = coordinator.lock();
            let quality = Quality { window: state.window(), baseline: state.baseline(), is_held: state.is_held() };
            (state.epoch(), state.steps_per_epoch(), quality, state.gradient_norm())
        };
        let some = |text: String| Some(text).filter(|text| !text.is_empty());
        let waits_for = status.no_step.as_ref().and_then(|no_step| no_step.waits_for.as_ref());
        let waits_for =
            waits_for.and_then(|member| Some(format!("{} {}", member_role(member.role())?.name(), member.index)));
        Job {
            slowest: status.slowest.as_ref().and_then(Slowest::read),
            no_step_seconds: status.no_step.as_ref().map(|no_step| no_step.seconds),
            waits_for,
            name: coordinator.plan.name.clone(),
            phase: phase_name(&status),
            members: coordinator.members(&status.workers, &gauges),
            message: status.message,
            mode: status.mode,
            step: status.step,
            total_steps: Some(status.total_steps).filter(|steps| *steps > 0),
            epoch,
            steps_per_epoch,
            quality,
            samples: status.samples,
            samples_per_second: status.samples_per_second,
            loss: Some(status.loss).filter(|loss| loss.is_finite() && status.step > 0),
            auc: status.auc,
            gradient_norm,
            map_epoch: status.map_epoch,
            started_at: self.since,
            now: now(),
            wanted: status.replicas.iter().filter_map(|role| Some((member_role(role.role())?, role.wanted))).collect(),
            last_checkpoint: some(status.last_checkpoint),
            unseen: status.unseen.into_iter().collect(),
            average_sync_gap: status.average_sync_gap,
            all_reduce_seconds: Some(status.all_reduce_seconds).filter(|seconds| *seconds > 0.0),
            plan: PlanFacts::of(&coordinator.plan),
            version: env!("CARGO_PKG_VERSION"),
            run,
            state: gauges,
            curve: self.curve.lock().after(seen.point),
            events: coordinator.events.after(seen.event, MAX_EVENTS),
        }
    }
}

/// Serves the page that polls `/job.json`.
async fn live() -> impl IntoResponse {
    let headers = [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CONTENT_SECURITY_POLICY, POLICY)];
    (headers, document::LIVE.as_str())
}

/// Serves the job as JSON. With `?after=N&points=N`, only events and points after these numbers.
async fn job(State(page): State<LivePage>, RawQuery(query): RawQuery) -> Response {
    let seen = Seen::parse(query.as_deref().unwrap_or_default());
    let Some(job) = page.job(seen) else {
        return (StatusCode::SERVICE_UNAVAILABLE, "the coordinator is starting\n").into_response();
    };
    match serde_json::to_vec(&job) {
        Ok(job) => ([(header::CONTENT_TYPE, "application/json")], job).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// The present time in seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn phase_name(status: &v1::JobStatus) -> &'static str {
    match status.phase() {
        v1::Phase::Failed if status.message == INTERRUPTED => "Interrupted",
        v1::Phase::Unspecified | v1::Phase::Starting => "Starting",
        v1::Phase::Training => "Training",
        v1::Phase::Evaluating => "Evaluating",
        v1::Phase::Complete => "Complete",
        v1::Phase::Failed => "Failed",
    }
}

impl Coordinator {
    /// The members of the job, once all have joined.
    fn members(&self, workers: &[v1::WorkerSpeed], gauges: &Gauges) -> Vec<Member> {
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
        let member = |role, (index, address): (usize, String)| {
            let is_server = role == "ps";
            let own = if is_server { number(index).map_or(index, usize::from) } else { index };
            let store = gauges.servers.get(&own).filter(|_| is_server);
            Member {
                role,
                index: own,
                address: place(address),
                slots: is_server.then(|| slots(index)).flatten(),
                rows: store.map(|(rows, _)| *rows),
                bytes: store.map(|(_, bytes)| *bytes),
                compute_seconds: (role == "dense-worker").then(|| seconds(index)).flatten(),
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_says_what_the_page_has() {
        let seen = |event, point| Seen { event, point };
        assert_eq!(Seen::parse(""), seen(0, 0));
        assert_eq!(Seen::parse("after=7"), seen(7, 0));
        assert_eq!(Seen::parse("after=7&points=9"), seen(7, 9));
        assert_eq!(Seen::parse("points=x&after=-1&other"), seen(0, 0));
    }
}
