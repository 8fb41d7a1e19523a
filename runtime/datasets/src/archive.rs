//! Members of a ZIP archive in memory: the original distribution, or a Python wheel.

use std::io::{Cursor, Read};

use zip::ZipArchive;
use zip::result::ZipError;

/// A ZIP archive in memory.
pub(crate) struct Archive<'a>(ZipArchive<Cursor<&'a [u8]>>);

impl<'a> Archive<'a> {
    /// Reads the archive's directory. The error is a sentence fragment about the archive.
    pub(crate) fn open(bytes: &'a [u8]) -> Result<Self, String> {
        let archive = ZipArchive::new(Cursor::new(bytes));
        archive.map(Self).map_err(|error| format!("it is no ZIP archive, or is cut off ({error})"))
    }

    /// The content of the member called `name`, its checksum verified. The error is a sentence
    /// fragment about the archive.
    pub(crate) fn member(&mut self, name: &str) -> Result<Vec<u8>, String> {
        let member = self.0.by_name(name).map_err(|error| match error {
            ZipError::FileNotFound => format!("it has no member {name}"),
            error => format!("its member {name} cannot be read ({error})"),
        })?;
        let size = member.size();
        let mut content = Vec::new();
        // One byte more than the directory promises: a longer member is noticed and not inflated
        // whole.
        member
            .take(size.saturating_add(1))
            .read_to_end(&mut content)
            .map_err(|error| format!("its member {name} cannot be read ({error})"))?;
        if content.len() as u64 == size {
            return Ok(content);
        }
        Err(format!("its member {name} has {} bytes or more, and its directory says {size}", content.len()))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::io::Write;
    use zip::write::SimpleFileOptions;
    use zip::{CompressionMethod, ZipWriter};

    /// A ZIP archive of these members, deflated if `deflate`.
    pub(crate) fn zip(members: &[(&str, &[u8])], deflate: bool) -> Vec<u8> {
        let method = if deflate { CompressionMethod::Deflated } else { CompressionMethod::Stored };
        let options = SimpleFileOptions::default().compression_method(method);
        let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
        for (name, content) in members {
            writer.start_file(*name, options).unwrap();
            writer.write_all(content).unwrap();
        }
        writer.finish().unwrap().into_inner()
    }

    fn member(archive: &[u8], name: &str) -> Result<Vec<u8>, String> {
        Archive::open(archive)?.member(name)
    }

    #[test]
    fn members_stored_and_deflated_are_read() {
        let long = vec![b'x'; 10_000];
        for deflate in [false, true] {
            let archive = zip(&[("a/b", b"hello"), ("c", &long)], deflate);
            assert_eq!(member(&archive, "a/b").unwrap(), b"hello");
            assert_eq!(member(&archive, "c").unwrap(), long);
            assert!(member(&archive, "d").unwrap_err().contains("no member d"));
        }
    }

    #[test]
    fn no_prefix_and_no_flipped_byte_makes_an_archive_panic_or_lie() {
        let archive = zip(&[("a", b"hello hello hello")], true);
        // The last two bytes are the length of a comment, which a reader does not need.
        for length in 0..archive.len() - 2 {
            assert!(member(&archive[..length], "a").is_err(), "{length} bytes");
        }
        for at in 0..archive.len() {
            let mut broken = archive.clone();
            broken[at] ^= 0x5a;
            if let Ok(content) = member(&broken, "a") {
                assert_eq!(content, b"hello hello hello", "byte {at}");
            }
        }
    }
}
