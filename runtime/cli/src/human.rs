//! Numbers, sizes, times and tables as people read them.

use std::time::Duration;

use comfy_table::{CellAlignment, Table};

/// 1234567 as 1,234,567.
pub(crate) fn thousands(value: u64) -> String {
    let digits = value.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// A number a second, such as 115382.6, as 115,383.
pub(crate) fn rate(value: f64) -> String {
    // The conversion makes NaN and negative numbers 0.
    thousands(value.round() as u64)
}

/// 45467048 as 45.5 MB. Units are powers of 1,000.
pub(crate) fn bytes(value: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    let (mut size, mut unit) = (value as f64, None);
    for name in UNITS {
        // 999.95 would be shown as 1000.0.
        if size < 999.95 {
            break;
        }
        size /= 1000.0;
        unit = Some(name);
    }
    match unit {
        Some(unit) => format!("{size:.1} {unit}"),
        None => format!("{value} bytes"),
    }
}

/// A time in its two largest units: `4.2 s`, `3 min 20 s`, `2 h 46 min`, `5 d 3 h`.
pub(crate) fn time(time: Duration) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    match time.as_secs_f64().round() as u64 {
        _ if time < Duration::from_secs(10) => format!("{:.1} s", time.as_secs_f64()),
        seconds if seconds < MINUTE => format!("{seconds} s"),
        seconds if seconds < HOUR => format!("{} min {} s", seconds / MINUTE, seconds % MINUTE),
        seconds if seconds < DAY => format!("{} h {} min", seconds / HOUR, seconds % HOUR / MINUTE),
        seconds => format!("{} d {} h", seconds / DAY, seconds % DAY / HOUR),
    }
}

/// [`time`] of a number of seconds. Negative and infinite ones are no time.
pub(crate) fn time_of_seconds(seconds: f64) -> String {
    Duration::try_from_secs_f64(seconds).map_or("-".to_owned(), time)
}

/// A moment such as `2026-11-27T20:48:31.976019Z` to the second, as `2026-11-27 20:48:31 UTC`.
/// Other texts stay as they are.
pub(crate) fn moment(text: &str) -> String {
    let Some(local) = text.strip_suffix('Z') else { return text.to_owned() };
    let seconds = local.split('.').next().unwrap_or(local);
    format!("{} UTC", seconds.replacen('T', " ", 1))
}

/// 0.031 as 3.1 %.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// A number with this many decimals; `-` if there is none.
pub(crate) fn number(value: Option<f64>, decimals: usize) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.decimals$}"))
}

/// A table as text. All columns but the first one have numbers, which stand on the right.
pub(crate) fn right_but_first(mut table: Table) -> String {
    for column in table.column_iter_mut().filter(|column| column.index != 0) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

/// Lines of a name and a value, the values below each other. Without a line break at the end.
pub(crate) fn list(rows: &[(String, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let lines: Vec<String> = rows.iter().map(|(name, value)| format!("{name:<width$}  {value}")).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        assert_eq!(["7", "999", "1,000", "12,345,678"], [7, 999, 1_000, 12_345_678].map(thousands)[..]);
    }

    #[test]
    fn rates_are_rounded_to_the_nearest_integer() {
        assert_eq!([115_382.6, 0.4, -1.0].map(rate), ["115,383", "0", "0"]);
    }

    #[test]
    fn sizes_have_the_unit_that_fits() {
        let sizes = [0, 999, 1_000, 999_949, 999_950, 45_467_048, 12_500_000_000].map(bytes);
        assert_eq!(sizes, ["0 bytes", "999 bytes", "1.0 kB", "999.9 kB", "1.0 MB", "45.5 MB", "12.5 GB"]);
    }

    #[test]
    fn times_have_two_units() {
        let times = [0.4, 9.96, 59.4, 59.6, 3_599.0, 9_990.0, 90_000.0].map(|s| time(Duration::from_secs_f64(s)));
        assert_eq!(times, ["0.4 s", "10.0 s", "59 s", "1 min 0 s", "59 min 59 s", "2 h 46 min", "1 d 1 h"]);
    }

    #[test]
    fn moments_end_at_the_second() {
        assert_eq!(moment("2026-11-27T20:48:31.97601916Z"), "2026-11-27 20:48:31 UTC");
        assert_eq!(moment("2026-11-27T20:48:31Z"), "2026-11-27 20:48:31 UTC");
        assert_eq!(moment("yesterday"), "yesterday");
    }

    #[test]
    fn values_of_a_list_stand_below_each_other() {
        let rows = [("steps", "9"), ("test AUC", "0.79")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(list(&rows), "steps     9\ntest AUC  0.79");
    }
}
