//! Reading ahead: asking for memory to be brought into the core's own cache. It changes nothing that a program can see, wherever the
//! memory is.
#![allow(unsafe_code)] // The instruction takes a pointer.

use std::mem::MaybeUninit;

use crate::lines::{LINE, Line};

/// The lines of an operand.
pub(crate) fn lines(lines: &[Line]) {
    lines.iter().for_each(|line| fetch(std::ptr::from_ref(line).cast()));
}

/// As many columns, 32 at most, of some rows of a result, `stride` values from one to the next.
pub(crate) fn rows(first: &[MaybeUninit<f32>], rows: usize, stride: usize, columns: usize) {
    let mut row = first.as_ptr();
    for _ in 0..rows {
        // A row begins anywhere in a line.
        for column in [0, LINE.min(columns.saturating_sub(1)), columns.saturating_sub(1)] {
            fetch(row.wrapping_add(column).cast());
        }
        row = row.wrapping_add(stride);
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
