//! Drains members that are about to end, for instance because their node is drained. State that
//! only one member holds moves to others first, and members that need each other do not end at
//! once.

use std::time::Duration;

use rectrain_proto::v1;
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::events::JobEvent;
use rectrain_protocol::message;
use rectrain_wire::Frame;

use super::refused::{DrainRefused, SaveRefused};
use super::{Coordinator, LAST_COPY};

/// How long other members of the same node have to report that they are about to end too.
const SAME_NODE: Duration = Duration::from_secs(1);

/// Why no checkpoint was saved for a member that is about to end.
#[derive(Debug, thiserror::Error)]
enum NoCheckpoint {
    #[error(transparent)]
    Refused(#[from] SaveRefused),
    #[error(transparent)]
    NotNeeded(DrainRefused),
}

impl Coordinator {
    /// Answers a member that is about to end as soon as it may. The answer has the name of the
    /// checkpoint that was saved, or the reason why there is none.
    pub(super) async fn drain_member(&self, request: &v1::Leave) -> Frame {
        let (checkpoint, reason) = match self.save_and_drain(request.role(), request.index).await {
            Ok(checkpoint) => (checkpoint, String::new()),
            Err(reason) => (String::new(), reason.to_string()),
        };
        message::reply::<v1::Leave>(&v1::MayLeave { checkpoint, reason }, Vec::new())
    }

    async fn save_and_drain(&self, role: v1::Role, index: u32) -> Result<String, NoCheckpoint> {
        match role {
            v1::Role::Ps if self.lock().remove_spare(index) => Err(NoCheckpoint::NotNeeded(DrainRefused::NoRows)),
            v1::Role::Ps => {
                let (saved, moved) = tokio::join!(self.save_now(), self.move_rows_away(index));
                if let Err(reason) = moved {
                    tracing::info!(ps = index, %reason, "a parameter server is about to end with its rows");
                }
                Ok(saved?)
            }
            v1::Role::DenseWorker => {
                self.lock().drain_dense_worker(index);
                Ok(self.save_now().await?)
            }
            v1::Role::EmbeddingWorker => {
                let (saved, ()) = tokio::join!(self.save_now(), self.wait_for_dense_replacements());
                Ok(saved?)
            }
            _ => Ok(self.save_now().await?),
        }
    }

    /// Moves the slots of a parameter server to the others, and waits until they have moved.
    async fn move_rows_away(&self, server: u32) -> Result<(), DrainRefused> {
        self.lock().drain_server(server)?;
        self.events.push(JobEvent::Leaving { member: format!("ps {server}") });
        self.changed.notify_waiters();
        let drained = self.wait_until(WHOLE_JOB, |state| match state.is_server_drained(server) {
            Ok(false) => Ok(None),
            drained => Ok(Some(drained.map(drop))),
        });
        drained.await.map_err(|error| DrainRefused::Failed(error.to_string()))?
    }

    /// Waits until every dense worker that is about to end has a replacement that trains. The
    /// replacement computes the interrupted step again from the pieces that embedding workers still
    /// hold.
    async fn wait_for_dense_replacements(&self) {
        tokio::time::sleep(SAME_NODE).await;
        let replaced = self.wait_until(WHOLE_JOB, |state| Ok(state.no_dense_worker_missing().then_some(())));
        if let Err(error) = replaced.await {
            tracing::debug!(%error, "the job failed while an embedding worker waited to end");
        }
    }

    /// Prepares for the end of the coordinator's own process: saves a checkpoint if the job has
    /// any, and returns its name. Members of the same node first hand over their state. A
    /// replacement then continues from a copy of the journal. While slots move it could not.
    ///
    /// # Errors
    /// See [`Self::save_now`].
    pub async fn leave(&self) -> Result<String, SaveRefused> {
        let (saved, ()) = tokio::join!(self.save_now(), self.let_members_hand_over());
        // A checkpoint that a member waits for may be under way since. The state is in the copies
        // before this process ends. All parameter servers may have left by now.
        let _late = tokio::time::timeout(LAST_COPY, self.journaled()).await;
        saved
    }

    /// Waits until members that are about to end have handed over their state, and then lets all
    /// members end at once. If all members of a role end, the attempt does too, and none waits.
    async fn let_members_hand_over(&self) {
        if self.journal.is_some() && self.placement().is_ok() {
            tokio::time::sleep(SAME_NODE).await;
            let handed_over = self.wait_until(WHOLE_JOB, |state| Ok(state.has_all_handed_over().then_some(())));
            if let Err(error) = handed_over.await {
                tracing::debug!(%error, "the job failed while the coordinator waited to end");
            }
        }
        self.lock().let_all_leave();
        self.changed.notify_waiters();
    }
}
