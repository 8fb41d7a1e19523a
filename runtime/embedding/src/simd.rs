//! The vector units that a row is computed on, chosen when the program runs.
//!
//! The computation is written once ([`RowStep::apply`]), element by element in a fixed order and
//! never fused, and compiled for each unit. So every unit gives the same bits.
//!
//! | machine | unit |
//! |---|---|
//! | x86-64 | AVX-512 or AVX2, if the processor has them, for rows of 64 columns or more; else SSE2 |
//! | AArch64 | NEON, which each has |
//! | others | what the compiler makes of it |

#![allow(unsafe_code)]

use crate::optimizer::{self, RowStep, Step};

/// The least columns of a row that is computed on wide vectors: four vectors of AVX-512.
const LEAST_WIDE: usize = 64;

/// A kind of vector unit that this processor has. Only [`Simd::all`] makes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Simd(Unit);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The vectors that every processor of the target has.
    Baseline,
}

impl Simd {
    /// The units that this processor has, the best first.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let units = [
            #[cfg(target_arch = "x86_64")]
            (Unit::Avx512, is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl")),
            #[cfg(target_arch = "x86_64")]
            (Unit::Avx2, is_x86_feature_detected!("avx2")),
            (Unit::Baseline, true),
        ];
        units.into_iter().filter(|&(_, has)| has).map(|(unit, _)| Self(unit))
    }

    /// The unit for rows of this many columns: the best one for long rows, the baseline for others.
    /// The loops for wide vectors unroll, so that most columns of a short row would be left to the
    /// scalar remainder.
    pub(crate) fn for_columns(columns: usize) -> Self {
        let best = Self::all().next().filter(|_| columns >= LEAST_WIDE);
        best.unwrap_or(Self(Unit::Baseline))
    }

    /// See [`RowStep::apply`].
    #[inline]
    pub(crate) fn apply(self, step: &Step, values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `all` makes this only if the processor has AVX-512F and VL.
            Unit::Avx512 => unsafe { apply_avx512(step, values, state, gradient) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `all` makes this only if the processor has AVX2.
            Unit::Avx2 => unsafe { apply_avx2(step, values, state, gradient) },
            Unit::Baseline => step.apply(values, state, gradient),
        }
    }

    /// See [`optimizer::all_finite`].
    #[inline]
    pub(crate) fn all_finite(self, gradient: &[f32]) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `all` makes these only if the processor has AVX2, as each with AVX-512 has.
            Unit::Avx512 | Unit::Avx2 => unsafe { all_finite_avx2(gradient) },
            Unit::Baseline => optimizer::all_finite(gradient),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl")]
fn apply_avx512(step: &Step, values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
    step.apply(values, state, gradient);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn apply_avx2(step: &Step, values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
    step.apply(values, state, gradient);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn all_finite_avx2(gradient: &[f32]) -> bool {
    optimizer::all_finite(gradient)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::RowOptimizer;

    /// Values of all sizes, with subnormals and 0.
    fn floats(seed: u64, count: usize) -> Vec<f32> {
        let float = |i: u64| {
            let bits = xxhash_rust::xxh3::xxh3_64(&(seed << 32 | i).to_le_bytes());
            let scale = [1.0, 1e-3, 1e-20, 1e-40, 1e15, 0.0][bits as usize % 6];
            ((bits >> 40) as f32 / (1_u64 << 24) as f32 - 0.5) * scale
        };
        (0..count as u64).map(float).collect()
    }

    fn bits(floats: &[f32]) -> Vec<u32> {
        floats.iter().map(|float| float.to_bits()).collect()
    }

    #[test]
    fn every_unit_gives_the_bits_of_the_baseline() {
        let units: Vec<Simd> = Simd::all().collect();
        println!("tested: {units:?}; this processor lacks all others, which are skipped");
        for unit in &units[..units.len() - 1] {
            for optimizer in optimizer::examples() {
                for dim in (1..=40).chain([48, 64, 100, 128, 255]) {
                    let start = floats(1, dim);
                    let mut state = vec![0.0; optimizer.state_len(dim)];
                    optimizer.initial_state(&start, &mut state);
                    let (mut values, mut expected, mut expected_state) = (start.clone(), start, state.clone());
                    for count in 1..=5 {
                        let gradient = floats(1 + count, dim);
                        let step = optimizer.step(count);
                        unit.apply(&step, &mut values, &mut state, &gradient);
                        step.apply(&mut expected, &mut expected_state, &gradient);
                        assert_eq!(bits(&values), bits(&expected), "{unit:?} {optimizer:?} dim {dim}");
                        assert_eq!(bits(&state), bits(&expected_state), "{unit:?} {optimizer:?} dim {dim}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_unit_finds_a_non_finite_element_anywhere() {
        for unit in Simd::all() {
            for dim in [1, 7, 15, 16, 17, 31, 32, 64, 65] {
                let mut gradient = vec![-f32::MAX; dim];
                assert!(unit.all_finite(&gradient));
                for column in 0..dim {
                    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                        gradient[column] = bad;
                        assert!(!unit.all_finite(&gradient), "{unit:?}: {bad} in column {column} of {dim}");
                    }
                    gradient[column] = 0.0;
                }
            }
        }
    }
}
