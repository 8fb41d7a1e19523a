//! The public data sets: where their rows are, and their manifests. Pure.

use rectrain_harness::HarnessError;
use serde_json::{Value, json};

use crate::TrialError;
use crate::error::unmet;

/// The predictions on training rows that count: all of them.
const WINDOW: u64 = 10_000_000;

/// Rows in the order of time. The first 80 % train, and the others are the test.
#[derive(Debug)]
pub(super) struct DataSet {
    pub(super) name: &'static str,
    /// The compressed file, in the folder of the data sets.
    pub(super) file: &'static str,
    /// The format in a manifest, which is the extension of the uncompressed files too.
    pub(super) format: &'static str,
    has_header: bool,
    /// Only so many rows are read. `None`: all of them.
    pub(super) first_rows: Option<usize>,
    /// Rows of a worker's batch. With four workers and all rows, each worker has 500 batches of
    /// Criteo and 1,563 of MovieLens, so a gap of 100 has at least five exchanges.
    pub(super) local_batch: u64,
    /// The manifest's `model`, `features` and `csv`.
    settings: fn() -> Settings,
}

/// The parts of a manifest that differ between data sets.
struct Settings {
    model: Value,
    features: Value,
    csv: Value,
}

const CRITEO: DataSet = DataSet {
    name: "criteo-dac-80k",
    file: "criteo-dac-80k/dac_sample_first80k.tsv.gz",
    format: "tsv",
    has_header: false,
    first_rows: None,
    local_batch: 32,
    settings: || Settings {
        model: json!({ "kind": "dlrm", "embeddingDim": 16 }),
        features: json!({
            "sparse": [{ "name": "C{1..26}" }], "dense": [{ "name": "I{1..13}", "transform": "log1p" }],
        }),
        csv: json!({ "columns": ["label", "I{1..13}", "C{1..26}"] }),
    },
};

const MOVIELENS: DataSet = DataSet {
    name: "ml-1m",
    file: "ml-1m-reconstructed/ratings.csv.gz",
    format: "csv",
    has_header: true,
    first_rows: None,
    local_batch: 128,
    settings: || Settings {
        model: json!({ "kind": "deepfm", "embeddingDim": 16, "hidden": [64, 32] }),
        features: json!({ "sparse": [{ "name": "user_id" }, { "name": "movie_id" }] }),
        csv: json!({ "header": true }),
    },
};

/// All data sets.
pub(super) static DATA_SETS: [DataSet; 2] = [CRITEO, MOVIELENS];
/// The first rows of the smaller data set.
pub(super) static QUICK: [DataSet; 1] = [DataSet { first_rows: Some(16_000), ..CRITEO }];

/// The training and test rows of a data set.
pub(super) struct Parts {
    /// With the header.
    pub(super) train: String,
    /// With the header.
    pub(super) test: String,
}

impl DataSet {
    /// Divides the text of the file.
    ///
    /// # Errors
    /// [`TrialError::Unmet`] if a part has no row.
    pub(super) fn parts(&self, text: &str) -> Result<Parts, TrialError> {
        let mut lines = text.lines();
        let header = if self.has_header { lines.next() } else { None };
        let rows: Vec<&str> = lines.take(self.first_rows.unwrap_or(usize::MAX)).collect();
        let (train, test) = rows.split_at(rows.len() * 8 / 10);
        if train.is_empty() || test.is_empty() {
            return Err(unmet(format!("training and test rows in {}", self.file), format!("{} rows", rows.len())));
        }
        let part = |rows: &[&str]| header.iter().chain(rows).map(|line| format!("{line}\n")).collect();
        Ok(Parts { train: part(train), test: part(test) })
    }

    /// The manifest for the files of training and test rows. Mode, batches, workers and seed are
    /// overrides.
    pub(super) fn manifest(&self, train: &str, test: &str) -> Value {
        let Settings { model, features, csv } = (self.settings)();
        let adam = json!({ "kind": "adam", "learningRate": 0.001 });
        json!({
            "apiVersion": "rectrain.dev/v1alpha1",
            "kind": "RecTrainingJob",
            "metadata": { "name": self.name },
            "spec": {
                "model": model,
                "features": features,
                "data": {
                    "format": self.format, "csv": csv, "train": { "paths": [train] }, "test": { "paths": [test] },
                },
                "training": {
                    "epochs": 1, "optimizer": { "dense": adam, "sparse": adam }, "quality": { "windowRows": WINDOW },
                },
            },
        })
    }

    /// The data set with this name, or with this first word of its name.
    ///
    /// # Errors
    /// [`HarnessError::Usage`] with `usage` if there is none.
    pub(super) fn named(name: &str, usage: &'static str) -> Result<&'static Self, HarnessError> {
        let has_name = |set: &&Self| set.name == name || set.name.split('-').next() == Some(name);
        DATA_SETS.iter().find(has_name).ok_or(HarnessError::Usage(usage))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_fifth_of_the_rows_is_the_test() {
        let text = "user_id,movie_id,label\n1,1,1\n1,2,0\n1,3,0\n1,4,0\n1,5,1\n";
        let parts = MOVIELENS.parts(text).unwrap();
        assert_eq!(parts.train, "user_id,movie_id,label\n1,1,1\n1,2,0\n1,3,0\n1,4,0\n");
        assert_eq!(parts.test, "user_id,movie_id,label\n1,5,1\n");
    }

    #[test]
    fn only_the_first_rows_are_read_if_there_is_a_limit() {
        let text = "0\ta\n1\tb\n0\tc\n1\td\n0\te\n1\tf\n";
        let parts = DataSet { first_rows: Some(5), ..CRITEO }.parts(text).unwrap();
        assert_eq!((&*parts.train, &*parts.test), ("0\ta\n1\tb\n0\tc\n1\td\n", "0\te\n"));
    }

    #[test]
    fn a_file_without_rows_is_named() {
        for text in ["", "0\ta\n"] {
            let error = CRITEO.parts(text).err().expect("no test rows").to_string();
            assert!(error.contains("dac_sample_first80k"), "{error}");
        }
    }

    #[test]
    fn a_manifest_reads_its_data_once() {
        for set in &DATA_SETS {
            let spec = set.manifest("a", "b")["spec"].clone();
            assert_eq!(spec["training"]["epochs"], 1);
            assert_eq!(
                (&spec["data"]["train"]["paths"][0], &spec["data"]["test"]["paths"][0]),
                (&json!("a"), &json!("b"))
            );
        }
        assert_eq!(DataSet::named("ml", "").unwrap().name, "ml-1m");
        assert!(DataSet::named("ml-25m", "").is_err());
    }
}
