//! The layout of a rows file: slot snapshots one after another, and an index of them, so that a
//! reader can fetch any slots without the others. A file is written front to back. Pure functions
//! from numbers to bytes and from checked bytes to numbers.
//!
//! All numbers are little-endian:
//!
//! ```text
//! offset  size
//!      0     8  "RECTROWS"                              ┐
//!      8     4  version, 1                              │
//!     12     4  kind: 0 full, 1 delta                   │
//!     16    16  checkpoint                              │ header
//!     32     8  step                                    │
//!     40     4  part                                    │
//!     44     4  slots of the job                        │
//!     48    16  0                                       ┘
//!     64     …  slot snapshots by rising slot, without gaps
//!      …    40  for each: slot u32, content u32 (0 whole, 1 changes), offset u64, length u64,
//!               rows u64, removed keys u64
//!    −32     8  offset of the index                     ┐
//!    −24     4  entries of the index                    │
//!    −20     4  0                                       │ footer
//!    −16     8  XXH3-64 of header and index             │
//!     −8     8  "RECTEND."                              ┘
//! ```

use rectrain_embedding::{Slot, SlotContent};
use xxhash_rust::xxh3::Xxh3Default;

use crate::name::{CheckpointId, Kind};

pub(crate) const HEADER_BYTES: usize = 64;
pub(crate) const FOOTER_BYTES: usize = 32;
const ENTRY_BYTES: usize = 40;
pub(crate) const VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"RECTROWS";
const END: &[u8; 8] = b"RECTEND.";

/// The header of a rows file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsHeader {
    /// Whether the checkpoint needs a base.
    pub kind: Kind,
    /// The checkpoint.
    pub id: CheckpointId,
    /// Its step.
    pub step: u64,
    /// The number of this rows file among the checkpoint's rows files.
    pub part: u32,
    /// Virtual shards of the job.
    pub slots: u32,
}

/// The position of the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsFooter {
    /// Offset of the index's first byte.
    pub index_offset: u64,
    /// Entries in the index.
    pub entries: u32,
    /// XXH3-64 of header and index.
    pub checksum: u64,
}

/// The position of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexEntry {
    /// The slot.
    pub slot: Slot,
    /// Whether the snapshot is the whole slot.
    pub content: SlotContent,
    /// Offset of the snapshot's first byte.
    pub offset: u64,
    /// Bytes of the snapshot.
    pub length: u64,
    /// Rows in the snapshot.
    pub rows: u64,
    /// Removed keys in the snapshot.
    pub removed: u64,
}

/// Why bytes cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Problem {
    FutureVersion(u32),
    Damaged(String),
}

impl From<&str> for Problem {
    fn from(problem: &str) -> Self {
        Self::Damaged(problem.to_owned())
    }
}

impl RowsHeader {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let kind: u32 = match self.kind {
            Kind::Full => 0,
            Kind::Delta => 1,
        };
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&kind.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.id.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.step.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.part.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.slots.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Problem> {
        let mut reader = Reader(bytes);
        if reader.take::<8>() != *MAGIC {
            return Err("it does not begin with the magic bytes of a rows file".into());
        }
        let version = reader.u32();
        if version > VERSION {
            return Err(Problem::FutureVersion(version));
        }
        if version == 0 {
            return Err("its version is 0".into());
        }
        let kind = match reader.u32() {
            0 => Kind::Full,
            1 => Kind::Delta,
            other => return Err(Problem::Damaged(format!("its kind {other} is unknown"))),
        };
        let header = Self {
            kind,
            id: CheckpointId(u128::from_le_bytes(reader.take())),
            step: reader.u64(),
            part: reader.u32(),
            slots: reader.u32(),
        };
        if reader.take::<16>() != [0; 16] {
            return Err("its reserved bytes are not 0".into());
        }
        Ok(header)
    }
}

impl RowsFooter {
    fn encode(&self) -> [u8; FOOTER_BYTES] {
        let mut bytes = [0; FOOTER_BYTES];
        bytes[..8].copy_from_slice(&self.index_offset.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.entries.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.checksum.to_le_bytes());
        bytes[24..].copy_from_slice(END);
        bytes
    }

    /// The footer of a file of `size` bytes. The index must begin behind the header and fill all
    /// the space up to the footer.
    pub(crate) fn decode(bytes: &[u8; FOOTER_BYTES], size: u64) -> Result<Self, Problem> {
        let mut reader = Reader(bytes);
        let footer = Self { index_offset: reader.u64(), entries: reader.u32(), checksum: 0 };
        let reserved = reader.u32();
        let footer = Self { checksum: reader.u64(), ..footer };
        if reader.take::<8>() != *END || reserved != 0 {
            return Err("it does not end with the footer of a rows file".into());
        }
        let end = footer
            .index_offset
            .checked_add(u64::from(footer.entries) * ENTRY_BYTES as u64)
            .and_then(|end| end.checked_add(FOOTER_BYTES as u64));
        if footer.index_offset < HEADER_BYTES as u64 || end != Some(size) {
            return Err(Problem::Damaged(format!(
                "its index of {} entries at byte {} does not fit its {size} bytes",
                footer.entries, footer.index_offset
            )));
        }
        Ok(footer)
    }
}

/// The bytes behind the last snapshot: the index and the footer.
#[must_use]
pub fn encode_index(header: &RowsHeader, entries: &[IndexEntry]) -> (Vec<u8>, RowsFooter) {
    let mut bytes = Vec::with_capacity(entries.len() * ENTRY_BYTES + FOOTER_BYTES);
    for entry in entries {
        let content: u32 = match entry.content {
            SlotContent::Whole => 0,
            SlotContent::Changes => 1,
        };
        bytes.extend_from_slice(&entry.slot.0.to_le_bytes());
        bytes.extend_from_slice(&content.to_le_bytes());
        for number in [entry.offset, entry.length, entry.rows, entry.removed] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
    }
    let index_offset = entries.last().map_or(HEADER_BYTES as u64, |last| last.offset.saturating_add(last.length));
    let checksum = index_checksum(&header.encode(), &bytes);
    let footer = RowsFooter { index_offset, entries: entries.len() as u32, checksum };
    bytes.extend_from_slice(&footer.encode());
    (bytes, footer)
}

fn index_checksum(header: &[u8], index: &[u8]) -> u64 {
    let mut hash = Xxh3Default::new();
    hash.update(header);
    hash.update(index);
    hash.digest()
}

/// Decodes header and index from a file's first bytes and its bytes from the index on. `size` is
/// the file's size.
///
/// # Errors
/// A sentence about the first problem. Never panics, for any bytes, and takes at most a few
/// times their memory.
pub fn decode_index(header: &[u8], tail: &[u8], size: u64) -> Result<(RowsHeader, Vec<IndexEntry>), String> {
    let damaged = |problem| match problem {
        Problem::FutureVersion(version) => format!("its version {version} is newer than {VERSION}"),
        Problem::Damaged(problem) => problem,
    };
    let header: &[u8; HEADER_BYTES] = header.try_into().map_err(|_| "its header is cut short")?;
    let (_, footer) = tail.split_last_chunk().ok_or("its footer is cut short")?;
    let footer = RowsFooter::decode(footer, size).map_err(damaged)?;
    read_index(header, &footer, &tail[..tail.len() - FOOTER_BYTES]).map_err(damaged)
}

/// Checks header and index against the footer's checksum, and each entry against the others.
pub(crate) fn read_index(
    header: &[u8; HEADER_BYTES],
    footer: &RowsFooter,
    index: &[u8],
) -> Result<(RowsHeader, Vec<IndexEntry>), Problem> {
    // Decode the version first: a newer header is not damage.
    let decoded = RowsHeader::decode(header)?;
    if index.len() != footer.entries as usize * ENTRY_BYTES {
        return Err("its index is cut short".into());
    }
    let found = index_checksum(header, index);
    if found != footer.checksum {
        return Err(Problem::Damaged(format!(
            "the checksum of its header and index is {found:016x} and should be {:016x}",
            footer.checksum
        )));
    }
    let mut entries: Vec<IndexEntry> = Vec::with_capacity(footer.entries as usize);
    let mut end = HEADER_BYTES as u64;
    for bytes in index.as_chunks::<ENTRY_BYTES>().0 {
        let mut reader = Reader(bytes);
        let slot = Slot(reader.u32());
        let content = match reader.u32() {
            0 => SlotContent::Whole,
            1 => SlotContent::Changes,
            other => return Err(Problem::Damaged(format!("slot {slot} has the unknown content {other}"))),
        };
        let entry = IndexEntry {
            slot,
            content,
            offset: reader.u64(),
            length: reader.u64(),
            rows: reader.u64(),
            removed: reader.u64(),
        };
        if entry.offset != end || slot.0 >= decoded.slots || entries.last().is_some_and(|last| last.slot >= slot) {
            return Err(Problem::Damaged(format!("slot {slot} is out of order in its index")));
        }
        end = end.checked_add(entry.length).ok_or("its index names more bytes than fit 64 bits")?;
        entries.push(entry);
    }
    if end != footer.index_offset {
        return Err("its index does not reach to the last snapshot".into());
    }
    Ok((decoded, entries))
}

/// Takes numbers off the front of bytes that are long enough. Missing bytes read as 0.
struct Reader<'b>(&'b [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((taken, rest)) = self.0.split_first_chunk() else { return [0; N] };
        self.0 = rest;
        *taken
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> RowsHeader {
        RowsHeader { kind: Kind::Delta, id: CheckpointId(0x0123_4567 << 70), step: 99, part: 3, slots: 8 }
    }

    /// Entries of the given slots and lengths, without gaps.
    fn entries(of: &[(u32, u64)]) -> Vec<IndexEntry> {
        let mut offset = HEADER_BYTES as u64;
        let entry = |&(slot, length): &(u32, u64)| {
            let content = if slot % 2 == 0 { SlotContent::Whole } else { SlotContent::Changes };
            let entry = IndexEntry { slot: Slot(slot), content, offset, length, rows: length / 2, removed: 1 };
            offset += length;
            entry
        };
        of.iter().map(entry).collect()
    }

    fn file(entries: &[IndexEntry]) -> (Vec<u8>, Vec<u8>, u64) {
        let (tail, footer) = encode_index(&header(), entries);
        let size = footer.index_offset + tail.len() as u64;
        (header().encode().to_vec(), tail, size)
    }

    #[test]
    fn an_index_is_read_as_it_was_written() {
        for of in [&[][..], &[(2, 10)], &[(0, 1), (5, 0), (7, 1 << 40)]] {
            let (head, tail, size) = file(&entries(of));
            assert_eq!(decode_index(&head, &tail, size), Ok((header(), entries(of))));
        }
    }

    #[test]
    fn no_flipped_bit_and_no_other_size_goes_unnoticed() {
        let (head, tail, size) = file(&entries(&[(0, 100), (5, 7)]));
        for bit in 0..head.len() * 8 {
            let mut changed = head.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(decode_index(&changed, &tail, size).is_err(), "header bit {bit}");
        }
        for bit in 0..tail.len() * 8 {
            let mut changed = tail.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(decode_index(&head, &changed, size).is_err(), "tail bit {bit}");
        }
        assert!(decode_index(&head, &tail, size + 1).is_err() && decode_index(&head, &tail[1..], size).is_err());
        let mut newer = header().encode();
        newer[8] = 2;
        assert!(decode_index(&newer, &tail, size).unwrap_err().contains("newer"));
    }

    #[test]
    fn a_contradictory_index_with_a_valid_checksum_is_refused() {
        let refused = |change: &dyn Fn(&mut Vec<IndexEntry>)| {
            let mut changed = entries(&[(1, 10), (2, 10), (4, 10)]);
            change(&mut changed);
            let (head, tail, size) = file(&changed);
            decode_index(&head, &tail, size).unwrap_err()
        };
        assert!(refused(&|e| e[1].offset += 1).contains("out of order"));
        assert!(refused(&|e| e[1].slot = Slot(1)).contains("out of order"));
        assert!(refused(&|e| e[2].slot = Slot(8)).contains("out of order"));
        assert!(refused(&|e| e[1].length = u64::MAX).contains("more bytes than fit 64 bits"));
    }
}
