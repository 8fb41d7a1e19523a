//! The page of a job whose processes have ended. The coordinator leaves the page's record beside
//! the checkpoints, and `rectrain page` makes the page of it.

use std::time::Duration;

use rectrain_protocol::plan::CheckpointPlan;

use super::{LivePage, Seen};

/// The file of the record, in `spec.checkpoint.path`. The last job of a path replaces the record of
/// the one before.
pub const PAGE_RECORD: &str = "page.json";
/// The bytes of a record, at most. A larger one is neither written nor read.
pub const MAX_PAGE_RECORD_BYTES: u64 = 16 << 20;
/// How long the storage may take. The job has ended, so its result does not depend on the page.
const PATIENCE: Duration = Duration::from_secs(10);

impl LivePage {
    /// Writes the page's record beside the checkpoints: the state, at most 4,096 points and 2,000
    /// events. Does nothing without a checkpoint path. A failure is a warning in the log.
    pub async fn keep(&self) {
        let Some(shown) = self.0.attached.get() else { return };
        let Some(checkpoint) = &shown.coordinator.plan.checkpoint else { return };
        let written = tokio::time::timeout(PATIENCE, self.write(checkpoint)).await;
        if let Err(reason) = written.unwrap_or_else(|_| Err(format!("the storage took over {PATIENCE:?}"))) {
            let path = &checkpoint.path;
            tracing::warn!("the page of the job is not kept in {path}: {reason}");
        }
    }

    async fn write(&self, checkpoint: &CheckpointPlan) -> Result<(), String> {
        let job = self.job(Seen::default()).ok_or("there is no job")?;
        let record = serde_json::to_vec(&job).map_err(|error| error.to_string())?;
        if record.len() as u64 > MAX_PAGE_RECORD_BYTES {
            return Err(format!("it has {} bytes, and at most {MAX_PAGE_RECORD_BYTES} are kept", record.len()));
        }
        let directory = checkpoint.directory().map_err(|error| error.to_string())?;
        directory.put(PAGE_RECORD, record).await.map_err(|error| error.to_string())
    }
}
