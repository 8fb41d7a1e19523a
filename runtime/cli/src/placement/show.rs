//! Shows placements to a person. Pure.

use comfy_table::{Table, presets};

use super::balance::{Balance, FeatureCost, Report};
use super::costs::{KEY_BYTES, VALUE_BYTES};
use crate::human::{bytes, percent, right_but_first, thousands};

/// The report as text.
pub(super) fn text(report: &Report) -> String {
    let features = features(&report.features, report.pieces);
    format!("{}\n\n{features}\n\n{}\n\n{}", heading(report), placements(&report.placements), notes(report))
}

fn heading(report: &Report) -> String {
    let rows = thousands(report.read.rows);
    let rows = if report.read.is_all { format!("all {rows}") } else { format!("the first {rows}") };
    format!(
        "{}: look-ups of {rows} training rows, in {} pieces of at most {} rows",
        report.job,
        thousands(report.pieces),
        thousands(report.read.piece_rows)
    )
}

fn features(features: &[FeatureCost], pieces: u64) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(["feature", "ids a piece", "bytes a piece", "share"]);
    for feature in features {
        let [look_ups, cost] = [feature.look_ups, feature.bytes].map(|all| all / pieces.max(1));
        table.add_row([feature.name.clone(), thousands(look_ups), bytes(cost), percent(feature.share)]);
    }
    right_but_first(table)
}

fn placements(placements: &[Balance]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header([
        "servers",
        "fields: f mod N",
        "fields: balanced",
        "fields: at best",
        "slots: at the start",
        "slots: balanced",
    ]);
    for balance in placements {
        let imbalances = [
            balance.fields_modulo,
            balance.fields_balanced,
            balance.fields_at_best,
            balance.slots_even,
            balance.slots_balanced,
        ];
        let cells = imbalances.map(|imbalance| format!("{imbalance:.3}"));
        table.add_row(std::iter::once(balance.servers.to_string()).chain(cells));
    }
    right_but_first(table)
}

fn notes(report: &Report) -> String {
    let halves = match report.pieces {
        0 | 1 => "the only piece decides the balanced placements and measures them",
        _ => "every second piece decides the balanced placements, and the others measure them",
    };
    format!(
        "each number is the cost of the busiest server over the mean: 1 is even\n\
         a look-up costs {KEY_BYTES} bytes for the key and {VALUE_BYTES} for each value of the row, once a piece\n\
         {halves}\n\
         servers hold slots, and `rectrain scale ps N` balances them while a job runs"
    )
}

#[cfg(test)]
mod tests {
    use super::super::balance::{Halves, Read};
    use super::super::costs::Costs;
    use super::*;

    #[test]
    fn each_number_of_servers_has_a_line() {
        let costs = Costs { pieces: 2, look_ups: vec![10, 20], features: vec![200, 600], slots: vec![4, 4] };
        let halves = Halves { deciding: costs.clone(), measuring: costs };
        let read = Read { rows: 4_000, is_all: false, piece_rows: 1_000 };
        let names = ["user".to_owned(), "item".to_owned()];
        let report = Report::new("clicks".to_owned(), read, &names, &halves, &[2, 3]);
        let text = text(&report);
        assert!(
            text.starts_with("clicks: look-ups of the first 4,000 training rows, in 4 pieces of at most 1,000 rows\n")
        );
        let cells = |start: &str| -> Vec<String> {
            let line = text.lines().find(|line| line.trim_start().starts_with(start)).unwrap_or_default();
            line.split_whitespace().map(str::to_owned).collect()
        };
        assert_eq!(cells("item"), ["item", "10", "300", "bytes", "75.0", "%"]);
        assert_eq!(cells("2 "), ["2", "1.500", "1.500", "1.500", "1.000", "1.000"]);
        assert_eq!(cells("3 ")[1..4], ["2.250", "2.250", "2.250"]);
    }
}
