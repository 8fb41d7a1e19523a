//! Members that are told to end, as all of a node that is drained are: what only one of them holds goes to others first, and those that
//! need one another do not end at once.

use std::time::Duration;

use rectrain_proto::v1;
use rectrain_wire::Frame;

use super::Coordinator;
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::events::JobEvent;
use rectrain_protocol::message;

/// How long the others of a node have to tell that they, too, are to end.
const TOGETHER: Duration = Duration::from_secs(1);

impl Coordinator {
    /// Answers a member that is told to end: when a checkpoint exists (its name; or why there is none) and it may.
    pub(super) async fn let_leave(&self, request: &v1::Leave) -> Frame {
        let (checkpoint, reason) = match self.save_and_leave(request.role(), request.index).await {
            Ok(checkpoint) => (checkpoint, String::new()),
            Err(reason) => (String::new(), reason),
        };
        message::reply::<v1::Leave>(&v1::MayLeave { checkpoint, reason }, Vec::new())
    }

    async fn save_and_leave(&self, role: v1::Role, index: u32) -> Result<String, String> {
        match role {
            v1::Role::Ps if self.lock().spare_leaves(index) => Err("it holds no rows".to_owned()),
            v1::Role::Ps => {
                let (saved, moved) = tokio::join!(self.save_now(), self.move_rows_of(index));
                if let Err(reason) = moved {
                    tracing::info!(ps = index, %reason, "a parameter server is about to end with its rows");
                }
                saved
            }
            v1::Role::DenseWorker => {
                self.lock().dense_worker_leaves(index);
                self.save_now().await
            }
            v1::Role::EmbeddingWorker => {
                let (saved, ()) = tokio::join!(self.save_now(), self.outlast_dense_workers());
                saved
            }
            _ => self.save_now().await,
        }
    }

    /// Has other servers take what this one holds; a sentence, if they cannot.
    async fn move_rows_of(&self, server: u32) -> Result<(), String> {
        self.lock().server_is_about_to_end(server)?;
        self.events.push(JobEvent::Leaving { member: format!("ps {server}") });
        self.changed.notify_waiters();
        let left = self.until(WHOLE_JOB, |state| match state.server_has_left(server) {
            Ok(false) => Ok(None),
            left => Ok(Some(left.map(drop))),
        });
        left.await.map_err(|error| error.to_string())?
    }

    /// Waits until nobody has to take the place of a dense worker: a step that was cut short is computed again from what embedding workers have
    /// given it.
    async fn outlast_dense_workers(&self) {
        tokio::time::sleep(TOGETHER).await;
        let all_are_there = self.until(WHOLE_JOB, |state| Ok(state.no_dense_worker_is_missed().then_some(())));
        if let Err(error) = all_are_there.await {
            tracing::debug!(%error, "an embedding worker ends with the job");
        }
    }

    /// This process is about to end as well: nobody is kept from it any more.
    pub fn let_all_leave(&self) {
        self.lock().let_all_leave();
        self.changed.notify_waiters();
    }
}
