//! The loader: leases chunks of data from the coordinator and reads them. It cuts them into global
//! batches, and each batch into pieces (local batches). It removes duplicate ids and sends each
//! piece to an embedding worker (Persia §4.1). No other role calls a loader.
//!
//! Four loops run concurrently. One passes over the training data, and one over the test data for
//! evaluations. The third sends pieces of dead processes again ([`repeats`]). The fourth watches a
//! stream ([`watch`]), or follows paths ([`listing`]). Beside them, offsets are committed
//! ([`commits`]).

mod baseline;
mod commits;
mod datasets;
mod followed;
mod lease;
mod listing;
mod progress;
mod reader;
mod repeats;
mod send;
mod watch;

use std::sync::Arc;
use std::time::Instant;

use rectrain_data::{Dataset, Fingerprint, ReadPlan};
use rectrain_proto::v1;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::coordinator_channel::CoordinatorChannel;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::embedding_workers::EmbeddingWorkers;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::metrics::LoaderMetrics;
use rectrain_protocol::plan::JobPlan;
use tokio::sync::{OnceCell, mpsc};

use self::commits::Commits;
use self::datasets::Datasets;
use self::followed::FollowedReader;
use self::lease::{Lease, Pass};
use self::progress::while_reporting_progress;
use self::reader::{ChunkPlace, Content, Reader};
use self::send::{ReadChunk, Selection};

/// The number of chunks that are read ahead of sending.
const CHUNKS_AHEAD: usize = 1;

/// The roles that a loader calls.
#[derive(Clone)]
pub struct LoaderPeers {
    /// The coordinator.
    pub coordinator: CoordinatorChannel,
    /// The embedding workers.
    pub embedding_workers: Arc<EmbeddingWorkers>,
}

/// See the module documentation.
pub struct Loader {
    plan: Arc<JobPlan>,
    index: u32,
    peers: LoaderPeers,
    metrics: LoaderMetrics,
    datasets: Datasets,
    /// Set once the coordinator has accepted the list of training files.
    files_accepted: OnceCell<()>,
    /// The offsets for a consumer group.
    commits: Commits,
}

impl Loader {
    /// Creates loader number `index`.
    #[must_use]
    pub fn new(plan: Arc<JobPlan>, index: u32, peers: LoaderPeers, metrics: LoaderMetrics) -> Self {
        Self {
            plan,
            index,
            peers,
            metrics,
            datasets: Datasets::default(),
            files_accepted: OnceCell::new(),
            commits: Commits::new(),
        }
    }

    /// Loads until the coordinator has no further leases, for training or for evaluation.
    ///
    /// # Errors
    /// The data does not match the manifest or cannot be read, or a peer is unreachable or refuses
    /// a request.
    pub async fn run(self) -> Result<(), RoleError> {
        let training = Box::pin(self.load(Pass::Training));
        let evaluating = Box::pin(self.load(Pass::Evaluation));
        let repeating = Box::pin(self.repeat_lost_pieces());
        let probing = Box::pin(self.probe_test_data());
        let all = futures::future::try_join4(training, evaluating, repeating, probing);
        let working = async {
            // The stream is watched for as long as there is work.
            tokio::select! {
                worked = all => worked.map(|_| ())?,
                Err(error) = Box::pin(self.watch_stream()) => return Err(error),
                Err(error) = Box::pin(self.follow_paths()) => return Err(error),
            }
            self.commit_last().await;
            Ok(())
        };
        tokio::select! {
            worked = Box::pin(working) => worked,
            Err(error) = Box::pin(self.commit_offsets()) => Err(error),
        }
    }

    /// Reads the chunks of a pass and sends them. Reads one chunk ahead.
    async fn load(&self, pass: Pass) -> Result<(), RoleError> {
        if pass == Pass::Evaluation && self.plan.test.is_none() {
            return Ok(());
        }
        let (chunks, received) = mpsc::channel(CHUNKS_AHEAD);
        futures::future::try_join(self.read_chunks(pass, chunks), self.send_chunks(received)).await.map(|_| ())
    }

    async fn read_chunks(&self, pass: Pass, chunks: mpsc::Sender<ReadChunk>) -> Result<(), RoleError> {
        self.accept_data(pass).await?;
        let mut baseline = Box::pin(self.baseline(pass)).await?;
        let mut last: Option<(u32, Reader)> = None;
        while let Some(lease) = self.lease(pass).await? {
            let epoch = lease.epoch();
            let reader = match last.take() {
                Some((last_epoch, reader)) if last_epoch == epoch => reader,
                _ => self.reader(pass, epoch, CHUNKS_AHEAD).await?,
            };
            let (reader, mut content) = self.read(reader, self.place(&lease)).await?;
            last = Some((epoch, reader));
            if let Some(predictor) = baseline.take() {
                (baseline, content) = self.predict(predictor, content).await?;
            }
            if self.report(&lease, &content).await? {
                continue;
            }
            let Some(rows) = content.rows else { continue };
            if chunks.send(ReadChunk::new(&lease, Selection::default(), rows)?).await.is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Opens the data of a pass, and reports the training data to the coordinator.
    async fn accept_data(&self, pass: Pass) -> Result<(), RoleError> {
        match self.plan.follow().filter(|_| pass == Pass::Training) {
            Some(follow) => self.files_accepted.get_or_try_init(|| self.report_paths(follow)).await.map(|_| ()),
            None => self.dataset(pass).await.map(drop),
        }
    }

    /// A reader of a pass that reads at most `ahead` chunks ahead.
    async fn reader(&self, pass: Pass, epoch: u32, ahead: usize) -> Result<Reader, RoleError> {
        if pass == Pass::Training && self.plan.follow().is_some() {
            return Ok(Reader::Followed(Box::new(FollowedReader::new(&self.plan, ahead))));
        }
        Ok(Reader::new(&self.dataset(pass).await?, self.read_plan(pass, epoch, ahead))?)
    }

    async fn send_chunks(&self, mut chunks: mpsc::Receiver<ReadChunk>) -> Result<(), RoleError> {
        while let Some(chunk) = chunks.recv().await {
            self.send_chunk(chunk).await?;
        }
        Ok(())
    }

    /// The data of a pass, opened once. Many files take long to open.
    async fn dataset(&self, pass: Pass) -> Result<Dataset, RoleError> {
        match pass {
            Pass::Training => {
                let dataset = self.reporting_progress(self.datasets.train(&self.plan)).await??;
                self.files_accepted.get_or_try_init(|| self.report_files(&dataset)).await?;
                Ok(dataset)
            }
            Pass::Evaluation => self.reporting_progress(self.datasets.test(&self.plan)).await?,
        }
    }

    /// Reports the training files to the coordinator. All loaders must find the same files. A job
    /// with checkpoints also reports the list of files, which its checkpoints hold.
    async fn report_files(&self, dataset: &Dataset) -> Result<(), RoleError> {
        let (files, digest) = (dataset.files().len() as u64, dataset.files_digest());
        let mut found = v1::FilesFound { loader: self.index, files, digest, ..v1::FilesFound::default() };
        if self.plan.checkpoint.is_some() && self.plan.stream().is_none() {
            let dataset = dataset.clone();
            let reading = blocking("reading of the files' content", move || dataset.fingerprints());
            let fingerprints = self.reporting_progress(reading).await???;
            found.summary = Some(v1::FilesSummary { bytes: fingerprints.bytes, digest: fingerprints.digest });
            found.list = fingerprints.list.into_iter().map(listed).collect();
        }
        self.peers.coordinator.call(found, Vec::new(), CALL_DEADLINE).await.map(drop)
    }

    /// Reads the beginning of test data with files of its own. The loader then reports errors
    /// before hours of training. Test data within the training files is not probed.
    async fn probe_test_data(&self) -> Result<(), RoleError> {
        let own_files = self.plan.test.as_ref().is_some_and(|test| test.paths != self.plan.train.paths);
        if !own_files || self.index != 0 || self.plan.tests_on_the_next_slice {
            return Ok(());
        }
        let dataset = self.dataset(Pass::Evaluation).await?;
        let mut reader = dataset.reader(self.read_plan(Pass::Evaluation, 0, 0))?;
        let reading = blocking("reading of test data", move || reader.read(0).map(drop));
        Ok(self.reporting_progress(reading).await???)
    }

    fn place(&self, lease: &Lease) -> ChunkPlace {
        ChunkPlace::of(lease, self.plan.global_batch_rows)
    }

    async fn read(&self, mut reader: Reader, place: ChunkPlace) -> Result<(Reader, Content), RoleError> {
        let started = Instant::now();
        let reading = blocking("reading of data", move || {
            let content = reader.read(place);
            (reader, content)
        });
        let (reader, content) = self.reporting_progress(reading).await??;
        let content = content?;
        self.metrics.read.observe(started.elapsed().as_secs_f64());
        self.metrics.rows.inc_by(content.rows.as_ref().map_or(0, |rows| rows.samples as u64));
        self.metrics.skipped_rows.inc_by(content.skipped);
        Ok((reader, content))
    }

    /// Awaits `reading`, and regularly reports its progress to the coordinator.
    async fn reporting_progress<T>(&self, reading: impl Future<Output = T>) -> Result<T, RoleError> {
        let report = || self.report_progress();
        while_reporting_progress(reading, progress::REPORT_EVERY, rectrain_data::passed, report).await
    }

    /// Tells the coordinator that this loader is at work.
    async fn report_progress(&self) -> Result<(), RoleError> {
        let reading = v1::Reading { loader: self.index };
        self.peers.coordinator.call(reading, Vec::new(), CALL_DEADLINE).await.map(drop)
    }

    /// The settings to read an epoch. Only training data is shuffled.
    fn read_plan(&self, pass: Pass, epoch: u32, read_ahead_chunks: usize) -> ReadPlan {
        ReadPlan {
            chunk_rows: self.plan.global_batch_rows * self.plan.batches_per_chunk,
            shuffle: self.plan.shuffle.filter(|_| pass == Pass::Training),
            epoch: u64::from(epoch),
            read_ahead_chunks,
        }
    }
}

fn listed(file: Fingerprint) -> v1::DataFile {
    let Fingerprint { name, size, version, content } = file;
    v1::DataFile { name, size, version, content }
}
