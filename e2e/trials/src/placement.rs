//! `cargo xtask placement`: how evenly parameter servers share the look-ups of public and synthetic
//! rows, by the placements that `rectrain data placement` compares (ShadowSync, Zheng et al. 2020,
//! section 3.1).

use std::path::Path;

use rectrain_harness::HarnessError;
use rectrain_harness::arguments::without_quick;
use rectrain_harness::cargo::build_programs;
use rectrain_harness::command::{command, output};
use rectrain_harness::events::{missing, parse as parse_json};
use rectrain_harness::files::{remove_folder, temporary_folder, write};
use rectrain_harness::workspace::built;
use serde_json::{Value, json};

use crate::TrialError;
use crate::error::unmet;

const USAGE: &str = "usage: cargo xtask placement [--quick] [--data FOLDER] [--servers 2,3,5,8]
  FOLDER has criteo-dac-80k/dac_sample_first80k.tsv.gz and ml-1m-reconstructed/ratings.csv.gz. Without it, only the
  synthetic rows are read: 26 features with 3 to 100,000 ids, and Zipf's law with exponent 1.2. --quick: 50,000 rows
  of each. Prints a line of JSON for each data set and number of servers, and a table. Fails if the busiest server of
  the balanced slots has more than 1.1 of the mean, or the fields by f mod N are not less even.";

/// The most that the busiest server of balanced slots may have, over the mean.
const ALLOWED: f64 = 1.1;
const FULL_ROWS: &str = "1000000";
const QUICK_ROWS: &str = "50000";
/// The figures of a placement, in the order of the table.
const COLUMNS: [(&str, &str); 5] = [
    ("fieldsModulo", "fields: f mod N"),
    ("fieldsBalanced", "fields: balanced"),
    ("fieldsAtBest", "fields: at best"),
    ("slotsEven", "slots: at the start"),
    ("slotsBalanced", "slots: balanced"),
];

struct Plan {
    data: Option<String>,
    servers: String,
    rows: &'static str,
}

/// Rows, and the features in them.
struct DataSet {
    name: &'static str,
    sparse: &'static [&'static str],
    data: Value,
}

/// The figures of a data set on a number of servers, in the order of [`COLUMNS`].
#[derive(Debug, PartialEq)]
struct Figures {
    data: &'static str,
    servers: u64,
    imbalances: Vec<f64>,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a run that fails; the failures that the usage lists.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    build_programs()?;
    let folder = temporary_folder("placement");
    let measured = measure(&plan, &folder);
    let removed = remove_folder(&folder);
    let measured = measured?;
    removed?;
    println!("\n{}", table(&measured));
    measured.iter().try_for_each(check)
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let (is_quick, pairs) = without_quick(arguments);
    let rows = if is_quick { QUICK_ROWS } else { FULL_ROWS };
    let mut plan = Plan { data: None, servers: "2,3,5,8".to_owned(), rows };
    for pair in pairs.chunks(2) {
        match pair {
            ["--data", folder] => plan.data = Some((*folder).to_owned()),
            ["--servers", servers] => plan.servers = (*servers).to_owned(),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    Ok(plan)
}

/// The data sets of a folder, and synthetic rows.
fn data_sets(folder: Option<&str>) -> Vec<DataSet> {
    let synthetic = json!({ "synthetic": { "rows": 1_000_000, "testRows": 1, "zipfExponent": 1.2 } });
    let mut sets = vec![DataSet { name: "zipf-1.2", sparse: &["C{1..26}"], data: synthetic }];
    if let Some(folder) = folder {
        let criteo = json!({
            "format": "tsv", "csv": { "columns": ["label", "I{1..13}", "C{1..26}"] },
            "train": { "paths": [format!("{folder}/criteo-dac-80k/dac_sample_first80k.tsv.gz")] },
        });
        let movielens = json!({ "train": { "paths": [format!("{folder}/ml-1m-reconstructed/ratings.csv.gz")] } });
        sets.push(DataSet { name: "criteo-dac-80k", sparse: &["C{1..26}"], data: criteo });
        sets.push(DataSet { name: "ml-1m", sparse: &["user_id", "movie_id"], data: movielens });
    }
    sets
}

fn manifest(set: &DataSet) -> Value {
    let sparse: Vec<Value> = set.sparse.iter().map(|name| json!({ "name": name })).collect();
    json!({
        "apiVersion": "rectrain.dev/v1alpha1",
        "kind": "RecTrainingJob",
        "metadata": { "name": "placement" },
        "spec": {
            "model": { "kind": "deepfm", "embeddingDim": 16, "hidden": [64] },
            "features": { "sparse": sparse },
            "data": set.data,
        },
    })
}

fn measure(plan: &Plan, folder: &Path) -> Result<Vec<Figures>, TrialError> {
    let mut measured = Vec::new();
    for set in data_sets(plan.data.as_deref()) {
        let file = folder.join(format!("{}.json", set.name));
        write(&file, manifest(&set).to_string())?;
        let mut placement = command(built("rectrain")?, ["data", "placement", "--json"]);
        placement.args(["--servers", &plan.servers, "--sample", plan.rows]).arg(&file);
        let report = parse_json("the report of `rectrain data placement`", &output(&mut placement)?)?;
        let figures = read(set.name, &report)?;
        for of in &figures {
            println!("{}", of.line());
        }
        measured.extend(figures);
    }
    Ok(measured)
}

fn read(data: &'static str, report: &Value) -> Result<Vec<Figures>, HarnessError> {
    let no = |field: &str| missing("the report", report, field);
    let placements = report["placements"].as_array().ok_or_else(|| no("placements"))?;
    let of_servers = |placement: &Value| -> Result<Figures, HarnessError> {
        let servers = placement["servers"].as_u64().ok_or_else(|| no("servers"))?;
        let imbalance = |(field, _): &(&str, &str)| placement[*field].as_f64().ok_or_else(|| no(field));
        Ok(Figures { data, servers, imbalances: COLUMNS.iter().map(imbalance).collect::<Result<_, _>>()? })
    };
    placements.iter().map(of_servers).collect()
}

impl Figures {
    fn of(&self, column: &str) -> f64 {
        let found = COLUMNS.iter().zip(&self.imbalances).find(|((field, _), _)| *field == column);
        found.map_or(f64::NAN, |(_, imbalance)| *imbalance)
    }

    fn line(&self) -> Value {
        let mut line = json!({ "data": self.data, "servers": self.servers });
        for ((field, _), imbalance) in COLUMNS.iter().zip(&self.imbalances) {
            line[*field] = json!(imbalance);
        }
        line
    }

    fn row(&self) -> String {
        let cells: Vec<String> = self.imbalances.iter().map(|imbalance| format!("{imbalance:.3}")).collect();
        format!("| {} | {} | {} |", self.data, self.servers, cells.join(" | "))
    }
}

fn table(measured: &[Figures]) -> String {
    let names: Vec<&str> = COLUMNS.iter().map(|(_, name)| *name).collect();
    let rows: Vec<String> = measured.iter().map(Figures::row).collect();
    format!(
        "| max/mean of look-up cost | servers | {} |\n|---|---|{}\n{}",
        names.join(" | "),
        "---|".repeat(names.len()),
        rows.join("\n")
    )
}

fn check(figures: &Figures) -> Result<(), TrialError> {
    let (balanced, modulo) = (figures.of("slotsBalanced"), figures.of("fieldsModulo"));
    if balanced <= ALLOWED && balanced < modulo {
        return Ok(());
    }
    let expected = format!("balanced slots within {ALLOWED} of the mean, and more even than f mod N");
    Err(unmet(expected, figures.line()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(balanced: f64) -> Value {
        json!({ "placements": [{
            "servers": 3, "fieldsModulo": 1.5, "fieldsBalanced": 1.25, "fieldsAtBest": 1.125, "slotsEven": 1.07,
            "slotsBalanced": balanced, "fields": [["a"], ["b"], []],
        }] })
    }

    #[test]
    fn the_figures_of_a_report_are_a_row_and_are_checked() {
        let figures = read("rows", &report(1.03)).expect("complete");
        assert_eq!(figures[0].row(), "| rows | 3 | 1.500 | 1.250 | 1.125 | 1.070 | 1.030 |");
        assert_eq!(figures[0].line()["slotsBalanced"], json!(1.03));
        assert!(check(&figures[0]).is_ok());
        for wrong in [1.2, 1.6] {
            let error = check(&read("rows", &report(wrong)).expect("complete")[0]).expect_err("too uneven").to_string();
            assert!(error.contains("1.1 of the mean"), "{error}");
        }
    }

    #[test]
    fn a_report_without_a_figure_is_refused() {
        let mut report = report(1.0);
        report["placements"][0]["slotsEven"] = Value::Null;
        let error = read("rows", &report).expect_err("incomplete").to_string();
        assert!(error.contains("slotsEven"), "{error}");
    }

    #[test]
    fn public_rows_need_a_folder() {
        let names = |folder| data_sets(folder).iter().map(|set| set.name).collect::<Vec<_>>();
        assert_eq!(names(None), ["zipf-1.2"]);
        assert_eq!(names(Some("d")), ["zipf-1.2", "criteo-dac-80k", "ml-1m"]);
        assert_eq!(manifest(&data_sets(Some("d"))[2])["spec"]["features"]["sparse"][1]["name"], "movie_id");
        assert!(matches!(parse(&["--data"]), Err(HarnessError::Usage(_))));
        assert_eq!(parse(&["--quick", "--servers", "4"]).expect("valid").servers, "4");
    }
}
