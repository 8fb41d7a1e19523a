//! `cargo xtask kraken`: the experiments of Kraken (Xie et al., SC 2020, §V-C and §V-D) on public
//! data. They compare tables within a budget with hashed tables, the policies of admission and
//! eviction, and the optimizers of rows. docs/development/measurements.md shows figures.

mod bench;
mod dataset;
mod division;
mod fig10;
mod fig8;
mod fig9;
mod lab;
mod levels;
mod profile;
mod table4;
mod variant;

use std::path::{Path, PathBuf};

use rectrain_harness::arguments::{list, number};
use rectrain_harness::cargo::build_programs;
use rectrain_harness::workspace::{built, cache};
use rectrain_harness::{HarnessError, say};

use self::bench::{Bench, Prepared};
use self::dataset::{DATA_SETS, DataSet};
use self::lab::Lab;
use self::profile::Profile;
use self::variant::{MODELS, Model};
use crate::TrialError;

const USAGE: &str = "usage: cargo xtask kraken --data FOLDER [--experiment NAME]... [--datasets a,b] [--models a,b] \
[--seeds 3] [--set PATH=VALUE]... [--binary FILE]
  FOLDER has criteo-dac-80k/dac_sample_first80k.tsv.gz and ml-1m-reconstructed/ratings.csv.gz. Prints one line of JSON
  for each result. An experiment is fig8, fig9, fig10 or table4; without any, all run, which takes hours.
  Datasets: criteo-dac-80k, ml-1m. Models: deepfm, wideDeep, dnn, dcnV2; fig9 and fig10 take the first one only.
  PATH=VALUE is an override of every run, after the experiment's own. FILE is a built `rectrain`; without it, the
  command builds one.";

/// An experiment of the paper.
struct Experiment {
    name: &'static str,
    /// Whether it runs with every model, or with the first one only.
    has_all_models: bool,
    /// Whether it needs the time of each row.
    needs_times: bool,
    run: fn(&Profile, &mut dyn Lab) -> Result<(), TrialError>,
}

const EXPERIMENTS: [Experiment; 4] = [
    Experiment { name: "fig8", has_all_models: true, needs_times: false, run: fig8::run },
    Experiment { name: "fig9", has_all_models: false, needs_times: false, run: fig9::run },
    Experiment { name: "fig10", has_all_models: false, needs_times: true, run: fig10::run },
    Experiment { name: "table4", has_all_models: true, needs_times: false, run: table4::run },
];

struct Plan {
    data: PathBuf,
    experiments: Vec<&'static Experiment>,
    datasets: Vec<&'static DataSet>,
    models: Vec<Model>,
    seeds: u64,
    sets: Vec<String>,
    binary: Option<PathBuf>,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; data that cannot be read; a run that fails.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    let binary = binary(&plan)?;
    let work = cache()?.join("kraken");
    for set in &plan.datasets {
        let data = Prepared::new(set, &plan.data, &work)?;
        for experiment in &plan.experiments {
            if experiment.needs_times && !set.has_times() {
                say(format!("{} leaves out {}: its rows have no times", experiment.name, set.name));
                continue;
            }
            run_experiment(experiment, &data, &binary, &plan)?;
        }
    }
    Ok(())
}

fn run_experiment(experiment: &Experiment, data: &Prepared, binary: &Path, plan: &Plan) -> Result<(), TrialError> {
    let models = if experiment.has_all_models { plan.models.len() } else { 1 };
    for &model in plan.models.iter().take(models) {
        let (seeds, sets) = (plan.seeds, &*plan.sets);
        let mut bench = Bench { binary, data, experiment: experiment.name, model, seeds, sets };
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
    };
    for pair in arguments.chunks(2) {
        match pair {
            ["--data", folder] => plan.data = PathBuf::from(folder),
            ["--experiment", name] => plan.experiments.push(named(&EXPERIMENTS, name, |experiment| experiment.name)?),
            ["--datasets", names] => {
                let names = list(names);
                let sets = names.iter().map(|name| named(&DATA_SETS, name, |set| set.name));
                plan.datasets = sets.collect::<Result<_, _>>()?;
            }
            ["--models", names] => {
                let names = list(names);
                let models = names.iter().map(|name| named(&MODELS, name, |model| model.kind).copied());
                plan.models = models.collect::<Result<_, _>>()?;
            }
            ["--seeds", seeds] => plan.seeds = number(seeds, USAGE)?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            ["--binary", file] => plan.binary = Some(PathBuf::from(file)),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    if plan.experiments.is_empty() {
        plan.experiments = EXPERIMENTS.iter().collect();
    }
    if plan.data.as_os_str().is_empty() || plan.seeds == 0 { Err(HarnessError::Usage(USAGE)) } else { Ok(plan) }
}

/// The entry of a list with this name.
fn named<'l, T>(list: &'l [T], name: &str, name_of: fn(&T) -> &'static str) -> Result<&'l T, HarnessError> {
    list.iter().find(|entry| name_of(entry) == name).ok_or(HarnessError::Usage(USAGE))
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
    fn unknown_names_and_missing_data_are_refused() {
        for wrong in [
            &["--experiment", "fig9"] as &[&str],
            &["--data", "d", "--experiment", "fig7"],
            &["--data", "d", "--datasets", "ml-25m"],
            &["--data", "d", "--models", "dlrm"],
            &["--data", "d", "--seeds", "0"],
            &["--data", "d", "--seeds"],
        ] {
            assert!(matches!(parse(wrong), Err(HarnessError::Usage(_))), "{wrong:?}");
        }
    }
}
