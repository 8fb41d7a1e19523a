//! The distribution of synthetic rows: rows in Criteo's layout, with a known best possible AUC.
//! Every row is a pure function of (seed, row number), so any process can compute any part of them.
//!
//! A row has one id for each sparse field, Zipf-distributed over the field's vocabulary (rank 1 is
//! id 0). Its dense counts are ⌊exp(1.5 + 1.2 z)⌋ with z standard normal, and missing with
//! probability 0.05. A hidden teacher gives it
//!
//! logit = bias + sparse_effect / √F · Σ_f e(f, id_f) + dense_effect / √D · Σ_d w_d · (ln(1 + x_d)
//! − 1.7)
//!
//! The effects e of keys are Irwin and Hall's sum of four uniforms, scaled to variance 1. The
//! weights w are standard normal. Both are hashes of the seed. Missing counts contribute nothing.
//! The label is 1 with probability p = 1 / (1 + e^−logit). No model can order rows better than p
//! does.

use std::io::Write;
use std::ops::Range;

use rectrain_kinds::{SyntheticConfig, criteo_columns};

use crate::error::DataError;
use rectrain_random::{SplitMix64, mix};

const MISSING: f64 = 0.05;

/// The largest number of rows that [`Teacher::best_possible_auc`] scores. Its standard error is
/// then below 0.001.
const AUC_ROWS: u64 = 400_000;

/// The distribution, prepared for drawing.
#[derive(Debug, Clone)]
pub struct Teacher {
    config: SyntheticConfig,
    zipf: Vec<Zipf>,
    dense_weights: Vec<f64>,
}

/// One row.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Drawn {
    /// All cells in the order of [`criteo_columns`]. `None` is a missing count.
    pub cells: Vec<Option<i64>>,
    /// P(label = 1) of this row.
    pub probability: f64,
}

impl Teacher {
    /// Prepares the distribution.
    ///
    /// # Errors
    /// Values out of range.
    pub fn new(config: SyntheticConfig) -> Result<Self, DataError> {
        let refuse =
            |setting: &str, problem: &str| Err(DataError::config(&format!("synthetic source, {setting}"), problem));
        if config.all_rows() == 0 {
            return refuse("rows", "at least 1 is needed");
        }
        let id_range = 1..=i64::MAX as u64;
        if !config.vocabularies.iter().all(|n| id_range.contains(n)) {
            return refuse("vocabularies", "each must be at least 1 and below 2^63");
        }
        if !(config.zipf_exponent > 0.0 && config.zipf_exponent.is_finite()) {
            return refuse("zipf_exponent", "a number above 0 is needed");
        }
        let effects = [config.sparse_effect, config.dense_effect, config.bias];
        if !effects.iter().all(|effect| effect.is_finite()) {
            return refuse("effects and bias", "finite numbers are needed");
        }
        let zipf = config.vocabularies.iter().map(|&n| Zipf::new(n, config.zipf_exponent)).collect();
        let scale = config.dense_effect / (config.dense.max(1) as f64).sqrt();
        let mut random = SplitMix64::of_words(&[config.seed, DENSE_WEIGHTS]);
        let dense_weights = (0..config.dense).map(|_| random.normal() * scale).collect();
        Ok(Self { config, zipf, dense_weights })
    }

    /// The settings.
    pub fn config(&self) -> &SyntheticConfig {
        &self.config
    }

    /// The names of the columns.
    pub fn columns(&self) -> Vec<String> {
        criteo_columns(self.config.dense, self.config.vocabularies.len())
    }

    /// Draws row `row` into `into`, and reuses its memory.
    pub fn draw(&self, row: u64, into: &mut Drawn) {
        let config = &self.config;
        let mut random = SplitMix64::of_words(&[config.seed, ROWS, row]);
        into.cells.clear();
        into.cells.push(None);
        let mut logit = config.bias;
        for weight in &self.dense_weights {
            let (missing, normal) = (random.unit() < MISSING, random.normal());
            let count = (1.5 + 1.2 * normal).exp().floor();
            into.cells.push((!missing).then_some(count as i64));
            if !missing {
                logit += weight * (count.ln_1p() - 1.7);
            }
        }
        let scale = config.sparse_effect / (self.zipf.len().max(1) as f64).sqrt();
        for (field, zipf) in self.zipf.iter().enumerate() {
            let id = zipf.draw(&mut random) - 1;
            into.cells.push(Some(id as i64));
            logit += scale * effect(config.seed, field as u64, id);
        }
        into.probability = 1.0 / (1.0 + (-logit).exp());
        into.cells[0] = Some(i64::from(random.unit() < into.probability));
    }

    /// The AUC of the teacher's own probabilities against the labels drawn from them, over the rows
    /// `rows` (at most 400,000 of them, evenly spread). The best possible model reaches it. 0.5 if
    /// all labels are equal.
    pub fn best_possible_auc(&self, rows: Range<u64>) -> f64 {
        let rows = rows.start..rows.end.min(self.config.all_rows());
        let step = rows.end.saturating_sub(rows.start).div_ceil(AUC_ROWS).max(1);
        let mut drawn = Drawn::default();
        let mut scored: Vec<(f64, bool)> = rows
            .step_by(usize::try_from(step).unwrap_or(usize::MAX))
            .map(|row| {
                self.draw(row, &mut drawn);
                (drawn.probability, drawn.cells[0] == Some(1))
            })
            .collect();
        area_under_curve(&mut scored)
    }

    /// Writes rows as text in Criteo's layout: tabs, no header, missing counts empty.
    pub fn write_text(&self, rows: Range<u64>, mut to: impl Write) -> std::io::Result<()> {
        let mut drawn = Drawn::default();
        for row in rows {
            self.draw(row, &mut drawn);
            for (column, cell) in drawn.cells.iter().enumerate() {
                if column > 0 {
                    to.write_all(b"\t")?;
                }
                if let Some(value) = cell {
                    write!(to, "{value}")?;
                }
            }
            to.write_all(b"\n")?;
        }
        to.flush()
    }
}

// They distinguish the uses of the seed.
const ROWS: u64 = 1;
const DENSE_WEIGHTS: u64 = 2;
const EFFECTS: u64 = 3;

/// The effect of an id: mean 0, variance 1.
fn effect(seed: u64, field: u64, id: u64) -> f64 {
    let bits = mix(mix(mix(seed ^ EFFECTS).wrapping_add(field)) ^ id);
    let sum: u64 = (0..4).map(|piece| bits >> (16 * piece) & 0xffff).sum();
    (sum as f64 / 65_535.0 - 2.0) * 3_f64.sqrt()
}

/// Probability that a positive is scored above a negative. Ties count half. 0.5 without positives
/// or without negatives.
fn area_under_curve(scored: &mut [(f64, bool)]) -> f64 {
    scored.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let (mut wins, mut negatives, mut positives) = (0.0, 0.0, 0.0);
    for tied in scored.chunk_by(|a, b| a.0 == b.0) {
        let here = tied.iter().filter(|(_, label)| *label).count() as f64;
        let others = tied.len() as f64 - here;
        wins += here * (negatives + others / 2.0);
        positives += here;
        negatives += others;
    }
    match positives * negatives {
        0.0 => 0.5,
        pairs => wins / pairs,
    }
}

/// Zipf's law on 1..=n by rejection-inversion (Hörmann and Derflinger 1996): constant time, no
/// tables.
#[derive(Debug, Clone)]
struct Zipf {
    n: u64,
    exponent: f64,
    integral_at_one: f64,
    integral_at_n: f64,
    squeeze: f64,
}

impl Zipf {
    fn new(n: u64, exponent: f64) -> Self {
        let mut zipf = Self { n, exponent, integral_at_one: 0.0, integral_at_n: 0.0, squeeze: 0.0 };
        zipf.integral_at_one = zipf.integral(1.5) - 1.0;
        zipf.integral_at_n = zipf.integral(n as f64 + 0.5);
        zipf.squeeze = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.density(2.0));
        zipf
    }

    fn draw(&self, random: &mut SplitMix64) -> u64 {
        loop {
            let span = self.integral_at_one - self.integral_at_n;
            let u = self.integral_at_n + random.unit() * span;
            let x = self.inverse(u);
            let rank = x.round().clamp(1.0, self.n as f64);
            if rank - x <= self.squeeze || u >= self.integral(rank + 0.5) - self.density(rank) {
                return rank as u64;
            }
        }
    }

    /// x^−s
    fn density(&self, x: f64) -> f64 {
        (-self.exponent * x.ln()).exp()
    }

    /// ∫ x^−s dx = (x^(1−s) − 1) / (1 − s), or ln x for s = 1.
    fn integral(&self, x: f64) -> f64 {
        let log = x.ln();
        let t = (1.0 - self.exponent) * log;
        match t.abs() < 1e-8 {
            true => log * (1.0 + t / 2.0),
            false => log * (t.exp_m1() / t),
        }
    }

    fn inverse(&self, y: f64) -> f64 {
        let t = (y * (1.0 - self.exponent)).max(-1.0);
        match t.abs() < 1e-8 {
            true => (y * (1.0 - t / 2.0)).exp(),
            false => (y * (t.ln_1p() / t)).exp(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_follow_zipfs_law() {
        for (n, exponent) in [(1, 1.05), (5, 1.05), (50, 1.0), (1000, 0.7), (1000, 2.0)] {
            let zipf = Zipf::new(n, exponent);
            let mut random = SplitMix64::of_words(&[n]);
            let mut counts = vec![0_u64; n as usize];
            let draws = 100_000;
            for _ in 0..draws {
                counts[zipf.draw(&mut random) as usize - 1] += 1;
            }
            let weight = |rank: u64| (rank as f64).powf(-exponent);
            let total: f64 = (1..=n).map(weight).sum();
            for rank in 1..=n.min(20) {
                let expected = weight(rank) / total * draws as f64;
                let found = counts[rank as usize - 1] as f64;
                assert!(
                    (found - expected).abs() <= 5.0 * expected.sqrt() + 1.0,
                    "n {n}, s {exponent}, rank {rank}: {found} against {expected}"
                );
            }
        }
    }

    #[test]
    fn the_area_under_the_curve_is_the_share_of_pairs_in_order() {
        let scored = [(0.1, false), (0.4, true), (0.4, false), (0.8, true), (0.9, false)];
        let mut pairs = 0.0;
        for (p, _) in scored.iter().filter(|s| s.1) {
            for (q, _) in scored.iter().filter(|s| !s.1) {
                pairs += if p > q {
                    1.0
                } else if p == q {
                    0.5
                } else {
                    0.0
                };
            }
        }
        assert!((area_under_curve(&mut scored.clone()) - pairs / 6.0).abs() < 1e-12);
        assert_eq!(area_under_curve(&mut [(0.3, true)]), 0.5);
    }

    #[test]
    fn effects_have_mean_zero_and_variance_one_in_every_field() {
        for field in 0..3 {
            let effects: Vec<f64> = (0..50_000).map(|id| effect(9, field, id)).collect();
            let mean = effects.iter().sum::<f64>() / 50_000.0;
            let variance = effects.iter().map(|e| (e - mean).powi(2)).sum::<f64>() / 50_000.0;
            assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
        }
        assert_ne!(effect(9, 0, 5), effect(9, 1, 5));
    }

    /// The teacher's probabilities are calibrated, and their AUC lies between chance and 1.
    #[test]
    fn labels_are_as_frequent_as_the_teacher_predicts() {
        let teacher = Teacher::new(SyntheticConfig::default()).unwrap();
        let (mut drawn, mut sums) = (Drawn::default(), [(0.0, 0.0, 0.0); 5]);
        for row in 0..50_000 {
            teacher.draw(row, &mut drawn);
            let bin = &mut sums[((drawn.probability * 5.0) as usize).min(4)];
            bin.0 += drawn.probability;
            bin.1 += drawn.cells[0].unwrap() as f64;
            bin.2 += 1.0;
        }
        for (predicted, positive, rows) in sums {
            let tolerance = 4.0 * f64::max(rows, 1.0).sqrt() * 0.5;
            assert!((predicted - positive).abs() < tolerance, "{predicted} {positive} {rows}");
        }
        let rate = sums.iter().map(|bin| bin.1).sum::<f64>() / 50_000.0;
        let auc = teacher.best_possible_auc(0..50_000);
        assert!((0.15..0.45).contains(&rate), "{rate}");
        assert!((0.70..0.95).contains(&auc), "{auc}");
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let base = SyntheticConfig::default;
        for config in [
            SyntheticConfig { rows: 0, ..base() },
            SyntheticConfig { vocabularies: vec![0], ..base() },
            SyntheticConfig { zipf_exponent: 0.0, ..base() },
            SyntheticConfig { bias: f64::NAN, ..base() },
        ] {
            assert!(Teacher::new(config).unwrap_err().is_users_input());
        }
    }
}
