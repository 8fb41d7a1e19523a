//! `cargo xtask look-ahead`: the throughput of `sync` with and without its look-ahead, against
//! `hybrid`. In one process without limits, and in processes with limited links.
//!
//! All ways train the same rows with the DLRM of `e2e/peers/epoch.yaml`, in turn. Each ratio
//! compares the runs of one round. The trial fails if the model depends on the look-ahead.

use std::path::Path;

use rectrain_harness::HarnessError;
use rectrain_harness::arguments::{list, number, without_quick};
use rectrain_harness::cargo::build_programs;
use rectrain_harness::files::{make_folder, remove_folder, temporary_folder, write};
use rectrain_harness::markdown::{table, thousands, verdict};
use rectrain_harness::pace::{self, Paced};
use rectrain_harness::rectrain::job;
use rectrain_harness::statistics::{median, range};
use serde_json::{Value, json};

use crate::TrialError;
use crate::error::unmet;

const USAGE: &str =
    "usage: cargo xtask look-ahead [--quick] [--parts one,links] [--link 1Gbit,5ms] [--rounds 5] [--steps 200] \
[--from 20] [--batch 4096] [--windows 4] [--servers 2] [--set PATH=VALUE]
  Trains STEPS steps in `sync` with its default look-ahead, in `sync` without one, and in `hybrid` with a staleness of
  4, by turns. `one` is one process; `links` are processes with LINK between them. Prints samples per second after
  step FROM, then a table of ratios, and the claims: `sync` has at least .97 of the throughput of `hybrid` in one
  process, and .9 over links. WINDOWS are further look-aheads to try. --quick: 40 steps, 1 round.";

/// The columns of epoch.yaml: distinct ids of each.
const VOCABULARY: u64 = 2_000_000 / 26;
/// The end of a job without an end.
const MANY: u64 = 1_000_000_000;

#[derive(Clone, Debug, PartialEq)]
struct Plan {
    parts: Vec<Part>,
    link: String,
    rounds: u32,
    steps: u64,
    from: u64,
    batch: u32,
    windows: Vec<u32>,
    servers: u32,
    sets: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// One process without limits.
    One,
    /// Processes with limited links.
    Links,
}

/// A way to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// `sync` with its default look-ahead.
    Sync,
    /// `sync` with another look-ahead.
    Window(u32),
    /// `hybrid` with a staleness of 4.
    Hybrid,
}

/// The runs of a part, in the order of their rounds.
struct Measured {
    part: Part,
    /// By way: samples per second.
    speeds: Vec<(Way, Vec<f64>)>,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a run that fails; a model that depends on the look-ahead.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    build_programs()?;
    let folder = temporary_folder("look-ahead");
    make_folder(&folder)?;
    let measured = measure_all(&plan, &folder);
    let removed = remove_folder(&folder);
    let measured = measured?;
    removed?;
    for part in &measured {
        println!("\n{}\n{}", part.table(&plan), part.claim(&plan));
    }
    Ok(())
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let (is_quick, pairs) = without_quick(arguments);
    let mut plan = if is_quick { quick() } else { full() };
    for pair in pairs.chunks(2) {
        match pair {
            ["--parts", parts] => {
                plan.parts = list(parts).iter().map(|part| Part::named(part)).collect::<Result<_, _>>()?
            }
            ["--link", link] => plan.link = (*link).to_owned(),
            ["--rounds", rounds] => plan.rounds = number(rounds, USAGE)?,
            ["--steps", steps] => plan.steps = number(steps, USAGE)?,
            ["--from", from] => plan.from = number(from, USAGE)?,
            ["--batch", batch] => plan.batch = number(batch, USAGE)?,
            ["--windows", windows] => {
                plan.windows = list(windows).iter().map(|window| number(window, USAGE)).collect::<Result<_, _>>()?;
            }
            ["--servers", servers] => plan.servers = number(servers, USAGE)?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    if plan.steps > plan.from && plan.rounds > 0 { Ok(plan) } else { Err(HarnessError::Usage(USAGE)) }
}

fn full() -> Plan {
    Plan {
        parts: vec![Part::One, Part::Links],
        link: "1Gbit,5ms".to_owned(),
        rounds: 5,
        steps: 200,
        from: 20,
        batch: 4096,
        windows: Vec::new(),
        servers: 2,
        sets: Vec::new(),
    }
}

fn quick() -> Plan {
    Plan { rounds: 1, steps: 40, from: 10, ..full() }
}

impl Part {
    fn named(name: &str) -> Result<Self, HarnessError> {
        [Self::One, Self::Links].into_iter().find(|part| part.name() == name).ok_or(HarnessError::Usage(USAGE))
    }

    fn name(self) -> &'static str {
        match self {
            Self::One => "one",
            Self::Links => "links",
        }
    }

    /// The least throughput of `sync` over the throughput of `hybrid`.
    fn least(self) -> f64 {
        match self {
            Self::One => 0.97,
            Self::Links => 0.9,
        }
    }

    fn title(self, plan: &Plan) -> String {
        match self {
            Self::One => "in one process".to_owned(),
            Self::Links => format!("in processes over links of {}", plan.link),
        }
    }
}

impl Way {
    fn all(plan: &Plan) -> Vec<Self> {
        let others = plan.windows.iter().map(|window| Self::Window(*window));
        [Self::Sync, Self::Window(0)].into_iter().chain(others).chain([Self::Hybrid]).collect()
    }

    fn name(self) -> String {
        match self {
            Self::Sync => "sync".to_owned(),
            Self::Window(0) => "sync without look-ahead".to_owned(),
            Self::Window(window) => format!("sync, look-ahead {window}"),
            Self::Hybrid => "hybrid".to_owned(),
        }
    }

    /// `spec.training` of this way, without the sizes.
    fn training(self) -> Value {
        match self {
            Self::Sync => json!({ "mode": "sync" }),
            Self::Window(window) => json!({ "mode": "sync", "sync": { "lookAhead": window } }),
            Self::Hybrid => json!({ "mode": "hybrid", "hybrid": { "staleness": 4 } }),
        }
    }
}

fn measure_all(plan: &Plan, folder: &Path) -> Result<Vec<Measured>, TrialError> {
    let mut digest = None;
    let mut all = Vec::new();
    for &part in &plan.parts {
        let mut speeds: Vec<(Way, Vec<f64>)> = Way::all(plan).into_iter().map(|way| (way, Vec::new())).collect();
        for round in 1..=plan.rounds {
            for (way, speeds) in &mut speeds {
                let paced = measure(part, *way, plan, folder)?;
                println!("{}", line(part, *way, round, &paced)?);
                check(*way, paced.digest()?, &mut digest)?;
                speeds.push(paced.samples_per_second);
            }
        }
        all.push(Measured { part, speeds });
    }
    Ok(all)
}

fn measure(part: Part, way: Way, plan: &Plan, folder: &Path) -> Result<Paced, TrialError> {
    let file = folder.join("job.json");
    write(&file, manifest(plan, way).to_string())?;
    let mut job = job(&file.display().to_string(), &plan.sets)?;
    if part == Part::Links {
        job.args(["--processes", "--link", &plan.link]);
    }
    pace::run(job, plan.from).map_err(TrialError::part(format!("{} {}", way.name(), part.title(plan))))
}

fn manifest(plan: &Plan, way: Way) -> Value {
    let mut training = way.training();
    training["globalBatchSize"] = json!(plan.batch);
    training["steps"] = json!(plan.steps);
    training["optimizer"] = json!({
        "dense": { "kind": "adam", "learningRate": 0.001 }, "sparse": { "kind": "adaGrad", "learningRate": 0.05 },
    });
    json!({
        "apiVersion": "rectrain.dev/v1alpha1",
        "kind": "RecTrainingJob",
        "metadata": { "name": "look-ahead" },
        "spec": {
            "model": { "kind": "dlrm", "embeddingDim": 16, "bottom": [512, 256], "hidden": [512, 256] },
            "features": {
                "sparse": [{ "name": "C{1..26}" }], "dense": [{ "name": "I{1..13}", "transform": "log1p" }],
            },
            "data": { "synthetic": { "rows": MANY, "testRows": 100, "vocabulary": VOCABULARY } },
            "training": training,
            "roles": { "ps": { "replicas": plan.servers }, "denseWorker": { "threads": 2 } },
        },
    })
}

/// A run as a line of JSON.
fn line(part: Part, way: Way, round: u32, paced: &Paced) -> Result<Value, HarnessError> {
    Ok(json!({
        "part": part.name(), "way": way.name(), "round": round, "samplesPerSecond": paced.samples_per_second,
        "bytesOfStep": paced.bytes_of_step().round(), "digest": paced.digest()?,
    }))
}

/// Compares the model of a run in `sync` with the first such run's.
fn check(way: Way, found: &str, digest: &mut Option<String>) -> Result<(), TrialError> {
    if way == Way::Hybrid {
        return Ok(());
    }
    let expected = digest.get_or_insert_with(|| found.to_owned());
    if expected == found {
        return Ok(());
    }
    Err(unmet(
        format!("the same model with every look-ahead, of digest {expected}"),
        format!("{found} in {}", way.name()),
    ))
}

impl Measured {
    fn of(&self, way: Way) -> &[f64] {
        self.speeds.iter().find(|(known, _)| *known == way).map_or(&[][..], |(_, speeds)| speeds.as_slice())
    }

    /// The throughput of a way over the throughput of `hybrid`, in each round.
    fn ratios(&self, way: Way) -> Vec<f64> {
        self.of(way).iter().zip(self.of(Way::Hybrid)).map(|(speed, hybrid)| speed / hybrid).collect()
    }

    fn table(&self, plan: &Plan) -> String {
        let title = self.part.title(plan);
        let row = |(way, speeds): &(Way, Vec<f64>)| {
            let (ratios, speed) = (self.ratios(*way), median(speeds.clone()));
            let (low, high) = range(&ratios);
            let ratio = format!("{:.3} ({low:.3} to {high:.3})", median(ratios));
            vec![way.name(), thousands(speed.round() as u64), ratio]
        };
        table(&[title.as_str(), "samples/s", "ratio to hybrid"], self.speeds.iter().map(row).collect())
    }

    fn claim(&self, plan: &Plan) -> String {
        let (ratio, least) = (median(self.ratios(Way::Sync)), self.part.least());
        let title = self.part.title(plan);
        format!("sync {title}: {ratio:.3} × the throughput of hybrid, at least {least}: {}.", verdict(ratio >= least))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(part: Part, sync: &[f64], without: &[f64], hybrid: &[f64]) -> Measured {
        let of = |way, speeds: &[f64]| (way, speeds.to_vec());
        Measured { part, speeds: vec![of(Way::Sync, sync), of(Way::Window(0), without), of(Way::Hybrid, hybrid)] }
    }

    #[test]
    fn arguments_choose_parts_and_windows() {
        let plan = parse(&["--parts", "links", "--windows", "2,4", "--quick"]).unwrap();
        assert_eq!(plan, Plan { parts: vec![Part::Links], windows: vec![2, 4], ..quick() });
        let names: Vec<String> = Way::all(&plan).into_iter().map(Way::name).collect();
        let expected = ["sync", "sync without look-ahead", "sync, look-ahead 2", "sync, look-ahead 4", "hybrid"];
        assert_eq!(names, expected);
        for wrong in [&["--parts", "two"][..], &["--steps", "20"], &["--rounds", "0"], &["--windows", "x"], &["--link"]]
        {
            assert!(matches!(parse(wrong), Err(HarnessError::Usage(_))), "{wrong:?}");
        }
    }

    #[test]
    fn ways_differ_in_their_mode_only() {
        let plan = full();
        let spec = |way| {
            let mut spec = manifest(&plan, way)["spec"].clone();
            let training = spec["training"].as_object_mut().unwrap();
            let own: Vec<_> = ["mode", "sync", "hybrid"].into_iter().filter_map(|name| training.remove(name)).collect();
            (spec, own)
        };
        let (sync, of_sync) = spec(Way::Sync);
        assert_eq!(of_sync, [json!("sync")], "the default look-ahead");
        assert_eq!(spec(Way::Window(0)), (sync.clone(), vec![json!("sync"), json!({ "lookAhead": 0 })]));
        assert_eq!(spec(Way::Hybrid), (sync, vec![json!("hybrid"), json!({ "staleness": 4 })]));
    }

    #[test]
    fn the_model_of_every_look_ahead_is_the_same() {
        let mut digest = None;
        for (way, found) in [(Way::Sync, "a"), (Way::Window(0), "a"), (Way::Hybrid, "b"), (Way::Window(4), "a")] {
            check(way, found, &mut digest).unwrap();
        }
        let error = check(Way::Window(2), "b", &mut digest).unwrap_err().to_string();
        assert!(error.contains("digest a") && error.contains("b in sync, look-ahead 2"), "{error}");
    }

    #[test]
    fn claims_compare_rounds_with_their_bounds() {
        let part = measured(Part::Links, &[91.0, 40.0, 95.0], &[50.0, 20.0, 50.0], &[100.0, 50.0, 100.0]);
        let (table, claim) = (part.table(&full()), part.claim(&full()));
        assert!(table.contains("| sync | 91 | 0.910 (0.800 to 0.950) |"), "{table}");
        assert!(table.contains("| sync without look-ahead | 50 | 0.500 (0.400 to 0.500) |"), "{table}");
        assert!(claim.contains("over links of 1Gbit,5ms: 0.910") && claim.ends_with("at least 0.9: holds."), "{claim}");
        let claim = measured(Part::One, &[96.0], &[90.0], &[100.0]).claim(&full());
        assert!(claim.ends_with("at least 0.97: does not hold."), "{claim}");
    }
}
