//! `cargo xtask des`: the bytes on the wire in the mode `des`, as table 2 of DES (Rong et al. 2020)
//! compares them. `cargo xtask des --links RATES` measures throughput instead.
//!
//! Jobs train in many processes, in `des` and in `sync` without a look-ahead. The bytes of each
//! link and step are compared with their formulas, and with the paper's formulas of DES and mesh.
//!
//! - `criteo`: 26 features of one id.
//! - `wide`: 950 features of one id, as many as a sample of the paper has. Their numbers of
//!   distinct ids are near the numbers in the paper's table 2.
//! - `lists`: 25 features of 38 ids. Most cells have ids on several servers.

mod formula;
mod lists;
mod measure;
mod speed;

use std::path::Path;

use rectrain_harness::HarnessError;
use rectrain_harness::arguments::{list, number, without_quick};
use rectrain_harness::cargo::build_programs;
use rectrain_harness::files::{make_folder, remove_folder, temporary_folder};
use serde_json::{Map, Value, json};

use self::formula::{Bytes, LINKS, Model, Step, Tower, deviation, saved};
use self::measure::{Job, Measured, measure};
use crate::TrialError;
use crate::error::unmet;

const USAGE: &str = "usage: cargo xtask des [--quick] [--rows criteo,wide,lists] [--path DATA] [--models lr,fm,dnn] \
[--batches 512,1024,2048,4096,8192] [--servers 4] [--steps 5] [--set PATH=VALUE]
  Trains STEPS steps in `des` and in `sync`, and prints the bytes of a step by link, measured and by formula, as JSON.
  Then a table of the shares saved. Fails if a link deviates from its formula by more than 3 %.
  DATA has 65,536 rows or more in Criteo's layout, for `criteo`; its path is relative to the workspace. Without it,
  these rows are synthetic. --quick: batches of 512, and 3 steps.
  `cargo xtask des --links RATES` measures throughput over limited links; `--links --help` lists its arguments.";

/// Columns of an embedding, as in the paper.
const DIM: u32 = 8;
/// Ids of each feature of [`Rows::Wide`], and the exponent of Zipf's law.
const WIDE_VOCABULARY: u64 = 1_000_000_000;
const WIDE_EXPONENT: f64 = 1.3;
/// Units of the first layer of `dnn`. The ratios of the paper follow from this number.
const UNITS: u32 = 256;
/// The models of the full form.
const MODELS: [Model; 3] = [Model::Lr, Model::Fm(DIM), Model::Dnn(Tower { dim: DIM, units: UNITS })];
/// Rows of DATA that are read. Each batch size of the paper divides it.
const FILE_ROWS: u32 = 65_536;
/// The most that a link may deviate from its formula.
const ALLOWED: f64 = 0.03;
/// The end of a job without an end.
const MANY: u64 = 1_000_000_000;

#[derive(Clone, Debug, PartialEq)]
struct Plan {
    rows: Vec<Rows>,
    path: Option<String>,
    models: Vec<Model>,
    batches: Vec<u32>,
    servers: u32,
    steps: u32,
    sets: Vec<String>,
}

/// The rows that a job trains on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    Criteo,
    Wide,
    Lists,
}

/// A job that trains in both modes.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: Rows,
    model: Model,
    batch: u32,
}

/// The figures of a case.
#[derive(Clone, Copy, Debug)]
struct Compared {
    case: Case,
    des: Measured,
    sync: Measured,
    servers: u32,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a run that fails; bytes that deviate from their formula.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    if arguments.contains(&"--links") {
        return speed::run(arguments);
    }
    let plan = parse(arguments)?;
    build_programs()?;
    let folder = temporary_folder("des");
    make_folder(&folder)?;
    let compared = compare_all(&plan, &folder);
    let removed = remove_folder(&folder);
    let compared = compared?;
    removed?;
    println!("\n{}", table(&compared));
    check(&compared)
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let (is_quick, pairs) = without_quick(arguments);
    let mut plan = if is_quick { quick() } else { full() };
    for pair in pairs.chunks(2) {
        match pair {
            ["--rows", rows] => plan.rows = all(rows, Rows::named)?,
            ["--path", path] => plan.path = Some((*path).to_owned()),
            ["--models", models] => plan.models = all(models, model)?,
            ["--batches", batches] => plan.batches = all(batches, |batch| batch.parse().ok())?,
            ["--servers", servers] => plan.servers = number(servers, USAGE)?,
            ["--steps", steps] => plan.steps = number(steps, USAGE)?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    Ok(plan)
}

fn full() -> Plan {
    Plan {
        rows: vec![Rows::Criteo, Rows::Wide, Rows::Lists],
        path: None,
        models: MODELS.to_vec(),
        batches: vec![512, 1024, 2048, 4096, 8192],
        servers: 4,
        steps: 5,
        sets: Vec::new(),
    }
}

fn quick() -> Plan {
    Plan { batches: vec![512], steps: 3, ..full() }
}

/// Every entry of `a,b`, as `read` understands it.
fn all<T>(text: &str, read: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, HarnessError> {
    list(text).iter().map(|entry| read(entry).ok_or(HarnessError::Usage(USAGE))).collect()
}

fn model(name: &str) -> Option<Model> {
    MODELS.into_iter().find(|model| model.name() == name)
}

impl Rows {
    fn named(name: &str) -> Option<Self> {
        [Self::Criteo, Self::Wide, Self::Lists].into_iter().find(|rows| rows.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Criteo => "criteo",
            Self::Wide => "wide",
            Self::Lists => "lists",
        }
    }

    /// Sparse features.
    fn features(self) -> u32 {
        match self {
            Self::Criteo => 26,
            Self::Wide => 950,
            Self::Lists => lists::FEATURES,
        }
    }

    /// Ids of a sample in each feature.
    fn values(self) -> u32 {
        if self == Self::Lists { lists::VALUES } else { 1 }
    }

    /// An entry of `spec.features.sparse`. The ids of a cell are summed, so x is 1 as in the paper.
    fn sparse(self) -> Value {
        let name = format!("C{{1..{}}}", self.features());
        match self {
            Self::Criteo | Self::Wide => json!({ "name": name }),
            Self::Lists => {
                let separator = lists::SEPARATOR.to_string();
                json!({ "name": name, "multiValue": { "separator": separator }, "pooling": "sum" })
            }
        }
    }

    /// `spec.data`. With an exponent of 1.3, 950 features have 158,000 distinct ids in 512 samples
    /// and 1.33 million in 8,192. The paper has 148,000 and 1.39 million.
    fn data(self, path: Option<&str>) -> Value {
        match (self, path) {
            (Self::Criteo, Some(path)) => json!({
                "format": "tsv", "csv": { "columns": ["label", "I{1..13}", "C{1..26}"] },
                "source": { "paths": [path] }, "split": { "position": { "trainRows": FILE_ROWS } },
            }),
            (Self::Criteo, None) => json!({ "synthetic": { "rows": MANY, "testRows": 100 } }),
            (Self::Wide, _) => {
                let (vocabulary, exponent) = (WIDE_VOCABULARY, WIDE_EXPONENT);
                let synthetic =
                    json!({ "rows": MANY, "testRows": 100, "vocabulary": vocabulary, "zipfExponent": exponent });
                json!({ "synthetic": synthetic })
            }
            (Self::Lists, path) => json!({ "train": { "paths": [path] } }),
        }
    }
}

/// The manifest of a case in one mode. `path` has the rows, unless they are synthetic.
fn manifest(case: Case, mode: &str, path: Option<&str>, servers: u32) -> Value {
    let mut model = json!({ "kind": case.model.name() });
    if case.model.dim() > 0 {
        model["embeddingDim"] = json!(case.model.dim());
    }
    if let Model::Dnn(Tower { units, .. }) = case.model {
        model["hidden"] = json!([units]);
    }
    json!({
        "apiVersion": "rectrain.dev/v1alpha1",
        "kind": "RecTrainingJob",
        "metadata": { "name": "des" },
        "spec": {
            "model": model,
            "features": { "sparse": [case.rows.sparse()] },
            "data": case.rows.data(path),
            "training": {
                "mode": mode, "globalBatchSize": case.batch, "steps": MANY, "sync": { "lookAhead": 0 },
            },
            "roles": { "ps": { "replicas": servers } },
        },
    })
}

fn compare_all(plan: &Plan, folder: &Path) -> Result<Vec<Compared>, TrialError> {
    let mut compared = Vec::new();
    for &rows in &plan.rows {
        for &model in &plan.models {
            for &batch in &plan.batches {
                compared.push(compare(Case { rows, model, batch }, plan, folder)?);
            }
        }
    }
    Ok(compared)
}

/// Trains a case in both modes, and prints its figures.
fn compare(case: Case, plan: &Plan, folder: &Path) -> Result<Compared, TrialError> {
    let path = path(case, plan, folder)?;
    let train = |mode| {
        let manifest = manifest(case, mode, path.as_deref(), plan.servers);
        let has_first_layer = mode == "des" && matches!(case.model, Model::Dnn(_));
        let Plan { sets, servers, steps, .. } = plan;
        let job = Job { manifest: &manifest, sets, servers: *servers, steps: *steps, has_first_layer };
        measure(&job, folder)
    };
    let compared = Compared { case, des: train("des")?, sync: train("sync")?, servers: plan.servers };
    println!("{}", compared.line());
    Ok(compared)
}

/// The file with the rows of a case. `None` if they are synthetic.
fn path(case: Case, plan: &Plan, folder: &Path) -> Result<Option<String>, HarnessError> {
    if case.rows != Rows::Lists {
        return Ok(plan.path.clone());
    }
    // Two batches, which are read again and again.
    let file = folder.join("lists.csv");
    lists::write(&file, 2 * case.batch)?;
    Ok(Some(file.display().to_string()))
}

impl Compared {
    fn step(&self, measured: &Measured) -> Step {
        let Case { rows, model, batch } = self.case;
        Step {
            model,
            batch: f64::from(batch),
            features: f64::from(rows.features()),
            values: f64::from(rows.values()),
            unique: measured.unique,
            servers: f64::from(self.servers),
        }
    }

    /// The formula of each mode, with the distinct ids of its own run.
    fn formulas(&self) -> [(&'static str, Measured, Bytes); 2] {
        let Self { des, sync, .. } = *self;
        [("des", des, self.step(&des).des()), ("sync", sync, self.step(&sync).sync())]
    }

    /// The largest deviation of a link from its formula.
    fn deviation(&self) -> f64 {
        self.formulas().iter().map(|(_, measured, formula)| deviation(&measured.bytes, formula)).fold(0.0, f64::max)
    }

    /// The share of the bytes of some links that `des` saves.
    fn saved(&self, des: &[usize], sync: &[usize]) -> f64 {
        saved(sum(&self.des.bytes, des), sum(&self.sync.bytes, sync))
    }

    /// The bytes of the links of parameter servers that are saved. They include the first layer.
    fn saved_to_servers(&self) -> f64 {
        self.saved(&[0, 1, 2, 5, 6], &[0, 1, 2])
    }

    /// As [`Self::saved_to_servers`] without the ids of `des`. In the paper every process reads all
    /// samples, so no ids travel.
    fn saved_without_ids(&self) -> f64 {
        self.saved(&[1, 2, 5, 6], &[0, 1, 2])
    }

    /// The bytes between embedding and dense worker that are saved.
    fn saved_to_dense_worker(&self) -> f64 {
        self.saved(&[3, 4], &[3, 4])
    }

    fn saved_in_all(&self) -> f64 {
        self.saved(&[0, 1, 2, 3, 4, 5, 6], &[0, 1, 2, 3, 4])
    }

    /// A line of JSON.
    fn line(&self) -> Value {
        let paper = self.step(&self.sync).paper();
        let mut line = json!({
            "rows": self.case.rows.name(), "model": self.case.model.name(), "batch": self.case.batch,
            "servers": self.servers, "uniqueIds": self.sync.unique.round(),
            "paper": { "desBytes": paper.des.round(), "meshBytes": paper.mesh.round(), "saved": paper.saved() },
            "saved": {
                "withoutIds": self.saved_without_ids(), "servers": self.saved_to_servers(),
                "denseWorker": self.saved_to_dense_worker(), "all": self.saved_in_all(),
            },
        });
        for (mode, measured, formula) in self.formulas() {
            line[mode] = json!({
                "steps": measured.steps, "bytes": by_link(&measured.bytes), "formula": by_link(&formula),
                "deviation": deviation(&measured.bytes, &formula),
            });
        }
        line
    }

    /// A row of the table.
    fn row(&self) -> String {
        let paper = self.step(&self.sync).paper().saved();
        let shares = [
            paper,
            self.saved_without_ids(),
            self.saved_to_servers(),
            self.saved_to_dense_worker(),
            self.saved_in_all(),
        ];
        let cells: Vec<String> = shares.iter().map(|share| format!("{:.2} %", 100.0 * share)).collect();
        let Case { rows, model, batch } = self.case;
        format!(
            "| {} | {} | {batch} | {:.0} | {} | {:.2} % |",
            rows.name(),
            model.name(),
            self.sync.unique,
            cells.join(" | "),
            100.0 * self.deviation()
        )
    }
}

fn sum(bytes: &Bytes, links: &[usize]) -> f64 {
    links.iter().filter_map(|link| bytes.get(*link)).sum()
}

fn by_link(bytes: &Bytes) -> Map<String, Value> {
    LINKS.iter().zip(bytes).map(|(link, bytes)| ((*link).to_owned(), json!(bytes.round()))).collect()
}

fn table(compared: &[Compared]) -> String {
    let head = "| rows | model | batch | unique ids | saved: paper's formula | servers, without ids | servers \
                | dense worker | all | largest deviation |\n|---|---|---|---|---|---|---|---|---|---|";
    let rows: Vec<String> = compared.iter().map(Compared::row).collect();
    format!("{head}\n{}", rows.join("\n"))
}

/// Fails if a link deviates from its formula by more than [`ALLOWED`].
fn check(compared: &[Compared]) -> Result<(), TrialError> {
    let worst = compared.iter().max_by(|a, b| a.deviation().total_cmp(&b.deviation()));
    let Some(worst) = worst.filter(|worst| worst.deviation() > ALLOWED) else { return Ok(()) };
    Err(unmet(format!("bytes within {ALLOWED} of the formula"), worst.line()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measured bytes as the formulas have them, in `sync` times `scale`.
    fn compared(scale: f64) -> Compared {
        let case = Case { rows: Rows::Criteo, model: Model::Lr, batch: 512 };
        let measured = |bytes| Measured { steps: 5.0, unique: 1000.0, bytes };
        let nothing = measured([0.0; 7]);
        let empty = Compared { case, des: nothing, sync: nothing, servers: 4 };
        let step = empty.step(&nothing);
        let (des, sync) = (step.des(), step.sync().map(|bytes| bytes * scale));
        Compared { des: measured(des), sync: measured(sync), ..empty }
    }

    #[test]
    fn arguments_change_the_full_and_the_quick_form() {
        let plan = parse(&["--quick", "--models", "fm", "--rows", "wide", "--servers", "2"]).expect("valid");
        let expected = Plan {
            rows: vec![Rows::Wide],
            models: vec![Model::Fm(DIM)],
            servers: 2,
            steps: 3,
            batches: vec![512],
            ..full()
        };
        assert_eq!(plan, expected);
        assert_eq!(parse(&[]).expect("valid").batches, [512, 1024, 2048, 4096, 8192]);
        for wrong in [&["--models", "dlrm"][..], &["--batches", "many"], &["--path"], &["--slow", "1"]] {
            assert!(matches!(parse(wrong), Err(HarnessError::Usage(_))), "{wrong:?}");
        }
    }

    #[test]
    fn each_batch_size_divides_the_rows_of_a_file() {
        assert!(full().batches.iter().all(|batch| FILE_ROWS.is_multiple_of(*batch)));
    }

    #[test]
    fn a_manifest_has_the_features_and_the_mode_of_its_case() {
        let case = Case { rows: Rows::Wide, model: Model::Fm(DIM), batch: 2048 };
        let spec = manifest(case, "des", None, 4)["spec"].clone();
        assert_eq!(spec["features"]["sparse"][0]["name"], "C{1..950}");
        assert_eq!((&spec["model"]["embeddingDim"], &spec["training"]["mode"]), (&json!(8), &json!("des")));
        let dnn = Case { model: MODELS[2], ..case };
        let model = json!({ "kind": "dnn", "embeddingDim": 8, "hidden": [256] });
        assert_eq!(manifest(dnn, "des", None, 4)["spec"]["model"], model);
        let case = Case { rows: Rows::Criteo, model: Model::Lr, batch: 512 };
        let spec = manifest(case, "sync", Some("rows.tsv"), 4)["spec"].clone();
        assert_eq!(spec["data"]["source"]["paths"], json!(["rows.tsv"]));
        assert!(spec["model"].get("embeddingDim").is_none(), "lr has no embeddings");
        let spec = manifest(Case { rows: Rows::Lists, ..case }, "des", Some("lists.csv"), 4)["spec"].clone();
        assert_eq!(spec["data"], json!({ "train": { "paths": ["lists.csv"] } }));
        assert_eq!(spec["features"]["sparse"][0]["multiValue"]["separator"], "|");
    }

    #[test]
    fn the_trial_fails_if_a_link_deviates_from_its_formula() {
        assert!(check(&[compared(1.0), compared(1.02)]).is_ok());
        let error = check(&[compared(1.0), compared(1.05)]).expect_err("5 % is too much").to_string();
        assert!(error.contains("0.03"), "{error}");
    }

    #[test]
    fn shares_are_of_the_links_that_they_name() {
        let of = compared(2.0);
        let [look_up, results, gradients, forward, backward, ..] = of.des.bytes;
        let sync = of.sync.bytes;
        let servers = sync[0] + sync[1] + sync[2];
        let is = |found: f64, expected: f64| (found - expected).abs() < 1e-12;
        assert!(is(of.saved_to_servers(), 1.0 - (look_up + results + gradients) / servers));
        assert!(is(of.saved_without_ids(), 1.0 - (results + gradients) / servers));
        assert!(is(of.saved_to_dense_worker(), 1.0 - (forward + backward) / (sync[3] + sync[4])));
        assert!(of.row().starts_with("| criteo | lr | 512 | 1000 |"), "{}", of.row());
        assert_eq!(of.line()["des"]["bytes"]["results"], json!(results.round()));
    }
}
