//! The time of a dense worker's steps, split by the members that it was spent on. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use rectrain_proto::v1;
use rectrain_protocol::Role;

/// The time of an embedding worker's reply to the request for a piece.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReplyTime {
    embedding_worker: u32,
    /// Seconds from the request to the reply, as this worker saw them.
    took: f64,
    reply: v1::Forwarded,
}

impl ReplyTime {
    pub(crate) fn new(embedding_worker: usize, took: Duration, reply: &v1::Forwarded) -> Self {
        let &v1::Forwarded { seconds, own_seconds, .. } = reply;
        let reply = v1::Forwarded { seconds, own_seconds, spent: reply.spent.clone(), ..v1::Forwarded::default() };
        Self { embedding_worker: embedding_worker as u32, took: took.as_secs_f64(), reply }
    }
}

/// Seconds of steps, and the members that they were spent on.
#[derive(Debug, Default)]
pub(crate) struct StepTimes {
    steps: Duration,
    /// The part of `steps` that was a wait for data.
    data_wait: Duration,
    spent: BTreeMap<(Role, u32), f64>,
    /// By embedding worker.
    pieces: BTreeMap<u32, Pieces>,
}

/// The pieces that an embedding worker delivered.
#[derive(Debug, Default)]
struct Pieces {
    count: u32,
    /// Seconds of its work on them.
    own_seconds: f64,
    /// Seconds that were spent on their loaders.
    loader_seconds: f64,
}

impl StepTimes {
    /// A part of a step has passed.
    pub(crate) fn passed(&mut self, time: Duration) {
        self.steps += time;
    }

    /// The worker waited for the next batch.
    pub(crate) fn waited_for_data(&mut self, time: Duration) {
        self.steps += time;
        self.data_wait += time;
    }

    /// Time was spent on a member.
    pub(crate) fn spend(&mut self, role: Role, index: u32, seconds: f64) {
        *self.spent.entry((role, index)).or_default() += seconds.max(0.0);
    }

    /// The worker waited for a reply, which it may have requested long before. The wait is the last
    /// part of the reply's time. In order, that time is spent on the loader, on earlier steps, on a
    /// parameter server, and on the embedding worker.
    pub(crate) fn waited(&mut self, wait: Duration, of: &ReplyTime) {
        // A worker without a processor reads the request late. That time is its own, too.
        let own = of.reply.own_seconds + (of.took - of.reply.seconds).max(0.0);
        let mut left = wait.as_secs_f64();
        let seconds_of = |role: v1::Role| of.reply.spent.iter().find(|spent| spent.role() == role).copied();
        let (server, loader) = (seconds_of(v1::Role::Ps), seconds_of(v1::Role::Loader));
        self.spend(Role::EmbeddingWorker, of.embedding_worker, take(&mut left, own));
        if let Some(server) = server {
            self.spend(Role::Ps, server.index, take(&mut left, server.seconds));
        }
        let known: f64 = of.reply.spent.iter().map(|spent| spent.seconds).sum();
        take(&mut left, (of.reply.seconds - of.reply.own_seconds - known).max(0.0));
        let loader_seconds = loader.map_or(0.0, |loader| take(&mut left, loader.seconds));
        if let Some(loader) = loader {
            self.spend(Role::Loader, loader.index, loader_seconds);
        }
        let pieces = self.pieces.entry(of.embedding_worker).or_default();
        pieces.count += 1;
        pieces.own_seconds += own;
        pieces.loader_seconds += loader_seconds;
    }

    /// Moves the times to a report.
    pub(crate) fn write_to(self, progress: &mut v1::Progress) {
        progress.step_seconds = self.steps.as_secs_f64();
        progress.data_wait_seconds = self.data_wait.as_secs_f64();
        let spent = self.spent.into_iter();
        progress.spent = spent
            .map(|((role, index), seconds)| v1::Spent { role: v1::Role::from(role).into(), index, seconds })
            .collect();
        let pieces = self.pieces.into_iter();
        progress.pieces = pieces
            .map(|(embedding_worker, Pieces { count, own_seconds, loader_seconds })| v1::PieceTime {
                embedding_worker,
                pieces: count,
                seconds: own_seconds,
                loader_seconds,
            })
            .collect();
    }
}

/// Takes at most `most` of the seconds that are left.
fn take(left: &mut f64, most: f64) -> f64 {
    let taken = left.min(most).max(0.0);
    *left -= taken;
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reply after 1 s. The loader took .3 s, earlier steps .2 s, server 7 .3 s, and the
    /// embedding worker .1 s. It read the request after .1 s.
    fn reply() -> ReplyTime {
        let spent = |role: v1::Role, index, seconds| v1::Spent { role: role.into(), index, seconds };
        let spent = vec![spent(v1::Role::Loader, 1, 0.3), spent(v1::Role::Ps, 7, 0.3)];
        let reply = v1::Forwarded { seconds: 0.9, own_seconds: 0.1, spent, ..v1::Forwarded::default() };
        ReplyTime::new(2, Duration::from_secs(1), &reply)
    }

    fn spent_after(milliseconds: u64) -> Vec<(Role, u32, u32)> {
        let mut times = StepTimes::default();
        times.waited(Duration::from_millis(milliseconds), &reply());
        let rounded = |seconds: f64| (seconds * 1000.0).round() as u32;
        times.spent.into_iter().map(|((role, index), seconds)| (role, index, rounded(seconds))).collect()
    }

    #[test]
    fn a_wait_is_the_last_part_of_its_reply() {
        let (server, worker, loader) = ((Role::Ps, 7), (Role::EmbeddingWorker, 2), (Role::Loader, 1));
        let row = |(role, index), milliseconds| (role, index, milliseconds);
        assert_eq!(spent_after(1000), [row(server, 300), row(worker, 200), row(loader, 300)]);
        assert_eq!(spent_after(800), [row(server, 300), row(worker, 200), row(loader, 100)]);
        assert_eq!(spent_after(250), [row(server, 50), row(worker, 200), row(loader, 0)]);
        assert_eq!(spent_after(0), [row(server, 0), row(worker, 0), row(loader, 0)]);
    }

    #[test]
    fn a_report_has_the_pieces_of_each_embedding_worker() {
        let mut times = StepTimes::default();
        let of_another = ReplyTime { embedding_worker: 0, ..reply() };
        for (reply, wait) in [(&reply(), 1000), (&of_another, 0), (&reply(), 800)] {
            times.waited(Duration::from_millis(wait), reply);
        }
        let mut progress = v1::Progress::default();
        times.write_to(&mut progress);
        let milliseconds = |seconds: f64| (seconds * 1e3).round();
        let times = |time: &v1::PieceTime| (milliseconds(time.seconds), milliseconds(time.loader_seconds));
        let pieces = progress.pieces.iter().map(|time| (time.embedding_worker, time.pieces, times(time)));
        assert_eq!(pieces.collect::<Vec<_>>(), [(0, 1, (200.0, 0.0)), (2, 2, (400.0, 400.0))]);
    }

    #[test]
    fn a_report_has_the_sums_since_the_last_one() {
        let mut times = StepTimes::default();
        times.passed(Duration::from_millis(300));
        times.waited_for_data(Duration::from_millis(200));
        times.spend(Role::DenseWorker, 3, 0.25);
        times.spend(Role::DenseWorker, 3, 0.125);
        let mut progress = v1::Progress::default();
        times.write_to(&mut progress);
        let [spent] = progress.spent[..] else { panic!("{:?}", progress.spent) };
        assert_eq!((spent.role(), spent.index, spent.seconds), (v1::Role::DenseWorker, 3, 0.375));
        assert!((progress.step_seconds - 0.5).abs() < 1e-9 && (progress.data_wait_seconds - 0.2).abs() < 1e-9);
    }
}
