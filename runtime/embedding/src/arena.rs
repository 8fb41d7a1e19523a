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
use std::ops::{Index, IndexMut};
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

/// Blocks in a row, each of so many items, zeroed when it was added, at an address that does not change.
pub(crate) struct Blocks<T: Pod> {
    arena: Arc<Arena>,
    blocks: Vec<Block<T>>,
}

/// 16 bytes, because they count among what a row costs.
struct Block<T> {
    start: NonNull<T>,
    items: u32,
    in_arena: bool,
}

// SAFETY: the blocks own their items as a boxed slice does.
unsafe impl<T: Pod + Send> Send for Blocks<T> {}
// SAFETY: as above; shared access gives shared references only.
unsafe impl<T: Pod + Sync> Sync for Blocks<T> {}

impl<T: Pod> Blocks<T> {
    pub(crate) fn new(arena: &Arc<Arena>) -> Self {
        const { assert!(align_of::<T>() <= LINE_BYTES && size_of::<T>() > 0) };
        Self { arena: Arc::clone(arena), blocks: Vec::new() }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Bytes of memory held.
    pub(crate) fn bytes(&self) -> usize {
        let items: usize = self.blocks.iter().map(|block| block.items as usize).sum();
        items * size_of::<T>() + self.blocks.capacity() * size_of::<Block<T>>()
    }

    /// Adds a block of `items` zeros, at least one.
    pub(crate) fn push(&mut self, items: usize) {
        let block = self.zeroed(items);
        push_sparingly(&mut self.blocks, block);
    }

    /// Puts a block of `items` in the place of the only one, whose items it begins with.
    pub(crate) fn replace_only(&mut self, items: usize) {
        debug_assert!(self.len() == 1 && self[0].len() <= items);
        let larger = self.zeroed(items);
        let smaller = std::mem::replace(&mut self.blocks[0], larger);
        // SAFETY: both blocks have that many items, and do not overlap.
        unsafe { self.blocks[0].start.copy_from_nonoverlapping(smaller.start, smaller.items as usize) };
        self.release(&smaller);
    }

    /// # Panics
    /// If there is no memory, as every allocation does.
    fn zeroed(&self, items: usize) -> Block<T> {
        let layout = Self::heap_layout(items);
        let items = items as u32;
        if layout.size() >= LEAST_BYTES
            && let Some(start) = self.arena.take(layout.size())
        {
            return Block { start: start.cast(), items, in_arena: true };
        }
        // SAFETY: neither `items` nor the size of one is 0.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| alloc::handle_alloc_error(layout));
        Block { start: start.cast(), items, in_arena: false }
    }

    /// Ends a block, which is not used any more.
    fn release(&self, block: &Block<T>) {
        let layout = Self::heap_layout(block.items as usize);
        if block.in_arena {
            self.arena.give_back(block.start.cast(), layout.size());
        } else {
            // SAFETY: allocated with this layout by `zeroed`.
            unsafe { alloc::dealloc(block.start.as_ptr().cast(), layout) };
        }
    }

    /// The layout of a block of the heap; every block has its size.
    fn heap_layout(items: usize) -> Layout {
        assert!(items > 0 && u32::try_from(items).is_ok(), "a block of {items} items");
        match Layout::array::<T>(items) {
            Ok(layout) => layout,
            Err(error) => panic!("a block of {items} items: {error}"),
        }
    }
}

impl<T: Pod> Drop for Blocks<T> {
    fn drop(&mut self) {
        self.blocks.iter().for_each(|block| self.release(block));
    }
}

impl<T: Pod> Index<usize> for Blocks<T> {
    type Output = [T];

    #[inline]
    fn index(&self, block: usize) -> &[T] {
        let block = &self.blocks[block];
        // SAFETY: `items` items of plain data, initialized when the block was added, and owned.
        unsafe { std::slice::from_raw_parts(block.start.as_ptr(), block.items as usize) }
    }
}

impl<T: Pod> IndexMut<usize> for Blocks<T> {
    #[inline]
    fn index_mut(&mut self, block: usize) -> &mut [T] {
        let block = &mut self.blocks[block];
        // SAFETY: as above, and the blocks are borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(block.start.as_ptr(), block.items as usize) }
    }
}

/// Pushes onto a vector that grows by an eighth where others double: these are read often, grow
/// seldom, and count among what a row costs.
pub(crate) fn push_sparingly<T>(vector: &mut Vec<T>, item: T) {
    if vector.len() == vector.capacity() {
        vector.reserve_exact(vector.len() / 8 + 1);
    }
    vector.push(item);
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: usize = LEAST_BYTES / 4 + 3;

    #[test]
    fn blocks_are_zeroed_aligned_apart_and_used_again() {
        let arena = Arc::new(Arena::default());
        let mut blocks: Blocks<u32> = Blocks::new(&arena);
        for number in 0..200 {
            blocks.push(WORDS);
            let block = &mut blocks[number];
            assert!(block.iter().all(|&word| word == 0));
            assert_eq!(block.as_ptr().addr() % LINE_BYTES, 0);
            block.fill(number as u32);
        }
        assert!((0..200).all(|number| blocks[number].iter().all(|&word| word == number as u32)));
        let addresses: Vec<usize> = (0..200).map(|number| blocks[number].as_ptr().addr()).collect();
        drop(blocks);
        assert_eq!(arena.free_bytes(), 200 * WORDS * 4);
        let mut others: Blocks<u32> = Blocks::new(&arena);
        others.push(WORDS + 1);
        others.push(WORDS);
        assert!(!addresses.contains(&others[0].as_ptr().addr()), "a block of another size");
        assert!(addresses.contains(&others[1].as_ptr().addr()));
        assert!(others[1].iter().all(|&word| word == 0));
        assert_eq!(arena.free_bytes(), 199 * WORDS * 4);
    }

    #[test]
    fn the_only_block_is_replaced_by_one_that_begins_with_it() {
        for (small, large) in [(3, 5), (3, WORDS), (WORDS, 2 * WORDS)] {
            let mut blocks: Blocks<u32> = Blocks::new(&Arc::default());
            blocks.push(small);
            blocks[0].fill(7);
            blocks.replace_only(large);
            assert_eq!((blocks.len(), blocks[0].len()), (1, large));
            assert!(blocks[0].iter().enumerate().all(|(at, &word)| word == if at < small { 7 } else { 0 }));
        }
    }

    #[test]
    fn small_blocks_map_nothing() {
        let arena = Arc::new(Arena::default());
        let mut blocks: Blocks<u32> = Blocks::new(&arena);
        blocks.push(LEAST_BYTES / 4 - 1);
        assert!(arena.space().regions.is_empty());
    }

    #[test]
    fn a_block_larger_than_a_region_gets_one_of_its_own() {
        let mut blocks: Blocks<u64> = Blocks::new(&Arc::default());
        blocks.push(REGION_BYTES / 8 + 1);
        blocks[0][REGION_BYTES / 8] = 7;
        blocks.push(LEAST_BYTES);
        assert_eq!((blocks[0][0], blocks[0][REGION_BYTES / 8], blocks[1][0]), (0, 7, 0));
    }
}
