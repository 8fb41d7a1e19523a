//! Rows in memory → a batch: named columns, as a request for predictions brings them. The keys and
//! transforms are the ones of files. A text is read as a cell of a text file, a number as a value
//! of a Parquet file.

use arrow_array::{BinaryArray, Float64Array, Int64Array};
use rectrain_kinds::{DenseField, Schema, SparseField};

use crate::batch::{Batch, SparseColumn};
use crate::error::{DataError, Place, shown};
use crate::ids::{DOUBLE_LIMIT, Ids, SINGLE_LIMIT};
use crate::schema::{Encoder, SparseEncoder, check, closest, dense_number, dense_text, find_column, listed};
use crate::source::offset;

/// The rows, in messages.
const REQUEST: &str = "the request";
/// The largest number of ids of one batch: 128 MiB of keys. A long list in a column of one row
/// would otherwise become any number of ids.
const MAX_IDS: usize = 1 << 24;

/// The values of a column, one row after the other. `None` is a missing value.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// Texts, which need not be UTF-8.
    Texts(Vec<Option<Vec<u8>>>),
    /// 64-bit integers.
    Integers(Vec<Option<i64>>),
    /// 32-bit floats. NaN is a missing value too.
    Singles(Vec<Option<f32>>),
    /// 64-bit floats. NaN is a missing value too.
    Doubles(Vec<Option<f64>>),
}

impl Values {
    /// The number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Texts(values) => values.len(),
            Self::Integers(values) => values.len(),
            Self::Singles(values) => values.len(),
            Self::Doubles(values) => values.len(),
        }
    }

    /// Whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A value for a message.
    fn shown(&self, place: usize) -> String {
        let text = match self {
            Self::Texts(values) => values.get(place).cloned().flatten().map(|text| shown(&text)),
            Self::Integers(values) => values.get(place).copied().flatten().map(|value| value.to_string()),
            Self::Singles(values) => values.get(place).copied().flatten().map(|value| value.to_string()),
            Self::Doubles(values) => values.get(place).copied().flatten().map(|value| value.to_string()),
        };
        text.unwrap_or_default()
    }

    fn ids(&self) -> Ids {
        match self {
            Self::Texts(values) => Ids::Bytes(values.iter().collect::<BinaryArray>()),
            Self::Integers(values) => Ids::Integers(values.iter().copied().collect::<Int64Array>()),
            Self::Singles(values) => {
                let doubles = values.iter().map(|value| value.map(f64::from));
                Ids::Floats(doubles.collect::<Float64Array>(), SINGLE_LIMIT)
            }
            Self::Doubles(values) => Ids::Floats(values.iter().copied().collect::<Float64Array>(), DOUBLE_LIMIT),
        }
    }
}

/// A named column of rows in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// The name of its feature.
    pub name: String,
    /// The number of rows.
    pub rows: usize,
    /// `Some(n)`: each row is a list of `n` values. `None`: each row has one cell, which a feature
    /// with several values cuts at its separator.
    pub list: Option<usize>,
    /// `[rows]`, or `[rows, n]` for lists of `n`. A missing value is not an item of a list.
    pub values: Values,
}

/// Encodes columns in memory into batches of one schema.
#[derive(Debug)]
pub struct ColumnEncoder {
    encoder: Encoder,
    /// The names of all features.
    names: Vec<String>,
}

impl ColumnEncoder {
    /// An encoder for the features of `schema`. It needs no label.
    ///
    /// # Errors
    /// [`DataError::Config`] for a transform that no number can pass.
    pub fn new(schema: Schema, null_values: &[String]) -> Result<Self, DataError> {
        check(&schema)?;
        let schema = Schema { group: None, time: None, ..schema };
        let sparse = schema.sparse.iter().map(|field| &field.name);
        let names = sparse.chain(schema.dense.iter().map(|field| &field.name)).cloned().collect();
        Ok(Self { encoder: Encoder::new(schema, null_values), names })
    }

    /// The schema. It has neither group nor time.
    #[must_use]
    pub fn schema(&self) -> &Schema {
        &self.encoder.schema
    }

    /// One batch of all rows, without labels. A column of one row beside columns of n rows stands
    /// for n equal rows.
    ///
    /// # Errors
    /// A column that is missing, there twice, or no feature; columns of different lengths; a value
    /// that its feature cannot have. The messages name the column, and the row from 1.
    pub fn encode(&self, columns: &[Column]) -> Result<Batch, DataError> {
        let names: Vec<String> = columns.iter().map(|column| column.name.clone()).collect();
        self.refuse_unknown(&names)?;
        let rows = common_rows(columns)?;
        let schema = &self.encoder.schema;
        let mut batch = Batch { samples: rows, labels: vec![f32::NAN; rows], ..Batch::of_schema(schema) };
        let mut ids = 0;
        for ((into, field), sparse) in batch.sparse.iter_mut().zip(&schema.sparse).zip(&self.encoder.sparse) {
            let column = &columns[find_column(REQUEST, &names, &field.name)?];
            let found = encode_ids(column, field, sparse)?;
            let copies = if column.rows == rows { 1 } else { rows };
            ids += found.keys.len().saturating_mul(copies);
            if ids > MAX_IDS {
                return Err(too_many_ids());
            }
            *into = repeat(found, column.rows, rows);
        }
        let dense = schema.dense.iter().map(|field| {
            let column = &columns[find_column(REQUEST, &names, &field.name)?];
            self.encode_numbers(column, field)
        });
        batch.dense = transpose(&dense.collect::<Result<Vec<_>, _>>()?, rows);
        Ok(batch)
    }

    fn refuse_unknown(&self, names: &[String]) -> Result<(), DataError> {
        let Some(unknown) = names.iter().find(|name| !self.names.contains(name)) else { return Ok(()) };
        let close = closest(&self.names, unknown);
        Err(DataError::MissingColumn {
            file: "the model".to_owned(),
            column: unknown.clone(),
            hint: close.map(|close| format!(", did you mean `{close}`?")).unwrap_or_default(),
            available: listed(&self.names),
        })
    }

    /// The inputs of a dense feature, one a row.
    fn encode_numbers(&self, column: &Column, field: &DenseField) -> Result<Vec<f32>, DataError> {
        if let Some(width @ (0 | 2..)) = column.list {
            return Err(wrong_shape(&column.name, width, "a dense feature has one"));
        }
        check_length(column)?;
        let number = |row: usize| match &column.values {
            Values::Texts(texts) => dense_text(field, texts[row].as_deref().unwrap_or_default(), &self.encoder.nulls),
            Values::Integers(values) => dense_number(field, values[row].map_or(f32::NAN, |value| value as f32)),
            Values::Singles(values) => dense_number(field, values[row].unwrap_or(f32::NAN)),
            Values::Doubles(values) => dense_number(field, values[row].map_or(f32::NAN, |value| value as f32)),
        };
        (0..column.rows).map(|row| number(row).map_err(|expected| bad_row(column, row, row, expected))).collect()
    }
}

/// The number of rows of a request: the columns of one row adapt to the others.
fn common_rows(columns: &[Column]) -> Result<usize, DataError> {
    let mut found: Option<&Column> = None;
    for column in columns.iter().filter(|column| column.rows != 1) {
        match found {
            None => found = Some(column),
            Some(first) if first.rows == column.rows => {}
            Some(first) => return Err(different_lengths(first, column)),
        }
    }
    Ok(found.map_or(usize::from(!columns.is_empty()), |column| column.rows))
}

fn different_lengths(a: &Column, b: &Column) -> DataError {
    let problem = format!(
        "column `{}` has {} rows, and column `{}` has {}; expected equal numbers, or 1 row, which is repeated",
        a.name, a.rows, b.name, b.rows
    );
    DataError::Header { file: REQUEST.to_owned(), problem }
}

fn too_many_ids() -> DataError {
    let problem = format!("its rows have more than {MAX_IDS} ids; send fewer rows at a time");
    DataError::Header { file: REQUEST.to_owned(), problem }
}

fn wrong_shape(column: &str, width: usize, expected: &str) -> DataError {
    let problem = format!("column `{column}` has {width} values a row; {expected}");
    DataError::Header { file: REQUEST.to_owned(), problem }
}

/// Refuses a column with another number of values than its rows need.
fn check_length(column: &Column) -> Result<(), DataError> {
    let (found, rows) = (column.values.len(), column.rows);
    let wanted = rows.checked_mul(column.list.unwrap_or(1));
    if wanted == Some(found) {
        return Ok(());
    }
    let shape = column.list.map_or_else(|| format!("[{rows}]"), |width| format!("[{rows}, {width}]"));
    let problem = format!("column `{}` has {found} values, and its shape {shape} has another number", column.name);
    Err(DataError::Header { file: REQUEST.to_owned(), problem })
}

/// The error for value `place` of row `row`.
fn bad_row(column: &Column, row: usize, place: usize, expected: &str) -> DataError {
    DataError::BadRow {
        file: REQUEST.to_owned(),
        at: Place::Row(row as u64 + 1),
        column: column.name.clone(),
        value: column.values.shown(place),
        expected: expected.to_owned(),
    }
}

/// The width of the lists of a column; `None` if its rows are cells.
fn list_width(column: &Column, field: &SparseField) -> Result<Option<usize>, DataError> {
    match (column.list, &field.multi_value) {
        (None | Some(1), None) => Ok(None),
        (Some(width), None) => Err(wrong_shape(&column.name, width, "the feature has one")),
        // Without a separator a text is never cut, so that each row is a list of one.
        (None | Some(1), Some(separator)) => Ok(separator.is_empty().then_some(1)),
        (Some(width), Some(_)) => Ok(Some(width)),
    }
}

/// The keys of the rows of a column, not yet repeated.
fn encode_ids(column: &Column, field: &SparseField, sparse: &SparseEncoder) -> Result<SparseColumn, DataError> {
    check_length(column)?;
    let width = list_width(column, field)?;
    let ids = column.values.ids();
    let mut keys = Vec::with_capacity(column.values.len());
    let mut offsets = field.is_variable().then(|| vec![0]);
    for row in 0..column.rows {
        match width {
            None => push_cell(&ids, column, row, sparse, &mut keys)?,
            Some(width) => push_list(&ids, column, row, width, sparse, &mut keys)?,
        }
        if let Some(offsets) = &mut offsets {
            offsets.push(offset(keys.len(), &column.name)?);
        }
    }
    Ok(SparseColumn { keys, offsets })
}

fn push_cell(
    ids: &Ids,
    column: &Column,
    row: usize,
    sparse: &SparseEncoder,
    keys: &mut Vec<u64>,
) -> Result<(), DataError> {
    if let Some(expected) = ids.fault(row, sparse) {
        return Err(bad_row(column, row, row, expected));
    }
    ids.push(row, sparse, keys);
    Ok(())
}

fn push_list(
    ids: &Ids,
    column: &Column,
    row: usize,
    width: usize,
    sparse: &SparseEncoder,
    keys: &mut Vec<u64>,
) -> Result<(), DataError> {
    for item in row * width..(row + 1) * width {
        if let Some(expected) = ids.item_fault(item, sparse) {
            return Err(bad_row(column, row, item, expected));
        }
        ids.push_item(item, sparse, keys);
    }
    Ok(())
}

/// A column of `rows` rows. One of a single row is repeated.
fn repeat(column: SparseColumn, found: usize, rows: usize) -> SparseColumn {
    if found == rows {
        return column;
    }
    let keys = column.keys.repeat(rows);
    let width = column.keys.len();
    let offsets = column.offsets.map(|_| (0..=rows).map(|row| (row * width) as u32).collect());
    SparseColumn { keys, offsets }
}

/// Columns → rows, row-major. Columns of one row are repeated.
fn transpose(columns: &[Vec<f32>], rows: usize) -> Vec<f32> {
    let value = |column: &[f32], row: usize| if column.len() == rows { column[row] } else { column[0] };
    (0..rows).flat_map(|row| columns.iter().map(move |column| value(column, row))).collect()
}

#[cfg(test)]
mod tests {
    use rectrain_kinds::{CsvFormat, FileFormat, LabelField, MissingValue, Transform};

    use super::*;
    use crate::{Dataset, Format, ReadPlan, SourceConfig};

    fn sparse(name: &str, separator: Option<&str>, missing: MissingValue) -> SparseField {
        let multi_value = separator.map(str::to_owned);
        SparseField { name: name.into(), table: name.into(), multi_value, missing, hash_buckets: None }
    }

    fn dense(name: &str, transform: Transform) -> DenseField {
        DenseField { name: name.into(), transform, missing: 0.5, limit: 1e9 }
    }

    fn schema() -> Schema {
        Schema {
            sparse: vec![
                sparse("user", None, MissingValue::Token),
                sparse("city", None, MissingValue::Skip),
                sparse("tags", Some("|"), MissingValue::Skip),
                sparse("list", Some(""), MissingValue::Skip),
            ],
            dense: vec![dense("age", Transform::Log1p), dense("price", Transform::Identity)],
            label: LabelField::of_numbers("label", None),
            group: None,
            time: None,
        }
    }

    fn encoder() -> ColumnEncoder {
        ColumnEncoder::new(schema(), &["null".to_owned()]).unwrap()
    }

    fn texts(name: &str, cells: &[&str]) -> Column {
        let values = cells.iter().map(|cell| Some(cell.as_bytes().to_vec())).collect();
        Column { name: name.into(), rows: cells.len(), list: None, values: Values::Texts(values) }
    }

    fn integers(name: &str, values: &[Option<i64>]) -> Column {
        Column { name: name.into(), rows: values.len(), list: None, values: Values::Integers(values.to_vec()) }
    }

    const CELLS: [[&str; 5]; 6] = [
        ["u1", "Bern", "a|b||7", "31", "1.5"],
        ["", "null", "", "", "-2"],
        ["7", "7.0", "null|x", "null", "0"],
        ["7.0", "", "x", "nan", "1e3"],
        ["NULL", " Zürich ", "|", "0.25", "0.1"],
        ["007", "x,y", "7|7", "100", "16777217"],
    ];

    /// The columns of [`CELLS`], and a list that has no texts in files.
    fn columns() -> Vec<Column> {
        let names = ["user", "city", "tags", "age", "price"].into_iter().enumerate();
        let of = |(place, name)| texts(name, &CELLS.map(|cells| cells[place]));
        let list = Column { name: "list".into(), rows: 1, list: Some(0), values: Values::Integers(vec![]) };
        names.map(of).chain([list]).collect()
    }

    /// The samples, ids and inputs of columns. The labels are NaN, which equals nothing.
    fn encode(columns: &[Column]) -> (usize, Vec<SparseColumn>, Vec<f32>) {
        let batch = encoder().encode(columns).unwrap();
        assert!(batch.labels.len() == batch.samples && batch.labels.iter().all(|label| label.is_nan()));
        (batch.samples, batch.sparse, batch.dense)
    }

    fn message(columns: &[Column]) -> String {
        encoder().encode(columns).unwrap_err().to_string()
    }

    /// The columns with this one in the place of its namesake.
    fn columns_with(column: Column) -> Vec<Column> {
        let mut columns = columns();
        let place = columns.iter().position(|other| other.name == column.name).unwrap();
        columns[place] = column;
        columns
    }

    fn message_with(column: Column) -> String {
        message(&columns_with(column))
    }

    #[test]
    fn texts_are_encoded_as_cells_of_a_text_file() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("rows.csv");
        let rows = CELLS.map(|cells| cells.map(|cell| format!("\"{cell}\"")).join(","));
        std::fs::write(&file, format!("user,city,tags,age,price\n{}\n", rows.join("\n"))).unwrap();
        let mut schema = schema();
        schema.sparse.pop();
        let config = SourceConfig {
            paths: vec![file.display().to_string()],
            format: Format::Files(FileFormat::Csv(CsvFormat::default())),
            null_values: vec!["null".to_owned()],
            label_is_optional: true,
            ..SourceConfig::default()
        };
        let dataset = Dataset::open(config, schema).unwrap();
        let plan = ReadPlan { chunk_rows: 100, shuffle: None, epoch: 0, read_ahead_chunks: 1 };
        let read = dataset.reader(plan).unwrap().read(0).unwrap().unwrap();
        let (samples, mut sparse, dense) = encode(&columns());
        let lists = sparse.pop().unwrap();
        assert_eq!((samples, &sparse, &dense), (6, &read.sparse, &read.dense));
        assert_eq!(lists, SparseColumn { keys: vec![], offsets: Some(vec![0; 7]) });
    }

    #[test]
    fn numbers_are_the_ids_and_inputs_of_their_texts() {
        let (_, _, inputs) = encode(&columns());
        let with = |column: Column| encode(&columns_with(column));
        let ids = [Some(3), None, Some(-7), Some(0), Some(i64::MAX), Some(i64::MIN)];
        let text = |id: Option<i64>| id.map(|id| id.to_string()).unwrap_or_default();
        let same = with(texts("user", &ids.map(text).each_ref().map(String::as_str)));
        assert_eq!(with(integers("user", &ids)), same);
        let floats = [Some(3.0), None, Some(-7.0), Some(0.0), Some(f64::NAN), Some(9_007_199_254_740_991.0)];
        let doubles = Column { values: Values::Doubles(floats.to_vec()), ..integers("user", &[None; 6]) };
        let cells = ["3", "", "-7", "0", "", "9007199254740991"];
        assert_eq!(with(doubles), with(texts("user", &cells)));
        let prices = [Some(1.5), Some(-2.0), Some(0.0), Some(1e3), Some(0.1), Some(16_777_217.0)];
        let prices = Column { values: Values::Doubles(prices.to_vec()), ..integers("price", &[None; 6]) };
        assert_eq!(with(prices).2, inputs);
    }

    #[test]
    fn rows_of_items_are_cells_with_separators() {
        let mut columns = columns();
        let expected = encode(&columns);
        let items = ["a", "b", "7", "", "", "", "null", "x", "", "x", "", "", "", "", "", "7", "7", ""];
        let items = items.map(|item| (!item.is_empty()).then(|| item.as_bytes().to_vec()));
        columns[2] = Column { name: "tags".into(), rows: 6, list: Some(3), values: Values::Texts(items.to_vec()) };
        assert_eq!(encode(&columns), expected);
        // An item is never cut.
        let seed = crate::key::TableSeed::of("list");
        columns[5] = texts("list", &["a|b"]);
        assert_eq!(encode(&columns).1[3].row(4), [seed.text(b"a|b")]);
    }

    #[test]
    fn one_row_beside_many_stands_for_many_equal_rows() {
        let mut short = columns();
        let mut long = columns();
        for (place, name, cell) in [(0, "user", "u9"), (1, "city", "Bern"), (2, "tags", "a|b"), (3, "age", "4")] {
            short[place] = texts(name, &[cell]);
            long[place] = texts(name, &[cell; 6]);
        }
        assert_eq!(encode(&short), encode(&long));
        let none: Vec<Column> = columns()
            .into_iter()
            .map(|column| if column.rows == 6 { texts(&column.name, &[]) } else { column })
            .collect();
        assert_eq!(encoder().encode(&none).unwrap(), Batch::of_schema(&schema()));
        short.iter_mut().for_each(|column| *column = texts(&column.name, &["1"]));
        assert_eq!(encode(&short).0, 1);
    }

    #[test]
    fn bad_columns_are_refused_by_name() {
        let rest: Vec<Column> = columns().into_iter().skip(1).collect();
        assert!(message(&rest).starts_with("the request has no column `user`"), "{}", message(&rest));
        assert!(message(&[]).starts_with("the request has no column `user`"), "{}", message(&[]));
        let unknown = message(&[columns(), vec![texts("pric", &["1"])]].concat());
        assert!(unknown.starts_with("the model has no column `pric`, did you mean `price`?"), "{unknown}");
        let twice = message(&[columns(), vec![texts("user", &["1"])]].concat());
        assert!(twice.contains("`user` is there twice"), "{twice}");
        let shorter = message_with(texts("city", &["a", "b"]));
        assert_eq!(
            shorter,
            "the request: column `user` has 6 rows, and column `city` has 2; expected equal numbers, or 1 row, which \
             is repeated"
        );
    }

    #[test]
    fn a_long_list_cannot_become_any_number_of_ids() {
        let tags = Column { rows: 1, list: Some(1000), ..integers("tags", &[Some(1); 1000]) };
        let price = integers("price", &vec![Some(1); MAX_IDS / 1000 + 1]);
        let mut columns = columns();
        columns.iter_mut().for_each(|column| *column = texts(&column.name, &["1"]));
        (columns[2], columns[4]) = (tags, price);
        assert!(message(&columns).contains("more than 16777216 ids"), "{}", message(&columns));
    }

    #[test]
    fn bad_values_are_refused_by_column_and_row() {
        let number = message_with(texts("age", &["1", "2", "many", "4", "5", "6"]));
        assert_eq!(number, "the request, row 3, column `age`: found \"many\", expected a number");
        let limit = message_with(integers("price", &[Some(1), Some(2_000_000_000), None, None, None, None]));
        assert!(
            limit.starts_with("the request, row 2, column `price`: found \"2000000000\", expected a number"),
            "{limit}"
        );
        let half = Column { values: Values::Singles(vec![Some(0.5)]), ..integers("user", &[None]) };
        let half = message_with(half);
        assert!(half.starts_with("the request, row 1, column `user`: found \"0.5\", expected ids"), "{half}");
        let bracket = message_with(texts("tags", &["[1, 2]"]));
        assert!(bracket.starts_with("the request, row 1, column `tags`: found \"[1, 2]\""), "{bracket}");
        let lists = Column { rows: 1, list: Some(2), ..integers("city", &[None; 2]) };
        assert_eq!(message_with(lists), "the request: column `city` has 2 values a row; the feature has one");
        let short = Column { rows: 6, list: Some(2), ..integers("tags", &[None; 3]) };
        assert!(message_with(short).contains("column `tags` has 3 values, and its shape [6, 2] has another number"));
    }
}
