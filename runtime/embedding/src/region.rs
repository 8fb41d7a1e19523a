//! Address space for an [arena](crate::arena): large mappings of the process's own memory, or of a
//! file whose pages outlive the process. This module knows nothing of their contents.

#![allow(unsafe_code)]

#[cfg(any(not(unix), miri))]
use std::alloc::{self, Layout};
use std::fs::File;
use std::ptr::NonNull;

/// The size of the pages that back a region where the kernel has huge pages. A region begins at a
/// multiple of it.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The smallest page size: every page is a multiple of it.
#[cfg(all(unix, not(miri)))]
const LEAST_PAGE_BYTES: usize = 4_096;

/// Mapped memory that begins at a multiple of [`HUGE_PAGE_BYTES`].
pub(crate) struct Region {
    pub(crate) start: NonNull<u8>,
    pub(crate) bytes: usize,
}

// SAFETY: a region owns its bytes, which no thread has an affinity to.
unsafe impl Send for Region {}

#[cfg(all(unix, not(miri)))]
impl Region {
    /// Zeroed memory of this process. A page takes memory on first touch.
    pub(crate) fn of_memory(bytes: usize) -> Option<Self> {
        let region = Self::reserve(bytes, libc::PROT_READ | libc::PROT_WRITE)?;
        region.advise_huge_pages();
        Some(region)
    }

    /// Maps bytes `from..from + bytes` of a file, both multiples of the page size. Extends the file
    /// with zeros if it is shorter. Every page gets its memory or disk space here, so writing to it
    /// cannot fail later. That includes pages of an earlier process that was killed before it
    /// allocated them.
    pub(crate) fn of_file(file: &File, from: u64, bytes: usize) -> std::io::Result<Self> {
        use std::os::fd::AsRawFd;
        let offset = libc::off_t::try_from(from).map_err(std::io::Error::other)?;
        let (length, end) = (file.metadata()?.len(), from + bytes as u64);
        if length < end {
            file.set_len(end)?;
        }
        let no_memory = || std::io::Error::from(std::io::ErrorKind::OutOfMemory);
        let region = Self::reserve(bytes, libc::PROT_NONE).ok_or_else(no_memory)?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: the range is a mapping of our own that nothing refers to, and is replaced as a
        // whole.
        let address =
            unsafe { libc::mmap(region.start.as_ptr().cast(), bytes, protection, flags, file.as_raw_fd(), offset) };
        if address == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        region.advise_huge_pages();
        #[cfg(target_os = "linux")]
        {
            let there = first_hole(file, from)?.saturating_sub(from);
            let old = usize::try_from(there).unwrap_or(bytes).min(bytes);
            if old < bytes
                && let Err(error) = region.allocate(file, from, old)
            {
                drop(region);
                // A later mapping must not find a length without memory behind it.
                file.set_len(length)?;
                return Err(error);
            }
        }
        Ok(region)
    }

    /// Allocates the pages from byte `old` of the region on; the region starts at `from` in the
    /// file. Called after the huge-page advice, so that they can be huge pages.
    #[cfg(target_os = "linux")]
    fn allocate(&self, file: &File, from: u64, old: usize) -> std::io::Result<()> {
        let (start, bytes) = (self.start.as_ptr().wrapping_add(old), self.bytes - old);
        loop {
            // SAFETY: the range is mapped and nothing refers to it. Without memory, the call fails
            // and sends no signal.
            let populated = unsafe { libc::madvise(start.cast(), bytes, libc::MADV_POPULATE_WRITE) };
            if populated == 0 {
                return Ok(());
            }
            let error = std::io::Error::last_os_error();
            match error.raw_os_error() {
                // A kernel before 5.14.
                Some(libc::EINVAL) => return allocate_in_file(file, from + old as u64, bytes),
                Some(libc::EINTR) => {}
                _ => return Err(error),
            }
        }
    }

    /// Has the kernel find memory for the whole region, which nothing has been written to yet. It
    /// touches every page. `MADV_POPULATE_WRITE` would keep other threads from mapping memory while
    /// the host looks for pages.
    pub(crate) fn populate(&mut self) {
        for from in (0..self.bytes).step_by(LEAST_PAGE_BYTES) {
            // SAFETY: within the region, which is mapped, zeroed and borrowed for writing.
            unsafe { self.start.add(from).write_volatile(0) };
        }
    }

    /// Whether all of it has memory.
    #[cfg(all(test, target_os = "linux"))]
    pub(crate) fn is_resident(&self) -> bool {
        let mut pages = vec![0_u8; self.bytes / LEAST_PAGE_BYTES];
        // SAFETY: the range is mapped, and there is a byte for each of its pages, which are no
        // smaller.
        let told = unsafe { libc::mincore(self.start.as_ptr().cast(), self.bytes, pages.as_mut_ptr()) };
        // SAFETY: asks for a constant of the system.
        let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        told == 0 && pages[..self.bytes / page_bytes].iter().all(|page| page & 1 == 1)
    }

    /// A private mapping, aligned.
    fn reserve(bytes: usize, protection: libc::c_int) -> Option<Self> {
        let mapped = bytes + HUGE_PAGE_BYTES;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no memory of
        // ours.
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
        Some(Self { start: NonNull::new(start.cast())?, bytes })
    }

    fn advise_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        // SAFETY: the range is mapped; the advice changes nothing a program can observe but speed,
        // and a kernel that has no huge pages refuses it.
        unsafe {
            libc::madvise(self.start.as_ptr().cast(), self.bytes, libc::MADV_HUGEPAGE)
        };
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
fn offset_in_file(value: u64) -> std::io::Result<libc::off_t> {
    libc::off_t::try_from(value).map_err(std::io::Error::other)
}

#[cfg(all(target_os = "linux", not(miri)))]
fn allocate_in_file(file: &File, from: u64, bytes: usize) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    let (offset, length) = (offset_in_file(from)?, offset_in_file(bytes as u64)?);
    // SAFETY: the descriptor is open; nothing but the file is changed.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), offset, length) } {
        0 => Ok(()),
        failed => Err(std::io::Error::from_raw_os_error(failed)),
    }
}

/// The offset of the first byte from `from` on that has no memory; the file's length if all have.
#[cfg(all(target_os = "linux", not(miri)))]
fn first_hole(file: &File, from: u64) -> std::io::Result<u64> {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor is open. Only its position changes, which no code uses.
    let hole = unsafe { libc::lseek(file.as_raw_fd(), offset_in_file(from)?, libc::SEEK_HOLE) };
    u64::try_from(hole).map_err(|_| std::io::Error::last_os_error())
}

#[cfg(all(unix, not(miri)))]
impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range is mapped, and the owner drops a region only when nothing refers into
        // it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(any(not(unix), miri))]
impl Region {
    const ALIGNMENT: usize = 64;

    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes, Self::ALIGNMENT).ok()
    }

    pub(crate) fn of_file(_file: &File, _from: u64, _bytes: usize) -> std::io::Result<Self> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn populate(&mut self) {}

    pub(crate) fn of_memory(bytes: usize) -> Option<Self> {
        // SAFETY: `bytes` is not 0.
        let start = unsafe { alloc::alloc_zeroed(Self::layout(bytes)?) };
        Some(Self { start: NonNull::new(start)?, bytes })
    }
}

#[cfg(any(not(unix), miri))]
impl Drop for Region {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.bytes) {
            // SAFETY: allocated with this layout by `of_memory`, and nothing refers into it any
            // more.
            unsafe { alloc::dealloc(self.start.as_ptr(), layout) };
        }
    }
}
