//! Chunks that loaders have leased and whose batches are not all trained.
//! If a loader or an embedding worker dies, any loader replays the chunks that it held. If a dense
//! worker dies in an evaluation, a loader replays the batches of its predictions. A replay reads
//! the same rows, and batches keep their numbers, so training does not depend on replays.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use rectrain_modes::{ChunkLease, GlobalStep};
use serde::{Deserialize, Serialize};

/// A chunk that a loader has leased.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Leased {
    /// For training. `skip` has the batches, and the pieces of the next batch, that an earlier run
    /// has trained.
    Train { lease: ChunkLease, skip: (u64, u32) },
    /// For the evaluation at this step.
    Evaluation { at_step: GlobalStep, chunk: u64, first_batch: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum ChunkKey {
    Train { epoch: u32, chunk: u64 },
    Evaluation { at_step: GlobalStep, chunk: u64 },
}

/// The batches and pieces of an evaluation that dense workers still have to predict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StillNeeded {
    /// All workers have predicted the batches before this one.
    pub(super) first_batch: u64,
    /// The pieces of each batch that belong to workers that have not finished.
    pub(super) pieces: Vec<Range<u32>>,
}

/// By the step of the evaluation, for all evaluations under way.
pub(super) type NeededByStep = BTreeMap<GlobalStep, StillNeeded>;

impl Leased {
    /// Whether the chunk may have the global batch `batch` of training, or one behind it. A chunk
    /// of an evaluation may always be needed.
    fn ends_after(&self, batch: u64) -> bool {
        match self {
            Self::Train { lease, .. } => lease.first_step.0 + lease.max_batches > batch,
            Self::Evaluation { .. } => true,
        }
    }

    /// Whether a dense worker may still need a batch of the chunk. A chunk has at most `batches`.
    fn is_needed(&self, needed: &NeededByStep, batches: u64) -> bool {
        match self {
            Self::Train { .. } => true,
            Self::Evaluation { at_step, first_batch, .. } => {
                needed.get(at_step).is_none_or(|of| first_batch + batches > of.first_batch)
            }
        }
    }

    /// The pieces to replay; `None`: all. Pieces that no dense worker fetches would fill the window
    /// of an embedding worker, which would then accept no more.
    fn pieces(&self, needed: &NeededByStep) -> Option<Vec<Range<u32>>> {
        match self {
            Self::Train { .. } => None,
            Self::Evaluation { at_step, .. } => needed.get(at_step).map(|of| of.pieces.clone()),
        }
    }

    fn key(&self) -> ChunkKey {
        match *self {
            Self::Train { lease: ChunkLease { epoch, chunk, .. }, .. } => ChunkKey::Train { epoch, chunk },
            Self::Evaluation { at_step, chunk, .. } => ChunkKey::Evaluation { at_step, chunk },
        }
    }
}

/// A chunk, or a part of one, to read and send again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Replay {
    pub(super) leased: Leased,
    /// Only the pieces of this embedding worker; `None`: all.
    pub(super) embedding_worker: Option<u32>,
    /// Only these pieces of each global batch; `None`: all.
    pub(super) pieces: Option<Vec<Range<u32>>>,
    /// Whether the chunk has to be reported, because its loader has not done so: it died, or it is
    /// slow.
    pub(super) report: bool,
    /// Whether the chunk's loader still reads it. Then another one takes this replay, and drops it
    /// once the chunk is reported.
    pub(super) is_second: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Chunk {
    leased: Leased,
    /// Loaders that may not have sent all of the chunk.
    loaders: BTreeSet<u32>,
    reported: bool,
}

/// The chunks in flight, and the replays to hand out.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct InFlightChunks {
    /// Batches of a chunk, at most.
    batches: u64,
    chunks: BTreeMap<ChunkKey, Chunk>,
    replays: VecDeque<Replay>,
}

impl InFlightChunks {
    /// No chunks. Each later chunk has at most `batches` batches.
    pub(super) fn new(batches: u64) -> Self {
        Self { batches, chunks: BTreeMap::new(), replays: VecDeque::new() }
    }

    /// Leases a chunk to `loader`, which reads and sends it.
    pub(super) fn lease_to(&mut self, leased: Leased, loader: u32) {
        let chunk = Chunk { leased, loaders: BTreeSet::from([loader]), reported: false };
        self.chunks.insert(leased.key(), chunk);
    }

    /// A loader has read and reported a chunk of the training data. The records of a stream's chunk
    /// end at `until`, also for a loader that replays it later.
    pub(super) fn mark_read(&mut self, epoch: u32, chunk: u64, until: Option<u64>) {
        let key = ChunkKey::Train { epoch, chunk };
        self.reported(key);
        if let Some(Leased::Train { lease, .. }) = self.chunks.get_mut(&key).map(|chunk| &mut chunk.leased) {
            lease.until = until;
        }
    }

    /// Whether a chunk of the training data was reported before.
    pub(super) fn was_read(&self, epoch: u32, chunk: u64) -> bool {
        self.chunks.get(&ChunkKey::Train { epoch, chunk }).is_some_and(|chunk| chunk.reported)
    }

    /// A loader has read and reported a chunk of an evaluation's data.
    pub(super) fn mark_evaluation_read(&mut self, at_step: GlobalStep, chunk: u64) {
        self.reported(ChunkKey::Evaluation { at_step, chunk });
    }

    fn reported(&mut self, place: ChunkKey) {
        if let Some(chunk) = self.chunks.get_mut(&place) {
            chunk.reported = true;
        }
    }

    /// Drops the chunks of the training data whose batches all lie before `batch`, which is the
    /// first one not trained.
    pub(super) fn drop_trained_before(&mut self, batch: u64) {
        self.chunks.retain(|_, chunk| chunk.leased.ends_after(batch));
    }

    /// Drops the chunks of an evaluation that is over.
    pub(super) fn drop_evaluation(&mut self, at_step: GlobalStep) {
        self.chunks.retain(|place, _| !matches!(place, ChunkKey::Evaluation { at_step: at, .. } if *at == at_step));
        self.replays.retain(|replay| !matches!(replay.leased, Leased::Evaluation { at_step: at, .. } if at == at_step));
    }

    /// Replays for an embedding worker that was replaced: its replacement is empty. Chunks not yet
    /// read will be sent to the replacement anyway. Returns the number of replays.
    pub(super) fn replay_for_embedding_worker(&mut self, index: u32, needed: &NeededByStep) -> usize {
        let (before, batches) = (self.replays.len(), self.batches);
        let lost = self.chunks.values().filter(|chunk| chunk.reported && chunk.leased.is_needed(needed, batches));
        self.replays.extend(lost.map(|chunk| Replay {
            leased: chunk.leased,
            embedding_worker: Some(index),
            pieces: chunk.leased.pieces(needed),
            report: false,
            is_second: false,
        }));
        self.replays.len() - before
    }

    /// Replays for a dense worker that was replaced: its replacement predicts `pieces` again.
    /// Chunks not yet read will be sent anyway. Returns the number of replays.
    pub(super) fn replay_predictions(&mut self, at_step: GlobalStep, pieces: &Range<u32>) -> usize {
        let before = self.replays.len();
        let is_of = |leased: &Leased| matches!(leased, Leased::Evaluation { at_step: at, .. } if *at == at_step);
        let lost = self.chunks.values().filter(|chunk| chunk.reported && is_of(&chunk.leased));
        self.replays.extend(lost.map(|chunk| Replay {
            leased: chunk.leased,
            embedding_worker: None,
            pieces: Some(vec![pieces.clone()]),
            report: false,
            is_second: false,
        }));
        self.replays.len() - before
    }

    /// Replays for a loader that was replaced. It is unknown how much of its chunks it had sent.
    /// Returns the number of replays.
    pub(super) fn replay_for_loader(&mut self, index: u32, needed: &NeededByStep) -> usize {
        let (before, batches) = (self.replays.len(), self.batches);
        for chunk in self.chunks.values_mut().filter(|chunk| chunk.loaders.contains(&index)) {
            chunk.loaders.remove(&index);
            if chunk.reported && !chunk.leased.is_needed(needed, batches) {
                continue;
            }
            let pieces = chunk.leased.pieces(needed);
            let report = !chunk.reported;
            let replay = Replay { leased: chunk.leased, embedding_worker: None, pieces, report, is_second: false };
            self.replays.push_back(replay);
        }
        self.replays.len() - before
    }

    /// The epoch and the number of the first chunk of the training data that no loader has
    /// reported.
    pub(super) fn first_unread(&self) -> Option<(u32, u64)> {
        self.chunks.iter().find_map(|(key, chunk)| match *key {
            ChunkKey::Train { epoch, chunk: number } if !chunk.reported => Some((epoch, number)),
            _ => None,
        })
    }

    /// Gives a chunk of the training data to a second loader, while its loader still reads it.
    /// Returns whether the chunk is unread, and has had one loader so far.
    pub(super) fn read_twice(&mut self, (epoch, chunk): (u32, u64)) -> bool {
        let key = ChunkKey::Train { epoch, chunk };
        let Some(chunk) = self.chunks.get(&key).filter(|chunk| !chunk.reported && chunk.loaders.len() == 1) else {
            return false;
        };
        if self.replays.iter().any(|replay| replay.leased.key() == key) {
            return false;
        }
        let replay =
            Replay { leased: chunk.leased, embedding_worker: None, pieces: None, report: true, is_second: true };
        self.replays.push_back(replay);
        true
    }

    /// The chunks of `loader` in the training data that have batches from `batch` on.
    pub(super) fn chunks_of(&self, loader: u32, batch: u64) -> usize {
        let reaches = |leased: &Leased| match leased {
            Leased::Train { lease, .. } => lease.first_step.0 + lease.max_batches > batch,
            Leased::Evaluation { .. } => false,
        };
        self.chunks.values().filter(|chunk| chunk.loaders.contains(&loader) && reaches(&chunk.leased)).count()
    }

    /// The number of loaders needed so that every loader stays that may not have sent all of a
    /// chunk. All batches before `fetched` were sent.
    pub(super) fn loaders_needed(&self, fetched: u64) -> u32 {
        let open = self.chunks.values().filter(|chunk| chunk.leased.ends_after(fetched));
        let last = open.filter_map(|chunk| chunk.loaders.last()).max();
        last.map_or(0, |last| last + 1)
    }

    /// Whether a replay may be waiting.
    pub(super) fn has_replays(&self) -> bool {
        !self.replays.is_empty()
    }

    /// The next chunk that `loader` replays, without the batches before `trained`.
    pub(super) fn next_replay(&mut self, loader: u32, trained: u64) -> Option<Replay> {
        self.drop_trained_before(trained);
        let chunks = &self.chunks;
        self.replays.retain(|replay| {
            chunks.get(&replay.leased.key()).is_some_and(|chunk| !(replay.is_second && chunk.reported))
        });
        let is_for_it = |replay: &Replay| {
            !replay.is_second || chunks.get(&replay.leased.key()).is_some_and(|chunk| !chunk.loaders.contains(&loader))
        };
        let place = self.replays.iter().position(is_for_it)?;
        let mut replay = self.replays.remove(place)?;
        if let Some(chunk) = self.chunks.get_mut(&replay.leased.key()) {
            chunk.loaders.insert(loader);
        }
        if let Leased::Train { lease, skip } = &mut replay.leased {
            *skip = (*skip).max((trained.saturating_sub(lease.first_step.0), 0));
        }
        Some(replay)
    }
}

#[cfg(test)]
mod tests {
    use rectrain_kinds::Start;

    use super::*;

    fn train(chunk: u64) -> Leased {
        let start = Start::Row(chunk * 240);
        let lease =
            ChunkLease { epoch: 0, chunk, start, until: None, first_step: GlobalStep(chunk * 10), max_batches: 10 };
        Leased::Train { lease, skip: (0, 0) }
    }

    fn replays(in_flight: &mut InFlightChunks, loader: u32, trained: u64) -> Vec<Replay> {
        std::iter::from_fn(|| in_flight.next_replay(loader, trained)).collect()
    }

    #[test]
    fn a_loader_is_needed_until_its_batches_are_fetched() {
        let mut in_flight = InFlightChunks::new(10);
        (0..4).for_each(|chunk| in_flight.lease_to(train(chunk), chunk as u32 % 2));
        // Chunk 3 has the batches 30 to 39.
        assert_eq!([0, 39, 40].map(|fetched| in_flight.loaders_needed(fetched)), [2, 2, 0]);
        in_flight.lease_to(Leased::Evaluation { at_step: GlobalStep(40), chunk: 0, first_batch: 0 }, 0);
        assert_eq!(in_flight.loaders_needed(40), 1);
    }

    #[test]
    fn an_embedding_worker_gets_its_pieces_of_untrained_chunks_again() {
        let mut in_flight = InFlightChunks::new(10);
        (0..4).for_each(|chunk| in_flight.lease_to(train(chunk), 0));
        (0..3).for_each(|chunk| in_flight.mark_read(0, chunk, None));
        assert_eq!(in_flight.replay_for_embedding_worker(1, &NeededByStep::new()), 3);
        let found = replays(&mut in_flight, 0, 14);
        let chunk = |replay: &Replay| match replay.leased {
            Leased::Train { lease, skip } => (lease.chunk, skip),
            Leased::Evaluation { .. } => panic!("nothing is evaluated"),
        };
        // Chunk 0 is trained, chunk 1 in part. Chunk 3 will be sent when it has been read.
        assert_eq!(found.iter().map(chunk).collect::<Vec<_>>(), [(1, (4, 0)), (2, (0, 0))]);
        assert!(found.iter().all(|replay| replay.embedding_worker == Some(1) && !replay.report));
    }

    #[test]
    fn a_chunk_of_a_stream_is_replayed_up_to_the_end_that_was_reported() {
        let mut in_flight = InFlightChunks::new(1);
        let start = Start::At(rectrain_kinds::Position::new(3, 100));
        let lease =
            ChunkLease { epoch: 0, chunk: 0, start, until: Some(900), first_step: GlobalStep(0), max_batches: 1 };
        in_flight.lease_to(Leased::Train { lease, skip: (0, 0) }, 0);
        in_flight.mark_read(0, 0, Some(150));
        in_flight.replay_for_loader(0, &NeededByStep::new());
        let until = |replay: &Replay| match replay.leased {
            Leased::Train { lease, .. } => lease.until,
            Leased::Evaluation { .. } => None,
        };
        assert_eq!(replays(&mut in_flight, 1, 0).iter().map(until).collect::<Vec<_>>(), [Some(150)]);
    }

    #[test]
    fn chunks_of_a_dead_loader_are_replayed_whole_and_reported() {
        let mut in_flight = InFlightChunks::new(10);
        let needed = NeededByStep::new();
        in_flight.lease_to(train(0), 0);
        in_flight.lease_to(train(1), 1);
        in_flight.lease_to(train(2), 0);
        in_flight.mark_read(0, 0, None);
        assert_eq!(in_flight.replay_for_loader(0, &needed), 2);
        let found = replays(&mut in_flight, 1, 0);
        assert_eq!(found.iter().map(|replay| replay.report).collect::<Vec<_>>(), [false, true]);
        assert!(found.iter().all(|replay| replay.embedding_worker.is_none()));
        // Loader 1 has both chunks now, besides its own.
        let lost = [0, 1].map(|loader| in_flight.replay_for_loader(loader, &needed));
        assert_eq!(lost, [0, 3]);
    }

    #[test]
    fn a_second_loader_reads_a_chunk_that_is_late() {
        let mut in_flight = InFlightChunks::new(10);
        (0..3).for_each(|chunk| in_flight.lease_to(train(chunk), 0));
        in_flight.mark_read(0, 0, None);
        assert_eq!(in_flight.first_unread(), Some((0, 1)));
        assert!(!in_flight.read_twice((0, 0)), "it is read");
        assert!(in_flight.read_twice((0, 1)) && !in_flight.read_twice((0, 1)), "a second loader, and no third");
        assert_eq!(in_flight.next_replay(0, 0), None, "its own loader reads it already");
        let replay = in_flight.next_replay(1, 14).unwrap();
        let Leased::Train { lease, skip } = replay.leased else { panic!("nothing is evaluated") };
        assert_eq!((lease.chunk, skip, replay.report, replay.is_second), (1, (4, 0), true, true));
        assert!(!in_flight.read_twice((0, 1)), "two loaders have it");
        // Chunk 2 is read before the second loader asks for it.
        assert!(in_flight.read_twice((0, 2)));
        in_flight.mark_read(0, 2, None);
        assert_eq!((in_flight.next_replay(1, 14), in_flight.has_replays()), (None, false));
    }

    #[test]
    fn a_chunk_with_two_loaders_survives_the_death_of_either() {
        for dead in [0, 1] {
            let mut in_flight = InFlightChunks::new(10);
            in_flight.lease_to(train(0), 0);
            in_flight.read_twice((0, 0));
            in_flight.next_replay(1, 0).unwrap();
            assert_eq!(in_flight.replay_for_loader(dead, &NeededByStep::new()), 1);
            let again = in_flight.next_replay(2, 0).unwrap();
            assert!(again.report && !again.is_second);
        }
    }

    #[test]
    fn read_chunks_are_replayed_for_lost_predictions() {
        let mut in_flight = InFlightChunks::new(10);
        let [before, at_step] = [GlobalStep(4), GlobalStep(5)];
        in_flight.lease_to(train(0), 0);
        in_flight.mark_read(0, 0, None);
        for (at_step, chunk) in [(before, 0), (at_step, 0), (at_step, 1)] {
            in_flight.lease_to(Leased::Evaluation { at_step, chunk, first_batch: 10 * chunk }, 0);
        }
        in_flight.mark_evaluation_read(before, 0);
        in_flight.mark_evaluation_read(at_step, 0);
        assert_eq!(in_flight.replay_predictions(at_step, &(2..4)), 1);
        let found = replays(&mut in_flight, 1, 0);
        let leased = Leased::Evaluation { at_step, chunk: 0, first_batch: 0 };
        let pieces = Some(Vec::from([Range { start: 2, end: 4 }]));
        assert_eq!(found, [Replay { leased, embedding_worker: None, pieces, report: false, is_second: false }]);
    }

    #[test]
    fn the_chunks_of_a_finished_evaluation_are_forgotten() {
        let mut in_flight = InFlightChunks::new(10);
        let (at_step, needed) = (GlobalStep(5), NeededByStep::new());
        in_flight.lease_to(Leased::Evaluation { at_step, chunk: 0, first_batch: 0 }, 0);
        in_flight.mark_evaluation_read(at_step, 0);
        in_flight.drop_trained_before(u64::MAX);
        assert_eq!(in_flight.replay_for_embedding_worker(0, &needed), 1);
        in_flight.drop_evaluation(at_step);
        assert_eq!((in_flight.next_replay(0, 0), in_flight.replay_for_embedding_worker(0, &needed)), (None, 0));
    }

    #[test]
    fn predicted_batches_are_not_replayed() {
        let (at_step, chunks) = (GlobalStep(5), 100);
        let leased = || {
            let mut in_flight = InFlightChunks::new(10);
            for chunk in 0..chunks {
                in_flight.lease_to(Leased::Evaluation { at_step, chunk, first_batch: 10 * chunk }, 0);
                in_flight.mark_evaluation_read(at_step, chunk);
            }
            in_flight
        };
        // Batch 969 is in chunk 96, and one of three dense workers has finished.
        let needed = NeededByStep::from([(at_step, StillNeeded { first_batch: 969, pieces: vec![0..2, 4..6] })]);
        let (mut of_worker, mut of_loader) = (leased(), leased());
        assert_eq!(
            (of_worker.replay_for_embedding_worker(0, &needed), of_loader.replay_for_loader(0, &needed)),
            (4, 4)
        );
        let pieces = |in_flight: &mut InFlightChunks| in_flight.next_replay(1, 0).and_then(|replay| replay.pieces);
        assert_eq!([pieces(&mut of_worker), pieces(&mut of_loader)], [Some(vec![0..2, 4..6]), Some(vec![0..2, 4..6])]);
        let mut of_loader = leased();
        of_loader.replay_for_loader(0, &needed);
        assert_eq!((of_loader.loaders_needed(0), leased().replay_predictions(at_step, &(0..1))), (0, chunks as usize));
        // A chunk that was never reported is replayed to be reported.
        let mut in_flight = leased();
        in_flight.lease_to(Leased::Evaluation { at_step, chunk: 0, first_batch: 0 }, 0);
        assert_eq!(in_flight.replay_for_loader(0, &needed), 5);
    }
}
