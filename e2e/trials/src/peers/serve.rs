//! `cargo xtask peers --work serve`: the requests of `rectrain-bench serve` (a user with 200
//! candidates), answered by `rectrain serve` and by peers with the same parameters.
//!
//! Rectrain answers over REST, and its clients take a part of the same processors. A peer runs in
//! its own process without a network: its requests are parsed, and its ids are places in a table.

use std::path::{Path, PathBuf};
use std::process::Command;

use rectrain_harness::command::{command, visible};
use rectrain_harness::events::{missing, summary};
use rectrain_harness::rectrain::job;
use rectrain_harness::statistics::{median, range};
use rectrain_harness::workspace::{built, cache, workspace};
use rectrain_harness::{HarnessError, files, say};
use serde_json::{Value, json};

use super::{Environment, FOLDER, Plan, install, ratio};
use crate::TrialError;
use crate::error::unmet;

const ENVIRONMENT: Environment =
    Environment { name: "peers-serve", requirements: &["requirements-serve.txt"], script: "serve.py" };

/// The peers, and the least ratio of Rectrain's requests a second to theirs.
const PEERS: [(&str, f64); 2] = [("torch", 2.0), ("onnxruntime", 1.2)];
/// The bound of the 99th percentile at half of the saturating rate, in milliseconds.
const P99: f64 = 5.0;
/// The seconds of a load, and of each arrangement of a peer.
const SECONDS: &str = "5";

/// The figures of Rectrain in a round.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Round {
    /// Candidates a second at the saturating rate.
    rows: f64,
    /// At half of that rate, in milliseconds.
    p99: f64,
    /// The matrix products of a request on one thread, in milliseconds.
    floor: f64,
    /// Of a request.
    candidates: f64,
}

/// Runs Rectrain and the peers in turns; returns the ratios, and last the latencies and the floor.
pub(super) fn compare(plan: &Plan) -> Result<Vec<Value>, HarnessError> {
    let python = install(&ENVIRONMENT)?;
    let model = match &plan.model {
        Some(folder) => folder.clone(),
        None => trained()?,
    };
    let requests = cache()?.join("peers-serve-requests.jsonl");
    let mut rounds = Vec::new();
    let mut others = vec![Vec::new(); PEERS.len()];
    for round in 1..=plan.rounds {
        rounds.push(ours(&model, &requests, plan)?);
        for ((peer, _), rates) in PEERS.iter().zip(&mut others) {
            rates.push(super::rate(&mut theirs(&python, peer, &model, &requests, plan))?);
        }
        say(format!("serve, round {round} of {}", plan.rounds));
    }
    Ok(report(&rounds, &others))
}

/// The export of a DLRM with about 2 M rows, which is trained once.
fn trained() -> Result<PathBuf, HarnessError> {
    let folder = cache()?.join("peers-serve-model");
    // The export writes this file last.
    if folder.join("model/model.json").exists() {
        return Ok(folder.join("model"));
    }
    files::remove_folder(&folder)?;
    files::make_folder(&folder)?;
    let checkpoints = folder.join("checkpoints");
    let sets = [
        "spec.model.hidden={512,256}".to_owned(),
        "spec.data.synthetic.rows=2000000".to_owned(),
        "spec.data.synthetic.vocabulary=100000".to_owned(),
        format!("spec.checkpoint.path={}", checkpoints.display()),
    ];
    visible(&mut job("docs/examples/synthetic.yaml", &sets)?)?;
    let mut export = command(built("rectrain")?, ["checkpoint", "export", "--for", "serving"]);
    visible(export.arg(&checkpoints).arg("--output").arg(folder.join("model")))?;
    Ok(folder.join("model"))
}

/// Puts `rectrain serve` under load, and saves the requests with its answers.
fn ours(model: &Path, requests: &Path, plan: &Plan) -> Result<Round, HarnessError> {
    let mut bench = command(built("rectrain-bench")?, ["serve", "--json", "--rounds", "1", "--loads", "0.5"]);
    bench.args(["--seconds", SECONDS, "--save"]).arg(requests).arg(model).args(["--", "--threads", &plan.threads]);
    let output = bench.output().map_err(HarnessError::io("run", format!("{bench:?}")))?;
    figures(&summary(&output)?)
}

/// The command of a peer, which compares its answers with the saved ones before it is timed.
fn theirs(python: &Path, peer: &str, model: &Path, requests: &Path, plan: &Plan) -> Command {
    let mut command = command(python, [workspace().join(FOLDER).join(ENVIRONMENT.script)]);
    command.args(["--peer", peer, "--threads", &plan.threads, "--seconds", SECONDS]);
    command.arg("--model").arg(model).arg("--requests").arg(requests);
    command
}

/// The figures in the last line of `rectrain-bench serve`. Each request must have an answer.
fn figures(last: &Value) -> Result<Round, HarnessError> {
    let number = |value: &Value, field: &str| {
        value.as_f64().ok_or_else(|| missing("the last line of rectrain-bench serve", last, field))
    };
    let half = &last["loads"][0];
    if half["shed"] != 0 || half["failed"] != 0 {
        return Err(missing("the last line of rectrain-bench serve", last, "load without shed and failed requests"));
    }
    Ok(Round {
        rows: number(&last["saturatingRowsPerSecond"], "saturatingRowsPerSecond")?,
        p99: number(&half["p99"], "p99")?,
        floor: number(&last["floorMilliseconds"], "floorMilliseconds")?,
        candidates: number(&last["candidates"], "candidates")?,
    })
}

/// The ratios to each peer, and last the latencies and the floor, each with the bound.
fn report(rounds: &[Round], others: &[Vec<f64>]) -> Vec<Value> {
    let own: Vec<f64> = rounds.iter().map(|round| round.rows).collect();
    let ratios = PEERS.iter().zip(others).map(|((peer, least), rates)| {
        let mut ratio = ratio("serve", peer, &own, rates);
        ratio["leastRatio"] = json!(least);
        ratio
    });
    let mut report: Vec<Value> = ratios.collect();
    report.push(latency(rounds));
    report
}

/// The medians of the rounds' latencies, of their floors, and of their requests a second.
fn latency(rounds: &[Round]) -> Value {
    let of = |figure: fn(&Round) -> f64| rounds.iter().map(figure).collect::<Vec<f64>>();
    let latencies = of(|round| round.p99);
    let ((low, high), p99) = (range(&latencies), median(latencies));
    let (requests, floor) = (median(of(|round| round.rows / round.candidates)), median(of(|round| round.floor)));
    eprintln!(
        "serve          {requests:.0} requests/s; at half of that, p99 {p99:.2} ms ({low:.2} to {high:.2}); \
         floor: gemm alone {floor:.2} ms"
    );
    json!({"work": "serve", "requestsPerSecond": requests, "p99Milliseconds": p99, "low": low, "high": high,
        "mostP99Milliseconds": P99, "floorMilliseconds": floor})
}

/// Checks the bounds in a report. Reports of other works have none.
///
/// # Errors
/// [`TrialError::Unmet`] with all bounds that do not hold.
pub(super) fn check(report: &[Value]) -> Result<(), TrialError> {
    let unmet_bounds: Vec<String> = report.iter().filter_map(broken).collect();
    if unmet_bounds.is_empty() {
        return Ok(());
    }
    Err(unmet("the bounds of `--work serve`", unmet_bounds.join("; ")))
}

/// The bound of a report that does not hold. A figure that is no number breaks it too.
fn broken(report: &Value) -> Option<String> {
    if let Some(least) = report["leastRatio"].as_f64() {
        let (ratio, peer) = (report["ratio"].as_f64(), report["peer"].as_str().unwrap_or_default());
        let holds = ratio.is_some_and(|ratio| ratio >= least);
        return (!holds).then(|| format!("the ratio to {peer} is {}, not at least {least}", report["ratio"]));
    }
    let most = report["mostP99Milliseconds"].as_f64()?;
    let p99 = &report["p99Milliseconds"];
    let holds = p99.as_f64().is_some_and(|p99| p99 < most);
    (!holds).then(|| format!("p99 at half of the saturating rate is {p99} ms, not under {most}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(rows: f64, p99: f64) -> Round {
        Round { rows, p99, floor: 0.5, candidates: 200.0 }
    }

    #[test]
    fn figures_come_from_the_last_line_of_the_bench() {
        let load = |shed: u64, p99: Value| json!({"load": 0.5, "p99": p99, "shed": shed, "failed": 0});
        let line = |load: Value| json!({"candidates": 200, "saturatingRowsPerSecond": 4e5, "floorMilliseconds": 0.5, "loads": [load]});
        assert_eq!(figures(&line(load(0, json!(3.0)))).unwrap(), round(4e5, 3.0));
        let error = figures(&line(load(0, Value::Null))).unwrap_err().to_string();
        assert!(error.contains("no p99"), "{error}");
        for wrong in [line(load(1, json!(3.0))), json!({"candidates": 200, "loads": []})] {
            let error = figures(&wrong).unwrap_err().to_string();
            assert!(error.contains("without shed and failed"), "{error}");
        }
    }

    #[test]
    fn ratios_are_of_the_same_round_and_the_latency_is_a_median() {
        let rounds = [round(1000.0, 9.0), round(3000.0, 2.0), round(2000.0, 4.0)];
        let report = report(&rounds, &[vec![500.0, 1000.0, 500.0], vec![1000.0; 3]]);
        let ratios: Vec<Value> = report[..2].iter().map(|ratio| json!([ratio["low"], ratio["ratio"]])).collect();
        assert_eq!(ratios, [json!([2.0, 3.0]), json!([1.0, 2.0])]);
        assert_eq!([&report[0]["leastRatio"], &report[1]["leastRatio"]], [&json!(2.0), &json!(1.2)]);
        assert_eq!(report[2]["p99Milliseconds"], json!(4.0));
        assert_eq!((&report[2]["low"], &report[2]["high"]), (&json!(2.0), &json!(9.0)));
        assert_eq!(report[2]["requestsPerSecond"], json!(10.0));
        assert!(check(&report).is_ok());
    }

    #[test]
    fn each_bound_that_does_not_hold_is_named() {
        let report = report(&[round(1000.0, 5.0)], &[vec![600.0], vec![1000.0]]);
        let error = check(&report).unwrap_err().to_string();
        for part in ["ratio to torch is 1.6", "ratio to onnxruntime is 1.0, not at least 1.2", "is 5.0 ms, not under 5"]
        {
            assert!(error.contains(part), "{part}: {error}");
        }
        // A rate of NaN is null in JSON.
        assert!(check(&[json!({"peer": "torch", "leastRatio": 2.0, "ratio": f64::NAN})]).is_err());
        assert!(check(&[json!({"work": "job", "ratio": 0.5})]).is_ok());
    }

    #[test]
    fn the_model_of_another_run_can_be_given() {
        let plan = super::super::parse(&["--work", "serve", "--model", "export"]).expect("valid");
        assert_eq!((plan.model, plan.work), (Some(PathBuf::from("export")), vec!["serve".to_owned()]));
    }
}
