//! The file behind an [arena](crate::arena) whose blocks outlive the process, and the search for
//! blocks in it. The file should lie in a memory file system (tmpfs). It is never flushed, so it
//! survives the death of a process but not of the machine.
//!
//! ```text
//! ┌─────────────┬────────┬───────────────────┬────────┬───────────┬──────────┬ ─ ─ ─ ─ ┐
//! │ file header │ header │ block             │ header │ block     │ filler   │ zeros   
//! └─────────────┴────────┴───────────────────┴────────┴───────────┴──────────┴ ─ ─ ─ ─ ┘
//!      64 B        64 B   a multiple of 64 B                        the end of a region
//! ```
//!
//! A killed process leaves exactly the writes before one point of its program. So the order of
//! writes is all that matters. A block's contents are written before its header says that it is in
//! use. A bit that describes the contents is written after them. [`Ordering::Release`] on a store
//! keeps the compiler from moving earlier writes behind it. Where later writes must not move before
//! a store either, a `compiler_fence` follows it.

#![allow(unsafe_code)]

use crate::SharedMemoryError;
use crate::region::{HUGE_PAGE_BYTES, Region};
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Bytes of a header.
pub(crate) const HEADER_BYTES: usize = 64;
/// `RTROWS` and the version of this layout.
const MAGIC: u64 = u64::from_le_bytes(*b"RTROWS\0\x01");

const FREE: u32 = 0;
const USED: u32 = 1;
const FILLER: u32 = 2;

#[repr(C, align(64))]
struct FileHeader {
    magic: AtomicU64,
    /// Words of a row.
    stride: AtomicU32,
    /// 1 once a block had to be put elsewhere, because the file could not grow.
    incomplete: AtomicU32,
}

/// The record of a block in the file.
#[repr(C, align(64))]
pub(crate) struct BlockHeader {
    /// Bytes of the block with its header; 0 where no block has been cut yet.
    bytes: AtomicU64,
    /// A word for the owner's use. A slab keeps a bit for each written row there.
    owner_bits: AtomicU64,
    state: AtomicU32,
    owner: AtomicU32,
    /// The block's number among those with the same owner.
    number: AtomicU32,
    items: AtomicU32,
}

const _: () = assert!(size_of::<BlockHeader>() == HEADER_BYTES && size_of::<FileHeader>() == HEADER_BYTES);

impl BlockHeader {
    /// The header that begins at `start`, in a region of `file`. The regions live as long as
    /// `file`.
    pub(crate) fn at(start: NonNull<u8>, _file: &BlockFile) -> &BlockHeader {
        debug_assert_eq!(start.addr().get() % HEADER_BYTES, 0);
        // SAFETY: callers give the aligned start of 64 mapped bytes that are only ever reached as
        // atomics.
        unsafe { start.cast().as_ref() }
    }

    fn is_uncut(&self) -> bool {
        self.bytes.load(Ordering::Acquire) == 0
    }

    /// Records that a block of these bytes, all zero, has been cut.
    pub(crate) fn cut(&self, bytes: usize) {
        self.bytes.store(bytes as u64, Ordering::Release);
    }

    /// Records that the block is in use.
    pub(crate) fn commit(&self, owner: u32, number: u32, items: u32, owner_bits: u64) {
        self.owner.store(owner, Ordering::Relaxed);
        self.number.store(number, Ordering::Relaxed);
        self.items.store(items, Ordering::Relaxed);
        self.owner_bits.store(owner_bits, Ordering::Relaxed);
        self.state.store(USED, Ordering::Release);
    }

    pub(crate) fn release(&self) {
        self.state.store(FREE, Ordering::Release);
    }

    /// Sets or clears a bit of the owner's word. Only one thread at a time may call this for a
    /// block.
    #[inline]
    pub(crate) fn set_owner_bit(&self, bit: u32, on: bool) {
        let owner_bits = self.owner_bits.load(Ordering::Relaxed);
        let owner_bits = if on { owner_bits | 1 << bit } else { owner_bits & !(1 << bit) };
        self.owner_bits.store(owner_bits, Ordering::Release);
    }

    pub(crate) fn owner_bits(&self) -> u64 {
        self.owner_bits.load(Ordering::Acquire)
    }
}

/// A block in use that a file holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundBlock {
    pub(crate) owner: u32,
    pub(crate) number: u32,
    pub(crate) items: u32,
    pub(crate) start: NonNull<u8>,
}

/// Blocks in use; free blocks with their bytes; and the offset in the region at which the next
/// block is cut.
type Walked = (Vec<FoundBlock>, Vec<(NonNull<u8>, usize)>, usize);

/// See the module's text.
pub(crate) struct BlockFile {
    path: PathBuf,
    file: File,
    /// The mapped file header.
    header: NonNull<FileHeader>,
    length: AtomicU64,
    keeps_dropped: AtomicBool,
}

// SAFETY: the header is reached as atomics only.
unsafe impl Send for BlockFile {}
// SAFETY: as above.
unsafe impl Sync for BlockFile {}

impl BlockFile {
    /// Opens or creates the file, and maps all of it. The mapping has at least `least` bytes.
    pub(crate) fn open(path: &Path, stride: usize, least: usize) -> Result<(Self, Region), SharedMemoryError> {
        let failed = |source| SharedMemoryError::Io { attempt: "open", path: path.to_owned(), source };
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let bytes = usize::try_from(length).unwrap_or(usize::MAX).max(least).next_multiple_of(HUGE_PAGE_BYTES);
        let region = Region::of_file(&file, 0, bytes).map_err(|source| SharedMemoryError::Io {
            attempt: "map",
            path: path.to_owned(),
            source,
        })?;
        let header = region.start.cast::<FileHeader>();
        let file = Self {
            path: path.to_owned(),
            file,
            header,
            length: AtomicU64::new(bytes as u64),
            // On until all blocks have found their owners.
            keeps_dropped: AtomicBool::new(true),
        };
        let header = file.header();
        // The magic is written before any block. A file without it is one whose creator was killed.
        if header.magic.load(Ordering::Acquire) == 0 && BlockHeader::at(file.first_block(), &file).is_uncut() {
            header.stride.store(stride as u32, Ordering::Relaxed);
            header.magic.store(MAGIC, Ordering::Release);
        }
        if header.magic.load(Ordering::Acquire) != MAGIC {
            return Err(file.damaged("it does not begin as a file of rows of this version does"));
        }
        if header.stride.load(Ordering::Relaxed) != stride as u32 {
            return Err(file.damaged("its rows have another length"));
        }
        if header.incomplete.load(Ordering::Relaxed) != 0 {
            return Err(file.damaged("it could not grow when rows were added"));
        }
        Ok((file, region))
    }

    /// Finds the blocks of the file, mapped whole as `region`.
    pub(crate) fn walk(&self, region: &Region) -> Result<Walked, SharedMemoryError> {
        let (mut found, mut free, mut offset) = (Vec::new(), Vec::new(), HEADER_BYTES);
        while offset < region.bytes {
            // SAFETY: within the region.
            let start = unsafe { region.start.add(offset) };
            let header = BlockHeader::at(start, self);
            let bytes = usize::try_from(header.bytes.load(Ordering::Acquire)).unwrap_or(usize::MAX);
            if bytes == 0 {
                break;
            }
            if bytes % HEADER_BYTES != 0 || bytes > region.bytes - offset {
                return Err(self.damaged("a block is longer than the file"));
            }
            let items = header.items.load(Ordering::Relaxed);
            match header.state.load(Ordering::Acquire) {
                USED if HEADER_BYTES + items as usize * size_of::<u32>() <= bytes => found.push(FoundBlock {
                    owner: header.owner.load(Ordering::Relaxed),
                    number: header.number.load(Ordering::Relaxed),
                    items,
                    // SAFETY: the block has that many bytes at least.
                    start: unsafe { start.add(HEADER_BYTES) },
                }),
                FREE if items > 0 => free.push((start, HEADER_BYTES + items as usize * size_of::<u32>())),
                // Cut but never used. The file does not record its requested size, so it cannot be
                // reused.
                FREE | FILLER => {}
                _ => return Err(self.damaged("a block's header makes no sense")),
            }
            offset += bytes;
        }
        Ok((found, free, offset))
    }

    /// Extends the file by `bytes`. `None` if there is no memory for it, or if an earlier extension
    /// failed.
    pub(crate) fn extend(&self, bytes: usize) -> Option<Region> {
        if self.is_incomplete() {
            return None;
        }
        let from = self.length.load(Ordering::Relaxed);
        let region = Region::of_file(&self.file, from, bytes).ok()?;
        self.length.store(from + bytes as u64, Ordering::Relaxed);
        Some(region)
    }

    /// Marks the end of a region as unused.
    pub(crate) fn fill(&self, start: NonNull<u8>, bytes: usize) {
        let header = BlockHeader::at(start, self);
        header.state.store(FILLER, Ordering::Relaxed);
        header.cut(bytes);
    }

    /// Records that rows lie elsewhere: a process that opens this file does not find them.
    pub(crate) fn mark_incomplete(&self) {
        self.header().incomplete.store(1, Ordering::Release);
    }

    /// With `on`, dropped blocks stay in the file.
    pub(crate) fn keep_dropped(&self, on: bool) {
        self.keeps_dropped.store(on, Ordering::Release);
    }

    pub(crate) fn is_incomplete(&self) -> bool {
        self.header().incomplete.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn keeps_dropped(&self) -> bool {
        self.keeps_dropped.load(Ordering::Acquire)
    }

    pub(crate) fn damaged(&self, problem: &'static str) -> SharedMemoryError {
        SharedMemoryError::Damaged { path: self.path.clone(), problem }
    }

    fn first_block(&self) -> NonNull<u8> {
        // SAFETY: a region has more bytes than a header.
        unsafe { self.header.cast().add(HEADER_BYTES) }
    }

    fn header(&self) -> &FileHeader {
        // SAFETY: mapped as long as the arena's regions are; the arena does not call this after
        // dropping them.
        unsafe { self.header.as_ref() }
    }
}
