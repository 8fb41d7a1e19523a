//! The tables of docs/development/measurements.md, from a file of results. Pure.

use std::collections::BTreeMap;

use rectrain_harness::markdown::{table, thousands};
use rectrain_harness::statistics::mean;
use serde_json::Value;

use super::dataset::DATA_SETS;
use super::experiment::EXPERIMENTS;
use super::soaks;
use super::variant::MODELS;

/// A result on the test rows.
#[derive(Clone, Debug)]
struct Measured {
    variant: String,
    memory: f64,
    /// The mean over the seeds.
    auc: f64,
    seeds: usize,
    rows: u64,
    bytes: u64,
    levels: Vec<u64>,
}

/// The results of one table: the place of the experiment, the data set, the model, and overrides.
type Name = (usize, String, String, String);

impl Measured {
    /// The name and the result of a line. `None` for lines of other kinds.
    fn of(line: &Value) -> Option<(Name, Self)> {
        let text = |field: &str| line[field].as_str().map(str::to_owned);
        let numbers = |field: &str| line[field].as_array().into_iter().flatten();
        let experiment = text("experiment")?;
        let place = EXPERIMENTS.iter().position(|known| known.name == experiment)?;
        let set: Vec<&str> = numbers("set").filter_map(Value::as_str).collect();
        let aucs: Vec<f64> = numbers("auc").filter_map(Value::as_f64).collect();
        let measured = Self {
            variant: text("variant")?,
            memory: line["memory"].as_f64()?,
            auc: mean(aucs.iter().copied()),
            seeds: aucs.len(),
            rows: line["rows"].as_u64()?,
            bytes: line["bytes"].as_u64()?,
            levels: numbers("levels").filter_map(Value::as_u64).collect(),
        };
        Some(((place, text("dataset")?, text("model")?, set.join(", ")), measured))
    }
}

/// The report of these lines. Of several results of one variant, the last one counts.
pub(super) fn report(lines: &[Value]) -> String {
    let mut tables: BTreeMap<Name, Vec<Measured>> = BTreeMap::new();
    for (name, measured) in lines.iter().filter_map(Measured::of) {
        let results = tables.entry(name).or_default();
        match results.iter_mut().find(|earlier| is_same(earlier, &measured)) {
            Some(earlier) => *earlier = measured,
            None => results.push(measured),
        }
    }
    let mut text = String::new();
    for (name, results) in &tables {
        paragraph(&mut text, &[&heading(name, results), &table_of(name.0, results)]);
    }
    paragraph(&mut text, &[&soaks::report(lines)]);
    paragraph(&mut text, &[&times(lines), &not_measured(&tables)]);
    text
}

fn is_same(one: &Measured, other: &Measured) -> bool {
    one.variant == other.variant && one.memory.to_bits() == other.memory.to_bits()
}

/// Adds paragraphs. Empty ones are left out.
fn paragraph(text: &mut String, parts: &[&str]) {
    for part in parts.iter().filter(|part| !part.is_empty()) {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(part);
    }
}

fn heading((place, dataset, model, set): &Name, results: &[Measured]) -> String {
    let title = EXPERIMENTS.get(*place).map_or("", |experiment| experiment.title);
    let (least, most) = seeds(results);
    let seeds = match (least, most) {
        (1, 1) => "one seed".to_owned(),
        (least, most) if least == most => format!("means of {most} seeds"),
        (least, most) => format!("means of {least} to {most} seeds"),
    };
    let set = if set.is_empty() { String::new() } else { format!(", with `{set}`") };
    format!("**{title}.** {dataset}, `{model}`{set}, {seeds}.\n")
}

fn seeds(results: &[Measured]) -> (usize, usize) {
    let seeds = || results.iter().map(|result| result.seeds);
    (seeds().min().unwrap_or_default(), seeds().max().unwrap_or_default())
}

fn table_of(place: usize, results: &[Measured]) -> String {
    match place {
        0 => fig8(results),
        1 => fig9(results),
        2 => fig10(results),
        _ => table4(results),
    }
}

/// Each budget beside the best hashed tables of its memory, which are the best on the test rows.
fn fig8(results: &[Measured]) -> String {
    let mut rows = Vec::new();
    let mut holds = 0;
    for gset in results.iter().filter(|result| result.variant == "gset") {
        let is_rival = |result: &&Measured| {
            result.variant.starts_with("hashed") && result.memory.to_bits() == gset.memory.to_bits()
        };
        let mut hashed: Vec<&Measured> = results.iter().filter(is_rival).collect();
        hashed.sort_by(|a, b| b.auc.total_cmp(&a.auc));
        let Some((best, others)) = hashed.split_first() else { continue };
        holds += usize::from(gset.auc >= best.auc);
        let exponent = best.variant.trim_start_matches("hashed, exponent ");
        rows.push(vec![
            percent(gset.memory),
            thousands(best.bytes),
            auc(gset.auc),
            format!("{} ({exponent})", auc(best.auc)),
            range(others),
            signed(gset.auc - best.auc),
        ]);
    }
    let verdict = format!("The budget is at least as good at {holds} of {} points.", rows.len());
    let header = ["memory", "bytes", "within the budget", "best hashed tables (exponent)", "the others", "difference"];
    let whole = results.iter().find(|result| result.variant == "every id has a row");
    let whole = whole.map(|result| format!(" Every id with a row of its own has an AUC of {}.", auc(result.auc)));
    format!("{}\n{verdict}{}\n", table(&header, rows), whole.unwrap_or_default())
}

fn range(others: &[&Measured]) -> String {
    match (others.last(), others.first()) {
        (Some(lowest), Some(highest)) => format!("{} to {}", auc(lowest.auc), auc(highest.auc)),
        _ => "–".to_owned(),
    }
}

fn fig9(results: &[Measured]) -> String {
    let row = |result: &Measured| {
        let levels: Vec<String> = result.levels.iter().map(|&rows| thousands(rows)).collect();
        let p = result.variant.trim_start_matches("p ").to_owned();
        vec![p, auc(result.auc), thousands(result.rows), levels.join(", ")]
    };
    let header = ["p", "AUC", "rows", "rows by frequency level, from 2⁰ on"];
    table(&header, results.iter().map(row).collect())
}

fn fig10(results: &[Measured]) -> String {
    let lfu = results.iter().find(|result| result.variant == "lfu").map_or(f64::NAN, |lfu| lfu.auc);
    let row = |result: &Measured| {
        vec![result.variant.clone(), auc(result.auc), signed(result.auc - lfu), thousands(result.rows)]
    };
    let header = ["policy at 60 %", "AUC", "difference to LFU", "rows at the end"];
    table(&header, results.iter().map(row).collect())
}

fn table4(results: &[Measured]) -> String {
    let adam = results.iter().find(|result| result.variant.starts_with("adam/adam,"));
    let row = |result: &Measured| {
        let (optimizers, rate) = result.variant.split_once(", rate ").unwrap_or((result.variant.as_str(), ""));
        let (dense, sparse) = optimizers.split_once('/').unwrap_or((optimizers, optimizers));
        let compared = adam.map_or_else(Default::default, |adam| {
            let share = result.bytes as f64 / adam.bytes.max(1) as f64;
            (signed(result.auc - adam.auc), percent(share))
        });
        let (difference, share): (String, String) = compared;
        let bytes = thousands(result.bytes);
        vec![format!("{dense} / {sparse}"), rate.to_owned(), auc(result.auc), difference, bytes, share]
    };
    let header = ["dense / sparse", "rate", "AUC", "difference to Adam / Adam", "bytes of rows", "of Adam / Adam"];
    table(&header, results.iter().map(row).collect())
}

/// The number of the runs on each data set, and their mean time.
fn times(lines: &[Value]) -> String {
    let mut seconds: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for line in lines {
        if let (Some(dataset), Some(took)) = (line["run"]["dataset"].as_str(), line["seconds"].as_f64()) {
            seconds.entry(dataset).or_default().push(took);
        }
    }
    let of_set = |(dataset, seconds): (&&str, &Vec<f64>)| {
        format!("{dataset}: {} runs of {:.1} s on average", seconds.len(), mean(seconds.iter().copied()))
    };
    let times: Vec<String> = seconds.iter().map(of_set).collect();
    if times.is_empty() { String::new() } else { format!("**Time.** {}.\n", times.join("; ")) }
}

/// The tables that the file lacks.
fn not_measured(tables: &BTreeMap<Name, Vec<Measured>>) -> String {
    let mut missing = Vec::new();
    for (place, experiment) in EXPERIMENTS.iter().enumerate() {
        for set in DATA_SETS.iter().filter(|set| set.has_times() || !experiment.needs_times) {
            for model in experiment.models(&MODELS) {
                let name = (place, set.name.to_owned(), model.kind.to_owned(), String::new());
                if !tables.contains_key(&name) {
                    missing.push(format!("{} {} {}", experiment.name, set.name, model.kind));
                }
            }
        }
    }
    if missing.is_empty() { String::new() } else { format!("**Not measured yet**: {}.\n", missing.join("; ")) }
}

fn auc(auc: f64) -> String {
    format!("{auc:.4}")
}

/// A difference with its sign.
fn signed(difference: f64) -> String {
    format!("{difference:+.4}").replace('-', "−")
}

/// A share in percent.
fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn line(experiment: &str, memory: f64, variant: &str, auc: &[f64]) -> Value {
        json!({
            "experiment": experiment, "dataset": "ml-1m", "model": "deepfm", "memory": memory, "variant": variant,
            "auc": auc, "rows": 1_234, "bytes": 74_040,
        })
    }

    #[test]
    fn a_budget_meets_the_best_of_the_hashed_tables_of_its_memory() {
        let lines = [
            line("fig8", 0.1, "gset", &[0.1, 0.1]),
            line("fig8", 0.1, "gset", &[0.75, 0.77]),
            line("fig8", 0.1, "hashed, exponent 0.5", &[0.75, 0.76]),
            line("fig8", 0.1, "hashed, exponent -0.5", &[0.7, 0.7]),
            line("fig8", 0.1, "hashed, exponent 1", &[0.6, 0.6]),
            line("fig8", 0.3, "hashed, exponent 1", &[0.9, 0.9]),
            line("fig8", 1.0, "every id has a row", &[0.8, 0.8]),
        ];
        let report = report(&lines);
        let expected = "**Fig. 8.** ml-1m, `deepfm`, means of 2 seeds.\n\n\
            | memory | bytes | within the budget | best hashed tables (exponent) | the others | difference |\n\
            |---|---|---|---|---|---|\n\
            | 10 % | 74,040 | 0.7600 | 0.7550 (0.5) | 0.6000 to 0.7000 | +0.0050 |\n\n\
            The budget is at least as good at 1 of 1 points. Every id with a row of its own has an AUC of 0.8000.\n";
        assert!(report.starts_with(expected), "{report}");
        assert!(report.contains("fig8 criteo-dac-80k deepfm; fig8 criteo-dac-80k wideDeep"), "{report}");
        assert!(!report.contains("fig8 ml-1m deepfm") && !report.contains("fig10 criteo"), "{report}");
    }

    #[test]
    fn admission_shows_levels_and_eviction_the_difference_to_lfu() {
        let mut admitting = line("fig9", 1.0, "p 0.5", &[0.7]);
        admitting["levels"] = json!([1_000, 234]);
        let lines = [admitting, line("fig10", 0.6, "lfu", &[0.7]), line("fig10", 0.6, "score with r 3", &[0.69])];
        let report = report(&lines);
        assert!(report.contains("ml-1m, `deepfm`, one seed"), "{report}");
        assert!(report.contains("| 0.5 | 0.7000 | 1,234 | 1,000, 234 |"), "{report}");
        assert!(report.contains("| score with r 3 | 0.6900 | −0.0100 | 1,234 |"), "{report}");
    }

    #[test]
    fn runs_have_their_mean_time_for_each_data_set() {
        let run =
            |dataset: &str, seconds: f64| json!({ "run": { "dataset": dataset }, "auc": 0.7, "seconds": seconds });
        let lines = [run("ml-1m", 90.0), run("criteo-dac-80k", 8.0), run("ml-1m", 100.5)];
        let expected = "**Time.** criteo-dac-80k: 1 runs of 8.0 s on average; ml-1m: 2 runs of 95.2 s on average.\n";
        assert!(report(&lines).starts_with(expected), "{}", report(&lines));
        assert!(!report(&[]).contains("Time"));
    }

    #[test]
    fn optimizers_are_compared_with_adam_for_all() {
        let mut row_wise = line("table4", 1.0, "adam/rowWiseAdaGrad, rate 0.01", &[0.76]);
        row_wise["bytes"] = json!(24_680);
        row_wise["set"] = json!(["a=1"]);
        let mut adam = line("table4", 1.0, "adam/adam, rate 0.001", &[0.75]);
        adam["set"] = json!(["a=1"]);
        let report = report(&[adam, row_wise]);
        assert!(report.contains("**Table IV.** ml-1m, `deepfm`, with `a=1`"), "{report}");
        assert!(report.contains("| adam / rowWiseAdaGrad | 0.01 | 0.7600 | +0.0100 | 24,680 | 33 % |"), "{report}");
        assert!(report.contains("table4 ml-1m deepfm"), "other overrides are another table: {report}");
    }
}
