//! Draws simulations as SVG, with one panel for each number of workers. A panel has bars of
//! throughput by mode, and curves of throughput over time in front of the share of slowed members.
//! The curves follow figure 1 of the GBA paper. Pure.

use std::fmt::Write;

use rectrain_modes::simulate::{Report, Simulation};

use crate::human::thousands;
use crate::svg::{line, rectangle, text};

const WIDTH: f64 = 960.0;
const PANEL_HEIGHT: f64 = 260.0;
/// The distance of both charts from the top of their panel.
const TOP: f64 = 44.0;
const CHART_HEIGHT: f64 = 176.0;
const BARS_LEFT: f64 = 74.0;
const BARS_WIDTH: f64 = 290.0;
const CURVE_LEFT: f64 = 500.0;
const CURVE_WIDTH: f64 = 430.0;
/// The colour of the grid.
const GRID: &str = "#bbbbbb";

/// A mode's colour. The palette is Okabe and Ito's, which is safe for colour-blind readers.
fn colour(mode: &str) -> &'static str {
    match mode {
        "sync" => "#d55e00",
        "hybrid" => "#e69f00",
        "async" => "#56b4e9",
        "gba" => "#0072b2",
        "hopBs" => "#009e73",
        "hopBw" => "#cc79a7",
        "shadow" => "#000000",
        "des" => "#f0e442",
        _ => "#555555",
    }
}

/// A simulation and its report.
type Run<'a> = (&'a Simulation, &'a Report);

/// Draws one panel for each number of workers, in the order of the reports.
pub(crate) fn draw(simulations: &[Simulation], reports: &[Report]) -> String {
    let runs: Vec<Run<'_>> = simulations.iter().zip(reports).collect();
    let panels: Vec<&[Run<'_>]> = runs.chunk_by(|a, b| a.1.workers == b.1.workers).collect();
    let height = PANEL_HEIGHT * panels.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for (index, panel) in panels.iter().enumerate() {
        svg += &format!("<g transform=\"translate(0 {})\">\n", index as f64 * PANEL_HEIGHT);
        svg += &bars(panel);
        svg += &curves(panel);
        svg += "</g>\n";
    }
    svg + "</svg>\n"
}

/// The bars of throughput by mode. Dropped batches are pale.
fn bars(panel: &[Run<'_>]) -> String {
    let workers = panel.first().map_or(0, |(_, report)| report.workers);
    let mut svg = text(BARS_LEFT, 22.0, "start", &format!("{} workers: samples/s", thousands(workers as u64)));
    let most = largest(panel.iter().map(|(_, report)| report.global_samples_per_second));
    let step = CHART_HEIGHT / panel.len() as f64;
    for (index, (_, report)) in panel.iter().enumerate() {
        let (middle, thickness) = (TOP + (index as f64 + 0.5) * step, (step * 0.7).min(24.0));
        let width = |rate: f64| rate / most * BARS_WIDTH;
        let (all, trained) = (width(report.global_samples_per_second), width(report.trained_samples_per_second));
        svg += &text(BARS_LEFT - 6.0, middle + 4.0, "end", report.mode);
        for (width, opacity) in [(all, 0.35), (trained.min(all), 1.0)] {
            svg += &rectangle(BARS_LEFT, middle - thickness / 2.0, width, thickness, colour(report.mode), opacity);
        }
        let rate = thousands(report.global_samples_per_second.round() as u64);
        svg += &text(BARS_LEFT + all + 5.0, middle + 4.0, "start", &rate);
    }
    svg
}

/// The curves of throughput over time, relative to the largest throughput of any mode.
fn curves(panel: &[Run<'_>]) -> String {
    let Some((simulation, _)) = panel.first() else { return String::new() };
    let seconds = simulation.seconds;
    let bottom = TOP + CHART_HEIGHT;
    let mut svg =
        text(CURVE_LEFT, 22.0, "start", "samples/s over time, relative to the largest; grey: share of slowed members");
    svg += &slowed_area(simulation);
    for share in [0.0, 0.5, 1.0] {
        let y = bottom - share * CHART_HEIGHT;
        svg += &line(CURVE_LEFT, y, CURVE_LEFT + CURVE_WIDTH, y, GRID);
        svg += &text(CURVE_LEFT - 6.0, y + 4.0, "end", &format!("{share}"));
    }
    let tick = tick(seconds);
    let mut at = 0.0;
    while at <= seconds * 1.0001 {
        let x = CURVE_LEFT + at / seconds * CURVE_WIDTH;
        svg += &line(x, bottom, x, bottom + 4.0, GRID);
        svg += &text(x, bottom + 18.0, "middle", &format!("{} s", (at * 1000.0).round() / 1000.0));
        at += tick;
    }
    let most = largest(panel.iter().flat_map(|(_, report)| report.interval_samples_per_second.iter().copied()));
    // Curves of equal modes coincide. The dashed gba curve is drawn last, so async shows through
    // it.
    let order = |mode: &str| ["bsp", "async", "gba"].iter().position(|tied| *tied == mode).map_or(0, |place| place + 1);
    let mut reports: Vec<&Report> = panel.iter().map(|(_, report)| *report).collect();
    reports.sort_by_key(|report| order(report.mode));
    svg + &reports.into_iter().map(|report| curve(report, most)).collect::<String>()
}

fn curve(report: &Report, most: f64) -> String {
    let rates = &report.interval_samples_per_second;
    let mut points = String::new();
    for (index, rate) in rates.iter().enumerate() {
        let x = CURVE_LEFT + (index as f64 + 0.5) / rates.len() as f64 * CURVE_WIDTH;
        let y = TOP + CHART_HEIGHT * (1.0 - rate / most);
        // Writing to a String cannot fail.
        let _written = write!(points, "{x:.1},{y:.1} ");
    }
    let (colour, dashes) = (colour(report.mode), if report.mode == "gba" { " stroke-dasharray=\"7 5\"" } else { "" });
    format!(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\"{dashes}><title>{}</title></polyline>\n",
        points.trim_end(),
        report.mode
    )
}

/// The grey area: the share of slowed members over time, in the role with most of them.
fn slowed_area(simulation: &Simulation) -> String {
    const STEPS: usize = 215;
    let mut svg = String::new();
    for step in 0..STEPS {
        let share = simulation.cluster.slowed_share(simulation.seconds * (step as f64 + 0.5) / STEPS as f64);
        if share > 0.0 {
            let (width, height) = (CURVE_WIDTH / STEPS as f64, share * CHART_HEIGHT);
            let (x, y) = (CURVE_LEFT + width * step as f64, TOP + CHART_HEIGHT - height);
            svg += &rectangle(x, y, width, height, "#e4e4e4", 1.0);
        }
    }
    svg
}

/// About six ticks, at round numbers.
fn tick(seconds: f64) -> f64 {
    let magnitude = 10f64.powf((seconds / 6.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|step| step * magnitude).into_iter().find(|t| seconds / t <= 6.0).unwrap_or(seconds)
}

/// The largest rate. It is never 0, because callers divide by it.
fn largest(rates: impl Iterator<Item = f64>) -> f64 {
    rates.fold(1e-9, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_at_most_six_ticks_at_round_numbers() {
        for (seconds, expected) in [(30.0, 5.0), (60.0, 10.0), (480.0, 100.0), (1.0, 0.2), (0.01, 0.002), (7.0, 2.0)] {
            assert!((tick(seconds) - expected).abs() < expected * 1e-9, "{seconds}: {}", tick(seconds));
        }
    }
}
