//! The part `eps`: examples per second by the number of dense workers (ShadowSync, definition 4.1
//! and section 4.1.2). Each worker is a process with limited CPU time, and has as many batches
//! whatever their number. Pure.

use rectrain_harness::HarnessError;
use rectrain_harness::markdown::table;
use rectrain_harness::statistics::{mean, median};

use super::done::{Done, numbers, optional_numbers};
use super::plan::Plan;
use super::run::{Figures, Rows, Run};
use super::scaling::{self, Speeds};
use super::way::{FASTEST_GAP, Way};

/// The ways whose speed is measured.
fn ways() -> Vec<Way> {
    Way::all(&[FASTEST_GAP])
}

/// All ways run in turn, because the speed of a machine drifts.
pub(super) fn runs(plan: &Plan) -> Vec<Run> {
    let mut runs = Vec::new();
    for &seed in &plan.seeds {
        for &workers in &plan.workers {
            for way in ways() {
                let cores = vec![plan.cores; workers as usize];
                let run = Run::limited(Figures::Speed, Rows::Synthetic { batches: plan.batches }, way, cores);
                runs.push(Run { seed, sets: plan.sets.clone(), ..run });
            }
        }
    }
    runs
}

/// The tables of speeds and of gaps, from the runs of [`runs`].
pub(super) fn report(plan: &Plan, done: &[Done]) -> Result<String, HarnessError> {
    let speeds = |way: Way| {
        let of = |workers: &u64| Ok(median(numbers(done, |run| is(run, way, *workers), "samplesPerSecond")?));
        Ok(Speeds { way, by_workers: plan.workers.iter().map(of).collect::<Result<_, _>>()? })
    };
    let speeds = ways().into_iter().map(speeds).collect::<Result<Vec<_>, HarnessError>>()?;
    let title = "examples/s (ratio to linear)";
    let scaling = scaling::report(title, &plan.workers, &speeds);
    Ok(format!("{}\n\n{scaling}\n{}", plan.limits(), gaps(plan, done)))
}

fn is(run: &Run, way: Way, workers: u64) -> bool {
    run.way == way && run.workers == workers
}

/// The average sync gap by the number of workers.
fn gaps(plan: &Plan, done: &[Done]) -> String {
    let names: Vec<String> = plan.workers.iter().map(|workers| format!("{workers} workers")).collect();
    let header: Vec<&str> = std::iter::once("average sync gap").chain(names.iter().map(String::as_str)).collect();
    let row = |way: Way| {
        let of = |workers: &u64| mean_or_dash(&optional_numbers(done, |run| is(run, way, *workers), "averageSyncGap"));
        std::iter::once(way.name()).chain(plan.workers.iter().map(of)).collect()
    };
    table(&header, ways().into_iter().filter(|way| *way != Way::Sync).map(row).collect())
}

/// The mean gap. A dash without any.
pub(super) fn mean_or_dash(gaps: &[f64]) -> String {
    if gaps.is_empty() { "–".to_owned() } else { format!("{:.2}", mean(gaps.iter().copied())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shadow::done::tests::done;
    use crate::shadow::plan::parse;
    use crate::shadow::way::Algorithm;
    use serde_json::json;

    fn plan() -> Plan {
        parse(&["--part", "eps", "--seeds", "1,2,3", "--workers", "1,8", "--set", "a=1"], 2).unwrap()
    }

    #[test]
    fn every_way_runs_with_every_number_of_workers_and_seed() {
        let runs = runs(&plan());
        assert_eq!(runs.len(), 3 * 2 * 7);
        let eight = runs.iter().find(|run| run.workers == 8).unwrap();
        assert_eq!((eight.cores.as_slice(), eight.sets.as_slice()), (&[0.0625; 8][..], &["a=1".to_owned()][..]));
    }

    #[test]
    fn the_median_of_the_seeds_is_compared_with_one_worker() {
        let plan = plan();
        let done = done(runs(&plan), |run| {
            let is_easgd = run.way == Way::Background(Algorithm::Easgd);
            // The third seed disturbs the machine.
            let speed =
                if run.seed == 3 { 10.0 } else { 100.0 * (run.workers as f64).powf(if is_easgd { 1.0 } else { 0.5 }) };
            json!({ "samplesPerSecond": speed, "averageSyncGap": if run.way == Way::Sync { None } else { Some(5.25) } })
        });
        let report = report(&plan, &done).unwrap();
        assert!(report.starts_with("Each dense worker has 0.0625 cores: 8 of them"), "{report}");
        assert!(report.contains("| S-EASGD | 100 (1.000) | 800 (1.000) |"), "{report}");
        assert!(report.contains("| sync | 100 (1.000) | 283 (0.354) |"), "{report}");
        assert!(report.contains("| FR-MA-5 | 5.25 | 5.25 |"), "{report}");
        assert!(!report.contains("| sync | 5.25"), "{report}");
    }
}
