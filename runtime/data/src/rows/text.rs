//! Rows of text files. One thread fetches and decompresses ([`crate::blocks`]); this cursor, on the
//! caller's thread, cuts and parses. Passing over rows costs one search for a line end each.

use super::{RowSource, Selection, Tally, locate, offset};
use crate::batch::Batch;
use crate::blocking::Stop;
use crate::blocks::{Blocks, Compression, Decoded};
use crate::config::{BadRows, CsvFormat, TimeBound};
use crate::error::{DataError, Place, shown};
use crate::number::{parse_f32, parse_f64};
use crate::schema::{Encoder, Layout, Schema};
use crate::storage::SourceFile;
use crate::text::{Cells, MAX_RECORD_BYTES, Span, cell, find_record};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A text file whose columns were found.
#[derive(Debug)]
pub(crate) struct TextFile {
    pub(crate) file: SourceFile,
    pub(crate) format: CsvFormat,
    pub(crate) layout: Layout,
    /// Rows, guessed from the size of the first ones.
    pub(crate) estimated_rows: u64,
}

impl TextFile {
    /// Reads the beginning of the file and finds the columns in it; `None` where there is not even a header.
    pub(crate) fn open(
        file: SourceFile,
        format: CsvFormat,
        schema: &Schema,
        time: Option<&str>,
    ) -> Result<Option<Self>, DataError> {
        if file.size == 0 {
            return Ok(None);
        }
        let head = Head::read(&file, &format)?;
        if head.records == 0 {
            return Ok(None);
        }
        let names = head.names(&file, &format)?;
        let layout = Layout::bind(&file.name, names, schema, time)?;
        let estimated_rows = head.estimate(&format);
        Ok(Some(Self { file, format, layout, estimated_rows }))
    }
}

/// The beginning of a text file.
#[derive(Default)]
struct Head {
    /// The cells of the first record.
    first: Vec<String>,
    /// Records in it.
    records: u64,
    /// How large a share of the file it is.
    share: f64,
    whole: bool,
}

impl Head {
    const BYTES: usize = 64 << 10;
    /// Decoders read ahead, so that a short piece says little about a compressed file's size.
    const COMPRESSED_BYTES: usize = 1 << 20;

    fn read(file: &SourceFile, format: &CsvFormat) -> Result<Self, DataError> {
        let mut decoded = Decoded::open(file, &Stop::default())?;
        let mut piece = match decoded.compression {
            Compression::None => Self::BYTES,
            Compression::Gzip | Compression::Zstandard => Self::COMPRESSED_BYTES,
        };
        let mut buffer = Vec::new();
        let wanted = 1 + u64::from(format.header);
        loop {
            let length = buffer.len();
            buffer.resize(length + piece, 0);
            let read = decoded.fill(&mut buffer[length..])?;
            let whole = length + read < buffer.len();
            buffer.truncate(length + read);
            let share = decoded.consumed() as f64 / file.size as f64;
            let head = Self::of(&buffer, format, whole, share).map_err(|line| unclosed_quote(file, line))?;
            if whole || head.records >= wanted {
                return Ok(head);
            }
            if buffer.len() >= MAX_RECORD_BYTES {
                return Err(DataError::RowTooLong { file: file.name.clone(), line: 1, limit: MAX_RECORD_BYTES });
            }
            piece = buffer.len();
        }
    }

    /// Fails with the line of a record that has a quote which is never closed.
    fn of(buffer: &[u8], format: &CsvFormat, whole: bool, share: f64) -> Result<Self, u64> {
        let mut head = Self { whole, ..Self::default() };
        let (mut at, mut line) = (mark_length(buffer), 1);
        let mut cells = Cells::default();
        while let Some(span) = find_record(buffer, at, format, whole) {
            if span.unclosed {
                return Err(line);
            }
            if span.end > at {
                if head.records == 0 {
                    let record = &buffer[at..span.end];
                    let (bytes, ends) = cells.cut(record, span.quoted, format.delimiter);
                    head.first = (0..ends.len())
                        .map(|i| String::from_utf8_lossy(cell(bytes, ends, i)).trim().to_owned())
                        .collect();
                }
                head.records += 1;
            }
            at = span.next;
            line += span.lines;
        }
        head.share = share * at as f64 / buffer.len().max(1) as f64;
        Ok(head)
    }

    fn names(&self, file: &SourceFile, format: &CsvFormat) -> Result<Vec<String>, DataError> {
        let Some(names) = &format.columns else {
            return Ok(self.first.clone());
        };
        if names.len() == self.first.len() {
            return Ok(names.clone());
        }
        Err(DataError::Header {
            file: file.name.clone(),
            problem: format!(
                "its first line has {} cells, but {} columns are named; check the delimiter and the \
                 names",
                self.first.len(),
                names.len()
            ),
        })
    }

    /// Rows of the whole file, if the rest of it is like its beginning.
    fn estimate(&self, format: &CsvFormat) -> u64 {
        let rows = (self.records - u64::from(format.header)) as f64;
        match self.whole {
            true => rows as u64,
            false => (rows / self.share.clamp(1e-12, 1.0)).round() as u64,
        }
    }
}

/// The error for a record that begins on line `line` and does not end because of a quote.
fn unclosed_quote(file: &SourceFile, line: u64) -> DataError {
    DataError::UnclosedQuote { file: file.name.clone(), line }
}

fn mark_length(buffer: &[u8]) -> usize {
    match buffer.starts_with(BYTE_ORDER_MARK) {
        true => BYTE_ORDER_MARK.len(),
        false => 0,
    }
}

/// How many rows the first files have, as far as cursors have come to their ends: what is behind them is found again without reading them.
#[derive(Debug, Default)]
pub(crate) struct Passed(Mutex<Vec<u64>>);

impl Passed {
    /// By file, from the first on.
    pub(crate) fn counts(&self) -> Vec<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, file: usize, rows: u64) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.len() == file {
            counts.push(rows);
        }
    }
}

/// Cursor over the rows of text files.
pub(crate) struct TextRows {
    files: Arc<Vec<TextFile>>,
    encoder: Arc<Encoder>,
    selection: Selection,
    tally: Tally,
    blocks: Blocks,
    stop: Stop,
    /// What was read of the current file and not yet used begins at `at`.
    buffer: Vec<u8>,
    at: usize,
    /// Whether `buffer` reaches to the end of the current file.
    whole: bool,
    /// The current file, the end of the files to be read, and the line at `at`, from 1; line 0: the file
    /// was not begun.
    file: usize,
    end: usize,
    line: u64,
    /// Rows of the current file that were read, where the ends of files are noted.
    in_file: u64,
    passed: Option<Arc<Passed>>,
    /// Rows to pass over before the part begins, and rows of it not yet seen.
    before: u64,
    left: u64,
    cells: Cells,
    scratch: Batch,
}

impl TextRows {
    /// A cursor at the first row of the part. `counts` are the files' numbers of rows, as far as they are
    /// known: files before the part are then not opened.
    pub(crate) fn open(
        files: &Arc<Vec<TextFile>>,
        encoder: &Arc<Encoder>,
        selection: Selection,
        bad_rows: BadRows,
        counts: &[u64],
        stop: &Stop,
    ) -> Result<Self, DataError> {
        let (from, rows) = selection.rows();
        let (file, before) = locate(counts, from);
        let span = file.min(files.len())..files.len();
        let mut cursor = Self::over(files, encoder, span, selection, bad_rows, stop)?;
        cursor.before = before;
        cursor.left = rows.unwrap_or(u64::MAX);
        Ok(cursor)
    }

    fn over(
        files: &Arc<Vec<TextFile>>,
        encoder: &Arc<Encoder>,
        span: Range<usize>,
        selection: Selection,
        bad_rows: BadRows,
        stop: &Stop,
    ) -> Result<Self, DataError> {
        let wanted = files[span.clone()].iter().map(|f| f.file.clone()).collect();
        Ok(Self {
            blocks: Blocks::start(wanted, stop.clone())?,
            files: Arc::clone(files),
            scratch: encoder.schema.empty_batch(),
            encoder: Arc::clone(encoder),
            selection,
            tally: Tally::new(bad_rows),
            stop: stop.clone(),
            buffer: Vec::new(),
            at: 0,
            whole: false,
            file: span.start,
            end: span.end,
            line: 0,
            in_file: 0,
            passed: None,
            before: 0,
            left: u64::MAX,
            cells: Cells::default(),
        })
    }

    /// Notes how many rows the files have that it comes to the ends of.
    pub(crate) fn noting(self, passed: Arc<Passed>) -> Self {
        Self { passed: Some(passed), ..self }
    }

    /// Counts the rows of one file without parsing them.
    pub(crate) fn count(
        files: &Arc<Vec<TextFile>>,
        encoder: &Arc<Encoder>,
        file: usize,
        stop: &Stop,
    ) -> Result<u64, DataError> {
        let span = file..file + 1;
        Self::over(files, encoder, span, Selection::ALL, BadRows::Fail, stop)?.advance(u64::MAX, None)
    }

    /// The next record, which begins at `self.at`; empty lines before it are passed over.
    fn next_record(&mut self) -> Result<Option<Span>, DataError> {
        while self.file < self.end {
            if self.line == 0 {
                self.begin_file()?;
            }
            if let Some(span) = self.next_in_file()? {
                return Ok(Some(span));
            }
            if let Some(passed) = &self.passed {
                passed.note(self.file, self.in_file);
            }
            self.file += 1;
            self.line = 0;
        }
        Ok(None)
    }

    fn begin_file(&mut self) -> Result<(), DataError> {
        (self.whole, self.line, self.at, self.in_file) = (false, 1, 0, 0);
        self.buffer.clear();
        self.refill()?;
        self.at = mark_length(&self.buffer);
        if self.files[self.file].format.header
            && let Some(header) = self.next_in_file()?
        {
            self.consume(header);
        }
        Ok(())
    }

    #[inline]
    fn next_in_file(&mut self) -> Result<Option<Span>, DataError> {
        loop {
            let format = &self.files[self.file].format;
            match find_record(&self.buffer, self.at, format, self.whole) {
                Some(span) if span.unclosed => return Err(unclosed_quote(&self.files[self.file].file, self.line)),
                Some(span) if span.end > self.at => return Ok(Some(span)),
                Some(empty) => self.consume(empty),
                None if self.whole => return Ok(None),
                None => self.refill()?,
            }
        }
    }

    #[inline]
    fn consume(&mut self, span: Span) {
        self.at = span.next;
        self.line += span.lines;
    }

    #[inline]
    fn consume_row(&mut self, span: Span) {
        self.consume(span);
        self.in_file += 1;
    }

    fn refill(&mut self) -> Result<(), DataError> {
        if self.stop.is_set() {
            return Err(DataError::Stopped);
        }
        if self.buffer.len() - self.at > MAX_RECORD_BYTES {
            return Err(DataError::RowTooLong {
                file: self.files[self.file].file.name.clone(),
                line: self.line,
                limit: MAX_RECORD_BYTES,
            });
        }
        let block = self.blocks.next()?;
        self.buffer.drain(..self.at);
        self.at = 0;
        self.buffer.extend_from_slice(&block.bytes[..block.length]);
        self.whole = block.last;
        self.blocks.give_back(block.bytes);
        Ok(())
    }

    fn pass_over_what_is_before(&mut self) -> Result<(), DataError> {
        while self.before > 0 {
            let Some(span) = self.next_record()? else {
                self.before = 0;
                self.left = 0;
                break;
            };
            self.consume_row(span);
            self.before -= 1;
        }
        Ok(())
    }

    /// Parses the record at `self.at` into `into`; `false` if it belongs to another part.
    fn take(&mut self, span: Span, into: &mut Batch) -> Result<bool, DataError> {
        let file = &self.files[self.file];
        let record = &self.buffer[self.at..span.end];
        let (bytes, ends) = self.cells.cut(record, span.quoted, file.format.delimiter);
        let row = Row { bytes, ends, layout: &file.layout };
        let samples = into.samples;
        let taken = row.is_selected(&self.selection).and_then(|selected| match selected {
            true => row.append(&self.encoder, into).map(|()| true),
            false => Ok(false),
        });
        match taken {
            Ok(taken) => Ok(taken),
            Err(Fault::TooManyKeys(error)) => Err(error),
            Err(fault) => {
                into.truncate(samples);
                Err(row.describe(&file.file.name, self.line, fault))
            }
        }
    }
}

impl RowSource for TextRows {
    fn advance(&mut self, rows: u64, mut into: Option<&mut Batch>) -> Result<u64, DataError> {
        self.pass_over_what_is_before()?;
        let timed = matches!(self.selection, Selection::Time { .. });
        let look = into.is_some() || timed || self.tally.skips();
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut passed = 0;
        while passed < rows && self.left > 0 {
            let Some(span) = self.next_record()? else {
                break;
            };
            self.left -= u64::from(self.left != u64::MAX);
            let taken = match (&mut into, look) {
                (_, false) => Ok(true),
                (Some(batch), true) => self.take(span, batch),
                (None, true) => {
                    scratch.truncate(0);
                    self.take(span, &mut scratch)
                }
            };
            self.consume_row(span);
            match taken {
                Ok(taken) => passed += u64::from(taken),
                Err(error @ DataError::BadRow { .. }) => self.tally.note(error)?,
                Err(error) => return Err(error),
            }
        }
        self.scratch = scratch;
        Ok(passed)
    }

    fn pass_over_bad(&mut self) -> Result<(), DataError> {
        while self.tally.skips() && self.left > 0 {
            let Some(span) = self.next_record()? else { break };
            let mut scratch = std::mem::take(&mut self.scratch);
            scratch.truncate(0);
            let taken = self.take(span, &mut scratch);
            self.scratch = scratch;
            match taken {
                // It is still to come.
                Ok(true) => break,
                Ok(false) => {}
                Err(error @ DataError::BadRow { .. }) => self.tally.note(error)?,
                Err(error) => return Err(error),
            }
            self.consume_row(span);
            self.left -= u64::from(self.left != u64::MAX);
        }
        Ok(())
    }

    fn skipped(&self) -> u64 {
        self.tally.skipped
    }
}

/// Why a row cannot be used; turned into words only when it is needed.
enum Fault {
    Width,
    Cell { column: usize, expected: &'static str },
    TooManyKeys(DataError),
}

/// A record, cut.
struct Row<'a> {
    bytes: &'a [u8],
    ends: &'a [u32],
    layout: &'a Layout,
}

impl Row<'_> {
    #[inline]
    fn cell(&self, column: usize) -> &[u8] {
        cell(self.bytes, self.ends, column)
    }

    #[inline]
    fn is_selected(&self, selection: &Selection) -> Result<bool, Fault> {
        if self.ends.len() != self.layout.names.len() {
            return Err(Fault::Width);
        }
        let (Selection::Time { test_from, test }, Some(column)) = (selection, self.layout.time) else {
            return Ok(true);
        };
        let cell = self.cell(column);
        let later = match test_from {
            TimeBound::Number(bound) => match parse_f64(cell) {
                Some(time) if !time.is_nan() => time >= *bound,
                _ => return self.fault(column, "a time, as a number"),
            },
            TimeBound::Text(_) if cell.is_empty() => return self.fault(column, "a time"),
            TimeBound::Text(bound) => cell >= bound.as_bytes(),
        };
        Ok(later == *test)
    }

    fn fault<T>(&self, column: usize, expected: &'static str) -> Result<T, Fault> {
        Err(Fault::Cell { column, expected })
    }

    /// Appends the row; on an error the batch holds a part of it.
    #[inline]
    fn append(&self, encoder: &Encoder, batch: &mut Batch) -> Result<(), Fault> {
        let schema = &encoder.schema;
        let value = parse_f32(self.cell(self.layout.label));
        match value.and_then(|value| schema.label.label_of(value)) {
            Some(label) => batch.labels.push(label),
            None => return self.fault(self.layout.label, schema.label.expected()),
        }
        for (field, &column) in schema.dense.iter().zip(&self.layout.dense) {
            let cell = self.cell(column);
            let value = match cell.is_empty() {
                true => f32::NAN,
                false => match parse_f32(cell) {
                    Some(value) if !value.is_infinite() => value,
                    _ => return self.fault(column, "a number"),
                },
            };
            batch.dense.push(match value.is_nan() {
                true => field.missing,
                false => field.transform.apply(value),
            });
        }
        let columns = batch.sparse.iter_mut().zip(&self.layout.sparse);
        for ((into, &column), sparse) in columns.zip(&encoder.sparse) {
            sparse.push_text(self.cell(column), &mut into.keys);
            if let Some(offsets) = &mut into.offsets {
                let name = &self.layout.names[column];
                offsets.push(offset(into.keys.len(), name).map_err(Fault::TooManyKeys)?);
            }
        }
        if let (Some(groups), Some(column), Some(seed)) = (&mut batch.groups, self.layout.group, encoder.group) {
            groups.push(seed.text(self.cell(column)));
        }
        batch.samples += 1;
        Ok(())
    }

    fn describe(&self, file: &str, line: u64, fault: Fault) -> DataError {
        let names = &self.layout.names;
        let (column, value, expected) = match fault {
            Fault::Width => (
                names[self.ends.len().min(names.len() - 1)].clone(),
                shown(self.bytes),
                format!("{} cells (this row has {})", names.len(), self.ends.len()),
            ),
            Fault::Cell { column, expected } => (names[column].clone(), shown(self.cell(column)), expected.to_owned()),
            Fault::TooManyKeys(error) => return error,
        };
        DataError::BadRow { file: file.to_owned(), at: Place::Line(line), column, value, expected }
    }
}
