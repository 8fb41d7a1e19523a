//! Rows a second from a file in Criteo's layout (label, 13 counts, 26 ids; tabs; no header).
//!
//! `cargo run --release -p rectrain-data --example read_speed -- FILE [FILE …]`
//!
//! Without a file it measures 300,000 synthetic rows: once drawn, and once read from a temporary
//! file. `--write FILE` writes 500,000 rows. `--json FILE` reads every chunk of text (.gz, .zst) or
//! Parquet once, and prints rows a second as JSON.

use rectrain_data::synthetic::Teacher;
use rectrain_data::{
    CsvFormat, DataError, Dataset, DenseField, FileFormat, Format, LabelField, MissingValue, ReadPlan, Schema,
    SourceConfig, SparseField, SyntheticConfig, Transform,
};
use std::time::Instant;

fn criteo_schema() -> Schema {
    let sparse = (1..=26).map(|i| SparseField {
        name: format!("C{i}"),
        table: format!("C{i}"),
        multi_value: None,
        missing: MissingValue::Token,
        hash_buckets: None,
    });
    let dense =
        (1..=13).map(|i| DenseField { name: format!("I{i}"), transform: Transform::Log1p, missing: 0.0, limit: 1e15 });
    Schema {
        sparse: sparse.collect(),
        dense: dense.collect(),
        label: LabelField::of_numbers("label", None),
        group: None,
        time: None,
    }
}

fn open(paths: Vec<String>, format: Format) -> Result<Dataset, DataError> {
    Dataset::open(SourceConfig { paths, format, ..SourceConfig::default() }, criteo_schema())
}

fn measure(name: &str, paths: Vec<String>, format: Format) -> Result<(), DataError> {
    let dataset = open(paths, format)?;
    for (mode, shuffle, step) in [("every chunk", None, 1), ("shuffled", Some(1), 1), ("1 of 8", None, 8)] {
        let mut reader = dataset.reader(ReadPlan { chunk_rows: 8192, shuffle, epoch: 0, read_ahead_chunks: 2 })?;
        let (start, mut rows, mut positives, mut chunk) = (Instant::now(), 0, 0.0, 0);
        while let Some(batch) = reader.read(chunk)? {
            rows += batch.samples;
            positives += batch.label_sum();
            chunk += step;
        }
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{name}, {mode}: {rows} rows, {positives} positive, {seconds:.3} s, {:.0} rows/s",
            rows as f64 / seconds
        );
    }
    let (start, rows) = (Instant::now(), dataset.count_rows()?);
    let seconds = start.elapsed().as_secs_f64();
    println!("{name}, counted: {rows} rows, {seconds:.3} s; estimated {}", dataset.estimated_rows());
    Ok(())
}

/// Every chunk once, in the order of the file.
fn read_once(file: &str) -> Result<(), Box<dyn std::error::Error>> {
    let format = match file.ends_with(".parquet") {
        true => FileFormat::Parquet,
        false => FileFormat::Csv(CsvFormat::criteo()),
    };
    let dataset = open(vec![file.to_owned()], Format::Files(format))?;
    let mut reader = dataset.reader(ReadPlan { chunk_rows: 8192, shuffle: None, epoch: 0, read_ahead_chunks: 2 })?;
    let (start, mut rows, mut positives, mut chunk) = (Instant::now(), 0, 0.0, 0);
    while let Some(batch) = reader.read(chunk)? {
        rows += batch.samples;
        positives += batch.label_sum();
        chunk += 1;
    }
    let speed = rows as f64 / start.elapsed().as_secs_f64();
    println!(r#"{{"samplesPerSecond":{speed:.0},"rows":{rows},"positive":{positives}}}"#);
    Ok(())
}

fn write_rows(file: &str) -> Result<(), Box<dyn std::error::Error>> {
    let config = SyntheticConfig { rows: WRITTEN, ..SyntheticConfig::default() };
    let written = std::io::BufWriter::new(std::fs::File::create(file)?);
    Ok(Teacher::new(config)?.write_text(0..WRITTEN, written)?)
}

/// The rows that `--write` writes.
const WRITTEN: u64 = 500_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files: Vec<String> = std::env::args().skip(1).collect();
    match &files[..] {
        [flag, file] if flag == "--json" => return read_once(file),
        [flag, file] if flag == "--write" => return write_rows(file),
        _ => {}
    }
    if !files.is_empty() {
        for file in files {
            measure(&file.clone(), vec![file], Format::Files(FileFormat::Csv(CsvFormat::criteo())))?;
        }
        return Ok(());
    }
    let config = SyntheticConfig { rows: 300_000, ..SyntheticConfig::default() };
    measure("synthetic", vec![], Format::Synthetic(config.clone()))?;
    let file = std::env::temp_dir().join(format!("read-speed-{}.tsv", std::process::id()));
    let written = std::io::BufWriter::new(std::fs::File::create(&file)?);
    Teacher::new(config)?.write_text(0..300_000, written)?;
    let name = file.display().to_string();
    measure("text", vec![name], Format::Files(FileFormat::Csv(CsvFormat::criteo())))?;
    std::fs::remove_file(file)?;
    Ok(())
}
