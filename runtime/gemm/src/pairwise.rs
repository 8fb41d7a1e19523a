//! Dot products of all pairs of a sample's vectors, and their gradients. Each sample has a matrix
//! `Z` of few short rows. So the products `Z·Zᵀ` and `(G + Gᵀ)·Z` would be all edge as tiles.
//!
//! The computation is written once, for 16 values side by side, and compiled for each vector unit:
//!
//! - forward: 16 pairs of one vector with others, from a transposed copy of the sample's vectors;
//! - backward: 16 values of the gradient of one vector.
//!
//! Four vectors are computed together, so that their sums do not wait for each other. Either copy
//! of a sample stays in the nearest cache. Every sum is in the order of its terms and uses fused
//! multiply-adds. So AVX-512, AVX2 and NEON produce the same bits.
// Calls of functions that are compiled for a vector unit.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::cmp::Ordering;

use crate::kernel::{FUSED, Vectors};

/// Values that are computed side by side.
const LANES: usize = 16;
/// Vectors that are computed together. Each has sums of its own name: the compiler keeps those in
/// registers, and an array of them in memory.
const TOGETHER: usize = 4;

/// The pairs of a sample's vectors. The vectors come in two parts, so that their caller need not
/// copy them into one: at most one vector that leads, and the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pairwise {
    leads: bool,
    others: usize,
    dim: usize,
    by: Vectors,
}

/// The vectors of a batch.
#[derive(Clone, Copy, Debug)]
pub struct PairwiseVectors<'a> {
    /// The leading vector of each sample, `[samples, dim]`; empty without one.
    pub leading: &'a [f32],
    /// The other vectors of each sample, `[samples, others · dim]`.
    pub others: &'a [f32],
}

/// Copies of one sample's vectors.
#[derive(Default)]
struct Scratch {
    /// For each 16 vectors and each dimension, the values of these vectors side by side.
    transposed: Vec<[f32; LANES]>,
    /// The vectors one after another, each padded to whole parts of 16 values.
    padded: Vec<[f32; LANES]>,
    /// The products of a sample, and room for the unused lanes of the last ones.
    products: Vec<f32>,
    /// The gradients of a sample, laid out as `padded`.
    gradients: Vec<[f32; LANES]>,
}

thread_local! {
    /// The copies of the sample that this thread computes.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Pairwise {
    /// The pairs of `others` vectors of `dim` values. With `leads`, a leading vector pairs with
    /// each of them too. The fastest instructions of this processor compute them.
    ///
    /// # Panics
    /// If `dim` or `others` is 0.
    pub fn new(leads: bool, others: usize, dim: usize) -> Self {
        assert!(dim > 0 && others > 0, "{others} vectors of {dim} values have no pairs");
        Self { leads, others, dim, by: Vectors::all().next().unwrap_or(Vectors::Portable) }
    }

    /// The same pairs by each kind of instructions that this processor has, the fastest first.
    pub fn by_all_instructions(self) -> impl Iterator<Item = Self> {
        Vectors::all().map(move |by| Self { by, ..self })
    }

    /// The vectors of a sample.
    fn vectors(&self) -> usize {
        usize::from(self.leads) + self.others
    }

    /// The pairs of a sample.
    pub fn pairs(&self) -> usize {
        first_pair(self.vectors())
    }

    /// Columns of the result: the leading vector, and the pairs.
    pub fn columns(&self) -> usize {
        self.leading_values() + self.pairs()
    }

    fn leading_values(&self) -> usize {
        if self.leads { self.dim } else { 0 }
    }

    /// The number of samples.
    ///
    /// # Panics
    /// If both parts do not have whole vectors of the same number of samples.
    fn samples(&self, vectors: PairwiseVectors<'_>) -> usize {
        let samples = vectors.others.len() / (self.others * self.dim);
        let lengths = [vectors.leading.len(), vectors.others.len()];
        let expected = [samples * self.leading_values(), samples * self.others * self.dim];
        assert_eq!(lengths, expected, "the values of the leading vectors and of the others");
        samples
    }

    /// For each sample, its leading vector and then its dot products, in the order (1,0), (2,0),
    /// (2,1), (3,0), …: `[samples, columns]`. The leading vector has number 0. `out` is
    /// overwritten, and keeps its memory.
    ///
    /// # Panics
    /// If the parts of `vectors` do not fit.
    pub fn forward(&self, vectors: PairwiseVectors<'_>, out: &mut Vec<f32>) {
        out.clear();
        out.reserve(self.samples(vectors) * self.columns());
        SCRATCH.with_borrow_mut(|scratch| match self.by {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Vectors::all` makes this only if the processor has AVX-512F.
            Vectors::Avx512 => unsafe { forward_avx512(*self, vectors, scratch, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Vectors::all` makes this only if the processor has AVX2 and FMA.
            Vectors::Avx2 => unsafe { forward_avx2(*self, vectors, scratch, out) },
            _ => forward::<FUSED>(*self, vectors, scratch, out),
        });
    }

    /// The gradients of the leading vectors and of the others, from the gradient of
    /// [`Pairwise::forward`]'s result. The outputs are overwritten, and keep their memory.
    ///
    /// # Panics
    /// If the parts of `vectors` do not fit, or `gradient` is not `[samples, columns]`.
    pub fn backward(
        &self,
        vectors: PairwiseVectors<'_>,
        gradient: &[f32],
        of_leading: &mut Vec<f32>,
        of_others: &mut Vec<f32>,
    ) {
        let samples = self.samples(vectors);
        assert_eq!(gradient.len(), samples * self.columns(), "the gradient of {samples} samples");
        of_leading.clear();
        of_leading.reserve(vectors.leading.len());
        of_others.clear();
        of_others.reserve(vectors.others.len());
        let targets = Targets { of_leading, of_others };
        SCRATCH.with_borrow_mut(|scratch| match self.by {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Vectors::all` makes this only if the processor has AVX-512F.
            Vectors::Avx512 => unsafe { backward_avx512(*self, vectors, gradient, scratch, targets) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Vectors::all` makes this only if the processor has AVX2 and FMA.
            Vectors::Avx2 => unsafe { backward_avx2(*self, vectors, gradient, scratch, targets) },
            _ => backward::<FUSED>(*self, vectors, gradient, scratch, targets),
        });
    }

    /// A vector of a sample.
    #[inline(always)]
    fn vector<'a>(&self, sample: PairwiseVectors<'a>, index: usize) -> &'a [f32] {
        match self.leads {
            true if index == 0 => sample.leading,
            leads => &sample.others[(index - usize::from(leads)) * self.dim..][..self.dim],
        }
    }

    /// The vectors of each sample, part by part.
    fn by_sample<'a>(&self, vectors: PairwiseVectors<'a>) -> impl Iterator<Item = PairwiseVectors<'a>> + use<'a> {
        let leading_values = self.leading_values();
        let others = vectors.others.chunks_exact(self.others * self.dim);
        others.enumerate().map(move |(sample, others)| PairwiseVectors {
            leading: &vectors.leading[sample * leading_values..][..leading_values],
            others,
        })
    }
}

impl<'a> PairwiseVectors<'a> {
    /// The vectors of one sample, in order.
    #[inline(always)]
    fn each(self, dim: usize) -> impl Iterator<Item = &'a [f32]> {
        self.leading.chunks_exact(dim).chain(self.others.chunks_exact(dim))
    }
}

/// The position of the pair of a vector with vector 0: the pairs of all vectors before it.
fn first_pair(vector: usize) -> usize {
    vector * vector.saturating_sub(1) / 2
}

/// The outputs of a backward pass.
struct Targets<'a> {
    of_leading: &'a mut Vec<f32>,
    of_others: &'a mut Vec<f32>,
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn forward_avx512(pairwise: Pairwise, vectors: PairwiseVectors<'_>, scratch: &mut Scratch, out: &mut Vec<f32>) {
    forward::<true>(pairwise, vectors, scratch, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn forward_avx2(pairwise: Pairwise, vectors: PairwiseVectors<'_>, scratch: &mut Scratch, out: &mut Vec<f32>) {
    forward::<true>(pairwise, vectors, scratch, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn backward_avx512(
    pairwise: Pairwise,
    vectors: PairwiseVectors<'_>,
    gradient: &[f32],
    scratch: &mut Scratch,
    targets: Targets<'_>,
) {
    backward::<true>(pairwise, vectors, gradient, scratch, targets);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn backward_avx2(
    pairwise: Pairwise,
    vectors: PairwiseVectors<'_>,
    gradient: &[f32],
    scratch: &mut Scratch,
    targets: Targets<'_>,
) {
    backward::<true>(pairwise, vectors, gradient, scratch, targets);
}

#[inline(always)]
fn forward<const FUSED: bool>(
    pairwise: Pairwise,
    vectors: PairwiseVectors<'_>,
    scratch: &mut Scratch,
    out: &mut Vec<f32>,
) {
    let (count, dim, pairs) = (pairwise.vectors(), pairwise.dim, pairwise.pairs());
    scratch.transposed.resize(count.div_ceil(LANES) * dim, [0.0; LANES]);
    scratch.products.resize(pairs + LANES, 0.0);
    let Scratch { transposed, products, .. } = scratch;
    for sample in pairwise.by_sample(vectors) {
        for (index, vector) in sample.each(dim).enumerate() {
            let lanes = &mut transposed[index / LANES * dim..][..dim];
            lanes.iter_mut().zip(vector).for_each(|(lanes, &value)| lanes[index % LANES] = value);
        }
        // The last 16 products of a vector may end beyond its pairs, in the first 16 products of
        // the next vectors. So those are computed later.
        for part in (0..count.div_ceil(LANES)).rev() {
            let others = &transposed[part * dim..][..dim];
            let mut index = part * LANES + 1;
            while index + TOGETHER <= count {
                let four = std::array::from_fn(|own| pairwise.vector(sample, index + own));
                for sums in products_of_four::<FUSED>(four, others) {
                    products[first_pair(index) + part * LANES..][..LANES].copy_from_slice(&sums);
                    index += 1;
                }
            }
            for index in index..count {
                let sums = products_of::<FUSED>(pairwise.vector(sample, index), others);
                products[first_pair(index) + part * LANES..][..LANES].copy_from_slice(&sums);
            }
        }
        out.extend_from_slice(sample.leading);
        out.extend_from_slice(&products[..pairs]);
    }
}

/// The dot products of a vector with 16 others.
#[inline(always)]
fn products_of<const FUSED: bool>(vector: &[f32], others: &[[f32; LANES]]) -> [f32; LANES] {
    let mut sums = [0.0; LANES];
    for (&value, others) in vector.iter().zip(others) {
        add_product::<FUSED>(&mut sums, value, others);
    }
    sums
}

/// [`products_of`] for four vectors.
#[inline(always)]
fn products_of_four<const FUSED: bool>(
    [of_a, of_b, of_c, of_d]: [&[f32]; TOGETHER],
    others: &[[f32; LANES]],
) -> [[f32; LANES]; TOGETHER] {
    let [mut a, mut b, mut c, mut d] = [[0.0; LANES]; TOGETHER];
    for (dimension, others) in others.iter().enumerate() {
        add_product::<FUSED>(&mut a, of_a[dimension], others);
        add_product::<FUSED>(&mut b, of_b[dimension], others);
        add_product::<FUSED>(&mut c, of_c[dimension], others);
        add_product::<FUSED>(&mut d, of_d[dimension], others);
    }
    [a, b, c, d]
}

/// `sums += factor · values`.
#[inline(always)]
fn add_product<const FUSED: bool>(sums: &mut [f32; LANES], factor: f32, values: &[f32; LANES]) {
    for (sum, &value) in sums.iter_mut().zip(values) {
        *sum = if FUSED { factor.mul_add(value, *sum) } else { factor * value + *sum };
    }
}

#[inline(always)]
fn backward<const FUSED: bool>(
    pairwise: Pairwise,
    vectors: PairwiseVectors<'_>,
    gradient: &[f32],
    scratch: &mut Scratch,
    targets: Targets<'_>,
) {
    let (count, dim) = (pairwise.vectors(), pairwise.dim);
    let parts = dim.div_ceil(LANES);
    let Scratch { padded, gradients, .. } = scratch;
    padded.resize(count * parts, [0.0; LANES]);
    gradients.resize(count * parts, [0.0; LANES]);
    let Targets { of_leading, of_others } = targets;
    // A result without columns has no rows to walk over, and all gradients are 0.
    let mut rows = gradient.chunks_exact(pairwise.columns().max(1));
    for sample in pairwise.by_sample(vectors) {
        for (vector, padded) in sample.each(dim).zip(padded.chunks_exact_mut(parts)) {
            for (values, padded) in vector.chunks(LANES).zip(padded) {
                padded[..values.len()].copy_from_slice(values);
            }
        }
        let (direct, pairs) = rows.next().unwrap_or_default().split_at(sample.leading.len());
        for part in 0..parts {
            let mut index = 0;
            while index + TOGETHER <= count {
                for sums in gradients_of_four::<FUSED>(index, pairs, padded, (parts, part)) {
                    gradients[index * parts + part] = sums;
                    index += 1;
                }
            }
            for index in index..count {
                gradients[index * parts + part] = gradient_of::<FUSED>(index, pairs, padded, (parts, part));
            }
        }
        let mut vectors = gradients.chunks_exact(parts).map(|vector| &vector.as_flattened()[..dim]);
        if pairwise.leads {
            let leading = vectors.next().unwrap_or_default();
            of_leading.extend(leading.iter().zip(direct).map(|(sum, direct)| sum + direct));
        }
        vectors.for_each(|vector| of_others.extend_from_slice(vector));
    }
}

/// 16 values of a vector's gradient: the sum of all other vectors, each times the gradient of its
/// pair with this one. `padded` has `parts` times 16 values of each vector.
#[inline(always)]
fn gradient_of<const FUSED: bool>(
    index: usize,
    pairs: &[f32],
    padded: &[[f32; LANES]],
    (parts, part): (usize, usize),
) -> [f32; LANES] {
    let mut sums = [0.0; LANES];
    let vectors = || padded.iter().skip(part).step_by(parts);
    // The pairs with earlier vectors lie side by side. A later vector has its own row of them.
    for (&factor, vector) in pairs[first_pair(index)..][..index].iter().zip(vectors()) {
        add_product::<FUSED>(&mut sums, factor, vector);
    }
    for (other, vector) in vectors().enumerate().skip(index + 1) {
        add_product::<FUSED>(&mut sums, pairs[first_pair(other) + index], vector);
    }
    sums
}

/// [`gradient_of`] for four vectors, from number `first` on.
#[inline(always)]
fn gradients_of_four<const FUSED: bool>(
    first: usize,
    pairs: &[f32],
    padded: &[[f32; LANES]],
    (parts, part): (usize, usize),
) -> [[f32; LANES]; TOGETHER] {
    let [mut a, mut b, mut c, mut d] = [[0.0; LANES]; TOGETHER];
    let vectors = || padded.iter().skip(part).step_by(parts).enumerate();
    let [of_a, of_b, of_c, of_d]: [&[f32]; TOGETHER] =
        std::array::from_fn(|own| &pairs[first_pair(first + own)..][..first + own]);
    for (other, vector) in vectors().take(first) {
        add_product::<FUSED>(&mut a, of_a[other], vector);
        add_product::<FUSED>(&mut b, of_b[other], vector);
        add_product::<FUSED>(&mut c, of_c[other], vector);
        add_product::<FUSED>(&mut d, of_d[other], vector);
    }
    // A vector has no pair with itself. With 0 instead, its sum keeps its bits.
    let factor = |own: usize, other: usize| match own.cmp(&other) {
        Ordering::Less => pairs[first_pair(other) + own],
        Ordering::Equal => 0.0,
        Ordering::Greater => pairs[first_pair(own) + other],
    };
    for (other, vector) in vectors().skip(first).take(TOGETHER) {
        add_product::<FUSED>(&mut a, factor(first, other), vector);
        add_product::<FUSED>(&mut b, factor(first + 1, other), vector);
        add_product::<FUSED>(&mut c, factor(first + 2, other), vector);
        add_product::<FUSED>(&mut d, factor(first + 3, other), vector);
    }
    for (other, vector) in vectors().skip(first + TOGETHER) {
        let factors = &pairs[first_pair(other) + first..][..TOGETHER];
        add_product::<FUSED>(&mut a, factors[0], vector);
        add_product::<FUSED>(&mut b, factors[1], vector);
        add_product::<FUSED>(&mut c, factors[2], vector);
        add_product::<FUSED>(&mut d, factors[3], vector);
    }
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::values;

    /// Whether a vector leads, the other vectors, their dimension, and the samples.
    const SHAPES: [(bool, usize, usize, usize); 10] = [
        (true, 26, 16, 3),
        (false, 26, 16, 2),
        (true, 1, 1, 4),
        (false, 1, 5, 2),
        (true, 16, 17, 2),
        (false, 17, 15, 2),
        (true, 32, 40, 1),
        (false, 33, 4, 3),
        (true, 3, 8, 0),
        (true, 15, 33, 1),
    ];

    struct Case {
        pairwise: Pairwise,
        samples: usize,
        leading: Vec<f32>,
        others: Vec<f32>,
        gradient: Vec<f32>,
    }

    impl Case {
        fn new((leads, others, dim, samples): (bool, usize, usize, usize)) -> Self {
            let pairwise = Pairwise::new(leads, others, dim);
            Self {
                pairwise,
                samples,
                leading: values(samples * pairwise.leading_values(), 1),
                others: values(samples * others * dim, 2),
                gradient: values(samples * pairwise.columns(), 3),
            }
        }

        fn vectors(&self) -> PairwiseVectors<'_> {
            PairwiseVectors { leading: &self.leading, others: &self.others }
        }

        /// The result by definition, in 64 bits, for vectors in which value `moved` of all of the
        /// batch is moved by `by`. Values are numbered sample by sample, the leading ones first.
        fn defined(&self, moved: usize, by: f64) -> Vec<f64> {
            let Pairwise { others, dim, .. } = self.pairwise;
            let leading = self.pairwise.leading_values();
            let mut number = 0;
            let mut result = Vec::new();
            for sample in 0..self.samples {
                let own = self.leading[sample * leading..][..leading].iter();
                let own = own.chain(&self.others[sample * others * dim..][..others * dim]);
                let own: Vec<f64> = own
                    .map(|&value| {
                        number += 1;
                        f64::from(value) + if number == moved + 1 { by } else { 0.0 }
                    })
                    .collect();
                result.extend_from_slice(&own[..leading]);
                let vectors: Vec<&[f64]> = own.chunks(dim).collect();
                for (index, vector) in vectors.iter().enumerate() {
                    let dot = |other: &&[f64]| vector.iter().zip(*other).map(|(a, b)| a * b).sum::<f64>();
                    result.extend(vectors[..index].iter().map(dot));
                }
            }
            result
        }

        /// The gradients of all values, numbered as in [`Case::defined`].
        fn computed(&self, pairwise: Pairwise) -> Vec<f32> {
            let (mut of_leading, mut of_others) = (vec![9.0; 3], Vec::new());
            pairwise.backward(self.vectors(), &self.gradient, &mut of_leading, &mut of_others);
            let leading = pairwise.leading_values();
            let others = pairwise.others * pairwise.dim;
            let sample = |sample: usize| {
                [&of_leading[sample * leading..][..leading], &of_others[sample * others..][..others]].concat()
            };
            assert_eq!([of_leading.len(), of_others.len()], [self.leading.len(), self.others.len()]);
            (0..self.samples).flat_map(sample).collect()
        }
    }

    fn assert_close(what: &str, found: &[f32], expected: &[f64], slack: f64) {
        assert_eq!(found.len(), expected.len(), "{what}");
        for (index, (&found, expected)) in found.iter().zip(expected).enumerate() {
            let error = (f64::from(found) - expected).abs();
            assert!(error <= slack * (1.0 + expected.abs()), "{what}, value {index}: {found}, expected {expected}");
        }
    }

    #[test]
    fn products_match_their_definition_on_every_vector_unit() {
        for shape in SHAPES {
            let case = Case::new(shape);
            let expected = case.defined(usize::MAX - 1, 0.0);
            for pairwise in case.pairwise.by_all_instructions() {
                let mut found = vec![7.0; 5];
                pairwise.forward(case.vectors(), &mut found);
                assert_close(&format!("{pairwise:?}"), &found, &expected, 1e-5);
            }
        }
    }

    #[test]
    fn gradients_match_differences_of_the_definition_on_every_vector_unit() {
        for shape in SHAPES {
            let case = Case::new(shape);
            let weighted = |moved: usize, by: f64| -> f64 {
                let result = case.defined(moved, by);
                result.iter().zip(&case.gradient).map(|(value, &weight)| value * f64::from(weight)).sum()
            };
            let step = 1e-3;
            let values = case.leading.len() + case.others.len();
            // A result is linear in each value, so a central difference has no error but rounding.
            let expected: Vec<f64> =
                (0..values).map(|moved| (weighted(moved, step) - weighted(moved, -step)) / (2.0 * step)).collect();
            for pairwise in case.pairwise.by_all_instructions() {
                assert_close(&format!("{pairwise:?}"), &case.computed(pairwise), &expected, 1e-5);
            }
        }
    }

    #[test]
    fn fused_vector_units_give_the_same_bits() {
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        for shape in SHAPES {
            let case = Case::new(shape);
            let fused = case.pairwise.by_all_instructions().filter(|unit| FUSED || unit.by != Vectors::Portable);
            let found: Vec<_> = fused
                .map(|pairwise| {
                    let mut products = Vec::new();
                    pairwise.forward(case.vectors(), &mut products);
                    (bits(products), bits(case.computed(pairwise)))
                })
                .collect();
            assert!(found.windows(2).all(|pair| pair[0] == pair[1]), "{shape:?}");
        }
    }

    #[test]
    fn the_scratch_of_a_larger_sample_does_not_change_a_smaller_one() {
        let (small, large) = (Case::new((true, 3, 5, 2)), Case::new((false, 40, 33, 1)));
        let gradients = || small.computed(small.pairwise);
        let products = || {
            let mut products = Vec::new();
            small.pairwise.forward(small.vectors(), &mut products);
            products
        };
        let before = (products(), gradients());
        let mut unused = Vec::new();
        large.pairwise.forward(large.vectors(), &mut unused);
        large.computed(large.pairwise);
        assert_eq!((products(), gradients()), before);
    }

    #[test]
    #[should_panic(expected = "the leading vectors and of the others")]
    fn a_missing_leading_vector_is_refused() {
        let others = [1.0; 6];
        Pairwise::new(true, 3, 2).forward(PairwiseVectors { leading: &[], others: &others }, &mut Vec::new());
    }
}
