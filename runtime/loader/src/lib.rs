//! The loader: leases chunks of data from the coordinator, reads them, cuts them into global batches and each of those into
//! pieces (local batches), and puts every piece with its ids, duplicates removed, at an embedding worker (Persia §4.1). It only
//! calls others.

use std::collections::BTreeMap;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::{OptionFuture, try_join_all};
use futures::stream::FuturesUnordered;
use rectrain_data::{Batch, ChunkReader, Dataset, ReadPlan, SourceConfig};
use rectrain_modes::GlobalStep;
use rectrain_proto::v1;
use rectrain_proto::v1::repeat_reply::Repeat;
use rectrain_wire::Tensor;
use rectrain_wire::ids::{Scratch, UniqueIds};
use tokio::sync::{OnceCell, mpsc};

use rectrain_protocol::batch::{BatchKey, BatchPosition};
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::coordinator_channel::CoordinatorChannel;
use rectrain_protocol::deadline::{CALL_DEADLINE, WHOLE_JOB};
use rectrain_protocol::embedding_workers::EmbeddingWorkers;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::metrics::LoaderMetrics;
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::round_robin::{Piece, Turns};

/// How often the coordinator is told that a chunk is being read that takes longer than this.
const TELL_EVERY: Duration = Duration::from_secs(5);
/// Chunks read and not yet sent.
const CHUNKS_AHEAD: usize = 1;

/// Whom a loader calls.
#[derive(Clone)]
pub struct LoaderPeers {
    pub coordinator: CoordinatorChannel,
    pub embedding_workers: Arc<EmbeddingWorkers>,
}

/// See the module's text.
pub struct Loader {
    plan: Arc<JobPlan>,
    index: u32,
    peers: LoaderPeers,
    metrics: LoaderMetrics,
    datasets: Datasets,
    /// The coordinator knows what files were found, and has refused none.
    has_told_files: OnceCell<()>,
}

/// The data set of each part, opened when it is first wanted and kept: what one reader has counted, the others know.
#[derive(Default)]
struct Datasets {
    train: OnceCell<Dataset>,
    test: OnceCell<Dataset>,
}

impl Datasets {
    async fn train(&self, plan: &JobPlan) -> Result<Dataset, RoleError> {
        let dataset = self.train.get_or_try_init(|| open(plan, &plan.train)).await?;
        Ok(dataset.clone())
    }

    /// `test` is the plan's.
    async fn test(&self, plan: &JobPlan, test: &SourceConfig) -> Result<Dataset, RoleError> {
        let dataset = self.test.get_or_try_init(|| self.open_test(plan, test)).await?;
        Ok(dataset.clone())
    }

    /// Which files the paths of either part find is known only here, and so whether a file is in both.
    async fn open_test(&self, plan: &JobPlan, test: &SourceConfig) -> Result<Dataset, RoleError> {
        let (train, test) = (self.train(plan).await?, open(plan, test).await?);
        Ok(blocking("comparison of the files", move || test.refuse_files_of(&train).map(|()| test)).await??)
    }
}

/// Opening reads headers and lists objects, so it may wait for disks and networks.
async fn open(plan: &JobPlan, source: &SourceConfig) -> Result<Dataset, RoleError> {
    let (source, schema) = (source.clone(), plan.schema.clone());
    Ok(blocking("opening of the data", move || Dataset::open(source, schema)).await??)
}

/// What `reading` gives. Meanwhile it is told now and then, if it gets on: if `passed` has risen.
async fn telling<T, Telling: Future<Output = Result<(), RoleError>>>(
    reading: impl Future<Output = T>,
    every: Duration,
    passed: impl Fn() -> u64,
    tell: impl Fn() -> Telling,
) -> Result<T, RoleError> {
    let mut reading = pin!(reading);
    let mut before = passed();
    loop {
        if let Ok(read) = tokio::time::timeout(every, &mut reading).await {
            return Ok(read);
        }
        let now = passed();
        if now > before {
            tell().await?;
        }
        before = now;
    }
}

/// Rows on their way to the embedding workers: batch `n` of them is the one at `first.after(n)`.
struct ReadChunk {
    first: BatchPosition,
    max_batches: u64,
    /// Trained before, and not sent: batches, and pieces of the batch after those.
    skip: (u64, u32),
    only: Only,
    turns: Turns,
    rows: Batch,
}

/// The pieces of a chunk that are sent.
#[derive(Clone, Default)]
struct Only {
    /// This embedding worker's; none: all.
    embedding_worker: Option<u32>,
    /// These of each global batch; none: all.
    pieces: Vec<Range<u32>>,
}

impl Only {
    fn of(reply: &v1::RepeatReply) -> Self {
        let pieces = reply.pieces.iter().map(|range| range.start..range.end).collect();
        Self { embedding_worker: reply.embedding_worker, pieces }
    }

    fn has(&self, piece: &Piece) -> bool {
        self.embedding_worker.is_none_or(|only| piece.embedding_worker == only as usize)
            && (self.pieces.is_empty() || self.pieces.iter().any(|only| only.contains(&piece.key.piece)))
    }
}

/// What was lost: the pieces of an embedding worker, or of dense workers.
type Lost = (Option<u32>, Vec<(u32, u32)>);

/// Chunks of an evaluation that are to be read and sent again. All of the test data may be, so those of one loss are sent one at a time, in the order
/// of the data; and besides, where the next one is not behind one that is being sent, that one: what that one waits for may be in it. Those of another
/// loss wait for none of them.
#[derive(Default)]
struct EvaluationRepeats {
    /// By loss, first batch, and a number of its own.
    waiting: BTreeMap<(Lost, u64, u64), v1::RepeatReply>,
    /// The loss and the first batch of those that are being sent, by their numbers.
    sending: BTreeMap<u64, (Lost, u64)>,
    at_step: u64,
    added: u64,
    /// Behind a chunk that was sent.
    reader: Option<ChunkReader>,
}

impl EvaluationRepeats {
    /// Takes one in; says whether it is of another evaluation than those before, which are forgotten.
    fn add(&mut self, (at_step, first_batch): (u64, u64), reply: v1::RepeatReply) -> bool {
        let is_another = at_step > self.at_step;
        if is_another {
            self.waiting.clear();
            self.sending.clear();
            self.at_step = at_step;
        }
        self.added += 1;
        let pieces = reply.pieces.iter().map(|range| (range.start, range.end)).collect();
        self.waiting.insert(((reply.embedding_worker, pieces), first_batch, self.added), reply);
        is_another
    }

    /// The one to be sent now, if one is.
    fn next(&mut self) -> Option<(u64, v1::RepeatReply, Option<ChunkReader>)> {
        let is_behind =
            |lost: &Lost, first_batch: u64| self.sending.values().any(|(of, sent)| of == lost && *sent < first_batch);
        // Those of a loss stand together, the first one first.
        let next = self.waiting.keys().find(|(lost, first_batch, _)| !is_behind(lost, *first_batch))?.clone();
        let reply = self.waiting.remove(&next)?;
        let (lost, first_batch, number) = next;
        self.sending.insert(number, (lost, first_batch));
        Some((number, reply, self.reader.take()))
    }

    fn ended(&mut self, number: u64, reader: Option<ChunkReader>) {
        self.sending.remove(&number);
        self.reader = reader;
    }
}

impl ReadChunk {
    fn of(lease: &v1::ChunkLease, only: Only, rows: Batch) -> Result<Self, RoleError> {
        let first = BatchPosition::Train(lease.first_step);
        let skip = (lease.skip_batches, lease.skip_pieces);
        let turns = Turns::read("lease", &lease.turns)?;
        Ok(Self { first, max_batches: lease.max_batches, skip, only, turns, rows })
    }

    fn for_evaluation(lease: &v1::EvaluationChunk, only: Only, rows: Batch) -> Result<Self, RoleError> {
        let first = BatchPosition::Evaluation { at_step: GlobalStep(lease.at_step), number: lease.first_batch };
        let turns = Turns::read("evaluation_lease", &lease.turns)?;
        Ok(Self { first, max_batches: u64::MAX, skip: (0, 0), only, turns, rows })
    }
}

impl Loader {
    pub fn new(plan: Arc<JobPlan>, index: u32, peers: LoaderPeers, metrics: LoaderMetrics) -> Self {
        Self { plan, index, peers, metrics, datasets: Datasets::default(), has_told_files: OnceCell::new() }
    }

    /// Loads until the coordinator has no more leases, for training and for evaluation.
    pub async fn run(self) -> Result<(), RoleError> {
        let loader = Arc::new(self);
        let training = loader.train();
        let evaluating = loader.evaluate();
        let repeating = loader.repeat_what_was_lost();
        let looking = Box::pin(loader.look_at_test_data());
        let repeating = Box::pin(repeating);
        futures::future::try_join4(training, evaluating, repeating, looking).await.map(|_| ())
    }

    async fn train(&self) -> Result<(), RoleError> {
        let (chunks, received) = mpsc::channel(CHUNKS_AHEAD);
        futures::future::try_join(self.read_training_chunks(chunks), self.send_chunks(received)).await.map(|_| ())
    }

    async fn evaluate(&self) -> Result<(), RoleError> {
        let Some(test) = &self.plan.test else { return Ok(()) };
        let (chunks, received) = mpsc::channel(CHUNKS_AHEAD);
        futures::future::try_join(self.read_evaluation_chunks(test, chunks), self.send_chunks(received))
            .await
            .map(|_| ())
    }

    async fn read_training_chunks(&self, chunks: mpsc::Sender<ReadChunk>) -> Result<(), RoleError> {
        let dataset = self.train_data().await?;
        let mut reader: Option<(u32, ChunkReader)> = None;
        while let Some(lease) = self.lease().await? {
            let (epoch, current) = match reader.take() {
                Some((epoch, current)) if epoch == lease.epoch => (epoch, current),
                _ => (lease.epoch, dataset.reader(read_plan(&self.plan, self.plan.shuffle, lease.epoch))?),
            };
            let (current, rows, skipped) = self.read(current, lease.chunk).await?;
            reader = Some((epoch, current));
            self.report(&lease, rows.as_ref(), skipped).await?;
            let Some(rows) = rows else { continue };
            if chunks.send(ReadChunk::of(&lease, Only::default(), rows)?).await.is_err() {
                break;
            }
        }
        Ok(())
    }

    async fn read_evaluation_chunks(
        &self,
        test: &SourceConfig,
        chunks: mpsc::Sender<ReadChunk>,
    ) -> Result<(), RoleError> {
        let dataset = self.test_data(test).await?;
        let mut reader: Option<ChunkReader> = None;
        while let Some(lease) = self.evaluation_lease().await? {
            let current = match reader.take() {
                Some(current) => current,
                None => dataset.reader(read_plan(&self.plan, None, 0))?,
            };
            let (current, rows, skipped) = self.read(current, lease.chunk).await?;
            reader = Some(current);
            self.report_for_evaluation(&lease, rows.as_ref(), skipped).await?;
            let Some(rows) = rows else { continue };
            if chunks.send(ReadChunk::for_evaluation(&lease, Only::default(), rows)?).await.is_err() {
                break;
            }
        }
        Ok(())
    }

    async fn report(&self, lease: &v1::ChunkLease, rows: Option<&Batch>, skipped_rows: u64) -> Result<(), RoleError> {
        let report = v1::ChunkReport {
            loader: self.index,
            epoch: lease.epoch,
            chunk: lease.chunk,
            rows: rows.map_or(0, |rows| rows.samples as u64),
            label_sum: rows.map_or(0.0, Batch::label_sum),
            skipped_rows,
        };
        let (reported, _) = self.peers.coordinator.call(report, Vec::new(), CALL_DEADLINE).await?;
        self.peers.embedding_workers.follow(reported.embedding_worker_successions).await
    }

    async fn report_for_evaluation(
        &self,
        lease: &v1::EvaluationChunk,
        rows: Option<&Batch>,
        skipped_rows: u64,
    ) -> Result<(), RoleError> {
        let report = v1::EvaluationChunkReport {
            loader: self.index,
            at_step: lease.at_step,
            chunk: lease.chunk,
            rows: rows.map_or(0, |rows| rows.samples as u64),
            skipped_rows,
        };
        let (reported, _) = self.peers.coordinator.call(report, Vec::new(), CALL_DEADLINE).await?;
        self.peers.embedding_workers.follow(reported.embedding_worker_successions).await
    }

    /// Reads and sends again what embedding workers or loaders that have died held. None that is trained waits for another: what one waits for
    /// may be trained only after another has been sent, and there are few. Test data is much: see [`EvaluationRepeats`].
    async fn repeat_what_was_lost(&self) -> Result<(), RoleError> {
        let (mut training, mut evaluating) = (FuturesUnordered::new(), FuturesUnordered::new());
        let mut evaluation = EvaluationRepeats::default();
        let mut asking = Some(Box::pin(self.ask_what_was_lost()));
        loop {
            while let Some((number, reply, reader)) = evaluation.next() {
                evaluating.push(self.repeat_for_evaluation(number, reply, reader));
            }
            // Once nothing more will be lost it goes on as one that leaves: others wait for what it has taken over.
            tokio::select! {
                Some(asked) = OptionFuture::from(asking.as_mut()) => {
                    let Some(reply) = asked? else {
                        asking = None;
                        continue;
                    };
                    match &reply.repeat {
                        Some(Repeat::Evaluation(lease)) => {
                            let place = (lease.at_step, lease.first_batch);
                            if evaluation.add(place, reply) {
                                // Nobody asks for anything of the evaluation before.
                                evaluating.clear();
                            }
                        }
                        _ => training.push(self.repeat(reply)),
                    }
                    asking = Some(Box::pin(self.ask_what_was_lost()));
                }
                Some(repeated) = training.next() => repeated?,
                Some(repeated) = evaluating.next() => {
                    let (number, reader) = repeated?;
                    evaluation.ended(number, reader);
                }
                else => return Ok(()),
            }
        }
    }

    /// None, once training has ended.
    async fn ask_what_was_lost(&self) -> Result<Option<v1::RepeatReply>, RoleError> {
        loop {
            let request = v1::RepeatRequest { loader: self.index };
            let (reply, _) = self.peers.coordinator.call(request, Vec::new(), CALL_DEADLINE).await?;
            match reply.repeat {
                Some(Repeat::Finished(_)) => return Ok(None),
                Some(Repeat::Chunk(_) | Repeat::Evaluation(_)) => return Ok(Some(reply)),
                Some(Repeat::Wait(_)) | None => {}
            }
        }
    }

    async fn repeat(&self, reply: v1::RepeatReply) -> Result<(), RoleError> {
        self.peers.embedding_workers.follow(reply.embedding_worker_successions).await?;
        let (only, is_reported) = (Only::of(&reply), !reply.report);
        let Some(Repeat::Chunk(lease)) = reply.repeat else { return Ok(()) };
        let dataset = self.train_data().await?;
        let reader = dataset.reader(read_one(&self.plan, self.plan.shuffle, lease.epoch))?;
        let (_, rows, skipped) = self.read(reader, lease.chunk).await?;
        if !is_reported {
            self.report(&lease, rows.as_ref(), skipped).await?;
        }
        let Some(rows) = rows else { return Ok(()) };
        self.send_chunk(ReadChunk::of(&lease, only, rows)?).await
    }

    /// With the reader of a chunk before it, if there is one. Gives the number back, and the reader.
    async fn repeat_for_evaluation(
        &self,
        number: u64,
        reply: v1::RepeatReply,
        reader: Option<ChunkReader>,
    ) -> Result<(u64, Option<ChunkReader>), RoleError> {
        self.peers.embedding_workers.follow(reply.embedding_worker_successions).await?;
        let (only, is_reported) = (Only::of(&reply), !reply.report);
        let (Some(Repeat::Evaluation(lease)), Some(test)) = (reply.repeat, &self.plan.test) else {
            return Ok((number, reader));
        };
        let reader = match reader {
            Some(reader) => reader,
            None => self.test_data(test).await?.reader(read_one(&self.plan, None, 0))?,
        };
        let (reader, rows, skipped) = self.read(reader, lease.chunk).await?;
        if !is_reported {
            self.report_for_evaluation(&lease, rows.as_ref(), skipped).await?;
        }
        if let Some(rows) = rows {
            self.send_chunk(ReadChunk::for_evaluation(&lease, only, rows)?).await?;
        }
        Ok((number, Some(reader)))
    }

    /// What is trained on. A part of many files takes long to open.
    async fn train_data(&self) -> Result<Dataset, RoleError> {
        let dataset = self.telling(self.datasets.train(&self.plan)).await??;
        self.has_told_files.get_or_try_init(|| self.tell_files(&dataset)).await?;
        Ok(dataset)
    }

    async fn tell_files(&self, dataset: &Dataset) -> Result<(), RoleError> {
        let (files, digest) = (dataset.files().len() as u64, dataset.files_digest());
        let found = v1::FilesFound { loader: self.index, files, digest };
        self.peers.coordinator.call(found, Vec::new(), CALL_DEADLINE).await.map(drop)
    }

    /// What the model is tested on: the plan's `test`.
    async fn test_data(&self, test: &SourceConfig) -> Result<Dataset, RoleError> {
        self.telling(self.datasets.test(&self.plan, test)).await?
    }

    /// What `reading` gives. The coordinator is told now and then that it gets on, if it does.
    async fn telling<T>(&self, reading: impl Future<Output = T>) -> Result<T, RoleError> {
        let tell = || async {
            let reading = v1::Reading { loader: self.index };
            self.peers.coordinator.call(reading, Vec::new(), CALL_DEADLINE).await.map(drop)
        };
        telling(reading, TELL_EVERY, rectrain_data::passed, tell).await
    }

    /// Reads the beginning of test data of its own, so that what is wrong there is told before hours of training and not after them. Test data that
    /// is a part of the same files is not looked for.
    async fn look_at_test_data(&self) -> Result<(), RoleError> {
        let test = self.plan.test.as_ref().filter(|test| test.paths != self.plan.train.paths);
        let Some(test) = test.filter(|_| self.index == 0 && !self.plan.tests_on_the_next_slice) else {
            return Ok(());
        };
        let mut reader = self.test_data(test).await?.reader(read_one(&self.plan, None, 0))?;
        let reading = blocking("reading of test data", move || reader.read(0).map(drop));
        Ok(self.telling(reading).await???)
    }

    /// The rows of a chunk (`None` past the end), and how many bad rows were left out of it.
    async fn read(&self, mut reader: ChunkReader, chunk: u64) -> Result<(ChunkReader, Option<Batch>, u64), RoleError> {
        let started = Instant::now();
        let reading = blocking("reading of data", move || {
            let rows = reader.read(chunk);
            let skipped = reader.skipped();
            (reader, rows, skipped)
        });
        let (reader, rows, skipped) = self.telling(reading).await??;
        let rows = rows?;
        self.metrics.read.observe(started.elapsed().as_secs_f64());
        self.metrics.rows.inc_by(rows.as_ref().map_or(0, |rows| rows.samples as u64));
        self.metrics.skipped_rows.inc_by(skipped);
        Ok((reader, rows, skipped))
    }

    async fn lease(&self) -> Result<Option<v1::ChunkLease>, RoleError> {
        loop {
            let request = v1::LeaseRequest { loader: self.index };
            let (reply, _) = self.peers.coordinator.call(request, Vec::new(), CALL_DEADLINE).await?;
            match reply.lease {
                Some(v1::lease_reply::Lease::Chunk(lease)) => return Ok(Some(lease)),
                Some(v1::lease_reply::Lease::Finished(_)) => return Ok(None),
                // The coordinator has held the question for a while; ask again.
                Some(v1::lease_reply::Lease::Wait(_)) | None => {}
            }
        }
    }

    async fn evaluation_lease(&self) -> Result<Option<v1::EvaluationChunk>, RoleError> {
        loop {
            let request = v1::EvaluationLeaseRequest { loader: self.index };
            let (reply, _) = self.peers.coordinator.call(request, Vec::new(), CALL_DEADLINE).await?;
            match reply.lease {
                Some(v1::evaluation_lease_reply::Lease::Chunk(lease)) => return Ok(Some(lease)),
                Some(v1::evaluation_lease_reply::Lease::Finished(_)) => return Ok(None),
                Some(v1::evaluation_lease_reply::Lease::Wait(_)) | None => {}
            }
        }
    }

    async fn send_chunks(&self, mut chunks: mpsc::Receiver<ReadChunk>) -> Result<(), RoleError> {
        while let Some(chunk) = chunks.recv().await {
            self.send_chunk(chunk).await?;
        }
        Ok(())
    }

    async fn send_chunk(&self, chunk: ReadChunk) -> Result<(), RoleError> {
        let ReadChunk { first: position, max_batches, skip, only, turns, rows } = chunk;
        let rows = Arc::new(rows);
        let size = self.plan.global_batch_rows as usize;
        let (first, skip_pieces) = skip;
        for number in first..(rows.samples.div_ceil(size) as u64).min(max_batches) {
            let start = number as usize * size;
            let range = start..rows.samples.min(start + size);
            let skip_pieces = if number == first { skip_pieces } else { 0 };
            let keys =
                (skip_pieces..self.plan.pieces()).map(|piece| BatchKey { position: position.after(number), piece });
            let pieces = keys.map(|key| turns.place(key, self.plan.pieces()));
            let pieces = pieces.filter(|piece| only.has(piece));
            self.send_batch(pieces, &rows, range).await?;
        }
        Ok(())
    }

    /// Sends pieces of one global batch; waits until embedding workers have taken every piece in, which is what bounds the batches in
    /// flight. A short batch has pieces without rows.
    async fn send_batch(
        &self,
        pieces: impl Iterator<Item = Piece>,
        rows: &Arc<Batch>,
        range: Range<usize>,
    ) -> Result<(), RoleError> {
        let started = Instant::now();
        let pieces = pieces.map(|piece| {
            let own = self.plan.rows_of_piece(range.len(), piece.key.piece);
            let own = range.start + own.start..range.start + own.end;
            self.send_piece(piece, range.len(), Arc::clone(rows), own)
        });
        try_join_all(pieces).await?;
        self.metrics.send.observe(started.elapsed().as_secs_f64());
        Ok(())
    }

    async fn send_piece(
        &self,
        Piece { key, embedding_worker }: Piece,
        global_samples: usize,
        rows: Arc<Batch>,
        own: Range<usize>,
    ) -> Result<(), RoleError> {
        let rows = rows.slice(own);
        let samples = rows.samples as u32;
        let tensors = blocking("removal of duplicate ids", move || cut(rows)).await??;
        let put = v1::PutBatch { batch: Some(key.write()), samples, global_samples: global_samples as u32 };
        // One that has left needs no pieces any more, which may be sent twice. It takes this one in when training gets there.
        self.peers.embedding_workers.call_if_there(embedding_worker, put, tensors, WHOLE_JOB).await.map(drop)
    }
}

/// How the chunks of one epoch are read, with some chunks read ahead.
fn read_plan(plan: &JobPlan, shuffle: Option<u64>, epoch: u32) -> ReadPlan {
    ReadPlan {
        chunk_rows: plan.global_batch_rows * plan.batches_per_chunk,
        shuffle,
        epoch: u64::from(epoch),
        read_ahead_chunks: CHUNKS_AHEAD,
    }
}

/// As [`read_plan`], for a single chunk: nothing is read ahead.
fn read_one(plan: &JobPlan, shuffle: Option<u64>, epoch: u32) -> ReadPlan {
    ReadPlan { read_ahead_chunks: 0, ..read_plan(plan, shuffle, epoch) }
}

/// The tensors of a piece: ids, then dense features, labels and groups.
fn cut(piece: Batch) -> Result<Vec<Tensor>, RoleError> {
    let mut scratch = Scratch::default();
    let mut tensors = Vec::with_capacity(3 * piece.sparse.len() + 3);
    for column in &piece.sparse {
        let unique = UniqueIds::from_column(&column.keys, column.offsets.as_deref(), piece.samples, &mut scratch)?;
        tensors.extend(unique.into_tensors());
    }
    tensors.extend([Tensor::from(piece.dense), Tensor::from(piece.labels)]);
    tensors.extend(piece.groups.map(Tensor::from));
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;

    use super::*;

    /// Trains on the `.csv` files of `folder`, and tests on the files of it that `test` names.
    fn plan(folder: &Path, test: &str) -> JobPlan {
        let folder = folder.display();
        let manifest = format!(
            "{{apiVersion: rectrain.dev/v1alpha1, kind: RecTrainingJob, metadata: {{name: t}}, spec: {{model: {{kind: lr}},
             features: {{sparse: [{{name: user}}]}},
             data: {{train: {{paths: ['{folder}/*.csv']}}, test: {{paths: ['{folder}/{test}']}}}}}}}}"
        );
        let manifest = rectrain_crds::load(&manifest, "t.yaml", &[]).unwrap();
        JobPlan::new(&manifest.resolved).unwrap()
    }

    #[test]
    fn test_data_is_sent_again_one_chunk_at_a_time_and_what_is_before_it_besides() {
        let mut repeats = EvaluationRepeats::default();
        let add = |repeats: &mut EvaluationRepeats, place| repeats.add(place, v1::RepeatReply::default());
        for first_batch in [0, 10, 20] {
            assert_eq!(add(&mut repeats, (5, first_batch)), first_batch == 0);
        }
        let next = |repeats: &mut EvaluationRepeats| repeats.next().map(|(number, ..)| number);
        assert_eq!((next(&mut repeats), next(&mut repeats)), (Some(1), None));
        repeats.ended(1, None);
        assert_eq!((next(&mut repeats), next(&mut repeats)), (Some(2), None));
        // Of two embedding workers, each may lack what the other's dense workers wait for.
        add(&mut repeats, (5, 10));
        add(&mut repeats, (5, 0));
        assert_eq!([(); 3].map(|()| next(&mut repeats)), [Some(5), None, None]);
        repeats.ended(5, None);
        assert_eq!((next(&mut repeats), next(&mut repeats)), (Some(4), None));
        repeats.ended(4, None);
        repeats.ended(2, None);
        assert_eq!((next(&mut repeats), next(&mut repeats)), (Some(3), None));
        // Another loss waits for nothing of this one.
        let of_a_worker = v1::RepeatReply { embedding_worker: Some(1), ..v1::RepeatReply::default() };
        for first_batch in [40, 30] {
            repeats.add((5, first_batch), of_a_worker.clone());
        }
        assert_eq!((next(&mut repeats), next(&mut repeats)), (Some(7), None));
        // The next evaluation waits for nothing of this one.
        assert!(add(&mut repeats, (9, 30)));
        assert_eq!(next(&mut repeats), Some(8));
    }

    #[tokio::test]
    async fn a_part_is_opened_once_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("test")).unwrap();
        let files = ["train.csv", "test/test.csv"].map(|name| folder.path().join(name));
        files.iter().for_each(|file| std::fs::write(file, "label,user\n1,a\n0,b\n").unwrap());
        let (plan, datasets) = (plan(folder.path(), "test/test.csv"), Datasets::default());
        let test = plan.test.as_ref().unwrap();
        assert_eq!(datasets.test(&plan, test).await.unwrap().files().len(), 1);
        // To open it again would fail.
        files.iter().for_each(|file| std::fs::remove_file(file).unwrap());
        assert_eq!(datasets.train(&plan).await.unwrap().files().len(), 1);
        assert_eq!(datasets.test(&plan, test).await.unwrap().files().len(), 1);
    }

    #[tokio::test]
    async fn a_file_that_is_trained_on_is_no_test() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["train.csv", "test.csv"] {
            std::fs::write(folder.path().join(name), "label,user\n1,a\n0,b\n").unwrap();
        }
        let plan = plan(folder.path(), "test.csv");
        let error = Datasets::default().test(&plan, plan.test.as_ref().unwrap()).await.unwrap_err();
        assert!(error.to_string().contains("test.csv is found by the training paths too"), "{error}");
    }

    #[tokio::test]
    async fn long_reading_is_told_as_long_as_it_gets_on() {
        let every = Duration::from_millis(1);
        let (passed, told) = (Cell::new(0), Cell::new(0));
        let tell = || async {
            told.set(told.get() + 1);
            Ok(())
        };
        let gets_on = async {
            while told.get() < 3 {
                passed.set(passed.get() + 1);
                tokio::time::sleep(every).await;
            }
            "rows"
        };
        assert_eq!(telling(gets_on, every, || passed.get(), tell).await.unwrap(), "rows");
        told.set(0);
        let hangs = tokio::time::sleep(every * 20);
        telling(hangs, every, || passed.get(), tell).await.unwrap();
        assert_eq!(told.get(), 0, "nothing was passed");
    }
}
