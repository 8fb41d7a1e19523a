//! Decompresses the bytes of text files, and reads them ahead on a thread. The thread sends the
//! parser at most [`BLOCKS`] blocks of [`BLOCK_BYTES`] ahead, and waits if the channel is full.
//! Dropping [`Blocks`] ends the thread.

use crate::blocking::Stop;
use crate::error::DataError;
use crate::pace;
use crate::storage::SourceFile;
use std::io::{self, BufReader, Cursor, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

pub(crate) const BLOCK_BYTES: usize = 512 << 10;
const BLOCKS: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstandard,
}

/// First bytes of files that are not text.
const NOT_TEXT: [(&[u8], &str); 6] = [
    (b"PAR1", "it is a Parquet file; set the format to Parquet"),
    (b"PK\x03\x04", "it is a ZIP archive; unpack it first"),
    (b"BZh", "it is compressed with bzip2; use gzip or Zstandard"),
    (b"\xfd7zXZ", "it is compressed with xz; use gzip or Zstandard"),
    (b"\xff\xfe", "it is UTF-16; convert it to UTF-8"),
    (b"\xfe\xff", "it is UTF-16; convert it to UTF-8"),
];

/// The decompressed content of a text file, front to back.
pub(crate) struct Decoded {
    file: SourceFile,
    pub(crate) compression: Compression,
    /// Bytes of the file that were read so far, before decompression.
    consumed: Arc<AtomicU64>,
    reader: Box<dyn Read + Send>,
}

/// Counts the bytes that it reads.
struct Counted<R> {
    reader: R,
    count: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(into)?;
        self.count.fetch_add(read as u64, Ordering::Relaxed);
        pace::pass(read as u64);
        Ok(read)
    }
}

impl Decoded {
    pub(crate) fn open(file: &SourceFile, stop: &Stop) -> Result<Self, DataError> {
        let mut raw = file.open(stop).map_err(|error| file.read_error(error))?;
        let mut head = Vec::with_capacity(8);
        raw.by_ref().take(8).read_to_end(&mut head).map_err(|error| file.read_error(error))?;
        let compression = recognise(file, &head)?;
        let consumed = Arc::new(AtomicU64::new(0));
        let raw = Counted { reader: Cursor::new(head).chain(raw), count: Arc::clone(&consumed) };
        let reader: Box<dyn Read + Send> = match compression {
            Compression::None => Box::new(raw),
            Compression::Gzip => Box::new(flate2::read::MultiGzDecoder::new(raw)),
            Compression::Zstandard => Box::new(
                zstd::stream::read::Decoder::with_buffer(BufReader::with_capacity(32 << 10, raw))
                    .map_err(|error| file.read_error(error))?,
            ),
        };
        Ok(Self { file: file.clone(), compression, consumed, reader })
    }

    pub(crate) fn consumed(&self) -> u64 {
        self.consumed.load(Ordering::Relaxed)
    }

    /// Fills `into` from its beginning. Returns the number of bytes. Fewer than it holds mean the
    /// end of the file.
    pub(crate) fn fill(&mut self, into: &mut [u8]) -> Result<usize, DataError> {
        let mut filled = 0;
        while filled < into.len() {
            match self.reader.read(&mut into[filled..]) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failure(error)),
            }
        }
        Ok(filled)
    }

    /// Distinguishes damaged data from a failing disk or network.
    fn failure(&self, error: io::Error) -> DataError {
        let is_storage_error =
            error.raw_os_error().is_some() || error.get_ref().is_some_and(|inner| inner.is::<object_store::Error>());
        let codec = match self.compression {
            Compression::Gzip => "gzip",
            Compression::Zstandard => "Zstandard",
            Compression::None => return self.file.read_error(error),
        };
        if is_storage_error {
            return self.file.read_error(error);
        }
        let problem = match error.kind() {
            io::ErrorKind::UnexpectedEof => format!("its {codec} stream ends early"),
            _ => format!("its {codec} stream cannot be decoded ({error})"),
        };
        DataError::Damaged { file: self.file.name.clone(), problem }
    }
}

fn recognise(file: &SourceFile, head: &[u8]) -> Result<Compression, DataError> {
    let wrong = |expected, problem: &str| {
        Err(DataError::WrongFormat { file: file.name.clone(), expected, problem: problem.to_owned() })
    };
    if head.starts_with(b"\x1f\x8b") {
        return Ok(Compression::Gzip);
    }
    if head.starts_with(b"\x28\xb5\x2f\xfd") {
        return Ok(Compression::Zstandard);
    }
    let name = file.name.to_ascii_lowercase();
    if name.ends_with(".gz") {
        return wrong("gzip", "its name ends in .gz, but its content does not begin as gzip");
    }
    if name.ends_with(".zst") {
        return wrong("Zstandard", "its name ends in .zst, but its content does not begin as Zstandard");
    }
    match NOT_TEXT.iter().find(|(magic, _)| head.starts_with(magic)) {
        Some((_, problem)) => wrong("text", problem),
        None => Ok(Compression::None),
    }
}

/// A part of a file, in the first `length` bytes.
pub(crate) struct Block {
    pub(crate) bytes: Vec<u8>,
    pub(crate) length: usize,
    /// Whether the file ends here.
    pub(crate) last: bool,
}

/// The blocks of files, one file after the other, read ahead by a thread.
pub(crate) struct Blocks {
    full: Option<Receiver<Result<Block, DataError>>>,
    /// Used blocks, to be filled again.
    empty: SyncSender<Vec<u8>>,
    thread: Option<JoinHandle<()>>,
}

impl Blocks {
    pub(crate) fn start(files: Vec<SourceFile>, stop: Stop) -> Result<Self, DataError> {
        let (full_sender, full) = sync_channel(BLOCKS);
        let (empty, empty_receiver) = sync_channel(BLOCKS + 2);
        let thread = std::thread::Builder::new()
            .name("rectrain-data-read".into())
            .spawn(move || {
                for file in &files {
                    if let Err(error) = read_file(file, &stop, &full_sender, &empty_receiver) {
                        // If the channel is closed, the parser has ended and needs no error.
                        let _ = full_sender.send(Err(error));
                        return;
                    }
                    if stop.is_set() {
                        return;
                    }
                }
            })
            .map_err(thread_error)?;
        Ok(Self { full: Some(full), empty, thread: Some(thread) })
    }

    /// The next block. Must not be called after the last block of the last file.
    pub(crate) fn next(&mut self) -> Result<Block, DataError> {
        let full = self.full.as_ref().ok_or(DataError::Stopped)?;
        full.recv().map_err(|_| DataError::Stopped)?
    }

    /// Returns a used block.
    pub(crate) fn give_back(&self, bytes: Vec<u8>) {
        // If the channel is full or the thread has ended, the block is freed instead.
        let _ = self.empty.try_send(bytes);
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.full = None;
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, the parser has seen that as a closed channel.
            let _ = thread.join();
        }
    }
}

/// Sends the blocks of a file. Returns early, without an error, if the receiver is gone.
fn read_file(
    file: &SourceFile,
    stop: &Stop,
    full: &SyncSender<Result<Block, DataError>>,
    empty: &Receiver<Vec<u8>>,
) -> Result<(), DataError> {
    let mut decoded = Decoded::open(file, stop)?;
    loop {
        let mut bytes = empty.try_recv().unwrap_or_else(|_| vec![0; BLOCK_BYTES]);
        let length = decoded.fill(&mut bytes)?;
        let last = length < bytes.len();
        let block = Block { bytes, length, last };
        if full.send(Ok(block)).is_err() || last || stop.is_set() {
            return Ok(());
        }
    }
}

pub(crate) fn thread_error(source: io::Error) -> DataError {
    DataError::Io { action: "start a thread to read", file: "the data".to_owned(), source }
}
