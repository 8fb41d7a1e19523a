//! Shows sizes to a person. Pure.

use comfy_table::{Table, presets};

use super::sizes::{Sizes, Workers};
use crate::human::{bytes, list, right_but_first, thousands, time_of_seconds};

/// The sizes as text: the tables, then a line for each figure.
pub(super) fn text(sizes: &Sizes) -> String {
    format!("{}: an estimate (docs/operations/sizing.md)\n\n{}\n\n{}", sizes.job, tables(sizes), list(&figures(sizes)))
}

fn tables(sizes: &Sizes) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(["feature", "rows", "bytes a row", "bytes"]);
    for of in &sizes.tables {
        table.add_row([of.feature.clone(), thousands(of.rows), of.row_bytes.to_string(), bytes(of.bytes())]);
    }
    right_but_first(table)
}

fn figures(sizes: &Sizes) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    let mut line = |name: &str, value: String| lines.push((name.to_owned(), value));
    let bounded = if sizes.is_bounded { ", bounded by spec.features.memory" } else { "" };
    line("all tables", format!("{} rows, {}{bounded}", thousands(sizes.rows), bytes(sizes.bytes)));
    line("parameter servers", format!("{} of {}", thousands(sizes.servers), bytes(sizes.server_memory)));
    let checkpoints = sizes.checkpoint_bytes.map_or("none: set spec.checkpoint.path".to_owned(), bytes);
    line("checkpoints", checkpoints);
    match sizes.workers {
        Some(workers) => workers_lines(&workers, &mut line),
        None => line(
            "dense workers",
            "give --samples-per-second and --worker-samples-per-second (measure with `rectrain run`)".to_owned(),
        ),
    }
    if let Some(hours) = sizes.hours {
        line("time", time_of_seconds(hours * 3600.0));
    }
    if let Some(cost) = sizes.cost {
        line("cost", format!("{cost:.2}"));
    }
    lines
}

fn workers_lines(workers: &Workers, line: &mut impl FnMut(&str, String)) {
    line("dense workers", thousands(workers.dense_workers));
    line("embedding workers", thousands(workers.embedding_workers));
    line("loaders", thousands(workers.loaders));
    line("all processes", format!("{} cores, {}", workers.cores, bytes(workers.memory)));
}
