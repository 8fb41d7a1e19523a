//! Follows Rong et al., *Distributed Equivalent Substitution Training for Large-Scale Recommender
//! Systems*, in the order of the paper:
//!
//! - §3.2.2: a partition of the weights and partial results (algorithm 1), and a backward pass
//!   that needs the gradient of their sum alone;
//! - §3.2.3 and table 2: the bytes of the two orders of weights, and the ratio that they save;
//! - §4.1: `lr`, equations 2 and 3;
//! - §4.2: `fm`, equations 4 to 6, against a naive computation in 64 bits over pairs of features.
//!   Planted bugs must deviate from it;
//! - §4.3: cells whose ids several servers hold, which the paper avoids by whole fields;
//! - §5: the paper's placement of fields. Here servers hold slots, and nothing is placed by field.
//!
//! `runtime/pooling/src/tests/tower.rs` has the first layer of `dnn` (§4.3) and the cross layers of
//! DCN (figure 6), which no job uses yet.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use rectrain_kinds::ModelKind;
use rectrain_modes::des::cells::{Cell, CellSums};
use rectrain_modes::des::{Partial, PooledGradients, SubOperators, Substitution};
use rectrain_modes::packing::Packing;
use rectrain_modes::{DenseHome, TrainingMode};
use rectrain_random::SplitMix64;

const SAMPLES: usize = 9;
const FEATURES: usize = 5;

/// Pooled weights and embeddings of each server. A cell that a server has no ids of is 0.
struct Partition {
    substitution: Substitution,
    linear: Vec<Vec<f32>>,
    embeddings: Vec<Vec<f32>>,
    /// By server: the cells whose ids other servers hold, too.
    cells: Vec<Vec<Cell>>,
}

/// A number in [-0.5, 0.5).
fn number(random: &mut SplitMix64) -> f32 {
    random.unit() as f32 - 0.5
}

impl Partition {
    /// Each cell has ids on one of the servers, or if `shares` on two of them.
    fn random(servers: usize, dim: usize, shares: bool, random: &mut SplitMix64) -> Self {
        let substitution = Substitution { features: FEATURES, dim };
        let mut partition = Self {
            substitution,
            linear: vec![vec![0.0; SAMPLES * FEATURES]; servers],
            embeddings: vec![vec![0.0; SAMPLES * FEATURES * dim]; servers],
            cells: vec![Vec::new(); servers],
        };
        for feature in 0..FEATURES {
            for sample in 0..SAMPLES {
                let first = random.next_u64() as usize % servers;
                let is_shared = shares && servers > 1 && random.next_u64().is_multiple_of(2);
                let owners = if is_shared { vec![first, (first + 1) % servers] } else { vec![first] };
                for owner in owners {
                    let place = sample * FEATURES + feature;
                    partition.linear[owner][place] = number(random);
                    partition.embeddings[owner][place * dim..(place + 1) * dim].fill_with(|| number(random));
                    if is_shared && dim > 0 {
                        partition.cells[owner].push(Cell { feature: feature as u32, sample: sample as u32 });
                    }
                }
            }
        }
        partition
    }

    /// The sum ⊕, and by server the whole embeddings of its shared cells.
    fn sum(&self) -> (Partial, Vec<Vec<f32>>) {
        let mut total =
            Partial { first: vec![0.0; SAMPLES], second: vec![0.0; SAMPLES * self.substitution.second_columns()] };
        let mut sums = CellSums::new(self.substitution);
        for ((linear, embeddings), cells) in self.linear.iter().zip(&self.embeddings).zip(&self.cells) {
            total.add(&self.substitution.reduce(SAMPLES, linear, embeddings));
            sums.add(cells, &self.substitution.vectors_of(cells, embeddings), &mut total);
        }
        let whole = self.cells.iter().map(|cells| sums.vectors_of(cells)).collect();
        (total, whole)
    }

    /// Σ over samples of c·logit, in 64 bits, over the pairs of features: equation 4, left side.
    fn naive(&self, of_samples: &[f64]) -> f64 {
        let dim = self.substitution.dim;
        let pooled = |values: &[Vec<f32>], place: usize| -> f64 { values.iter().map(|of| f64::from(of[place])).sum() };
        let mut total = 0.0;
        for (sample, factor) in of_samples.iter().enumerate() {
            let mut logit: f64 = (0..FEATURES).map(|feature| pooled(&self.linear, sample * FEATURES + feature)).sum();
            for first in 0..FEATURES {
                for second in first + 1..FEATURES {
                    let of = |feature: usize, column: usize| {
                        pooled(&self.embeddings, (sample * FEATURES + feature) * dim + column)
                    };
                    logit += (0..dim).map(|column| of(first, column) * of(second, column)).sum::<f64>();
                }
            }
            total += factor * logit;
        }
        total
    }

    /// The gradients of one server's cells, from the gradient of the sum.
    fn gradients(&self, server: usize, gradient: &Partial, whole: &[Vec<f32>]) -> PooledGradients {
        let mut embeddings = self.embeddings[server].clone();
        self.substitution.put_vectors(&self.cells[server], &whole[server], &mut embeddings);
        self.substitution.spread(gradient, &embeddings)
    }
}

/// 𝓕 of equations 3 and 6 without σ and b, `[samples]`.
fn logits(sum: &Partial, dim: usize) -> Vec<f64> {
    let second_order = |sample: usize| {
        let Some(results) = sum.second.chunks_exact(dim + 1).nth(sample).filter(|_| dim > 0) else { return 0.0 };
        let square: f64 = results[..dim].iter().map(|value| f64::from(*value).powi(2)).sum();
        0.5 * square - 0.5 * f64::from(results[dim])
    };
    sum.first.iter().enumerate().map(|(sample, first)| f64::from(*first) + second_order(sample)).collect()
}

/// The gradient of Σ c·logit by the sum: c, c·M₁ and −c/2.
fn gradient_of(sum: &Partial, of_samples: &[f64], dim: usize) -> Partial {
    let first = of_samples.iter().map(|factor| *factor as f32).collect();
    let mut second = Vec::new();
    if dim > 0 {
        for (results, factor) in sum.second.chunks_exact(dim + 1).zip(of_samples) {
            second.extend(results[..dim].iter().map(|value| *factor as f32 * value));
            second.push(-0.5 * *factor as f32);
        }
    }
    Partial { first, second }
}

fn factors(random: &mut SplitMix64) -> Vec<f64> {
    (0..SAMPLES).map(|_| f64::from(number(random))).collect()
}

fn weighted(logits: &[f64], factors: &[f64]) -> f64 {
    logits.iter().zip(factors).map(|(logit, factor)| logit * factor).sum()
}

// ---- §3.2.2 Algorithm -------------------------------------------------------------------------

/// Algorithm 1, and equations 3 and 6: 𝓕(⊕ M(Wᵢ, Xᵢ)) ≡ F for every partition.
#[test]
fn algorithm_1_the_sum_of_partial_results_is_the_operator() {
    let mut random = SplitMix64::new(3);
    for dim in [0, 1, 8] {
        for servers in [1, 2, 3, 7] {
            for shares in [false, true] {
                let partition = Partition::random(servers, dim, shares, &mut random);
                let factors = factors(&mut random);
                let found = weighted(&logits(&partition.sum().0, dim), &factors);
                let expected = partition.naive(&factors);
                assert!((found - expected).abs() < 1e-5, "{dim}, {servers}, {shares}: {found}, not {expected}");
            }
        }
    }
}

/// "Each process just transfers the gradients directly back to its own sub-operator." Finite
/// differences of the naive computation by each weight of each server.
#[test]
fn algorithm_1_the_gradient_of_the_sum_is_enough_for_every_weight() {
    const EPSILON: f32 = 1.0 / 64.0;
    let mut random = SplitMix64::new(5);
    for (dim, servers, shares) in [(0, 3, true), (2, 1, false), (2, 3, false), (2, 3, true)] {
        let mut partition = Partition::random(servers, dim, shares, &mut random);
        let factors = factors(&mut random);
        let (sum, whole) = partition.sum();
        let gradient = gradient_of(&sum, &factors, dim);
        for server in 0..servers {
            let found = partition.gradients(server, &gradient, &whole);
            for (place, found) in found.linear.iter().enumerate() {
                let expected = factors[place / FEATURES];
                assert!((f64::from(*found) - expected).abs() < 1e-6, "{found}, not {expected}");
            }
            let held = |place: &usize| partition.linear[server][place / dim] != 0.0;
            let places: Vec<usize> = (0..partition.embeddings[server].len()).filter(held).collect();
            for place in places {
                let value = partition.embeddings[server][place];
                let mut moved = |by: f32| {
                    partition.embeddings[server][place] = value + by;
                    let loss = partition.naive(&factors);
                    partition.embeddings[server][place] = value;
                    loss
                };
                // The operator is quadratic, so the central difference is exact but for rounding.
                let expected = (moved(EPSILON) - moved(-EPSILON)) / (2.0 * f64::from(EPSILON));
                let found = f64::from(found.embeddings[place]);
                assert!((found - expected).abs() < 1e-4, "{dim}, {servers}, {shares}: {found}, not {expected}");
            }
        }
    }
}

/// The mode is fully synchronous: the step, the barrier and the home of the dense parameters are
/// as in `sync`.
#[test]
fn s3_2_des_is_fully_synchronous() {
    assert_eq!(TrainingMode::Des.staleness(), 0);
    assert_eq!(TrainingMode::Des.dense_home(), DenseHome::Workers);
    assert_eq!(TrainingMode::Des.family(), TrainingMode::Sync.family());
}

/// A partial result that is missed or counted twice, and missing products of shared cells, change
/// the results.
#[test]
fn planted_bugs_deviate_from_the_naive_computation() {
    let mut random = SplitMix64::new(7);
    let partition = Partition::random(3, 4, true, &mut random);
    let factors = factors(&mut random);
    let expected = partition.naive(&factors);
    let results = |server: usize| {
        partition.substitution.reduce(SAMPLES, &partition.linear[server], &partition.embeddings[server])
    };
    let deviates = |total: &Partial| (weighted(&logits(total, 4), &factors) - expected).abs() > 1e-3;
    let mut total = results(0);
    total.add(&results(1));
    assert!(deviates(&total), "a partial sum is missed");
    total.add(&results(2));
    assert!(deviates(&total), "the products of shared cells are missed");
    let (mut total, whole) = partition.sum();
    assert!(!deviates(&total));
    total.add(&results(1));
    assert!(deviates(&total), "a server's weights are counted twice");
    let (total, _) = partition.sum();
    let gradient = gradient_of(&total, &factors, 4);
    let right = partition.gradients(0, &gradient, &whole).embeddings;
    let own = partition.substitution.spread(&gradient, &partition.embeddings[0]).embeddings;
    assert_ne!(own, right, "the gradient of a shared cell needs its whole embedding");
}

// ---- §4 Applications --------------------------------------------------------------------------

#[test]
fn s4_lr_fm_and_towers_have_substitutions() {
    let first = Some(Substitution { features: 26, dim: 0 });
    let second = Some(Substitution { features: 26, dim: 8 });
    for (kind, units, sums, columns) in [
        (ModelKind::Lr, 0, first, 0),
        (ModelKind::Fm, 0, second, 9),
        (ModelKind::Dnn, 256, None, 256),
        (ModelKind::WideDeep, 256, first, 256),
        (ModelKind::DeepFm, 256, second, 265),
        (ModelKind::Dcn, 260, None, 260),
    ] {
        let found = SubOperators::of(kind, 26, 8, units).unwrap();
        assert_eq!((found, found.columns()), (SubOperators { sums, units }, columns), "{kind}");
    }
    for kind in ModelKind::ALL {
        assert_eq!(SubOperators::of(kind, 26, 8, 0).is_some(), kind.has_substitution(), "{kind}");
        assert_eq!(kind.refuses_substitution().is_none(), kind.has_substitution(), "{kind}");
    }
}

/// Table 2: R = 1 − 2·S_M / (S_f + S_w), with keys of 8 bytes and values of 4. S_M is the size of
/// the partial results that the sub-operators really return.
#[test]
fn table_2_the_bytes_saved_against_the_mesh() {
    let table = [
        (512, 147_664, 99.769, 99.376),
        (1024, 257_757, 99.735, 99.285),
        (2048, 448_814, 99.696, 99.179),
        (4096, 789_511, 99.654, 99.066),
        (8192, 1_389_353, 99.607, 98.939),
    ];
    for (batch, unique, lr, fm) in table {
        let saved = |values: usize, columns: usize| {
            let (results, mesh) = (4 * values, unique * (8 + 4 * columns));
            100.0 * (1.0 - 2.0 * results as f64 / mesh as f64)
        };
        let of_lr = Substitution { features: 1, dim: 0 }.reduce(batch, &vec![0.0; batch], &[]);
        assert!((saved(of_lr.first.len(), 1) - lr).abs() < 6e-4, "lr, {batch}");
        let of_fm = Substitution { features: 1, dim: 8 }.reduce(batch, &vec![0.0; batch], &vec![0.0; batch * 8]);
        assert!((saved(of_fm.second.len(), 8) - fm).abs() < 6e-4, "fm, {batch}");
    }
}

// ---- §5 System implementation -----------------------------------------------------------------

/// "The i-th node will hold all the weights that are corresponding with feature field IDs f where i
/// = f mod N."
#[test]
fn s5_field_f_is_on_server_f_mod_n() {
    let costs = [7, 1, 1, 7, 1, 1, 7];
    let placed = Packing::modulo(&costs, 3);
    assert_eq!(placed.bins(), [0, 1, 2, 0, 1, 2, 0]);
    assert_eq!(placed.loads(), [21, 2, 2]);
}
