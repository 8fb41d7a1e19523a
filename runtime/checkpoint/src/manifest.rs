//! The manifest: it makes files a checkpoint. A JSON object with step, identity and files, each
//! with its size and checksum, and a checksum of its own. This module encodes a manifest, and
//! decodes bytes into a manifest that is known to be consistent. It reads and writes no file.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use rectrain_embedding::{MAX_SLOTS, Slot};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::CheckpointError;
use crate::identity::Identity;
use crate::name::{Base, CheckpointId, Kind, directory_name};

/// Name of the manifest in a checkpoint's directory.
pub const MANIFEST: &str = "manifest.json";
/// The newest format version that this program reads, and the one it writes.
pub const FORMAT_VERSION: u64 = 1;
/// The largest manifest that is written and read. With 65,536 slots, as scattered as possible, a
/// manifest has 3 MB.
pub(crate) const MOST_BYTES: u64 = 16 << 20;
const FORMAT: &str = "rectrain-checkpoint";

/// An XXH3-64 hash. In text, 16 hexadecimal digits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hash64(pub u64);

impl fmt::Display for Hash64 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Hash64 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for Hash64 {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let hash = u64::from_str_radix(text, 16).ok().filter(|_| digits);
        hash.map(Self).ok_or_else(|| format!("`{text}` is not 16 hexadecimal digits"))
    }
}

impl<'de> Deserialize<'de> for Hash64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// A set of slots, as rising ranges that do not touch. Each range is its first and last slot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SlotSet {
    ranges: Vec<[u32; 2]>,
}

impl SlotSet {
    /// The set of these slots, in any order.
    #[must_use]
    pub fn new(slots: impl IntoIterator<Item = Slot>) -> Self {
        let mut slots: Vec<u32> = slots.into_iter().map(|slot| slot.0).collect();
        slots.sort_unstable();
        slots.dedup();
        let mut ranges: Vec<[u32; 2]> = Vec::new();
        for slot in slots {
            match ranges.last_mut() {
                Some([_, last]) if *last + 1 == slot => *last = slot,
                _ => ranges.push([slot, slot]),
            }
        }
        Self { ranges }
    }

    /// True if the set contains the slot.
    #[must_use]
    pub fn contains(&self, slot: Slot) -> bool {
        let next = self.ranges.partition_point(|&[_, last]| last < slot.0);
        self.ranges.get(next).is_some_and(|&[first, _]| first <= slot.0)
    }

    /// The number of slots.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.ranges.iter().map(|&[first, last]| u64::from(last) - u64::from(first) + 1).sum()
    }

    /// True if the set has no slots.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The slots, rising.
    pub fn iter(&self) -> impl Iterator<Item = Slot> {
        self.ranges.iter().flat_map(|&[first, last]| (first..=last).map(Slot))
    }

    fn is_valid(&self, slots: u32) -> bool {
        let in_order = self.ranges.iter().all(|&[first, last]| first <= last && last < slots);
        in_order && self.ranges.windows(2).all(|pair| u64::from(pair[0][1]) + 1 < u64::from(pair[1][0]))
    }
}

/// The content of a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", deny_unknown_fields)]
pub enum FileContent {
    /// Embedding rows with their optimizer state, by slot.
    Rows {
        /// The number of this rows file among all rows files.
        part: u32,
        /// The slots in the file.
        slots: SlotSet,
        /// Rows in the file.
        rows: u64,
        /// Keys in the file of rows that were removed since the base.
        removed: u64,
        /// XXH3-64 of the file's header and index.
        index: Hash64,
    },
    /// A part of the dense parameters with their optimizer state.
    Dense {
        /// The first parameter in the file.
        offset: u64,
        /// The number of parameters in the file.
        parameters: u64,
        /// The optimizer of the state.
        optimizer: String,
        /// Updates applied to the parameters. The powers of Adam's betas follow from it.
        update_count: u64,
    },
    /// The state of a role. Only that role understands it.
    State {
        /// The name of the state.
        name: String,
    },
}

/// A file of a checkpoint. The process that wrote it sends the entry to the coordinator, which puts
/// it into the manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the checkpoint's directory.
    pub name: String,
    /// In bytes.
    pub size: u64,
    /// XXH3-64 of the whole file.
    pub xxh3: Hash64,
    /// The content of the file.
    pub content: FileContent,
}

/// The manifest of a checkpoint; see the module documentation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u64,
    /// XXH3-64 of the manifest's bytes, with zeros instead of this checksum.
    checksum: Hash64,
    /// The checkpoint's id.
    pub id: CheckpointId,
    /// The global step at whose end the checkpoint is taken. Steps count from 0, so this is also
    /// the number of the next step to train.
    pub step: u64,
    /// Whether the checkpoint needs a base.
    pub kind: Kind,
    /// The base of a delta.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
    /// The time when it was finished, in RFC 3339.
    pub created_at: String,
    /// The program that wrote it.
    pub written_by: String,
    /// Virtual shards of the embedding table.
    pub slots: u32,
    /// Embedding rows in the rows files.
    pub rows: u64,
    /// Keys in the rows files of rows that were removed since the base.
    pub removed: u64,
    /// The settings that a job must share to use the checkpoint.
    pub identity: Identity,
    /// Information that is never compared: job name, training mode.
    pub info: BTreeMap<String, Value>,
    /// The files.
    pub files: Vec<FileEntry>,
}

/// The input of [`Manifest::new`]. `CheckpointWriter` fills it.
pub(crate) struct Draft {
    pub(crate) id: CheckpointId,
    pub(crate) step: u64,
    pub(crate) base: Option<Base>,
    pub(crate) written_by: String,
    pub(crate) slots: u32,
    pub(crate) identity: Identity,
    pub(crate) info: BTreeMap<String, Value>,
    pub(crate) files: Vec<FileEntry>,
}

impl Manifest {
    /// A manifest of these files. Fails if they are not complete and consistent.
    pub(crate) fn new(draft: Draft) -> Result<Self, String> {
        let sum = |of: fn(&FileContent) -> u64| draft.files.iter().map(|file| of(&file.content)).sum();
        let manifest = Self {
            format: FORMAT.to_owned(),
            version: FORMAT_VERSION,
            checksum: Hash64(0),
            id: draft.id,
            step: draft.step,
            kind: if draft.base.is_some() { Kind::Delta } else { Kind::Full },
            base: draft.base,
            created_at: jiff::Timestamp::now().to_string(),
            written_by: draft.written_by,
            slots: draft.slots,
            rows: sum(|content| if let FileContent::Rows { rows, .. } = content { *rows } else { 0 }),
            removed: sum(|content| if let FileContent::Rows { removed, .. } = content { *removed } else { 0 }),
            identity: draft.identity,
            info: draft.info,
            files: draft.files,
        };
        manifest.check()?;
        Ok(manifest)
    }

    /// The directory of the checkpoint.
    #[must_use]
    pub fn directory(&self) -> String {
        directory_name(self.step, self.kind)
    }

    /// XXH3-64 of the manifest, which holds the checksums of all files. Only a manifest that was
    /// read has it.
    #[must_use]
    pub fn digest(&self) -> Hash64 {
        self.checksum
    }

    /// Total bytes of all files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }

    /// The names of the states in the checkpoint.
    pub fn states(&self) -> impl Iterator<Item = &str> {
        self.files.iter().filter_map(|file| match &file.content {
            FileContent::State { name } => Some(name.as_str()),
            _ => None,
        })
    }

    /// The manifest's bytes. They end with a newline.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let unsealed = Self { checksum: Hash64(0), ..self.clone() };
        // Strings, numbers and maps with string keys always serialize.
        let mut bytes = serde_json::to_vec_pretty(&unsealed).unwrap_or_default();
        bytes.push(b'\n');
        let checksum = Hash64(xxh3_64(&bytes)).to_string();
        if let Some(start) = checksum_offset(&bytes) {
            bytes[start..start + 16].copy_from_slice(checksum.as_bytes());
        }
        bytes
    }

    /// Decodes a manifest. Messages call it `file`.
    ///
    /// # Errors
    /// [`CheckpointError::FutureVersion`] for a newer format. [`CheckpointError::Checksum`] and
    /// [`CheckpointError::Manifest`] for every other problem.
    pub fn decode(file: &str, bytes: &[u8]) -> Result<Self, CheckpointError> {
        let damaged = |problem: String| CheckpointError::Manifest { file: file.to_owned(), problem };
        /// The fields of every version.
        #[derive(Deserialize)]
        struct Any {
            format: String,
            version: u64,
        }
        let any: Any = serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
        if any.format != FORMAT {
            return Err(damaged(format!("its format is `{}` and should be `{FORMAT}`", any.format)));
        }
        if any.version > FORMAT_VERSION {
            return Err(CheckpointError::FutureVersion {
                file: file.to_owned(),
                found: any.version,
                supported: FORMAT_VERSION,
            });
        }
        // Check the checksum before parsing the rest: parsed, damaged JSON may take a hundred times
        // the memory of its bytes.
        let start = checksum_offset(bytes).ok_or_else(|| damaged("it has no checksum".into()))?;
        let mut unsealed = bytes.to_vec();
        let written = String::from_utf8_lossy(&bytes[start..start + 16]).parse::<Hash64>().map_err(damaged)?;
        unsealed[start..start + 16].fill(b'0');
        let found = xxh3_64(&unsealed);
        if found != written.0 {
            return Err(CheckpointError::Checksum { file: file.to_owned(), found, expected: written.0 });
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
        if manifest.checksum != written {
            return Err(damaged("it has two checksums".into()));
        }
        manifest.check().map_err(damaged)?;
        Ok(manifest)
    }

    /// Checks that the manifest is complete and consistent.
    fn check(&self) -> Result<(), String> {
        if self.version == 0 || self.slots == 0 || self.slots > MAX_SLOTS {
            return Err(format!("version {} with {} slots is invalid", self.version, self.slots));
        }
        if (self.kind == Kind::Delta) != self.base.is_some() {
            return Err("a delta must have a base, and a full checkpoint must not".into());
        }
        if self.base.as_ref().is_some_and(|base| base.id == self.id || !is_plain(&base.directory)) {
            return Err("its base must be another checkpoint in the same path".into());
        }
        self.check_names()?;
        self.check_slots()?;
        self.check_dense()
    }

    fn check_names(&self) -> Result<(), String> {
        let mut names = std::collections::BTreeSet::new();
        let mut states = std::collections::BTreeSet::new();
        for file in &self.files {
            if !is_plain(&file.name) || file.name == MANIFEST {
                return Err(format!("`{}` is not a valid name for a file of a checkpoint", file.name));
            }
            if !names.insert(&file.name) {
                return Err(format!("the file {} is listed twice", file.name));
            }
            if let FileContent::State { name } = &file.content
                && !states.insert(name)
            {
                return Err(format!("the state {name} is listed twice"));
            }
        }
        Ok(())
    }

    /// Checks that every slot is in exactly one rows file, or that there are no rows files.
    fn check_slots(&self) -> Result<(), String> {
        let mut held = vec![false; self.slots as usize];
        let (mut files, mut total, mut total_removed) = (0, 0_u64, 0_u64);
        for file in &self.files {
            let FileContent::Rows { slots, rows, removed, .. } = &file.content else { continue };
            if !slots.is_valid(self.slots) {
                return Err(format!("the slots of {} must rise and be below {}", file.name, self.slots));
            }
            for slot in slots.iter() {
                if std::mem::replace(&mut held[slot.0 as usize], true) {
                    return Err(format!("slot {slot} is listed twice"));
                }
            }
            files += 1;
            total = total.saturating_add(*rows);
            total_removed = total_removed.saturating_add(*removed);
        }
        if let Some(missing) = held.iter().position(|held| !held).filter(|_| files > 0) {
            return Err(format!("slot {missing} is missing"));
        }
        if (total, total_removed) != (self.rows, self.removed) {
            return Err(format!("its files hold {total} rows, and it states {}", self.rows));
        }
        Ok(())
    }

    /// Checks that the parts of the dense parameters are adjacent, starting at 0.
    fn check_dense(&self) -> Result<(), String> {
        let mut parts: Vec<(u64, u64)> = Vec::new();
        for file in &self.files {
            if let FileContent::Dense { offset, parameters, .. } = &file.content {
                parts.push((*offset, *parameters));
            }
        }
        parts.sort_unstable();
        let mut end = 0_u64;
        for (offset, parameters) in parts {
            if offset != end {
                return Err(format!("a part of the dense parameters begins at {offset} and should begin at {end}"));
            }
            end = end.checked_add(parameters).ok_or("it has more dense parameters than fit 64 bits")?;
        }
        Ok(())
    }
}

/// True for a plain file name: one path component that leads nowhere else.
fn is_plain(name: &str) -> bool {
    let known = |byte| matches!(byte, b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.');
    !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && name.bytes().all(known)
}

/// The offset of the checksum's 16 digits.
fn checksum_offset(bytes: &[u8]) -> Option<usize> {
    const BEFORE: &[u8] = b"\"checksum\": \"";
    let start = bytes.windows(BEFORE.len()).position(|window| window == BEFORE)? + BEFORE.len();
    (bytes.get(start + 16) == Some(&b'"')).then_some(start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rows(part: u32, slots: impl IntoIterator<Item = u32>) -> FileEntry {
        let slots = SlotSet::new(slots.into_iter().map(Slot));
        let content = FileContent::Rows { part, slots, rows: 5, removed: 0, index: Hash64(7) };
        FileEntry { name: format!("rows-{part:05}.bin"), size: 100, xxh3: Hash64(u64::MAX), content }
    }

    fn dense(offset: u64, parameters: u64) -> FileEntry {
        let content = FileContent::Dense { offset, parameters, optimizer: "adam".into(), update_count: 3 };
        FileEntry { name: format!("dense-{offset}"), size: 1, xxh3: Hash64(1), content }
    }

    fn state(name: &str) -> FileEntry {
        let content = FileContent::State { name: name.into() };
        FileEntry { name: format!("state-{name}.bin"), size: 1, xxh3: Hash64(1), content }
    }

    fn draft(files: Vec<FileEntry>) -> Draft {
        Draft {
            id: CheckpointId(1),
            step: 12,
            base: None,
            written_by: "test".into(),
            slots: 4,
            identity: Identity::new([("model".to_owned(), serde_json::json!({"kind": "lr"}))]),
            info: BTreeMap::new(),
            files,
        }
    }

    fn good() -> Manifest {
        Manifest::new(draft(vec![rows(0, [0, 1]), rows(1, [3, 2]), dense(3, 2), dense(0, 3), state("coordinator")]))
            .unwrap()
    }

    #[test]
    fn a_manifest_is_read_as_it_was_written() {
        let manifest = good();
        let decoded = Manifest::decode("m", &manifest.encode()).unwrap();
        assert_eq!(Manifest { checksum: Hash64(0), ..decoded.clone() }, manifest);
        assert_eq!(decoded.encode(), manifest.encode());
        assert_eq!((decoded.rows, decoded.directory()), (10, "step-000000000012".to_owned()));
        assert_eq!(decoded.states().collect::<Vec<_>>(), ["coordinator"]);
    }

    #[test]
    fn no_flipped_bit_and_no_cut_goes_unnoticed() {
        let bytes = good().encode();
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(Manifest::decode("m", &changed).is_err(), "bit {bit}");
        }
        for length in 0..bytes.len() {
            assert!(Manifest::decode("m", &bytes[..length]).is_err(), "length {length}");
        }
    }

    #[test]
    fn a_newer_format_is_distinguished_from_damage() {
        let newer = br#"{"format": "rectrain-checkpoint", "version": 2, "whatever": []}"#;
        let error = Manifest::decode("m", newer).unwrap_err();
        assert!(matches!(error, CheckpointError::FutureVersion { found: 2, supported: 1, .. }), "{error}");
        let other = br#"{"format": "something", "version": 1}"#;
        assert!(Manifest::decode("m", other).unwrap_err().to_string().contains("`something`"));
    }

    #[test]
    fn files_that_are_not_a_checkpoint_are_refused() {
        let refused = |files| Manifest::new(draft(files)).unwrap_err();
        assert!(refused(vec![rows(0, [0, 1, 3])]).contains("slot 2 is missing"));
        assert!(refused(vec![rows(0, [0, 1, 2]), rows(1, [2, 3])]).contains("slot 2 is listed twice"));
        assert!(refused(vec![rows(0, 0..5)]).contains("below 4"));
        assert!(refused(vec![dense(0, 3), dense(4, 1)]).contains("should begin at 3"));
        assert!(refused(vec![dense(1, 3)]).contains("should begin at 0"));
        assert!(refused(vec![state("a"), state("a")]).contains("twice"));
        let mut elsewhere = state("a");
        elsewhere.name = "../../etc/passwd".into();
        assert!(refused(vec![elsewhere]).contains("passwd"));
        assert!(Manifest::new(draft(Vec::new())).is_ok());
    }

    proptest! {
        #[test]
        fn a_slot_set_is_its_slots(slots in prop::collection::btree_set(0_u32..60, 0..60)) {
            let set = SlotSet::new(slots.iter().rev().copied().map(Slot));
            prop_assert!(set.is_valid(60));
            prop_assert_eq!(set.len(), slots.len() as u64);
            prop_assert!((0..60).all(|slot| set.contains(Slot(slot)) == slots.contains(&slot)));
            prop_assert!(set.iter().map(|slot| slot.0).eq(slots));
        }
    }
}
