//! The crate as its users see it: files of every kind in, batches out. The tests compare each
//! format with rows that they keep as plain values.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use arrow_array::builder::{ListBuilder, StringBuilder};
use arrow_array::types::{Float16Type, Float64Type, Int64Type, TimestampMillisecondType};
use arrow_array::{
    ArrayRef, ArrowPrimitiveType, BooleanArray, Date32Array, Float16Array, Float32Array, Float64Array, Int32Array,
    Int64Array, ListArray, NullArray, RecordBatch, StringArray, TimestampMillisecondArray, UInt64Array,
};
use object_store::memory::InMemory;
use object_store::{ObjectStore, PutPayload};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::{WriterProperties, WriterPropertiesBuilder};
use rectrain_data::key::TableSeed;
use rectrain_data::synthetic::Teacher;
use rectrain_data::{
    BadRows, Batch, CsvFormat, DataError, Dataset, Date, DateOrder, DenseField, FileFormat, Format, LabelField,
    MissingValue, Order, Place, Position, ReadPlan, Schema, SourceConfig, Span, SparseField, Split, Start, Subset,
    SyntheticConfig, TimeBound, Transform, Version, chunk_permutation,
};
use rectrain_kinds::{NO_GROUP, TimeField, TimeUnit};
use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

fn sparse(name: &str, multi_value: Option<char>, missing: MissingValue) -> SparseField {
    SparseField {
        name: name.into(),
        table: name.into(),
        multi_value: multi_value.map(String::from),
        missing,
        hash_buckets: None,
    }
}

fn dense(name: &str, transform: Transform, missing: f32) -> DenseField {
    DenseField { name: name.into(), transform, missing, limit: 1e15 }
}

/// `y,user,tags,price,when`: every kind of field.
fn schema() -> Schema {
    Schema {
        sparse: vec![
            sparse("user", None, MissingValue::Token),
            sparse("tags", Some('|'), MissingValue::Skip),
            sparse("user", None, MissingValue::Skip),
        ],
        dense: vec![dense("price", Transform::Identity, -1.0)],
        label: LabelField::of_numbers("y", None),
        group: Some("user".into()),
        time: None,
    }
}

#[derive(Debug, Clone)]
struct Row {
    y: i64,
    user: String,
    tags: Vec<String>,
    price: Option<f32>,
    when: i64,
}

fn rows(count: u64) -> Vec<Row> {
    (0..count)
        .map(|i| Row {
            y: i64::from(i * 7 % 3 == 0),
            user: match i % 5 {
                0 => String::new(),
                1 => format!("u{i}"),
                _ => (i % 11).to_string(),
            },
            tags: (0..i % 4).map(|t| if t == 0 { "x".into() } else { (i * t).to_string() }).collect(),
            price: (i % 6 != 0).then_some(i as f32 / 8.0),
            when: 1000 + i as i64,
        })
        .collect()
}

fn csv(rows: &[Row]) -> String {
    let mut text = "y,user,tags,price,when\n".to_owned();
    for row in rows {
        let price = row.price.map_or(String::new(), |price| price.to_string());
        text += &format!("{},{},{},{price},{}\n", row.y, row.user, row.tags.join("|"), row.when);
    }
    text
}

/// The batch of the rows, made here without the crate, except for its keys.
fn expected(rows: &[Row]) -> Batch {
    let (user, tags) = (TableSeed::of("user"), TableSeed::of("tags"));
    let mut batch = Batch::of_schema(&schema());
    for row in rows {
        let key = user.text(row.user.as_bytes());
        batch.sparse[0].keys.push(key);
        batch.sparse[1].keys.extend(row.tags.iter().map(|tag| tags.text(tag.as_bytes())));
        if !row.user.is_empty() {
            batch.sparse[2].keys.push(key);
        }
        for column in &mut batch.sparse[1..] {
            let end = column.keys.len() as u32;
            column.offsets.as_mut().unwrap().push(end);
        }
        batch.dense.push(row.price.unwrap_or(-1.0));
        batch.labels.push(row.y as f32);
        batch.groups.as_mut().unwrap().push(if row.user.is_empty() { NO_GROUP } else { key });
        batch.samples += 1;
    }
    batch
}

fn text_format(format: CsvFormat) -> Format {
    Format::Files(FileFormat::Csv(format))
}

fn config(paths: &[&Path]) -> SourceConfig {
    SourceConfig { paths: paths.iter().map(|path| path.display().to_string()).collect(), ..SourceConfig::default() }
}

fn plan(chunk_rows: u64) -> ReadPlan {
    ReadPlan { chunk_rows, shuffle: None, epoch: 0, read_ahead_chunks: 2 }
}

fn chunks(dataset: &Dataset, plan: ReadPlan) -> Result<Vec<Batch>, DataError> {
    let mut reader = dataset.reader(plan)?;
    (0..).map_while(|chunk| reader.read(chunk).transpose()).collect()
}

fn all(dataset: &Dataset) -> Result<Batch, DataError> {
    Ok(Batch::concat(&chunks(dataset, plan(7))?))
}

fn open_and_read(config: SourceConfig) -> Result<Batch, DataError> {
    all(&Dataset::open(config, schema())?)
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn put(&self, name: &str, content: impl AsRef<[u8]>) -> std::path::PathBuf {
        let path = self.0.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), Default::default());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

fn parquet_of(columns: Vec<(&str, ArrayRef)>, group_rows: usize) -> Vec<u8> {
    parquet_with(columns, group_rows, Compression::SNAPPY)
}

fn parquet_with(columns: Vec<(&str, ArrayRef)>, group_rows: usize, codec: Compression) -> Vec<u8> {
    written(columns, group_rows, WriterProperties::builder().set_compression(codec))
}

fn written(columns: Vec<(&str, ArrayRef)>, group_rows: usize, properties: WriterPropertiesBuilder) -> Vec<u8> {
    let batch =
        RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, values)| (name, values, true)))
            .unwrap();
    let properties = properties.set_max_row_group_row_count(Some(group_rows)).build();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    bytes
}

fn parquet(rows: &[Row], group_rows: usize) -> Vec<u8> {
    parquet_by(rows, group_rows, Compression::SNAPPY)
}

fn parquet_by(rows: &[Row], group_rows: usize, codec: Compression) -> Vec<u8> {
    parquet_with(columns_of(rows), group_rows, codec)
}

/// Limits the dictionary of each column to `dictionary_bytes`. The writer stores further texts as
/// they are, so some or all pages do not use the dictionary.
fn parquet_of_plain_texts(rows: &[Row], dictionary_bytes: usize) -> Vec<u8> {
    let properties = WriterProperties::builder().set_dictionary_page_size_limit(dictionary_bytes);
    written(columns_of(rows), 1000, properties.set_data_page_row_count_limit(3).set_write_batch_size(2))
}

fn columns_of(rows: &[Row]) -> Vec<(&'static str, ArrayRef)> {
    let text = |value: &String| (!value.is_empty()).then(|| value.clone());
    vec![
        ("unused", Arc::new(BooleanArray::from(vec![true; rows.len()]))),
        ("when", Arc::new(TimestampMillisecondArray::from_iter_values(rows.iter().map(|r| r.when * 1000)))),
        ("price", Arc::new(Float64Array::from_iter(rows.iter().map(|r| r.price.map(f64::from))))),
        ("user", Arc::new(StringArray::from_iter(rows.iter().map(|r| text(&r.user))))),
        ("tags", Arc::new(StringArray::from_iter(rows.iter().map(|r| text(&r.tags.join("|")))))),
        ("y", Arc::new(Int32Array::from_iter(rows.iter().map(|r| Some(r.y as i32))))),
    ]
}

/// No rows and no types, as pandas writes an empty frame.
fn parquet_without_types() -> Vec<u8> {
    let nothing = || -> ArrayRef { Arc::new(NullArray::new(0)) };
    parquet_of(["y", "user", "tags", "price", "when"].map(|name| (name, nothing())).into(), 10)
}

/// No rows and no columns.
fn parquet_without_columns() -> Vec<u8> {
    let mut bytes = Vec::new();
    let schema = Arc::new(arrow_schema::Schema::empty());
    ArrowWriter::try_new(&mut bytes, schema, None).unwrap().close().unwrap();
    bytes
}

/// The same rows in every kind of file, as one file and in pieces.
fn every_kind(folder: &Folder, rows: &[Row]) -> Vec<(&'static str, SourceConfig)> {
    let text = csv(rows);
    let (first, second) = rows.split_at(rows.len() / 3);
    let tabs = text_format(CsvFormat {
        delimiter: "\t".into(),
        header: false,
        quoting: false,
        columns: Some(["y", "user", "tags", "price", "when"].map(String::from).into()),
    });
    let body: String = text.lines().skip(1).map(|line| line.replace(',', "\t") + "\n").collect();
    let quoted = text.replace(',', "\",\"").replace('\n', "\"\r\n\"");
    let quoted = format!("\u{feff}\"{}", quoted.strip_suffix('"').unwrap());
    let zstd = zstd::encode_all(text.as_bytes(), 1).unwrap();
    let one = |name: &str, content: &[u8]| config(&[&folder.put(name, content)]);
    folder.put("pieces/b.csv", csv(second).trim_end());
    folder.put("pieces/a.csv.gz", gzip(csv(first).as_bytes()));
    folder.put("pieces/not-this.txt", "hello");
    let header = text.lines().next().unwrap();
    folder.put("pieces/0.csv", header);
    folder.put("pieces/1.csv.gz", gzip(format!("{header}\n\n").as_bytes()));
    folder.put("pieces/aa.csv", "");
    folder.put("pieces/c.csv.gz", gzip(b""));
    folder.put("pieces/d.csv", "");
    folder.put("pieces/.b.csv", csv(second));
    folder.put("groups/1.parquet", parquet(first, 4));
    folder.put("groups/2.parquet", parquet(second, 1000));
    for empty in ["0", "1a", "3"] {
        folder.put(&format!("groups/{empty}.parquet"), parquet(&[], 10));
    }
    folder.put("groups/00.parquet", "");
    folder.put("groups/1b.parquet", parquet_without_types());
    folder.put("groups/4.parquet", parquet_without_columns());
    let glob = |pattern: &str| config(&[&folder.0.path().join(pattern)]);
    let url = format!("file://{}/one.csv", folder.0.path().display());
    let members = [gzip(&text.as_bytes()[..200]), gzip(&text.as_bytes()[200..])].concat();
    vec![
        ("csv", one("one.csv", text.as_bytes())),
        ("a file URL", SourceConfig { paths: vec![url], ..SourceConfig::default() }),
        ("csv, quoted, with a byte-order mark and \\r\\n", one("quoted.csv", quoted.as_bytes())),
        ("tsv without header", SourceConfig { format: tabs, ..one("bare.tsv", body.as_bytes()) }),
        ("gzip", one("one.csv.gz", &gzip(text.as_bytes()))),
        ("gzip of two members", one("two.csv.gz", &members)),
        ("gzip without its extension", one("secret.csv", &gzip(text.as_bytes()))),
        ("zstandard", one("one.csv.zst", &zstd)),
        ("two files by a glob, one of them gzip, and some without rows", glob("pieces/*.csv*")),
        ("parquet", one("one.parquet", &parquet(rows, 1000))),
        ("parquet in row groups of 5", one("small.parquet", &parquet(rows, 5))),
        ("parquet without dictionaries", one("plain.parquet", &parquet_of_plain_texts(rows, 0))),
        ("parquet with some texts in dictionaries", one("some.parquet", &parquet_of_plain_texts(rows, 40))),
        ("two parquet files by a glob, and some without rows", glob("groups/*.parquet")),
    ]
}

#[test]
fn carried_texts_come_back_with_their_rows_and_labels_may_be_absent() {
    let (folder, rows) = (Folder::new(), rows(40));
    let strip = |line: &str| line.split_once(',').map(|(_, rest)| rest.to_owned()).unwrap();
    let bare: Vec<String> = csv(&rows).lines().map(strip).collect();
    let text = folder.put("rows.csv", bare.join("\n"));
    let binary = folder.put("rows.parquet", parquet(&rows, 11));
    for path in [&text, &binary] {
        let carried = vec!["tags".to_owned(), "user".to_owned()];
        let source = SourceConfig { carried, label_is_optional: true, ..config(&[path]) };
        let batch = open_and_read(source).unwrap();
        assert_eq!(batch.sparse, expected(&rows).sparse);
        assert_eq!(batch.labels.iter().all(|label| label.is_nan()), path == &text);
        for (place, row) in rows.iter().enumerate() {
            let found = batch.carried.iter().map(|column| column.text(place).unwrap_or_default().to_vec());
            let expected = [row.tags.join("|").into_bytes(), row.user.clone().into_bytes()];
            assert_eq!(found.collect::<Vec<_>>(), expected, "row {place}");
        }
    }
    let message = open_and_read(config(&[&text])).unwrap_err().to_string();
    assert!(message.contains("has no column `y`"), "{message}");
}

#[test]
fn every_kind_of_file_gives_the_same_batches() {
    let (folder, rows) = (Folder::new(), rows(101));
    let wanted = expected(&rows);
    for (kind, config) in every_kind(&folder, &rows) {
        let dataset = Dataset::open(config, schema()).unwrap_or_else(|e| panic!("{kind}: {e}"));
        assert_eq!(all(&dataset).unwrap(), wanted, "{kind}");
        assert_eq!(dataset.count_rows().unwrap(), 101, "{kind}");
        assert_eq!(dataset.estimated_rows(), 101, "{kind}");
    }
}

#[test]
fn a_chunk_does_not_depend_on_how_it_is_reached() {
    let (folder, rows) = (Folder::new(), rows(101));
    for (kind, config) in every_kind(&folder, &rows) {
        let skip = SourceConfig { bad_rows: BadRows::Skip { limit: 0 }, ..config.clone() };
        for config in [config, skip] {
            let dataset = Dataset::open(config, schema()).unwrap();
            let plan = ReadPlan { shuffle: Some(5), epoch: 3, ..plan(8) };
            let one_pass = chunks(&dataset, plan).unwrap();
            assert_eq!(one_pass.len(), 13);
            let mut backwards = dataset.reader(ReadPlan { read_ahead_chunks: 0, ..plan }).unwrap();
            for (chunk, wanted) in one_pass.iter().enumerate().rev() {
                let chunk = chunk as u64;
                let fresh = dataset.reader(plan).unwrap().read(chunk).unwrap();
                assert_eq!(fresh.as_ref(), Some(wanted), "{kind}");
                assert_eq!(backwards.read(chunk).unwrap().as_ref(), Some(wanted), "{kind}");
            }
            for (step, announce) in [(2, false), (3, true), (12, false)] {
                let mut loader = dataset.reader(plan).unwrap();
                if announce {
                    loader.prefetch((1..13).step_by(step));
                }
                for chunk in (1..13).step_by(step) {
                    let read = loader.read(chunk as u64).unwrap();
                    assert_eq!(read.as_ref(), Some(&one_pass[chunk]), "{kind}");
                }
            }
            let mut reader = dataset.reader(plan).unwrap();
            assert_eq!(reader.read(13).unwrap(), None);
            assert_eq!(reader.read(9_999_999_999).unwrap(), None);
            assert_eq!(reader.read(12).unwrap().as_ref(), Some(&one_pass[12]), "{kind}");
        }
    }
}

#[test]
fn text_files_read_to_their_ends_are_not_read_again() {
    let (folder, rows) = (Folder::new(), rows(60));
    let paths = [0..20, 20..40, 40..60].map(|part| folder.put(&format!("{}.csv", part.start), csv(&rows[part])));
    let dataset = Dataset::open(config(&[&paths[0], &paths[1], &paths[2]]), schema()).unwrap();
    let before = chunks(&dataset, plan(7)).unwrap();
    std::fs::remove_file(&paths[0]).unwrap();
    std::fs::remove_file(&paths[1]).unwrap();
    let mut reader = dataset.reader(plan(7)).unwrap();
    for chunk in [6, 8] {
        assert_eq!(reader.read(chunk).unwrap().as_ref(), before.get(chunk as usize));
    }
    assert_eq!(dataset.reader(plan(7)).unwrap().read(9).unwrap(), None);
    assert!(dataset.reader(plan(7)).unwrap().read(5).is_err(), "it begins in a removed file");
}

#[test]
fn a_shuffle_permutes_each_chunk_and_nothing_else() {
    let (folder, rows) = (Folder::new(), rows(48));
    let dataset = Dataset::open(config(&[&folder.put("a.csv", csv(&rows))]), schema()).unwrap();
    let plain = chunks(&dataset, plan(16)).unwrap();
    let shuffled = |seed, epoch| chunks(&dataset, ReadPlan { shuffle: Some(seed), epoch, ..plan(16) }).unwrap();
    for (chunk, (plain, shuffled)) in plain.iter().zip(&shuffled(9, 2)).enumerate() {
        let order = chunk_permutation(9, 2, chunk as u64, plain.samples as u32);
        assert_eq!(&plain.permute(&order), shuffled);
        assert_ne!(plain, shuffled);
    }
    assert_ne!(shuffled(9, 2), shuffled(9, 3));
    assert_ne!(shuffled(9, 2), shuffled(8, 2));
}

#[test]
fn splits_divide_the_rows_and_share_nothing() {
    let (folder, rows) = (Folder::new(), rows(101));
    for (kind, config) in every_kind(&folder, &rows) {
        let splits = [
            (Split::Position { train_rows: 37 }, 37),
            (Split::Fraction { train: 0.8 }, 81),
            (Split::Time { column: "when".into(), test_from: TimeBound::Number(1050.0) }, 50),
        ];
        for (split, train_rows) in splits {
            let config = SourceConfig { split: Some(split.clone()), subset: Subset::Train, ..config.clone() };
            let train = Dataset::open(config, schema()).unwrap();
            let test = train.subset(Subset::Test).unwrap();
            let context = format!("{kind}, {split:?}");
            assert_eq!(all(&train).unwrap(), expected(&rows[..train_rows]), "{context}");
            assert_eq!(all(&test).unwrap(), expected(&rows[train_rows..]), "{context}");
            assert_eq!(train.count_rows().unwrap(), train_rows as u64, "{context}");
            assert_eq!(test.count_rows().unwrap(), 101 - train_rows as u64, "{context}");
            assert_eq!(train.subset(Subset::All).unwrap().count_rows().unwrap(), 101);
            if !matches!(split, Split::Time { .. }) {
                assert_eq!(test.estimated_rows(), 101 - train_rows as u64, "{context}");
            }
        }
    }
}

#[test]
fn a_split_by_a_date_compares_instants() {
    let folder = Folder::new();
    let file = folder.put("a.csv", "y,day\n0,2026-01-31\n1,2026-02-01\n1,2025-12-31\n");
    let schema =
        Schema { sparse: vec![], dense: vec![], label: LabelField::of_numbers("y", None), group: None, time: None };
    let split = Split::Time { column: "day".into(), test_from: TimeBound::Date(Date::read("2026-02", None).unwrap()) };
    let config = SourceConfig { split: Some(split), subset: Subset::Train, ..config(&[&file]) };
    let train = Dataset::open(config, schema).unwrap();
    assert_eq!(all(&train).unwrap().labels, [0.0, 1.0]);
    assert_eq!(all(&train.subset(Subset::Test).unwrap()).unwrap().labels, [1.0]);
}

/// Six rows around 1 November 2024 in every form of their days. The last three are the test.
#[test]
fn a_split_by_a_date_is_the_same_in_every_form() {
    let folder = Folder::new();
    let days = [(2024, 8, 1), (2024, 10, 31), (2023, 12, 2), (2024, 11, 1), (2024, 12, 1), (2025, 2, 3)];
    let text = |form: &dyn Fn(u32, u32, u32) -> String| -> String {
        let lines = days.iter().enumerate().map(|(row, &(y, m, d))| format!("{},{}\n", row / 3, form(y, m, d)));
        format!("y,day\n{}", lines.collect::<String>())
    };
    let labels: ArrayRef = Arc::new(Int64Array::from(vec![0, 0, 0, 1, 1, 1]));
    let seconds: Vec<i64> =
        days.iter().map(|(y, m, d)| Date::read(&format!("{y}-{m}-{d}"), None).unwrap().moment().seconds).collect();
    let milliseconds: ArrayRef =
        Arc::new(TimestampMillisecondArray::from_iter_values(seconds.iter().map(|seconds| seconds * 1000)));
    let dates: ArrayRef = Arc::new(Date32Array::from_iter_values(seconds.iter().map(|s| (s / 86_400) as i32)));
    let words: ArrayRef = Arc::new(StringArray::from_iter_values(days.iter().map(|(y, m, d)| format!("{y}-{m}-{d}"))));
    let columns = |day: &ArrayRef| parquet_of(vec![("y", Arc::clone(&labels)), ("day", Arc::clone(day))], 4);
    let iso = |y: u32, m: u32, d: u32| format!("{y}-{m:02}-{d:02}");
    for (name, bytes, bound, order) in [
        ("iso.csv", text(&iso).into_bytes(), "2024-11-01", None),
        ("short.csv", text(&|y, m, d| format!(" {y}-{m}-{d} ")).into_bytes(), "2024-11-01T00:00:00Z", None),
        ("times.csv", text(&|y, m, d| format!("{y}-{m}-{d} 00:00:00.000")).into_bytes(), "2024-11-01 00:00", None),
        ("east.csv", text(&|y, m, d| iso(y, m, d) + "T00:00:00+01:00").into_bytes(), "2024-10-31T23:00Z", None),
        ("slashes.csv", text(&|y, m, d| format!("{y}/{m}/{d}")).into_bytes(), "2024/11/1", None),
        ("us.csv", text(&|y, m, d| format!("{m}/{d}/{y}")).into_bytes(), "11/1/2024", Some(DateOrder::MonthFirst)),
        ("eu.csv", text(&|y, m, d| format!("{d}.{m}.{y}")).into_bytes(), "1.11.2024", Some(DateOrder::DayFirst)),
        ("a.parquet", columns(&words), "2024-11-01", None),
        ("b.parquet", columns(&dates), "2024-11-01", None),
        ("c.parquet", columns(&milliseconds), "2024-11-01", None),
    ] {
        let test_from = TimeBound::Date(Date::read(bound, order).unwrap());
        let config = SourceConfig {
            split: Some(Split::Time { column: "day".into(), test_from }),
            subset: Subset::Train,
            ..config(&[&folder.put(name, bytes)])
        };
        let train = Dataset::open(config, labels_only(None)).unwrap();
        assert_eq!(all(&train).unwrap().labels, [0.0; 3], "{name}");
        assert_eq!(all(&train.subset(Subset::Test).unwrap()).unwrap().labels, [1.0; 3], "{name}");
    }
    let mixed = folder.put("mixed.csv", "y,day\n0,2024-08-01\n0,8/2/2024\n1,2024-12-01\n");
    let test_from = TimeBound::Date(Date::read("2024-11-01", None).unwrap());
    let split = Some(Split::Time { column: "day".into(), test_from });
    let config = SourceConfig { split, subset: Subset::Train, ..config(&[&mixed]) };
    let error = all(&Dataset::open(config, labels_only(None)).unwrap()).unwrap_err().to_string();
    assert!(error.contains("line 3, column `day`: found \"8/2/2024\", expected a date or time of the form"), "{error}");
}

/// Integers that 64-bit floats do not tell apart.
#[test]
fn a_split_by_nanoseconds_is_exact() {
    let folder = Folder::new();
    let bound = 1_700_000_000_000_000_001_i64;
    let times = [bound - 1, bound, bound - 2, bound + 1];
    let lines: String = times.iter().map(|time| format!("{},{time}\n", u32::from(*time >= bound))).collect();
    let columns = vec![
        ("y", Arc::new(Int64Array::from(vec![0, 1, 0, 1])) as ArrayRef),
        ("at", Arc::new(Int64Array::from(times.to_vec())) as ArrayRef),
    ];
    let files = [folder.put("a.csv", format!("y,at\n{lines}")), folder.put("a.parquet", parquet_of(columns, 10))];
    for file in files {
        let split = Some(Split::Time { column: "at".into(), test_from: TimeBound::Integer(bound) });
        let config = SourceConfig { split, subset: Subset::Train, ..config(&[&file]) };
        let train = Dataset::open(config, labels_only(None)).unwrap();
        assert_eq!(all(&train).unwrap().labels, [0.0; 2]);
        assert_eq!(all(&train.subset(Subset::Test).unwrap()).unwrap().labels, [1.0; 2]);
    }
}

#[test]
fn event_times_are_seconds_in_every_kind_of_file() {
    let folder = Folder::new();
    let time = |unit| TimeField { name: "at".into(), unit, order: None };
    let schema = |unit| Schema { time: Some(time(unit)), ..labels_only(None) };
    let ones = || Arc::new(Int64Array::from(vec![1; 2])) as ArrayRef;
    let of = |times: ArrayRef| parquet_of(vec![("y", ones()), ("at", times)], 10);
    let milliseconds: ArrayRef = Arc::new(Int64Array::from(vec![1_700_000_000_500, 1_700_000_001_000]));
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["2023-11-14T22:13:20Z", "2023-11-14 22:13:21"]));
    for (file, unit) in [
        (folder.put("a.csv", "y,at\n1,1700000000500\n1,1700000001000\n"), TimeUnit::Milliseconds),
        (folder.put("a.parquet", of(milliseconds)), TimeUnit::Milliseconds),
        (folder.put("b.csv", "y,at\n1,2023-11-14T22:13:20Z\n1,2023-11-14 22:13:21\n"), TimeUnit::Seconds),
        (folder.put("b.parquet", of(texts)), TimeUnit::Seconds),
    ] {
        let batch = all(&Dataset::open(config(&[&file]), schema(unit)).unwrap()).unwrap();
        assert_eq!(
            (batch.latest(), batch.times),
            (1_700_000_001, Some(vec![1_700_000_000, 1_700_000_001])),
            "{file:?}"
        );
    }
    let wrong = folder.put("c.csv", "y,at\n1,soon\n");
    let error = all(&Dataset::open(config(&[&wrong]), schema(TimeUnit::Seconds)).unwrap()).unwrap_err().to_string();
    assert!(error.contains("`at`") && error.contains("spec.data.timeColumn"), "{error}");
}

/// Pages of such a column refer to a dictionary of its texts.
#[test]
fn a_time_column_of_texts_may_be_a_sparse_feature() {
    let (folder, day) = (Folder::new(), TableSeed::of("day"));
    let days = ["2024-10-31", "2024-11-01", "2024-10-31", "2024-11-02"];
    let lines: String = days.iter().map(|day| format!("1,{day}\n")).collect();
    let columns = vec![
        ("y", Arc::new(Int64Array::from(vec![1; 4])) as ArrayRef),
        ("day", Arc::new(StringArray::from(days.to_vec())) as ArrayRef),
    ];
    let schema = Schema { sparse: vec![sparse("day", None, MissingValue::Token)], ..labels_only(None) };
    let files = [folder.put("a.csv", format!("y,day\n{lines}")), folder.put("a.parquet", parquet_of(columns, 10))];
    for file in files {
        let test_from = TimeBound::Date(Date::read("2024-11-01", None).unwrap());
        let split = Some(Split::Time { column: "day".into(), test_from });
        let config = SourceConfig { split, subset: Subset::Train, ..config(&[&file]) };
        let train = Dataset::open(config, schema.clone()).unwrap();
        let keys = |dataset: &Dataset| all(dataset).unwrap().sparse[0].keys.clone();
        assert_eq!(keys(&train), [day.text(b"2024-10-31"); 2]);
        assert_eq!(keys(&train.subset(Subset::Test).unwrap()), [day.text(b"2024-11-01"), day.text(b"2024-11-02")]);
    }
}

/// 0.7 as a 32-bit or a 16-bit float.
fn narrow_floats() -> [(&'static str, ArrayRef); 2] {
    let half = <Float16Type as ArrowPrimitiveType>::Native::from_f32;
    // The 16-bit float of 0.1 is below the 64-bit one, and so is the 32-bit float of 0.7.
    [
        ("singles.parquet", Arc::new(Float32Array::from(vec![0.5, 0.7, 0.75]))),
        ("halves.parquet", Arc::new(Float16Array::from_iter_values([0.05, 0.1, 0.15].map(half)))),
    ]
}

#[test]
fn a_bound_includes_its_narrow_floats_in_parquet() {
    let folder = Folder::new();
    for ((name, values), bound) in narrow_floats().into_iter().zip([0.7, 0.1]) {
        let path = folder.put(name, parquet_of(vec![("y", Arc::clone(&values)), ("at", values)], 10));
        let labels = all(&Dataset::open(config(&[&path]), labels_only(Some(bound))).unwrap()).unwrap().labels;
        assert_eq!(labels, [0.0, 1.0, 1.0], "{name}");
        let split = Some(Split::Time { column: "at".into(), test_from: TimeBound::Number(bound) });
        let config = SourceConfig { split, subset: Subset::Test, ..config(&[&path]) };
        let test = all(&Dataset::open(config, labels_only(Some(bound))).unwrap()).unwrap();
        assert_eq!(test.labels, [1.0; 2], "{name}");
    }
}

#[test]
fn unsigned_times_are_compared_exactly() {
    let folder = Folder::new();
    let bound = 1_700_000_000_000_000_001_u64;
    let columns = vec![
        ("y", Arc::new(Int64Array::from(vec![0, 1, 1])) as ArrayRef),
        ("at", Arc::new(UInt64Array::from(vec![bound - 1, bound, u64::MAX])) as ArrayRef),
    ];
    let path = folder.put("a.parquet", parquet_of(columns, 10));
    let split = Some(Split::Time { column: "at".into(), test_from: TimeBound::Integer(bound as i64) });
    let config = SourceConfig { split, subset: Subset::Train, ..config(&[&path]) };
    let train = Dataset::open(config, labels_only(None)).unwrap();
    assert_eq!(all(&train).unwrap().labels, [0.0]);
    assert_eq!(all(&train.subset(Subset::Test).unwrap()).unwrap().labels, [1.0; 2]);
}

/// The 32-bit float of the number is 1.
#[test]
fn a_label_is_checked_before_it_is_rounded() {
    let folder = Folder::new();
    let values: ArrayRef = Arc::new(Float64Array::from(vec![0.5, 1.000_000_01]));
    let files =
        [folder.put("a.csv", "y\n0.5\n1.00000001\n"), folder.put("a.parquet", parquet_of(vec![("y", values)], 10))];
    for file in files {
        let error = all(&Dataset::open(config(&[&file]), labels_only(None)).unwrap()).unwrap_err();
        assert!(error.to_string().contains("column `y`: found \"1.00000001\", expected 0 or 1"), "{error}");
    }
}

/// A schema of the label `y` alone.
fn labels_only(positive_from: Option<f64>) -> Schema {
    Schema { sparse: vec![], dense: vec![], label: LabelField::of_numbers("y", positive_from), group: None, time: None }
}

/// The labels of a column `y` as text, and as Parquet columns of these values.
fn labels_of(values: &[f64], positive_from: Option<f64>) -> Vec<Result<Vec<f32>, DataError>> {
    let folder = Folder::new();
    let lines: String = values.iter().map(|value| format!("{value}\n")).collect();
    let doubles: ArrayRef = Arc::new(Float64Array::from(values.to_vec()));
    let integers: ArrayRef = Arc::new(Int64Array::from_iter_values(values.iter().map(|&value| value as i64)));
    let files = [
        folder.put("a.csv", format!("y\n{lines}")),
        folder.put("a.csv.gz", gzip(format!("y\n{lines}").as_bytes())),
        folder.put("doubles.parquet", parquet_of(vec![("y", doubles)], 10)),
        folder.put("integers.parquet", parquet_of(vec![("y", integers)], 10)),
    ];
    let schema = Schema {
        sparse: vec![],
        dense: vec![],
        label: LabelField::of_numbers("y", positive_from),
        group: None,
        time: None,
    };
    let read = |file: &Path| -> Result<Vec<f32>, DataError> {
        Ok(all(&Dataset::open(config(&[file]), schema.clone())?)?.labels)
    };
    files.iter().map(|file| read(file)).collect()
}

#[test]
fn label_thresholds_are_compared_in_64_bits_in_every_format() {
    for (values, threshold) in [
        ([16_777_216.0, 16_777_217.0], 16_777_217.0),
        ([1_699_999_999.0, 1_700_000_000.0], 1_700_000_000.0),
        ([1_699_999_999_999.0, 1_700_000_000_000.0], 1_700_000_000_000.0),
    ] {
        for labels in labels_of(&values, Some(threshold)) {
            assert_eq!(labels.unwrap(), [0.0, 1.0], "{threshold}");
        }
    }
}

#[test]
fn words_for_labels_are_read_in_every_format() {
    let folder = Folder::new();
    let values = [("click".to_owned(), 1.0), ("skip".to_owned(), 0.25)].into();
    let schema = Schema { label: LabelField { values, ..LabelField::of_numbers("y", None) }, ..labels_only(None) };
    let words = |words: [&str; 2]| -> ArrayRef { Arc::new(StringArray::from(words.to_vec())) };
    for path in [
        folder.put("a.csv", "y\nclick\n skip \n"),
        folder.put("a.parquet", parquet_of(vec![("y", words(["click", " skip "]))], 10)),
    ] {
        let labels = all(&Dataset::open(config(&[&path]), schema.clone()).unwrap()).unwrap().labels;
        assert_eq!(labels, [1.0, 0.25]);
    }
    for path in [
        folder.put("b.csv", "y\nclick\n1\n"),
        folder.put("b.parquet", parquet_of(vec![("y", words(["click", "1"]))], 10)),
    ] {
        let error = all(&Dataset::open(config(&[&path]), schema.clone()).unwrap()).unwrap_err().to_string();
        let expected = "found \"1\", expected one of the words `click`, `skip` (spec.features.label.values)";
        assert!(error.contains(expected), "{error}");
    }
    let path = folder.put("case.csv", "y\nClick\n");
    let error = all(&Dataset::open(config(&[&path]), schema.clone()).unwrap()).unwrap_err().to_string();
    assert!(error.contains("(spec.features.label.values; upper and lower case differ)"), "{error}");
    let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1]));
    let path = folder.put("c.parquet", parquet_of(vec![("y", numbers)], 10));
    let error = Dataset::open(config(&[&path]), schema).unwrap_err().to_string();
    assert!(error.contains("the label has words in `values`, so it must be text"), "{error}");
}

#[test]
fn numbers_beyond_32_bits_are_bad_rows_that_say_so() {
    let folder = Folder::new();
    let wide: ArrayRef = Arc::new(Float64Array::from(vec![1e39]));
    let ones = || -> ArrayRef { Arc::new(Int64Array::from(vec![1])) };
    let columns = vec![("y", ones()), ("price", wide)];
    let files = [folder.put("a.csv", "y,price\n1,1e39\n"), folder.put("a.parquet", parquet_of(columns, 10))];
    let large: ArrayRef = Arc::new(Float64Array::from(vec![1e38]));
    let columns = vec![("y", ones()), ("price", large)];
    let scaled = [folder.put("b.csv", "y,price\n1,1e38\n"), folder.put("b.parquet", parquet_of(columns, 10))];
    let huge: ArrayRef = Arc::new(Float64Array::from(vec![1e25]));
    let columns = vec![("y", ones()), ("price", huge)];
    let beyond = [folder.put("c.csv", "y,price\n1,-1e25\n"), folder.put("c.parquet", parquet_of(columns, 10))];
    let tiny = Transform::Standardize { mean: 0.0, std: 1e-3 };
    for (files, transform, expected) in [
        (files, Transform::Identity, "expected a number within ±3.4e38"),
        (scaled, tiny, "expected a number with a transform within ±3.4e38"),
        (beyond, Transform::Identity, "expected a number within the `limit` of the feature"),
    ] {
        let schema = Schema {
            sparse: vec![],
            dense: vec![dense("price", transform, 0.0)],
            label: LabelField::of_numbers("y", None),
            group: None,
            time: None,
        };
        for file in files {
            let error = all(&Dataset::open(config(&[&file]), schema.clone()).unwrap()).unwrap_err();
            assert!(matches!(&error, DataError::BadRow { column, .. } if column == "price"), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}

/// Rows with bad ones among them, as text and as Parquet; and the good rows.
fn with_bad_rows(folder: &Folder) -> (Vec<SourceConfig>, Vec<Row>) {
    let all = rows(60);
    let is_bad = |i: usize| [0, 13, 14, 30, 59].contains(&i);
    let mut marked = all.clone();
    (0..60).filter(|&i| is_bad(i)).for_each(|i| marked[i].y = 7);
    let good = (0..60).filter(|&i| !is_bad(i)).map(|i| all[i].clone()).collect();
    let files = [folder.put("bad.csv", csv(&marked)), folder.put("bad.parquet", parquet(&marked, 9))];
    (files.iter().map(|file| config(&[file])).collect(), good)
}

#[test]
fn skipped_bad_rows_leave_no_gap_and_are_counted() {
    let folder = Folder::new();
    let (configs, good) = with_bad_rows(&folder);
    for config in configs {
        let config = SourceConfig { bad_rows: BadRows::Skip { limit: 5 }, ..config };
        let dataset = Dataset::open(config.clone(), schema()).unwrap();
        let mut reader = dataset.reader(plan(10)).unwrap();
        let mut skipped = vec![];
        for chunk in 0..6 {
            let rows = &good[chunk * 10..good.len().min(chunk * 10 + 10)];
            assert_eq!(reader.read(chunk as u64).unwrap().unwrap(), expected(rows));
            skipped.push(reader.skipped());
            let mut fresh = dataset.reader(plan(10)).unwrap();
            assert_eq!(fresh.read(chunk as u64).unwrap().unwrap(), expected(rows));
            assert_eq!(fresh.skipped(), reader.skipped());
        }
        assert_eq!(skipped, [1, 2, 1, 0, 0, 1]);
        assert_eq!((reader.read(6).unwrap(), reader.skipped()), (None, 0));
        assert_eq!(dataset.count_rows().unwrap(), 60);

        let limited = SourceConfig { bad_rows: BadRows::Skip { limit: 3 }, ..config };
        let mut reader = Dataset::open(limited, schema()).unwrap().reader(plan(10)).unwrap();
        assert!(reader.read(1).unwrap().is_some());
        let message = reader.read(2).unwrap_err().to_string();
        assert!(message.starts_with("more than 3 bad rows were skipped; the last: "), "{message}");
        assert!(message.contains(" 31, column `y`") || message.contains(" 32, column `y`"), "{message}");
    }
}

/// Chunks end before bad rows, at the end of the data set, and anywhere else.
#[test]
fn every_bad_row_counts_with_one_chunk() {
    let folder = Folder::new();
    let (configs, good) = with_bad_rows(&folder);
    let split = Split::Time { column: "when".into(), test_from: TimeBound::Number(1030.0) };
    let skip = |config: SourceConfig| SourceConfig { bad_rows: BadRows::Skip { limit: 9 }, ..config };
    for config in configs.into_iter().map(skip) {
        let whole = Dataset::open(config.clone(), schema()).unwrap();
        let train = SourceConfig { split: Some(split.clone()), subset: Subset::Train, ..config };
        let train = Dataset::open(train, schema()).unwrap();
        let test = train.subset(Subset::Test).unwrap();
        for (dataset, bad) in [(&whole, 5), (&train, 3), (&test, 2)] {
            for chunk_rows in 1..=good.len() as u64 + 1 {
                let mut alone = dataset.reader(plan(chunk_rows)).unwrap();
                let counts: Vec<u64> = (0..).map_while(|c| alone.read(c).unwrap().map(|_| alone.skipped())).collect();
                assert_eq!(counts.iter().sum::<u64>(), bad, "chunks of {chunk_rows}");
                for loaders in [2, 3] {
                    for first in 0..loaders {
                        let mut loader = dataset.reader(plan(chunk_rows)).unwrap();
                        for (chunk, count) in counts.iter().enumerate().skip(first).step_by(loaders) {
                            loader.read(chunk as u64).unwrap().unwrap();
                            assert_eq!(loader.skipped(), *count, "chunk {chunk} of {chunk_rows} rows");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_bad_row_fails_its_own_chunk_and_no_other() {
    let folder = Folder::new();
    let (configs, _) = with_bad_rows(&folder);
    for config in configs {
        let dataset = Dataset::open(config, schema()).unwrap();
        for read_ahead_chunks in [0, 3] {
            let mut reader = dataset.reader(ReadPlan { read_ahead_chunks, ..plan(4) }).unwrap();
            for chunk in 0..15 {
                let bad = [0, 3, 7, 14].contains(&chunk);
                assert_eq!(reader.read(chunk).is_err(), bad, "chunk {chunk}");
            }
            assert!(reader.read(1).is_ok() && reader.read(3).is_err() && reader.read(6).is_ok());
        }
    }
}

#[test]
fn a_bad_row_is_named_by_file_line_column_and_value() {
    let cases: [(&str, u64, &str, &str, &str); 9] = [
        ("1,u,x,cheap,1\n", 2, "price", "cheap", "a number"),
        ("1,u,x,1,1\n\n0,u,x,inf,1\n", 4, "price", "inf", "a number"),
        ("2,u,x,1,1\n", 2, "y", "2", "0 or 1 (or a number between"),
        (",u,x,1,1\n", 2, "y", "", "0 or 1 (or a number between"),
        ("yes,u,x,1,1\n", 2, "y", "yes", "0 or 1 (for words set spec.features.label.values"),
        ("nan,u,x,1,1\n", 2, "y", "nan", "0 or 1"),
        ("1,u,x,1\n", 2, "when", "1,u,x,1", "5 cells (this row has 4)"),
        ("1,u,x,1,1,1\n", 2, "when", "1,u,x,1,1,1", "5 cells (this row has 6)"),
        ("1,\"u\nv\",x,1,1\n0,u,x,?,1\n", 4, "price", "?", "a number"),
    ];
    for (body, line, column, value, expected) in cases {
        let folder = Folder::new();
        let path = folder.put("a.csv", format!("y,user,tags,price,when\n{body}"));
        let error = open_and_read(config(&[&path])).unwrap_err();
        assert!(error.is_users_input());
        let DataError::BadRow { file, at, column: c, value: v, expected: e } = &error else {
            panic!("{body:?}: {error}");
        };
        assert_eq!((file.as_str(), *at), (path.to_str().unwrap(), Place::Line(line)), "{body:?}");
        assert_eq!((c.as_str(), v.as_str()), (column, value));
        assert!(e.starts_with(expected), "{e}");
        for part in [file, line.to_string().as_str(), column, value] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}

#[test]
fn bad_bytes_in_an_id_and_nan_in_a_number_are_no_errors() {
    let folder = Folder::new();
    let path = folder.put("a.csv", b"y,user,tags,price,when\n1,\xff\xfe,\xff|a,NaN,0\n");
    let batch = open_and_read(config(&[&path])).unwrap();
    assert_eq!(batch.sparse[0].keys, [TableSeed::of("user").text(b"\xff\xfe")]);
    assert_eq!(batch.sparse[1].keys.len(), 2);
    assert_eq!(batch.dense, [-1.0]);
}

#[test]
fn files_that_cannot_be_opened_are_refused_in_a_sentence() {
    let folder = Folder::new();
    let text = csv(&rows(40));
    let (good, none) = (parquet(&rows(40), 10), parquet(&[], 10));
    let (untyped, bare) = (parquet_without_types(), parquet_without_columns());
    let long = "y,user,tags,price,when\n1,\"".to_owned() + &"x".repeat(17 << 20);
    let cases: Vec<(&str, &[u8], &str)> = vec![
        ("empty.csv", b"", "is empty"),
        ("newlines.csv", b"\n\n\n", "is empty"),
        ("header.csv", b"y,user,tags,price,when\n", "has no rows"),
        ("empty.parquet", b"", "is empty"),
        ("none.parquet", &none, "has no rows"),
        ("types.parquet", &untyped, "has no rows"),
        ("columns.parquet", &bare, "is empty"),
        (
            "label.csv",
            b"Y,user,tags,price,when\n1,1,1,1,1\n",
            "no column `y` (spec.features.label.name), did you mean `Y`?; its columns are Y, user",
        ),
        ("headless.csv", b"1,2,3,4,5\n1,2,3,4,5\n", "looks like data"),
        ("twice.csv", b"y,user,tags,price,y\n1,2,3,4,5\n", "the column `y` is there twice"),
        ("noext", b"y\n1\n", "set the format"),
        ("text.csv.gz", text.as_bytes(), "does not begin as gzip"),
        ("text.csv.zst", text.as_bytes(), "does not begin as Zstandard"),
        ("really.csv", &good, "it is a Parquet file"),
        ("zip.csv", b"PK\x03\x04abcd", "ZIP archive"),
        (
            "open.csv",
            b"y,user,tags,price,when\n1,u,x,1,1\n\n0,\"u,x,1,1\n1,u,x,1,1\n",
            "open.csv, line 4: expected a closing quote",
        ),
        ("head.csv", b"y,user,tags,price,\"when\n1,u,x,1,1\n", "head.csv, line 1: expected a closing quote"),
        ("text.parquet", text.as_bytes(), "is not a readable Parquet file"),
        ("tiny.parquet", b"PAR1", "is not a readable Parquet file"),
        ("cut.parquet", &good[..good.len() - 30], "is not a readable Parquet file"),
        ("long.csv", long.as_bytes(), "longer than"),
    ];
    for (name, content, sentence) in cases {
        let path = folder.put(name, content);
        let error = Dataset::open(config(&[&path]), schema()).unwrap_err();
        assert!(error.is_users_input(), "{error}");
        let message = error.to_string();
        assert!(message.contains(sentence) && message.contains(name), "{name}: {message}");
        assert!(!message.contains('\n'), "{message}");
    }
    std::fs::create_dir(folder.0.path().join("folder.csv")).unwrap();
    for (path, sentence) in [
        ("missing.csv", "there is no file"),
        ("folder.csv", "is a folder: name the files in it"),
        ("missing*.csv", "no file matches"),
        ("folder.cs[v", "cannot use the path"),
    ] {
        let path = folder.0.path().join(path);
        let error = Dataset::open(config(&[&path]), schema()).unwrap_err();
        assert!(error.is_users_input() && error.to_string().contains(sentence), "{error}");
    }
    for path in ["ftp://host/a.csv", "file://host/a.csv"] {
        let source = SourceConfig { paths: vec![path.into()], ..SourceConfig::default() };
        let message = Dataset::open(source, schema()).unwrap_err().to_string();
        assert!(message.starts_with("cannot use the path"), "{message}");
    }
}

#[test]
fn an_unclosed_quote_is_an_error_and_never_skipped() {
    let (folder, rows) = (Folder::new(), rows(6000));
    let (first, second) = rows.split_at(5000);
    let second = csv(second);
    let text = csv(first) + "1,\"u,x,1,1\n" + second.split_once('\n').unwrap().1;
    let path = folder.put("open.csv", text);
    for bad_rows in [BadRows::Fail, BadRows::Skip { limit: 1_000_000 }] {
        let dataset = Dataset::open(SourceConfig { bad_rows, ..config(&[&path]) }, schema()).unwrap();
        assert_eq!(dataset.reader(plan(1000)).unwrap().read(3).unwrap(), Some(expected(&first[3000..4000])));
        let names_the_quote = |error: &DataError| {
            error.is_users_input()
                && matches!(error, DataError::UnclosedQuote { file, line: 5002 } if path.ends_with(file))
        };
        // Chunk 5 begins with the quote. A reader of chunks 6 and 60 passes over it.
        for chunk in [5, 6, 60] {
            let error = dataset.reader(plan(1000)).unwrap().read(chunk).unwrap_err();
            assert!(names_the_quote(&error), "{bad_rows:?}, chunk {chunk}: {error}");
        }
        assert!(names_the_quote(&dataset.count_rows().unwrap_err()));
    }
}

#[test]
fn a_file_that_is_found_twice_is_refused() {
    let folder = Folder::new();
    let path = folder.put("data/a.csv", csv(&rows(3)));
    folder.put("data/deep/b.csv", csv(&rows(3)));
    let [flat, deep] = ["data/*.csv", "data/**/*.csv"].map(|pattern| folder.0.path().join(pattern));
    assert_eq!(Dataset::open(config(&[&deep]), schema()).unwrap().files().len(), 2);
    let error = Dataset::open(config(&[&flat, &deep]), schema()).unwrap_err();
    assert!(error.is_users_input());
    let [path_shown, flat_shown, deep_shown] = [&path, &flat, &deep].map(|path| path.display().to_string());
    let sentence = format!("paths: {path_shown} is found twice, by `{flat_shown}` and by `{deep_shown}`");
    assert!(error.to_string().starts_with(&sentence), "{error}");
    let around = folder.0.path().join("data/deep/../a.csv");
    let message = Dataset::open(config(&[&path, &around]), schema()).unwrap_err().to_string();
    assert!(message.contains("is found twice"), "{message}");
}

#[test]
#[cfg(unix)]
fn a_link_to_a_file_is_that_file() {
    let folder = Folder::new();
    let path = folder.put("a.csv", csv(&rows(3)));
    let link = folder.0.path().join("link.csv");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let message = Dataset::open(config(&[&folder.0.path().join("*.csv")]), schema()).unwrap_err().to_string();
    assert!(message.contains("link.csv is found twice"), "{message}");
    let [file, link] = [&path, &link].map(|path| Dataset::open(config(&[path]), schema()).unwrap());
    assert!(link.refuse_files_of(&file).is_err());
}

#[test]
fn test_files_that_are_training_files_are_refused() {
    let folder = Folder::new();
    let test = folder.put("data/test.csv", csv(&rows(4)));
    folder.put("data/train.csv", csv(&rows(4)));
    let other = folder.put("other.csv", csv(&rows(4)));
    let open = |config: SourceConfig| Dataset::open(config, schema()).unwrap();
    let train = open(config(&[&folder.0.path().join("data/*.csv")]));
    let error = open(config(&[&other, &test])).refuse_files_of(&train).unwrap_err();
    let sentence = format!("test paths: {} is found by the training paths too", test.display());
    assert!(error.is_users_input() && error.to_string().starts_with(&sentence), "{error}");
    open(config(&[&other])).refuse_files_of(&train).unwrap();
    let split = Some(Split::Fraction { train: 0.5 });
    let half = open(SourceConfig { split, subset: Subset::Train, ..config(&[&test]) });
    half.subset(Subset::Test).unwrap().refuse_files_of(&half).unwrap();
}

#[test]
fn damage_behind_the_first_rows_is_not_the_end_of_the_data() {
    let folder = Folder::new();
    // Random text does not compress, so the damage lies behind the bytes that opening reads.
    let mut state = 1_u64;
    let mut noise = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        state >> 11
    };
    let mut text = "y,user,tags,price,when\n".to_owned();
    for i in 0..100_000 {
        text += &format!("1,{:x}{:x},,1,{i}\n", noise(), noise());
    }
    let gz = gzip(text.as_bytes());
    let zst = zstd::encode_all(text.as_bytes(), 1).unwrap();
    let mut flipped = zst.clone();
    let middle = flipped.len() - 1000;
    flipped[middle..middle + 600].fill(0x55);
    for (name, content, sentence) in [
        ("cut.csv.gz", &gz[..gz.len() - 1000], "its gzip stream ends early"),
        ("cut.csv.zst", &zst[..zst.len() - 1000], "its Zstandard stream ends early"),
        // The decoder fails, or it returns nonsense that the parser refuses. Both are errors.
        ("flipped.csv.zst", &flipped[..], ""),
    ] {
        let dataset = Dataset::open(config(&[&folder.put(name, content)]), schema()).unwrap();
        let estimate = dataset.estimated_rows() as f64;
        assert!((0.9..1.1).contains(&(estimate / 100_000.0)), "{name}: {estimate}");
        let mut reader = dataset.reader(plan(1000)).unwrap();
        assert_eq!(reader.read(0).unwrap().unwrap().samples, 1000);
        let error = (1..200).find_map(|chunk| match reader.read(chunk) {
            Ok(Some(_)) => None,
            Ok(None) => panic!("{name}: ended without an error"),
            Err(error) => Some(error),
        });
        let message = error.unwrap().to_string();
        assert!(message.contains(name) && message.contains(sentence), "{message}");
        assert!(dataset.count_rows().is_err());
    }
    let mut pages = parquet(&rows(5000), 1000);
    let middle = pages.len() / 2;
    pages[middle - 20_000..middle].fill(0xff);
    let dataset = Dataset::open(config(&[&folder.put("pages.parquet", pages)]), schema()).unwrap();
    let message = all(&dataset).unwrap_err().to_string();
    assert!(message.contains("pages.parquet is damaged"), "{message}");
}

/// A file that pyarrow wrote with `write_page_checksum=True`: `label`, `user_id`, `item_id`.
const CHECKSUMS: &[u8] = include_bytes!("files/checksums.parquet");

#[test]
fn parquet_pages_with_a_wrong_checksum_are_an_error() {
    let folder = Folder::new();
    let schema = Schema {
        sparse: vec![sparse("user_id", None, MissingValue::Token), sparse("item_id", None, MissingValue::Token)],
        dense: vec![],
        label: LabelField::of_numbers("label", None),
        group: None,
        time: None,
    };
    let mut flipped = CHECKSUMS.to_vec();
    flipped[3337] ^= 1;
    let read = |name: &str, bytes: &[u8], bad_rows| {
        let config = SourceConfig { bad_rows, ..config(&[&folder.put(name, bytes)]) };
        all(&Dataset::open(config, schema.clone()).unwrap())
    };
    assert!(read("good.parquet", CHECKSUMS, BadRows::Fail).unwrap().samples > 0);
    for bad_rows in [BadRows::Fail, BadRows::Skip { limit: 1_000_000 }] {
        let error = read("bad.parquet", &flipped, bad_rows).unwrap_err();
        let wanted =
            "bad.parquet is damaged: row group 0, column `user_id`: the bytes of a page do not match its checksum";
        assert!(error.is_users_input() && error.to_string().contains(wanted), "{error}");
    }
}

#[test]
fn parquet_of_every_usual_codec_is_read() {
    let (folder, rows) = (Folder::new(), rows(300));
    let gzip = Compression::GZIP(Default::default());
    for codec in [Compression::UNCOMPRESSED, gzip, Compression::ZSTD(Default::default())] {
        let path = folder.put("a.parquet", parquet_by(&rows, 100, codec));
        assert_eq!(open_and_read(config(&[&path])).unwrap(), expected(&rows), "{codec}");
    }
}

#[test]
fn a_reader_moves_between_threads_and_a_data_set_is_shared() {
    fn is_send<T: Send>() {}
    fn is_shared<T: Send + Sync + Clone>() {}
    is_send::<rectrain_data::ChunkReader>();
    is_shared::<Dataset>();
}

/// Changes every third byte of a small file in turn. Opening and reading may fail with an error, or
/// succeed.
#[test]
fn no_changed_byte_of_a_parquet_file_makes_a_reader_panic() {
    let (folder, rows) = (Folder::new(), rows(20));
    let good = parquet_by(&rows, 10, Compression::UNCOMPRESSED);
    for at in (0..good.len()).step_by(3) {
        let mut bytes = good.clone();
        bytes[at] ^= if at % 2 == 0 { 0xff } else { 0x01 };
        let path = folder.put("changed.parquet", bytes);
        if let Err(error) = open_and_read(config(&[&path])) {
            assert!(!matches!(error, DataError::Stopped), "byte {at}: {error}");
            assert!(error.to_string().contains("changed.parquet"), "byte {at}: {error}");
        }
    }
}

#[test]
fn parquet_columns_of_a_wrong_type_are_refused() {
    let folder = Folder::new();
    let ones = |n: usize| -> ArrayRef { Arc::new(Int64Array::from(vec![1; n])) };
    let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(vec![
        Some(vec![Some(5), None, Some(-6)]),
        None,
        Some(vec![]),
    ]));
    let base = |tags: ArrayRef, user: ArrayRef, price: ArrayRef| {
        vec![("y", ones(3)), ("user", user), ("tags", tags), ("price", price), ("when", ones(3))]
    };
    let path = folder.put("lists.parquet", parquet_of(base(lists.clone(), ones(3), ones(3)), 10));
    let batch = open_and_read(config(&[&path])).unwrap();
    let (tags, user) = (TableSeed::of("tags"), TableSeed::of("user"));
    assert_eq!(batch.sparse[1].keys, [tags.integer(5), tags.integer(-6)]);
    assert_eq!(batch.sparse[1].offsets.as_deref(), Some(&[0, 2, 2, 2][..]));
    assert_eq!(batch.sparse[0].keys, [user.text(b"1"); 3]);

    let words: ArrayRef = Arc::new(StringArray::from(vec!["a|b", "c", ""]));
    let yes: ArrayRef = Arc::new(BooleanArray::from(vec![true; 3]));
    let times: ArrayRef =
        Arc::new(ListArray::from_iter_primitive::<TimestampMillisecondType, _, _>(vec![Some(vec![Some(5)]); 3]));
    for (name, columns, sentence) in [
        ("a.parquet", base(ones(3), lists.clone(), ones(3)), "column `user` is of type List"),
        ("b.parquet", base(times, ones(3), ones(3)), "column `tags` is of type List"),
        ("c.parquet", base(ones(3), ones(3), words.clone()), "column `price` is of type Utf8"),
        ("d.parquet", base(ones(3), yes, ones(3)), "column `user` is of type Boolean"),
    ] {
        let path = folder.put(name, parquet_of(columns, 10));
        let error = Dataset::open(config(&[&path]), schema()).unwrap_err();
        assert!(error.to_string().contains(sentence), "{error}");
    }
    let big: ArrayRef = Arc::new(UInt64Array::from(vec![Some(u64::MAX), None, Some(4)]));
    let path = folder.put("big.parquet", parquet_of(base(words, big, ones(3)), 10));
    let batch = open_and_read(config(&[&path])).unwrap();
    let keys = [user.text(b"18446744073709551615"), user.missing(), user.integer(4)];
    assert_eq!(batch.sparse[0].keys, keys);
    assert_eq!(batch.sparse[2].keys, [keys[0], keys[2]]);
    assert_eq!(batch.sparse[1].keys, [tags.text(b"a"), tags.text(b"b"), tags.text(b"c")]);
}

/// Ids 5, 0, 12 and a missing one in every form; the items of a list 7 and 8.
#[test]
fn ids_meet_in_every_form_and_format() {
    let (folder, user, tags) = (Folder::new(), TableSeed::of("user"), TableSeed::of("tags"));
    let text = |lines: &[&str]| format!("y,user,tags,price,when\n{}\n", lines.join("\n"));
    let ones = || -> ArrayRef { Arc::new(Int64Array::from(vec![1; 4])) };
    let columns = |user: ArrayRef, tags: ArrayRef| {
        parquet_of(vec![("y", ones()), ("user", user), ("tags", tags), ("price", ones()), ("when", ones())], 10)
    };
    let words = |words: [&str; 4]| -> ArrayRef { Arc::new(StringArray::from(words.to_vec())) };
    let integers: ArrayRef = Arc::new(Int32Array::from(vec![Some(5), Some(0), Some(12), None]));
    let doubles: ArrayRef = Arc::new(Float64Array::from(vec![Some(5.0), Some(-0.0), Some(12.0), None]));
    let singles: ArrayRef = Arc::new(Float32Array::from(vec![5.0, 0.0, 12.0, f32::NAN]));
    let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Float64Type, _, _>(vec![
        Some(vec![Some(7.0), None, Some(8.0)]),
        None,
        Some(vec![]),
        Some(vec![Some(f64::NAN)]),
    ]));
    for (name, bytes) in [
        ("plain.csv", text(&["1,5,7|8,1,1", "1,0,,1,1", "1,12,,1,1", "1,,,1,1"]).into_bytes()),
        ("points.csv", text(&["1,5.,7.|8.,1,1", "1,0.,,1,1", "1,12.,,1,1", "1,,,1,1"]).into_bytes()),
        (
            "exponents.csv",
            text(&["1,5.000e+00,7.0E0|8.0e+0,1,1", "1,0.0e+00,,1,1", "1,1.2E1,,1,1", "1,,,1,1"]).into_bytes(),
        ),
        ("f.parquet", columns(words(["5.", "0.0e+00", "1.2E1", ""]), words(["7.|8.0e+00", "", "", ""]))),
        ("floats.csv", text(&["1,5.0,7.0|8.0,1,1", "1,-0.0,,1,1", "1,12.00,,1,1", "1,,,1,1"]).into_bytes()),
        ("blanks.csv", text(&["1, 5, 7 | 8,1,1", "1,\t0, ,1,1", "1,\" 12 \",,1,1", "1, ,|,1,1"]).into_bytes()),
        ("a.parquet", columns(words(["5", "0", "12", ""]), words(["7|8", "", "", ""]))),
        ("b.parquet", columns(words([" 5", "0.0", "12.0 ", "  "]), words(["7.0| 8", " ", "|", " | "]))),
        ("c.parquet", columns(integers.clone(), lists.clone())),
        ("d.parquet", columns(doubles, lists.clone())),
        ("e.parquet", columns(singles, lists)),
    ] {
        let batch =
            open_and_read(config(&[&folder.put(name, bytes)])).unwrap_or_else(|error| panic!("{name}: {error}"));
        let ids = [user.integer(5), user.integer(0), user.integer(12)];
        assert_eq!(batch.sparse[0].keys, [&ids[..], &[user.missing()]].concat(), "{name}");
        assert_eq!(batch.sparse[1].keys, [tags.integer(7), tags.integer(8)], "{name}");
        assert_eq!(batch.sparse[2].keys, ids, "{name}");
        assert_eq!(batch.groups, Some([&ids[..], &[NO_GROUP]].concat()), "{name}");
    }
    for (value, limit) in [(1.5, "below 2^24"), (16_777_216.0, "below 2^24")] {
        let user: ArrayRef = Arc::new(Float32Array::from(vec![1.0, value, 2.0, 3.0]));
        let path = folder.put("bad.parquet", columns(user, integers.clone()));
        let error = open_and_read(config(&[&path])).unwrap_err();
        assert!(matches!(&error, DataError::BadRow { column, at: Place::Row(2), .. } if column == "user"), "{error}");
        assert!(error.to_string().contains(limit), "{error}");
    }
}

/// Floats of 2^53 and beyond may have lost digits of the ids that they were.
#[test]
fn floats_with_lost_digits_are_bad_rows_in_every_format() {
    let folder = Folder::new();
    let text =
        |user: &str, tags: &str| format!("y,user,tags,price,when\n1,5,7,1,1\n1,{user},{tags},1,1\n").into_bytes();
    let ones = || -> ArrayRef { Arc::new(Int64Array::from(vec![1; 2])) };
    let columns = |user: ArrayRef, tags: ArrayRef| {
        parquet_of(vec![("y", ones()), ("user", user), ("tags", tags), ("price", ones()), ("when", ones())], 10)
    };
    let words = |words: [&str; 2]| -> ArrayRef { Arc::new(StringArray::from(words.to_vec())) };
    let mut lists = ListBuilder::new(StringBuilder::new());
    lists.append_value([Some("7")]);
    lists.append_value([Some("8"), Some("1.8e+19")]);
    let lists: ArrayRef = Arc::new(lists.finish());
    for (name, bytes, column) in [
        ("a.csv", text("9007199254740992.0", "7"), "user"),
        ("b.csv", text("1.2345678901234567e+16", "7"), "user"),
        ("c.csv", text("5", "8|9007199254740993."), "tags"),
        ("a.parquet", columns(words(["5", "9007199254740992.0"]), ones()), "user"),
        ("b.parquet", columns(words(["5", "1.2345678901234567e+16"]), ones()), "user"),
        ("c.parquet", columns(ones(), words(["7", "8|9007199254740993."])), "tags"),
        ("d.parquet", columns(ones(), lists), "tags"),
    ] {
        let path = folder.put(name, bytes);
        let error = open_and_read(config(&[&path])).unwrap_err();
        assert!(matches!(&error, DataError::BadRow { column: found, .. } if found == column), "{name}: {error}");
        assert!(error.to_string().contains("expected ids that are integers, which 64-bit floats hold"), "{error}");
        let skip = SourceConfig { bad_rows: BadRows::Skip { limit: 1 }, ..config(&[&path]) };
        assert_eq!(open_and_read(skip).unwrap().samples, 1, "{name}");
    }
    // Such a column is no feature here, but the group.
    let group = Schema { group: Some("user".into()), ..labels_only(None) };
    for path in [
        folder.put("g.csv", text("9007199254740992.0", "7")),
        folder.put("g.parquet", columns(words(["5", "9007199254740992.0"]), ones())),
    ] {
        let error = all(&Dataset::open(config(&[&path]), group.clone()).unwrap()).unwrap_err();
        assert!(matches!(&error, DataError::BadRow { column, .. } if column == "user"), "{error}");
    }
}

#[test]
fn a_parquet_column_of_nulls_reads_as_missing() {
    let (folder, user) = (Folder::new(), TableSeed::of("user"));
    let ones = || -> ArrayRef { Arc::new(Int64Array::from(vec![1; 2])) };
    let nulls = || -> ArrayRef { Arc::new(NullArray::new(2)) };
    let columns = vec![("y", ones()), ("user", nulls()), ("tags", nulls()), ("price", nulls()), ("when", ones())];
    let batch = open_and_read(config(&[&folder.put("a.parquet", parquet_of(columns, 10))])).unwrap();
    assert_eq!(batch.sparse[0].keys, [user.missing(); 2]);
    assert_eq!(batch.groups, Some(vec![NO_GROUP; 2]));
    assert!(batch.sparse[1].keys.is_empty() && batch.sparse[2].keys.is_empty());
    assert_eq!(batch.sparse[1].offsets.as_deref(), Some(&[0, 0, 0][..]));
    assert_eq!((batch.dense, batch.labels), (vec![-1.0; 2], vec![1.0; 2]));
    let columns = vec![("y", nulls()), ("user", ones()), ("tags", ones()), ("price", ones()), ("when", ones())];
    let error = Dataset::open(config(&[&folder.put("b.parquet", parquet_of(columns, 10))]), schema()).unwrap_err();
    assert!(error.to_string().contains("a label must be numbers"), "{error}");
}

#[test]
fn a_parquet_file_without_rows_may_have_other_columns() {
    let (folder, rows) = (Folder::new(), rows(5));
    let nothing: ArrayRef = Arc::new(Int64Array::from(Vec::<i64>::new()));
    folder.put("day/0.parquet", parquet_of(vec![("other", nothing)], 10));
    folder.put("day/1.parquet", parquet(&rows, 10));
    let config = config(&[&folder.0.path().join("day/*.parquet")]);
    assert_eq!(open_and_read(config).unwrap(), expected(&rows));
}

#[test]
fn lists_may_be_quoted_and_brackets_are_refused() {
    let (folder, tags) = (Folder::new(), TableSeed::of("tags"));
    let schema = |separator: &str| Schema {
        sparse: vec![SparseField {
            name: "tags".into(),
            table: "tags".into(),
            multi_value: Some(separator.into()),
            missing: MissingValue::Skip,
            hash_buckets: None,
        }],
        ..labels_only(None)
    };
    let words: ArrayRef = Arc::new(StringArray::from(vec!["a, b", "7"]));
    let ones = || -> ArrayRef { Arc::new(Int64Array::from(vec![1; 2])) };
    let wide = CsvFormat { delimiter: "::".into(), quoting: false, ..CsvFormat::default() };
    for (name, bytes, format, separator) in [
        ("quoted.csv", b"y,tags\n1,\"a, b\"\n0,7\n".to_vec(), CsvFormat::default(), ","),
        ("wide.csv", b"y::tags\n1::a|b\n0::7\n".to_vec(), wide.clone(), "|"),
        ("both.csv", b"y::tags\n1::a||b\n0::7||\n".to_vec(), wide, "||"),
        ("a.parquet", parquet_of(vec![("y", ones()), ("tags", words)], 10), CsvFormat::default(), ","),
    ] {
        let format = if name.ends_with("csv") { text_format(format) } else { Format::Auto };
        let source = SourceConfig { format, ..config(&[&folder.put(name, bytes)]) };
        let batch = all(&Dataset::open(source, schema(separator)).unwrap()).unwrap();
        assert_eq!(batch.sparse[0].keys, [tags.text(b"a"), tags.text(b"b"), tags.integer(7)], "{name}");
    }
    for list in ["[1, 2]", "[a, b]", "(1, 2)", "{1,2}"] {
        let lists: ArrayRef = Arc::new(StringArray::from(vec!["1", list]));
        for (name, bytes) in [
            ("list.csv", format!("y,tags\n1,1\n1,\"{list}\"\n").into_bytes()),
            ("list.parquet", parquet_of(vec![("y", ones()), ("tags", lists)], 10)),
        ] {
            let error = all(&Dataset::open(config(&[&folder.put(name, bytes)]), schema(",")).unwrap()).unwrap_err();
            assert!(matches!(&error, DataError::BadRow { column, .. } if column == "tags"), "{error}");
            let sentence = format!("found \"{list}\", expected values with the separator");
            assert!(error.to_string().contains(&sentence), "{error}");
        }
    }
}

#[test]
fn markers_of_missing_values_are_one_list_for_ids_and_numbers() {
    let (folder, user, tags) = (Folder::new(), TableSeed::of("user"), TableSeed::of("tags"));
    let csv = "y,user,tags,price,when\n1,NULL,x|\\N|NA,null,1\n0, \\N ,NULL,NA,1\n1,NANCY,nan,  ,1\n0,,,nan,1\n";
    let text = |values: [&str; 4]| -> ArrayRef { Arc::new(StringArray::from(values.to_vec())) };
    let numbers: ArrayRef = Arc::new(Float64Array::from(vec![None, None, None, Some(f64::NAN)]));
    let columns = vec![
        ("y", Arc::new(Int64Array::from(vec![1, 0, 1, 0])) as ArrayRef),
        ("user", text(["NULL", " \\N ", "NANCY", ""])),
        ("tags", text(["x|\\N|NA", "NULL", "nan", ""])),
        ("price", numbers),
        ("when", Arc::new(Int64Array::from(vec![1; 4])) as ArrayRef),
    ];
    for path in [folder.put("a.csv", csv), folder.put("a.parquet", parquet_of(columns, 10))] {
        let null_values = ["NULL", "\\N", "NA"].map(String::from).into();
        let batch = open_and_read(SourceConfig { null_values, ..config(&[&path]) }).unwrap();
        let missing = user.missing();
        assert_eq!(batch.sparse[0].keys, [missing, missing, user.text(b"NANCY"), missing]);
        assert_eq!(batch.sparse[1].keys, [tags.text(b"x"), tags.text(b"nan")]);
        assert_eq!(batch.sparse[2].keys, [user.text(b"NANCY")]);
        assert_eq!(batch.groups, Some(vec![NO_GROUP, NO_GROUP, user.text(b"NANCY"), NO_GROUP]));
        assert_eq!(batch.dense, [-1.0; 4]);
    }
    let path = folder.put("label.csv", "y,user,tags,price,when\nNA,1,,1,1\n");
    let source = SourceConfig { null_values: vec!["NA".into()], ..config(&[&path]) };
    assert!(open_and_read(source).unwrap_err().to_string().contains("column `y`: found \"NA\""));
    let source = SourceConfig { null_values: vec!["NULL".into()], ..config(&[&folder.put("b.csv", csv)]) };
    assert!(open_and_read(source).unwrap_err().to_string().contains("column `price`: found \"NA\""));
}

#[test]
fn objects_are_read_like_files_from_any_thread() {
    let (folder, rows) = (Folder::new(), rows(3000));
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let put = |key: &str, content: Vec<u8>| {
        let store = Arc::clone(&store);
        let (key, payload) = (object_store::path::Path::from(key), PutPayload::from(content));
        runtime.block_on(async move { store.put_opts(&key, payload, Default::default()).await }).unwrap();
    };
    let (first, second) = rows.split_at(1700);
    put("day=1/part-1.csv", csv(first).into());
    put("day=2/part-1.csv.gz", gzip(csv(second).as_bytes()));
    put("day=2/deep/part-1.csv", b"not this".to_vec());
    put("p/1.parquet", parquet(first, 100));
    put("p/2.parquet", parquet(second, 10_000));
    put("empty.csv", vec![]);
    let open = |paths: &[&str]| {
        let paths = paths.iter().map(|path| (*path).to_owned()).collect();
        let config = SourceConfig { paths, ..SourceConfig::default() };
        Dataset::open_in(Arc::clone(&store), config, schema())
    };
    for paths in [&["day=*/part-*"][..], &["day=1/part-1.csv", "day=2/part-1.csv.gz"], &["p/?.parquet"]] {
        let dataset = open(paths).unwrap();
        assert_eq!(all(&dataset).unwrap(), expected(&rows), "{paths:?}");
        let mut reader = dataset.reader(plan(100)).unwrap();
        for chunk in [3, 17, 25, 4] {
            let rows = &rows[chunk * 100..chunk * 100 + 100];
            assert_eq!(reader.read(chunk as u64).unwrap().unwrap(), expected(rows));
        }
        // This thread belongs to another runtime. It panics if it blocks on a second one.
        let inside = dataset.clone();
        let read = runtime.block_on(async move { all(&inside) });
        assert_eq!(read.unwrap().samples, 3000);
    }
    for (path, sentence) in [
        ("nothing.csv", "there is no file nothing.csv"),
        ("p", "p is a folder"),
        ("p/*.csv", "no file matches p/*.csv"),
        ("empty.csv", "empty.csv is empty"),
    ] {
        let error = open(&[path]).unwrap_err();
        assert!(error.to_string().contains(sentence) && error.is_users_input(), "{error}");
    }
    let message = open(&["day=*/part-*", "day=1/part-1.csv"]).unwrap_err().to_string();
    assert!(message.contains("day=1/part-1.csv is found twice"), "{message}");
    let [one, both] = [&["day=1/part-1.csv"], &["day=*/part-*"]].map(|paths| open(paths).unwrap());
    assert!(one.refuse_files_of(&both).is_err());
    drop(folder);
}

/// Serves a bucket `bucket` over HTTP, as S3 and Google Cloud Storage do: HEAD, ranged GET,
/// listing.
fn bucket_server(objects: Vec<(&'static str, Vec<u8>)>) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let objects = Arc::new(objects);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let objects = Arc::clone(&objects);
            std::thread::spawn(move || serve(stream, &objects));
        }
    });
    address
}

fn serve(stream: std::net::TcpStream, objects: &[(&'static str, Vec<u8>)]) {
    let mut reader = std::io::BufReader::new(stream.try_clone().unwrap());
    let mut writer = stream;
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).is_ok_and(|read| read > 0) {
                continue;
            }
            return;
        }
        let mut words = head.split(' ');
        let (method, target) = (words.next().unwrap(), words.next().unwrap());
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let decoded = |text: &str, name: &str| {
            let pairs = url::form_urlencoded::parse(text.as_bytes());
            pairs.into_iter().find(|(n, _)| n == name).map(|(_, value)| value.into_owned())
        };
        let lower = head.to_ascii_lowercase();
        let range = lower.lines().find_map(|line| line.strip_prefix("range: bytes="));
        let (status, extra, body) = if !query.is_empty() {
            let prefix = decoded(query, "prefix").unwrap_or_default();
            ("200 OK", String::new(), listing(objects, &prefix))
        } else {
            let path = decoded(&format!("path={path}"), "path").unwrap();
            let key = path.strip_prefix("/bucket/").unwrap();
            match (objects.iter().find(|(name, _)| *name == key), range) {
                (None, _) => ("404 Not Found", String::new(), vec![]),
                (Some((_, content)), None) => ("200 OK", String::new(), content.clone()),
                (Some((_, content)), Some(range)) => {
                    let (from, to) = range.split_once('-').unwrap();
                    let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
                    let extra = format!("Content-Range: bytes {from}-{to}/{}\r\n", content.len());
                    ("206 Partial Content", extra, content[from..=to].to_vec())
                }
            }
        };
        let answer = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nETag: \"1\"\r\n\
             Last-Modified: Tue, 03 Nov 2026 10:00:00 GMT\r\n{extra}\r\n",
            body.len()
        );
        writer.write_all(answer.as_bytes()).unwrap();
        if method != "HEAD" {
            writer.write_all(&body).unwrap();
        }
    }
}

fn listing(objects: &[(&'static str, Vec<u8>)], prefix: &str) -> Vec<u8> {
    let contents: String = objects
        .iter()
        .filter(|(name, _)| name.starts_with(prefix))
        .map(|(name, content)| {
            format!(
                "<Contents><Key>{name}</Key><LastModified>2026-11-03T10:00:00.000Z</LastModified>\
                 <ETag>\"1\"</ETag><Size>{}</Size></Contents>",
                content.len()
            )
        })
        .collect();
    format!("<ListBucketResult>{contents}</ListBucketResult>").into_bytes()
}

#[test]
fn s3_and_gs_urls_are_read_through_the_endpoint_that_is_set() {
    let rows = rows(900);
    let (first, second) = rows.split_at(500);
    let endpoint = bucket_server(vec![
        ("logs/day=2/a.csv.gz", gzip(csv(second).as_bytes())),
        ("logs/day=1/a.csv", csv(first).into()),
        ("logs/other.txt", b"not this".to_vec()),
        ("logs/all.parquet", parquet(&rows, 100)),
    ]);
    let options =
        |pairs: &[(&str, &str)]| pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let s3 = options(&[
        ("endpoint", &endpoint),
        ("ACCESS_KEY_ID", "key"),
        ("secret_access_key", "secret"),
        ("region", "us-east-1"),
        ("allow_http", "true"),
    ]);
    let gs = options(&[("endpoint", &endpoint), ("skip_signature", "true")]);
    for (root, storage_options) in [("s3://bucket/logs", s3), ("gs://bucket/logs", gs)] {
        let source = |path: &str| SourceConfig {
            paths: vec![format!("{root}/{path}")],
            storage_options: Clone::clone(&storage_options),
            ..SourceConfig::default()
        };
        for path in ["day=*/a.csv*", "all.parquet"] {
            let batch = open_and_read(source(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
            assert_eq!(batch, expected(&rows), "{root}/{path}");
        }
        let error = open_and_read(source("none.csv")).unwrap_err();
        assert_eq!(error.to_string(), format!("there is no file {root}/none.csv: check the path"));
    }
}

#[test]
fn storage_options_are_checked_by_name() {
    let source = |url: &str, name: &str| SourceConfig {
        paths: vec![format!("{url}://bucket/key.csv")],
        storage_options: [(name.to_owned(), "x".to_owned())].into(),
        ..SourceConfig::default()
    };
    for url in ["s3", "gs"] {
        let error = Dataset::open(source(url, "endpiont"), schema()).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("`endpiont`") && error.is_users_input(), "{error}");
        assert!(message.contains(&format!("{url}://bucket")), "{error}");
    }
}

#[test]
fn contradictory_settings_are_refused() {
    let base = || SourceConfig { paths: vec!["a.csv".into()], ..SourceConfig::default() };
    let csv = |format: CsvFormat| SourceConfig { format: text_format(format), ..base() };
    let fraction = |train| Some(Split::Fraction { train });
    let synthetic = Format::Synthetic(SyntheticConfig::default());
    for (config, setting) in [
        (SourceConfig::default(), "paths"),
        (SourceConfig { subset: Subset::Test, ..base() }, "subset"),
        (SourceConfig { split: fraction(1.0), ..base() }, "split"),
        (SourceConfig { split: fraction(f64::NAN), ..base() }, "split"),
        (csv(CsvFormat { header: false, ..CsvFormat::default() }), "columns"),
        (csv(CsvFormat { delimiter: "\"".into(), ..CsvFormat::default() }), "delimiter"),
        (SourceConfig { format: synthetic, ..base() }, "paths"),
    ] {
        let error = Dataset::open(config, schema()).unwrap_err();
        assert!(error.to_string().starts_with(setting) && error.is_users_input(), "{error}");
    }
    let folder = Folder::new();
    let dataset = Dataset::open(config(&[&folder.put("a.csv", self::csv(&rows(3)))]), schema()).unwrap();
    assert!(dataset.reader(plan(0)).is_err() && dataset.reader(plan(1 << 32)).is_err());
    assert!(dataset.subset(Subset::Train).is_err());
}

#[test]
fn an_error_says_why_a_subset_has_no_rows() {
    let folder = Folder::new();
    let path = folder.put("a.csv", csv(&rows(10)));
    let split = Split::Position { train_rows: 10 };
    let config = SourceConfig { split: Some(split), subset: Subset::Test, ..config(&[&path]) };
    let message = all(&Dataset::open(config, schema()).unwrap()).unwrap_err().to_string();
    assert!(message.contains("there are no test rows: the split is after row 10"), "{message}");
}

#[test]
fn given_names_replace_the_header_and_must_be_as_many() {
    let folder = Folder::new();
    let path = folder.put("a.csv", "a,b,c,d,e\n1,u,x,2,3\n");
    let named = |names: &[&str]| SourceConfig {
        format: text_format(CsvFormat {
            columns: Some(names.iter().map(|name| (*name).to_owned()).collect()),
            ..CsvFormat::default()
        }),
        ..config(&[&path])
    };
    let batch = open_and_read(named(&["y", "user", "tags", "price", "when"])).unwrap();
    assert_eq!((batch.samples, batch.dense), (1, vec![2.0]));
    let message = open_and_read(named(&["y", "user"])).unwrap_err().to_string();
    assert!(message.contains("has 5 cells, but 2 columns are named"), "{message}");
}

#[test]
fn files_may_order_their_columns_differently() {
    let folder = Folder::new();
    folder.put("1.csv", "y,user,tags,price,when\n1,u,x,2,3\n");
    folder.put("2.csv", "price,when,y,extra,tags,user\n4,3,0,,z,v\n");
    let batch = open_and_read(config(&[&folder.0.path().join("*.csv")])).unwrap();
    assert_eq!((batch.labels, batch.dense), (vec![1.0, 0.0], vec![2.0, 4.0]));
    let user = TableSeed::of("user");
    assert_eq!(batch.sparse[0].keys, [user.text(b"u"), user.text(b"v")]);
}

#[test]
fn a_row_may_be_longer_than_a_block() {
    let folder = Folder::new();
    let long = "k".repeat(3 << 20);
    let text = format!("rating,user\n5,{long}\n3,b\n4,\"{long},\n\"\n");
    let path = folder.put("a.csv", text);
    let schema = Schema {
        sparse: vec![sparse("user", None, MissingValue::Token)],
        dense: vec![],
        label: LabelField::of_numbers("rating", Some(4.0)),
        group: None,
        time: None,
    };
    let batch = all(&Dataset::open(config(&[&path]), schema).unwrap()).unwrap();
    assert_eq!((batch.label_sum(), batch.labels), (2.0, vec![1.0, 0.0, 1.0]));
    let user = TableSeed::of("user");
    let keys = [user.text(long.as_bytes()), user.text(b"b"), user.text(format!("{long},\n").as_bytes())];
    assert_eq!(batch.sparse[0].keys, keys);
}

fn criteo_schema() -> Schema {
    Schema {
        sparse: (1..=26).map(|i| sparse(&format!("C{i}"), None, MissingValue::Token)).collect(),
        dense: (1..=13).map(|i| dense(&format!("I{i}"), Transform::Log1p, 0.0)).collect(),
        label: LabelField::of_numbers("label", None),
        group: Some("C1".into()),
        time: None,
    }
}

#[test]
fn the_synthetic_source_is_the_file_it_writes() {
    let folder = Folder::new();
    let synthetic = SyntheticConfig { rows: 5000, seed: 4, ..SyntheticConfig::default() };
    let mut text = Vec::new();
    Teacher::new(synthetic.clone()).unwrap().write_text(0..5000, &mut text).unwrap();
    let file = SourceConfig { format: text_format(CsvFormat::criteo()), ..config(&[&folder.put("criteo.tsv", text)]) };
    let drawn = SourceConfig {
        format: Format::Synthetic(synthetic),
        split: Some(Split::Fraction { train: 0.75 }),
        ..SourceConfig::default()
    };
    let file = Dataset::open(file, criteo_schema()).unwrap();
    let drawn = Dataset::open(drawn, criteo_schema()).unwrap();
    assert_eq!(all(&file).unwrap(), all(&drawn).unwrap());
    let parts = [Subset::Train, Subset::Test].map(|part| all(&drawn.subset(part).unwrap()).unwrap());
    assert_eq!(Batch::concat(&parts), all(&drawn).unwrap());
    let mut reader = drawn.reader(plan(100)).unwrap();
    let chunk = reader.read(33).unwrap().unwrap();
    assert_eq!(chunk, all(&drawn).unwrap().slice(3300..3400));
    assert_eq!(file.best_possible_auc(), None);
}

/// Computes the AUC of the teacher's probabilities over the rows that a reader returns.
#[test]
fn the_teacher_reaches_its_promised_auc() {
    let synthetic = SyntheticConfig { rows: 30_000, ..SyntheticConfig::default() };
    let teacher = Teacher::new(synthetic.clone()).unwrap();
    let config = SourceConfig {
        format: Format::Synthetic(synthetic),
        split: Some(Split::Position { train_rows: 10_000 }),
        subset: Subset::Test,
        ..SourceConfig::default()
    };
    let test = Dataset::open(config, criteo_schema()).unwrap();
    let labels = all(&test).unwrap().labels;
    let mut drawn = Default::default();
    let mut scored: Vec<(f64, f32)> = labels
        .iter()
        .enumerate()
        .map(|(row, &label)| {
            teacher.draw(10_000 + row as u64, &mut drawn);
            (drawn.probability, label)
        })
        .collect();
    // Mann and Whitney: the sum of the positives' ranks.
    scored.sort_by(|a, b| a.0.total_cmp(&b.0));
    let positives = labels.iter().filter(|&&label| label == 1.0).count() as f64;
    let ranks: f64 = scored.iter().enumerate().filter(|(_, s)| s.1 == 1.0).map(|(i, _)| i as f64 + 1.0).sum();
    let negatives = labels.len() as f64 - positives;
    let auc = (ranks - positives * (positives + 1.0) / 2.0) / (positives * negatives);
    let promised = test.best_possible_auc().unwrap();
    assert!((auc - promised).abs() < 1e-6, "{auc} {promised}");
}

#[test]
#[cfg(target_os = "linux")]
fn readers_that_are_dropped_early_leave_no_thread_behind() {
    let folder = Folder::new();
    let path = folder.put("a.csv", csv(&rows(50_000)));
    let dataset = Dataset::open(config(&[&path]), schema()).unwrap();
    let threads = || {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter(|task| {
                let name = task.as_ref().unwrap().path().join("comm");
                std::fs::read_to_string(name).is_ok_and(|name| name.starts_with("rectrain-data-r"))
            })
            .count()
    };
    for _ in 0..20 {
        let mut reader = dataset.reader(plan(10)).unwrap();
        reader.read(3).unwrap();
    }
    // Other tests of this process have readers too. The readers of this test must not pile up.
    assert!(threads() < 15, "{}", threads());
}

#[test]
fn other_files_have_another_digest() {
    let folder = Folder::new();
    let [one, two] = ["1.csv", "2.csv"].map(|name| folder.put(name, csv(&rows(5))));
    let (one, two) = (one.as_path(), two.as_path());
    let digest = |paths: &[&Path]| Dataset::open(config(paths), schema()).unwrap().files_digest();
    let both = digest(&[one, two]);
    assert_eq!(both, digest(&[one, two]));
    assert!(both != digest(&[two, one]) && both != digest(&[one]));
    folder.put("2.csv", csv(&rows(6)));
    assert_ne!(both, digest(&[one, two]), "the file has grown");
}

#[test]
fn the_identity_lists_files_with_sizes_and_versions() {
    let (folder, rows) = (Folder::new(), rows(5));
    let path = folder.put("a.csv", csv(&rows));
    let identity = Dataset::open(config(&[&path]), schema()).unwrap().identity();
    let [part] = &identity.parts[..] else { panic!("{identity:?}") };
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!((part.name.as_str(), part.size), (path.to_str().unwrap(), Some(metadata.len())));
    assert_eq!(part.version, Some(Version::Modified(metadata.modified().unwrap())));
    let drawn = SourceConfig { format: Format::Synthetic(SyntheticConfig::default()), ..SourceConfig::default() };
    assert!(Dataset::open(drawn, criteo_schema()).unwrap().identity().parts.is_empty());
}

/// A second reader continues at the position that a first one has reported.
#[test]
fn a_reader_continues_at_a_position_in_any_kind_of_file() {
    let (folder, rows) = (Folder::new(), rows(101));
    for (kind, config) in every_kind(&folder, &rows) {
        let split = Some(Split::Position { train_rows: 90 });
        let divided = SourceConfig { split, subset: Subset::Train, ..config.clone() };
        let skip = SourceConfig { bad_rows: BadRows::Skip { limit: 0 }, ..config.clone() };
        for (config, end) in [(config, 101), (skip, 101), (divided, 90)] {
            let dataset = Dataset::open(config, schema()).unwrap();
            let mut next = Position::default();
            for from in (0..end).step_by(13) {
                let mut reader = dataset.span_reader(1);
                let span = |from| Span { from, rows: 13, until: None, order: Order::Stored };
                let wanted = expected(&rows[from..end.min(from + 13)]);
                let by_position = reader.read(span(Start::At(next))).unwrap().unwrap();
                let by_number = reader.read(span(Start::Row(from as u64))).unwrap().unwrap();
                assert_eq!((&by_position.batch, &by_number.batch), (&wanted, &wanted), "{kind}, row {from}");
                assert_eq!(by_position.next, by_number.next, "{kind}, row {from}");
                next = by_position.next;
            }
            let behind = Span { from: Start::At(next), rows: 13, until: None, order: Order::Stored };
            assert_eq!(dataset.span_reader(0).read(behind).unwrap(), None, "{kind}");
        }
    }
}

#[test]
fn a_span_ends_before_the_next_good_row() {
    let folder = Folder::new();
    let (configs, good) = with_bad_rows(&folder);
    for config in configs {
        let config = SourceConfig { bad_rows: BadRows::Skip { limit: 9 }, ..config };
        let dataset = Dataset::open(config, schema()).unwrap();
        let span = |from| Span { from, rows: 12, until: None, order: Order::Stored };
        let first = dataset.span_reader(0).read(span(Start::Row(0))).unwrap().unwrap();
        // Rows 0, 13 and 14 are bad.
        assert_eq!((first.skipped, first.next), (3, Position::new(0, 15)));
        let second = dataset.span_reader(0).read(span(Start::At(first.next))).unwrap().unwrap();
        assert_eq!(second.batch, expected(&good[12..24]));
    }
}
