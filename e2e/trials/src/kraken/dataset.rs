//! The data sets: where their rows are, the meaning of their columns, and their manifests.

use serde_json::{Value, json};

use super::profile::{Cells, Column};
use super::variant::EMBEDDING_DIM;

/// Rows in the order of time. The first 80 % train, the next 10 % are the validation rows, and the
/// last 10 % are the test.
pub(super) struct DataSet {
    pub(super) name: &'static str,
    /// The compressed file, in the folder of the data sets.
    pub(super) file: &'static str,
    /// The format in a manifest, which is the extension of the uncompressed files too.
    pub(super) format: &'static str,
    pub(super) has_header: bool,
    pub(super) cells: Cells<'static>,
    /// The manifest's `csv`, `dense` and `timeColumn`.
    settings: fn() -> Settings,
}

/// The parts of a manifest that differ between data sets.
struct Settings {
    csv: Value,
    dense: Value,
    time: Value,
}

/// All data sets.
pub(super) const DATA_SETS: [DataSet; 2] = [CRITEO, MOVIELENS];

const CRITEO: DataSet = DataSet {
    name: "criteo-dac-80k",
    file: "criteo-dac-80k/dac_sample_first80k.tsv.gz",
    format: "tsv",
    has_header: false,
    cells: Cells { delimiter: '\t', columns: &CRITEO_COLUMNS, time: None },
    settings: || Settings {
        csv: json!({ "columns": ["label", "I{1..13}", "C{1..26}"] }),
        dense: json!([{ "name": "I{1..13}", "transform": "log1p" }]),
        time: Value::Null,
    },
};

const MOVIELENS: DataSet = DataSet {
    name: "ml-1m",
    file: "ml-1m-reconstructed/ratings.csv.gz",
    format: "csv",
    has_header: true,
    cells: Cells { delimiter: ',', columns: &MOVIELENS_COLUMNS, time: Some(3) },
    settings: || Settings {
        csv: json!({ "header": true }),
        dense: json!([]),
        time: json!({ "name": "timestamp", "unit": "seconds" }),
    },
};

const CRITEO_COLUMNS: [Column; 26] = criteo_columns([
    "C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10", "C11", "C12", "C13", "C14", "C15", "C16", "C17",
    "C18", "C19", "C20", "C21", "C22", "C23", "C24", "C25", "C26",
]);

/// The ids follow the label and 13 counts.
const fn criteo_columns(names: [&'static str; 26]) -> [Column; 26] {
    let mut columns = [Column { name: "", place: 14, is_important: false }; 26];
    let mut number = 0;
    while number < columns.len() {
        columns[number] = Column { name: names[number], place: 14 + number, is_important: false };
        number += 1;
    }
    columns
}

/// Kraken keeps the items of MovieLens: they take less memory than users and are read more often.
const MOVIELENS_COLUMNS: [Column; 2] = [
    Column { name: "user_id", place: 0, is_important: false },
    Column { name: "movie_id", place: 1, is_important: true },
];

impl DataSet {
    /// The manifest with the settings of Kraken's appendix, for the files of training and test
    /// rows. Model, optimizers and seed are overrides.
    pub(super) fn manifest(&self, train: &str, test: &str) -> Value {
        let Settings { csv, dense, time } = (self.settings)();
        let sparse: Vec<Value> = self.cells.columns.iter().map(|column| json!({ "name": column.name })).collect();
        let mut data = json!({
            "format": self.format, "csv": csv, "train": { "paths": [train] }, "test": { "paths": [test] },
        });
        if !time.is_null() {
            data["timeColumn"] = time;
        }
        json!({
            "apiVersion": "rectrain.dev/v1alpha1",
            "kind": "RecTrainingJob",
            "metadata": { "name": self.name },
            "spec": {
                "model": { "kind": "deepfm", "embeddingDim": EMBEDDING_DIM, "hidden": [256, 128] },
                "features": { "sparse": sparse, "dense": dense },
                "data": data,
                "training": { "mode": "sync", "globalBatchSize": 128, "epochs": 1 },
            },
        })
    }

    /// Whether rows have times. Without them no score decays and no row expires.
    pub(super) fn has_times(&self) -> bool {
        self.cells.time.is_some()
    }
}

/// The training, validation and test rows of a text, each with the header.
pub(super) fn parts(text: &str, has_header: bool) -> [String; 3] {
    let mut lines = text.lines();
    let header = if has_header { lines.next() } else { None };
    let rows: Vec<&str> = lines.collect();
    let (train, rest) = rows.split_at(rows.len() * 8 / 10);
    let (validation, test) = rest.split_at(rest.len() / 2);
    [train, validation, test].map(|rows| header.iter().chain(rows).map(|line| format!("{line}\n")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_divided_in_their_order() {
        let text: String = (0..10).map(|row| format!("{row}\n")).collect();
        assert_eq!(parts(&text, false), ["0\n1\n2\n3\n4\n5\n6\n7\n", "8\n", "9\n"]);
        let with_header = format!("name\n{text}");
        assert_eq!(parts(&with_header, true), ["name\n0\n1\n2\n3\n4\n5\n6\n7\n", "name\n8\n", "name\n9\n"]);
    }

    #[test]
    fn a_manifest_has_every_column_of_ids_and_the_clock_if_there_is_one() {
        let [criteo, movielens] = DATA_SETS.map(|data| data.manifest("a", "b"));
        let names = criteo["spec"]["features"]["sparse"].as_array().unwrap();
        assert_eq!((names.len(), &names[25]["name"]), (26, &json!("C26")));
        assert_eq!(CRITEO_COLUMNS[25].place, 39);
        assert!(criteo["spec"]["data"].get("timeColumn").is_none());
        assert_eq!(movielens["spec"]["data"]["timeColumn"]["name"], "timestamp");
        assert_eq!(movielens["spec"]["data"]["test"]["paths"], json!(["b"]));
    }
}
