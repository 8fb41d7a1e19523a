//! Memory for the rows of a store. The arena cuts blocks from large regions, which it asks the
//! kernel to back with huge pages. It knows nothing of the contents of blocks.
//!
//! Rows are read at random. With pages of 4 KiB, nearly every row also costs a page walk. A page of
//! 2 MiB holds 14,000 rows of dimension 16. Where the kernel has no huge pages, ordinary pages back
//! the regions.
//!
//! A block of [`LEAST_BYTES`] or more lies in a region, a smaller one on the heap. So a store of a
//! few rows maps nothing. The arena reuses the memory of a dropped block. It unmaps regions once
//! the arena and all its blocks are gone. The unused end of the first region takes no memory,
//! except for the rest of one huge page.
//!
//! On first touch, the kernel has to find and zero a page. On a virtual machine, so does the host.
//! That can take longer than all the rest of a request. So another thread makes the next region
//! [ready](Region::populate) while the last one is being used up. A ready region is as large as all
//! regions before it together, up to [`MOST_READY_BYTES`].
//!
//! A small store starts that thread when half of its last region is used. A large one starts it as
//! soon as it enters a region, because a machine may take a third of a second for 64 MiB. The first
//! region is made ready only [on request](Arena::make_ready).
//!
//! The regions of an arena [on a file](Arena::on_file) are pages of that file, which outlive the
//! process. There, all blocks lie in regions. A [header](crate::block_file) before each block names
//! its owner. A free block is reused whole, by a block of the same size.

#![allow(unsafe_code)]

use crate::SharedMemoryError;
use crate::block_file::{BlockFile, BlockHeader, FoundBlock, HEADER_BYTES};
use crate::region::{HUGE_PAGE_BYTES, Region};
use crate::runs::FreeRuns;
use bytemuck::Pod;
use std::alloc::{self, Layout};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut, Index, IndexMut};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::{Mutex, MutexGuard};
/// Blocks smaller than this come from the heap.
const LEAST_BYTES: usize = 4_096;
/// Every block begins a cache line.
const LINE_BYTES: usize = 64;
/// The largest region that is made ready at a time.
const MOST_READY_BYTES: usize = 32 * HUGE_PAGE_BYTES;
/// A store with this much mapped memory prepares its next region without waiting for the last one
/// to be half used.
const LARGE_BYTES: usize = 8 * MOST_READY_BYTES;
/// The size of the first region, if a caller asks for a ready one.
const FIRST_READY_BYTES: usize = 4 * HUGE_PAGE_BYTES;
/// The size of a region that is not ready: the first one without a request, and any whose
/// preparation is not finished. Its pages get memory as they are touched.
const UNREADY_REGION_BYTES: usize = 2 * HUGE_PAGE_BYTES;
/// A file grows by this much. All of it takes memory at once, and zeroing it takes time.
const FILE_REGION_BYTES: usize = 2 * HUGE_PAGE_BYTES;

/// See the module's text.
#[derive(Default)]
pub(crate) struct Arena {
    space: Mutex<Space>,
    file: Option<BlockFile>,
}

impl fmt::Debug for Arena {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Arena").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Space {
    regions: Vec<Region>,
    /// Bytes of all regions.
    mapped: usize,
    /// Bytes handed out from the last region.
    used: usize,
    /// The region after the last one, which another thread is making ready. `None` if none was
    /// started.
    next: Option<JoinHandle<Option<Region>>>,
    /// Memory that was given back.
    free: Free,
}

/// Memory that was given back.
enum Free {
    Runs(FreeRuns),
    /// Blocks of a file, by their length. Their headers record that length, so they are never cut.
    Blocks {
        by_bytes: BTreeMap<usize, Vec<NonNull<u8>>>,
        bytes: usize,
    },
}

impl Default for Free {
    fn default() -> Self {
        Self::Runs(FreeRuns::default())
    }
}

// SAFETY: the pointers lead to memory of this arena, which no thread has an affinity to. They are
// reached through the mutex only.
unsafe impl Send for Space {}

impl Arena {
    /// An arena whose blocks lie in the file at `path`, and the blocks in use that the file holds.
    /// Creates the file if it does not exist.
    ///
    /// # Errors
    /// [`SharedMemoryError`] if the file cannot be mapped, is damaged, or has rows of another
    /// stride than `stride` words.
    pub(crate) fn on_file(path: &Path, stride: usize) -> Result<(Arc<Self>, Vec<FoundBlock>), SharedMemoryError> {
        let (file, region) = BlockFile::open(path, stride, FILE_REGION_BYTES)?;
        let (found, free, used) = file.walk(&region)?;
        let blocks = Free::Blocks { by_bytes: BTreeMap::new(), bytes: 0 };
        let mut space = Space { used, mapped: region.bytes, regions: vec![region], free: blocks, next: None };
        for (start, bytes) in free {
            space.free.give_back(start, bytes);
        }
        Ok((Arc::new(Self { space: Mutex::new(space), file: Some(file) }), found))
    }

    /// Starts a thread that makes a first region ready. Does nothing if there are regions already,
    /// or on a file.
    pub(crate) fn make_ready(&self) {
        let mut space = self.space();
        if self.file.is_none() && space.regions.is_empty() && space.next.is_none() {
            space.next = prepare(FIRST_READY_BYTES);
        }
    }

    /// Bytes that were given back and wait for reuse.
    pub(crate) fn free_bytes(&self) -> usize {
        match &self.space().free {
            Free::Runs(runs) => runs.bytes(),
            Free::Blocks { bytes, .. } => *bytes,
        }
    }

    /// With `on`, blocks that this process drops stay in the file; otherwise they become free. On
    /// at first.
    pub(crate) fn keep_dropped(&self, on: bool) {
        if let Some(file) = &self.file {
            file.keep_dropped(on);
        }
    }

    pub(crate) fn is_on_file(&self) -> bool {
        self.file.is_some()
    }

    /// Whether the file could not grow, so that a block had to be put elsewhere.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.file.as_ref().is_some_and(BlockFile::is_incomplete)
    }

    /// Zeroed memory of `bytes` bytes, which must be at least [`LEAST_BYTES`] unless the arena is
    /// on a file. `None` if no memory can be mapped.
    fn take(&self, bytes: usize) -> Option<NonNull<u8>> {
        let lead = if self.file.is_some() { HEADER_BYTES } else { 0 };
        let returned = self.space().free.take(lead + bytes);
        let start = match returned {
            Some(start) => {
                // SAFETY: the block was handed out before, and was given back since.
                unsafe { start.add(lead).write_bytes(0, bytes) };
                start
            }
            None => self.cut(lead + bytes)?,
        };
        // SAFETY: the block has `lead + bytes` bytes.
        Some(unsafe { start.add(lead) })
    }

    fn cut(&self, bytes: usize) -> Option<NonNull<u8>> {
        let mut space = self.space();
        let Some(file) = &self.file else { return space.cut_memory(bytes) };
        let rest = space.rest();
        if rest < bytes.next_multiple_of(LINE_BYTES) && rest > 0 {
            let filler = space.cut(rest, |_| None, 0)?;
            file.fill(filler, rest);
        }
        let start = space.cut(bytes, |bytes| file.extend(bytes), FILE_REGION_BYTES);
        match start {
            Some(start) => BlockHeader::at(start, file).cut(bytes.next_multiple_of(LINE_BYTES)),
            None => file.mark_incomplete(),
        }
        start
    }

    /// The header of a block, if this arena is on a file.
    fn header(&self, start: NonNull<u8>) -> Option<&BlockHeader> {
        let file = self.file.as_ref()?;
        // SAFETY: `take` gave `start` behind a header, and the arena outlives its blocks.
        Some(BlockHeader::at(unsafe { start.sub(HEADER_BYTES) }, file))
    }

    fn give_back(&self, start: NonNull<u8>, bytes: usize) {
        match self.header(start) {
            None => self.space().free.give_back(start, bytes),
            Some(header) => {
                if self.file.as_ref().is_some_and(BlockFile::keeps_dropped) {
                    return;
                }
                header.release();
                // SAFETY: as in `header`.
                self.space().free.give_back(unsafe { start.sub(HEADER_BYTES) }, HEADER_BYTES + bytes);
            }
        }
    }

    /// A panic under the lock can come from an allocation only. It leaves the lists whole, so a
    /// poisoned lock is taken all the same.
    fn space(&self) -> MutexGuard<'_, Space> {
        self.space.lock()
    }
}

impl Free {
    fn take(&mut self, bytes: usize) -> Option<NonNull<u8>> {
        match self {
            Self::Runs(runs) => runs.take(bytes.next_multiple_of(LINE_BYTES)),
            Self::Blocks { by_bytes, bytes: all } => {
                let start = by_bytes.get_mut(&bytes)?.pop()?;
                *all -= bytes;
                Some(start)
            }
        }
    }

    fn give_back(&mut self, start: NonNull<u8>, bytes: usize) {
        match self {
            Self::Runs(runs) => runs.give_back(start, bytes.next_multiple_of(LINE_BYTES)),
            Self::Blocks { by_bytes, bytes: all } => {
                by_bytes.entry(bytes).or_default().push(start);
                *all += bytes;
            }
        }
    }
}

impl Space {
    /// Bytes of the last region that have not been handed out.
    fn rest(&self) -> usize {
        self.regions.last().map_or(0, |region| region.bytes - self.used)
    }

    /// The next `bytes` of the process's own memory. If they do not fit into the last region, its
    /// rest becomes free memory.
    fn cut_memory(&mut self, bytes: usize) -> Option<NonNull<u8>> {
        let is_too_little = self.rest() < bytes.next_multiple_of(LINE_BYTES);
        let left = self.regions.last().filter(|last| is_too_little && self.used < last.bytes);
        // SAFETY: within the region.
        let left = left.map(|last| (unsafe { last.start.add(self.used) }, self.rest()));
        let ready = if is_too_little { self.take_ready(bytes) } else { None };
        let start = self.cut(bytes, |bytes| ready.or_else(|| Region::of_memory(bytes)), UNREADY_REGION_BYTES)?;
        if let Some((start, bytes)) = left {
            self.free.give_back(start, bytes);
        }
        let is_half_used = self.regions.last().is_some_and(|last| self.used > last.bytes / 2);
        if (is_half_used || self.mapped >= LARGE_BYTES) && self.next.is_none() {
            self.next = prepare(self.mapped.min(MOST_READY_BYTES));
        }
        Some(start)
    }

    /// The prepared region, if it is ready and has room for a block of `bytes`.
    fn take_ready(&mut self, bytes: usize) -> Option<Region> {
        let next = self.next.take_if(|next| next.is_finished())?;
        // A thread that panicked owned only its own mapping.
        next.join().ok().flatten().filter(|region| region.bytes >= bytes.next_multiple_of(LINE_BYTES))
    }

    /// The next `bytes` of the last region. If they do not fit, `map` makes a new region of
    /// `region_bytes`, or more if the block needs it.
    fn cut(
        &mut self,
        bytes: usize,
        map: impl FnOnce(usize) -> Option<Region>,
        region_bytes: usize,
    ) -> Option<NonNull<u8>> {
        let bytes = bytes.next_multiple_of(LINE_BYTES);
        if self.rest() < bytes {
            let region = map(bytes.max(region_bytes).next_multiple_of(HUGE_PAGE_BYTES))?;
            self.mapped += region.bytes;
            self.regions.push(region);
            self.used = 0;
        }
        let region = self.regions.last()?;
        // SAFETY: `used + bytes` is within the region.
        let start = unsafe { region.start.add(self.used) };
        self.used += bytes;
        Some(start)
    }
}

/// Starts a thread that maps a region and has the kernel find its memory. `None` if no thread could
/// be started.
fn prepare(bytes: usize) -> Option<JoinHandle<Option<Region>>> {
    let ready = move || {
        let mut region = Region::of_memory(bytes)?;
        region.populate();
        Some(region)
    };
    thread::Builder::new().name("arena".to_owned()).spawn(ready).ok()
}

/// A sequence of blocks. Each has its own number of items, is zeroed when it is added, and never
/// moves.
pub(crate) struct Blocks<T: Pod> {
    arena: Arc<Arena>,
    /// The owner of the blocks, for the headers of an arena on a file.
    owner: u32,
    blocks: Vec<Block<T>>,
}

/// 16 bytes, because they are part of the cost of a row.
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
    pub(crate) fn new(arena: &Arc<Arena>, owner: u32) -> Self {
        const { assert!(align_of::<T>() <= LINE_BYTES && size_of::<T>() > 0) };
        Self { arena: Arc::clone(arena), owner, blocks: Vec::new() }
    }

    /// The blocks of this owner in the file of `arena`, by number. A process that was killed during
    /// [`Self::replace_only`] leaves two blocks of one number; the larger one is used. `None` if a
    /// number is missing.
    pub(crate) fn adopt(arena: &Arc<Arena>, owner: u32, mut found: Vec<FoundBlock>) -> Option<Self> {
        found.sort_unstable_by_key(|block| (block.number, std::cmp::Reverse(block.items)));
        let mut blocks = Self::new(arena, owner);
        for FoundBlock { start, number, items, .. } in found {
            let block = Block { start: start.cast(), items, in_arena: true };
            match (number as usize).checked_sub(blocks.len()) {
                Some(0) => blocks.blocks.push(block),
                Some(_) => return None,
                // The next process reuses the smaller block's memory.
                None => {
                    if let Some(header) = arena.header(block.start.cast()) {
                        header.release();
                    }
                }
            }
        }
        Some(blocks)
    }

    /// Sets or clears a bit of the owner's word in the block's header. Does nothing unless the
    /// arena is on a file.
    #[inline]
    pub(crate) fn set_owner_bit(&self, block: usize, bit: u32, on: bool) {
        let block = &self.blocks[block];
        if block.in_arena
            && let Some(header) = self.arena.header(block.start.cast())
        {
            header.set_owner_bit(bit, on);
        }
    }

    /// The owner's word in the block's header; 0 unless the arena is on a file.
    pub(crate) fn owner_bits(&self, block: usize) -> u64 {
        self.owner_bits_of(&self.blocks[block])
    }

    fn owner_bits_of(&self, block: &Block<T>) -> u64 {
        let header = self.arena.header(block.start.cast()).filter(|_| block.in_arena);
        header.map_or(0, BlockHeader::owner_bits)
    }

    /// Number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Bytes of memory held.
    pub(crate) fn bytes(&self) -> usize {
        let items: usize = self.blocks.iter().map(|block| block.items as usize).sum();
        items * size_of::<T>() + self.blocks.capacity() * size_of::<Block<T>>()
    }

    /// Adds a block of `items` zeros; `items` is at least 1.
    pub(crate) fn push(&mut self, items: usize) {
        let block = Block::zeroed(&self.arena, items);
        self.commit(&block, self.len(), 0);
        push_sparingly(&mut self.blocks, block);
    }

    /// Records the block in its header: the next process finds it in the arena's file.
    fn commit(&self, block: &Block<T>, number: usize, owner_bits: u64) {
        if block.in_arena
            && let Some(header) = self.arena.header(block.start.cast())
        {
            header.commit(self.owner, number as u32, block.items, owner_bits);
        }
    }

    /// Replaces the only block by a larger one of `items` items, which begins with the old items.
    pub(crate) fn replace_only(&mut self, items: usize) {
        debug_assert!(self.len() == 1 && self[0].len() <= items);
        let larger = Block::zeroed(&self.arena, items);
        let smaller = std::mem::replace(&mut self.blocks[0], larger);
        // SAFETY: both blocks have that many items, and do not overlap.
        unsafe { self.blocks[0].start.copy_from_nonoverlapping(smaller.start, smaller.items as usize) };
        self.commit(&self.blocks[0], 0, self.owner_bits_of(&smaller));
        smaller.release(&self.arena);
    }
}

impl<T: Pod> Block<T> {
    /// # Panics
    /// If there is no memory, like every allocation.
    fn zeroed(arena: &Arena, items: usize) -> Self {
        let layout = Self::heap_layout(items);
        let items = items as u32;
        if (layout.size() >= LEAST_BYTES || arena.file.is_some())
            && let Some(start) = arena.take(layout.size())
        {
            return Self { start: start.cast(), items, in_arena: true };
        }
        // SAFETY: neither `items` nor the size of one is 0.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| alloc::handle_alloc_error(layout));
        Self { start: start.cast(), items, in_arena: false }
    }

    /// Gives back the block, which is of this arena and no longer used.
    fn release(&self, arena: &Arena) {
        let layout = Self::heap_layout(self.items as usize);
        if self.in_arena {
            arena.give_back(self.start.cast(), layout.size());
        } else {
            // SAFETY: allocated with this layout by `zeroed`.
            unsafe { alloc::dealloc(self.start.as_ptr().cast(), layout) };
        }
    }

    /// The layout of a block on the heap. Blocks in regions have its size too.
    fn heap_layout(items: usize) -> Layout {
        assert!(items > 0 && u32::try_from(items).is_ok(), "a block of {items} items");
        match Layout::array::<T>(items) {
            Ok(layout) => layout,
            Err(error) => panic!("a block of {items} items: {error}"),
        }
    }

    fn as_slice(&self) -> &[T] {
        // SAFETY: `items` items of plain data, initialized when the block was made, and owned.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.items as usize) }
    }

    fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and the block is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.items as usize) }
    }
}

/// One block of an arena, zeroed when it was made; without items it takes no memory.
pub(crate) struct Array<T: Pod> {
    arena: Arc<Arena>,
    block: Block<T>,
}

// SAFETY: the array owns its items as a boxed slice does.
unsafe impl<T: Pod + Send> Send for Array<T> {}
// SAFETY: as above; shared access gives shared references only.
unsafe impl<T: Pod + Sync> Sync for Array<T> {}

impl<T: Pod> Array<T> {
    /// An array of `items` zeros, at most 2³² − 1.
    pub(crate) fn new(arena: &Arc<Arena>, items: usize) -> Self {
        const { assert!(align_of::<T>() <= LINE_BYTES && size_of::<T>() > 0) };
        let none = Block { start: NonNull::dangling(), items: 0, in_arena: false };
        let block = if items > 0 { Block::zeroed(arena, items) } else { none };
        Self { arena: Arc::clone(arena), block }
    }
}

impl<T: Pod> Drop for Array<T> {
    fn drop(&mut self) {
        if self.block.items > 0 {
            self.block.release(&self.arena);
        }
    }
}

impl<T: Pod> Deref for Array<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        self.block.as_slice()
    }
}

impl<T: Pod> DerefMut for Array<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        self.block.as_mut_slice()
    }
}

impl<T: Pod> Drop for Blocks<T> {
    fn drop(&mut self) {
        // From the last to the first. A process that is killed in between leaves the first blocks
        // of the sequence, and [`Self::adopt`] accepts those.
        self.blocks.iter().rev().for_each(|block| block.release(&self.arena));
    }
}

impl<T: Pod> Index<usize> for Blocks<T> {
    type Output = [T];

    #[inline]
    fn index(&self, block: usize) -> &[T] {
        self.blocks[block].as_slice()
    }
}

impl<T: Pod> IndexMut<usize> for Blocks<T> {
    #[inline]
    fn index_mut(&mut self, block: usize) -> &mut [T] {
        self.blocks[block].as_mut_slice()
    }
}

/// Pushes onto a vector that grows by an eighth, where `Vec` doubles. These vectors are read often
/// and grow seldom, and their spare capacity is part of the cost of a row.
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
        let mut blocks: Blocks<u32> = Blocks::new(&arena, 0);
        for number in 0..200 {
            blocks.push(WORDS);
            let block = &mut blocks[number];
            assert!(block.iter().all(|&word| word == 0));
            assert_eq!(block.as_ptr().addr() % LINE_BYTES, 0);
            block.fill(number as u32);
        }
        assert!((0..200).all(|number| blocks[number].iter().all(|&word| word == number as u32)));
        let first = blocks[0].as_ptr().addr();
        drop(blocks);
        let bytes = |words: usize| (words * 4).next_multiple_of(LINE_BYTES);
        assert_eq!(arena.free_bytes(), 200 * bytes(WORDS));
        let mut others: Blocks<u32> = Blocks::new(&arena, 0);
        others.push(2 * WORDS);
        others.push(WORDS);
        assert_eq!(others[0].as_ptr().addr(), first, "two lie together where one did not have the room");
        assert_eq!(others[1].as_ptr().addr(), first + bytes(2 * WORDS));
        assert!([0, 1].iter().all(|&block| others[block].iter().all(|&word| word == 0)));
        assert_eq!(arena.free_bytes(), 200 * bytes(WORDS) - bytes(2 * WORDS) - bytes(WORDS));
    }

    #[test]
    fn an_array_is_zeroed_and_gives_its_memory_back() {
        let arena = Arc::new(Arena::default());
        let mut array: Array<u32> = Array::new(&arena, WORDS);
        assert!(array.len() == WORDS && array.iter().all(|&word| word == 0));
        array.fill(7);
        let address = array.as_ptr();
        drop(array);
        let array: Array<u32> = Array::new(&arena, WORDS);
        assert!(array.as_ptr() == address && array.iter().all(|&word| word == 0));
        assert!(Array::<u32>::new(&arena, 0).is_empty());
        assert_eq!(Array::<u32>::new(&arena, 3)[..], [0; 3], "on the heap");
    }

    #[test]
    fn the_only_block_is_replaced_by_one_that_begins_with_it() {
        for (small, large) in [(3, 5), (3, WORDS), (WORDS, 2 * WORDS)] {
            let mut blocks: Blocks<u32> = Blocks::new(&Arc::default(), 0);
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
        let mut blocks: Blocks<u32> = Blocks::new(&arena, 0);
        blocks.push(LEAST_BYTES / 4 - 1);
        assert!(arena.space().regions.is_empty());
    }

    #[test]
    fn a_growing_store_finds_its_next_region_ready() {
        const BLOCK: usize = HUGE_PAGE_BYTES / 4;
        let arena = Arc::new(Arena::default());
        let mut blocks: Blocks<u32> = Blocks::new(&arena, 0);
        while arena.space().used <= UNREADY_REGION_BYTES / 2 {
            assert!(arena.space().next.is_none(), "a small store takes no more than it uses");
            blocks.push(BLOCK);
        }
        for regions in 1..4 {
            while arena.space().next.is_none() {
                blocks.push(BLOCK);
            }
            while !arena.space().next.as_ref().is_some_and(JoinHandle::is_finished) {
                thread::yield_now();
            }
            while arena.space().regions.len() == regions {
                blocks.push(BLOCK);
            }
        }
        let space = arena.space();
        let bytes: Vec<usize> = space.regions.iter().map(|region| region.bytes).collect();
        assert_eq!(bytes, [1, 1, 2, 4].map(|times| times * UNREADY_REGION_BYTES), "as much as it has");
        #[cfg(all(target_os = "linux", not(miri)))]
        assert!(space.regions[1..].iter().all(Region::is_resident), "all of it has its memory");
        drop(space);
        let blocks: Vec<_> = (0..blocks.len()).map(|block| &blocks[block]).collect();
        assert!(blocks.iter().all(|block| block.iter().all(|&word| word == 0)));
    }

    #[test]
    fn a_first_region_that_was_asked_for_is_ready() {
        let arena = Arc::new(Arena::default());
        arena.make_ready();
        while !arena.space().next.as_ref().is_some_and(JoinHandle::is_finished) {
            thread::yield_now();
        }
        let mut blocks: Blocks<u32> = Blocks::new(&arena, 0);
        blocks.push(LEAST_BYTES);
        arena.make_ready();
        let space = arena.space();
        assert_eq!(space.regions.iter().map(|region| region.bytes).collect::<Vec<_>>(), [FIRST_READY_BYTES]);
        assert!(space.next.is_none(), "there is a region");
        #[cfg(all(target_os = "linux", not(miri)))]
        assert!(space.regions[0].is_resident());
    }

    #[test]
    fn a_block_larger_than_the_ready_region_gets_its_own() {
        let arena = Arc::new(Arena::default());
        let mut blocks: Blocks<u64> = Blocks::new(&arena, 0);
        blocks.push(UNREADY_REGION_BYTES / 8 / 2 + 1);
        blocks.push(MOST_READY_BYTES / 8);
        blocks[1][MOST_READY_BYTES / 8 - 1] = 7;
        assert_eq!((blocks[0][0], blocks[1][MOST_READY_BYTES / 8 - 1]), (0, 7));
    }

    #[test]
    fn a_block_larger_than_a_region_gets_one_of_its_own() {
        let mut blocks: Blocks<u64> = Blocks::new(&Arc::default(), 0);
        blocks.push(MOST_READY_BYTES / 8 + 1);
        blocks[0][MOST_READY_BYTES / 8] = 7;
        blocks.push(LEAST_BYTES);
        assert_eq!((blocks[0][0], blocks[0][MOST_READY_BYTES / 8], blocks[1][0]), (0, 7, 0));
    }
}
