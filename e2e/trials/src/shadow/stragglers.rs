//! The part `stragglers`: whether the speeds of four dense workers add up if one of them is slow.
//! Pure.

use rectrain_harness::HarnessError;
use rectrain_harness::markdown::{table, thousands, verdict};
use rectrain_harness::statistics::median;

use super::done::{Done, numbers};
use super::plan::{FOUR, Plan};
use super::run::{Figures, Rows, Run};
use super::way::{ALGORITHMS, Algorithm, FASTEST_GAP, Way};

/// The slow worker has this part of the cores of the others.
const SLOWNESS: f64 = 4.0;
/// The least share of the sum with which speeds add up.
const ADDS_UP: f64 = 0.9;

fn ways() -> Vec<Way> {
    let others = [Way::Foreground(Algorithm::Easgd, FASTEST_GAP), Way::Sync];
    ALGORITHMS.map(Way::Background).into_iter().chain(others).collect()
}

/// The cores of the dense workers: one alone, a slow one alone, and one slow of four.
fn teams(plan: &Plan) -> [Vec<f64>; 3] {
    let slow = plan.cores / SLOWNESS;
    let mut four = vec![plan.cores; FOUR as usize - 1];
    four.push(slow);
    [vec![plan.cores], vec![slow], four]
}

/// All ways run in turn.
pub(super) fn runs(plan: &Plan) -> Vec<Run> {
    let mut runs = Vec::new();
    for &seed in &plan.seeds {
        for cores in teams(plan) {
            for way in ways() {
                let rows = Rows::Synthetic { batches: plan.batches };
                let run = Run::limited(Figures::Speed, rows, way, cores.clone());
                runs.push(Run { seed, sets: plan.sets.clone(), ..run });
            }
        }
    }
    runs
}

/// The table of the sums, from the runs of [`runs`].
pub(super) fn report(plan: &Plan, done: &[Done]) -> Result<String, HarnessError> {
    let (mut rows, mut claims) = (Vec::new(), String::new());
    for way in ways() {
        let of = |team: &Vec<f64>| {
            Ok(median(numbers(done, |run| run.way == way && run.cores == *team, "samplesPerSecond")?))
        };
        let [one, slow, four] = &teams(plan);
        let [one, slow, four] = [of(one)?, of(slow)?, of(four)?];
        let sum = (FOUR - 1) as f64 * one + slow;
        let share = four / sum;
        let cells = [one, slow, sum, four].map(|speed| thousands(speed.round() as u64));
        rows.push(std::iter::once(way.name()).chain(cells).chain([format!("{share:.3}")]).collect());
        if matches!(way, Way::Background(_)) {
            let name = way.name();
            claims +=
                &format!("{name}: the speeds add up (at least {ADDS_UP} of the sum) {}.\n", verdict(share >= ADDS_UP));
        }
    }
    let header =
        ["examples/s", "one worker", "one slow worker", "sum of 3 and 1", "four workers, one slow", "share of the sum"];
    Ok(format!("{}\n{claims}", table(&header, rows)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shadow::done::tests::done;
    use crate::shadow::plan::parse;
    use serde_json::json;

    #[test]
    fn one_of_four_workers_is_slow_and_both_kinds_run_alone() {
        let plan = parse(&["--part", "stragglers", "--cores", "0.2", "--seeds", "1"], 2).unwrap();
        let runs = runs(&plan);
        assert_eq!(runs.len(), 3 * 5);
        let cores: Vec<&[f64]> = runs.iter().step_by(5).map(|run| run.cores.as_slice()).collect();
        assert_eq!(cores, [&[0.2][..], &[0.05], &[0.2, 0.2, 0.2, 0.05]]);
    }

    /// A run of one worker is a run of `eps` as well.
    #[test]
    fn runs_of_one_worker_are_shared_with_eps() {
        let plan = parse(&["--part", "stragglers", "--seeds", "1"], 2).unwrap();
        let names: Vec<_> = crate::shadow::eps::runs(&plan).iter().map(Run::name).collect();
        assert_eq!(runs(&plan).iter().filter(|run| names.contains(&run.name())).count(), 5);
    }

    #[test]
    fn the_speed_of_four_is_compared_with_the_sum_of_the_workers() {
        let plan = parse(&["--part", "stragglers", "--cores", "0.2", "--seeds", "1"], 2).unwrap();
        let done = done(runs(&plan), |run| {
            let sum = run.cores.iter().sum::<f64>();
            let slowest = run.cores.iter().copied().fold(f64::INFINITY, f64::min) * run.workers as f64;
            let speed = match run.way {
                Way::Sync => slowest,
                Way::Background(Algorithm::Ma) if run.workers > 1 => 0.8 * sum,
                _ => sum,
            };
            json!({ "samplesPerSecond": 10_000.0 * speed })
        });
        let report = report(&plan, &done).unwrap();
        assert!(report.contains("| S-EASGD | 2,000 | 500 | 6,500 | 6,500 | 1.000 |"), "{report}");
        assert!(report.contains("| sync | 2,000 | 500 | 6,500 | 2,000 | 0.308 |"), "{report}");
        assert!(report.contains("S-EASGD: the speeds add up (at least 0.9 of the sum) holds"), "{report}");
        assert!(report.contains("S-MA: the speeds add up (at least 0.9 of the sum) does not hold"), "{report}");
    }
}
