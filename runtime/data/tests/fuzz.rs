//! Fuzzes the readers of all formats. See `rectrain-fuzzing`. Any bytes give rows or an error. They
//! give the same rows however they are cut into chunks, and whether they are compressed or not. The
//! test measures memory, so this program has only one test.

use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use arrow_array::{ArrayRef, Float64Array, Int32Array, RecordBatch, StringArray};
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use peak_alloc::PeakAlloc;
use rectrain_data::{
    BadRows, Batch, DataError, Dataset, DenseField, LabelField, MissingValue, ReadPlan, Schema, SourceConfig,
    SparseField, Transform,
};
use rectrain_fuzzing::{Area, Target, outcome};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const AREAS: &[Area] = &[Area {
    name: "reader",
    targets: &[
        target("csv", csv, csv_seeds),
        target("tsv", tsv, tsv_seeds),
        target("gzip", gzip, gzip_seeds),
        target("zstandard", zstandard, zstandard_seeds),
        target("parquet", parquet, parquet_seeds),
    ],
}];

/// The header of a Zstandard file may ask for a window of 128 MiB.
const fn target(name: &'static str, check: fn(&[u8]) -> String, seeds: fn() -> Vec<Vec<u8>>) -> Target {
    Target { name, check, seeds, words, inputs: 300, memory: 512 << 20 }
}

#[test]
fn no_file_makes_the_reader_panic_or_hang() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/kept");
    rectrain_fuzzing::run(AREAS, &kept, &MEMORY);
}

static RUNTIME: LazyLock<tokio::runtime::Runtime> =
    LazyLock::new(|| tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime"));

const TEXT: &str = "y,user,tags,price\n1,u1,a|b,0.5\n0,12,,\n1,,x,-3e2\n0,\"a,\"\"b\",12|13,7\n1,5.0,nan,1\r\n";

fn words() -> Vec<String> {
    let words = [
        ",",
        "\t",
        "\n",
        "\r\n",
        "\r",
        "\"",
        "\"\"",
        "|",
        "\u{feff}",
        "NaN",
        "nan",
        "inf",
        "-0",
        "1e400",
        "1e25",
        "5.0",
        " ",
        "NULL",
        "\\N",
        "y",
        "user",
        "tags",
        "price",
        "18446744073709551616",
        "PAR1",
    ];
    words.map(str::to_owned).into()
}

fn csv_seeds() -> Vec<Vec<u8>> {
    vec![TEXT.into(), TEXT.replace('\n', "\r\n").into(), TEXT.lines().take(2).collect::<Vec<_>>().join("\n").into()]
}

fn tsv_seeds() -> Vec<Vec<u8>> {
    csv_seeds().into_iter().map(tabs).collect()
}

fn tabs(text: Vec<u8>) -> Vec<u8> {
    text.into_iter().map(|byte| if byte == b',' { b'\t' } else { byte }).collect()
}

/// Texts, and compressed texts.
fn gzip_seeds() -> Vec<Vec<u8>> {
    let compressed = csv_seeds().into_iter().map(|text| gzipped(&text));
    csv_seeds().into_iter().chain(compressed).collect()
}

fn zstandard_seeds() -> Vec<Vec<u8>> {
    let compressed = csv_seeds().into_iter().map(|text| zstandarded(&text));
    csv_seeds().into_iter().chain(compressed).collect()
}

fn gzipped(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text).expect("memory holds it");
    encoder.finish().expect("memory holds it")
}

fn zstandarded(text: &[u8]) -> Vec<u8> {
    zstd::encode_all(text, 1).expect("memory holds it")
}

/// Five rows in row groups of two, by compression, with and without dictionaries.
fn parquet_seeds() -> Vec<Vec<u8>> {
    let codecs = [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::ZSTD(ZstdLevel::default())];
    let all = codecs.into_iter().flat_map(|codec| [(codec, true), (codec, false)]);
    all.map(|(codec, has_dictionary)| {
        let columns: [(&str, ArrayRef); 4] = [
            ("y", Arc::new(Int32Array::from(vec![1, 0, 1, 0, 1]))),
            ("user", Arc::new(StringArray::from(vec![Some("u1"), Some("12"), None, Some("u1"), Some("5.0")]))),
            ("tags", Arc::new(StringArray::from(vec![Some("a|b"), None, Some("x"), Some("12|13"), Some("")]))),
            ("price", Arc::new(Float64Array::from(vec![Some(0.5), None, Some(-300.0), Some(7.0), Some(f64::NAN)]))),
        ];
        let batch = RecordBatch::try_from_iter(columns).expect("columns of one length");
        let properties = WriterProperties::builder().set_compression(codec).set_dictionary_enabled(has_dictionary);
        let properties = properties.set_max_row_group_row_count(Some(2)).build();
        let mut writer =
            ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).expect("a schema of Parquet");
        writer.write(&batch).expect("memory holds it");
        writer.into_inner().expect("memory holds it")
    })
    .collect()
}

fn csv(input: &[u8]) -> String {
    kind(&read_in_every_way("a.csv", input))
}

fn tsv(input: &[u8]) -> String {
    kind(&read_in_every_way("a.tsv", input))
}

fn parquet(input: &[u8]) -> String {
    kind(&read_in_every_way("a.parquet", input))
}

fn gzip(input: &[u8]) -> String {
    compressed("a.csv.gz", input, gzipped)
}

fn zstandard(input: &[u8]) -> String {
    compressed("a.csv.zst", input, zstandarded)
}

/// The input as a compressed file, which is mostly damaged, and as a text that is compressed.
fn compressed(name: &str, input: &[u8], compress: fn(&[u8]) -> Vec<u8>) -> String {
    let as_file = read_in_every_way(name, input);
    // A reader decompresses such a text once, whatever its name.
    let is_compressed = [&[0x1f, 0x8b][..], &[0x28, 0xb5, 0x2f, 0xfd]].iter().any(|magic| input.starts_with(magic));
    if is_compressed {
        return kind(&as_file);
    }
    let (plain, packed) = (read_in_every_way("a.csv", input), read_in_every_way(name, &compress(input)));
    assert_eq!(plain.as_ref().ok(), packed.as_ref().ok(), "compression changes the rows");
    [kind(&as_file), kind(&packed)].join("; ")
}

/// The outcome without the names of the file's columns, which the input may choose.
fn kind(read: &Result<String, DataError>) -> String {
    let short = |error: &DataError| error.to_string().split(';').next().unwrap_or_default().to_owned();
    outcome(&read.as_ref().map_err(short))
}

/// Reads a file whole, in small chunks, and without its bad rows. Returns the rows as text, since
/// NaN is unequal to itself.
fn read_in_every_way(name: &str, bytes: &[u8]) -> Result<String, DataError> {
    let store = Arc::new(InMemory::new());
    let key = object_store::path::Path::from(name);
    RUNTIME.block_on(store.put(&key, bytes.to_vec().into())).expect("memory holds it");
    let whole = read(&store, name, BadRows::Fail, 1_000);
    let pieces = read(&store, name, BadRows::Fail, 2);
    assert_eq!(text_of(&whole), text_of(&pieces), "the rows depend on the chunks");
    let without_bad = read(&store, name, BadRows::Skip { limit: u64::MAX }, 3);
    if whole.is_ok() {
        assert_eq!(text_of(&whole), text_of(&without_bad), "good rows are skipped");
    }
    for result in [&whole, &pieces, &without_bad] {
        if let Err(error) = result {
            assert!(!matches!(error, DataError::Stopped), "a thread panicked");
            assert!(!error.to_string().contains("ended unexpectedly"), "a task panicked");
        }
    }
    whole.map(|batch| format!("{batch:?}"))
}

fn text_of(read: &Result<Batch, DataError>) -> Option<String> {
    read.as_ref().ok().map(|batch| format!("{batch:?}"))
}

fn read(store: &Arc<InMemory>, name: &str, bad_rows: BadRows, chunk_rows: u64) -> Result<Batch, DataError> {
    let config = SourceConfig { paths: vec![name.to_owned()], bad_rows, ..SourceConfig::default() };
    let dataset = Dataset::open_in(Arc::clone(store) as Arc<dyn ObjectStore>, config, schema())?;
    let mut reader = dataset.reader(ReadPlan { chunk_rows, shuffle: None, epoch: 0, read_ahead_chunks: 2 })?;
    let mut chunks = Vec::new();
    while let Some(chunk) = reader.read(chunks.len() as u64)? {
        chunks.push(chunk);
    }
    if bad_rows == BadRows::Fail {
        let rows: usize = chunks.iter().map(|chunk| chunk.samples).sum();
        assert_eq!(dataset.count_rows()?, rows as u64, "the count of rows is wrong");
    }
    if chunks.is_empty() {
        return Ok(Batch::of_schema(&schema()));
    }
    Ok(Batch::concat(&chunks))
}

fn schema() -> Schema {
    let sparse = |name: &str, multi_value, missing| SparseField {
        name: name.to_owned(),
        table: name.to_owned(),
        multi_value,
        missing,
        hash_buckets: None,
    };
    Schema {
        sparse: vec![
            sparse("user", None, MissingValue::Token),
            sparse("tags", Some("|".to_owned()), MissingValue::Skip),
        ],
        dense: vec![DenseField {
            name: "price".to_owned(),
            transform: Transform::Identity,
            missing: -1.0,
            limit: 1e15,
        }],
        label: LabelField::of_numbers("y", None),
        group: Some("user".to_owned()),
        time: None,
    }
}
