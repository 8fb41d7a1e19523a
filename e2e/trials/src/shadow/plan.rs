//! The command line, and the limits of the dense workers that follow from it. Pure.

use std::path::PathBuf;

use rectrain_harness::HarnessError;
use rectrain_harness::arguments::{list, number, without, without_quick};

use super::dataset::{DATA_SETS, DataSet, QUICK};
use crate::TrialError;
use crate::error::unmet;

pub(super) const USAGE: &str =
    "usage: cargo xtask shadow [--data FOLDER] [--part eps|stragglers|simulated|quality]... [--quick] [--list] \
[--out FILE] [--workers 1,2,4,8] [--cores CORES] [--seeds 1,2,3] [--gaps 5,10,30,100] [--datasets criteo,ml] \
[--set PATH=VALUE]... [--binary FILE]
  Prints a line of JSON for each run, and the tables of ShadowSync's section 4.1 after each part. Without --part, all
  parts run, which takes hours:
    eps         examples per second by the number of dense workers (Linux, root)
    stragglers  the same with four dense workers; one has a quarter of the others' cores (Linux, root)
    simulated   the same to 64 workers by `rectrain simulate`, with measured times of a step (Linux, root)
    quality     normalized entropy, AUC and the average sync gap of every algorithm with four dense workers
  FOLDER has criteo-dac-80k/dac_sample_first80k.tsv.gz and ml-1m-reconstructed/ratings.csv.gz, for `quality`. Dense
  workers of the other parts are processes with CORES cores each. By default, all of them have a quarter of this machine.
  --out appends each run to FILE. A run that FILE has is not repeated. Give each FILE to one binary. --list prints the
  runs, and starts none. --quick: one seed, two gaps, fewer workers and batches, and the first rows of Criteo.
  PATH=VALUE is an override of every run. FILE of --binary is a built `rectrain`; without it, the command builds one.";

/// The share of the machine's cores that the dense workers have together. Servers, embedding worker
/// and loader have the others. They need more than the dense workers, which would wait for them
/// otherwise. The paper has more embedding servers than needed, too.
const SHARE: f64 = 0.25;
/// Dense workers of `stragglers` and `quality`.
pub(super) const FOUR: u64 = 4;

/// A part of the trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Eps,
    Stragglers,
    Simulated,
    Quality,
}

const PARTS: [Part; 4] = [Part::Eps, Part::Stragglers, Part::Simulated, Part::Quality];

/// The arguments of the command line.
#[derive(Debug)]
pub(super) struct Plan {
    /// The folder of the data sets.
    pub(super) data: Option<PathBuf>,
    pub(super) parts: Vec<Part>,
    pub(super) datasets: Vec<&'static DataSet>,
    /// The numbers of dense workers of `eps`, ascending. The first one is 1.
    pub(super) workers: Vec<u64>,
    /// The cores of a dense worker that is a process.
    pub(super) cores: f64,
    /// Batches of each worker in `eps` and `stragglers`.
    pub(super) batches: u64,
    /// Steps of each worker in `simulated`.
    pub(super) steps: u64,
    pub(super) seeds: Vec<u64>,
    /// k of the foreground forms in `quality`.
    pub(super) gaps: Vec<u64>,
    pub(super) sets: Vec<String>,
    pub(super) binary: Option<PathBuf>,
    pub(super) out: Option<PathBuf>,
    pub(super) only_lists: bool,
    /// The cores of this machine.
    pub(super) machine: usize,
}

impl Part {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Eps => "eps",
            Self::Stragglers => "stragglers",
            Self::Simulated => "simulated",
            Self::Quality => "quality",
        }
    }

    fn named(name: &str) -> Result<Self, HarnessError> {
        PARTS.into_iter().find(|part| part.name() == name).ok_or(HarnessError::Usage(USAGE))
    }
}

impl Plan {
    /// The most dense workers that are processes of one job.
    pub(super) fn most_workers(&self) -> u64 {
        self.workers.iter().copied().fold(FOUR, u64::max)
    }

    /// The share of the machine's cores that the most dense workers have together.
    pub(super) fn share(&self) -> f64 {
        self.most_workers() as f64 * self.cores / self.machine as f64
    }

    /// A sentence about the limits.
    pub(super) fn limits(&self) -> String {
        format!(
            "Each dense worker has {} cores: {} of them have {:.0} % of this machine's {} cores.",
            self.cores,
            self.most_workers(),
            100.0 * self.share(),
            self.machine
        )
    }
}

/// Reads the command line on a machine with so many cores.
///
/// # Errors
/// Wrong arguments; dense workers that do not fit the machine.
pub(super) fn parse(arguments: &[&str], machine: usize) -> Result<Plan, TrialError> {
    let (is_quick, others) = without_quick(arguments);
    let (only_lists, pairs) = without(&others, "--list");
    let mut plan = Plan { only_lists, machine, ..if is_quick { quick() } else { full() } };
    let mut cores = None;
    for pair in pairs.chunks(2) {
        match pair {
            ["--data", folder] => plan.data = Some(PathBuf::from(folder)),
            ["--part" | "--parts", names] => plan.parts.extend(all(names, Part::named)?),
            ["--datasets", names] => plan.datasets = all(names, |name| DataSet::named(name, USAGE))?,
            ["--workers", workers] => plan.workers = numbers(workers)?,
            ["--cores", own] => cores = Some(number(own, USAGE)?),
            ["--seeds", seeds] => plan.seeds = numbers(seeds)?,
            ["--gaps", gaps] => plan.gaps = numbers(gaps)?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            ["--binary", file] => plan.binary = Some(PathBuf::from(file)),
            ["--out", file] => plan.out = Some(PathBuf::from(file)),
            _ => return Err(HarnessError::Usage(USAGE).into()),
        }
    }
    if plan.parts.is_empty() {
        plan.parts = PARTS.to_vec();
    }
    plan.workers.sort_unstable();
    plan.workers.dedup();
    if !is_complete(&plan) {
        return Err(HarnessError::Usage(USAGE).into());
    }
    plan.cores = cores.unwrap_or_else(|| default_cores(&plan));
    check_cores(&plan)?;
    Ok(plan)
}

fn full() -> Plan {
    Plan {
        data: None,
        parts: Vec::new(),
        datasets: DATA_SETS.iter().collect(),
        workers: vec![1, 2, 4, 8],
        cores: 0.0,
        batches: 100,
        steps: 50,
        seeds: vec![1, 2, 3],
        gaps: vec![5, 10, 30, 100],
        sets: Vec::new(),
        binary: None,
        out: None,
        only_lists: false,
        machine: 1,
    }
}

fn quick() -> Plan {
    Plan {
        datasets: QUICK.iter().collect(),
        workers: vec![1, 2, 4],
        batches: 30,
        steps: 15,
        seeds: vec![1],
        gaps: vec![5, 30],
        ..full()
    }
}

/// Every entry of `a,b`, as `read` understands it.
fn all<T>(text: &str, read: impl Fn(&str) -> Result<T, HarnessError>) -> Result<Vec<T>, HarnessError> {
    list(text).iter().map(|entry| read(entry)).collect()
}

fn numbers(text: &str) -> Result<Vec<u64>, HarnessError> {
    all(text, |entry| number(entry, USAGE))
}

/// Linear growth is of one worker's figure, so one worker must be measured. `quality` reads data.
fn is_complete(plan: &Plan) -> bool {
    let has_lists = plan.workers.first() == Some(&1) && !plan.seeds.is_empty() && !plan.gaps.contains(&0);
    let has_data = plan.data.is_some() || plan.only_lists || !plan.parts.contains(&Part::Quality);
    has_lists && has_data
}

/// The share of the machine for each of the most workers, to four decimals.
fn default_cores(plan: &Plan) -> f64 {
    let cores = SHARE * plan.machine as f64 / plan.most_workers() as f64;
    (cores * 10_000.0).floor() / 10_000.0
}

fn check_cores(plan: &Plan) -> Result<(), TrialError> {
    if plan.cores > 0.0 && plan.share() <= 1.0 {
        return Ok(());
    }
    let expected = format!("dense workers that fit the {} cores of this machine; lower --cores", plan.machine);
    Err(unmet(expected, format!("{} dense workers of {} cores", plan.most_workers(), plan.cores)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(arguments: &[&str]) -> bool {
        matches!(parse(arguments, 2), Err(TrialError::Harness(HarnessError::Usage(_))))
    }

    #[test]
    fn without_a_selection_every_part_runs() {
        let plan = parse(&["--data", "d"], 2).unwrap();
        assert_eq!(plan.parts, PARTS);
        assert_eq!((plan.workers, plan.seeds, plan.gaps), (vec![1, 2, 4, 8], vec![1, 2, 3], vec![5, 10, 30, 100]));
        assert_eq!(plan.datasets.iter().map(|set| set.name).collect::<Vec<_>>(), ["criteo-dac-80k", "ml-1m"]);
    }

    #[test]
    fn the_quick_form_has_one_seed_and_the_first_rows_of_one_data_set() {
        let plan = parse(&["--quick", "--data", "d", "--list"], 2).unwrap();
        assert_eq!((plan.seeds, plan.gaps, plan.only_lists), (vec![1], vec![5, 30], true));
        assert_eq!(plan.datasets.iter().map(|set| set.first_rows).collect::<Vec<_>>(), [Some(16_000)]);
    }

    #[test]
    fn parts_and_lists_can_be_selected() {
        let arguments = [
            ["--part", "quality"],
            ["--part", "eps,stragglers"],
            ["--data", "d"],
            ["--datasets", "ml"],
            ["--workers", "8,1"],
            ["--seeds", "7"],
            ["--gaps", "30"],
            ["--set", "a=1"],
            ["--out", "f"],
            ["--binary", "b"],
        ];
        let plan = parse(arguments.as_flattened(), 16).unwrap();
        assert_eq!(plan.parts, [Part::Quality, Part::Eps, Part::Stragglers]);
        assert_eq!(
            (plan.workers, plan.seeds, plan.gaps, plan.sets),
            (vec![1, 8], vec![7], vec![30], vec!["a=1".to_owned()])
        );
        assert_eq!((plan.datasets[0].name, plan.out, plan.binary), ("ml-1m", Some("f".into()), Some("b".into())));
    }

    #[test]
    fn dense_workers_share_a_quarter_and_never_exceed_the_machine() {
        let plan = parse(&["--part", "eps"], 2).unwrap();
        assert_eq!((plan.cores, plan.share()), (0.0625, 0.25));
        assert_eq!(plan.limits(), "Each dense worker has 0.0625 cores: 8 of them have 25 % of this machine's 2 cores.");
        assert_eq!(parse(&["--part", "eps", "--workers", "1,2"], 2).unwrap().cores, 0.125, "stragglers are four");
        assert_eq!(parse(&["--part", "eps", "--cores", "0.25"], 2).unwrap().share(), 1.0);
        for wrong in ["0.26", "0", "-1", "nan"] {
            let error = parse(&["--part", "eps", "--cores", wrong], 2).unwrap_err().to_string();
            assert!(error.contains("--cores") && error.contains("8 dense workers"), "{error}");
        }
    }

    #[test]
    fn wrong_arguments_are_refused() {
        for wrong in [
            &["--part", "speed"][..],
            &["--part", "quality"],
            &["--part", "eps", "--workers", "2,4"],
            &["--part", "eps", "--workers", "many"],
            &["--part", "eps", "--gaps", "0"],
            &["--data", "d", "--datasets", "ml-25m"],
            &["--data"],
            &["--slow", "1"],
        ] {
            assert!(refused(wrong), "{wrong:?}");
        }
        assert!(parse(&["--part", "quality", "--list"], 2).is_ok(), "a list needs no data");
    }
}
