//! Members of a ZIP archive, enough for a Python wheel: stored or deflated members, no encryption, no
//! ZIP64. Only the MovieLens preparation uses it. The format is PKWARE's APPNOTE 6.3, sections 4.3.7,
//! 4.3.12 and 4.3.16.

use std::io::Read;

/// The content of the member called `name`; an error is a sentence fragment about the archive.
pub(crate) fn member(archive: &[u8], name: &str) -> Result<Vec<u8>, String> {
    let (mut at, count) = directory(archive)?;
    for _ in 0..count {
        let entry = Entry::at(archive, at).ok_or("its directory is cut off")?;
        if entry.name == name.as_bytes() {
            return entry.content(archive);
        }
        at = entry.next;
    }
    Err(format!("it has no member {name}"))
}

/// Where the central directory begins, and how many members it lists.
fn directory(archive: &[u8]) -> Result<(usize, u16), String> {
    const END: &[u8] = b"PK\x05\x06";
    let tail = archive.len().saturating_sub(22 + 65_535);
    let end = memchr::memmem::rfind(&archive[tail..], END).ok_or("it is no ZIP archive, or is cut off")?;
    let end = &archive[tail + end..];
    match (u32_at(end, 16), u16_at(end, 10)) {
        (Some(u32::MAX), _) | (_, Some(u16::MAX)) => Err("it is a ZIP64 archive".into()),
        (Some(start), Some(count)) => Ok((start as usize, count)),
        _ => Err("its end is cut off".into()),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(bytes.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

struct Entry<'a> {
    name: &'a [u8],
    method: u16,
    crc: u32,
    packed: usize,
    size: usize,
    header: usize,
    next: usize,
}

impl<'a> Entry<'a> {
    fn at(archive: &'a [u8], at: usize) -> Option<Self> {
        let record = archive.get(at..).filter(|record| record.starts_with(b"PK\x01\x02"))?;
        let lengths = [28, 30, 32].map(|field| u16_at(record, field).map(usize::from));
        let [name, extra, comment] = lengths;
        let name = name?;
        Some(Self {
            name: record.get(46..46 + name)?,
            method: u16_at(record, 10)?,
            crc: u32_at(record, 16)?,
            packed: u32_at(record, 20)? as usize,
            size: u32_at(record, 24)? as usize,
            header: u32_at(record, 42)? as usize,
            next: at + 46 + name + extra? + comment?,
        })
    }

    fn content(&self, archive: &[u8]) -> Result<Vec<u8>, String> {
        let packed = self.packed_bytes(archive).ok_or("a member is cut off")?;
        let content = match self.method {
            0 => packed.to_vec(),
            8 => {
                // One byte more than promised, so that a longer member is noticed, not inflated whole.
                let mut content = Vec::new();
                flate2::read::DeflateDecoder::new(packed)
                    .take(self.size as u64 + 1)
                    .read_to_end(&mut content)
                    .map_err(|error| format!("a member cannot be inflated ({error})"))?;
                content
            }
            method => return Err(format!("a member is packed by the unknown method {method}")),
        };
        let mut crc = flate2::Crc::new();
        crc.update(&content);
        match content.len() == self.size && crc.sum() == self.crc {
            true => Ok(content),
            false => Err("the checksum of a member is wrong".into()),
        }
    }

    fn packed_bytes(&self, archive: &'a [u8]) -> Option<&'a [u8]> {
        let header = archive.get(self.header..)?;
        let header = header.strip_prefix(b"PK\x03\x04")?;
        let name = usize::from(u16_at(header, 22)?);
        let extra = usize::from(u16_at(header, 24)?);
        header.get(26 + name + extra..)?.get(..self.packed)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::io::Write;

    /// A ZIP archive of these members, deflated if `deflate`.
    pub(crate) fn zip(members: &[(&str, &[u8])], deflate: bool) -> Vec<u8> {
        let (mut archive, mut directory) = (Vec::new(), Vec::new());
        for (name, content) in members {
            let packed = if deflate {
                let mut encoder = flate2::write::DeflateEncoder::new(vec![], Default::default());
                encoder.write_all(content).unwrap();
                encoder.finish().unwrap()
            } else {
                content.to_vec()
            };
            let mut crc = flate2::Crc::new();
            crc.update(content);
            let mut fields = vec![];
            for word in [20_u16, 0, if deflate { 8 } else { 0 }, 0, 0] {
                fields.extend(word.to_le_bytes());
            }
            for word in [crc.sum(), packed.len() as u32, content.len() as u32] {
                fields.extend(word.to_le_bytes());
            }
            fields.extend((name.len() as u16).to_le_bytes());
            fields.extend(0_u16.to_le_bytes());
            let offset = archive.len() as u32;
            archive.extend(b"PK\x03\x04");
            archive.extend(&fields);
            archive.extend(name.as_bytes());
            archive.extend(packed);
            directory.extend(b"PK\x01\x02\x14\0");
            directory.extend(&fields);
            directory.extend([0; 10]);
            directory.extend(offset.to_le_bytes());
            directory.extend(name.as_bytes());
        }
        let (start, count) = (archive.len() as u32, members.len() as u16);
        archive.extend(&directory);
        archive.extend(b"PK\x05\x06\0\0\0\0");
        archive.extend([count.to_le_bytes(), count.to_le_bytes()].concat());
        archive.extend((directory.len() as u32).to_le_bytes());
        archive.extend(start.to_le_bytes());
        archive.extend([0, 0]);
        archive
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
    fn no_prefix_and_no_flipped_byte_of_an_archive_makes_it_panic_or_lie() {
        let archive = zip(&[("a", b"hello hello hello")], true);
        // The last two bytes are the length of a comment, which nobody needs.
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
