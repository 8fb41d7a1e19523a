//! Rows of text files. One thread fetches and decompresses ([`crate::blocks`]). The cursor, on its
//! caller's thread, cuts and parses. A row that is passed over costs one search for a line end.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use rectrain_kinds::{BadRows, CsvFormat, DataFormat, LabelField, Position, Schema};

use super::{Opening, open_each};
use crate::batch::Batch;
use crate::blocking::Stop;
use crate::blocks::{Blocks, Compression, Decoded};
use crate::error::{DataError, Place, shown};
use crate::identity::Identity;
use crate::number::parse_f64;
use crate::schema::{
    EVENT_TIMES, Encoder, FLOAT_IDS, Layout, NO_BRACKETS, dense_text, expected_label, is_bracketed_list,
};
use crate::source::{Rows, Source, Tally, View, offset};
use crate::storage::{SourceFile, identity_of};
use crate::text::{Cells, MAX_RECORD_BYTES, Span, cell, find_record};
use crate::time::TimeFilter;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Text files, in reading order.
#[derive(Debug)]
pub(crate) struct CsvSource {
    files: Arc<Vec<CsvFile>>,
    encoder: Arc<Encoder>,
    /// Rows of each file, once they were counted.
    counts: Mutex<Option<Vec<u64>>>,
    passed: Arc<Passed>,
}

impl CsvSource {
    /// Finds the files, and the columns in each.
    ///
    /// # Errors
    /// A format that contradicts itself; files that cannot be found or read; a missing column; no
    /// rows.
    pub(crate) fn open(opening: &Opening<'_>, format: &CsvFormat) -> Result<Self, DataError> {
        check_format(format)?;
        Self::over((opening.find_files)()?, opening, |_| format.clone())
    }

    /// Opens files that contain tabs if their names end in `.tsv`, else commas.
    pub(crate) fn by_names(files: Vec<SourceFile>, opening: &Opening<'_>) -> Result<Self, DataError> {
        Self::over(files, opening, |file| match DataFormat::of_path(&file.name) {
            Some(DataFormat::Tsv) => CsvFormat { delimiter: "\t".to_owned(), ..CsvFormat::default() },
            _ => CsvFormat::default(),
        })
    }

    fn over(
        files: Vec<SourceFile>,
        opening: &Opening<'_>,
        format: impl Fn(&SourceFile) -> CsvFormat + Sync,
    ) -> Result<Self, DataError> {
        let first = files.first().map(|file| file.name.clone()).unwrap_or_default();
        let (encoder, time) = (opening.encoder, opening.time.map(|(column, _)| column));
        let opened = open_each(files, |file| {
            let format = format(&file);
            CsvFile::open(file, format, encoder, time)
        })?;
        let files: Vec<CsvFile> = opened.into_iter().flatten().collect();
        if files.is_empty() {
            return Err(DataError::Empty { file: first });
        }
        // Writers of partitions leave files without rows for the empty ones.
        if files.iter().all(|file| file.estimated_rows == 0) {
            return Err(DataError::NoRows { file: first });
        }
        Ok(Self {
            files: Arc::new(files),
            encoder: Arc::clone(opening.encoder),
            counts: Mutex::new(None),
            passed: Arc::default(),
        })
    }

    fn counted(&self) -> Option<Vec<u64>> {
        self.counts.lock().clone()
    }
}

impl Source for CsvSource {
    fn open(&self, view: View) -> Result<Box<dyn Rows>, DataError> {
        let part = view.from.part.0 as usize;
        let span = part.min(self.files.len())..self.files.len();
        let mut cursor = CsvRows::over(&self.files, &self.encoder, span, &view)?;
        cursor.before = view.from.offset.0;
        cursor.left = view.limit.unwrap_or(u64::MAX);
        cursor.passed = Some(Arc::clone(&self.passed));
        Ok(Box::new(cursor))
    }

    fn identity(&self) -> Identity {
        identity_of(&self.files())
    }

    /// Either the counts of all files, or of the first ones that cursors have read to their ends.
    fn known_rows(&self) -> Vec<u64> {
        self.counted().unwrap_or_else(|| self.passed.counts())
    }

    fn count_rows(&self, stop: &Stop) -> Result<u64, DataError> {
        // The lock is held while counting: a second caller waits for the first one's result.
        let mut counts = self.counts.lock();
        if let Some(counts) = &*counts {
            return Ok(counts.iter().sum());
        }
        let view =
            View { from: Position::default(), limit: None, time: None, bad_rows: BadRows::Fail, stop: stop.clone() };
        let count = |file| CsvRows::over(&self.files, &self.encoder, file..file + 1, &view)?.advance(u64::MAX, None);
        let counted = (0..self.files.len()).map(count).collect::<Result<Vec<u64>, DataError>>()?;
        Ok(counts.insert(counted).iter().sum())
    }

    fn estimated_rows(&self) -> u64 {
        match self.counted() {
            Some(counts) => counts.iter().sum(),
            None => self.files.iter().map(|file| file.estimated_rows).sum(),
        }
    }

    fn files(&self) -> Vec<&SourceFile> {
        self.files.iter().map(|file| &file.file).collect()
    }
}

fn check_format(format: &CsvFormat) -> Result<(), DataError> {
    let delimiter = format.delimiter.as_bytes();
    if delimiter.iter().any(|byte| matches!(byte, b'\n' | b'\r') || format.quoting && *byte == b'"') {
        return Err(DataError::config("delimiter", "a quote or a line end cannot separate cells"));
    }
    if delimiter.is_empty() || format.quoting && delimiter.len() > 1 {
        return Err(DataError::config("delimiter", "one byte is expected, or several without quoting"));
    }
    if !format.header && format.columns.is_none() {
        return Err(DataError::config("columns", "without a header, the columns must be named"));
    }
    Ok(())
}

/// A text file with its columns.
#[derive(Debug)]
struct CsvFile {
    file: SourceFile,
    format: CsvFormat,
    layout: Layout,
    /// Rows, estimated from the size of the first ones.
    estimated_rows: u64,
}

impl CsvFile {
    /// Reads the beginning of the file, and finds the columns in it. `None` if there is not even a
    /// header.
    fn open(
        file: SourceFile,
        format: CsvFormat,
        encoder: &Encoder,
        time: Option<&str>,
    ) -> Result<Option<Self>, DataError> {
        if file.size == 0 {
            return Ok(None);
        }
        let head = Head::read(&file, &format)?;
        if head.records == 0 {
            return Ok(None);
        }
        let names = head.names(&file, &format, encoder)?;
        let layout = Layout::bind(&file.name, names, encoder, time)?;
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
    /// Its share of the file, in bytes.
    share: f64,
    /// Whether it is the whole file.
    whole: bool,
}

impl Head {
    const BYTES: usize = 64 << 10;
    /// Decoders read ahead. So the share of a short piece in a compressed file is not known well.
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

    /// Fails with the line of a record with a quote that is never closed.
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
                    let (bytes, ends) = cells.cut(record, span.quoted, format.delimiter.as_bytes());
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

    /// The names of the columns. A file without an optional label has one cell less than `columns`
    /// has names.
    fn names(&self, file: &SourceFile, format: &CsvFormat, encoder: &Encoder) -> Result<Vec<String>, DataError> {
        let Some(names) = &format.columns else {
            return Ok(self.first.clone());
        };
        if names.len() == self.first.len() {
            return Ok(names.clone());
        }
        let features: Vec<String> = names.iter().filter(|name| **name != encoder.schema.label.name).cloned().collect();
        if !encoder.needs_label && features.len() == self.first.len() {
            return Ok(features);
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

    /// Rows of the whole file, if its rest is like its beginning.
    fn estimate(&self, format: &CsvFormat) -> u64 {
        let rows = (self.records - u64::from(format.header)) as f64;
        match self.whole {
            true => rows as u64,
            false => (rows / self.share.clamp(1e-12, 1.0)).round() as u64,
        }
    }
}

/// The error for a record that begins on line `line` and has a quote that is never closed.
fn unclosed_quote(file: &SourceFile, line: u64) -> DataError {
    DataError::UnclosedQuote { file: file.name.clone(), line }
}

fn mark_length(buffer: &[u8]) -> usize {
    match buffer.starts_with(BYTE_ORDER_MARK) {
        true => BYTE_ORDER_MARK.len(),
        false => 0,
    }
}

/// Rows of the first files, as far as cursors have reached their ends. A later cursor then starts
/// behind these files without reading them.
#[derive(Debug, Default)]
struct Passed(Mutex<Vec<u64>>);

impl Passed {
    fn counts(&self) -> Vec<u64> {
        self.0.lock().clone()
    }

    fn note(&self, file: usize, rows: u64) {
        let mut counts = self.0.lock();
        if counts.len() == file {
            counts.push(rows);
        }
    }
}

/// Cursor over the rows of text files.
struct CsvRows {
    files: Arc<Vec<CsvFile>>,
    encoder: Arc<Encoder>,
    time: Option<TimeFilter>,
    tally: Tally,
    blocks: Blocks,
    stop: Stop,
    /// Bytes of the current file. The unused ones begin at `at`.
    buffer: Vec<u8>,
    at: usize,
    /// Whether `buffer` reaches to the end of the current file.
    whole: bool,
    /// The current file.
    file: usize,
    /// The end of the files to be read.
    end: usize,
    /// The line at `at`, from 1. 0 if the file was not begun.
    line: u64,
    /// Rows of the current file before `at`.
    in_file: u64,
    /// Where the cursor notes the rows of files that it has read to their ends.
    passed: Option<Arc<Passed>>,
    /// Rows to pass over before the view begins.
    before: u64,
    /// Rows of the view that were not looked at.
    left: u64,
    cells: Cells,
    scratch: Batch,
}

impl CsvRows {
    fn over(
        files: &Arc<Vec<CsvFile>>,
        encoder: &Arc<Encoder>,
        span: Range<usize>,
        view: &View,
    ) -> Result<Self, DataError> {
        let wanted = files[span.clone()].iter().map(|f| f.file.clone()).collect();
        Ok(Self {
            blocks: Blocks::start(wanted, view.stop.clone())?,
            files: Arc::clone(files),
            scratch: encoder.empty_batch(),
            encoder: Arc::clone(encoder),
            time: view.time.clone(),
            tally: Tally::new(view.bad_rows),
            stop: view.stop.clone(),
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

    /// The next record. Empty lines before it are passed over, so that it begins at `self.at`.
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
            (self.line, self.in_file) = (0, 0);
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

    fn pass_over_rows_before(&mut self) -> Result<(), DataError> {
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

    /// Parses the record at `self.at` into `into`. `false` if the view leaves it out.
    fn take(&mut self, span: Span, into: &mut Batch) -> Result<bool, DataError> {
        let file = &self.files[self.file];
        let record = &self.buffer[self.at..span.end];
        let (bytes, ends) = self.cells.cut(record, span.quoted, file.format.delimiter.as_bytes());
        let row = Row { bytes, ends, layout: &file.layout };
        let samples = into.samples;
        let taken = row.is_selected(self.time.as_ref()).and_then(|selected| match selected {
            true => row.append(&self.encoder, into).map(|()| true),
            false => Ok(false),
        });
        match taken {
            Ok(taken) => Ok(taken),
            Err(Fault::TooManyKeys(error)) => Err(error),
            Err(fault) => {
                into.truncate(samples);
                Err(row.describe(&file.file.name, Place::Line(self.line), &self.encoder.schema.label, fault))
            }
        }
    }
}

impl Rows for CsvRows {
    fn advance(&mut self, rows: u64, mut into: Option<&mut Batch>) -> Result<u64, DataError> {
        self.pass_over_rows_before()?;
        let look = into.is_some() || self.time.is_some() || self.tally.skips();
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
                // The next call to `advance` takes this row.
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

    fn position(&self) -> Position {
        Position::new(self.file as u32, self.in_file + self.before)
    }
}

/// The defect of a row. It becomes an error message only if a message is needed.
pub(super) enum Fault {
    Width,
    Cell { column: usize, expected: &'static str },
    Label { column: usize },
    TooManyKeys(DataError),
}

/// A record, cut into cells.
pub(super) struct Row<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) ends: &'a [u32],
    pub(super) layout: &'a Layout,
}

impl Row<'_> {
    #[inline]
    fn cell(&self, column: usize) -> &[u8] {
        cell(self.bytes, self.ends, column)
    }

    #[inline]
    pub(super) fn is_selected(&self, time: Option<&TimeFilter>) -> Result<bool, Fault> {
        if self.ends.len() != self.layout.names.len() {
            return Err(Fault::Width);
        }
        let (Some(time), Some(column)) = (time, self.layout.time) else {
            return Ok(true);
        };
        match time.keeps_text(self.cell(column)) {
            Some(keeps) => Ok(keeps),
            None => self.fault(column, time.expected()),
        }
    }

    fn fault<T>(&self, column: usize, expected: &'static str) -> Result<T, Fault> {
        Err(Fault::Cell { column, expected })
    }

    /// Appends the row. After an error the batch holds a part of it.
    #[inline]
    pub(super) fn append(&self, encoder: &Encoder, batch: &mut Batch) -> Result<(), Fault> {
        let schema = &encoder.schema;
        batch.labels.push(self.label(&schema.label)?);
        self.append_time(schema, batch)?;
        for (field, &column) in schema.dense.iter().zip(&self.layout.dense) {
            let input = dense_text(field, self.cell(column), &encoder.nulls);
            batch.dense.push(input.or_else(|expected| self.fault(column, expected))?);
        }
        let columns = batch.sparse.iter_mut().zip(&self.layout.sparse);
        for ((into, &column), sparse) in columns.zip(&encoder.sparse) {
            let cell = self.cell(column);
            if sparse.separator.as_ref().is_some_and(|separator| is_bracketed_list(cell, separator)) {
                return self.fault(column, NO_BRACKETS);
            }
            if !sparse.push_text(cell, &mut into.keys) {
                return self.fault(column, FLOAT_IDS);
            }
            if let Some(offsets) = &mut into.offsets {
                let name = &self.layout.names[column];
                offsets.push(offset(into.keys.len(), name).map_err(Fault::TooManyKeys)?);
            }
        }
        if let (Some(groups), Some(column), Some(group)) = (&mut batch.groups, self.layout.group, &encoder.group)
            && !group.push_text(self.cell(column), groups)
        {
            return self.fault(column, FLOAT_IDS);
        }
        for (into, &column) in batch.carried.iter_mut().zip(&self.layout.carried) {
            into.push(Some(self.cell(column)));
        }
        batch.samples += 1;
        Ok(())
    }

    #[inline]
    fn append_time(&self, schema: &Schema, batch: &mut Batch) -> Result<(), Fault> {
        let (Some(times), Some(column), Some(field)) = (&mut batch.times, self.layout.clock, &schema.time) else {
            return Ok(());
        };
        match field.seconds_of_text(self.cell(column)) {
            Some(seconds) => times.push(seconds),
            None => return self.fault(column, EVENT_TIMES),
        }
        Ok(())
    }

    /// The label, or NaN if the file has none.
    #[inline]
    fn label(&self, field: &LabelField) -> Result<f32, Fault> {
        let Some(column) = self.layout.label else { return Ok(f32::NAN) };
        let cell = self.cell(column);
        let label = match field.values.is_empty() {
            true => parse_f64(cell).and_then(|value| field.label_of(value)),
            false => field.label_of_word(cell),
        };
        label.ok_or(Fault::Label { column })
    }

    pub(super) fn describe(&self, file: &str, at: Place, label: &LabelField, fault: Fault) -> DataError {
        let names = &self.layout.names;
        let (column, value, expected) = match fault {
            Fault::Width => (
                names[self.ends.len().min(names.len() - 1)].clone(),
                shown(self.bytes),
                format!("{} cells (this row has {})", names.len(), self.ends.len()),
            ),
            Fault::Cell { column, expected } => (names[column].clone(), shown(self.cell(column)), expected.to_owned()),
            Fault::Label { column } => {
                let found = shown(self.cell(column));
                let expected = expected_label(label, &found);
                (names[column].clone(), found, expected)
            }
            Fault::TooManyKeys(error) => return error,
        };
        DataError::BadRow { file: file.to_owned(), at, column, value, expected }
    }
}
