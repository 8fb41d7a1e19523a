//! The lossy value compression of Persia §4.2.3: blocks of f32 as fp16. The sender scales each
//! block by κ/‖v‖∞, and the receiver divides by the same factor. So the 5 bits of fp16's exponent
//! cover the range of values in the block. A block is usually one embedding vector. Roles compress
//! the tensors of their frames if the job's settings ask for it.
//!
//! **Error.** With κ = 2^15 the largest element of a block becomes 2^15 (fp16 ends at 65,504).
//! Every element of at least 2^-29·‖v‖∞ stays a normal fp16 number. Its rounding is off by at most
//! u/(1+u) of the element, with u = 2^-11. Scaling and dividing add two f32 roundings of 2^-24
//! each; u − u/(1+u) ≈ 2^-22 has room for both. So **‖v − ṽ‖∞ ≤ 2^-11·‖v‖∞**. The same bound holds
//! element by element down to 2^-29·‖v‖∞; a smaller element is off by at most 2^-40·‖v‖∞. Blocks of
//! subnormal f32 keep the bound: their scale is capped at 2^127, and then every step but the one to
//! fp16 is exact. Blocks of zeros (of either sign) come back exactly.
//!
//! **Infinities and NaN** cannot be scaled, and [`compress`] refuses them. In gradients they mean
//! that training has diverged, and [`compress_gradients`] passes them on to be counted.

use half::f16;
use half::slice::HalfFloatSliceExt;

/// κ: the largest element of a scaled block.
pub const KAPPA: f32 = 32768.0;

/// The largest scale, for blocks whose largest element is below 2^-112.
const MAX_SCALE: f32 = f32::from_bits(0x7f00_0000); // 2^127

/// Elements that are scaled at a time: they stay in the first-level cache until the conversion.
const CHUNK: usize = 2048;

/// Why values cannot be compressed or decompressed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CompressError {
    #[error(
        "cannot compress values: element {index} is {value}; training has diverged, or the values were never written"
    )]
    NotFinite { index: usize, value: f32 },
    #[error("cannot compress in blocks of 0 elements; give the length of an embedding vector")]
    EmptyBlock,
    #[error("cannot decompress {values} values in blocks of {block}: {scales} scales came with them")]
    ScaleCount { values: usize, block: usize, scales: usize },
    #[error("cannot decompress block {block}: its scale is {scale}, and a scale must be positive and finite")]
    Scale { block: usize, scale: f32 },
}

/// Compresses `values` in blocks of `block` elements (the last may be shorter). Returns as many
/// fp16 values, and one scale per block.
///
/// # Errors
/// Blocks of 0 elements, and values that are not finite.
pub fn compress(values: &[f32], block: usize) -> Result<(Vec<f16>, Vec<f32>), CompressError> {
    scaled(values, block, |block, first| {
        scale_of(block).map_err(|at| CompressError::NotFinite { index: first + at, value: block[at] })
    })
}

/// Like [`compress`], but for gradients. A value that is not finite comes back as it was, and the
/// rest of its block keeps the error bound. The receiver must skip and count such values.
///
/// # Errors
/// Blocks of 0 elements.
pub fn compress_gradients(values: &[f32], block: usize) -> Result<(Vec<f16>, Vec<f32>), CompressError> {
    scaled(values, block, |block, _| {
        let finite = || block.iter().map(|value| if value.is_finite() { *value } else { 0.0 }).collect::<Vec<f32>>();
        Ok(scale_of(block).or_else(|_| scale_of(&finite())).unwrap_or(1.0))
    })
}

/// `scale` returns the scale of a block; its second argument is the index of the block's first
/// value.
fn scaled(
    values: &[f32],
    block: usize,
    scale: impl Fn(&[f32], usize) -> Result<f32, CompressError>,
) -> Result<(Vec<f16>, Vec<f32>), CompressError> {
    let mut compressed = vec![f16::ZERO; values.len()];
    let mut scales = Vec::with_capacity(values.len().div_ceil(block.max(1)));
    let chunk = chunk_of(block)?;
    let mut scaled = vec![0f32; chunk.min(values.len())];
    for (i, (from, to)) in values.chunks(chunk).zip(compressed.chunks_mut(chunk)).enumerate() {
        let scaled = &mut scaled[..from.len()];
        for (j, (v, s)) in from.chunks(block).zip(scaled.chunks_mut(block)).enumerate() {
            let scale = scale(v, i * chunk + j * block)?;
            s.iter_mut().zip(v).for_each(|(s, v)| *s = v * scale);
            scales.push(scale);
        }
        to.convert_from_f32_slice(scaled);
    }
    Ok((compressed, scales))
}

/// Restores values compressed by [`compress`], within the error bound at the top of this module.
///
/// # Errors
/// A wrong number of scales, a scale that is not positive and finite, and blocks of 0 elements.
pub fn decompress(compressed: &[f16], scales: &[f32], block: usize) -> Result<Vec<f32>, CompressError> {
    let chunk = chunk_of(block)?;
    if scales.len() != compressed.len().div_ceil(block) {
        let (values, scales) = (compressed.len(), scales.len());
        return Err(CompressError::ScaleCount { values, block, scales });
    }
    let wrong = |scale: &f32| !(scale.is_finite() && *scale > 0.0);
    if let Some(at) = scales.iter().position(wrong) {
        return Err(CompressError::Scale { block: at, scale: scales[at] });
    }
    let mut values = vec![0f32; compressed.len()];
    let mut scales = scales.iter();
    for (from, to) in compressed.chunks(chunk).zip(values.chunks_mut(chunk)) {
        from.convert_to_f32_slice(to);
        for (v, scale) in to.chunks_mut(block).zip(&mut scales) {
            v.iter_mut().for_each(|v| *v /= scale);
        }
    }
    Ok(values)
}

/// The largest multiple of `block` up to [`CHUNK`], but at least one block.
fn chunk_of(block: usize) -> Result<usize, CompressError> {
    match block {
        0 => Err(CompressError::EmptyBlock),
        block => Ok((CHUNK / block).max(1) * block),
    }
}

/// κ/‖v‖∞, or the index of the first element that is not finite. Absolute values are compared as
/// integers: that orders infinities and NaN above all numbers.
fn scale_of(block: &[f32]) -> Result<f32, usize> {
    let bits = block.iter().fold(0i32, |most, v| most.max((v.to_bits() & 0x7fff_ffff) as i32));
    let most = f32::from_bits(bits as u32);
    if !most.is_finite() {
        return Err(block.iter().position(|v| !v.is_finite()).unwrap_or(0));
    }
    Ok(if most == 0.0 { 1.0 } else { (KAPPA / most).min(MAX_SCALE) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn largest(values: &[f32]) -> f64 {
        values.iter().fold(0.0, |most, v| f64::max(most, f64::from(v.abs())))
    }

    fn round_trip(values: &[f32], block: usize) -> Vec<f32> {
        let (compressed, scales) = compress(values, block).unwrap();
        assert!(compressed.iter().all(|v| v.is_finite()));
        decompress(&compressed, &scales, block).unwrap()
    }

    /// Values of all magnitudes, many of them close together.
    fn value() -> impl Strategy<Value = f32> {
        let finite = any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |v| v.is_finite());
        prop_oneof![
            finite,
            -1f32..1f32,
            -1e-6f32..1e-6f32,
            Just(0.0),
            Just(-0.0),
            (0u32..100).prop_map(f32::from_bits),
            Just(f32::MAX),
            Just(f32::MIN_POSITIVE)
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn the_error_is_at_most_2_to_the_minus_11_of_the_largest(
            values in prop::collection::vec(value(), 0..70), block in 1usize..20,
        ) {
            let back = round_trip(&values, block);
            prop_assert_eq!(back.len(), values.len());
            for (v, b) in values.chunks(block).zip(back.chunks(block)) {
                let bound = largest(v) / 2048.0;
                for (v, b) in v.iter().zip(b) {
                    let error = (f64::from(*v) - f64::from(*b)).abs();
                    prop_assert!(error <= bound, "{} became {}, off by {} > {}", v, b, error, bound);
                }
            }
        }

        #[test]
        fn an_element_that_is_not_tiny_beside_the_largest_keeps_11_bits(
            values in prop::collection::vec(-1f32..1f32, 1..40), power in -100i32..100,
        ) {
            let values: Vec<f32> = values.iter().map(|v| v * 2f32.powi(power)).collect();
            let back = round_trip(&values, values.len());
            for (v, b) in values.iter().zip(&back) {
                let (v, b) = (f64::from(*v), f64::from(*b));
                let bound = (v.abs() / 2048.0).max(largest(&values) * 2f64.powi(-40));
                prop_assert!((v - b).abs() <= bound, "{} became {}", v, b);
            }
        }

        #[test]
        fn compressing_twice_loses_no_more_than_the_bound(
            values in prop::collection::vec(-1f32..1f32, 1..40),
        ) {
            let once = round_trip(&values, 8);
            let twice = round_trip(&once, 8);
            for (o, t) in once.chunks(8).zip(twice.chunks(8)) {
                for (a, b) in o.iter().zip(t) {
                    prop_assert!((f64::from(*a) - f64::from(*b)).abs() <= largest(o) / 2048.0);
                }
            }
        }
    }

    #[test]
    fn small_values_fare_better_than_in_plain_fp16() {
        let values: Vec<f32> = (1..1000).map(|i| i as f32 * 1.37e-9).collect();
        let error = |back: &[f32]| {
            let errors = values.iter().zip(back).map(|(v, b)| f64::from((v - b).abs()));
            errors.fold(0.0, f64::max)
        };
        let plain: Vec<f32> = values.iter().map(|v| f16::from_f32(*v).to_f32()).collect();
        let scaled = round_trip(&values, 16);
        assert!(error(&scaled) * 50.0 < error(&plain), "{} {}", error(&scaled), error(&plain));
        // And large ones do not overflow.
        assert_eq!(round_trip(&[1e30, -1e30, 0.0], 3)[2], 0.0);
        assert!(f16::from_f32(1e30).is_infinite());
    }

    #[test]
    fn the_largest_numbers_of_f32_stay_finite() {
        for below in 0..1000 {
            let largest = f32::from_bits(f32::MAX.to_bits() - below);
            let back = round_trip(&[largest, -largest, 1.0], 3);
            assert!(back.iter().all(|v| v.is_finite()), "{largest} became {back:?}");
        }
    }

    #[test]
    fn zeros_and_subnormals_are_kept() {
        let zeros = round_trip(&[0.0, -0.0], 2);
        assert_eq!(zeros.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), [0, 1 << 31]);
        let subnormals: Vec<f32> = [1, 2, 3, 2047].map(f32::from_bits).to_vec();
        assert_eq!(round_trip(&subnormals, 4), subnormals);
    }

    #[test]
    fn a_value_that_is_not_finite_is_refused_with_its_index() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![1.0; 5000];
            values[4321] = value;
            match compress(&values, 16).unwrap_err() {
                CompressError::NotFinite { index, .. } => assert_eq!(index, 4321),
                other => panic!("{other}"),
            }
        }
    }

    #[test]
    fn a_gradient_that_is_not_finite_comes_back_and_spoils_no_other() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values: Vec<f32> = (0..48).map(|index| index as f32 * 1e-7).collect();
            values[20] = value;
            let (halves, scales) = compress_gradients(&values, 16).unwrap();
            let back = decompress(&halves, &scales, 16).unwrap();
            for (index, (value, back)) in values.iter().zip(back).enumerate() {
                let is_kept = if index == 20 { !back.is_finite() } else { (value - back).abs() <= 5e-9 };
                assert!(is_kept, "{value} at {index} came back as {back}");
            }
        }
        let finite = [1.0, -3.0, 0.5];
        assert_eq!(compress_gradients(&finite, 3).unwrap(), compress(&finite, 3).unwrap());
    }

    #[test]
    fn wrong_scales_and_blocks_are_refused() {
        let values = vec![f16::ONE; 10];
        assert!(decompress(&values, &[1.0; 3], 4).is_ok());
        for (scales, block) in [
            (vec![1.0; 2], 4),
            (vec![1.0; 4], 4),
            (vec![1.0, 0.0, 1.0], 4),
            (vec![1.0, -1.0, 1.0], 4),
            (vec![f32::NAN; 3], 4),
            (vec![f32::INFINITY; 3], 4),
            (vec![1.0; 3], 0),
        ] {
            assert!(decompress(&values, &scales, block).is_err(), "{scales:?} {block}");
        }
        assert_eq!(compress(&[1.0], 0), Err(CompressError::EmptyBlock));
        assert_eq!(compress(&[], 4), Ok((vec![], vec![])));
    }
}
