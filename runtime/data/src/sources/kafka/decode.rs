//! Turns the value of a record into the cells of a row. The cells then have the meaning that they
//! have in a text file. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use rectrain_kinds::{CsvFormat, RecordFormat, Schema};

use crate::blocking::Stop;
use crate::error::{DataError, shown};
use crate::json::{self, BadJson, Json};
use crate::schema::{Encoder, Layout};
use crate::text::{Cells, Span, find_record};

use super::registry::{self, RecordSchema, Registry};
use super::{avro, protobuf};

/// Separates the items of a JSON list in a cell, in columns without a separator of their own.
const BETWEEN_ITEMS: &str = "\u{1f}";

/// Cuts records into cells. Its memory is reused from record to record.
#[derive(Debug)]
pub(super) struct Decoder {
    columns: Columns,
    cells: Cells,
    /// The cells of a JSON object, an Avro record or a Protobuf message, each with its own bytes.
    values: Vec<Vec<u8>>,
    bytes: Vec<u8>,
    ends: Vec<u32>,
    members: Members,
}

/// The members of the JSON object before, in their order. Objects of a topic mostly have the same
/// ones, so a comparison finds the column.
#[derive(Debug, Default)]
struct Members(Vec<(Vec<u8>, Option<usize>)>);

/// Members whose names are kept, at most.
const MOST_MEMBERS: usize = 4_096;

impl Members {
    /// The column of the object's member `index`; `None` if the job does not read it.
    fn column(&mut self, index: usize, name: &[u8], named: &Named) -> Option<usize> {
        if let Some((known, column)) = self.0.get(index) {
            if known == name {
                return *column;
            }
            self.0.truncate(index);
        }
        let column = named.places.get(name).copied();
        if index == self.0.len() && index < MOST_MEMBERS {
            self.0.push((name.to_vec(), column));
        }
        column
    }
}

#[derive(Debug, Clone)]
enum Columns {
    Csv(CsvFormat),
    Json(Named),
    /// Of a schema in the registry.
    Registered(Named, Arc<Registry>),
}

/// The place of each column by its name, and the separator of its list items.
#[derive(Debug, Clone)]
struct Named {
    places: HashMap<Vec<u8>, usize>,
    separators: Vec<Vec<u8>>,
}

/// Why a record has no cells.
#[derive(Debug)]
pub(super) enum NoCells {
    /// Its value is no row.
    Bad(BadValue),
    /// The value cannot be understood now.
    Failed(DataError),
}

/// Why the value of a record is no row.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadValue {
    pub(super) problem: String,
    /// The value, or its part.
    pub(super) found: String,
}

/// The schema as the records are read: lists have a separator in every format.
pub(super) fn schema(format: &RecordFormat, schema: &Schema) -> Schema {
    let mut schema = schema.clone();
    if !matches!(format, RecordFormat::Csv(_)) {
        for field in &mut schema.sparse {
            if field.multi_value.as_deref() == Some("") {
                field.multi_value = Some(BETWEEN_ITEMS.to_owned());
            }
        }
    }
    schema
}

/// The columns of the records. Formats with names have the ones that the job reads.
pub(super) fn layout(topics: &str, format: &RecordFormat, encoder: &Encoder) -> Result<Layout, DataError> {
    let names = match format {
        RecordFormat::Csv(csv) => csv.columns.clone().unwrap_or_default(),
        RecordFormat::Json | RecordFormat::Avro { .. } | RecordFormat::Protobuf { .. } => read_columns(encoder),
    };
    Layout::bind(topics, names, encoder, None)
}

fn read_columns(encoder: &Encoder) -> Vec<String> {
    let schema = &encoder.schema;
    let sparse = schema.sparse.iter().map(|field| &field.name);
    let dense = schema.dense.iter().map(|field| &field.name);
    let time = schema.time.iter().map(|field| &field.name);
    let others = [&schema.label.name].into_iter().chain(&schema.group).chain(time).chain(&encoder.carried);
    let mut names = Vec::new();
    for name in sparse.chain(dense).chain(others) {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    names
}

impl Decoder {
    /// A decoder of this format. Avro and Protobuf need the registry.
    pub(super) fn new(
        format: &RecordFormat,
        schema: &Schema,
        layout: &Layout,
        registry: Option<&Arc<Registry>>,
    ) -> Self {
        let columns = match (format, registry) {
            (RecordFormat::Csv(csv), _) => Columns::Csv(csv.clone()),
            (RecordFormat::Avro { .. } | RecordFormat::Protobuf { .. }, Some(registry)) => {
                Columns::Registered(Named::new(schema, layout), Arc::clone(registry))
            }
            _ => Columns::Json(Named::new(schema, layout)),
        };
        let values = vec![Vec::new(); layout.names.len()];
        let (bytes, ends, members) = (Vec::new(), Vec::new(), Members::default());
        Self { columns, cells: Cells::default(), values, bytes, ends, members }
    }

    /// The bytes and the ends of the cells of a record, for [`cell`](crate::text::cell).
    pub(super) fn cut<'a>(&'a mut self, value: &'a [u8], stop: &Stop) -> Result<(&'a [u8], &'a [u32]), NoCells> {
        match &self.columns {
            Columns::Csv(format) => {
                let span = line(value, format).map_err(NoCells::Bad)?;
                return Ok(self.cells.cut(&value[..span.end], span.quoted, format.delimiter.as_bytes()));
            }
            Columns::Json(named) => {
                from_json(named, &mut self.members, value, &mut self.values).map_err(NoCells::Bad)?
            }
            Columns::Registered(named, registry) => {
                let no_number = || NoCells::Bad(bad("a record behind the number of its schema is expected", value));
                let (number, record) = registry::split(value).ok_or_else(no_number)?;
                let schema = registry.schema(number, stop).map_err(NoCells::Failed)?;
                named.read(&schema, record, &mut self.values).map_err(NoCells::Bad)?;
            }
        }
        self.join();
        Ok((&self.bytes, &self.ends))
    }

    /// Writes all cells into one text, with one byte between two of them.
    fn join(&mut self) {
        self.bytes.clear();
        self.ends.clear();
        for value in &self.values {
            if !self.ends.is_empty() {
                self.bytes.push(b',');
            }
            self.bytes.extend_from_slice(value);
            self.ends.push(self.bytes.len() as u32);
        }
    }
}

impl Named {
    fn new(schema: &Schema, layout: &Layout) -> Self {
        let places = layout.names.iter().enumerate().map(|(place, name)| (name.clone().into_bytes(), place));
        let mut separators = vec![BETWEEN_ITEMS.as_bytes().to_vec(); layout.names.len()];
        for (field, &place) in schema.sparse.iter().zip(&layout.sparse) {
            if let Some(separator) = &field.multi_value {
                separators[place] = separator.clone().into_bytes();
            }
        }
        Self { places: places.collect(), separators }
    }

    /// Reads the cells of a record with this schema.
    fn read(&self, schema: &RecordSchema, record: &[u8], values: &mut [Vec<u8>]) -> Result<(), BadValue> {
        values.iter_mut().for_each(Vec::clear);
        let separator = |name: &str| Some(self.separators[*self.places.get(name.as_bytes())?].as_slice());
        let cell = |name: &str, text: &[u8]| {
            if let Some(&place) = self.places.get(name.as_bytes()) {
                values[place].extend_from_slice(text);
            }
        };
        let (kind, read) = match schema {
            RecordSchema::Avro(schema) => {
                ("an Avro record", avro::read(schema, record, |name| separator(name).unwrap_or_default(), cell))
            }
            RecordSchema::Protobuf(schema) => ("a Protobuf message", protobuf::read(schema, record, separator, cell)),
        };
        read.map_err(|expected| bad(&format!("{kind}: expected {expected}"), record))
    }
}

/// The one line of a value.
fn line(value: &[u8], format: &CsvFormat) -> Result<Span, BadValue> {
    let found = find_record(value, 0, format, true).filter(|found| found.end > 0);
    match found {
        None => Err(bad("a line of text is expected", value)),
        Some(span) if span.unclosed => Err(bad("a closing quote is expected", value)),
        Some(span) if span.next < value.len() => Err(bad("one line of text is expected", value)),
        Some(span) => Ok(span),
    }
}

fn from_json(named: &Named, members: &mut Members, value: &[u8], values: &mut [Vec<u8>]) -> Result<(), BadValue> {
    values.iter_mut().for_each(Vec::clear);
    let (mut problem, mut index) = (None, 0);
    let read = json::read_object(value, |name, member| {
        let column = members.column(index, &name, named);
        index += 1;
        if let Some(place) = column {
            values[place].clear();
            if let Err(expected) = write(&member, &named.separators[place], &mut values[place]) {
                problem = Some((name.into_owned(), expected));
            }
        }
    });
    if let Err(BadJson { at, expected }) = read {
        return Err(bad(
            &format!("expected {expected} at byte {at}"),
            &value[at.saturating_sub(20).min(value.len())..],
        ));
    }
    let Some((name, expected)) = problem else { return Ok(()) };
    Err(bad(&format!("column `{}`: expected {expected}", String::from_utf8_lossy(&name)), value))
}

fn bad(problem: &str, value: &[u8]) -> BadValue {
    BadValue { problem: problem.to_owned(), found: shown(value) }
}

/// Writes a JSON value as the text of a cell.
fn write(value: &Json<'_>, separator: &[u8], into: &mut Vec<u8>) -> Result<(), &'static str> {
    match value {
        Json::Null => {}
        Json::Bool(value) => into.push(b'0' + u8::from(*value)),
        Json::Number(text) => into.extend_from_slice(text),
        Json::Text(text) => into.extend_from_slice(text),
        Json::Object => return Err("a number, a text or a list"),
        Json::List(list) => {
            let mut result = Ok(());
            let mut is_first = true;
            let read = json::read_list(list, |item| {
                if !std::mem::take(&mut is_first) {
                    into.extend_from_slice(separator);
                }
                match item {
                    Json::List(_) | Json::Object => result = Err("a list of numbers or texts"),
                    item => result = result.and(write(&item, separator, into)),
                }
            });
            return read.map_err(|bad| bad.expected).and(result);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rectrain_kinds::{DenseField, LabelField, MissingValue, SparseField, TimeField, TimeUnit, Transform};

    use super::*;
    use crate::text::cell;

    fn texts((bytes, ends): (&[u8], &[u32])) -> Vec<String> {
        (0..ends.len()).map(|column| String::from_utf8_lossy(cell(bytes, ends, column)).into_owned()).collect()
    }

    fn fields() -> Schema {
        let sparse = |name: &str, multi_value: Option<&str>| SparseField {
            name: name.to_owned(),
            table: name.to_owned(),
            multi_value: multi_value.map(str::to_owned),
            missing: MissingValue::Token,
            hash_buckets: None,
        };
        let dense = DenseField { name: "age".to_owned(), transform: Transform::Identity, missing: 0.0, limit: 1e9 };
        let sparse = vec![sparse("user", None), sparse("tags", Some("")), sparse("genres", Some("|"))];
        Schema {
            sparse,
            dense: vec![dense],
            label: LabelField::of_numbers("y", None),
            group: Some("user".to_owned()),
            time: Some(TimeField { name: "at".to_owned(), unit: TimeUnit::Seconds, order: None }),
        }
    }

    fn cut(format: &RecordFormat, value: &str) -> Result<Vec<String>, BadValue> {
        cut_with(format, None, value.as_bytes())
    }

    fn cut_with(
        format: &RecordFormat,
        registry: Option<&Arc<Registry>>,
        value: &[u8],
    ) -> Result<Vec<String>, BadValue> {
        let schema = schema(format, &fields());
        let layout = layout("t", format, &Encoder::new(schema.clone(), &[])).unwrap();
        match Decoder::new(format, &schema, &layout, registry).cut(value, &Stop::default()) {
            Ok(cells) => Ok(texts(cells)),
            Err(NoCells::Bad(bad)) => Err(bad),
            Err(NoCells::Failed(error)) => panic!("{error}"),
        }
    }

    #[test]
    fn members_become_cells_whatever_their_order() {
        let found = cut(
            &RecordFormat::Json,
            r#"{"y":true,"other":{"a":[]},"genres":["a","b"],"tags":[7,"x y"],"user":"u\n1","at":170,"age":1.50}"#,
        );
        assert_eq!(found.unwrap(), ["u\n1", "7\u{1f}x y", "a|b", "1.50", "1", "170"]);
        assert_eq!(cut(&RecordFormat::Json, r#"{"y":0,"user":null}"#).unwrap(), ["", "", "", "", "0", ""]);
    }

    #[test]
    fn members_may_change_from_object_to_object() {
        let (format, schema) = (RecordFormat::Json, schema(&RecordFormat::Json, &fields()));
        let layout = layout("t", &format, &Encoder::new(schema.clone(), &[])).unwrap();
        let mut decoder = Decoder::new(&format, &schema, &layout, None);
        for (object, expected) in [
            (r#"{"y":1,"user":"a","age":2}"#, ["a", "", "", "2", "1", ""]),
            (r#"{"y":0,"user":"b","age":3}"#, ["b", "", "", "3", "0", ""]),
            (r#"{"y":0,"age":4,"user":"c","at":5}"#, ["c", "", "", "4", "0", "5"]),
            (r#"{"other":9,"user":"d"}"#, ["d", "", "", "", "", ""]),
            (r#"{"y":1,"user":"e","age":6,"at":7}"#, ["e", "", "", "6", "1", "7"]),
            (r#"{"user":"f","user":"g"}"#, ["g", "", "", "", "", ""]),
        ] {
            let Ok(cells) = decoder.cut(object.as_bytes(), &Stop::default()) else { panic!("{object}") };
            assert_eq!(texts(cells), expected, "{object}");
        }
    }

    #[test]
    fn records_of_a_registry_have_the_cells_of_their_columns() {
        let avro = r#"{"type": "record", "name": "R", "fields": [{"name": "user", "type": "string"},
            {"name": "other", "type": "long"}, {"name": "tags", "type": {"type": "array", "items": "long"}}]}"#;
        let avro = RecordSchema::Avro(avro::AvroSchema::parse(avro).unwrap());
        let message = "syntax = \"proto3\"; message M { string user = 1; int32 other = 2; repeated int32 tags = 3;
            repeated string genres = 4; double age = 5; }";
        let message = RecordSchema::Protobuf(protobuf::ProtobufSchema::parse(message).unwrap());
        let url = "http://127.0.0.1:1".to_owned();
        let formats = [RecordFormat::Avro { registry: url.clone() }, RecordFormat::Protobuf { registry: url }];
        let records = [
            &[0, 0, 0, 0, 9, 2, b'u', 6, 4, 14, 16, 0][..],
            &[0, 0, 0, 0, 9, 0, 10, 1, b'u', 16, 3, 26, 2, 7, 8, 34, 1, b'a', 34, 1, b'b'],
        ];
        let expected = [["u", "7\u{1f}8", "", "", "", ""], ["u", "7\u{1f}8", "a|b", "0", "", ""]];
        for (((schema, format), record), expected) in
            [avro, message].into_iter().zip(&formats).zip(records).zip(expected)
        {
            let registry = Arc::new(Registry::knowing([(9, schema)]));
            assert_eq!(cut_with(format, Some(&registry), record).unwrap(), expected);
            let problem = |record: &[u8]| cut_with(format, Some(&registry), record).unwrap_err().problem;
            assert_eq!(problem(b"{}"), "a record behind the number of its schema is expected");
            assert!(problem(&record[..record.len() - 1]).ends_with("expected more bytes"));
        }
    }

    /// The new field comes before one that the job reads, so the schema of each record must count.
    #[test]
    fn a_schema_may_gain_a_field_from_record_to_record() {
        let avro = |gained: &str| {
            let text = format!(
                r#"{{"type": "record", "name": "R", "fields": [{{"name": "user", "type": "string"}}, {gained}
                {{"name": "tags", "type": {{"type": "array", "items": "long"}}}}]}}"#
            );
            RecordSchema::Avro(avro::AvroSchema::parse(&text).unwrap())
        };
        let grown = avro(r#"{"name": "shop", "type": "string"},"#);
        let registry = Arc::new(Registry::knowing([(9, avro("")), (10, grown)]));
        let format = RecordFormat::Avro { registry: "http://127.0.0.1:1".to_owned() };
        let schema = schema(&format, &fields());
        let layout = layout("t", &format, &Encoder::new(schema.clone(), &[])).unwrap();
        let mut decoder = Decoder::new(&format, &schema, &layout, Some(&registry));
        let old: &[u8] = &[0, 0, 0, 0, 9, 2, b'u', 2, 14, 0];
        let new: &[u8] = &[0, 0, 0, 0, 10, 2, b'v', 4, b's', b's', 2, 16, 0];
        for (record, expected) in [(old, ["u", "7"]), (new, ["v", "8"]), (old, ["u", "7"])] {
            let Ok(cells) = decoder.cut(record, &Stop::default()) else { panic!("{record:?}") };
            let cells = texts(cells);
            assert_eq!(cells[..2], expected);
            assert!(cells[2..].iter().all(String::is_empty), "{cells:?}");
        }
    }

    #[test]
    fn a_value_that_is_no_row_is_refused_with_its_text() {
        let problem = |value| cut(&RecordFormat::Json, value).unwrap_err().problem;
        assert_eq!(problem("click,1"), "expected a JSON object at byte 0");
        assert_eq!(problem(r#"{"age":{}}"#), "column `age`: expected a number, a text or a list");
        assert_eq!(problem(r#"{"tags":[[1]]}"#), "column `tags`: expected a list of numbers or texts");
        let columns = ["y", "user", "tags", "genres", "age", "at"].map(str::to_owned).to_vec();
        let format = RecordFormat::Csv(CsvFormat { header: false, columns: Some(columns), ..CsvFormat::default() });
        assert_eq!(cut(&format, "1,\"u,1\",t,g,5,9\n").unwrap(), ["1", "u,1", "t", "g", "5", "9"]);
        for (value, expected) in [("", "a line"), ("1,2\n3,4", "one line"), ("1,\"2", "a closing quote")] {
            let found = cut(&format, value).unwrap_err().problem;
            assert!(found.starts_with(expected), "{found}");
        }
    }
}
