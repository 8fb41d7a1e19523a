//! Shows reports of simulations: as a table to a person, as JSON lines to a program.

use comfy_table::{CellAlignment, Table, presets};
use rectrain_modes::simulate::{Report, Simulation};
use serde::Serialize;

use crate::human::thousands;

/// The report of one mode with one number of workers. The first six fields compare the modes.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    mode: &'static str,
    workers: usize,
    /// Rows of finished batches per second, over all workers, including dropped batches.
    global_samples_per_second: f64,
    /// Mean of the workers' rates.
    local_samples_per_second: f64,
    /// Mean staleness of the dense gradients, in global steps.
    mean_staleness: f64,
    dropped_batches: u64,
    max_staleness: u64,
    mean_staleness_rows: f64,
    /// As `global_samples_per_second`, without the rows of dropped batches.
    trained_samples_per_second: f64,
    local_samples_per_second_deviation: f64,
    idle_share: f64,
    lost_tokens: u64,
    steps: u64,
    simulated_seconds: f64,
    seed: u64,
}

/// One line for each report.
pub(crate) fn json_lines(simulations: &[Simulation], reports: &[Report]) -> String {
    let lines = simulations.iter().zip(reports).filter_map(|(simulation, report)| {
        let line = Line {
            mode: report.mode,
            workers: report.workers,
            global_samples_per_second: rounded(report.global_samples_per_second),
            local_samples_per_second: rounded(report.local_samples_per_second),
            mean_staleness: rounded(report.mean_staleness),
            dropped_batches: report.dropped_batches,
            max_staleness: report.max_staleness,
            mean_staleness_rows: rounded(report.mean_staleness_rows),
            trained_samples_per_second: rounded(report.trained_samples_per_second),
            local_samples_per_second_deviation: rounded(report.local_samples_per_second_deviation),
            idle_share: rounded(report.idle),
            lost_tokens: report.lost_tokens,
            steps: report.steps,
            simulated_seconds: simulation.seconds,
            seed: simulation.seed,
        };
        // Numbers and names can always be written as JSON.
        serde_json::to_string(&line).ok()
    });
    lines.map(|line| line + "\n").collect()
}

/// Rounds to four decimals.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

const COLUMNS: [&str; 9] = [
    "workers",
    "mode",
    "samples/s",
    "x sync",
    "trained/s",
    "local samples/s (sd)",
    "staleness (max)",
    "dropped",
    "idle",
];

/// A row for each report.
pub(crate) fn table(reports: &[Report]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(COLUMNS);
    for report in reports {
        let sync = reports.iter().find(|other| other.mode == "sync" && other.workers == report.workers);
        let ratio = sync.map(|sync| report.global_samples_per_second / sync.global_samples_per_second);
        table.add_row([
            report.workers.to_string(),
            report.mode.to_owned(),
            thousands(report.global_samples_per_second.round() as u64),
            ratio.filter(|ratio| ratio.is_finite()).map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
            thousands(report.trained_samples_per_second.round() as u64),
            format!(
                "{} ({})",
                thousands(report.local_samples_per_second.round() as u64),
                thousands(report.local_samples_per_second_deviation.round() as u64)
            ),
            format!("{:.2} ({})", report.mean_staleness, report.max_staleness),
            thousands(report.dropped_batches),
            format!("{:.1} %", report.idle * 100.0),
        ]);
    }
    for column in table.column_iter_mut().filter(|column| column.index != 1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
