//! Prefetches memory into the core's own cache. A prefetch has no visible effect, and any address
//! is valid for it.
#![allow(unsafe_code)] // The instruction takes a pointer.

use std::mem::MaybeUninit;

use crate::lines::Line;

/// Prefetches lines of an operand.
pub(crate) fn lines(lines: &[Line]) {
    lines.iter().for_each(|line| fetch(std::ptr::from_ref(line).cast()));
}

/// Prefetches some columns of some rows of a result. Rows are `stride` values apart.
pub(crate) fn rows(first: &[MaybeUninit<f32>], rows: usize, stride: usize, columns: usize) {
    const BYTES: usize = size_of::<Line>();
    for row in 0..rows {
        let row = first.as_ptr().wrapping_add(row * stride).cast::<i8>();
        // A row may start anywhere in a line.
        let lines = (row.addr() % BYTES + columns * size_of::<f32>()).div_ceil(BYTES);
        (0..lines).for_each(|line| fetch(row.wrapping_add(line * BYTES)));
    }
}

#[inline(always)]
fn fetch(address: *const i8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: every processor of this kind has the instruction, which takes any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
