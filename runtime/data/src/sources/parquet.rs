//! Rows of Parquet files, row group by row group. Only the columns of the schema are read.
//!
//! The operating system reads the pages of a local file on demand. The source fetches the columns
//! of an object's row group at once. While it decodes them, it fetches the columns of the next
//! group. It does not read row groups that it passes over. If bad rows are skipped, or the view
//! filters by time, it has to look at every row. The source hashes each text of a dictionary once,
//! and not once a row.

mod damage;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Int32Type, UInt64Type};
use arrow_array::{Array, ArrayRef, BinaryArray, DictionaryArray, Float32Array, Float64Array, Int64Array, RecordBatch};
use arrow_cast::cast;
use arrow_cast::display::array_value_to_string;
use arrow_data::ArrayData;
use arrow_schema::{ArrowError, DataType, Field, Fields, TimeUnit};
use bytes::{Buf, Bytes};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::basic::{Compression, Encoding};
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{ChunkReader, Length};
use rectrain_kinds::{LabelField, Moment, Position, Schema, TimeBound};

use self::damage::{BadColumn, caught};
use super::{Opening, open_each};
use crate::batch::Batch;
use crate::blocking::{Pending, Stop};
use crate::error::{DataError, Place, shown};
use crate::identity::Identity;
use crate::ids::Ids;
use crate::number::{as_half, as_single};
use crate::pace;
use crate::schema::{EVENT_TIMES, Encoder, FLOAT_IDS, Layout, SparseEncoder, dense_number, expected_label};
use crate::source::{Rows, Source, Tally, View, offset};
use crate::storage::{FilePlace, Object, SourceFile, identity_of};
use crate::time::TimeFilter;

/// The number of rows that are decoded at a time.
const DECODE_ROWS: usize = 4096;

/// Parquet files, in reading order.
#[derive(Debug)]
pub(crate) struct ParquetSource {
    files: Arc<Vec<ParquetFile>>,
    encoder: Arc<Encoder>,
}

impl ParquetSource {
    /// Finds the files, reads their footers, and finds the columns in each.
    ///
    /// # Errors
    /// Files that cannot be found or read; a missing column, or one of the wrong type; no rows.
    pub(crate) fn open(opening: &Opening<'_>) -> Result<Self, DataError> {
        Self::over((opening.find_files)()?, opening)
    }

    /// Opens these files.
    pub(crate) fn over(files: Vec<SourceFile>, opening: &Opening<'_>) -> Result<Self, DataError> {
        let first = files.first().map(|file| file.name.clone()).unwrap_or_default();
        let (encoder, time) = (opening.encoder, opening.time);
        let opened = open_each(files, |file| ParquetFile::open(file, encoder, time))?;
        let files: Vec<ParquetFile> = opened.into_iter().flatten().collect();
        if files.is_empty() {
            return Err(DataError::Empty { file: first });
        }
        // Writers of partitions leave files without rows for the empty ones.
        if files.iter().all(|file| file.rows == 0) {
            return Err(DataError::NoRows { file: first });
        }
        Ok(Self { files: Arc::new(files), encoder: Arc::clone(opening.encoder) })
    }
}

impl Source for ParquetSource {
    fn open(&self, view: View) -> Result<Box<dyn Rows>, DataError> {
        Ok(Box::new(ParquetRows::open(self, view)))
    }

    fn identity(&self) -> Identity {
        identity_of(&self.files())
    }

    fn known_rows(&self) -> Vec<u64> {
        self.files.iter().map(|file| file.rows).collect()
    }

    fn count_rows(&self, _stop: &Stop) -> Result<u64, DataError> {
        Ok(self.estimated_rows())
    }

    fn estimated_rows(&self) -> u64 {
        self.files.iter().map(|file| file.rows).sum()
    }

    fn files(&self) -> Vec<&SourceFile> {
        self.files.iter().map(|file| &file.file).collect()
    }
}

/// A Parquet file with its footer and its columns.
#[derive(Debug)]
struct ParquetFile {
    file: SourceFile,
    layout: Layout,
    rows: u64,
    metadata: ArrowReaderMetadata,
    mask: ProjectionMask,
}

impl ParquetFile {
    /// Reads the footer, and finds the columns. `None` if the file has no rows and lacks a column,
    /// or has no column at all. The types of a file without rows do not count: some writers know
    /// none for a column without values.
    fn open(file: SourceFile, encoder: &Encoder, time: Option<(&str, &TimeBound)>) -> Result<Option<Self>, DataError> {
        if file.size == 0 {
            return Ok(None);
        }
        let schema = &encoder.schema;
        let metadata = read_footer(&file)?;
        let rows = count_rows(&file, metadata.metadata())?;
        let fields = metadata.schema().fields();
        if rows == 0 && fields.is_empty() {
            return Ok(None);
        }
        let names = fields.iter().map(|field| field.name().clone()).collect();
        let layout = match Layout::bind(&file.name, names, encoder, time.map(|(name, _)| name)) {
            Err(_) if rows == 0 => return Ok(None),
            layout => layout?,
        };
        let types: Vec<&DataType> = fields.iter().map(|field| field.data_type()).collect();
        if rows > 0 {
            check_types(&file.name, &layout, &types, schema, time.map(|(_, bound)| bound))?;
        }
        let metadata = keep_dictionaries(metadata, &layout, schema);
        let inputs = layout.sparse.iter().chain(&layout.dense).chain(&layout.carried);
        let roots = inputs.chain(&layout.label).chain(&layout.group).chain(&layout.time).chain(&layout.clock);
        let mask = ProjectionMask::roots(metadata.parquet_schema(), roots.copied());
        check_compression(&file, metadata.metadata())?;
        check_places(&file, metadata.metadata())?;
        Ok(Some(Self { file, layout, rows, metadata, mask }))
    }

    fn groups(&self) -> usize {
        self.metadata.metadata().num_row_groups()
    }

    fn group_rows(&self, group: usize) -> u64 {
        let rows = self.metadata.metadata().row_group(group).num_rows();
        u64::try_from(rows).unwrap_or(0)
    }

    /// Rows of the file before a row group.
    fn rows_before(&self, group: usize) -> u64 {
        (0..group).map(|group| self.group_rows(group)).sum()
    }

    /// First byte and length of each wanted column of a row group.
    fn column_ranges(&self, group: usize) -> Vec<(u64, u64)> {
        let columns = self.metadata.metadata().row_group(group).columns();
        columns
            .iter()
            .enumerate()
            .filter(|(leaf, _)| self.mask.leaf_included(*leaf))
            .map(|(_, column)| column.byte_range())
            .collect()
    }

    fn damaged(&self, error: &ArrowError) -> DataError {
        DataError::Damaged { file: self.file.name.clone(), problem: error.to_string() }
    }
}

/// The rows of a file. Fails if its footer contradicts itself.
fn count_rows(file: &SourceFile, metadata: &ParquetMetaData) -> Result<u64, DataError> {
    let all = metadata.file_metadata().num_rows();
    let groups: i128 = metadata.row_groups().iter().map(|group| i128::from(group.num_rows())).sum();
    match u64::try_from(all) {
        Ok(rows) if i128::from(rows) == groups => Ok(rows),
        _ => Err(not_parquet(file, format!("its footer counts {all} rows, and its row groups have {groups}"))),
    }
}

/// The types come from Parquet's own. The Arrow schema that some writers add could request
/// dictionaries and views, which this reader would only undo.
fn reader_options() -> ArrowReaderOptions {
    ArrowReaderOptions::new().with_skip_arrow_metadata(true)
}

/// Metadata that has single-valued sparse features read as dictionaries, if all their pages are.
fn keep_dictionaries(metadata: ArrowReaderMetadata, layout: &Layout, schema: &Schema) -> ArrowReaderMetadata {
    let fields = metadata.schema().fields();
    let wanted = |place: usize| {
        let mut sparse = schema.sparse.iter().zip(&layout.sparse);
        let is_single = sparse.any(|(field, &column)| column == place && !field.is_variable());
        is_single && is_in_dictionaries(metadata.metadata(), fields[place].name())
    };
    let field = |(place, field): (usize, &Arc<Field>)| match field.data_type() {
        found @ (DataType::Utf8 | DataType::Binary) if wanted(place) => {
            let dictionary = DataType::Dictionary(Box::new(DataType::Int32), Box::new(found.clone()));
            Arc::new(field.as_ref().clone().with_data_type(dictionary))
        }
        _ => Arc::clone(field),
    };
    let fields: Fields = fields.iter().enumerate().map(field).collect();
    let options = ArrowReaderOptions::new().with_schema(Arc::new(arrow_schema::Schema::new(fields)));
    ArrowReaderMetadata::try_new(Arc::clone(metadata.metadata()), options).unwrap_or(metadata)
}

/// Whether every page of a column refers to its row group's dictionary.
fn is_in_dictionaries(metadata: &ParquetMetaData, column: &str) -> bool {
    metadata.row_groups().iter().all(|group| {
        let chunk = group.columns().iter().find(|chunk| chunk.column_path().parts() == [column]);
        chunk.is_some_and(|chunk| {
            let pages = chunk.page_encoding_stats_mask();
            let only = |encoding| pages.is_some_and(|pages| pages.is_only(encoding));
            chunk.dictionary_page_offset().is_some()
                && (only(Encoding::RLE_DICTIONARY) || only(Encoding::PLAIN_DICTIONARY))
        })
    })
}

fn read_footer(file: &SourceFile) -> Result<ArrowReaderMetadata, DataError> {
    let footer = match &file.place {
        FilePlace::Local(path) => {
            let opened = File::open(path).map_err(|error| file.read_error(error))?;
            caught(|| ArrowReaderMetadata::load(&opened, reader_options()))
        }
        FilePlace::Object(object) => {
            let remote = Remote { object: object.clone(), size: file.size };
            caught(|| ArrowReaderMetadata::load(&remote, reader_options()))
        }
    };
    footer.and_then(|footer| footer).map_err(|error| match error {
        ParquetError::External(inner) => match inner.downcast::<std::io::Error>() {
            Ok(error) => file.read_error(*error),
            Err(other) => not_parquet(file, other.to_string()),
        },
        error => not_parquet(file, error.to_string()),
    })
}

fn not_parquet(file: &SourceFile, problem: String) -> DataError {
    DataError::WrongFormat { file: file.name.clone(), expected: "a readable Parquet file", problem }
}

/// Refuses a column chunk before the beginning of the file, or of a negative length. The library
/// panics on both.
fn check_places(file: &SourceFile, metadata: &ParquetMetaData) -> Result<(), DataError> {
    for (group, row_group) in metadata.row_groups().iter().enumerate() {
        for column in row_group.columns() {
            let start = column.dictionary_page_offset().unwrap_or_else(|| column.data_page_offset());
            let length = column.compressed_size();
            if start < 0 || length < 0 {
                let path = column.column_path();
                let problem = format!("row group {group}, column `{path}`: {length} bytes from byte {start} on");
                return Err(not_parquet(file, problem));
            }
        }
    }
    Ok(())
}

/// Refuses a codec that this build cannot decompress, before the first page is read.
fn check_compression(file: &SourceFile, metadata: &ParquetMetaData) -> Result<(), DataError> {
    let columns = metadata.row_groups().iter().flat_map(|group| group.columns());
    let known = |codec: &Compression| {
        matches!(codec, Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::GZIP(_) | Compression::ZSTD(_))
    };
    match columns.map(|column| column.compression()).find(|codec| !known(codec)) {
        Some(codec) => {
            Err(not_parquet(file, format!("it is compressed with {codec}; write it with Zstandard, Snappy or gzip")))
        }
        None => Ok(()),
    }
}

/// An object as the Parquet reader reads its footer. Each request is one round trip.
struct Remote {
    object: Object,
    size: u64,
}

impl Length for Remote {
    fn len(&self) -> u64 {
        self.size
    }
}

impl ChunkReader for Remote {
    type T = bytes::buf::Reader<Bytes>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        let length = self.size.saturating_sub(start) as usize;
        Ok(self.get_bytes(start, length)?.reader())
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        let fetched =
            self.object.fetch(start..start + length as u64).and_then(|pending| pending.wait(&Stop::default())?);
        fetched.map_err(|error| ParquetError::External(Box::new(error)))
    }
}

/// The columns of one row group of an object, in memory.
#[derive(Clone)]
struct Fetched {
    size: u64,
    /// First byte and bytes of each column, ascending.
    pieces: Arc<Vec<(u64, Bytes)>>,
}

impl Fetched {
    fn from(&self, start: u64) -> Result<Bytes, ParquetError> {
        let piece = self.pieces.partition_point(|(first, _)| *first <= start);
        let found = piece.checked_sub(1).and_then(|piece| {
            let (first, bytes) = &self.pieces[piece];
            let skip = (start - first) as usize;
            (skip < bytes.len()).then(|| bytes.slice(skip..))
        });
        found.ok_or_else(|| ParquetError::EOF(format!("no column at byte {start}")))
    }
}

impl Length for Fetched {
    fn len(&self) -> u64 {
        self.size
    }
}

impl ChunkReader for Fetched {
    type T = bytes::buf::Reader<Bytes>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        Ok(self.from(start)?.reader())
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        let bytes = self.from(start)?;
        match length <= bytes.len() {
            true => Ok(bytes.slice(..length)),
            false => Err(ParquetError::EOF(format!("column ends before byte {length}"))),
        }
    }
}

/// A fetch of the columns of a row group, in progress.
struct Fetching {
    file: usize,
    group: usize,
    pieces: Vec<(u64, Pending<std::io::Result<Bytes>>)>,
}

/// Cursor over the rows of Parquet files.
struct ParquetRows {
    files: Arc<Vec<ParquetFile>>,
    encoder: Arc<Encoder>,
    time: Option<TimeFilter>,
    tally: Tally,
    stop: Stop,
    /// The current row group.
    file: usize,
    group: usize,
    /// Rows of it that were decoded or passed over.
    group_at: u64,
    /// Rows of the view not yet decoded or passed over.
    left: u64,
    reader: Option<ParquetRecordBatchReader>,
    /// The current row group of an object.
    fetched: Option<Fetched>,
    next: Option<Fetching>,
    decoded: Decoded,
    dictionaries: Dictionaries,
}

/// Decoded rows. The first `at` of them were taken.
#[derive(Default)]
struct Decoded {
    rows: Batch,
    at: usize,
    /// Rows of the file before the decoded ones, those left out included.
    first_row: u64,
    /// The place of each row of `rows` after `first_row`.
    places: Vec<usize>,
    /// Bad rows that were not counted yet, in order.
    bad: VecDeque<BadRow>,
}

/// A bad row among decoded rows.
struct BadRow {
    /// Good rows before it.
    before: usize,
    /// Its place after [`Decoded::first_row`].
    place: usize,
    error: DataError,
}

impl Decoded {
    /// The next bad row, if no good row is before it.
    fn next_bad(&mut self) -> Option<DataError> {
        let bad = self.bad.pop_front_if(|bad| bad.before <= self.at)?;
        Some(bad.error)
    }

    /// The place of the next row, good or bad.
    fn next_place(&self) -> Option<usize> {
        let (good, bad) = (self.places.get(self.at).copied(), self.bad.front().map(|bad| bad.place));
        good.into_iter().chain(bad).min()
    }
}

impl ParquetRows {
    fn open(source: &ParquetSource, view: View) -> Self {
        Self {
            files: Arc::clone(&source.files),
            encoder: Arc::clone(&source.encoder),
            time: view.time,
            tally: Tally::new(view.bad_rows),
            stop: view.stop,
            file: view.from.part.0 as usize,
            group: 0,
            group_at: view.from.offset.0,
            left: view.limit.unwrap_or(u64::MAX),
            reader: None,
            fetched: None,
            next: None,
            decoded: Decoded::default(),
            dictionaries: Dictionaries::default(),
        }
    }

    /// Moves to the row group that contains `group_at`. `false` if there is none.
    fn settle(&mut self) -> bool {
        while let Some(file) = self.files.get(self.file) {
            if self.group == file.groups() {
                (self.file, self.group) = (self.file + 1, 0);
                continue;
            }
            let rows = file.group_rows(self.group);
            if self.group_at < rows {
                return true;
            }
            self.group_at -= rows;
            self.group += 1;
            self.reader = None;
            self.fetched = None;
        }
        false
    }

    /// Passes over up to `rows` rows behind the decoded ones, without decoding them. Returns their
    /// number.
    fn pass_over(&mut self, rows: u64) -> u64 {
        let mut passed = 0;
        while passed < rows && self.left > 0 && self.settle() {
            let group = self.files[self.file].group_rows(self.group);
            let step = (rows - passed).min(self.left).min(group - self.group_at);
            self.group_at += step;
            self.left -= step;
            passed += step;
            self.reader = None;
        }
        passed
    }

    /// Decodes the next rows. `false` at the end of the view.
    fn decode(&mut self) -> Result<bool, DataError> {
        if self.left == 0 || !self.settle() {
            return Ok(false);
        }
        if self.stop.is_set() {
            return Err(DataError::Stopped);
        }
        let mut reader = match self.reader.take() {
            Some(reader) => reader,
            None => self.open_group()?,
        };
        let file = &self.files[self.file];
        let next = caught(|| reader.next()).map_err(|error| self.damage(file, error.to_string()))?;
        let Some(batch) = next else {
            return Err(DataError::Damaged {
                file: file.file.name.clone(),
                problem: format!("row group {} has fewer rows than its footer says", self.group),
            });
        };
        let batch = batch.map_err(|error| self.damage(file, error.to_string()))?;
        pace::pass(1);
        let rows = (batch.num_rows() as u64).min(self.left);
        let first_row = file.rows_before(self.group) + self.group_at;
        let columns = Columns { file, batch: batch.slice(0, rows as usize), first_row };
        self.decoded = columns.decode(&self.encoder, self.time.as_ref(), &mut self.dictionaries)?;
        self.group_at += rows;
        self.left -= rows.min(self.left);
        self.reader = Some(reader);
        Ok(true)
    }

    fn open_group(&mut self) -> Result<ParquetRecordBatchReader, DataError> {
        let files = Arc::clone(&self.files);
        let file = &files[self.file];
        let reader = match &file.file.place {
            FilePlace::Local(path) => {
                let opened = File::open(path).map_err(|error| file.file.read_error(error))?;
                self.build(file, opened)
            }
            FilePlace::Object(object) => {
                let fetched = self.fetched_group(file, object)?;
                self.build(file, fetched)
            }
        };
        reader.map_err(|error| self.damage(file, error.to_string()))
    }

    /// The error for the current row group, which the decoder refused with `error`.
    fn damage(&self, file: &ParquetFile, error: String) -> DataError {
        let (metadata, mask) = (file.metadata.metadata(), &file.mask);
        let column = match &file.file.place {
            FilePlace::Local(path) => {
                File::open(path).ok().and_then(|input| BadColumn::find(input, metadata, mask, self.group))
            }
            FilePlace::Object(_) => {
                self.fetched.clone().and_then(|input| BadColumn::find(input, metadata, mask, self.group))
            }
        };
        DataError::Damaged { file: file.file.name.clone(), problem: damage::problem(self.group, column, error) }
    }

    fn build<T: ChunkReader + 'static>(
        &self,
        file: &ParquetFile,
        input: T,
    ) -> Result<ParquetRecordBatchReader, ParquetError> {
        caught(|| {
            ParquetRecordBatchReaderBuilder::new_with_metadata(input, file.metadata.clone())
                .with_row_groups(vec![self.group])
                .with_projection(file.mask.clone())
                .with_batch_size(DECODE_ROWS)
                .with_offset(self.group_at as usize)
                .build()
        })?
    }

    /// The columns of the current row group: from memory, from the fetch in progress, or from a new
    /// one.
    fn fetched_group(&mut self, file: &ParquetFile, object: &Object) -> Result<Fetched, DataError> {
        if let Some(fetched) = &self.fetched {
            return Ok(fetched.clone());
        }
        let failed = |error| file.file.read_error(error);
        let fetching = match self.next.take() {
            Some(next) if (next.file, next.group) == (self.file, self.group) => next,
            _ => start_fetch(file, object, self.file, self.group).map_err(failed)?,
        };
        let mut pieces = Vec::with_capacity(fetching.pieces.len());
        for (first, pending) in fetching.pieces {
            let bytes = pending.wait(&self.stop).and_then(|bytes| bytes);
            pieces.push((first, bytes.map_err(failed)?));
        }
        pieces.sort_by_key(|(first, _)| *first);
        let fetched = Fetched { size: file.file.size, pieces: Arc::new(pieces) };
        self.fetched = Some(fetched.clone());
        if self.group + 1 < file.groups() {
            let next = start_fetch(file, object, self.file, self.group + 1);
            self.next = Some(next.map_err(failed)?);
        }
        Ok(fetched)
    }
}

fn start_fetch(file: &ParquetFile, object: &Object, file_index: usize, group: usize) -> std::io::Result<Fetching> {
    let pieces = file
        .column_ranges(group)
        .into_iter()
        .map(|(first, length)| Ok((first, object.fetch(first..first + length)?)))
        .collect::<std::io::Result<_>>()?;
    Ok(Fetching { file: file_index, group, pieces })
}

impl Rows for ParquetRows {
    fn advance(&mut self, rows: u64, mut into: Option<&mut Batch>) -> Result<u64, DataError> {
        let look = into.is_some() || self.tally.skips() || self.time.is_some();
        let mut passed = 0;
        while passed < rows {
            let decoded = &mut self.decoded;
            if let Some(error) = decoded.next_bad() {
                match look {
                    true => self.tally.note(error)?,
                    // The caller passes over it, as over any other row.
                    false => passed += 1,
                }
                continue;
            }
            let until = decoded.bad.front().map_or(decoded.rows.samples, |bad| bad.before);
            if decoded.at < until {
                let step = ((rows - passed) as usize).min(until - decoded.at);
                if let Some(batch) = &mut into {
                    batch.append(&decoded.rows, decoded.at..decoded.at + step);
                }
                decoded.at += step;
                passed += step as u64;
            } else if !look {
                return Ok(passed + self.pass_over(rows - passed));
            } else if !self.decode()? {
                break;
            }
        }
        Ok(passed)
    }

    fn pass_over_bad(&mut self) -> Result<(), DataError> {
        while self.tally.skips() {
            if let Some(error) = self.decoded.next_bad() {
                self.tally.note(error)?;
            } else if self.decoded.at < self.decoded.rows.samples || !self.decode()? {
                break;
            }
        }
        Ok(())
    }

    fn skipped(&self) -> u64 {
        self.tally.skipped
    }

    fn position(&self) -> Position {
        let row = match (self.decoded.next_place(), self.files.get(self.file)) {
            (Some(place), _) => self.decoded.first_row + place as u64,
            (None, Some(file)) => file.rows_before(self.group) + self.group_at,
            (None, None) => self.group_at,
        };
        Position::new(self.file as u32, row)
    }
}

fn is_number(found: &DataType) -> bool {
    found.is_numeric() || matches!(found, DataType::Boolean)
}

/// Whether a column may hold ids. One without a type has nothing but nulls.
fn is_id(found: &DataType) -> bool {
    found.is_integer() || found.is_floating() || matches!(found, DataType::Utf8 | DataType::Binary | DataType::Null)
}

/// Whether a value of a column may be no id: a float or a text.
fn may_be_no_id(found: &DataType) -> bool {
    match found {
        DataType::List(item) => may_be_no_id(item.data_type()),
        found => found.is_floating() || matches!(found, DataType::Utf8 | DataType::Binary),
    }
}

/// A bound as the values of a column are compared with it, which are widened to 64 bits.
fn bound_in(found: &DataType, bound: f64) -> f64 {
    match found {
        DataType::Float16 => as_half(bound),
        DataType::Float32 => as_single(bound),
        _ => bound,
    }
}

fn is_time(found: &DataType, bound: &TimeBound) -> bool {
    let date = matches!(found, DataType::Timestamp(_, _) | DataType::Date32 | DataType::Date64);
    match bound {
        TimeBound::Number(_) | TimeBound::Integer(_) => found.is_numeric() || date,
        TimeBound::Date(_) => date || matches!(found, DataType::Utf8 | DataType::Binary),
    }
}

fn is_event_time(found: &DataType) -> bool {
    let is_text = matches!(found, DataType::Utf8 | DataType::Binary);
    is_text || found.is_numeric() || matches!(found, DataType::Timestamp(_, _) | DataType::Date32 | DataType::Date64)
}

fn check_types(
    file: &str,
    layout: &Layout,
    types: &[&DataType],
    schema: &Schema,
    time: Option<&TimeBound>,
) -> Result<(), DataError> {
    let refuse = |column: usize, expected| {
        Err(DataError::ColumnType {
            file: file.to_owned(),
            column: layout.names[column].clone(),
            found: types[column].to_string(),
            expected,
        })
    };
    for &column in &layout.dense {
        if !is_number(types[column]) && *types[column] != DataType::Null {
            return refuse(column, "a dense feature must be numbers");
        }
    }
    if let Some(label) = layout.label {
        match (types[label], schema.label.values.is_empty()) {
            (found, true) if is_number(found) => {}
            (DataType::Utf8 | DataType::Binary, false) => {}
            (_, true) => return refuse(label, "a label must be numbers, or text with `values` for its words"),
            (_, false) => return refuse(label, "the label has words in `values`, so it must be text"),
        }
    }
    for (field, &column) in schema.sparse.iter().zip(&layout.sparse) {
        match (types[column], &field.multi_value) {
            (DataType::List(item), Some(_)) if is_id(item.data_type()) => {}
            (DataType::List(_), None) => {
                return refuse(column, "a list has several values: add `multiValue: {}` to the feature");
            }
            (DataType::Utf8 | DataType::Binary, Some(separator)) if separator.is_empty() => {
                return refuse(column, "text with several values needs the `separator` of `multiValue`");
            }
            (found, _) if is_id(found) => {}
            _ => {
                return refuse(column, "a sparse feature must be integers (also as floats), text, or a list of these");
            }
        }
    }
    if let Some(column) = layout.group
        && !is_id(types[column])
    {
        return refuse(column, "a group must be integers (also as floats) or text");
    }
    if let Some(column) = layout.clock
        && !is_event_time(types[column])
    {
        return refuse(column, "a column of times must be numbers, timestamps, dates or text");
    }
    match (layout.time, time) {
        (Some(column), Some(bound)) if !is_time(types[column], bound) => match bound {
            TimeBound::Number(_) | TimeBound::Integer(_) => {
                refuse(column, "a split by a number needs a number, a timestamp or a date")
            }
            TimeBound::Date(_) => refuse(column, "a split by a date needs text, a timestamp or a date"),
        },
        _ => Ok(()),
    }
}

/// The labels of some rows.
struct Labels {
    column: usize,
    /// Numbers; a word is the number of its label, or null.
    values: Float64Array,
    /// The rule for the numbers, with a threshold as the column holds it.
    rule: LabelField,
}

impl Labels {
    /// The label of a row, or the column if its value is none.
    fn of(&self, row: usize) -> Result<f32, usize> {
        let value = if self.values.is_null(row) { f64::NAN } else { self.values.value(row) };
        self.rule.label_of(value).ok_or(self.column)
    }
}

/// Some rows of the wanted columns.
struct Columns<'a> {
    file: &'a ParquetFile,
    batch: RecordBatch,
    /// Rows of the file before these.
    first_row: u64,
}

impl Columns<'_> {
    fn column(&self, column: usize) -> Result<&ArrayRef, DataError> {
        let name = &self.file.layout.names[column];
        self.batch
            .column_by_name(name)
            .ok_or_else(|| self.file.damaged(&ArrowError::SchemaError(format!("no column {name}"))))
    }

    fn cast(&self, column: usize, to: &DataType) -> Result<ArrayRef, DataError> {
        cast(self.column(column)?, to).map_err(|error| self.file.damaged(&error))
    }

    fn doubles(&self, column: usize) -> Result<Float64Array, DataError> {
        Ok(self.cast(column, &DataType::Float64)?.as_primitive().clone())
    }

    fn floats(&self, column: usize) -> Result<Float32Array, DataError> {
        Ok(self.cast(column, &DataType::Float32)?.as_primitive().clone())
    }

    /// A value as an error shows it.
    fn value(&self, row: usize, column: usize) -> Result<String, DataError> {
        let values = self.column(column)?;
        let value = match values.is_null(row) {
            true => String::new(),
            false => array_value_to_string(values, row).map_err(|e| self.file.damaged(&e))?,
        };
        Ok(shown(value.as_bytes()))
    }

    fn bad_row(&self, row: usize, column: usize, expected: &str) -> Result<DataError, DataError> {
        Ok(DataError::BadRow {
            file: self.file.file.name.clone(),
            at: Place::Row(self.first_row + row as u64 + 1),
            column: self.file.layout.names[column].clone(),
            value: self.value(row, column)?,
            expected: expected.to_owned(),
        })
    }

    fn decode(
        &self,
        encoder: &Encoder,
        time: Option<&TimeFilter>,
        dictionaries: &mut Dictionaries,
    ) -> Result<Decoded, DataError> {
        let mut decoded = self.decode_numbers(encoder, time, dictionaries)?;
        self.decode_ids(encoder, dictionaries, &mut decoded)?;
        self.carry(&mut decoded)?;
        Ok(decoded)
    }

    /// Finds the rows that are selected and good, and decodes their labels and dense features.
    fn decode_numbers(
        &self,
        encoder: &Encoder,
        time: Option<&TimeFilter>,
        dictionaries: &mut Dictionaries,
    ) -> Result<Decoded, DataError> {
        let (layout, schema) = (&self.file.layout, &encoder.schema);
        let labels = self.labels(&schema.label)?;
        let dense: Vec<Float32Array> =
            layout.dense.iter().map(|&column| self.floats(column)).collect::<Result<_, _>>()?;
        let (selected, checked) = (self.selected(time)?, self.checked_ids(encoder, dictionaries)?);
        let clock = self.event_times(schema)?;
        let mut rows = encoder.empty_batch();
        rows.reserve(self.batch.num_rows());
        let (mut places, mut bad) = (Vec::new(), VecDeque::new());
        for place in 0..self.batch.num_rows() {
            let mut fault = |column, expected: &str| -> Result<(), DataError> {
                let error = self.bad_row(place, column, expected)?;
                bad.push_back(BadRow { before: places.len(), place, error });
                Ok(())
            };
            match selected.as_ref().map(|selected| selected[place]) {
                Some(None) => {
                    let expected = time.map_or("a time", TimeFilter::expected);
                    fault(layout.time.unwrap_or_default(), expected)?;
                    continue;
                }
                Some(Some(false)) => continue,
                Some(Some(true)) | None => {}
            }
            let label = labels.as_ref().map_or(Ok(f32::NAN), |labels| labels.of(place));
            let label = match label {
                Ok(label) => label,
                Err(column) => {
                    let expected = expected_label(&schema.label, &self.value(place, column)?);
                    fault(column, &expected)?;
                    continue;
                }
            };
            let Some(seconds) = clock.as_ref().map_or(Some(0), |times| times[place]) else {
                fault(layout.clock.unwrap_or_default(), EVENT_TIMES)?;
                continue;
            };
            if let Some((column, expected)) = checked.iter().find_map(|checked| checked.fault(place)) {
                fault(column, expected)?;
                continue;
            }
            if let Err((column, expected)) = push_dense(&dense, place, schema, layout, &mut rows.dense) {
                fault(column, expected)?;
                continue;
            }
            rows.labels.push(label);
            rows.times.iter_mut().for_each(|times| times.push(seconds));
            places.push(place);
        }
        rows.samples = places.len();
        Ok(Decoded { rows, at: 0, first_row: self.first_row, places, bad })
    }

    /// The labels. `None` if the file has none.
    fn labels(&self, field: &LabelField) -> Result<Option<Labels>, DataError> {
        let Some(column) = self.file.layout.label else { return Ok(None) };
        let found = self.column(column)?.data_type();
        let threshold = field.positive_from.map(|threshold| bound_in(found, threshold));
        let rule = LabelField::of_numbers(&field.name, threshold);
        Ok(Some(Labels { column, values: self.label_values(column, field)?, rule }))
    }

    /// The numbers of the label column. A word is the number of its label, or null.
    fn label_values(&self, column: usize, field: &LabelField) -> Result<Float64Array, DataError> {
        if field.values.is_empty() {
            return self.doubles(column);
        }
        let words = self.cast(column, &DataType::Binary)?;
        let words: &BinaryArray = words.as_binary();
        let label = |word: Option<&[u8]>| field.label_of_word(word?).map(f64::from);
        Ok(words.iter().map(label).collect())
    }

    /// Adds the texts of the carried columns of the decoded rows.
    fn carry(&self, decoded: &mut Decoded) -> Result<(), DataError> {
        for (into, &column) in decoded.rows.carried.iter_mut().zip(&self.file.layout.carried) {
            let values = self.column(column)?;
            // A column that is also a sparse feature may be a dictionary of texts.
            if matches!(values.data_type(), DataType::Utf8 | DataType::Binary | DataType::Dictionary(_, _)) {
                let texts = self.cast(column, &DataType::Binary)?;
                let texts: &BinaryArray = texts.as_binary();
                decoded.places.iter().for_each(|&place| into.push(texts.is_valid(place).then(|| texts.value(place))));
                continue;
            }
            for &place in &decoded.places {
                if values.is_null(place) {
                    into.push(None);
                    continue;
                }
                let text = array_value_to_string(values, place).map_err(|error| self.file.damaged(&error))?;
                into.push(Some(text.as_bytes()));
            }
        }
        Ok(())
    }

    /// The columns with values that may be no ids: floats and texts.
    fn checked_ids<'a>(
        &self,
        encoder: &'a Encoder,
        dictionaries: &mut Dictionaries,
    ) -> Result<Vec<CheckedIds<'a>>, DataError> {
        let layout = &self.file.layout;
        let sparse = layout.sparse.iter().zip(&encoder.sparse);
        let mut found = Vec::new();
        for (&column, sparse) in sparse.chain(layout.group.iter().zip(&encoder.group)) {
            let values = self.column(column)?;
            let damaged = |error: ArrowError| self.file.damaged(&error);
            let ids = match (values.as_dictionary_opt::<Int32Type>(), &sparse.separator) {
                (Some(rows), None) => {
                    let Some(rounded) = dictionaries.rounded(column, rows.values()).map_err(damaged)? else { continue };
                    MaybeIds::Dictionary(rows.clone(), rounded)
                }
                (None, _) if !may_be_no_id(values.data_type()) => continue,
                _ => MaybeIds::Values(Ids::of(values).map_err(damaged)?),
            };
            found.push(CheckedIds { column, ids, sparse });
        }
        Ok(found)
    }

    /// Adds the ids and the groups of the decoded rows.
    fn decode_ids(
        &self,
        encoder: &Encoder,
        dictionaries: &mut Dictionaries,
        decoded: &mut Decoded,
    ) -> Result<(), DataError> {
        let layout = &self.file.layout;
        let (rows, places) = (&mut decoded.rows, &decoded.places);
        for ((into, &column), sparse) in rows.sparse.iter_mut().zip(&layout.sparse).zip(&encoder.sparse) {
            let values = self.column(column)?;
            if let (Some(values), None) = (values.as_dictionary_opt::<Int32Type>(), &into.offsets) {
                let keys = dictionaries.keys(column, values.values(), sparse);
                let keys = keys.and_then(|keys| from_dictionary(values, keys, places, sparse, &mut into.keys));
                keys.map_err(|error| self.file.damaged(&error))?;
                continue;
            }
            let values = Ids::of(values).map_err(|error| self.file.damaged(&error))?;
            for &place in places {
                values.push(place, sparse, &mut into.keys);
                if let Some(offsets) = &mut into.offsets {
                    offsets.push(offset(into.keys.len(), &layout.names[column])?);
                }
            }
        }
        if let (Some(groups), Some(column), Some(group)) = (&mut rows.groups, layout.group, &encoder.group) {
            let values = Ids::of(self.column(column)?).map_err(|error| self.file.damaged(&error))?;
            places.iter().for_each(|&place| values.push(place, group, groups));
        }
        Ok(())
    }

    /// For each row whether the filter keeps it, or `None` if the row has no time. Nothing without
    /// a filter.
    fn selected(&self, time: Option<&TimeFilter>) -> Result<Option<Vec<Option<bool>>>, DataError> {
        let (Some(filter), Some(column)) = (time, self.file.layout.time) else {
            return Ok(None);
        };
        let keeps = |moment: Option<Moment>| moment.map(|moment| filter.keeps_moment(moment));
        match self.moments(column)? {
            Some(moments) => Ok(Some(moments.into_iter().map(keeps).collect())),
            None => self.selected_by_value(filter, column).map(Some),
        }
    }

    /// The moments of a column of timestamps or dates. `None` for a column of another type.
    fn moments(&self, column: usize) -> Result<Option<Vec<Option<Moment>>>, DataError> {
        let ticks = |ticks: Option<i64>, per_second| ticks.map(|ticks| Moment::of_ticks(ticks, per_second));
        let per_second = match self.column(column)?.data_type() {
            DataType::Date32 => {
                let days = self.integers(column)?;
                return Ok(Some(days.iter().map(|days| ticks(days.map(|days| days * 86_400), 1)).collect()));
            }
            DataType::Date64 | DataType::Timestamp(TimeUnit::Millisecond, _) => 1_000,
            DataType::Timestamp(TimeUnit::Second, _) => 1,
            DataType::Timestamp(TimeUnit::Microsecond, _) => 1_000_000,
            DataType::Timestamp(TimeUnit::Nanosecond, _) => 1_000_000_000,
            _ => return Ok(None),
        };
        let moments = self.integers(column)?;
        Ok(Some(moments.iter().map(|time| ticks(time, per_second)).collect()))
    }

    /// The event time of each row in whole seconds since 1970, or `None` for a cell that is not a
    /// time. Nothing without a column of times.
    fn event_times(&self, schema: &Schema) -> Result<Option<Vec<Option<u64>>>, DataError> {
        let (Some(field), Some(column)) = (&schema.time, self.file.layout.clock) else {
            return Ok(None);
        };
        let seconds = |moment: Moment| u64::try_from(moment.seconds).unwrap_or(0);
        if let Some(moments) = self.moments(column)? {
            return Ok(Some(moments.into_iter().map(|moment| moment.map(seconds)).collect()));
        }
        match self.column(column)?.data_type() {
            DataType::Utf8 | DataType::Binary | DataType::Dictionary(_, _) => {
                let times = self.cast(column, &DataType::Binary)?;
                let times: &BinaryArray = times.as_binary();
                Ok(Some(times.iter().map(|time| field.seconds_of_text(time?)).collect()))
            }
            _ => Ok(Some(self.doubles(column)?.iter().map(|time| field.unit.seconds(time?)).collect())),
        }
    }

    /// For each row whether the filter keeps its text or number, or `None` if it is not a time.
    fn selected_by_value(&self, filter: &TimeFilter, column: usize) -> Result<Vec<Option<bool>>, DataError> {
        match self.column(column)?.data_type() {
            // A column that is also a sparse feature may be a dictionary of texts.
            DataType::Utf8 | DataType::Binary | DataType::Dictionary(_, _) => {
                let times = self.cast(column, &DataType::Binary)?;
                let times: &BinaryArray = times.as_binary();
                Ok(times.iter().map(|time| filter.keeps_text(time?)).collect())
            }
            DataType::UInt64 => {
                let times = self.column(column)?.as_primitive::<UInt64Type>();
                Ok(times.iter().map(|time| time.map(|time| filter.keeps_unsigned(time))).collect())
            }
            found if found.is_integer() => {
                let times = self.integers(column)?;
                Ok(times.iter().map(|time| time.map(|time| filter.keeps_integer(time))).collect())
            }
            found => {
                let filter = filter.for_floats(|bound| bound_in(found, bound));
                Ok(self.doubles(column)?.iter().map(|time| filter.keeps_number(time?)).collect())
            }
        }
    }

    fn integers(&self, column: usize) -> Result<Int64Array, DataError> {
        let values = match self.column(column)?.data_type() {
            DataType::Date32 => {
                let days = self.cast(column, &DataType::Int32)?;
                cast(&days, &DataType::Int64).map_err(|error| self.file.damaged(&error))?
            }
            _ => self.cast(column, &DataType::Int64)?,
        };
        Ok(values.as_primitive().clone())
    }
}

/// Appends the dense features of a row, or fails with the column and the expected value.
fn push_dense(
    columns: &[Float32Array],
    row: usize,
    schema: &Schema,
    layout: &Layout,
    into: &mut Vec<f32>,
) -> Result<(), (usize, &'static str)> {
    let before = into.len();
    for ((values, field), &column) in columns.iter().zip(&schema.dense).zip(&layout.dense) {
        let value = if values.is_null(row) { f32::NAN } else { values.value(row) };
        match dense_number(field, value) {
            Ok(input) => into.push(input),
            Err(expected) => {
                into.truncate(before);
                return Err((column, expected));
            }
        }
    }
    Ok(())
}

/// For each text of a dictionary, whether it is a rounded number; `None` if no text is.
type Rounded = Option<Arc<[bool]>>;

/// Findings about the texts of dictionaries, by column. Many batches share a dictionary.
#[derive(Default)]
struct Dictionaries {
    keys: HashMap<usize, (ArrayData, Vec<u64>)>,
    rounded: HashMap<usize, (ArrayData, Rounded)>,
}

impl Dictionaries {
    /// The keys of these texts, in order.
    fn keys(&mut self, column: usize, texts: &ArrayRef, sparse: &SparseEncoder) -> Result<&[u64], ArrowError> {
        let keys = of_dictionary(&mut self.keys, column, texts, |values| {
            let mut keys = Vec::with_capacity(texts.len());
            (0..texts.len()).for_each(|text| values.push(text, sparse, &mut keys));
            keys
        })?;
        Ok(keys)
    }

    /// For each of these texts whether it is a float that may have lost digits. `None` if none is.
    fn rounded(&mut self, column: usize, texts: &ArrayRef) -> Result<Option<Arc<[bool]>>, ArrowError> {
        let rounded = of_dictionary(&mut self.rounded, column, texts, |values| {
            let rounded: Arc<[bool]> = (0..texts.len()).map(|text| values.is_rounded(text)).collect();
            rounded.contains(&true).then_some(rounded)
        })?;
        Ok(rounded.clone())
    }
}

/// The finding about the texts of a dictionary: the known one, or a new one.
fn of_dictionary<'a, T>(
    known: &'a mut HashMap<usize, (ArrayData, T)>,
    column: usize,
    texts: &ArrayRef,
    find: impl FnOnce(&Ids) -> T,
) -> Result<&'a T, ArrowError> {
    let data = texts.to_data();
    let (_, found) = match known.entry(column) {
        Entry::Occupied(entry) if entry.get().0.ptr_eq(&data) => entry.into_mut(),
        entry => {
            let found = find(&Ids::of(texts)?);
            entry.insert_entry((data, found)).into_mut()
        }
    };
    Ok(found)
}

/// Appends the keys of `rows`. Their texts are in a dictionary with these `keys`.
fn from_dictionary(
    values: &DictionaryArray<Int32Type>,
    keys: &[u64],
    rows: &[usize],
    sparse: &SparseEncoder,
    into: &mut Vec<u64>,
) -> Result<(), ArrowError> {
    for &row in rows {
        let Some(text) = values.key(row) else {
            into.extend(sparse.missing);
            continue;
        };
        let beyond = || ArrowError::ParseError(format!("row {row} of a batch names text {text} of {}", keys.len()));
        into.push(*keys.get(text).ok_or_else(beyond)?);
    }
    Ok(())
}

/// A column with values that may be no ids.
struct CheckedIds<'a> {
    column: usize,
    ids: MaybeIds,
    sparse: &'a SparseEncoder,
}

/// Values that may be no ids.
enum MaybeIds {
    /// Texts of a dictionary, and for each of them whether it is a float that may have lost digits.
    Dictionary(DictionaryArray<Int32Type>, Arc<[bool]>),
    /// All others.
    Values(Ids),
}

impl CheckedIds<'_> {
    /// The column and the expected values, if row `row` holds none.
    fn fault(&self, row: usize) -> Option<(usize, &'static str)> {
        let expected = match &self.ids {
            MaybeIds::Values(ids) => ids.fault(row, self.sparse)?,
            MaybeIds::Dictionary(rows, rounded) => {
                let is_rounded = rows.key(row).and_then(|text| rounded.get(text));
                is_rounded.is_some_and(|is_rounded| *is_rounded).then_some(FLOAT_IDS)?
            }
        };
        Some((self.column, expected))
    }
}
