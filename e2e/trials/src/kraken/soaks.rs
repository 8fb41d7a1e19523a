//! The lines of `rectrain-bench` in a file of results: a store within a budget under load. Pure.

use rectrain_harness::markdown::table;
use serde_json::Value;

/// The table of the last lines of each kind. Empty without any.
pub(super) fn report(lines: &[Value]) -> String {
    let last = |is_it: &dyn Fn(&Value) -> bool| lines.iter().rev().find(|line| is_it(line));
    let is_soak = |line: &Value| line["thirdBytes"].is_u64();
    let is_compared = |line: &Value| line["plainLongestRequestSeconds"].is_f64();
    let mut rows = Vec::new();
    // The resident memory of a comparison is of both stores.
    if let Some(soak) = last(&|line| is_soak(line) && !is_compared(line)) {
        rows.extend(soaked(soak));
    }
    if let (Some(soak), Some(reference)) = (last(&is_soak), last(&|line| line["referenceHitRate"].is_f64())) {
        rows.extend(hit_rates(soak, reference));
    }
    if let Some(compared) = last(&is_compared) {
        rows.extend(requests(compared));
    }
    if let Some(managed) = last(&|line| line["managed"].is_object()) {
        rows.extend(speeds(&managed["managed"]));
    }
    if rows.is_empty() {
        return String::new();
    }
    let rows = rows.into_iter().map(Vec::from).collect();
    format!("**A store within a budget.**\n\n{}", table(&["figure", "measured", "wanted"], rows))
}

/// A figure, its value, and the wanted value.
type Row = [String; 3];

fn row(figure: &str, measured: String, wanted: &str) -> Row {
    [figure.to_owned(), measured, wanted.to_owned()]
}

fn soaked(soak: &Value) -> Vec<Row> {
    let growth = |third: &str, most: &str| {
        let (third, most) = (soak[third].as_f64()?, soak[most].as_f64()?);
        Some(format!("{:.1} %", 100.0 * (most / third - 1.0)))
    };
    let millions = |field: &str| soak[field].as_f64().map(|number| format!("{:.2} M", number / 1e6));
    let resident = growth("thirdResidentBytes", "mostResidentBytes");
    let figures = [
        ("distinct ids", millions("distinctIds"), "60 M"),
        ("rows", millions("rows"), "at most 3 M"),
        ("growth of the store after a third", growth("thirdBytes", "mostBytes"), "at most 3 %"),
        ("growth of the resident memory after a third", resident, "at most 3 %"),
    ];
    figures.into_iter().filter_map(|(figure, measured, wanted)| Some(row(figure, measured?, wanted))).collect()
}

fn hit_rates(soak: &Value, reference: &Value) -> Option<Row> {
    let (own, naive) = (soak["hitRate"].as_f64()?, reference["referenceHitRate"].as_f64()?);
    let rates = format!("{:.2} % and {:.2} %", 100.0 * own, 100.0 * naive);
    Some(row("look-ups that find their row, and of the naive reference", rates, "within 2 points"))
}

fn requests(compared: &Value) -> Vec<Row> {
    let milliseconds = |field: &str| compared[field].as_f64().map(|seconds| 1e3 * seconds);
    let figures = [
        ("longest request, and without a budget", "longestRequestSeconds", "plainLongestRequestSeconds"),
        ("longest read, and without a budget", "longestReadSeconds", "plainLongestReadSeconds"),
    ];
    let figures = figures.into_iter().filter_map(|(figure, own, plain)| {
        let both = format!("{:.1} and {:.1} ms", milliseconds(own)?, milliseconds(plain)?);
        Some(row(figure, both, "at most 10 ms more"))
    });
    figures.collect()
}

fn speeds(managed: &Value) -> Vec<Row> {
    let of = |field: &str, digits: usize| managed[field].as_f64().map(|number| format!("{number:.digits$}"));
    let figures = [
        ("speed of look-up and update, without a budget 1", of("speed", 3), "at least 0.9"),
        ("bytes of a row beyond its values and state", of("overheadBytesPerRow", 1), "at most 28"),
    ];
    figures.into_iter().filter_map(|(figure, measured, wanted)| Some(row(figure, measured?, wanted))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn soak() -> Value {
        json!({
            "distinctIds": 61_000_000_u64, "rows": 2_950_000_u64, "hitRate": 0.71,
            "thirdBytes": 100_u64, "mostBytes": 102_u64, "thirdResidentBytes": 200_u64, "mostResidentBytes": 201_u64,
            "longestRequestSeconds": 0.012, "longestReadSeconds": 0.004,
        })
    }

    #[test]
    fn memory_is_of_the_store_alone_and_requests_of_the_comparison() {
        let mut compared = soak();
        compared["plainLongestRequestSeconds"] = json!(0.01);
        compared["plainLongestReadSeconds"] = json!(0.003);
        compared["mostResidentBytes"] = json!(900_u64);
        let lines = [soak(), compared, json!({ "referenceHitRate": 0.72 })];
        let report = report(&lines);
        for line in [
            "| distinct ids | 61.00 M | 60 M |",
            "| growth of the store after a third | 2.0 % | at most 3 % |",
            "| growth of the resident memory after a third | 0.5 % | at most 3 % |",
            "| look-ups that find their row, and of the naive reference | 71.00 % and 72.00 % | within 2 points |",
            "| longest request, and without a budget | 12.0 and 10.0 ms | at most 10 ms more |",
        ] {
            assert!(report.contains(line), "{line} is not in\n{report}");
        }
    }

    #[test]
    fn the_speed_is_of_the_managed_store() {
        let line = json!({ "managed": { "speed": 0.93, "overheadBytesPerRow": 21.95 } });
        assert!(report(&[line]).contains("| speed of look-up and update, without a budget 1 | 0.930 | at least 0.9 |"));
        assert_eq!(report(&[json!({ "experiment": "fig8" })]), "");
    }
}
