//! `cargo xtask des --links RATES`: the throughput of whole jobs in `des` against `sync`, in
//! processes whose links are limited (table 4 of Rong et al. 2020 has it for a cluster of four).
//!
//! Samples have 950 synthetic ids, as in the paper. They are in a file, because drawing them takes
//! longer than reading them. `sync` has its default look-ahead. The modes run in turn, and each
//! ratio compares the runs of one round. A job without a limit shows how much of a step is
//! computing.

use std::path::Path;

use rectrain_harness::HarnessError;
use rectrain_harness::arguments::{list, number, without_quick};
use rectrain_harness::cargo::build_programs_and_examples;
use rectrain_harness::command::{command, visible};
use rectrain_harness::files::{make_folder, remove_folder, temporary_folder, write};
use rectrain_harness::markdown::{table, thousands, verdict};
use rectrain_harness::pace::{self, Paced};
use rectrain_harness::rectrain::job;
use rectrain_harness::statistics::{median, range};
use rectrain_harness::workspace::built;
use serde_json::{Value, json};

use super::{DIM, Rows, UNITS, WIDE_EXPONENT, WIDE_VOCABULARY};
use crate::TrialError;

const USAGE: &str =
    "usage: cargo xtask des --links none,1Gbit,100Mbit [--quick] [--delay 0ms] [--models lr,wideDeep,deepfm] \
[--batch 8192] [--servers 2] [--steps 8] [--from 2] [--rounds 3] [--set PATH=VALUE]
  Trains STEPS steps in `des` and in `sync` by turns, in processes with these links, and prints samples per second
  after step FROM. Then a table of ratios, and the claims: at least 1.5 for lr, 3 for wideDeep and deepfm. `none` is a
  link without limit, and has no claims. MODELS may have fm and dnn, too.
  --quick: batches of 512, 6 steps, 1 round.";

/// The models, with the claimed ratio of their throughput in `des` to `sync`. The paper has 1.55
/// for `lr`, 4.52 for `wideDeep` and 3.91 for `deepfm`.
const MODELS: [(&str, Option<f64>); 5] =
    [("lr", Some(1.5)), ("fm", None), ("dnn", None), ("wideDeep", Some(3.0)), ("deepfm", Some(3.0))];
/// A link without limit.
const NO_LIMIT: &str = "none";
const MODES: [&str; 2] = ["des", "sync"];

#[derive(Clone, Debug, PartialEq)]
struct Plan {
    links: Vec<String>,
    delay: String,
    models: Vec<&'static str>,
    batch: u32,
    servers: u32,
    steps: u64,
    from: u64,
    rounds: u32,
    sets: Vec<String>,
}

/// The figures of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Figures {
    samples_per_second: f64,
    bytes_of_step: f64,
}

/// The runs of a model over a link, by mode, in the order of their rounds.
struct Compared {
    link: String,
    model: &'static str,
    runs: [Vec<Figures>; 2],
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a run that fails.
pub(super) fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    build_programs_and_examples()?;
    let folder = temporary_folder("des-speed");
    make_folder(&folder)?;
    let compared = write_rows(&plan, &folder).and_then(|()| compare_all(&plan, &folder));
    let removed = remove_folder(&folder);
    let compared = compared?;
    removed?;
    println!("\n{}\n{}", report(&compared), claims(&compared));
    Ok(())
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let (is_quick, pairs) = without_quick(arguments);
    let mut plan = if is_quick { quick() } else { full() };
    for pair in pairs.chunks(2) {
        match pair {
            ["--links", links] if *links != "--help" => plan.links = list(links),
            ["--delay", delay] => plan.delay = (*delay).to_owned(),
            ["--models", models] => {
                plan.models = list(models).iter().map(|name| known(name)).collect::<Result<_, _>>()?
            }
            ["--batch", batch] => plan.batch = number(batch, USAGE)?,
            ["--servers", servers] => plan.servers = number(servers, USAGE)?,
            ["--steps", steps] => plan.steps = number(steps, USAGE)?,
            ["--from", from] => plan.from = number(from, USAGE)?,
            ["--rounds", rounds] => plan.rounds = number(rounds, USAGE)?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    if plan.steps > plan.from && plan.rounds > 0 { Ok(plan) } else { Err(HarnessError::Usage(USAGE)) }
}

fn full() -> Plan {
    Plan {
        links: Vec::new(),
        delay: "0ms".to_owned(),
        models: MODELS.iter().filter(|(_, claim)| claim.is_some()).map(|(name, _)| *name).collect(),
        batch: 8192,
        servers: 2,
        steps: 8,
        from: 2,
        rounds: 3,
        sets: Vec::new(),
    }
}

fn quick() -> Plan {
    Plan { batch: 512, steps: 6, rounds: 1, ..full() }
}

fn known(name: &str) -> Result<&'static str, HarnessError> {
    let found = MODELS.iter().find(|(known, _)| *known == name);
    found.map(|(known, _)| *known).ok_or(HarnessError::Usage(USAGE))
}

/// Writes the rows of all steps to `train.tsv`. The loader also reads some batches ahead.
fn write_rows(plan: &Plan, folder: &Path) -> Result<(), TrialError> {
    let rows = u64::from(plan.batch) * (plan.steps + 4);
    let numbers = [rows, 1, WIDE_VOCABULARY, u64::from(Rows::Wide.features())].map(|number| number.to_string());
    let mut example = command(built("examples/write_rows")?, [folder]);
    Ok(visible(example.args(numbers).arg(WIDE_EXPONENT.to_string()))?)
}

fn compare_all(plan: &Plan, folder: &Path) -> Result<Vec<Compared>, TrialError> {
    let mut all = Vec::new();
    for link in &plan.links {
        for &model in &plan.models {
            let mut compared = Compared { link: link.clone(), model, runs: [Vec::new(), Vec::new()] };
            for round in 1..=plan.rounds {
                for (mode, runs) in MODES.into_iter().zip(&mut compared.runs) {
                    let figures = measure(plan, link, model, mode, folder)?;
                    println!("{}", line(round, link, model, mode, figures));
                    runs.push(figures);
                }
            }
            all.push(compared);
        }
    }
    Ok(all)
}

/// Trains a model in one mode.
fn measure(plan: &Plan, link: &str, model: &str, mode: &str, folder: &Path) -> Result<Figures, TrialError> {
    let file = folder.join("job.json");
    write(&file, manifest(plan, model, mode, &folder.join("train.tsv")).to_string())?;
    let mut job = job(&file.display().to_string(), &plan.sets)?;
    job.arg("--processes");
    if link != NO_LIMIT {
        job.args(["--link", &format!("{link},{}", plan.delay)]);
    }
    let part = format!("{mode} with {model} over {link}");
    Ok(figures(&pace::run(job, plan.from).map_err(TrialError::part(part))?))
}

fn figures(paced: &Paced) -> Figures {
    Figures { samples_per_second: paced.samples_per_second, bytes_of_step: paced.bytes_of_step() }
}

fn manifest(plan: &Plan, kind: &str, mode: &str, rows: &Path) -> Value {
    let mut model = json!({ "kind": kind });
    if kind != "lr" {
        model["embeddingDim"] = json!(DIM);
    }
    if !["lr", "fm"].contains(&kind) {
        model["hidden"] = json!([UNITS]);
    }
    json!({
        "apiVersion": "rectrain.dev/v1alpha1",
        "kind": "RecTrainingJob",
        "metadata": { "name": "des-speed" },
        "spec": {
            "model": model,
            "features": { "sparse": [Rows::Wide.sparse()] },
            "data": { "train": { "paths": [rows] } },
            "training": { "mode": mode, "globalBatchSize": plan.batch, "steps": plan.steps },
            "roles": { "ps": { "replicas": plan.servers } },
        },
    })
}

/// A run as a line of JSON.
fn line(round: u32, link: &str, model: &str, mode: &str, figures: Figures) -> Value {
    json!({
        "round": round, "link": link, "model": model, "mode": mode,
        "samplesPerSecond": figures.samples_per_second, "bytesOfStep": figures.bytes_of_step.round(),
    })
}

impl Compared {
    /// The throughput of `des` over the throughput of `sync`, in each round.
    fn ratios(&self) -> Vec<f64> {
        let [des, sync] = &self.runs;
        des.iter().zip(sync).map(|(des, sync)| des.samples_per_second / sync.samples_per_second).collect()
    }

    /// The medians of both modes.
    fn medians(&self, figure: impl Fn(&Figures) -> f64) -> [f64; 2] {
        [0, 1].map(|mode| median(self.runs[mode].iter().map(&figure).collect()))
    }

    /// A row of the table.
    fn row(&self) -> Vec<String> {
        let speeds = self.medians(|figures| figures.samples_per_second).map(|speed| thousands(speed.round() as u64));
        let megabytes = self.medians(|figures| figures.bytes_of_step / 1e6).map(|bytes| format!("{bytes:.1}"));
        let (low, high) = range(&self.ratios());
        let ratio = format!("{:.2} ({low:.2} to {high:.2})", median(self.ratios()));
        let first = [self.link.clone(), self.model.to_owned()];
        first.into_iter().chain(speeds).chain([ratio]).chain(megabytes).collect()
    }

    /// The claim about this model. `None` without a limit.
    fn claim(&self) -> Option<String> {
        let least = MODELS.iter().find(|(name, _)| *name == self.model)?.1?;
        let (link, model, ratio) = (&self.link, self.model, median(self.ratios()));
        let is_true = ratio >= least;
        let claim = format!(
            "{model} over {link}: {ratio:.2} × the throughput of sync, at least {least}: {}.",
            verdict(is_true)
        );
        (link != NO_LIMIT).then_some(claim)
    }
}

fn report(compared: &[Compared]) -> String {
    let header = ["link", "model", "des, samples/s", "sync, samples/s", "ratio", "des, MB a step", "sync, MB a step"];
    table(&header, compared.iter().map(Compared::row).collect())
}

fn claims(compared: &[Compared]) -> String {
    compared.iter().filter_map(Compared::claim).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(link: &str, model: &'static str, des: &[f64], sync: &[f64]) -> Compared {
        let runs = [des, sync].map(|speeds| {
            let of = |speed: &f64| Figures { samples_per_second: *speed, bytes_of_step: 2.5e6 };
            speeds.iter().map(of).collect()
        });
        Compared { link: link.to_owned(), model, runs }
    }

    #[test]
    fn arguments_choose_links_and_models() {
        let plan = parse(&["--links", "none,1Gbit", "--models", "lr,dnn", "--quick", "--delay", "5ms"]).unwrap();
        let expected = Plan {
            links: vec!["none".to_owned(), "1Gbit".to_owned()],
            delay: "5ms".to_owned(),
            models: vec!["lr", "dnn"],
            ..quick()
        };
        assert_eq!(plan, expected);
        let plan = parse(&["--links", "1Gbit"]).unwrap();
        assert_eq!((plan.batch, plan.models), (8192, vec!["lr", "wideDeep", "deepfm"]));
        for wrong in
            [&["--links"][..], &["--links", "--help"], &["--models", "dlrm"], &["--steps", "2"], &["--rounds", "0"]]
        {
            assert!(matches!(parse(wrong), Err(HarnessError::Usage(_))), "{wrong:?}");
        }
    }

    #[test]
    fn a_manifest_has_the_shape_of_the_paper() {
        let plan = parse(&["--links", "1Gbit"]).unwrap();
        let spec = manifest(&plan, "deepfm", "des", Path::new("train.tsv"))["spec"].clone();
        assert_eq!(spec["model"], json!({ "kind": "deepfm", "embeddingDim": 8, "hidden": [256] }));
        assert_eq!(spec["features"]["sparse"], json!([{ "name": "C{1..950}" }]));
        assert_eq!(spec["data"], json!({ "train": { "paths": ["train.tsv"] } }));
        assert_eq!(spec["training"], json!({ "mode": "des", "globalBatchSize": 8192, "steps": 8 }));
        assert_eq!(
            manifest(&plan, "fm", "sync", Path::new("train.tsv"))["spec"]["model"],
            json!({ "kind": "fm", "embeddingDim": 8 })
        );
        assert_eq!(manifest(&plan, "lr", "sync", Path::new("train.tsv"))["spec"]["model"], json!({ "kind": "lr" }));
    }

    #[test]
    fn a_ratio_compares_the_runs_of_one_round() {
        let of = compared("1Gbit", "lr", &[30.0, 40.0, 100.0], &[20.0, 20.0, 80.0]);
        assert_eq!(of.ratios(), [1.5, 2.0, 1.25]);
        let expected = ["1Gbit", "lr", "40", "20", "1.50 (1.25 to 2.00)", "2.5", "2.5"];
        assert_eq!(of.row(), expected);
    }

    #[test]
    fn claims_are_about_limited_links_and_models_of_the_paper() {
        let all = [
            compared("1Gbit", "lr", &[3.0], &[2.0]),
            compared("1Gbit", "deepfm", &[5.0], &[2.0]),
            compared("1Gbit", "dnn", &[9.0], &[1.0]),
            compared("none", "lr", &[9.0], &[1.0]),
        ];
        let expected = "lr over 1Gbit: 1.50 × the throughput of sync, at least 1.5: holds.\n\
                        deepfm over 1Gbit: 2.50 × the throughput of sync, at least 3: does not hold.";
        assert_eq!(claims(&all), expected);
    }
}
