//! Reading ahead.
#![allow(unsafe_code)] // The instruction takes a pointer.

use crate::lines::Line;

/// Asks for a line to be brought into the core's own cache.
#[inline(always)]
pub(super) fn line(line: &Line) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: every processor of this kind has the instruction, and it changes nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(line).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}
