//! The summary of a job: the result of training, the digest of the model, and the traffic of all
//! members.

use std::time::Duration;

use futures::future::join_all;
use rectrain_proto::{member_role, v1};
use rectrain_protocol::connect;
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{JobEvent, Summary};
use rectrain_protocol::message;
use rectrain_protocol::placement::Placement;
use rectrain_wire::Transport;

use super::state::State;
use super::{Coordinator, LAST_COPY, digest};

/// How long the coordinator waits at the end for farewells of members that it released shortly
/// before.
const FAREWELL: Duration = Duration::from_secs(2);
/// Deadline for members to report their traffic.
const TRAFFIC: Duration = Duration::from_secs(10);

impl Coordinator {
    /// Waits for all members to join and for training to end, and collects the summary.
    pub(crate) async fn summarize(&self, transport: &dyn Transport) -> Result<Summary, RoleError> {
        self.start_training(transport).await?;
        let result = tokio::select! {
            result = self.wait_until(WHOLE_JOB, State::trained) => result?,
            error = self.drive(transport) => return Err(error),
            () = self.choose_modes() => return Err(RoleError::Stopped),
            () = self.scale_loaders() => return Err(RoleError::Stopped),
            () = self.share_chunks() => return Err(RoleError::Stopped),
        };
        let mut summary = result.summary;
        let before = self.lock().counted_before();
        let placement = self.placement()?;
        // Boxed, because the futures of a job's roles are together in one.
        let collecting = Box::pin(digest::of_model(&self.plan, &result.dense_digest, &placement, before, &mut summary));
        tokio::select! {
            digest = collecting => {
                digest?;
            }
            // Only a failure ends this wait, for instance of a server that restarted without its
            // rows.
            failed = self.wait_until(WHOLE_JOB, |_| Ok(None::<()>)) => failed?,
        }
        // A superseded coordinator learns that here, before members learn of the end. The servers
        // may die now without harm, so the wait is short.
        let _late = tokio::time::timeout(LAST_COPY, self.confirmed()).await;
        // A released member that died never says farewell. The deadline is no error.
        let _late = self.wait_until(FAREWELL, |state| Ok(state.all_have_left().then_some(()))).await;
        summary.bytes_on_wire = self.lock().left_traffic();
        self.add_traffic(&placement, transport, &mut summary).await;
        self.lock().check_failure()?;
        Ok(summary)
    }

    /// Waits for all members to join, and sets the placement of the slots.
    async fn start_training(&self, transport: &dyn Transport) -> Result<(), RoleError> {
        let roster = self.wait_until(WHOLE_JOB, State::roster).await?;
        let map = if self.is_recovered { self.lock().map() } else { None };
        let events = self.events.after(0, usize::MAX);
        if !self.is_log_lost && !events.iter().any(|logged| matches!(logged.event, JobEvent::Started { .. })) {
            let origin = self.lock().origin();
            self.events.push(self.plan.started(origin)?);
        }
        for replicas in self.status().replicas {
            if let Some(role) = member_role(replicas.role()) {
                self.metrics.set_members(role, replicas.present);
            }
        }
        self.set_placement(Placement::new(map.unwrap_or_else(|| self.plan.slot_map()), &roster.ps, transport)?);
        if self.is_recovered {
            self.change(State::recover)?;
        }
        // A superseded coordinator learns that here, before it calls any server.
        self.confirmed().await
    }

    /// Adds the traffic of all members that still answer.
    async fn add_traffic(&self, placement: &Placement, transport: &dyn Transport, summary: &mut Summary) {
        // The model is complete: the job does not wait for replacements of members that died since.
        let roster = self.wait_until(TRAFFIC, State::roster).await.unwrap_or_default();
        let members = placement.addresses.iter().chain(&roster.embedding_workers);
        let members = members.chain(&roster.dense_workers).chain(&roster.loaders);
        for traffic in join_all(members.map(|address| traffic_of(address, transport))).await {
            match traffic {
                Ok(traffic) => add(summary, traffic),
                Err(error) => tracing::warn!(%error, "the summary lacks the traffic of one member"),
            }
        }
    }
}

async fn traffic_of(address: &str, transport: &dyn Transport) -> Result<v1::Traffic, RoleError> {
    let (traffic, _) = message::call(&connect(transport, address)?, v1::TrafficRequest {}, Vec::new(), TRAFFIC).await?;
    Ok(traffic)
}

fn add(summary: &mut Summary, traffic: v1::Traffic) {
    for (kind, bytes) in traffic.bytes_sent {
        *summary.bytes_on_wire.entry(kind).or_default() += bytes;
    }
}
