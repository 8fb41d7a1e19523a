//! Fingerprints of the files of a data set, for a list of the files that a model was trained on.
//!
//! The store versions an object. A local file has a time of modification, which a copy or a `touch`
//! changes. So the fingerprint of a local file also has a digest of its content (XXH3-64): of the
//! whole file up to [`WHOLE_BYTES`], and of [`BLOCKS`] blocks beyond. The blocks are spread evenly
//! from the first byte to the last. So a list of files takes reading at most 1 MiB a file.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::UNIX_EPOCH;

use xxhash_rust::xxh3::Xxh3;

use crate::dataset::Dataset;
use crate::error::DataError;
use crate::identity::Version;
use crate::pace;
use crate::storage::{FilePlace, SourceFile};

/// A file up to this size is digested whole.
const WHOLE_BYTES: u64 = BLOCKS * BLOCK_BYTES;
/// Blocks that are digested of a larger file.
const BLOCKS: u64 = 16;
const BLOCK_BYTES: u64 = 64 << 10;

/// The state of a file: equal for equal content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint {
    /// The path or URL.
    pub name: String,
    /// In bytes.
    pub size: u64,
    /// The version in its store: a generation, an entity tag, or a time of modification in
    /// nanoseconds since 1970. The kind comes first, before a colon.
    pub version: Option<String>,
    /// The digest of a local file's content.
    pub content: Option<u64>,
}

/// The fingerprints of a list of files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprints {
    /// The number of files.
    pub count: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// A digest of names, sizes and versions. Times of modification do not count.
    pub digest: u64,
    /// The files in reading order. Empty beyond [`Fingerprints::MOST_LISTED`] files.
    pub list: Vec<Fingerprint>,
}

impl Fingerprints {
    /// Longer lists have counts and a digest only, so that the state that holds them stays small.
    pub const MOST_LISTED: usize = 1_000;
}

impl Dataset {
    /// The fingerprints of the files. There are none for a source without files. Reads at most
    /// 1 MiB of each local file. Blocks.
    ///
    /// # Errors
    /// A file that cannot be read, or is shorter than it was when the data set was opened.
    pub fn fingerprints(&self) -> Result<Fingerprints, DataError> {
        let files = self.source_files();
        let is_listed = files.len() <= Fingerprints::MOST_LISTED;
        let listed = if is_listed { &files[..] } else { &[] };
        Ok(Fingerprints {
            count: files.len() as u64,
            bytes: files.iter().map(|file| file.size).sum(),
            digest: digest(&files),
            list: listed.iter().map(|file| fingerprint(file)).collect::<Result<_, _>>()?,
        })
    }
}

/// The digest of a list; equal in programs of every build.
fn digest(files: &[&SourceFile]) -> u64 {
    let mut digest = Xxh3::new();
    for file in files {
        let version = match &file.version {
            None | Some(Version::Modified(_)) => String::new(),
            Some(version) => version_text(version),
        };
        digest.update(&(file.name.len() as u64).to_le_bytes());
        digest.update(file.name.as_bytes());
        digest.update(&file.size.to_le_bytes());
        digest.update(&(version.len() as u64).to_le_bytes());
        digest.update(version.as_bytes());
    }
    digest.digest()
}

fn fingerprint(file: &SourceFile) -> Result<Fingerprint, DataError> {
    let content = match &file.place {
        FilePlace::Local(path) => Some(content_digest(path, file.size).map_err(|error| file.read_error(error))?),
        FilePlace::Object(_) => None,
    };
    Ok(Fingerprint {
        name: file.name.clone(),
        size: file.size,
        version: file.version.as_ref().map(version_text),
        content,
    })
}

pub(crate) fn version_text(version: &Version) -> String {
    match version {
        Version::Generation(generation) => format!("generation:{generation}"),
        Version::ETag(tag) => format!("etag:{tag}"),
        Version::Modified(time) => {
            let nanoseconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
            format!("modified:{nanoseconds}")
        }
    }
}

/// The digest of the first `size` bytes of a file by the module's rule.
fn content_digest(path: &Path, size: u64) -> io::Result<u64> {
    let mut file = File::open(path)?;
    let mut digest = Xxh3::new();
    let mut block = vec![0; BLOCK_BYTES.min(size) as usize];
    for at in block_starts(size) {
        let length = BLOCK_BYTES.min(size - at) as usize;
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(&mut block[..length])?;
        digest.update(&block[..length]);
        pace::pass(length as u64);
    }
    Ok(digest.digest())
}

fn block_starts(size: u64) -> Vec<u64> {
    if size <= WHOLE_BYTES {
        return (0..size.div_ceil(BLOCK_BYTES)).map(|block| block * BLOCK_BYTES).collect();
    }
    let last = u128::from(size - BLOCK_BYTES);
    (0..BLOCKS).map(|block| (last * u128::from(block) / u128::from(BLOCKS - 1)) as u64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(bytes: &[u8]) -> u64 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, bytes).unwrap();
        content_digest(&path, bytes.len() as u64).unwrap()
    }

    #[test]
    fn every_byte_of_a_small_file_counts() {
        let bytes = vec![7; WHOLE_BYTES as usize];
        let whole = digest(&bytes);
        for at in [0, 1, bytes.len() / 2, bytes.len() - 1] {
            let mut other = bytes.clone();
            other[at] = 8;
            assert_ne!(digest(&other), whole, "byte {at}");
        }
        assert_eq!(whole, xxhash_rust::xxh3::xxh3_64(&bytes), "the digest of `xxhsum -H3`");
        assert_eq!(digest(b""), xxhash_rust::xxh3::xxh3_64(b""));
    }

    #[test]
    fn the_first_and_last_bytes_of_a_large_file_count() {
        let bytes = vec![7; 3 * WHOLE_BYTES as usize + 5];
        let whole = digest(&bytes);
        for at in [0, BLOCK_BYTES as usize - 1, bytes.len() - BLOCK_BYTES as usize, bytes.len() - 1] {
            let mut other = bytes.clone();
            other[at] = 8;
            assert_ne!(digest(&other), whole, "byte {at}");
        }
        let starts = block_starts(u64::MAX);
        assert_eq!((starts.len(), starts[0], starts[15]), (16, 0, u64::MAX - BLOCK_BYTES));
    }

    #[test]
    fn a_file_that_became_shorter_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, b"abc").unwrap();
        assert!(content_digest(&path, 4).is_err());
    }
}
