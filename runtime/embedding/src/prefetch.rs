//! Cache prefetch hints. A hint changes nothing a program can observe
//! but its speed; on processors without one these functions do nothing.

#![allow(unsafe_code)]

const LINE_BYTES: usize = 64;
/// The most lines prefetched for a row. The processor prefetches the rest of a longer row by
/// itself.
const MOST_LINES: usize = 10;

/// Prefetches the cache lines of `words`.
#[inline]
pub(crate) fn words(words: &[u32]) {
    let start = words.as_ptr().cast::<u8>();
    let end = size_of_val(words);
    for offset in (0..end).step_by(LINE_BYTES).take(MOST_LINES) {
        line(start.wrapping_add(offset));
    }
    if end > 0 && end <= MOST_LINES * LINE_BYTES {
        line(start.wrapping_add(end - 1));
    }
}

/// Prefetches the cache line at an address, which need not be mapped.
#[inline]
pub(crate) fn at<T>(address: *const T) {
    line(address.cast());
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn line(address: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch reads nothing and cannot fault, whatever the address; SSE is part of
    // x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn line(address: *const u8) {
    // SAFETY: a prefetch reads nothing and cannot fault, whatever the address; it changes no flag,
    // register or memory.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline]
fn line(_address: *const u8) {}
