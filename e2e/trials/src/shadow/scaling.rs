//! The growth of the speed with the number of dense workers, as a table. Pure.

use rectrain_harness::markdown::{table, thousands, verdict};

use super::way::Way;

/// The most that the speed of a background form may be below linear growth.
const ALLOWED: f64 = 0.03;

/// The speeds of a way to train, in the order of the numbers of workers.
pub(super) struct Speeds {
    pub(super) way: Way,
    /// Examples per second.
    pub(super) by_workers: Vec<f64>,
}

impl Speeds {
    /// The ratios to linear growth: so many workers times the speed of one.
    fn ratios(&self, workers: &[u64]) -> Vec<f64> {
        let one = self.by_workers.first().copied().unwrap_or(f64::NAN);
        self.by_workers.iter().zip(workers).map(|(speed, workers)| speed / (one * *workers as f64)).collect()
    }
}

/// The table of speeds, each with its ratio to linear growth, and whether the background forms grow
/// linearly. The first number of workers is 1.
pub(super) fn report(title: &str, workers: &[u64], speeds: &[Speeds]) -> String {
    let names = workers.iter().map(|workers| format!("{workers} workers"));
    let header: Vec<String> = std::iter::once(title.to_owned()).chain(names).collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let row = |of: &Speeds| {
        let cells = of.by_workers.iter().zip(of.ratios(workers));
        let cells = cells.map(|(speed, ratio)| format!("{} ({ratio:.3})", thousands(speed.round() as u64)));
        std::iter::once(of.way.name()).chain(cells).collect()
    };
    format!("{}\n{}", table(&header, speeds.iter().map(row).collect()), claims(workers, speeds))
}

fn claims(workers: &[u64], speeds: &[Speeds]) -> String {
    let most = workers.last().copied().unwrap_or_default();
    let claim = |of: &Speeds| {
        let ratio = of.ratios(workers).last().copied().unwrap_or(f64::NAN);
        let name = of.way.name();
        match of.way {
            Way::Background(_) => format!(
                "{name} with {most} workers: {ratio:.3} of linear; within {ALLOWED} of linear {}.\n",
                verdict(ratio >= 1.0 - ALLOWED)
            ),
            _ => format!("{name} with {most} workers: {ratio:.3} of linear.\n"),
        }
    };
    speeds.iter().map(claim).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shadow::way::Algorithm;

    #[test]
    fn speeds_have_their_ratio_to_linear_growth() {
        let speeds = [
            Speeds { way: Way::Background(Algorithm::Easgd), by_workers: vec![1_000.0, 1_980.0, 7_800.0] },
            Speeds { way: Way::Background(Algorithm::Ma), by_workers: vec![1_000.0, 1_980.0, 7_600.0] },
            Speeds { way: Way::Sync, by_workers: vec![1_000.0, 1_500.0, 4_000.0] },
        ];
        let report = report("EPS", &[1, 2, 8], &speeds);
        let expected = "| EPS | 1 workers | 2 workers | 8 workers |\n|---|---|---|---|\n\
            | S-EASGD | 1,000 (1.000) | 1,980 (0.990) | 7,800 (0.975) |\n\
            | S-MA | 1,000 (1.000) | 1,980 (0.990) | 7,600 (0.950) |\n\
            | sync | 1,000 (1.000) | 1,500 (0.750) | 4,000 (0.500) |\n\n\
            S-EASGD with 8 workers: 0.975 of linear; within 0.03 of linear holds.\n\
            S-MA with 8 workers: 0.950 of linear; within 0.03 of linear does not hold.\n\
            sync with 8 workers: 0.500 of linear.\n";
        assert_eq!(report, expected);
    }
}
