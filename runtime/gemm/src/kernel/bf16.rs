//! Rounding to bf16 in plain Rust, for processors without instructions of bf16: their kernels of 32-bit floats then compute the products, each
//! of which is exact.

/// The bits of a 32-bit float, rounded to those of the nearest bf16, ties to even, and 16 zeros; see the crate's text for what is special.
#[inline(always)]
pub(super) fn rounded(bits: u32) -> u32 {
    let magnitude = bits & 0x7FFF_FFFF;
    let nearest = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
    let finite = if magnitude < 0x0080_0000 { bits & 0x8000_0000 } else { nearest };
    // NaN is made quiet.
    let special = if magnitude > 0x7F80_0000 { bits | 0x0040_0000 } else { finite };
    special & 0xFFFF_0000
}
