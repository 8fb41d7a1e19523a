//! Large local files. A file is written part by part under a temporary name, by blocking tasks.
//! Reads and writes bypass the page cache where the file system allows it. So data reaches the disk
//! as it is written and not all at once at the end, and nothing is copied twice. A checkpoint also
//! does not push other data out of memory. `Directory` is the only caller.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use tokio::task::JoinHandle;

/// Direct I/O needs memory, offsets and lengths that are multiples of this.
const ALIGNMENT: usize = 4096;
/// The most parts being written at a time; a further one waits.
const PARTS: usize = 2;

#[derive(Debug)]
pub(crate) struct LocalFile {
    /// The final path.
    path: PathBuf,
    staged: Staged,
    filling: Part,
    /// Offset in the file of the part that is being filled.
    offset: u64,
    /// Parts being written, the earliest first.
    under_way: VecDeque<JoinHandle<(Part, io::Result<()>)>>,
}

/// The file under its temporary name. If it is dropped before it is renamed, it is deleted.
#[derive(Debug)]
struct Staged {
    path: PathBuf,
    renamed: bool,
    handles: Arc<Handles>,
}

#[derive(Debug)]
struct Handles {
    cached: File,
    /// `None` where the file system does not support direct I/O.
    direct: Option<File>,
}

impl LocalFile {
    /// Creates the temporary file, and the folders it belongs in.
    pub(crate) async fn create(path: PathBuf, part_bytes: usize) -> io::Result<Self> {
        let target = path.clone();
        let staged = blocking(move || Staged::create(&target)).await?;
        Ok(Self { path, staged, filling: Part::new(part_bytes), offset: 0, under_way: VecDeque::new() })
    }

    /// Appends bytes. Waits while too many parts are being written. After an error the file can
    /// only be dropped.
    pub(crate) async fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            bytes = self.filling.fill(bytes);
            if self.filling.is_full() {
                self.send().await?;
            }
        }
        Ok(())
    }

    async fn send(&mut self) -> io::Result<()> {
        let free = if self.under_way.len() < PARTS {
            Part::new(self.filling.capacity)
        } else {
            self.written().await?.unwrap_or_else(|| Part::new(self.filling.capacity))
        };
        let (full, offset) = (std::mem::replace(&mut self.filling, free), self.offset);
        self.offset += full.length as u64;
        let handles = Arc::clone(&self.staged.handles);
        self.under_way.push_back(tokio::task::spawn_blocking(move || {
            let written = handles.write(full.bytes(), offset);
            (full, written)
        }));
        Ok(())
    }

    /// Waits for the earliest part being written, and returns its memory, emptied.
    async fn written(&mut self) -> io::Result<Option<Part>> {
        let Some(task) = self.under_way.pop_front() else { return Ok(None) };
        let (part, written) = task.await.map_err(io::Error::other)?;
        written?;
        Ok(Some(Part { length: 0, ..part }))
    }

    /// Writes the rest, waits until everything is on the disk, and renames the file.
    pub(crate) async fn finish(mut self) -> io::Result<()> {
        if self.filling.length > 0 {
            self.send().await?;
        }
        while self.written().await?.is_some() {}
        let (path, staged) = (self.path, self.staged);
        blocking(move || staged.publish(&path)).await
    }
}

impl Staged {
    fn create(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            create_folders(folder)?;
        }
        for attempt in 1.. {
            let mut name = path.as_os_str().to_owned();
            name.push(format!("#{attempt}"));
            let staged = PathBuf::from(name);
            match OpenOptions::new().write(true).create_new(true).open(&staged) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                cached => {
                    let handles =
                        Handles { cached: cached?, direct: open_direct(&staged, OpenOptions::new().write(true)) };
                    return Ok(Self { path: staged, renamed: false, handles: Arc::new(handles) });
                }
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// Waits until everything is on the disk, and renames the file.
    fn publish(mut self, path: &Path) -> io::Result<()> {
        self.handles.cached.sync_all()?;
        std::fs::rename(&self.path, path)?;
        self.renamed = true;
        sync_folder(path.parent())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.renamed {
            // If this fails, the clean-up of unfinished files deletes the file later.
            let _deleted = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(target_os = "linux")]
fn open_direct(path: &Path, options: &mut OpenOptions) -> Option<File> {
    options.custom_flags(libc::O_DIRECT).open(path).ok()
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_path: &Path, _options: &mut OpenOptions) -> Option<File> {
    None
}

/// Reads a range of a file past the page cache. `None` if that fails for any reason.
pub(crate) async fn read_direct(path: PathBuf, range: Range<u64>) -> Option<Bytes> {
    let read = move || {
        let file = open_direct(&path, OpenOptions::new().read(true))?;
        let whole = range.start / ALIGNMENT as u64 * ALIGNMENT as u64..range.end.next_multiple_of(ALIGNMENT as u64);
        let mut part = Part::new(usize::try_from(whole.end - whole.start).ok()?);
        part.length = part.capacity;
        let wanted = (range.start - whole.start) as usize..(range.end - whole.start) as usize;
        let mut read = 0;
        // The last page of a file may be cut short.
        while read < wanted.end {
            match file.read_at(&mut part.bytes_mut()[read..], whole.start + read as u64) {
                Ok(0) | Err(_) => return None,
                Ok(more) => read += more,
            }
        }
        let start = part.start;
        Some(Bytes::from(part.memory).slice(start + wanted.start..start + wanted.end))
    };
    tokio::task::spawn_blocking(read).await.ok().flatten()
}

impl Handles {
    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let aligned = bytes.len().is_multiple_of(ALIGNMENT) && offset.is_multiple_of(ALIGNMENT as u64);
        if let Some(direct) = self.direct.as_ref().filter(|_| aligned) {
            match direct.write_all_at(bytes, offset) {
                // The file system requires another alignment.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
                written => return written,
            }
        }
        self.cached.write_all_at(bytes, offset)
    }
}

/// Memory for one part. It begins at a multiple of [`ALIGNMENT`].
#[derive(Debug)]
struct Part {
    memory: Vec<u8>,
    start: usize,
    length: usize,
    capacity: usize,
}

impl Part {
    fn new(capacity: usize) -> Self {
        let memory = vec![0; capacity + ALIGNMENT];
        // If the memory cannot be aligned, the part goes through the page cache.
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { memory, start, length: 0, capacity }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.length]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }

    fn is_full(&self) -> bool {
        self.length == self.capacity
    }

    /// Copies as many bytes as fit, and returns the rest.
    fn fill<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        let (taken, rest) = bytes.split_at(bytes.len().min(self.capacity - self.length));
        let before = self.length;
        self.length += taken.len();
        self.bytes_mut()[before..].copy_from_slice(taken);
        rest
    }
}

/// Makes a folder and its missing ancestors, durably.
fn create_folders(folder: &Path) -> io::Result<()> {
    let missing: Vec<&Path> = folder.ancestors().take_while(|folder| !folder.exists()).collect();
    std::fs::create_dir_all(folder)?;
    missing.into_iter().try_for_each(|folder| sync_folder(folder.parent()))
}

fn sync_folder(folder: Option<&Path>) -> io::Result<()> {
    folder.map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}
