//! Warns of a file system that is nearly full, before a checkpoint fails because of it.

use std::sync::atomic::{AtomicBool, Ordering};

use rectrain_protocol::events::EventLog;
use rectrain_protocol::metrics::CoordinatorMetrics;
use rectrain_storage::Directory;

use super::warn_all;

/// Full checkpoints that must fit. Old checkpoints are deleted only after the next one exists.
const ENOUGH: u64 = 2;

/// The free bytes of the checkpoint path, as of the last check.
pub(super) struct FreeSpace {
    events: EventLog,
    metrics: CoordinatorMetrics,
    /// Whether a warning is out. The next one comes only after a recovery.
    is_low: AtomicBool,
}

impl FreeSpace {
    pub(super) fn new(events: EventLog, metrics: CoordinatorMetrics) -> Self {
        Self { events, metrics, is_low: AtomicBool::new(false) }
    }

    /// Compares the free bytes with the bytes of a full checkpoint, which are 0 while unknown. The
    /// file system may hang, so training must not wait for this. A bucket has no limit.
    pub(super) async fn check(&self, directory: &Directory, full_checkpoint: u64) {
        match directory.free_bytes().await {
            Ok(Some(free)) => self.note(directory.name(), free, full_checkpoint),
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "the room for checkpoints is not known"),
        }
    }

    fn note(&self, path: &str, free: u64, full_checkpoint: u64) {
        self.metrics.checkpoint_free_bytes.set(i64::try_from(free).unwrap_or(i64::MAX));
        let is_low = free < full_checkpoint.saturating_mul(ENOUGH);
        if is_low && !self.is_low.load(Ordering::Relaxed) {
            let warning = format!(
                "the file system of spec.checkpoint.path {path} is nearly full: {free} bytes are free and a full checkpoint needs {full_checkpoint} bytes; expected at least {ENOUGH} times as many: free some space, or lower spec.checkpoint.keep"
            );
            warn_all(&self.events, [warning]);
        }
        self.is_low.store(is_low, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use prometheus::Registry;
    use rectrain_protocol::events::JobEvent;
    use rectrain_protocol::metrics::RoleMetrics;

    use super::*;

    fn free_space() -> FreeSpace {
        let metrics = CoordinatorMetrics::of(&RoleMetrics::new(Registry::new()).unwrap(), 0);
        FreeSpace::new(EventLog::default(), metrics)
    }

    fn warnings(space: &FreeSpace) -> Vec<String> {
        let text = |event: JobEvent| match event {
            JobEvent::Warning { message } => message,
            other => panic!("{other:?}"),
        };
        space.events.after(0, 9).into_iter().map(|logged| text(logged.event)).collect()
    }

    #[test]
    fn little_room_is_one_warning_until_it_recovers() {
        let space = free_space();
        for (free, full_checkpoint, expected) in
            [(5, 0, 0), (200, 100, 0), (199, 100, 1), (150, 100, 1), (0, 100, 1), (900, 100, 1), (199, 100, 2)]
        {
            space.note("ck", free, full_checkpoint);
            assert_eq!(warnings(&space).len(), expected, "{free} of {full_checkpoint}");
            assert_eq!(space.metrics.checkpoint_free_bytes.get(), free as i64);
        }
        let [first, _] = &warnings(&space)[..] else { panic!("two warnings") };
        for part in ["spec.checkpoint.path ck", "199 bytes are free", "needs 100 bytes"] {
            assert!(first.contains(part), "{first}");
        }
    }

    #[tokio::test]
    async fn the_free_bytes_of_a_folder_are_compared() {
        let (space, folder) = (free_space(), tempfile::tempdir().unwrap());
        let path = folder.path().display().to_string();
        let directory = Directory::open(&path, &std::collections::BTreeMap::new(), false).unwrap();
        space.check(&directory, 1).await;
        assert!(warnings(&space).is_empty() && space.metrics.checkpoint_free_bytes.get() > 0);
        space.check(&directory, u64::MAX).await;
        assert!(warnings(&space)[0].contains(&path), "{:?}", warnings(&space));
    }
}
