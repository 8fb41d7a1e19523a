//! Chunks of data that loaders were given and whose batches are not all trained: what a loader or an embedding worker that has died
//! held of them is read and sent again, by any loader; so is what a dense worker has predicted and not told. Reading a chunk again gives the same rows, and batches keep their places, so
//! that nobody who trains can tell.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use rectrain_modes::{ChunkLease, GlobalStep};
use serde::{Deserialize, Serialize};

/// A chunk on its way from the data to the dense workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Given {
    /// For training; `skip`: batches, and pieces of the batch after those, that an earlier run has trained.
    Train { lease: ChunkLease, skip: (u64, u32) },
    /// For the evaluation at this step.
    Evaluation { at_step: GlobalStep, chunk: u64, first_batch: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Place {
    Train { epoch: u32, chunk: u64 },
    Evaluation { at_step: GlobalStep, chunk: u64 },
}

/// How far dense workers are with an evaluation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Predicted {
    /// Batches before this one are asked for by nobody.
    pub(super) before: u64,
    /// Of each batch, the pieces of those that have not predicted all of theirs.
    pub(super) asked: Vec<Range<u32>>,
}

/// By the step of the evaluation; of those under way.
pub(super) type AllPredicted = BTreeMap<GlobalStep, Predicted>;

impl Given {
    /// Whether somebody may still ask for something of it; `batches`: those of a chunk, at most.
    fn is_needed(&self, predicted: &AllPredicted, batches: u64) -> bool {
        match self {
            Self::Train { .. } => true,
            Self::Evaluation { at_step, first_batch, .. } => {
                predicted.get(at_step).is_none_or(|of| first_batch + batches > of.before)
            }
        }
    }

    /// The pieces that are asked for; none: all. Whoever is sent others, and is asked for none of them, takes none of what follows.
    fn pieces(&self, predicted: &AllPredicted) -> Option<Vec<Range<u32>>> {
        match self {
            Self::Train { .. } => None,
            Self::Evaluation { at_step, .. } => predicted.get(at_step).map(|of| of.asked.clone()),
        }
    }

    fn place(&self) -> Place {
        match *self {
            Self::Train { lease: ChunkLease { epoch, chunk, .. }, .. } => Place::Train { epoch, chunk },
            Self::Evaluation { at_step, chunk, .. } => Place::Evaluation { at_step, chunk },
        }
    }
}

/// What is to be read and sent again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Repeat {
    pub(super) given: Given,
    /// Only the pieces of this embedding worker; none: all.
    pub(super) embedding_worker: Option<u32>,
    /// Only these pieces of each global batch; none: all.
    pub(super) pieces: Option<Vec<Range<u32>>>,
    /// The loader that was to report it has not.
    pub(super) report: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Chunk {
    given: Given,
    /// Loaders that may not have sent all of it.
    loaders: BTreeSet<u32>,
    reported: bool,
}

/// See the module's text.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Outstanding {
    /// A chunk has so many at most.
    batches: u64,
    chunks: BTreeMap<Place, Chunk>,
    repeats: VecDeque<Repeat>,
}

impl Outstanding {
    /// Of chunks of so many batches at most.
    pub(super) fn of_chunks(batches: u64) -> Self {
        Self { batches, chunks: BTreeMap::new(), repeats: VecDeque::new() }
    }

    /// `loader` reads and sends this chunk.
    pub(super) fn give(&mut self, given: Given, loader: u32) {
        let chunk = Chunk { given, loaders: BTreeSet::from([loader]), reported: false };
        self.chunks.insert(given.place(), chunk);
    }

    /// A chunk of the training data was read.
    pub(super) fn read(&mut self, epoch: u32, chunk: u64) {
        self.reported(Place::Train { epoch, chunk });
    }

    /// Whether this chunk of the training data was reported before.
    pub(super) fn was_read(&self, epoch: u32, chunk: u64) -> bool {
        self.chunks.get(&Place::Train { epoch, chunk }).is_some_and(|chunk| chunk.reported)
    }

    /// A chunk of the data of an evaluation was read.
    pub(super) fn read_for_evaluation(&mut self, at_step: GlobalStep, chunk: u64) {
        self.reported(Place::Evaluation { at_step, chunk });
    }

    fn reported(&mut self, place: Place) {
        if let Some(chunk) = self.chunks.get_mut(&place) {
            chunk.reported = true;
        }
    }

    /// All batches of the training data before this one are trained.
    pub(super) fn trained_before(&mut self, batch: u64) {
        self.chunks.retain(|_, chunk| match chunk.given {
            Given::Train { lease, .. } => lease.first_step.0 + lease.max_batches > batch,
            Given::Evaluation { .. } => true,
        });
    }

    /// An evaluation is over.
    pub(super) fn evaluated(&mut self, at_step: GlobalStep) {
        self.chunks.retain(|place, _| !matches!(place, Place::Evaluation { at_step: at, .. } if *at == at_step));
        self.repeats.retain(|repeat| !matches!(repeat.given, Given::Evaluation { at_step: at, .. } if at == at_step));
    }

    /// A successor of this embedding worker is there, and holds nothing. What is not read yet will be sent to it anyway.
    pub(super) fn embedding_worker_lost(&mut self, index: u32, predicted: &AllPredicted) -> usize {
        let (before, batches) = (self.repeats.len(), self.batches);
        let lost = self.chunks.values().filter(|chunk| chunk.reported && chunk.given.is_needed(predicted, batches));
        self.repeats.extend(lost.map(|chunk| Repeat {
            given: chunk.given,
            embedding_worker: Some(index),
            pieces: chunk.given.pieces(predicted),
            report: false,
        }));
        self.repeats.len() - before
    }

    /// A successor of a dense worker is there, which predicts these pieces again. What is not read yet will be sent anyway.
    pub(super) fn predictions_lost(&mut self, at_step: GlobalStep, pieces: &Range<u32>) -> usize {
        let before = self.repeats.len();
        let is_of = |given: &Given| matches!(given, Given::Evaluation { at_step: at, .. } if *at == at_step);
        let lost = self.chunks.values().filter(|chunk| chunk.reported && is_of(&chunk.given));
        self.repeats.extend(lost.map(|chunk| Repeat {
            given: chunk.given,
            embedding_worker: None,
            pieces: Some(vec![pieces.clone()]),
            report: false,
        }));
        self.repeats.len() - before
    }

    /// A successor of this loader is there. Nobody knows how much of its chunks it had sent.
    pub(super) fn loader_lost(&mut self, index: u32, predicted: &AllPredicted) -> usize {
        let (before, batches) = (self.repeats.len(), self.batches);
        for chunk in self.chunks.values_mut().filter(|chunk| chunk.loaders.contains(&index)) {
            chunk.loaders.remove(&index);
            if chunk.reported && !chunk.given.is_needed(predicted, batches) {
                continue;
            }
            let pieces = chunk.given.pieces(predicted);
            let repeat = Repeat { given: chunk.given, embedding_worker: None, pieces, report: !chunk.reported };
            self.repeats.push_back(repeat);
        }
        self.repeats.len() - before
    }

    /// How many loaders there have to be, so that all are there who may not have sent all of something.
    pub(super) fn loaders_needed(&self) -> u32 {
        let last = self.chunks.values().filter_map(|chunk| chunk.loaders.last()).max();
        last.map_or(0, |last| last + 1)
    }

    /// Whether there may be something to read again.
    pub(super) fn has_repeats(&self) -> bool {
        !self.repeats.is_empty()
    }

    /// What `loader` is to read and send again; batches before `trained` are left out.
    pub(super) fn repeat(&mut self, loader: u32, trained: u64) -> Option<Repeat> {
        self.trained_before(trained);
        while let Some(mut repeat) = self.repeats.pop_front() {
            let Some(chunk) = self.chunks.get_mut(&repeat.given.place()) else { continue };
            chunk.loaders.insert(loader);
            if let Given::Train { lease, skip } = &mut repeat.given {
                *skip = (*skip).max((trained.saturating_sub(lease.first_step.0), 0));
            }
            return Some(repeat);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn train(chunk: u64) -> Given {
        let lease = ChunkLease { epoch: 0, chunk, first_step: GlobalStep(chunk * 10), max_batches: 10 };
        Given::Train { lease, skip: (0, 0) }
    }

    fn repeats(outstanding: &mut Outstanding, loader: u32, trained: u64) -> Vec<Repeat> {
        std::iter::from_fn(|| outstanding.repeat(loader, trained)).collect()
    }

    #[test]
    fn an_embedding_worker_gets_its_pieces_of_what_was_read_and_not_trained() {
        let mut outstanding = Outstanding::of_chunks(10);
        (0..4).for_each(|chunk| outstanding.give(train(chunk), 0));
        (0..3).for_each(|chunk| outstanding.read(0, chunk));
        assert_eq!(outstanding.embedding_worker_lost(1, &AllPredicted::new()), 3);
        let found = repeats(&mut outstanding, 0, 14);
        let chunk = |repeat: &Repeat| match repeat.given {
            Given::Train { lease, skip } => (lease.chunk, skip),
            Given::Evaluation { .. } => panic!("nothing is evaluated"),
        };
        // Chunk 0 is trained, chunk 1 in part, and chunk 3 will be sent when it has been read.
        assert_eq!(found.iter().map(chunk).collect::<Vec<_>>(), [(1, (4, 0)), (2, (0, 0))]);
        assert!(found.iter().all(|repeat| repeat.embedding_worker == Some(1) && !repeat.report));
    }

    #[test]
    fn chunks_of_a_loader_that_died_are_sent_again_whole_and_reported_if_they_were_not() {
        let mut outstanding = Outstanding::of_chunks(10);
        let predicted = AllPredicted::new();
        outstanding.give(train(0), 0);
        outstanding.give(train(1), 1);
        outstanding.give(train(2), 0);
        outstanding.read(0, 0);
        assert_eq!(outstanding.loader_lost(0, &predicted), 2);
        let found = repeats(&mut outstanding, 1, 0);
        assert_eq!(found.iter().map(|repeat| repeat.report).collect::<Vec<_>>(), [false, true]);
        assert!(found.iter().all(|repeat| repeat.embedding_worker.is_none()));
        // Now they are the other one's.
        let lost = [0, 1].map(|loader| outstanding.loader_lost(loader, &predicted));
        assert_eq!(lost, [0, 3]);
    }

    #[test]
    fn what_a_dense_worker_had_to_predict_is_sent_again_as_far_as_it_was_read() {
        let mut outstanding = Outstanding::of_chunks(10);
        let [before, at_step] = [GlobalStep(4), GlobalStep(5)];
        outstanding.give(train(0), 0);
        outstanding.read(0, 0);
        for (at_step, chunk) in [(before, 0), (at_step, 0), (at_step, 1)] {
            outstanding.give(Given::Evaluation { at_step, chunk, first_batch: 10 * chunk }, 0);
        }
        outstanding.read_for_evaluation(before, 0);
        outstanding.read_for_evaluation(at_step, 0);
        assert_eq!(outstanding.predictions_lost(at_step, &(2..4)), 1);
        let found = repeats(&mut outstanding, 1, 0);
        let given = Given::Evaluation { at_step, chunk: 0, first_batch: 0 };
        let pieces = Some(Vec::from([Range { start: 2, end: 4 }]));
        assert_eq!(found, [Repeat { given, embedding_worker: None, pieces, report: false }]);
    }

    #[test]
    fn what_an_evaluation_needed_is_forgotten_with_it() {
        let mut outstanding = Outstanding::of_chunks(10);
        let (at_step, predicted) = (GlobalStep(5), AllPredicted::new());
        outstanding.give(Given::Evaluation { at_step, chunk: 0, first_batch: 0 }, 0);
        outstanding.read_for_evaluation(at_step, 0);
        outstanding.trained_before(u64::MAX);
        assert_eq!(outstanding.embedding_worker_lost(0, &predicted), 1);
        outstanding.evaluated(at_step);
        assert_eq!((outstanding.repeat(0, 0), outstanding.embedding_worker_lost(0, &predicted)), (None, 0));
    }

    #[test]
    fn what_all_have_predicted_is_sent_to_nobodys_successor() {
        let (at_step, chunks) = (GlobalStep(5), 100);
        let given = || {
            let mut outstanding = Outstanding::of_chunks(10);
            for chunk in 0..chunks {
                outstanding.give(Given::Evaluation { at_step, chunk, first_batch: 10 * chunk }, 0);
                outstanding.read_for_evaluation(at_step, chunk);
            }
            outstanding
        };
        // Batch 969 is of chunk 96, and one of three dense workers is done.
        let predicted = AllPredicted::from([(at_step, Predicted { before: 969, asked: vec![0..2, 4..6] })]);
        let (mut of_worker, mut of_loader) = (given(), given());
        assert_eq!((of_worker.embedding_worker_lost(0, &predicted), of_loader.loader_lost(0, &predicted)), (4, 4));
        let pieces = |outstanding: &mut Outstanding| outstanding.repeat(1, 0).and_then(|repeat| repeat.pieces);
        assert_eq!([pieces(&mut of_worker), pieces(&mut of_loader)], [Some(vec![0..2, 4..6]), Some(vec![0..2, 4..6])]);
        let mut of_loader = given();
        of_loader.loader_lost(0, &predicted);
        assert_eq!((of_loader.loaders_needed(), given().predictions_lost(at_step, &(0..1))), (0, chunks as usize));
        // What was never reported has to be.
        let mut outstanding = given();
        outstanding.give(Given::Evaluation { at_step, chunk: 0, first_batch: 0 }, 0);
        assert_eq!(outstanding.loader_lost(0, &predicted), 5);
    }
}
