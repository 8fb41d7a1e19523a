//! Runs one attempt in this process, and reads how often it has trained each row.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;
use rectrain_checkpoint::{Depth, LEASE, SlotSet, latest_good};
use rectrain_data::key::TableSeed;
use rectrain_embedding::{Slot, Store};
use rectrain_member::local::run_in_process;
use rectrain_protocol::RoleError;
use rectrain_protocol::events::{EventFollower, EventLog, JobEvent, Summary};
use rectrain_protocol::metrics::RoleMetrics;
use rectrain_protocol::plan::JobPlan;
use rectrain_storage::Directory;

use crate::files::FIRST_ROW;
use crate::oracle::Counts;
use crate::settings::{Crash, ROW_FEATURE, WEIGHT_STEP, checkpoints};

/// An attempt takes well below a second. One that takes this long hangs, even where other programs
/// take all processors for half a minute.
const LIMIT: Duration = Duration::from_secs(180);

/// The end of an attempt.
pub enum End {
    Trained(Box<Summary>),
    /// The job was dropped while it ran.
    Crashed,
    /// It ended with an error of the user's input, which is exit code 2.
    Refused(String),
    Failed(String),
}

/// Trains as run `run` until the end or the crash. Also returns the events.
pub fn train(plan: JobPlan, run: u64, crash: Option<Crash>) -> (End, Vec<JobEvent>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let events = EventLog::default();
    let end = runtime.block_on(async {
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        let (slow, name) = (BTreeMap::new(), format!("run-{run}"));
        let job = run_in_process(Arc::new(plan), &name, &slow, events.clone(), metrics);
        tokio::select! {
            ended = job => end_of(ended),
            () = crashed(crash, events.follow()) => End::Crashed,
            () = tokio::time::sleep(LIMIT) => End::Failed(format!("it did not end within {LIMIT:?}")),
        }
    });
    // Nothing of a crashed job may write after this, such as a file of a checkpoint.
    runtime.shutdown_timeout(Duration::from_secs(20));
    (end, events.after(0, usize::MAX).into_iter().map(|logged| logged.event).collect())
}

fn end_of(ended: Result<Summary, RoleError>) -> End {
    match ended {
        Ok(summary) => End::Trained(Box::new(summary)),
        Err(error) if error.is_user_error() => End::Refused(error.to_string()),
        Err(error) => End::Failed(error.to_string()),
    }
}

/// Removes the lease that a crashed job leaves. The next attempt would wait for its end.
pub fn end_lease(root: &Path) {
    match std::fs::remove_file(checkpoints(root).join(LEASE)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("{error}"),
        _ => {}
    }
}

/// Returns when the job crashes.
async fn crashed(crash: Option<Crash>, mut events: EventFollower) {
    let mut left = match crash {
        None => return std::future::pending().await,
        Some(Crash::AfterMilliseconds(milliseconds)) => {
            return tokio::time::sleep(Duration::from_millis(milliseconds)).await;
        }
        Some(Crash::AfterCheckpoints(checkpoints)) => checkpoints,
    };
    while left > 0 {
        match events.next().await {
            Some(event) => left -= u64::from(matches!(event, JobEvent::CheckpointSaved { .. })),
            None => return std::future::pending().await,
        }
    }
}

/// How often each row was trained, by the weights in the last checkpoint; `None` without one.
/// `next_row` is after all rows.
///
/// # Errors
/// A sentence about a row that has not moved by whole steps.
pub fn trained(root: &Path, next_row: u64) -> Result<Option<Counts>, String> {
    let path = checkpoints(root);
    let rows: HashMap<u64, u64> =
        (FIRST_ROW..next_row).map(|row| (TableSeed::of(ROW_FEATURE).integer(row as i64), row)).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let Some(store) = runtime.block_on(store_of(&path)) else { return Ok(None) };
    let (mut counts, mut problem) = (Counts::new(), None);
    for slot in 0..store.config().slots {
        store
            .for_each_row(Slot(slot), |_, key, values, _| {
                if let Some(row) = rows.get(&key.0) {
                    let steps = values[0].abs() / WEIGHT_STEP;
                    if (steps - steps.round()).abs() > 0.01 {
                        problem = Some(format!("row {row} moved by {steps} steps"));
                    }
                    counts.insert(*row, steps.round() as u64);
                }
            })
            .unwrap();
    }
    counts.retain(|_, count| *count > 0);
    problem.map_or(Ok(Some(counts)), Err)
}

/// The rows of the last checkpoint.
async fn store_of(path: &Path) -> Option<Arc<Store>> {
    if !path.exists() {
        return None;
    }
    let directory = Directory::open(&path.display().to_string(), &BTreeMap::new(), false).unwrap();
    let checkpoint = latest_good(&directory, None, Depth::Sizes, &[]).await.unwrap().checkpoint?;
    let store = Arc::new(Store::new(checkpoint.store_config().await.unwrap()).unwrap());
    let slots = SlotSet::new((0..store.config().slots).map(Slot));
    checkpoint.restore_rows(&store, &slots).await.unwrap();
    Some(store)
}
