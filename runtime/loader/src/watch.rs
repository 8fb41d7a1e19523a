//! Watches a stream: regularly looks at the brokers, and tells the coordinator how far the
//! partitions reach. Where rows wait, it looks for the first good one, so that no chunk is empty.
//!
//! Every loader watches, so the loss of a loader costs nothing. Reports are idempotent.

use std::time::{Duration, Instant};

use rectrain_data::{DataError, Dataset, PartId, PartitionFound, Probe, Segment};
use rectrain_proto::v1;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;

use crate::Loader;
use crate::lease::Pass;

/// The pause between two looks at the brokers.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// A report is sent at least this often, even if nothing has changed. The coordinator may want a
/// look at a partition whose chunk has ended meanwhile.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// The pause between two attempts to commit the last offsets.
const COMMIT_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause while no broker answers.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What the coordinator was told last.
#[derive(Default)]
struct Told {
    partitions: Vec<PartitionFound>,
    at: Option<Instant>,
}

impl Told {
    fn is_due(&self, partitions: &[PartitionFound], now: Instant) -> bool {
        self.partitions != partitions || self.at.is_none_or(|at| now.duration_since(at) >= TELL_EVERY)
    }
}

impl Loader {
    /// Watches the topics until it is dropped, or fails. Ends at once if the job trains on files.
    pub(crate) async fn watch_stream(&self) -> Result<(), RoleError> {
        if self.plan.stream().is_none() || self.plan.follow().is_some() {
            return Ok(());
        }
        let dataset = self.dataset(Pass::Training).await?;
        let (mut told, mut pause) = (Told::default(), LOOK_EVERY);
        loop {
            let looked = dataset.clone();
            let looking = blocking("look at the brokers", move || looked.partitions());
            match looking.await? {
                Ok(partitions) => {
                    let now = Instant::now();
                    pause = LOOK_EVERY;
                    if told.is_due(&partitions, now) {
                        self.tell(&dataset, &partitions).await?;
                        told = Told { partitions, at: Some(now) };
                    }
                }
                Err(error) if error.is_transient() => {
                    self.metrics.broker_errors.inc();
                    let unreachable = error.to_string();
                    let found = v1::StreamFound { loader: self.index, unreachable, ..v1::StreamFound::default() };
                    self.peers.coordinator.call(found, Vec::new(), CALL_DEADLINE).await?;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Err(error) => return Err(error.into()),
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Reports the partitions, and looks for good rows where the coordinator wants it.
    async fn tell(&self, dataset: &Dataset, partitions: &[PartitionFound]) -> Result<(), RoleError> {
        let partitions = partitions.iter().map(write_partition).collect();
        let mut found = v1::StreamFound { partitions, ..self.found() };
        loop {
            let (known, _) = self.peers.coordinator.call(found, Vec::new(), CALL_DEADLINE).await?;
            if let Some(commit) = known.commit {
                self.commits.want(commit);
            }
            if known.probes.is_empty() {
                return Ok(());
            }
            let probed = self.probe(dataset, known.probes).await?;
            found = v1::StreamFound { probed, ..self.found() };
        }
    }

    /// A report without findings.
    fn found(&self) -> v1::StreamFound {
        let committed = self.commits.made();
        v1::StreamFound { loader: self.index, committed, ..v1::StreamFound::default() }
    }

    /// Commits offsets for the consumer group until it is dropped, or fails. Training does not
    /// depend on it.
    pub(crate) async fn commit_offsets(&self) -> Result<(), RoleError> {
        self.commits.make_each(|commit| self.commit(commit)).await
    }

    /// Attempts a commit. Returns whether it is over. If no broker answers it is tried again with
    /// the next report, and after a refusal with the next checkpoint.
    async fn commit(&self, commit: v1::Commit) -> Result<bool, RoleError> {
        let offset = |of: &v1::PartitionOffset| (PartId(of.part), of.offset);
        let offsets: Vec<(PartId, u64)> = commit.offsets.iter().map(offset).collect();
        let dataset = self.dataset(Pass::Training).await?;
        let committed = blocking("commit of offsets", move || dataset.commit(&offsets)).await?;
        match committed {
            Err(error) if error.is_transient() => {
                self.metrics.commit_failures.inc();
                tracing::debug!("the offsets of a checkpoint are not committed yet: {error}");
                return Ok(false);
            }
            Err(error) => {
                self.metrics.commit_failures.inc();
                tracing::warn!("the offsets of a checkpoint were not committed: {error}");
            }
            Ok(()) => {}
        }
        Ok(true)
    }

    /// Waits until the offsets of the last checkpoint are committed, once training has ended. The
    /// coordinator waits for this, but not for long. The job is complete without it.
    pub(crate) async fn commit_last(&self) {
        if self.plan.group().is_none() || self.index != 0 {
            return;
        }
        let committing = async {
            while self.commit_due().await? {
                tokio::time::sleep(COMMIT_PAUSE).await;
            }
            Ok::<(), RoleError>(())
        };
        if let Err(error) = committing.await {
            tracing::warn!("the offsets of the last checkpoint may not be committed: {error}");
        }
    }

    /// Has the offsets of a checkpoint committed. `false` if the coordinator knows that there are
    /// none to commit.
    async fn commit_due(&self) -> Result<bool, RoleError> {
        let (known, _) = self.peers.coordinator.call(self.found(), Vec::new(), CALL_DEADLINE).await?;
        let Some(commit) = known.commit else { return Ok(false) };
        self.commits.want(commit);
        Ok(true)
    }

    async fn probe(&self, dataset: &Dataset, segments: Vec<v1::Segment>) -> Result<Vec<v1::SegmentProbed>, RoleError> {
        let dataset = dataset.clone();
        let probing = blocking("search for a row", move || {
            segments.into_iter().map(|segment| probe(&dataset, segment)).collect::<Result<_, DataError>>()
        });
        Ok(self.reporting_progress(probing).await???)
    }
}

fn probe(dataset: &Dataset, wanted: v1::Segment) -> Result<v1::SegmentProbed, DataError> {
    let v1::Segment { part, from, until } = wanted;
    let Probe { read, skipped } = dataset.probe(Segment { part: PartId(part), from, until })?;
    let read = v1::SegmentRead { next: read.next, more: read.more };
    Ok(v1::SegmentProbed { segment: Some(wanted), read: Some(read), skipped_rows: skipped })
}

fn write_partition(found: &PartitionFound) -> v1::PartitionFound {
    let PartitionFound { topic, topic_id, state } = found;
    v1::PartitionFound {
        part: state.part.0,
        topic: topic.clone(),
        topic_id: topic_id.to_vec(),
        begin: state.begin,
        end: state.end,
        aged_end: state.aged_end,
        start: state.start,
        stop: state.stop,
    }
}

#[cfg(test)]
mod tests {
    use rectrain_data::PartitionState;

    use super::*;

    #[test]
    fn a_report_is_due_when_something_changed_or_the_last_one_is_old() {
        let state = PartitionState { part: PartId(0), begin: 0, end: 5, aged_end: 0, start: 0, stop: None };
        let partitions = vec![PartitionFound { topic: "t".to_owned(), topic_id: [0; 16], state }];
        let now = Instant::now();
        assert!(Told::default().is_due(&partitions, now));
        let told = Told { partitions: partitions.clone(), at: Some(now) };
        assert!(!told.is_due(&partitions, now + TELL_EVERY / 2));
        assert!(told.is_due(&partitions, now + TELL_EVERY));
        let mut grown = partitions;
        grown[0].state.aged_end = 5;
        assert!(told.is_due(&grown, now));
    }
}
