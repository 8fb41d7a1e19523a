//! The part `simulated`: examples per second to 64 dense workers, by `rectrain simulate` with
//! measured times of a step. A run of each way with the most dense workers of `eps` measures them.
//!
//! The simulator knows no foreground form, and leaves the load of exchanges out. A step of the
//! foreground form takes the time of a batch and a k-th of an exchange. An exchange takes as long
//! with 64 workers as measured, so servers and their links are never busy. A real foreground form
//! is slower then (section 4.1.2).

use std::path::Path;

use rectrain_harness::HarnessError;
use rectrain_harness::command::{command, output};
use rectrain_harness::events::{missing, parse as parse_json};
use rectrain_harness::files::write;
use serde_json::{Value, json};

use super::done::Done;
use super::plan::Plan;
use super::run::{Figures, Rows, Run, SYNTHETIC_LOCAL};
use super::scaling::{self, Speeds};
use super::way::{Algorithm, FASTEST_GAP, Way};

/// The simulated numbers of dense workers.
const WORKERS: [u64; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Steps of each worker in a simulation.
const STEPS: f64 = 200.0;
/// Seconds of a message one way, besides its bytes.
const LATENCY: f64 = 0.000_1;
/// Bytes per second of a link.
const BANDWIDTH: f64 = 1.25e9;

const WAYS: [Way; 3] = [Way::Background(Algorithm::Easgd), Way::Foreground(Algorithm::Easgd, FASTEST_GAP), Way::Sync];

/// The measured times of a way, in seconds.
#[derive(Clone, Copy, Debug)]
struct Measured {
    way: Way,
    /// The dense workers that they were measured with.
    workers: u64,
    step: f64,
    all_reduce: Option<f64>,
    exchange: Option<f64>,
}

/// The runs that measure the times.
pub(super) fn runs(plan: &Plan) -> Vec<Run> {
    let cores = vec![plan.cores; plan.most_workers() as usize];
    let of = |way| Run { sets: plan.sets.clone(), ..Run::limited(Figures::Times, Rows::Endless, way, cores.clone()) };
    WAYS.into_iter().map(of).collect()
}

/// Simulates every way, and returns the tables. `done` has the runs of [`runs`]. `folder` gets the
/// simulations.
///
/// # Errors
/// A simulation that fails.
pub(super) fn report(plan: &Plan, done: &[Done], binary: &Path, folder: &Path) -> Result<String, HarnessError> {
    let mut speeds = Vec::new();
    let mut measurements = String::new();
    for done in done {
        let measured = Measured::of(done)?;
        measurements += &measured.sentence();
        let file = folder.join(format!("{}.json", measured.way.name()));
        write(&file, measured.simulation().to_string())?;
        let mut simulate = command(binary, ["simulate", "--json"]);
        let lines = read(&output(simulate.arg(&file))?)?;
        for (workers, speed) in WORKERS.iter().zip(&lines) {
            let way = measured.way.name();
            println!("{}", json!({ "simulated": way, "workers": workers, "samplesPerSecond": speed }));
        }
        speeds.push(Speeds { way: measured.way, by_workers: lines });
    }
    let scaling = scaling::report("simulated examples/s (ratio to linear)", &WORKERS, &speeds);
    Ok(format!("{} Means of {} steps or more:\n{measurements}\n{scaling}", plan.limits(), plan.steps))
}

impl Measured {
    fn of(done: &Done) -> Result<Self, HarnessError> {
        let optional = |field: &str| done.line[field].as_f64();
        Ok(Self {
            way: done.run.way,
            workers: done.run.workers,
            step: done.number("stepSeconds")?,
            all_reduce: optional("allReduceSeconds"),
            exchange: optional("exchangeSeconds"),
        })
    }

    fn sentence(&self) -> String {
        let part = |name: &str, seconds: Option<f64>| {
            seconds.map_or_else(String::new, |seconds| format!(", {name} {:.1} ms", 1e3 * seconds))
        };
        let (all_reduce, exchange) = (part("all-reduce", self.all_reduce), part("exchange", self.exchange));
        let (name, step) = (self.way.name(), 1e3 * self.step);
        format!("- {name}, {} workers: step {step:.1} ms{all_reduce}{exchange}\n", self.workers)
    }

    /// The simulation's document.
    fn simulation(&self) -> Value {
        let step = match self.way {
            Way::Foreground(_, gap) => self.step + self.exchange.unwrap_or(0.0) / gap as f64,
            Way::Background(_) | Way::Sync => self.step,
        };
        let mode = if self.way == Way::Sync { "sync" } else { "shadow" };
        json!({
            "apiVersion": "rectrain.dev/v1alpha1",
            "kind": "Simulation",
            "spec": {
                "workers": WORKERS, "localBatchSize": SYNTHETIC_LOCAL, "modes": [mode], "stepSeconds": [step],
                "seconds": STEPS * step,
                // The measured step has the wait for its rows.
                "network": {
                    "latencySeconds": LATENCY, "bytesPerSecond": BANDWIDTH, "embeddingBytesPerRow": 0,
                    "denseBytes": self.dense_bytes().round(),
                },
            },
        })
    }

    /// The bytes with which the simulated all-reduce takes the measured time with as many workers.
    /// In the simulator it takes 2⌈log₂ n⌉ latencies, and 2(n − 1)/n times the bytes.
    fn dense_bytes(&self) -> f64 {
        let Some(seconds) = self.all_reduce else { return 0.0 };
        let n = self.workers as f64;
        let latencies = 2.0 * n.log2().ceil() * LATENCY;
        (seconds - latencies).max(0.0) * BANDWIDTH * n / (2.0 * (n - 1.0))
    }
}

/// The speeds in the lines of `rectrain simulate --json`, in the order of [`WORKERS`].
fn read(text: &str) -> Result<Vec<f64>, HarnessError> {
    let lines: Vec<Value> =
        text.lines().map(|line| parse_json("a line of the simulation", line)).collect::<Result<_, _>>()?;
    let of = |workers: &u64| {
        let line = lines.iter().find(|line| line["workers"] == *workers);
        let speed = line.and_then(|line| line["globalSamplesPerSecond"].as_f64());
        let field = format!("globalSamplesPerSecond with {workers} workers");
        speed.ok_or_else(|| missing("the simulation", &json!(lines), &field))
    };
    WORKERS.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shadow::plan::parse;

    fn measured(way: Way, all_reduce: Option<f64>, exchange: Option<f64>) -> Measured {
        Measured { way, workers: 8, step: 0.25, all_reduce, exchange }
    }

    #[test]
    fn times_are_measured_with_the_most_workers() {
        let plan = parse(&["--part", "simulated"], 2).unwrap();
        let names: Vec<String> = runs(&plan).iter().map(|run| run.way.name()).collect();
        assert_eq!(names, ["S-EASGD", "FR-EASGD-5", "sync"]);
        assert!(runs(&plan).iter().all(|run| run.cores == [0.0625; 8]));
    }

    #[test]
    fn the_simulated_all_reduce_takes_the_measured_time() {
        let sync = measured(Way::Sync, Some(0.01), None);
        let bytes = sync.simulation()["spec"]["network"]["denseBytes"].as_f64().unwrap();
        // As the simulator computes it for 8 workers.
        let seconds = 2.0 * 3.0 * LATENCY + 2.0 * 7.0 / 8.0 * bytes / BANDWIDTH;
        assert!((seconds - 0.01).abs() < 1e-8, "{seconds}");
        assert_eq!(measured(Way::Sync, Some(1e-9), None).dense_bytes().to_bits(), 0.0_f64.to_bits());
    }

    #[test]
    fn only_the_foreground_form_waits_for_its_exchanges() {
        let step = |way| measured(way, None, Some(0.5)).simulation()["spec"]["stepSeconds"][0].as_f64();
        assert_eq!(WAYS.map(step), [Some(0.25), Some(0.25 + 0.5 / 5.0), Some(0.25)]);
        let modes = WAYS.map(|way| measured(way, None, None).simulation()["spec"]["modes"][0].clone());
        assert_eq!(modes, ["shadow", "shadow", "sync"].map(|mode| json!(mode)));
    }

    #[test]
    fn each_number_of_workers_has_its_simulated_speed() {
        let line = |workers: u64| json!({ "workers": workers, "globalSamplesPerSecond": 10.0 * workers as f64 });
        let text: String = WORKERS.iter().rev().map(|workers| format!("{}\n", line(*workers))).collect();
        assert_eq!(read(&text).unwrap(), WORKERS.map(|workers| 10.0 * workers as f64));
        let error = read(&text.lines().take(6).map(|line| format!("{line}\n")).collect::<String>()).unwrap_err();
        assert!(error.to_string().contains("with 1 workers"), "{error}");
    }
}
