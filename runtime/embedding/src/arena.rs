//! Memory for what a store has most of, rows and index buckets: blocks cut from large regions that the
//! kernel is asked to back with huge pages. Knows nothing of what the blocks hold.
//!
//! Rows are met at random, so with pages of 4 KiB nearly every row also costs a page walk; a page of
//! 2 MiB holds 14,000 rows of dimension 16. Where the kernel has no huge pages the regions are backed
//! by ordinary ones.
//!
//! A block of [`LEAST_BYTES`] or more lies in a region, a smaller one in the heap, so that a store of
//! a few rows maps nothing. A block that is dropped is kept for the next one of its size; regions are
//! unmapped when the arena and all its blocks are gone. What of a region has never been handed out has
//! never been touched and takes no memory, but for the rest of one huge page.

#![allow(unsafe_code)]

use bytemuck::Pod;
use std::alloc::{self, Layout};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Blocks smaller than this come from the heap.
const LEAST_BYTES: usize = 4_096;
/// Every block begins a cache line.
const LINE_BYTES: usize = 64;
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Address space mapped at a time; memory is taken as it is touched.
const REGION_BYTES: usize = 32 * HUGE_PAGE_BYTES;

/// See the module's text.
#[derive(Default)]
pub(crate) struct Arena {
    space: Mutex<Space>,
}

impl fmt::Debug for Arena {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Arena").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Space {
    regions: Vec<Region>,
    /// Bytes of the last region that have been handed out.
    used: usize,
    /// Blocks that came back, by their bytes.
    free: BTreeMap<usize, Vec<NonNull<u8>>>,
    free_bytes: usize,
}

// SAFETY: the pointers are to memory that this arena owns and that no thread has an affinity to; they
// are reached through the mutex only.
unsafe impl Send for Space {}

impl Arena {
    /// Bytes of blocks that came back and are kept.
    pub(crate) fn free_bytes(&self) -> usize {
        self.space().free_bytes
    }

    /// Zeroed memory of so many bytes, and at least [`LEAST_BYTES`]. `None` if none can be mapped.
    fn take(&self, bytes: usize) -> Option<NonNull<u8>> {
        let returned = self.space().take_returned(bytes);
        if let Some(start) = returned {
            // SAFETY: the block was handed out with this size before and belongs to nobody now.
            unsafe { start.write_bytes(0, bytes) };
            return Some(start);
        }
        self.space().cut(bytes)
    }

    fn give_back(&self, start: NonNull<u8>, bytes: usize) {
        let mut space = self.space();
        space.free.entry(bytes).or_default().push(start);
        space.free_bytes += bytes;
    }

    /// Nothing that panics is done under the lock but allocating, and that leaves the lists whole.
    fn space(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Space {
    fn take_returned(&mut self, bytes: usize) -> Option<NonNull<u8>> {
        let start = self.free.get_mut(&bytes)?.pop()?;
        self.free_bytes -= bytes;
        Some(start)
    }

    /// The next `bytes` of the last region, or of a new one.
    fn cut(&mut self, bytes: usize) -> Option<NonNull<u8>> {
        let bytes = bytes.next_multiple_of(LINE_BYTES);
        if self.regions.last().is_none_or(|region| region.bytes - self.used < bytes) {
            self.regions.push(Region::map(bytes.max(REGION_BYTES).next_multiple_of(HUGE_PAGE_BYTES))?);
            self.used = 0;
        }
        let region = self.regions.last()?;
        // SAFETY: `used + bytes` is within the region.
        let start = unsafe { region.start.add(self.used) };
        self.used += bytes;
        Some(start)
    }
}

/// Mapped memory, zeroed, that begins at a multiple of [`HUGE_PAGE_BYTES`].
struct Region {
    start: NonNull<u8>,
    bytes: usize,
}

#[cfg(all(unix, not(miri)))]
impl Region {
    fn map(bytes: usize) -> Option<Self> {
        let mapped = bytes + HUGE_PAGE_BYTES;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no memory of ours.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if address == libc::MAP_FAILED {
            return None;
        }
        let before = address.addr().next_multiple_of(HUGE_PAGE_BYTES) - address.addr();
        let start = address.wrapping_byte_add(before);
        for (surplus, bytes) in [(address, before), (start.wrapping_byte_add(bytes), HUGE_PAGE_BYTES - before)] {
            if bytes > 0 {
                // SAFETY: these bytes are of the mapping just made, and nothing refers to them.
                unsafe { libc::munmap(surplus, bytes) };
            }
        }
        #[cfg(target_os = "linux")]
        // SAFETY: the range is mapped; the advice changes nothing a program can observe but speed, and
        // a kernel that has no huge pages refuses it.
        unsafe {
            libc::madvise(start, bytes, libc::MADV_HUGEPAGE)
        };
        Some(Self { start: NonNull::new(start.cast())?, bytes })
    }
}

#[cfg(all(unix, not(miri)))]
impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range is what `map` left mapped. Every block holds the arena, so none is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(any(not(unix), miri))]
impl Region {
    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes, LINE_BYTES).ok()
    }

    fn map(bytes: usize) -> Option<Self> {
        // SAFETY: `bytes` is not 0.
        let start = unsafe { alloc::alloc_zeroed(Self::layout(bytes)?) };
        Some(Self { start: NonNull::new(start)?, bytes })
    }
}

#[cfg(any(not(unix), miri))]
impl Drop for Region {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.bytes) {
            // SAFETY: allocated with this layout by `map`. Every block holds the arena, so none is left.
            unsafe { alloc::dealloc(self.start.as_ptr(), layout) };
        }
    }
}

/// So many items, zeroed when they were handed out, at an address that never changes.
pub(crate) struct Block<T: Pod> {
    start: NonNull<T>,
    items: usize,
    /// `None` for a block of the heap.
    arena: Option<Arc<Arena>>,
}

// SAFETY: a block owns its items as a boxed slice does.
unsafe impl<T: Pod + Send> Send for Block<T> {}
// SAFETY: as above; shared access gives shared references only.
unsafe impl<T: Pod + Sync> Sync for Block<T> {}

impl<T: Pod> Block<T> {
    /// `items` zeros.
    ///
    /// # Panics
    /// If there is no memory: as every allocation does.
    pub(crate) fn zeroed(arena: &Arc<Arena>, items: usize) -> Self {
        const { assert!(align_of::<T>() <= LINE_BYTES && size_of::<T>() > 0) };
        if items == 0 {
            return Self { start: NonNull::dangling(), items, arena: None };
        }
        let layout = Self::heap_layout(items);
        if layout.size() >= LEAST_BYTES
            && let Some(start) = arena.take(layout.size())
        {
            return Self { start: start.cast(), items, arena: Some(Arc::clone(arena)) };
        }
        // SAFETY: neither `items` nor the size of one is 0.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| alloc::handle_alloc_error(layout));
        Self { start: start.cast(), items, arena: None }
    }

    /// The layout of a block of the heap; every block has its size.
    fn heap_layout(items: usize) -> Layout {
        let bytes = items.checked_mul(size_of::<T>()).filter(|&bytes| bytes < isize::MAX as usize / 2);
        let layout = bytes.and_then(|bytes| Layout::from_size_align(bytes, align_of::<T>()).ok());
        layout.unwrap_or_else(|| panic!("a block of {items} items of {} bytes", size_of::<T>()))
    }
}

impl<T: Pod> Drop for Block<T> {
    fn drop(&mut self) {
        if self.items == 0 {
            return;
        }
        let layout = Self::heap_layout(self.items);
        match &self.arena {
            Some(arena) => arena.give_back(self.start.cast(), layout.size()),
            // SAFETY: allocated with this layout by `zeroed`.
            None => unsafe { alloc::dealloc(self.start.as_ptr().cast(), layout) },
        }
    }
}

impl<T: Pod> Deref for Block<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `items` items of plain data, initialized when they were handed out; the block owns
        // them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.items) }
    }
}

impl<T: Pod> DerefMut for Block<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and the block is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.items) }
    }
}

impl<T: Pod> fmt::Debug for Block<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Block").field("items", &self.items).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_zeroed_aligned_apart_and_used_again() {
        let arena = Arc::new(Arena::default());
        let words = LEAST_BYTES / 4 + 3;
        let mut blocks: Vec<Block<u32>> = (0..200).map(|_| Block::zeroed(&arena, words)).collect();
        for (number, block) in blocks.iter_mut().enumerate() {
            assert!(block.iter().all(|&word| word == 0));
            assert_eq!(block.as_ptr().addr() % LINE_BYTES, 0);
            block.fill(number as u32);
        }
        assert!(blocks.iter().enumerate().all(|(number, block)| block.iter().all(|&word| word == number as u32)));
        let returned = blocks.pop().map(|block| block.as_ptr().addr());
        assert_eq!(arena.free_bytes(), words * 4);
        let other: Block<u32> = Block::zeroed(&arena, words + 1);
        assert_ne!(Some(other.as_ptr().addr()), returned, "a block of another size");
        let again: Block<u32> = Block::zeroed(&arena, words);
        assert_eq!(Some(again.as_ptr().addr()), returned);
        assert!(again.iter().all(|&word| word == 0));
        assert_eq!(arena.free_bytes(), 0);
    }

    #[test]
    fn small_blocks_map_nothing() {
        let arena = Arc::new(Arena::default());
        let block: Block<u32> = Block::zeroed(&arena, LEAST_BYTES / 4 - 1);
        let empty: Block<u64> = Block::zeroed(&arena, 0);
        assert_eq!((block.len(), empty.len()), (LEAST_BYTES / 4 - 1, 0));
        assert!(arena.space().regions.is_empty());
    }

    #[test]
    fn a_block_larger_than_a_region_gets_one_of_its_own() {
        let arena = Arc::new(Arena::default());
        let mut large: Block<u64> = Block::zeroed(&arena, REGION_BYTES / 8 + 1);
        large[REGION_BYTES / 8] = 7;
        let small: Block<u64> = Block::zeroed(&arena, LEAST_BYTES);
        assert_eq!((large[0], large[REGION_BYTES / 8], small[0]), (0, 7, 0));
    }

    #[test]
    fn a_block_outlives_the_last_other_owner_of_its_arena() {
        let mut block: Block<u32> = Block::zeroed(&Arc::new(Arena::default()), LEAST_BYTES);
        block.fill(5);
        assert!(block.iter().all(|&word| word == 5));
    }
}
