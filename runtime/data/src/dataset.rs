//! A data set: a subset of the rows of a source. The entry to this crate: open one, and request a
//! reader.

use std::collections::HashSet;
use std::ffi::OsString;
use std::sync::Arc;

use object_store::ObjectStore;
use rectrain_kinds::{BadRows, Offset, Position, Schema, Segment, SegmentRead, Split, TimeBound};

use crate::batch::Batch;
use crate::blocking::Stop;
use crate::config::{ReadPlan, SourceConfig, Subset};
use crate::error::DataError;
use crate::identity::Identity;
use crate::reader::{ChunkReader, SpanReader};
use crate::schema::{self, Encoder};
use crate::source::{Rows, Source, View, locate};
use crate::sources::{self, Opening};
use crate::storage::{self, SourceFile};
use crate::stream::{PartitionFound, Probe};
use crate::time::TimeFilter;

/// A subset of the rows of a source. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Dataset {
    shared: Arc<Shared>,
    subset: Subset,
}

#[derive(Debug)]
struct Shared {
    config: SourceConfig,
    encoder: Arc<Encoder>,
    source: Box<dyn Source>,
}

/// The rows of a subset among all rows of a source, by number. A filter by time leaves out some of
/// them.
struct Extent {
    from: u64,
    /// `None`: to the end.
    to: Option<u64>,
    time: Option<TimeFilter>,
}

impl Extent {
    /// The same without its first `rows` rows.
    fn after(self, rows: u64) -> Self {
        Self { from: self.from.saturating_add(rows), ..self }
    }
}

impl Dataset {
    /// Finds the files and the columns in them. Reads the beginning of every text file and the
    /// footer of every Parquet file, at most 16 at a time. Blocks.
    ///
    /// # Errors
    /// A path that names nothing or a folder. An empty file. A column that is missing or has the
    /// wrong type. Settings that contradict each other.
    pub fn open(config: SourceConfig, schema: Schema) -> Result<Self, DataError> {
        let find_files = || storage::resolve(&config);
        let (source, encoder) = open_source(&config, schema, &find_files)?;
        Self::over(source, config, encoder)
    }

    /// The same over the objects of `store`. The paths of `config` are keys, or globs of keys.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_in(store: Arc<dyn ObjectStore>, config: SourceConfig, schema: Schema) -> Result<Self, DataError> {
        let find_files = || storage::resolve_in(&store, &config.paths);
        let (source, encoder) = open_source(&config, schema, &find_files)?;
        Self::over(source, config, encoder)
    }

    /// The rows of an open source.
    pub(crate) fn over(
        source: Box<dyn Source>,
        config: SourceConfig,
        encoder: Arc<Encoder>,
    ) -> Result<Self, DataError> {
        let divides_by_number = matches!(config.split, Some(Split::Position { .. } | Split::Fraction { .. }));
        if divides_by_number && !source.is_finite() {
            return Err(DataError::config("split", "rows that do not end can only be divided by time"));
        }
        let subset = config.subset;
        Ok(Self { shared: Arc::new(Shared { config, encoder, source }), subset })
    }

    /// The schema with which it was opened.
    pub fn schema(&self) -> &Schema {
        &self.shared.encoder.schema
    }

    /// A batch of no rows of this data set.
    pub(crate) fn empty_batch(&self) -> Batch {
        self.shared.encoder.empty_batch()
    }

    /// Another subset of the same source. The two share all counts of rows.
    ///
    /// # Errors
    /// `Train` or `Test` of a source without a split.
    pub fn subset(&self, subset: Subset) -> Result<Self, DataError> {
        check_subset(subset, self.shared.config.split.as_ref())?;
        Ok(Self { shared: Arc::clone(&self.shared), subset })
    }

    /// The parts of the source.
    pub fn identity(&self) -> Identity {
        self.shared.source.identity()
    }

    /// Names of the files, in reading order. Empty for a source without files.
    pub fn files(&self) -> Vec<String> {
        self.source_files().into_iter().map(|file| file.name.clone()).collect()
    }

    /// Names of the files as in [`FoundFile::canonical`](crate::FoundFile::canonical). Blocks.
    ///
    /// # Errors
    /// A file that cannot be looked at.
    pub fn canonical_files(&self) -> Result<HashSet<OsString>, DataError> {
        self.source_files().into_iter().map(SourceFile::canonical_name).collect()
    }

    /// The [digest](Identity::digest) of the source's identity.
    pub fn files_digest(&self) -> u64 {
        self.identity().digest()
    }

    pub(crate) fn source_files(&self) -> Vec<&SourceFile> {
        self.shared.source.files()
    }

    /// Whether the rows end. If not, the parts of the source grow, and its readers read by
    /// position.
    pub fn is_finite(&self) -> bool {
        self.shared.source.is_finite()
    }

    /// Refuses test files that are also files of `train`. Two data sets with equal paths are
    /// subsets of one source: a split, or the caller, divides its rows. Blocks.
    ///
    /// # Errors
    /// Names the first file that both have.
    pub fn refuse_files_of(&self, train: &Self) -> Result<(), DataError> {
        match self.shared.config.paths == train.shared.config.paths {
            true => Ok(()),
            false => storage::refuse_common(&train.source_files(), &self.source_files()),
        }
    }

    /// The number of rows, bad ones included. Counting reads text files once without parsing their
    /// cells, and keeps the result. A split by time has to parse every row. Blocks.
    ///
    /// # Errors
    /// Files that cannot be read; a source without an end.
    pub fn count_rows(&self) -> Result<u64, DataError> {
        if !self.is_finite() {
            return Err(DataError::config("format", "the rows of this source do not end and cannot be counted"));
        }
        let stop = Stop::default();
        let extent = self.extent(&stop)?;
        if extent.time.is_some() {
            let mut rows = self.rows(extent, &stop)?;
            let good = rows.advance(u64::MAX, None)?;
            return Ok(good + rows.skipped());
        }
        let all = self.shared.source.count_rows(&stop)?;
        Ok(extent.to.unwrap_or(all).min(all) - extent.from.min(all))
    }

    /// The number of good rows. Where bad rows are skipped, all cells are parsed. Blocks.
    ///
    /// # Errors
    /// As [`count_rows`](Self::count_rows); too many bad rows.
    pub(crate) fn count_good_rows(&self) -> Result<u64, DataError> {
        if self.shared.config.bad_rows == BadRows::Fail {
            return self.count_rows();
        }
        let stop = Stop::default();
        self.rows(self.extent(&stop)?, &stop)?.advance(u64::MAX, None)
    }

    /// About how many rows there are, without reading any. Exact for Parquet, for the synthetic
    /// source, and after [`Dataset::count_rows`]. Otherwise estimated from the size of the first
    /// rows of each text file. With a split by time it is an upper bound: the rows of all subsets.
    pub fn estimated_rows(&self) -> u64 {
        let all = self.shared.source.estimated_rows();
        let train = match &self.shared.config.split {
            None | Some(Split::Time { .. }) => return all,
            Some(Split::Position { train_rows }) => (*train_rows).min(all),
            Some(Split::Fraction { train }) => train_share(all, *train),
        };
        match self.subset {
            Subset::All => all,
            Subset::Train => train,
            Subset::Test => all - train,
        }
    }

    /// The AUC of the best possible model on this subset of the synthetic source (see
    /// [`Teacher::best_possible_auc`](crate::synthetic::Teacher::best_possible_auc)). `None` for
    /// other sources, which do not know it.
    pub fn best_possible_auc(&self) -> Option<f64> {
        let teacher = self.shared.source.teacher()?;
        let extent = self.extent(&Stop::default()).ok()?;
        let all = teacher.config().all_rows();
        Some(teacher.best_possible_auc(extent.from..extent.to.unwrap_or(all).min(all)))
    }

    /// A reader of chunks. It starts its threads at the first request for a chunk.
    ///
    /// # Errors
    /// Rows of a chunk that are 0, or do not fit into 32 bits.
    pub fn reader(&self, plan: ReadPlan) -> Result<ChunkReader, DataError> {
        check_span_rows(plan.chunk_rows)?;
        Ok(ChunkReader::new(self.clone(), plan))
    }

    /// A reader of spans that reads at most `read_ahead` spans ahead. It starts its threads at the
    /// first request.
    pub fn span_reader(&self, read_ahead: usize) -> SpanReader {
        SpanReader::new(self.clone(), read_ahead)
    }

    /// A cursor before row `row` of this data set, or, if it takes reading to find that row, at the
    /// first row. Returns the number of rows that it has passed.
    pub(crate) fn cursor(&self, row: u64, stop: &Stop) -> Result<(Box<dyn Rows>, u64), DataError> {
        if !self.is_finite() {
            return Err(DataError::config("span", "the rows of this source have positions, and no numbers"));
        }
        let extent = self.extent(stop)?;
        let is_found_by_number = extent.time.is_none() && self.shared.config.bad_rows == BadRows::Fail;
        match is_found_by_number {
            true => Ok((self.rows(extent.after(row), stop)?, row)),
            false => Ok((self.rows(extent, stop)?, 0)),
        }
    }

    /// A cursor at a position that a reader of this data set has reported.
    pub(crate) fn cursor_at(&self, from: Position, stop: &Stop) -> Result<Box<dyn Rows>, DataError> {
        let extent = self.extent(stop)?;
        let limit = match extent.to {
            Some(to) => Some(to.saturating_sub(self.number_of(from, stop)?)),
            None => None,
        };
        self.shared.source.open(self.view(from, limit, extent.time, stop))
    }

    /// A cursor over the records of a segment of a stream.
    pub(crate) fn cursor_in(&self, segment: Segment, stop: &Stop) -> Result<Box<dyn Rows>, DataError> {
        let from = Position { part: segment.part, offset: Offset(segment.from) };
        let limit = Some(segment.until.saturating_sub(segment.from));
        self.shared.source.open(self.view(from, limit, None, stop))
    }

    /// The partitions of a stream as the brokers have them now. Blocks.
    ///
    /// # Errors
    /// No broker answers (see [`DataError::is_transient`]), or a topic does not exist; a data set
    /// that is no stream.
    pub fn partitions(&self) -> Result<Vec<PartitionFound>, DataError> {
        match self.shared.source.stream() {
            Some(stream) => stream.partitions(),
            None => Err(DataError::config("format", "these rows are in files, which have no partitions")),
        }
    }

    /// Commits offsets for the consumer group of the stream, if it has one: the first offset of
    /// each partition that a checkpoint does not hold. Blocks.
    ///
    /// # Errors
    /// No broker answers, or the group refuses the offsets; a data set that is no stream.
    pub fn commit(&self, offsets: &[(PartId, u64)]) -> Result<(), DataError> {
        match self.shared.source.stream() {
            Some(stream) => stream.commit(offsets),
            None => Err(DataError::config("format", "these rows are in files, which have no partitions")),
        }
    }

    /// Looks for a good row in a segment. Blocks.
    ///
    /// # Errors
    /// As a reader: a bad row, if the data set does not skip them.
    pub fn probe(&self, segment: Segment) -> Result<Probe, DataError> {
        let mut rows = self.cursor_in(segment, &Stop::default())?;
        rows.pass_over_bad()?;
        let read = SegmentRead { next: rows.position().offset.0, more: rows.has_more() };
        // Bad rows before a good one belong to the chunk that has the good one.
        if !read.more {
            rows.keep_bad()?;
        }
        Ok(Probe { read, skipped: rows.skipped() })
    }

    /// The number of the row at a position among all rows of the source.
    fn number_of(&self, position: Position, stop: &Stop) -> Result<u64, DataError> {
        let (source, part) = (&self.shared.source, position.part.0 as usize);
        let mut known = source.known_rows();
        if known.len() < part {
            source.count_rows(stop)?;
            known = source.known_rows();
        }
        Ok(known.iter().take(part).sum::<u64>() + position.offset.0)
    }

    /// An error that says why this data set has no rows.
    pub(crate) fn no_rows_error(&self) -> DataError {
        let problem = match &self.shared.config.split {
            Some(Split::Position { train_rows }) => {
                format!("the split is after row {train_rows}; compare it with the number of rows")
            }
            Some(Split::Fraction { train }) => {
                format!("the share for training is {train}, and there are too few rows for it")
            }
            Some(Split::Time { column, test_from }) => {
                format!("column `{column}` has no row on that side of {test_from}; check the moment")
            }
            None => "every row is bad".to_owned(),
        };
        DataError::EmptySubset { rows: self.subset.rows(), problem }
    }

    fn rows(&self, extent: Extent, stop: &Stop) -> Result<Box<dyn Rows>, DataError> {
        let source = &self.shared.source;
        let limit = extent.to.map(|to| to.saturating_sub(extent.from));
        let from = locate(&source.known_rows(), extent.from);
        source.open(self.view(from, limit, extent.time, stop))
    }

    fn view(&self, from: Position, limit: Option<u64>, time: Option<TimeFilter>, stop: &Stop) -> View {
        View { from, limit, time, bad_rows: self.shared.config.bad_rows, stop: stop.clone() }
    }

    fn extent(&self, stop: &Stop) -> Result<Extent, DataError> {
        const ALL: Extent = Extent { from: 0, to: None, time: None };
        let train_rows = match (&self.shared.config.split, self.subset) {
            (_, Subset::All) | (None, _) => return Ok(ALL),
            (Some(Split::Time { test_from, .. }), subset) => {
                let filter = TimeFilter { test_from: test_from.clone(), test: subset == Subset::Test };
                return Ok(Extent { time: Some(filter), ..ALL });
            }
            (Some(Split::Position { train_rows }), _) => *train_rows,
            (Some(Split::Fraction { train }), _) => train_share(self.shared.source.count_rows(stop)?, *train),
        };
        match self.subset {
            Subset::Test => Ok(Extent { from: train_rows, ..ALL }),
            _ => Ok(Extent { to: Some(train_rows), ..ALL }),
        }
    }
}

fn open_source(
    config: &SourceConfig,
    schema: Schema,
    find_files: &dyn Fn() -> Result<Vec<SourceFile>, DataError>,
) -> Result<(Box<dyn Source>, Arc<Encoder>), DataError> {
    check(config, &schema)?;
    let encoder = Arc::new(Encoder {
        carried: config.carried.clone(),
        needs_label: !config.label_is_optional,
        ..Encoder::new(schema, &config.null_values)
    });
    let time = match &config.split {
        Some(Split::Time { column, test_from }) => Some((column.as_str(), test_from)),
        _ => None,
    };
    let source = sources::open(&Opening { config, find_files, encoder: &encoder, time })?;
    Ok((source, encoder))
}

fn train_share(rows: u64, train: f64) -> u64 {
    (rows as f64 * train).round() as u64
}

fn check_subset(subset: Subset, split: Option<&Split>) -> Result<(), DataError> {
    match (subset, split) {
        (Subset::Train | Subset::Test, None) => {
            Err(DataError::config("subset", format!("there are no {} without a split", subset.rows())))
        }
        _ => Ok(()),
    }
}

pub(crate) fn check_span_rows(rows: u64) -> Result<(), DataError> {
    match rows == 0 || u32::try_from(rows).is_err() {
        true => Err(DataError::config("chunk_rows", format!("{rows} is not between 1 and {}", u32::MAX))),
        false => Ok(()),
    }
}

fn check(config: &SourceConfig, schema: &Schema) -> Result<(), DataError> {
    schema::check(schema)?;
    check_subset(config.subset, config.split.as_ref())?;
    match &config.split {
        Some(Split::Fraction { train }) if !(*train > 0.0 && *train < 1.0) => {
            Err(DataError::config("split, share for training", format!("{train} is not between 0 and 1")))
        }
        Some(Split::Time { test_from: TimeBound::Number(bound), .. }) if bound.is_nan() => {
            Err(DataError::config("split, first moment of the test", "it is not a number"))
        }
        _ => Ok(()),
    }
}
