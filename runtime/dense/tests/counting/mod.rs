//! An allocator that counts the allocations of each thread, for test programs about the steady
//! state.

#![allow(unsafe_code, reason = "an allocator is unsafe to implement")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNTED: Cell<Counted> = const { Cell::new(Counted { least: usize::MAX, number: 0, bytes: 0 }) };
}

/// What a thread has counted: allocations of at least `least` bytes, and their sum.
#[derive(Clone, Copy)]
struct Counted {
    least: usize,
    number: usize,
    bytes: usize,
}

/// The number of allocations of at least `least` bytes that `work` makes on this thread, and their
/// bytes.
pub fn counted(least: usize, work: impl FnOnce()) -> [usize; 2] {
    COUNTED.set(Counted { least, number: 0, bytes: 0 });
    work();
    let Counted { number, bytes, .. } = COUNTED.replace(Counted { least: usize::MAX, number: 0, bytes: 0 });
    [number, bytes]
}

/// The system's allocator, with counts.
pub struct Counting;

impl Counting {
    fn count(bytes: usize) {
        let counted = COUNTED.get();
        if bytes >= counted.least {
            COUNTED.set(Counted { number: counted.number + 1, bytes: counted.bytes + bytes, ..counted });
        }
    }
}

// SAFETY: every call goes to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count(layout.size());
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::count(layout.size());
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::count(size);
        // SAFETY: the caller upholds the contract.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract.
        unsafe { System.dealloc(memory, layout) }
    }
}
