//! `cargo xtask stream online`: a model that learns from a stream, beside a copy of it that does
//! not (Kraken, figure 3b).
//!
//! A first job trains the first tenth of the rows. A second one resumes it, with the checkpoint of
//! the first as its frozen baseline. Each row is predicted by both models before it is learned.

use std::path::Path;

use rectrain_harness::arguments::number;
use rectrain_harness::cargo::build_programs;
use rectrain_harness::command::{command, output};
use rectrain_harness::events::{integer, parse as parse_json, summary};
use rectrain_harness::kafka::Broker;
use rectrain_harness::rectrain::{job, run as run_job, train};
use rectrain_harness::statistics::{mean, range};
use rectrain_harness::workspace::{built, workspace};
use rectrain_harness::{HarnessError, files};
use serde_json::{Value, json};

use super::{TOPIC, USAGE};
use crate::TrialError;
use crate::error::unmet;

/// The least difference of the AUCs over the last half of the rows.
const LEAST_GAIN: f64 = 0.01;
/// As many rows as `rectrain data replay` writes to a partition at a time. So the job trains them
/// in their order.
const BATCH: u64 = 1_000;
/// The frozen model has trained this part of the rows.
const PARTS: u64 = 10;

const MANIFEST: &str = "apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: online}
spec:
  model: {kind: deepfm, embeddingDim: 16, hidden: [64, 32]}
  features:
    sparse: [{name: user_id}, {name: movie_id}]
  data: {train: {paths: [replaced.csv]}}
  training: {mode: sync, globalBatchSize: 1000}
";

struct Plan {
    data: String,
    seed: String,
    svg: Option<String>,
    sets: Vec<String>,
}

/// The AUC over the latest rows, when a number of rows was trained.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Point {
    samples: u64,
    online: f64,
    frozen: f64,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a run that fails; too small a difference.
pub(super) fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    build_programs()?;
    let folder = files::temporary_folder("online");
    let points = train_both(&plan, &folder);
    files::remove_folder(&folder)?;
    let (points, rows) = points?;
    print_tenths(&points, rows);
    if let Some(svg) = &plan.svg {
        files::write(&workspace().join(svg), picture(&points))?;
    }
    report(&points, rows)
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let mut plan = Plan { data: String::new(), seed: "42".to_owned(), svg: None, sets: Vec::new() };
    for pair in arguments.chunks(2) {
        match pair {
            ["--data", file] => plan.data = (*file).to_owned(),
            ["--seed", seed] => plan.seed = number::<u64>(seed, USAGE)?.to_string(),
            ["--svg", file] => plan.svg = Some((*file).to_owned()),
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    if plan.data.is_empty() { Err(HarnessError::Usage(USAGE)) } else { Ok(plan) }
}

/// Trains the first tenth, and then the rest. Returns the curves, and the number of all rows.
fn train_both(plan: &Plan, folder: &Path) -> Result<(Vec<Point>, u64), TrialError> {
    let rows = folder.join("rows.csv");
    files::write(&rows, read(&plan.data)?)?;
    let broker = Broker::start("")?;
    replay_by_time(&rows, &format!("kafka://{}/{TOPIC}", broker.address))?;
    let manifest = folder.join("job.yaml");
    files::write(&manifest, MANIFEST)?;
    let manifest = manifest.display().to_string();
    let model = folder.join("model").display().to_string();
    let common = [
        broker.source(TOPIC),
        format!("spec.training.seed={}", plan.seed),
        format!("spec.checkpoint.path={model}"),
        "spec.checkpoint.resume=latest".to_owned(),
    ];
    let all = files::read(&rows)?.lines().count().saturating_sub(1) as u64;
    let first = format!("spec.training.steps={}", all / PARTS / BATCH);
    let trained = train(job(&manifest, common.iter().chain(&plan.sets).chain([&first]))?)?;
    let step = integer("the summary", &trained, "steps")?;
    let baseline = format!("spec.training.quality.baseline.from={model}@{step}");
    let printed = run_job(job(&manifest, common.iter().chain(&plan.sets).chain([&baseline]))?)?;
    let samples = integer("the summary", &summary(&printed)?, "samples")?;
    let text = String::from_utf8_lossy(&printed.stdout);
    let events: Result<Vec<Value>, HarnessError> =
        text.lines().map(|line| parse_json("an event of the run", line)).collect();
    Ok((points(&events?), samples))
}

/// The text of a file, which may be compressed with gzip.
fn read(file: &str) -> Result<String, HarnessError> {
    let path = workspace().join(file);
    match path.extension().is_some_and(|end| end == "gz") {
        true => output(command("gzip", ["-dc"]).arg(path)),
        false => files::read(&path),
    }
}

fn replay_by_time(rows: &Path, topic: &str) -> Result<(), HarnessError> {
    let mut replay = command(built("rectrain")?, ["data", "replay", "--by", "timestamp", "--to", topic]);
    output(replay.arg(rows)).map(drop)
}

fn points(events: &[Value]) -> Vec<Point> {
    let point = |event: &Value| {
        let auc = |model: &str| event[model]["auc"].as_f64();
        Some(Point { samples: event["samples"].as_u64()?, online: auc("window")?, frozen: auc("baseline")? })
    };
    events.iter().filter(|event| event["event"] == "progress").filter_map(point).collect()
}

/// The last point of each tenth of the rows that has one.
fn tenths(points: &[Point], rows: u64) -> Vec<(u64, Point)> {
    let last = |tenth: u64| {
        let until = rows * tenth / PARTS;
        let is_in = |point: &&Point| point.samples <= until && point.samples > rows * (tenth - 1) / PARTS;
        points.iter().rev().find(is_in).map(|point| (tenth, *point))
    };
    (1..=PARTS).filter_map(last).collect()
}

fn print_tenths(points: &[Point], rows: u64) {
    println!("| tenth of the rows | AUC online | AUC frozen |\n|---|---|---|");
    for (tenth, Point { online, frozen, .. }) in tenths(points, rows) {
        println!("| {tenth} | {online:.4} | {frozen:.4} |");
    }
}

/// Prints the means over the last half of the rows, and compares them.
fn report(points: &[Point], rows: u64) -> Result<(), TrialError> {
    let late: Vec<&Point> = points.iter().filter(|point| point.samples > rows / 2).collect();
    if late.is_empty() {
        return Err(unmet("progress in the last half of the rows", "none"));
    }
    let of = |auc: fn(&Point) -> f64| mean(late.iter().map(|point| auc(point)));
    let (online, frozen) = (of(|point| point.online), of(|point| point.frozen));
    let gain = online - frozen;
    println!(
        "{}",
        json!({ "onlineAuc": online, "frozenAuc": frozen, "difference": gain, "points": late.len(), "rows": rows })
    );
    if gain >= LEAST_GAIN {
        return Ok(());
    }
    Err(unmet(format!("an AUC that is at least {LEAST_GAIN} better online"), format!("{gain:+.4}")))
}

/// Both curves as a picture in SVG: AUC by rows.
fn picture(points: &[Point]) -> String {
    const WIDTH: f64 = 640.0;
    const HEIGHT: f64 = 320.0;
    const MARGIN: f64 = 48.0;
    let (first, last) = range(&points.iter().map(|point| point.samples as f64).collect::<Vec<_>>());
    let (low, high) = range(&points.iter().flat_map(|point| [point.online, point.frozen]).collect::<Vec<_>>());
    let place = |value: f64, from: f64, to: f64| (value - from) / (to - from).max(f64::MIN_POSITIVE);
    let x = |samples: f64| MARGIN + place(samples, first, last) * (WIDTH - 2.0 * MARGIN);
    let y = |auc: f64| HEIGHT - MARGIN - place(auc, low, high) * (HEIGHT - 2.0 * MARGIN);
    let line = |auc: fn(&Point) -> f64, color: &str| {
        let places: Vec<String> =
            points.iter().map(|point| format!("{:.1},{:.1}", x(point.samples as f64), y(auc(point)))).collect();
        format!("<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" points=\"{}\"/>\n", places.join(" "))
    };
    let text = |x: f64, y: f64, text: &str, color: &str| {
        format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" fill=\"{color}\" font-family=\"sans-serif\" font-size=\"13\">{text}</text>\n"
        )
    };
    let ends = points.last().map_or_else(String::new, |point| {
        text(WIDTH - MARGIN + 4.0, y(point.online), "online", "#1a6")
            + &text(WIDTH - MARGIN + 4.0, y(point.frozen), "frozen", "#666")
    });
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\">\n{}{}{ends}{}{}{}{}</svg>\n",
        line(|point| point.online, "#1a6"),
        line(|point| point.frozen, "#666"),
        text(4.0, y(high), &format!("{high:.3}"), "#333"),
        text(4.0, y(low), &format!("{low:.3}"), "#333"),
        text(MARGIN, HEIGHT - 16.0, &format!("{first:.0} rows"), "#333"),
        text(WIDTH - 3.0 * MARGIN, HEIGHT - 16.0, &format!("{last:.0} rows"), "#333"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(samples: u64, online: f64, frozen: f64) -> Point {
        Point { samples, online, frozen }
    }

    #[test]
    fn only_progress_with_both_qualities_is_a_point() {
        let both =
            json!({"event": "progress", "samples": 5, "window": {"auc": 0.7}, "baseline": {"auc": 0.6, "rows": 5}});
        let alone = json!({"event": "progress", "samples": 5, "window": {"auc": 0.7}});
        let other = json!({"event": "checkpointSaved", "samples": 5, "window": {"auc": 1}, "baseline": {"auc": 1}});
        assert_eq!(points(&[both, alone, other]), [point(5, 0.7, 0.6)]);
    }

    #[test]
    fn a_tenth_has_its_last_point() {
        let points = [point(120, 0.6, 0.5), point(190, 0.7, 0.5), point(1000, 0.8, 0.5)];
        assert_eq!(tenths(&points, 1000), [(2, points[1]), (10, points[2])]);
    }

    #[test]
    fn the_last_half_decides() {
        let late = [point(100, 0.1, 0.9), point(600, 0.72, 0.7), point(900, 0.73, 0.7)];
        assert!(report(&late, 1000).is_ok());
        let same = [point(600, 0.705, 0.7)];
        assert!(report(&same, 1000).unwrap_err().to_string().contains("+0.0050"));
        assert!(report(&late[..1], 1000).is_err());
    }

    #[test]
    fn a_picture_has_both_curves() {
        let svg = picture(&[point(100, 0.6, 0.6), point(900, 0.8, 0.7)]);
        assert_eq!(svg.matches("<polyline").count(), 2);
        // The best AUC of all is at the upper margin, and the last rows are at the right one.
        assert!(svg.contains("592.0,48.0"), "{svg}");
    }

    #[test]
    fn arguments_need_the_data() {
        let plan = parse(&["--data", "r.csv.gz", "--seed", "7", "--svg", "o.svg"]).unwrap();
        assert_eq!((plan.data.as_str(), plan.seed.as_str(), plan.svg.as_deref()), ("r.csv.gz", "7", Some("o.svg")));
        for wrong in [&[][..], &["--data"], &["--seed", "7"], &["--data", "f", "--seed", "x"]] {
            assert!(matches!(parse(wrong), Err(HarnessError::Usage(_))), "{wrong:?}");
        }
    }
}
