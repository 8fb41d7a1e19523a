//! Writes synthetic rows in Criteo's layout as text: tabs, a header, missing counts empty.
//!
//! `cargo run --release -p rectrain-data --example write_rows -- FOLDER ROWS TEST_ROWS VOCABULARY
//! [FEATURES EXPONENT]`
//!
//! `FOLDER/train.tsv` has ROWS rows, and `FOLDER/test.tsv` the TEST_ROWS rows after them. Each of
//! the columns of ids has VOCABULARY different ids, which are the numbers from 0. There are
//! FEATURES columns of ids, 26 by default. EXPONENT is the one of Zipf's law, 1.05 by default.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use rectrain_data::SyntheticConfig;
use rectrain_data::synthetic::Teacher;

const USAGE: &str = "expected four arguments, or six: FOLDER ROWS TEST_ROWS VOCABULARY [FEATURES EXPONENT]";
const SPARSE: usize = 26;

fn write(teacher: &Teacher, rows: Range<u64>, file: &Path) -> std::io::Result<()> {
    let mut text = BufWriter::new(File::create(file)?);
    writeln!(text, "{}", teacher.columns().join("\t"))?;
    teacher.write_text(rows, text)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, rows, test_rows, vocabulary, law @ ..] = &arguments[..] else { return Err(USAGE.into()) };
    let [rows, test_rows, vocabulary]: [u64; 3] = [rows.parse()?, test_rows.parse()?, vocabulary.parse()?];
    let default = SyntheticConfig::default();
    let (features, zipf_exponent) = match law {
        [] => (SPARSE, default.zipf_exponent),
        [features, exponent] => (features.parse()?, exponent.parse()?),
        _ => return Err(USAGE.into()),
    };
    let vocabularies = vec![vocabulary; features];
    let teacher = Teacher::new(SyntheticConfig { rows, test_rows, vocabularies, zipf_exponent, ..default })?;
    write(&teacher, 0..rows, &Path::new(folder).join("train.tsv"))?;
    write(&teacher, rows..rows + test_rows, &Path::new(folder).join("test.tsv"))?;
    println!("the best possible test AUC is {:.4}", teacher.best_possible_auc(rows..rows + test_rows));
    Ok(())
}
