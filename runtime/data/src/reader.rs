//! Chunks of a part, in ascending order, read ahead by a thread of their own. The loader's view of this
//! crate. Whichever chunks it asks for, it gets the same rows as any other reader of the same plan.
//!
//! ```text
//! ChunkReader --chunk numbers (≤ read_ahead + 1)--> parsing thread --results (≤ read_ahead + 1)--> ChunkReader
//!                                                        ^ blocks (≤ 4)
//!                                                   fetching, decompressing thread
//! ```
//!
//! As long as chunks are asked for one after the other, or are announced with [`ChunkReader::prefetch`], the
//! next ones are parsed while this one is used. A chunk that is asked for beyond those read ahead is reached
//! by passing over rows; one that lies behind starts the threads again from the beginning.

use crate::batch::Batch;
use crate::blocking::Stop;
use crate::blocks::thread_error;
use crate::config::ReadPlan;
use crate::dataset::Dataset;
use crate::error::DataError;
use crate::random::chunk_permutation;
use crate::rows::RowSource;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Reads chunks of a part.
pub struct ChunkReader {
    dataset: Dataset,
    plan: ReadPlan,
    pipeline: Option<Pipeline>,
    /// The chunk returned last.
    last: Option<u64>,
    /// The first chunk that is known not to exist.
    end: Option<u64>,
    /// Chunks announced, ascending.
    announced: VecDeque<u64>,
    skipped: u64,
}

/// What the parsing thread has to say about a chunk.
struct Parsed {
    chunk: u64,
    rows: Result<Option<Rows>, DataError>,
}

/// The rows of a chunk.
struct Rows {
    batch: Batch,
    /// See [`ChunkReader::skipped`].
    skipped: u64,
}

struct Pipeline {
    wanted: Option<SyncSender<u64>>,
    parsed: Option<Receiver<Parsed>>,
    /// Chunks asked for and not yet received, ascending.
    outstanding: VecDeque<u64>,
    /// The largest chunk that was asked for.
    newest: Option<u64>,
    /// Chunks below this are not wanted any more.
    floor: Arc<AtomicU64>,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl ChunkReader {
    pub(crate) fn new(dataset: Dataset, plan: ReadPlan) -> Self {
        Self { dataset, plan, pipeline: None, last: None, end: None, announced: VecDeque::new(), skipped: 0 }
    }

    /// The rows `[chunk · chunk_rows, (chunk + 1) · chunk_rows)` of the part (bad rows that are skipped
    /// do not count), permuted if the plan says so; fewer rows for the last chunk, `None` beyond it.
    /// Blocks. After an error the reader can be asked again, and starts afresh.
    ///
    /// # Errors
    /// A bad row, a damaged file, a failing disk or network; a part without any rows.
    pub fn read(&mut self, chunk: u64) -> Result<Option<Batch>, DataError> {
        self.announced.retain(|&announced| announced > chunk);
        self.skipped = 0;
        if self.end.is_some_and(|end| chunk >= end) {
            return Ok(None);
        }
        let sequential = self.last.is_none_or(|last| chunk == last + 1);
        let parsed = match self.receive(chunk, sequential) {
            Ok(parsed) => parsed,
            Err(error) => {
                self.pipeline = None;
                return Err(error);
            }
        };
        self.last = Some(chunk);
        match parsed.rows {
            Ok(None) => {
                self.end = Some(chunk);
                self.pipeline = None;
                match chunk {
                    0 => Err(self.dataset.empty_part()),
                    _ => Ok(None),
                }
            }
            Ok(Some(Rows { batch, skipped })) => {
                self.skipped = skipped;
                Ok(Some(batch))
            }
            Err(error) => {
                self.pipeline = None;
                Err(error)
            }
        }
    }

    /// Announces chunks that will be asked for, in ascending order: they are parsed ahead, as many as
    /// the plan allows. For a loader whose chunks are not consecutive.
    pub fn prefetch(&mut self, chunks: impl IntoIterator<Item = u64>) {
        for chunk in chunks {
            if self.announced.back().is_none_or(|&last| chunk > last) {
                self.announced.push_back(chunk);
            }
        }
    }

    /// Bad rows left out of the chunk read last: those from its first row to the first row of the next chunk, or
    /// to the end of the part; in chunk 0 also those before its first row. So each bad row of the part counts with
    /// one chunk, and with the same one whoever reads it. 0 unless `BadRows::Skip` is set.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// The plan it reads by.
    pub fn plan(&self) -> &ReadPlan {
        &self.plan
    }

    fn receive(&mut self, chunk: u64, sequential: bool) -> Result<Parsed, DataError> {
        let behind = |pipeline: &Pipeline| {
            pipeline.newest.is_some_and(|newest| chunk <= newest) && !pipeline.outstanding.contains(&chunk)
        };
        let mut pipeline = match self.pipeline.take() {
            Some(pipeline) if !behind(&pipeline) => pipeline,
            _ => Pipeline::start(&self.dataset, self.plan)?,
        };
        pipeline.floor.store(chunk, Ordering::Relaxed);
        if !pipeline.outstanding.contains(&chunk) {
            pipeline.drain()?;
            pipeline.ask(chunk)?;
        }
        self.read_ahead(&mut pipeline, chunk, sequential)?;
        let parsed = loop {
            let parsed = pipeline.receive()?;
            if parsed.chunk == chunk {
                break parsed;
            }
        };
        self.read_ahead(&mut pipeline, chunk, sequential)?;
        self.pipeline = Some(pipeline);
        Ok(parsed)
    }

    /// Asks for the chunks that are likely to be wanted after `chunk`.
    fn read_ahead(&mut self, pipeline: &mut Pipeline, chunk: u64, sequential: bool) -> Result<(), DataError> {
        let waiting = |pipeline: &Pipeline| {
            let ahead = pipeline.outstanding.iter().filter(|&&asked| asked > chunk);
            ahead.count()
        };
        while waiting(pipeline) < self.plan.read_ahead_chunks {
            let newest = pipeline.newest.unwrap_or(chunk);
            while self.announced.front().is_some_and(|&announced| announced <= newest) {
                self.announced.pop_front();
            }
            match self.announced.pop_front() {
                Some(announced) => pipeline.ask(announced)?,
                None if sequential => pipeline.ask(newest + 1)?,
                None => break,
            }
        }
        Ok(())
    }
}

impl Pipeline {
    fn start(dataset: &Dataset, plan: ReadPlan) -> Result<Self, DataError> {
        let bound = plan.read_ahead_chunks + 1;
        let (wanted, wanted_receiver) = sync_channel(bound);
        let (parsed_sender, parsed) = sync_channel(bound);
        let (stop, floor) = (Stop::default(), Arc::new(AtomicU64::new(0)));
        let parser = Parser {
            dataset: dataset.clone(),
            plan,
            floor: Arc::clone(&floor),
            stop: stop.clone(),
            rows: None,
            at: 0,
            ended: false,
        };
        let thread = std::thread::Builder::new()
            .name("rectrain-data-parse".into())
            .spawn(move || parser.run(&wanted_receiver, &parsed_sender))
            .map_err(thread_error)?;
        Ok(Self {
            wanted: Some(wanted),
            parsed: Some(parsed),
            outstanding: VecDeque::new(),
            newest: None,
            floor,
            stop,
            thread: Some(thread),
        })
    }

    /// Waits at most until the parser takes the next number: the two channels and its hands hold more
    /// than can be outstanding, 2 · read_ahead + 1.
    fn ask(&mut self, chunk: u64) -> Result<(), DataError> {
        let wanted = self.wanted.as_ref().ok_or(DataError::Stopped)?;
        wanted.send(chunk).map_err(|_| DataError::Stopped)?;
        self.outstanding.push_back(chunk);
        self.newest = Some(chunk);
        Ok(())
    }

    fn receive(&mut self) -> Result<Parsed, DataError> {
        let parsed = self.parsed.as_ref().ok_or(DataError::Stopped)?;
        let parsed = parsed.recv().map_err(|_| DataError::Stopped)?;
        self.outstanding.pop_front();
        Ok(parsed)
    }

    /// Throws away what is outstanding, errors of rows that nobody asked for included; the floor makes the
    /// parser skip what it has not begun.
    fn drain(&mut self) -> Result<(), DataError> {
        while !self.outstanding.is_empty() {
            self.receive()?;
        }
        Ok(())
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.stop.set();
        self.wanted = None;
        self.parsed = None;
        if let Some(thread) = self.thread.take() {
            // A panic in it was seen as a closed channel.
            let _ = thread.join();
        }
    }
}

/// The parsing thread.
struct Parser {
    dataset: Dataset,
    plan: ReadPlan,
    floor: Arc<AtomicU64>,
    stop: Stop,
    /// Opened at the first chunk.
    rows: Option<Box<dyn RowSource>>,
    /// The chunk whose first row the cursor is at.
    at: u64,
    /// Whether the part ended before a chunk that was asked for.
    ended: bool,
}

impl Parser {
    fn run(mut self, wanted: &Receiver<u64>, parsed: &SyncSender<Parsed>) {
        while let Ok(chunk) = wanted.recv() {
            let unwanted = self.ended || chunk < self.floor.load(Ordering::Relaxed);
            let rows = match unwanted {
                true => Ok(None),
                false => self.parse(chunk),
            };
            let result = Parsed { chunk, rows };
            if result.rows.is_err() {
                // Nobody may have asked for this chunk in earnest; the next one starts from the top.
                self.rows = None;
                self.at = 0;
            }
            if parsed.send(result).is_err() {
                return;
            }
        }
    }

    fn parse(&mut self, chunk: u64) -> Result<Option<Rows>, DataError> {
        let chunk_rows = self.plan.chunk_rows;
        let mut before = (chunk - self.at).saturating_mul(chunk_rows);
        let rows = match &mut self.rows {
            Some(rows) => rows,
            none => {
                let (rows, passed) = self.dataset.cursor(before, &self.stop)?;
                before -= passed;
                none.insert(rows)
            }
        };
        if rows.advance(before, None)? < before {
            self.ended = true;
            return Ok(None);
        }
        if before > 0 {
            // They count with the chunk before.
            rows.pass_over_bad()?;
        }
        let skipped_before = rows.skipped();
        let mut batch = self.dataset.empty_batch();
        batch.reserve(chunk_rows.min(1 << 16) as usize);
        self.at = chunk + 1;
        if rows.advance(chunk_rows, Some(&mut batch))? == 0 {
            self.ended = true;
            return Ok(None);
        }
        rows.pass_over_bad()?;
        let skipped = rows.skipped() - skipped_before;
        let batch = match self.plan.shuffle {
            Some(seed) => {
                let order = chunk_permutation(seed, self.plan.epoch, chunk, batch.samples as u32);
                batch.permute(&order)
            }
            None => batch,
        };
        Ok(Some(Rows { batch, skipped }))
    }
}
