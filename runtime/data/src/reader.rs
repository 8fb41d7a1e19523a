//! Reads spans of rows on a thread of its own, ahead of the caller. The loader's view of this
//! crate. The rows of a span do not depend on the reader, nor on the spans that it read before.
//!
//! ```text
//! SpanReader --spans (≤ read_ahead + 1)--> parsing thread --results (as many)--> SpanReader
//!                                               ^ blocks (≤ 4)
//!                                         fetching, decompressing thread
//! ```
//!
//! While the caller uses a span, the reader parses the next ones. It expects the spans that
//! [`SpanReader::prefetch`] announces, and otherwise, as long as the caller reads spans in
//! sequence, the following ones. It reaches a later span by passing over rows. An earlier span
//! restarts the threads.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use rectrain_kinds::{Position, Segment, Start};

use crate::batch::Batch;
use crate::blocking::Stop;
use crate::blocks::thread_error;
use crate::config::ReadPlan;
use crate::dataset::{Dataset, check_span_rows};
use crate::error::DataError;
use crate::random::chunk_permutation;
use crate::source::Rows;
use crate::span::{Order, Span};

/// The rows of a span.
#[derive(Debug, Clone, PartialEq)]
pub struct SpanRows {
    /// The rows, fewer than requested if the source ends there. If the source grows, there may be
    /// none now.
    pub batch: Batch,
    /// Bad rows left out of this span. They lie between its first row and the first row of the next
    /// span, or the end of the data set. The first span also counts the bad rows before its first
    /// row. So each bad row counts with one span, and with the same one in every reader. 0 unless
    /// bad rows are skipped.
    pub skipped: u64,
    /// The position behind the span. A later reader may continue there.
    pub next: Position,
    /// Whether a good row follows before the end of the span. Only streams know it.
    pub more: bool,
    /// The latest time of its rows, in milliseconds since 1970 (UTC). Only streams know it.
    pub event_millis: Option<i64>,
}

/// Reads spans of a data set.
pub struct SpanReader {
    dataset: Dataset,
    read_ahead: usize,
    pipeline: Option<Pipeline>,
    /// The span that was read last.
    last: Option<Span>,
    /// The number of a row that is known not to exist.
    end: Option<u64>,
    /// Announced spans, ascending.
    announced: VecDeque<Span>,
}

/// A result of the parsing thread.
struct Parsed {
    span: Span,
    rows: Result<Option<SpanRows>, DataError>,
}

struct Pipeline {
    wanted: Option<SyncSender<Span>>,
    parsed: Option<Receiver<Parsed>>,
    /// Spans requested and not yet received, in order.
    outstanding: VecDeque<Span>,
    /// The span that was requested last.
    newest: Option<Span>,
    /// Spans that start at a row below this number are not wanted any longer.
    floor: Arc<AtomicU64>,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl SpanReader {
    pub(crate) fn new(dataset: Dataset, read_ahead: usize) -> Self {
        Self { dataset, read_ahead, pipeline: None, last: None, end: None, announced: VecDeque::new() }
    }

    /// The rows of a span. `None` if the data set ends before its first row. If the source grows, a
    /// span without rows gives an empty batch instead; request it again later. Blocks. After an
    /// error the reader can be used again, and restarts.
    ///
    /// # Errors
    /// A bad row, a damaged file, or a failing disk or network. A data set without any rows. A
    /// number of rows out of range.
    pub fn read(&mut self, span: Span) -> Result<Option<SpanRows>, DataError> {
        check_span_rows(span.rows)?;
        self.announced.retain(|announced| announced.from > span.from);
        if let (Start::Row(row), Some(end)) = (span.from, self.end)
            && row >= end
        {
            return Ok(None);
        }
        let is_next = self.last.is_none_or(|last| last.following().is_some_and(|next| next.from == span.from));
        let parsed = self.receive(span, is_next)?;
        self.last = Some(span);
        if let Ok(Some(rows)) = parsed.rows {
            return Ok(Some(rows));
        }
        self.pipeline = None;
        parsed.rows?;
        if let Start::Row(row) = span.from {
            self.end = Some(row);
        }
        match span.from {
            Start::Row(0) => Err(self.dataset.no_rows_error()),
            _ => Ok(None),
        }
    }

    /// Announces spans that the caller will request, in ascending order. The reader parses them
    /// ahead, as many as it may. For spans that are not consecutive.
    pub fn prefetch(&mut self, spans: impl IntoIterator<Item = Span>) {
        for span in spans {
            if self.announced.back().is_none_or(|last| span.from > last.from) {
                self.announced.push_back(span);
            }
        }
    }

    /// Receives the result for a span. After an error there is no pipeline.
    fn receive(&mut self, span: Span, is_next: bool) -> Result<Parsed, DataError> {
        let mut pipeline = match self.pipeline.take() {
            Some(pipeline) if !pipeline.has_passed(span) => pipeline,
            _ => Pipeline::start(&self.dataset, self.read_ahead)?,
        };
        if let Start::Row(row) = span.from {
            pipeline.floor.store(row, Ordering::Relaxed);
        }
        if !pipeline.outstanding.contains(&span) {
            pipeline.drain()?;
            pipeline.request(span)?;
        }
        self.request_ahead(&mut pipeline, span, is_next)?;
        let parsed = loop {
            let parsed = pipeline.receive()?;
            if parsed.span == span {
                break parsed;
            }
        };
        self.request_ahead(&mut pipeline, span, is_next)?;
        self.pipeline = Some(pipeline);
        Ok(parsed)
    }

    /// Requests the spans that the caller probably requests after `span`.
    fn request_ahead(&mut self, pipeline: &mut Pipeline, span: Span, is_next: bool) -> Result<(), DataError> {
        let waiting = |pipeline: &Pipeline| {
            let ahead = pipeline.outstanding.iter().filter(|requested| requested.from > span.from);
            ahead.count()
        };
        while waiting(pipeline) < self.read_ahead {
            let newest = pipeline.newest.unwrap_or(span);
            while self.announced.front().is_some_and(|announced| announced.from <= newest.from) {
                self.announced.pop_front();
            }
            match (self.announced.pop_front(), newest.following()) {
                (Some(announced), _) => pipeline.request(announced)?,
                (None, Some(following)) if is_next => pipeline.request(following)?,
                _ => break,
            }
        }
        Ok(())
    }
}

impl Pipeline {
    fn start(dataset: &Dataset, read_ahead: usize) -> Result<Self, DataError> {
        let bound = read_ahead + 1;
        let (wanted, wanted_receiver) = sync_channel(bound);
        let (parsed_sender, parsed) = sync_channel(bound);
        let (stop, floor) = (Stop::default(), Arc::new(AtomicU64::new(0)));
        let parser = Parser {
            dataset: dataset.clone(),
            floor: Arc::clone(&floor),
            stop: stop.clone(),
            cursor: None,
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

    /// Whether the parser has passed the first row of a span that it was not asked to parse.
    fn has_passed(&self, span: Span) -> bool {
        match (self.newest.map(|newest| newest.from), span.from) {
            (Some(Start::Row(newest)), Start::Row(row)) => row <= newest && !self.outstanding.contains(&span),
            _ => false,
        }
    }

    /// Waits at most until the parser takes the next span. The two channels and the parser itself
    /// hold more than can be outstanding, 2 · read_ahead + 1.
    fn request(&mut self, span: Span) -> Result<(), DataError> {
        let wanted = self.wanted.as_ref().ok_or(DataError::Stopped)?;
        wanted.send(span).map_err(|_| DataError::Stopped)?;
        self.outstanding.push_back(span);
        self.newest = Some(span);
        Ok(())
    }

    fn receive(&mut self) -> Result<Parsed, DataError> {
        let parsed = self.parsed.as_ref().ok_or(DataError::Stopped)?;
        let parsed = parsed.recv().map_err(|_| DataError::Stopped)?;
        self.outstanding.pop_front();
        Ok(parsed)
    }

    /// Discards the outstanding results, errors included. The floor makes the parser skip the spans
    /// that it has not begun.
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
            // If the thread panicked, the reader has seen that as a closed channel.
            let _ = thread.join();
        }
    }
}

/// The parsing thread.
struct Parser {
    dataset: Dataset,
    floor: Arc<AtomicU64>,
    stop: Stop,
    /// Opened at the first span.
    cursor: Option<Cursor>,
    /// Whether the data set ended before a span.
    ended: bool,
}

struct Cursor {
    rows: Box<dyn Rows>,
    /// The number of the next row in the data set. `None` behind a span from a position.
    row: Option<u64>,
}

impl Parser {
    fn run(mut self, wanted: &Receiver<Span>, parsed: &SyncSender<Parsed>) {
        while let Ok(span) = wanted.recv() {
            let is_below = matches!(span.from, Start::Row(row) if row < self.floor.load(Ordering::Relaxed));
            let rows = match self.ended || is_below {
                true => Ok(None),
                false => self.parse(span),
            };
            if rows.is_err() {
                // The span may only have been read ahead, so the error may go unused. The next span
                // needs a new cursor.
                self.cursor = None;
            }
            if parsed.send(Parsed { span, rows }).is_err() {
                return;
            }
        }
    }

    fn parse(&mut self, span: Span) -> Result<Option<SpanRows>, DataError> {
        let Some(mut cursor) = self.cursor_of(span)? else {
            self.ended = true;
            return Ok(None);
        };
        let skipped_before = cursor.rows.skipped();
        let mut batch = self.dataset.empty_batch();
        batch.reserve(span.rows.min(1 << 16) as usize);
        cursor.row = cursor.row.map(|row| row.saturating_add(span.rows));
        if cursor.rows.advance(span.rows, Some(&mut batch))? == 0 && self.dataset.is_finite() {
            self.ended = true;
            return Ok(None);
        }
        cursor.rows.pass_over_bad()?;
        cursor.rows.keep_bad()?;
        let (skipped, next) = (cursor.rows.skipped() - skipped_before, cursor.rows.position());
        let (more, event_millis) = (cursor.rows.has_more(), cursor.rows.event_millis());
        self.cursor = Some(cursor);
        let batch = match span.order {
            Order::Shuffled { seed, epoch, chunk } => {
                batch.permute(&chunk_permutation(seed, epoch, chunk, batch.samples as u32))
            }
            Order::Stored => batch,
        };
        Ok(Some(SpanRows { batch, skipped, next, more, event_millis }))
    }

    /// A cursor at the first row of a span. `None` if the data set ends before it.
    fn cursor_of(&mut self, span: Span) -> Result<Option<Cursor>, DataError> {
        match (span.from, span.until) {
            (Start::At(Position { part, offset }), Some(until)) => {
                // Gives its records back, for the next one.
                self.cursor = None;
                let segment = Segment { part, from: offset.0, until };
                Ok(Some(Cursor { rows: self.dataset.cursor_in(segment, &self.stop)?, row: None }))
            }
            (from, _) => self.cursor_at(from),
        }
    }

    /// A cursor at this row. `None` if the data set ends before it.
    fn cursor_at(&mut self, from: Start) -> Result<Option<Cursor>, DataError> {
        let row = match from {
            Start::Row(row) => row,
            Start::At(position) => return self.cursor_at_position(position).map(Some),
        };
        let (mut cursor, at) = match self.cursor.take() {
            Some(Cursor { rows, row: Some(at) }) if at <= row => (rows, at),
            _ => self.dataset.cursor(row, &self.stop)?,
        };
        let before = row - at;
        if cursor.advance(before, None)? < before {
            return Ok(None);
        }
        if before > 0 {
            // These bad rows count with the span before.
            cursor.pass_over_bad()?;
        }
        Ok(Some(Cursor { rows: cursor, row: Some(row) }))
    }

    fn cursor_at_position(&mut self, position: Position) -> Result<Cursor, DataError> {
        match self.cursor.take() {
            Some(cursor) if cursor.rows.position() == position => Ok(Cursor { row: None, ..cursor }),
            _ => Ok(Cursor { rows: self.dataset.cursor_at(position, &self.stop)?, row: None }),
        }
    }
}

/// Reads the chunks of a plan.
pub struct ChunkReader {
    spans: SpanReader,
    plan: ReadPlan,
    skipped: u64,
}

impl ChunkReader {
    pub(crate) fn new(dataset: Dataset, plan: ReadPlan) -> Self {
        Self { spans: SpanReader::new(dataset, plan.read_ahead_chunks), plan, skipped: 0 }
    }

    /// The rows `[chunk · chunk_rows, (chunk + 1) · chunk_rows)` of the data set, permuted if the
    /// plan says so. The last chunk has fewer rows, and there is `None` beyond it. See
    /// [`SpanReader::read`].
    ///
    /// # Errors
    /// As [`SpanReader::read`].
    pub fn read(&mut self, chunk: u64) -> Result<Option<Batch>, DataError> {
        self.skipped = 0;
        let Some(rows) = self.spans.read(self.plan.span(chunk))? else { return Ok(None) };
        self.skipped = rows.skipped;
        Ok(Some(rows.batch))
    }

    /// Announces chunks that the caller will request, in ascending order. See
    /// [`SpanReader::prefetch`].
    pub fn prefetch(&mut self, chunks: impl IntoIterator<Item = u64>) {
        let plan = self.plan;
        self.spans.prefetch(chunks.into_iter().map(|chunk| plan.span(chunk)));
    }

    /// Bad rows left out of the chunk that was read last. See [`SpanRows::skipped`].
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// The plan by which it reads.
    pub fn plan(&self) -> &ReadPlan {
        &self.plan
    }
}
