//! Rounds to bf16 in plain Rust, for processors without instructions for bf16. There the kernels
//! for 32-bit floats compute the products, and each product of two bf16 is exact.

/// Rounds the bits of a 32-bit float to the nearest bf16, ties to even. The low 16 bits become 0.
/// The crate's documentation lists the special cases.
#[inline(always)]
pub(super) fn rounded(bits: u32) -> u32 {
    let magnitude = bits & 0x7FFF_FFFF;
    let nearest = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
    let finite = if magnitude < 0x0080_0000 { bits & 0x8000_0000 } else { nearest };
    // NaN becomes quiet.
    let special = if magnitude > 0x7F80_0000 { bits | 0x0040_0000 } else { finite };
    special & 0xFFFF_0000
}
