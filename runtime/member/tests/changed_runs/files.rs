//! The training files of a case, with the rows in each. Each row is a number of its own, which is
//! also its id in the data.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, Float32Array, Int64Array, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use rectrain_random::SplitMix64;

/// The first row. All rows have five digits, so that a replaced text file keeps its size.
pub const FIRST_ROW: u64 = 10_000;

/// The format of all files of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Format {
    Csv,
    Tsv,
    Gzip,
    Zstandard,
    Parquet,
}

impl Format {
    pub const ALL: [Self; 5] = [Self::Csv, Self::Tsv, Self::Gzip, Self::Zstandard, Self::Parquet];

    fn extension(self) -> &'static str {
        match self {
            Self::Csv => "csv",
            Self::Tsv => "tsv",
            Self::Gzip => "csv.gz",
            Self::Zstandard => "csv.zst",
            Self::Parquet => "parquet",
        }
    }

    fn bytes(self, rows: &[u64]) -> Vec<u8> {
        match self {
            Self::Csv => text(rows, ',').into_bytes(),
            Self::Tsv => text(rows, '\t').into_bytes(),
            Self::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(text(rows, ',').as_bytes()).unwrap();
                encoder.finish().unwrap()
            }
            Self::Zstandard => zstd::encode_all(text(rows, ',').as_bytes(), 1).unwrap(),
            Self::Parquet => parquet(rows),
        }
    }
}

/// The tags of a row. No tag is on rows of both labels. Otherwise its gradients may cancel, and
/// Adam without memory then divides a gradient by a mean square that rounds to 0.
fn tags(row: u64) -> &'static str {
    ["a|b;c", "d", "b", "e|f;d", "a", "e"][(row % 6) as usize]
}

/// The label of a row. A job whose label is constant in all rows that it reads is refused, so rows
/// are added in pairs at least.
fn label(row: u64) -> u64 {
    row % 2
}

/// Every `other` is the opposite of the `label`.
fn text(rows: &[u64], delimiter: char) -> String {
    let mut text = String::new();
    let mut line = |cells: [&str; 5]| writeln!(text, "{}", cells.join(&delimiter.to_string())).unwrap();
    line(["label", "other", "row", "tags", "age"]);
    for row in rows {
        let (label, other) = (label(*row).to_string(), (1 - label(*row)).to_string());
        line([&label, &other, &row.to_string(), tags(*row), &(row % 7).to_string()]);
    }
    text
}

fn parquet(rows: &[u64]) -> Vec<u8> {
    let integers = |of: &dyn Fn(u64) -> i64| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| of(*row))))
    };
    let columns: [(&str, ArrayRef); 5] = [
        ("label", integers(&|row| label(row) as i64)),
        ("other", integers(&|row| 1 - label(row) as i64)),
        ("row", integers(&|row| row as i64)),
        ("tags", Arc::new(StringArray::from_iter_values(rows.iter().map(|row| tags(*row))))),
        ("age", Arc::new(Float32Array::from_iter_values(rows.iter().map(|row| (row % 7) as f32)))),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

/// A file. Equal files have equal bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct File {
    pub rows: Vec<u64>,
    /// Whether the last third of its bytes is missing.
    is_cut: bool,
}

/// All files of a case.
#[derive(Clone, Debug)]
pub struct Files {
    pub format: Format,
    by_name: BTreeMap<String, File>,
    folder: u64,
    /// Whether the manifest lists the files by name, from the last to the first.
    is_reversed: bool,
    /// The row after all rows that any file ever had.
    pub next_row: u64,
}

impl Files {
    pub fn draw(random: &mut SplitMix64) -> Self {
        let format = Format::ALL[random.remainder(5) as usize];
        let mut files = Self { format, by_name: BTreeMap::new(), folder: 0, is_reversed: false, next_row: FIRST_ROW };
        for _ in 0..1 + random.remainder(3) {
            files.add(random);
        }
        files
    }

    /// The files in reading order.
    pub fn in_order(&self) -> Vec<File> {
        self.names().iter().map(|name| self.by_name[*name].clone()).collect()
    }

    /// The value of `spec.data.train.paths`.
    pub fn paths(&self, root: &Path) -> String {
        let folder = self.folder(root);
        if !self.is_reversed {
            return format!("{{{}}}", folder.join(format!("*.{}", self.format.extension())).display());
        }
        let names: Vec<String> = self.names().iter().map(|name| folder.join(name).display().to_string()).collect();
        format!("{{{}}}", names.join(","))
    }

    fn names(&self) -> Vec<&String> {
        if self.is_reversed { self.by_name.keys().rev().collect() } else { self.by_name.keys().collect() }
    }

    fn folder(&self, root: &Path) -> PathBuf {
        root.join(format!("files-{}", self.folder))
    }

    /// Makes the folder hold these files. `before` holds the files that are there. A file that is
    /// unchanged keeps its time of modification, unless `touch` is set.
    pub fn write(&self, root: &Path, before: Option<&Self>, touch: bool) {
        let folder = self.folder(root);
        match before {
            None => std::fs::create_dir_all(&folder).unwrap(),
            Some(before) if before.folder != self.folder => std::fs::rename(before.folder(root), &folder).unwrap(),
            Some(_) => {}
        }
        let there = before.map(|before| before.by_name.clone()).unwrap_or_default();
        for name in there.keys().filter(|name| !self.by_name.contains_key(*name)) {
            std::fs::remove_file(folder.join(name)).unwrap();
        }
        for (name, file) in &self.by_name {
            if touch || there.get(name) != Some(file) {
                let bytes = self.format.bytes(&file.rows);
                let length = if file.is_cut { bytes.len() * 2 / 3 } else { bytes.len() };
                std::fs::write(folder.join(name), &bytes[..length]).unwrap();
            }
        }
    }

    /// One random change. `may_cut`: also one that leaves a file unreadable.
    pub fn change(&mut self, random: &mut SplitMix64, may_cut: bool) {
        let name = self.any_name(random);
        match random.remainder(if may_cut { 12 } else { 11 }) {
            0 => self.add(random),
            1 => self.file(&name).rows = self.fresh_rows(self.by_name[&name].rows.len() as u64),
            2 => self.truncate(&name),
            3 => {
                let more = self.fresh_rows(2 + random.remainder(5));
                self.file(&name).rows.extend(more);
            }
            4 => {
                let file = self.by_name.remove(&name).unwrap_or_default();
                let renamed = self.free_name(random);
                self.by_name.insert(renamed, file);
            }
            5 => {
                let other = self.any_name(random);
                let (file, of_other) = (self.by_name[&name].clone(), self.by_name[&other].clone());
                *self.file(&other) = file;
                *self.file(&name) = of_other;
            }
            6 if self.by_name.len() > 1 => drop(self.by_name.remove(&name)),
            7 => self.file(&name).rows.reverse(),
            8 => self.is_reversed = !self.is_reversed,
            9 => self.folder += 1,
            11 => self.file(&name).is_cut = true,
            _ => {}
        }
        if self.by_name.values().all(|file| file.rows.is_empty()) {
            self.add(random);
        }
    }

    fn add(&mut self, random: &mut SplitMix64) {
        let name = self.free_name(random);
        let rows = self.fresh_rows(2 + random.remainder(19));
        self.by_name.insert(name, File { rows, is_cut: false });
    }

    fn truncate(&mut self, name: &str) {
        let rows = &mut self.file(name).rows;
        rows.truncate(rows.len().div_ceil(2).max(2));
    }

    fn file(&mut self, name: &str) -> &mut File {
        self.by_name.entry(name.to_owned()).or_default()
    }

    fn any_name(&self, random: &mut SplitMix64) -> String {
        let at = random.remainder(self.by_name.len() as u64) as usize;
        self.by_name.keys().nth(at).cloned().unwrap_or_default()
    }

    fn free_name(&self, random: &mut SplitMix64) -> String {
        loop {
            let name = format!("{:03}.{}", random.remainder(1000), self.format.extension());
            if !self.by_name.contains_key(&name) {
                return name;
            }
        }
    }

    fn fresh_rows(&mut self, rows: u64) -> Vec<u64> {
        self.next_row += rows;
        (self.next_row - rows..self.next_row).collect()
    }
}
