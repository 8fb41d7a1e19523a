//! `cargo xtask kraken`: the experiments of Kraken (Xie et al., SC 2020, §V-C and §V-D) on public
//! data. They compare tables within a budget with hashed tables, the policies of admission and
//! eviction, and the optimizers of rows. docs/development/measurements.md shows figures.

mod bench;
mod dataset;
mod division;
mod experiment;
mod fig10;
mod fig8;
mod fig9;
mod lab;
mod levels;
mod limit;
mod notebook;
mod profile;
mod report;
mod soaks;
mod table4;
mod variant;

use std::path::{Path, PathBuf};

use rectrain_harness::arguments::{list, number};
use rectrain_harness::cargo::build_programs;
use rectrain_harness::notebook::read as read_lines;
use rectrain_harness::workspace::{built, cache};
use rectrain_harness::{HarnessError, say};

use self::bench::{Bench, Prepared};
use self::dataset::{DATA_SETS, DataSet};
use self::experiment::{EXPERIMENTS, Experiment};
use self::lab::Counter;
use self::limit::Limit;
use self::notebook::Notebook;
use self::variant::{MODELS, Model};
use crate::TrialError;

const USAGE: &str =
    "usage: cargo xtask kraken --data FOLDER [--experiment NAME]... [--dataset a,b] [--model a,b] [--seeds 3] \
[--set PATH=VALUE]... [--binary FILE] [--out FILE [--minutes 9]]
       cargo xtask kraken --report FILE
  FOLDER has criteo-dac-80k/dac_sample_first80k.tsv.gz and ml-1m-reconstructed/ratings.csv.gz. Prints one line of JSON
  for each result. An experiment is fig8, fig9, fig10 or table4; without any, all run, which takes hours.
  Datasets: criteo-dac-80k, ml-1m, or criteo and ml. Models: deepfm, wideDeep, dnn, dcnV2; fig9 and fig10 take the
  first one only. PATH=VALUE is an override of every run, after the experiment's own. FILE of --binary is a built
  `rectrain`; without it, the command builds one.
  --out appends the runs and the results to a file. A run that the file has is not repeated. With --minutes, no run
  begins that would end later: the command then fails, and the same command goes on. Give each file to one binary.
  --report prints the tables of docs/development/measurements.md from such a file, which may have the lines of
  `rectrain-bench managed --json` and `rectrain-bench store --managed --json` as well.";

struct Plan {
    data: PathBuf,
    experiments: Vec<&'static Experiment>,
    datasets: Vec<&'static DataSet>,
    models: Vec<Model>,
    seeds: u64,
    sets: Vec<String>,
    binary: Option<PathBuf>,
    out: Option<PathBuf>,
    minutes: Option<f64>,
    report: Option<PathBuf>,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; data that cannot be read; a run that fails.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    if let Some(file) = &plan.report {
        return print_report(file);
    }
    let mut limit = Limit::new(plan.minutes);
    let mut notebook = Notebook::open(plan.out.as_deref())?;
    let binary = binary(&plan)?;
    let work = cache()?.join("kraken");
    for set in &plan.datasets {
        let data = Prepared::new(set, &plan.data, &work)?;
        for experiment in &plan.experiments {
            if experiment.needs_times && !set.has_times() {
                say(format!("{} leaves out {}: its rows have no times", experiment.name, set.name));
                continue;
            }
            run_experiment(experiment, (&data, &binary), &plan, (&mut notebook, &mut limit))?;
        }
    }
    Ok(())
}

fn print_report(file: &Path) -> Result<(), TrialError> {
    let lines = read_lines(file)?;
    print!("{}", report::report(&lines));
    Ok(())
}

fn run_experiment(
    experiment: &Experiment,
    (data, binary): (&Prepared, &Path),
    plan: &Plan,
    (notebook, limit): (&mut Notebook, &mut Limit),
) -> Result<(), TrialError> {
    let mut counter = Counter { seeds: plan.seeds, runs: 0 };
    (experiment.run)(&data.profile, &mut counter)?;
    for &model in experiment.models(&plan.models) {
        let mut bench = Bench {
            binary,
            data,
            experiment: experiment.name,
            model,
            seeds: plan.seeds,
            sets: &plan.sets,
            notebook: &mut *notebook,
            limit: &mut *limit,
            all: counter.runs,
            done: 0,
        };
        (experiment.run)(&data.profile, &mut bench)?;
    }
    Ok(())
}

/// The `rectrain` to run.
fn binary(plan: &Plan) -> Result<PathBuf, HarnessError> {
    if let Some(binary) = &plan.binary {
        return Ok(binary.clone());
    }
    build_programs()?;
    built("rectrain")
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let mut plan = Plan {
        data: PathBuf::new(),
        experiments: Vec::new(),
        datasets: DATA_SETS.iter().collect(),
        models: MODELS.to_vec(),
        seeds: 3,
        sets: Vec::new(),
        binary: None,
        out: None,
        minutes: None,
        report: None,
    };
    for pair in arguments.chunks(2) {
        match pair {
            ["--data", folder] => plan.data = PathBuf::from(folder),
            ["--experiment", name] => plan.experiments.push(named(&EXPERIMENTS, name, |experiment| experiment.name)?),
            ["--dataset" | "--datasets", names] => {
                let names = list(names);
                let sets = names.iter().map(|name| named(&DATA_SETS, name, |set| set.name));
                plan.datasets = sets.collect::<Result<_, _>>()?;
            }
            ["--model" | "--models", names] => {
                let names = list(names);
                let models = names.iter().map(|name| named(&MODELS, name, |model| model.kind).copied());
                plan.models = models.collect::<Result<_, _>>()?;
            }
            ["--seeds", seeds] => plan.seeds = number(seeds, USAGE)?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            ["--binary", file] => plan.binary = Some(PathBuf::from(file)),
            ["--out", file] => plan.out = Some(PathBuf::from(file)),
            ["--minutes", minutes] => plan.minutes = Some(number(minutes, USAGE)?),
            ["--report", file] => plan.report = Some(PathBuf::from(file)),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    if plan.experiments.is_empty() {
        plan.experiments = EXPERIMENTS.iter().collect();
    }
    if is_complete(&plan) { Ok(plan) } else { Err(HarnessError::Usage(USAGE)) }
}

/// A limit needs a file, or its runs would be lost.
fn is_complete(plan: &Plan) -> bool {
    let has_limit = plan.minutes.is_none_or(|minutes| minutes > 0.0 && plan.out.is_some());
    plan.report.is_some() || !plan.data.as_os_str().is_empty() && plan.seeds > 0 && has_limit
}

/// The entry of a list with this name, or with this first word of its name.
fn named<'l, T>(list: &'l [T], name: &str, name_of: fn(&T) -> &'static str) -> Result<&'l T, HarnessError> {
    let has_name = |entry: &&T| name_of(entry) == name || name_of(entry).split('-').next() == Some(name);
    list.iter().find(has_name).ok_or(HarnessError::Usage(USAGE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_selection_everything_runs() {
        let plan = parse(&["--data", "d"]).unwrap();
        assert_eq!((plan.experiments.len(), plan.datasets.len(), plan.models.len(), plan.seeds), (4, 2, 4, 3));
    }

    #[test]
    fn parts_of_the_experiments_can_be_selected() {
        let plan = parse(&[
            "--data",
            "d",
            "--experiment",
            "fig9",
            "--experiment",
            "fig8",
            "--datasets",
            "ml-1m",
            "--models",
            "dnn,deepfm",
            "--seeds",
            "1",
            "--set",
            "a=1",
            "--set",
            "b=2",
            "--binary",
            "b",
        ])
        .unwrap();
        assert_eq!(plan.experiments.iter().map(|experiment| experiment.name).collect::<Vec<_>>(), ["fig9", "fig8"]);
        assert_eq!(plan.datasets.iter().map(|set| set.name).collect::<Vec<_>>(), ["ml-1m"]);
        assert_eq!(plan.models.iter().map(|model| model.kind).collect::<Vec<_>>(), ["dnn", "deepfm"]);
        assert_eq!((plan.seeds, plan.binary), (1, Some(PathBuf::from("b"))));
        assert_eq!(plan.sets, ["a=1", "b=2"]);
    }

    #[test]
    fn a_piece_of_an_experiment_has_a_file_and_a_limit() {
        let piece = ["--data", "d", "--experiment", "fig8", "--dataset", "criteo", "--model", "deepfm", "--out", "f"];
        let plan = parse(&[&piece[..], &["--minutes", "9"]].concat()).unwrap();
        assert_eq!(plan.datasets.iter().map(|set| set.name).collect::<Vec<_>>(), ["criteo-dac-80k"]);
        assert_eq!((plan.models, plan.minutes), (vec![MODELS[0]], Some(9.0)));
        assert!(parse(&["--report", "f"]).unwrap().report.is_some());
    }

    #[test]
    fn each_experiment_has_a_known_number_of_runs() {
        let features = vec![profile::Feature { ids: 5_000, expire_after: Some(9), is_important: true }];
        let profile = profile::Profile { features };
        let runs = EXPERIMENTS.each_ref().map(|experiment| {
            let mut counter = Counter { seeds: 3, runs: 0 };
            (experiment.run)(&profile, &mut counter).unwrap();
            counter.runs
        });
        assert_eq!(runs, [75, 16, 21, 90]);
    }

    #[test]
    fn unknown_names_and_missing_data_are_refused() {
        for wrong in [
            &["--experiment", "fig9"] as &[&str],
            &["--data", "d", "--experiment", "fig7"],
            &["--data", "d", "--datasets", "ml-25m"],
            &["--data", "d", "--models", "dlrm"],
            &["--data", "d", "--seeds", "0"],
            &["--data", "d", "--seeds"],
            &["--data", "d", "--minutes", "9"],
            &["--data", "d", "--out", "f", "--minutes", "0"],
        ] {
            assert!(matches!(parse(wrong), Err(HarnessError::Usage(_))), "{wrong:?}");
        }
    }
}
