//! A data set: files that were found, columns that were found in them, and the rows of one part. The entry
//! to this crate: open one, ask it for a reader.

use crate::batch::Batch;
use crate::blocking::Stop;
use crate::config::{BadRows, CsvFormat, Format, Part, ReadPlan, SourceConfig, Split, TimeBound};
use crate::error::DataError;
use crate::pace;
use crate::reader::ChunkReader;
use crate::rows::parquet::{ParquetFile, ParquetRows};
use crate::rows::synthetic::SyntheticRows;
use crate::rows::text::{Passed, TextFile, TextRows};
use crate::rows::{RowSource, Selection};
use crate::schema::{Encoder, Layout, Schema};
use crate::storage::{self, SourceFile};
use crate::synthetic::Teacher;
use object_store::ObjectStore;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

/// The rows of one part of a source. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Dataset {
    shared: Arc<Shared>,
    part: Part,
}

#[derive(Debug)]
struct Shared {
    config: SourceConfig,
    encoder: Arc<Encoder>,
    source: Source,
    /// Rows of each file, once they were counted.
    counts: Mutex<Option<Arc<Vec<u64>>>>,
    /// Rows of the first text files, which were read to their ends.
    passed: Arc<Passed>,
}

#[derive(Debug)]
enum Source {
    Text(Arc<Vec<TextFile>>),
    Parquet(Arc<Vec<ParquetFile>>),
    Synthetic(Arc<Teacher>, Layout),
}

impl Dataset {
    /// Finds the files and the columns in them. Reads the beginning of every text file and the footer of
    /// every Parquet file, at most 16 at a time. Blocks.
    ///
    /// # Errors
    /// A path that names nothing or a folder, an empty file, a column that is not there, a column of the
    /// wrong type, settings that contradict each other.
    pub fn open(config: SourceConfig, schema: Schema) -> Result<Self, DataError> {
        check(&config, &schema)?;
        if matches!(config.format, Format::Synthetic(_)) {
            return Self::synthetic(config, schema);
        }
        let files = storage::resolve(&config)?;
        Self::over(files, config, schema)
    }

    /// The same over the objects of `store`; the paths of `config` are keys or globs of keys in it.
    pub fn open_in(store: Arc<dyn ObjectStore>, config: SourceConfig, schema: Schema) -> Result<Self, DataError> {
        check(&config, &schema)?;
        let files = storage::resolve_in(&store, &config.paths)?;
        Self::over(files, config, schema)
    }

    fn synthetic(config: SourceConfig, schema: Schema) -> Result<Self, DataError> {
        let Format::Synthetic(synthetic) = &config.format else {
            return Err(DataError::config("format", "a synthetic source was expected"));
        };
        let teacher = Arc::new(Teacher::new(synthetic.clone())?);
        let layout = Layout::bind("the synthetic source", teacher.columns(), &schema, None)?;
        Ok(Self::new(Source::Synthetic(teacher, layout), config, schema))
    }

    fn over(files: Vec<SourceFile>, config: SourceConfig, schema: Schema) -> Result<Self, DataError> {
        let time = match &config.split {
            Some(Split::Time { column, test_from }) => Some((column.as_str(), test_from)),
            _ => None,
        };
        let source = open_files(files, &config.format, &schema, time)?;
        Ok(Self::new(source, config, schema))
    }

    fn new(source: Source, config: SourceConfig, schema: Schema) -> Self {
        let part = config.part;
        Self {
            shared: Arc::new(Shared {
                config,
                encoder: Arc::new(Encoder::new(schema)),
                source,
                counts: Mutex::new(None),
                passed: Arc::default(),
            }),
            part,
        }
    }

    /// The schema it was opened with.
    pub fn schema(&self) -> &Schema {
        &self.shared.encoder.schema
    }

    /// Another part of the same source; what was counted is shared.
    ///
    /// # Errors
    /// `Train` or `Test` of a source without a split.
    pub fn part(&self, part: Part) -> Result<Self, DataError> {
        check_part(part, self.shared.config.split.as_ref())?;
        Ok(Self { shared: Arc::clone(&self.shared), part })
    }

    /// Names of the files, in reading order; empty for the synthetic source.
    pub fn files(&self) -> Vec<String> {
        self.source_files().into_iter().map(|file| file.name.clone()).collect()
    }

    /// A number that differs for other files, or the same in another order: of their names and sizes, as this build computes it.
    pub fn files_digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for file in self.source_files() {
            (&file.name, file.size).hash(&mut hasher);
        }
        hasher.finish()
    }

    fn source_files(&self) -> Vec<&SourceFile> {
        match &self.shared.source {
            Source::Text(files) => files.iter().map(|f| &f.file).collect(),
            Source::Parquet(files) => files.iter().map(|f| &f.file).collect(),
            Source::Synthetic(..) => Vec::new(),
        }
    }

    /// Refuses files, as those of a test, that `train` is trained on. Where both have the same paths they are parts of one
    /// source, which a split (or whoever hands out the chunks) divides by rows. Blocks.
    ///
    /// # Errors
    /// Names the first file that both have.
    pub fn refuse_files_of(&self, train: &Self) -> Result<(), DataError> {
        match self.shared.config.paths == train.shared.config.paths {
            true => Ok(()),
            false => storage::refuse_common(&train.source_files(), &self.source_files()),
        }
    }

    /// The number of rows of this part, bad ones included. Text is read through once for it, without
    /// parsing cells, and what was counted is kept; a part of time is read and parsed. Blocks.
    pub fn count_rows(&self) -> Result<u64, DataError> {
        let stop = Stop::default();
        match self.selection(&stop)? {
            Selection::Range { from, to } => {
                let all: u64 = self.counts(&stop)?.iter().sum();
                Ok(to.unwrap_or(all).min(all) - from.min(all))
            }
            selection @ Selection::Time { .. } => {
                let mut rows = self.rows(selection, &stop)?;
                let good = rows.advance(u64::MAX, None)?;
                Ok(good + rows.skipped())
            }
        }
    }

    /// About how many rows this part has, without reading more than was read already: exact for Parquet,
    /// for the synthetic source and after [`Dataset::count_rows`], else from the size of the first
    /// rows of each text file. For a part of time an upper bound: the rows of all parts.
    pub fn estimated_rows(&self) -> u64 {
        let all: u64 = match (&self.shared.source, self.known_counts()) {
            (_, Some(counts)) => counts.iter().sum(),
            (Source::Text(files), None) => files.iter().map(|file| file.estimated_rows).sum(),
            (_, None) => 0,
        };
        let train = match &self.shared.config.split {
            None | Some(Split::Time { .. }) => return all,
            Some(Split::Position { train_rows }) => (*train_rows).min(all),
            Some(Split::Fraction { train }) => train_share(all, *train),
        };
        match self.part {
            Part::All => all,
            Part::Train => train,
            Part::Test => all - train,
        }
    }

    /// For the synthetic source the AUC of the best possible model on this part (see
    /// [`Teacher::best_possible_auc`]); `None` for data whose truth nobody knows.
    pub fn best_possible_auc(&self) -> Option<f64> {
        let Source::Synthetic(teacher, _) = &self.shared.source else {
            return None;
        };
        let (from, rows) = self.selection(&Stop::default()).ok()?.rows();
        let end = from.saturating_add(rows.unwrap_or(u64::MAX));
        Some(teacher.best_possible_auc(from..end.min(teacher.config().rows)))
    }

    /// A reader of this part's chunks. It starts its threads when the first chunk is asked for.
    ///
    /// # Errors
    /// A number of rows of a chunk that is 0 or does not fit into 32 bits.
    pub fn reader(&self, plan: ReadPlan) -> Result<ChunkReader, DataError> {
        if plan.chunk_rows == 0 || u32::try_from(plan.chunk_rows).is_err() {
            return Err(DataError::config(
                "chunk_rows",
                format!("{} is not between 1 and {}", plan.chunk_rows, u32::MAX),
            ));
        }
        Ok(ChunkReader::new(self.clone(), plan))
    }

    /// A cursor at the first row of this part, or at the one after so many where that can be found without reading all that is before it; gives
    /// how many it has passed.
    pub(crate) fn cursor(&self, before: u64, stop: &Stop) -> Result<(Box<dyn RowSource>, u64), DataError> {
        let selection = self.selection(stop)?;
        let is_by_place = selection.is_by_place() && self.shared.config.bad_rows == BadRows::Fail;
        match &self.shared.source {
            Source::Text(_) if is_by_place => Ok((self.rows(selection.after(before), stop)?, before)),
            _ => Ok((self.rows(selection, stop)?, 0)),
        }
    }

    /// An error that says why this part has no rows.
    pub(crate) fn empty_part(&self) -> DataError {
        let problem = match &self.shared.config.split {
            Some(Split::Position { train_rows }) => {
                format!("the split is after row {train_rows}; check it against the number of rows")
            }
            Some(Split::Fraction { train }) => {
                format!("the share for training is {train}; there are too few rows for it")
            }
            Some(Split::Time { column, test_from }) => {
                format!("no row lies on that side of {test_from} in column `{column}`; check the moment")
            }
            None => "every row was bad".to_owned(),
        };
        DataError::EmptyPart { part: self.part.name(), problem }
    }

    pub(crate) fn empty_batch(&self) -> Batch {
        self.schema().empty_batch()
    }

    fn rows(&self, selection: Selection, stop: &Stop) -> Result<Box<dyn RowSource>, DataError> {
        let shared = &self.shared;
        let (encoder, bad_rows) = (&shared.encoder, shared.config.bad_rows);
        Ok(match &shared.source {
            Source::Text(files) => {
                let counts = self.known_counts().unwrap_or_else(|| Arc::new(shared.passed.counts()));
                let rows = TextRows::open(files, encoder, selection, bad_rows, &counts, stop)?;
                Box::new(rows.noting(Arc::clone(&shared.passed)))
            }
            Source::Parquet(files) => Box::new(ParquetRows::open(files, encoder, selection, bad_rows, stop)),
            Source::Synthetic(teacher, layout) => Box::new(SyntheticRows::new(teacher, layout, encoder, &selection)),
        })
    }

    fn selection(&self, stop: &Stop) -> Result<Selection, DataError> {
        let train_rows = match (&self.shared.config.split, self.part) {
            (_, Part::All) | (None, _) => return Ok(Selection::ALL),
            (Some(Split::Time { test_from, .. }), part) => {
                return Ok(Selection::Time { test_from: test_from.clone(), test: part == Part::Test });
            }
            (Some(Split::Position { train_rows }), _) => *train_rows,
            (Some(Split::Fraction { train }), _) => train_share(self.counts(stop)?.iter().sum(), *train),
        };
        let (from, to) = match self.part {
            Part::Test => (train_rows, None),
            _ => (0, Some(train_rows)),
        };
        Ok(Selection::Range { from, to })
    }

    /// Rows of each file, if they are known without counting.
    fn known_counts(&self) -> Option<Arc<Vec<u64>>> {
        match &self.shared.source {
            Source::Text(_) => {
                let counts = self.shared.counts.lock();
                counts.unwrap_or_else(PoisonError::into_inner).clone()
            }
            Source::Parquet(files) => Some(Arc::new(files.iter().map(|file| file.rows).collect())),
            Source::Synthetic(teacher, _) => Some(Arc::new(vec![teacher.config().rows])),
        }
    }

    fn counts(&self, stop: &Stop) -> Result<Arc<Vec<u64>>, DataError> {
        let Source::Text(files) = &self.shared.source else {
            return Ok(self.known_counts().unwrap_or_default());
        };
        // Held while counting: whoever comes second waits for the first's result.
        let counts = self.shared.counts.lock();
        let mut counts = counts.unwrap_or_else(PoisonError::into_inner);
        if let Some(counts) = &*counts {
            return Ok(Arc::clone(counts));
        }
        let counted = (0..files.len())
            .map(|file| TextRows::count(files, &self.shared.encoder, file, stop))
            .collect::<Result<Vec<u64>, _>>()?;
        Ok(Arc::clone(counts.insert(Arc::new(counted))))
    }
}

impl std::fmt::Display for TimeBound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(bound) => write!(f, "{bound}"),
            Self::Text(bound) => write!(f, "{bound}"),
        }
    }
}

fn train_share(rows: u64, train: f64) -> u64 {
    (rows as f64 * train).round() as u64
}

fn check_part(part: Part, split: Option<&Split>) -> Result<(), DataError> {
    match (part, split) {
        (Part::Train | Part::Test, None) => {
            Err(DataError::config("part", format!("there is no {} part without a split", part.name())))
        }
        _ => Ok(()),
    }
}

fn check(config: &SourceConfig, schema: &Schema) -> Result<(), DataError> {
    schema.check()?;
    check_part(config.part, config.split.as_ref())?;
    match (&config.format, &config.split) {
        (_, Some(Split::Fraction { train })) if !(*train > 0.0 && *train < 1.0) => {
            return Err(DataError::config("split, fraction for training", format!("{train} is not between 0 and 1")));
        }
        (_, Some(Split::Time { test_from: TimeBound::Number(bound), .. })) if bound.is_nan() => {
            return Err(DataError::config("split, first moment of the test", "it is not a number"));
        }
        (Format::Synthetic(_), Some(Split::Time { .. })) => {
            return Err(DataError::config("split", "the synthetic source has no column of time"));
        }
        _ => {}
    }
    match &config.format {
        Format::Synthetic(_) if !config.paths.is_empty() => {
            Err(DataError::config("paths", "the synthetic source reads no files"))
        }
        Format::Csv(format) => check_format(format),
        _ => Ok(()),
    }
}

fn check_format(format: &CsvFormat) -> Result<(), DataError> {
    if matches!(format.delimiter, b'\n' | b'\r') || format.quoting && format.delimiter == b'"' {
        return Err(DataError::config("delimiter", "a quote or a line end cannot separate cells"));
    }
    if !format.header && format.columns.is_none() {
        return Err(DataError::config("columns", "without a header, the columns must be named"));
    }
    Ok(())
}

/// How a single file is read.
enum FileFormat {
    Text(CsvFormat),
    Parquet,
}

fn format_of(file: &SourceFile, format: &Format) -> Result<FileFormat, DataError> {
    match format {
        Format::Csv(format) => return Ok(FileFormat::Text(format.clone())),
        Format::Parquet => return Ok(FileFormat::Parquet),
        Format::Auto | Format::Synthetic(_) => {}
    }
    let name = file.name.to_ascii_lowercase();
    let name = name.strip_suffix(".gz").or(name.strip_suffix(".zst")).unwrap_or(&name);
    match name.rsplit_once('.').map(|(_, extension)| extension) {
        Some("csv") => Ok(FileFormat::Text(CsvFormat::default())),
        Some("tsv") => Ok(FileFormat::Text(CsvFormat { delimiter: b'\t', ..CsvFormat::default() })),
        Some("parquet") => Ok(FileFormat::Parquet),
        _ => Err(DataError::config(
            "format",
            format!("the name of {} does not tell what it is (.csv, .tsv, .parquet); set the format", file.name),
        )),
    }
}

fn open_files(
    files: Vec<SourceFile>,
    format: &Format,
    schema: &Schema,
    time: Option<(&str, &TimeBound)>,
) -> Result<Source, DataError> {
    let first = files.first().map(|file| file.name.clone()).unwrap_or_default();
    let opened = in_parallel(files, |file| {
        let opened = match format_of(&file, format)? {
            FileFormat::Text(format) => {
                TextFile::open(file, format, schema, time.map(|(name, _)| name))?.map(Opened::Text)
            }
            FileFormat::Parquet if file.size == 0 => return Err(DataError::Empty { file: file.name }),
            FileFormat::Parquet => Some(Opened::Parquet(ParquetFile::open(file, schema, time)?)),
        };
        pace::pass(1);
        Ok(opened)
    })?;
    let (mut texts, mut parquets) = (Vec::new(), Vec::new());
    for file in opened.into_iter().flatten() {
        match file {
            Opened::Text(file) => texts.push(file),
            Opened::Parquet(file) => parquets.push(file),
        }
    }
    match (texts.is_empty(), parquets.is_empty()) {
        (false, false) => Err(DataError::config(
            "paths",
            format!("{} is text and {} is Parquet; use a source for each", texts[0].file.name, parquets[0].file.name),
        )),
        (true, true) => Err(DataError::Empty { file: first }),
        // Writers of partitions leave files without rows for those that are empty.
        (true, false) if parquets.iter().all(|file| file.rows == 0) => Err(DataError::NoRows { file: first }),
        (false, true) if texts.iter().all(|file| file.estimated_rows == 0) => Err(DataError::NoRows { file: first }),
        (true, false) => Ok(Source::Parquet(Arc::new(parquets))),
        (false, true) => Ok(Source::Text(Arc::new(texts))),
    }
}

enum Opened {
    Text(TextFile),
    Parquet(ParquetFile),
}

/// Opens files, at most 16 at a time, in order; the first error (in order) wins.
fn in_parallel<T: Send>(
    files: Vec<SourceFile>,
    open: impl Fn(SourceFile) -> Result<T, DataError> + Sync,
) -> Result<Vec<T>, DataError> {
    let mut opened = Vec::with_capacity(files.len());
    let mut files = files.into_iter();
    loop {
        let some: Vec<SourceFile> = files.by_ref().take(16).collect();
        match some.len() {
            0 => return Ok(opened),
            1 => opened.extend(some.into_iter().map(&open).collect::<Result<Vec<T>, _>>()?),
            _ => {
                let results: Vec<_> = std::thread::scope(|scope| {
                    let threads: Vec<_> = some.into_iter().map(|file| scope.spawn(|| open(file))).collect();
                    threads.into_iter().map(|thread| thread.join()).collect()
                });
                for result in results {
                    opened.push(result.map_err(|_| DataError::Stopped)??);
                }
            }
        }
    }
}
