//! Shows a profile to a person as text, and to a program as JSON. Pure.

use comfy_table::{Table, presets};

use super::figures::{Dense, Feature, Figures, Read};
use crate::failure::Failure;
use crate::human::{bytes, moment, number, percent, right_but_first, thousands, time_of_seconds};

/// The profile as JSON.
pub(super) fn json(figures: &Figures) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(figures).map_err(|error| Failure::Failed(error.to_string()))?;
    Ok(text + "\n")
}

/// The profile as text.
pub(super) fn text(figures: &Figures) -> String {
    let mut text = heading(figures).join("\n");
    text += &format!("\n\n{}\n", features(figures));
    if !figures.dense.is_empty() {
        text += &format!("\n{}\n", dense(&figures.dense));
    }
    text += &format!("\n{}\n", totals(figures));
    for warning in &figures.warnings {
        text += &format!("warning: {warning}\n");
    }
    for note in &figures.proposal.notes {
        text += &format!("note: {note}\n");
    }
    if !figures.proposal.yaml.is_empty() {
        text += &format!("\nproposed for spec (see docs/guide/tables.md):\n\n{}", figures.proposal.yaml);
    }
    text.trim_end().to_owned()
}

/// The rows, the labels and the times.
pub(super) fn heading(figures: &Figures) -> Vec<String> {
    let Read { seconds, bad_rows, files, .. } = figures.read;
    let mut first = format!("{}: {} read in {seconds:.1} s", figures.job, rows(&figures.read));
    if files > 0 {
        first += &format!(" from {} file{}", thousands(files), if files == 1 { "" } else { "s" });
    }
    if bad_rows > 0 {
        first += &format!(", {} bad rows left out", thousands(bad_rows));
    }
    let mut lines = vec![first, format!("labels of {}: {} positive", figures.label.name, percent(figures.label.rate))];
    if let Some(time) = &figures.time {
        lines.push(format!(
            "times of {}: from {} to {}, {}",
            time.column,
            date(time.first_seconds),
            date(time.last_seconds),
            time_of_seconds(time.span_seconds as f64)
        ));
    }
    lines
}

fn rows(read: &Read) -> String {
    match read.is_all {
        true => format!("all {} training rows", thousands(read.rows)),
        false => format!("the first {} of about {} training rows", thousands(read.rows), thousands(read.all_rows)),
    }
}

fn date(seconds: u64) -> String {
    let stamp = i64::try_from(seconds).ok().and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    stamp.map_or_else(|| format!("second {seconds}"), |stamp| moment(&stamp.to_string()))
}

/// A number of ids, marked if it is an estimate.
pub(super) fn ids(feature: &Feature) -> String {
    let about = if feature.error > 0.0 { "~" } else { "" };
    format!("{about}{}", thousands(feature.ids))
}

/// The share of the ids that occur once.
pub(super) fn once(feature: &Feature) -> String {
    percent(feature.seen_once as f64 / feature.ids.max(1) as f64)
}

/// The time between two sightings of an id.
pub(super) fn gap(feature: &Feature) -> String {
    feature.gap_seconds.map_or("-".to_owned(), |seconds| time_of_seconds(seconds as f64))
}

/// The headings of the columns of [`cells`].
pub(super) const COLUMNS: [&str; 9] =
    ["feature", "ids", "seen once", "top 1 %", "missing", "99.9 % seen within", "AUC alone", "bytes a row", "bytes"];

/// A feature's row of the table.
pub(super) fn cells(feature: &Feature) -> [String; 9] {
    [
        feature.name.clone(),
        ids(feature),
        once(feature),
        percent(feature.top_share),
        percent(feature.missing_share),
        gap(feature),
        number(feature.auc, 3),
        feature.row_bytes.total.to_string(),
        bytes(feature.bytes),
    ]
}

fn features(figures: &Figures) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(COLUMNS);
    for feature in &figures.features {
        table.add_row(cells(feature));
    }
    right_but_first(table)
}

/// The headings of the columns of [`dense_cells`].
pub(super) const DENSE_COLUMNS: [&str; 6] = ["dense feature", "smallest", "mean", "largest", "at missing", "AUC alone"];

/// A dense feature's row of the table.
pub(super) fn dense_cells(feature: &Dense) -> [String; 6] {
    [
        feature.name.clone(),
        format!("{:.4}", feature.min),
        format!("{:.4}", feature.mean),
        format!("{:.4}", feature.max),
        percent(feature.at_missing_share),
        number(feature.auc, 3),
    ]
}

fn dense(features: &[Dense]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(DENSE_COLUMNS);
    for feature in features {
        table.add_row(dense_cells(feature));
    }
    right_but_first(table)
}

/// The rows and bytes of all tables, and how exact they are.
pub(super) fn totals(figures: &Figures) -> String {
    let largest = figures.features.iter().map(|feature| feature.error).fold(0.0, f64::max);
    let exact = match largest > 0.0 {
        true => format!(
            "; ids marked ~ are estimates with a standard error of {:.2} %, from a sample of {} ids at most",
            100.0 * largest,
            thousands(figures.exact_ids as u64)
        ),
        false => "; all counts are exact".to_owned(),
    };
    format!(
        "all tables: {} rows of {}{exact}; counting takes at most {} of memory",
        thousands(figures.tables.rows),
        bytes(figures.tables.bytes),
        bytes(figures.memory_bound_bytes as u64)
    )
}
