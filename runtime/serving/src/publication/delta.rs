//! The bytes of a delta: the changes from one published model to the next. Pure: no files, no
//! clock. `docs/reference/delta-format.md` describes them for readers in other languages.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::hash::{hexadecimal, sha256};
use crate::table::{KeyRange, Table};

/// The first bytes of a delta.
const MAGIC: &[u8; 8] = b"RTDELTA1";
const FORMAT: &str = "rectrain-delta";
/// The newest version that this program reads, and the one it writes.
const VERSION: u64 = 1;
/// Bytes before the header: the magic, and the length of the header.
const PREFIX: usize = 12;
/// The arrays begin at a multiple of this many bytes.
const ALIGNMENT: usize = 8;
/// Bytes of the digest at the end.
const DIGEST: usize = 32;
/// The most bytes of a header.
const MAX_HEADER: usize = 1 << 20;

/// A published model that a delta builds on: its sequence number and its digest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Base {
    /// Its sequence number.
    pub sequence: u64,
    /// The digest of its delta, or the `digest` in the `model.json` of a full model.
    pub digest: String,
}

/// The changes of one row group. Rows are removed first, and then set.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupChanges {
    /// Ranges of keys without rows, rising and apart. An evicted row is a range of one key.
    pub removed: Vec<KeyRange>,
    /// The new values of rows. A row replaces the row of its key, or is new.
    pub rows: Table,
}

/// See the module documentation.
#[derive(Debug, Clone, PartialEq)]
pub struct Delta {
    /// Its sequence number: one above its base's.
    pub sequence: u64,
    /// Global steps that the model was trained.
    pub step: u64,
    /// The model that it changes.
    pub base: Base,
    /// The name of the checkpoint with the same model.
    pub checkpoint: String,
    /// The time of its publication, in milliseconds since 1970.
    pub published_at: u64,
    /// By row group.
    pub groups: Vec<GroupChanges>,
    /// All dense parameters, in the order of the layout.
    pub parameters: Vec<f32>,
}

/// The problem with bytes that are no delta, as the end of a sentence that begins with their file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeltaError {
    /// It begins otherwise.
    #[error("it does not begin as a delta")]
    NotADelta,
    /// It is cut short, or was changed.
    #[error("its SHA-256 is {found}, and its last 32 bytes say {expected}; it was cut short or changed")]
    Digest {
        /// The SHA-256 of its bytes but the last ones.
        found: String,
        /// Its last bytes.
        expected: String,
    },
    /// A newer program wrote it.
    #[error(
        "its format has version {found}, and this program reads versions up to {newest}; use a newer program",
        newest = VERSION
    )]
    FutureVersion {
        /// Its version.
        found: u64,
    },
    /// The header cannot be read.
    #[error("its header cannot be read: {0}")]
    Header(String),
    /// Its arrays have another length than the header gives.
    #[error("its arrays have {found} bytes, and its header describes {expected}")]
    Length {
        /// Bytes of the arrays.
        found: usize,
        /// Bytes that the header describes.
        expected: u128,
    },
    /// The keys of a row group contradict the format.
    #[error("row group {group}: {problem}")]
    Group {
        /// The row group.
        group: usize,
        /// The finding.
        problem: &'static str,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    sequence: u64,
    step: u64,
    base: Base,
    checkpoint: String,
    published_at: u64,
    groups: Vec<GroupHeader>,
    parameters: u64,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct GroupHeader {
    dim: u64,
    removed: u64,
    rows: u64,
}

impl GroupHeader {
    fn bytes(self) -> u128 {
        let [dim, removed, rows] = [self.dim, self.removed, self.rows].map(u128::from);
        (16 * removed + 8 * rows).saturating_add(rows.saturating_mul(4 * dim))
    }
}

impl Delta {
    /// The bytes of the delta, and its digest in hexadecimal digits.
    #[must_use]
    pub fn encode(&self) -> (Vec<u8>, String) {
        let header = self.header().to_string();
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&(header.len() as u32).to_le_bytes());
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        for group in &self.groups {
            for range in &group.removed {
                bytes.extend_from_slice(&range.first.to_le_bytes());
                bytes.extend_from_slice(&range.last.to_le_bytes());
            }
            group.rows.keys().iter().for_each(|key| bytes.extend_from_slice(&key.to_le_bytes()));
            group.rows.values().iter().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
        }
        self.parameters.iter().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
        let digest = Sha256::digest(&bytes);
        bytes.extend_from_slice(&digest);
        (bytes, hexadecimal(&digest))
    }

    fn header(&self) -> Value {
        let group = |group: &GroupChanges| GroupHeader {
            dim: group.rows.dim() as u64,
            removed: group.removed.len() as u64,
            rows: group.rows.keys().len() as u64,
        };
        let header = Header {
            sequence: self.sequence,
            step: self.step,
            base: self.base.clone(),
            checkpoint: self.checkpoint.clone(),
            published_at: self.published_at,
            groups: self.groups.iter().map(group).collect(),
            parameters: self.parameters.len() as u64,
        };
        let mut header = json!(header);
        header["format"] = json!(FORMAT);
        header["version"] = json!(VERSION);
        header
    }

    /// The delta in bytes, and its digest in hexadecimal digits. Takes memory in proportion to the
    /// bytes, whatever they are.
    ///
    /// # Errors
    /// [`DeltaError`].
    pub fn decode(bytes: &[u8]) -> Result<(Self, String), DeltaError> {
        if !bytes.starts_with(MAGIC) {
            return Err(DeltaError::NotADelta);
        }
        let (content, digest) = check_digest(bytes)?;
        let (header, arrays) = read_header(content)?;
        let expected = header.groups.iter().map(|group| group.bytes()).fold(0_u128, u128::saturating_add);
        let expected = expected.saturating_add(4 * u128::from(header.parameters));
        if expected != arrays.len() as u128 {
            return Err(DeltaError::Length { found: arrays.len(), expected });
        }
        // All lengths are within the bytes from here on.
        let mut rest = arrays;
        let groups = header.groups.iter().enumerate();
        let groups = groups.map(|(place, group)| read_group(place, *group, &mut rest)).collect::<Result<_, _>>()?;
        let delta = Self {
            sequence: header.sequence,
            step: header.step,
            base: header.base,
            checkpoint: header.checkpoint,
            published_at: header.published_at,
            groups,
            parameters: floats(rest),
        };
        Ok((delta, digest))
    }

    /// Rows that it sets, in all groups.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.groups.iter().map(|group| group.rows.keys().len() as u64).sum()
    }

    /// Ranges of keys that it removes, in all groups.
    #[must_use]
    pub fn removed(&self) -> u64 {
        self.groups.iter().map(|group| group.removed.len() as u64).sum()
    }

    /// Whether all of its values and parameters are finite.
    #[must_use]
    pub fn is_finite(&self) -> bool {
        let values = self.groups.iter().flat_map(|group| group.rows.values());
        values.chain(&self.parameters).all(|value| value.is_finite())
    }
}

/// The bytes before the digest, and the digest, once both agree.
fn check_digest(bytes: &[u8]) -> Result<(&[u8], String), DeltaError> {
    let split = bytes.len().checked_sub(DIGEST).and_then(|end| bytes.split_at_checked(end));
    let (content, digest) = split.ok_or(DeltaError::NotADelta)?;
    let (found, expected) = (sha256(content), hexadecimal(digest));
    if found == expected { Ok((content, expected)) } else { Err(DeltaError::Digest { found, expected }) }
}

/// The header, and the arrays behind it.
fn read_header(content: &[u8]) -> Result<(Header, &[u8]), DeltaError> {
    let outside = || DeltaError::Header("it ends outside of the file".to_owned());
    let length = content.get(MAGIC.len()..PREFIX).and_then(|word| word.first_chunk::<4>()).ok_or_else(outside)?;
    let length = u32::from_le_bytes(*length) as usize;
    if length > MAX_HEADER {
        return Err(DeltaError::Header(format!("it has {length} bytes, and a header has at most {MAX_HEADER}")));
    }
    let text = content.get(PREFIX..PREFIX + length).ok_or_else(outside)?;
    let arrays = content.get((PREFIX + length).next_multiple_of(ALIGNMENT)..).ok_or_else(outside)?;
    let unreadable = |error: serde_json::Error| DeltaError::Header(error.to_string());
    let header: Value = serde_json::from_slice(text).map_err(unreadable)?;
    if header["format"] != FORMAT {
        return Err(DeltaError::Header(format!("its format is {}", header["format"])));
    }
    match header["version"].as_u64() {
        None => Err(DeltaError::Header("it has no version".to_owned())),
        Some(found) if found > VERSION => Err(DeltaError::FutureVersion { found }),
        Some(_) => Ok((serde_json::from_value(header).map_err(unreadable)?, arrays)),
    }
}

/// Takes the arrays of a row group off the front of `rest`, which is long enough.
fn read_group(group: usize, header: GroupHeader, rest: &mut &[u8]) -> Result<GroupChanges, DeltaError> {
    let fault = |problem| Err(DeltaError::Group { group, problem });
    // A width without rows takes no bytes, so the check of the length does not bound it.
    let dim = match usize::try_from(header.dim) {
        Ok(dim @ 1..) if dim <= rectrain_embedding::MAX_DIM => dim,
        _ => return fault("its rows have no values, or more than a row can have"),
    };
    let [removed, rows] = [header.removed, header.rows].map(|count| count as usize);
    let removed: Vec<KeyRange> = take(rest, 16 * removed).as_chunks::<16>().0.iter().map(key_range).collect();
    let rises = removed.windows(2).all(|pair| pair[0].last < pair[1].first);
    if !rises || removed.iter().any(|range| range.first > range.last) {
        return fault("its removed ranges do not rise");
    }
    let keys = take(rest, 8 * rows).as_chunks::<8>().0.iter().map(|key| u64::from_le_bytes(*key)).collect();
    match Table::of(dim, keys, floats(take(rest, 4 * rows * dim))) {
        Some(rows) => Ok(GroupChanges { removed, rows }),
        None => fault("its keys do not rise"),
    }
}

fn key_range(bytes: &[u8; 16]) -> KeyRange {
    let both = u128::from_le_bytes(*bytes);
    KeyRange { first: both as u64, last: (both >> 64) as u64 }
}

/// Cuts `bytes` off the front.
fn take<'b>(rest: &mut &'b [u8], bytes: usize) -> &'b [u8] {
    let all: &'b [u8] = rest;
    let (own, others) = all.split_at_checked(bytes).unwrap_or((all, &[]));
    *rest = others;
    own
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn delta() -> Delta {
        let rows = Table::of(2, vec![5, 9], vec![0.5, -1.5, 2.0, f32::MIN_POSITIVE]).unwrap();
        let removed = vec![KeyRange { first: 1, last: 3 }, KeyRange { first: 9, last: 9 }];
        Delta {
            sequence: 13,
            step: 1300,
            base: Base { sequence: 12, digest: "ab".repeat(32) },
            checkpoint: "step-000000001300-delta".to_owned(),
            published_at: 1_790_000_000_123,
            groups: vec![GroupChanges { removed, rows }, GroupChanges { removed: Vec::new(), rows: Table::new(3) }],
            parameters: vec![1.0, 2.0, 3.0],
        }
    }

    /// These bytes with a header and arrays of the test's choice, and a digest that fits.
    fn forged(change: impl Fn(&mut Value), arrays: &[u8]) -> Vec<u8> {
        let mut header = delta().header();
        change(&mut header);
        let header = header.to_string();
        let mut bytes = [&MAGIC[..], &(header.len() as u32).to_le_bytes(), header.as_bytes()].concat();
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        bytes.extend_from_slice(arrays);
        signed(bytes)
    }

    fn signed(mut bytes: Vec<u8>) -> Vec<u8> {
        let digest = Sha256::digest(&bytes);
        bytes.extend_from_slice(&digest);
        bytes
    }

    fn arrays() -> Vec<u8> {
        let bytes = delta().encode().0;
        let length = 2 * 16 + 2 * (8 + 2 * 4) + 3 * 4;
        bytes[bytes.len() - DIGEST - length..bytes.len() - DIGEST].to_vec()
    }

    fn message(bytes: &[u8]) -> String {
        Delta::decode(bytes).unwrap_err().to_string()
    }

    #[test]
    fn a_delta_comes_back_with_its_digest() {
        let (bytes, digest) = delta().encode();
        assert_eq!(Delta::decode(&bytes), Ok((delta(), digest.clone())));
        assert_eq!(digest, sha256(&bytes[..bytes.len() - DIGEST]));
        assert_eq!((delta().rows(), delta().removed()), (2, 2));
        assert_eq!(forged(|_| (), &arrays()), bytes);
    }

    #[test]
    fn a_torn_or_changed_delta_is_refused() {
        let (bytes, _) = delta().encode();
        for length in 0..bytes.len() {
            assert!(Delta::decode(&bytes[..length]).is_err(), "{length} bytes");
        }
        let torn = message(&bytes[..bytes.len() - 1]);
        assert!(torn.starts_with("its SHA-256 is ") && torn.ends_with("it was cut short or changed"), "{torn}");
        for place in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[place] ^= 0x10;
            assert!(Delta::decode(&changed).is_err(), "byte {place}");
        }
        assert_eq!(message(b"RTSERVE1"), "it does not begin as a delta");
    }

    #[test]
    fn contents_that_contradict_each_other_are_refused() {
        /// The words of a refusal, and the change of the header that causes it.
        type Case = (&'static str, fn(&mut Value));
        let cases: [Case; 9] = [
            ("its format is \"other\"", |header| header["format"] = json!("other")),
            ("its format has version 2, and this program reads versions up to 1", |header| {
                header["version"] = json!(2)
            }),
            ("it has no version", |header| header["version"] = json!("1")),
            ("missing field `step`", |header| drop(header.as_object_mut().unwrap().remove("step"))),
            ("unknown field `other`", |header| header["base"]["other"] = json!(1)),
            ("its arrays have 76 bytes, and its header describes 80", |header| header["parameters"] = json!(4)),
            ("its header describes", |header| header["groups"][0]["rows"] = json!(u64::MAX)),
            ("its header describes", |header| header["groups"][0]["dim"] = json!(u64::MAX)),
            ("row group 1: its rows have no values, or more", |header| header["groups"][1]["dim"] = json!(u64::MAX)),
        ];
        for (expected, change) in cases {
            let message = message(&forged(change, &arrays()));
            assert!(message.contains(expected), "{expected}: {message}");
        }
        let mut swapped = arrays();
        swapped[..32].rotate_left(16);
        assert_eq!(message(&forged(|_| (), &swapped)), "row group 0: its removed ranges do not rise");
        let mut swapped = arrays();
        swapped[..16].rotate_left(8);
        assert_eq!(message(&forged(|_| (), &swapped)), "row group 0: its removed ranges do not rise");
        let mut swapped = arrays();
        swapped[32..48].rotate_left(8);
        assert_eq!(message(&forged(|_| (), &swapped)), "row group 0: its keys do not rise");
        let long = signed([&MAGIC[..], &[255; 4], &[b' '; 20]].concat());
        assert!(message(&long).contains("a header has at most 1048576"), "{}", message(&long));
        let short = signed([&MAGIC[..], &[200, 0, 0, 0], b"{}"].concat());
        assert!(message(&short).contains("it ends outside of the file"), "{}", message(&short));
    }

    /// The bytes of a delta before its digest.
    fn content() -> Vec<u8> {
        let bytes = delta().encode().0;
        bytes[..bytes.len() - DIGEST].to_vec()
    }

    /// Reads the bytes. Checks that a delta that is read, and written again, is read alike.
    fn assert_read_alike(bytes: &[u8]) -> Result<(), DeltaError> {
        let (found, _) = Delta::decode(bytes)?;
        if found.is_finite() {
            let (again, digest) = found.encode();
            assert_eq!(Delta::decode(&again), Ok((found, digest)));
        }
        Ok(())
    }

    /// The digest fits, so that every check behind it decides about some of the bytes.
    #[test]
    fn a_changed_byte_with_a_digest_that_fits_is_refused_or_read() {
        let mut outcomes = Vec::new();
        for place in MAGIC.len()..content().len() {
            for bit in [1, 2, 0x80] {
                let mut changed = content();
                changed[place] ^= bit;
                outcomes.push(assert_read_alike(&signed(changed)));
            }
        }
        let count = |is: fn(&DeltaError) -> bool| outcomes.iter().filter(|found| found.as_ref().is_err_and(is)).count();
        assert_eq!(count(|error| matches!(error, DeltaError::NotADelta | DeltaError::Digest { .. })), 0);
        assert_eq!(count(|error| matches!(error, DeltaError::FutureVersion { .. })), 1);
        assert!(count(|error| matches!(error, DeltaError::Header(_))) > 100);
        assert!(count(|error| matches!(error, DeltaError::Length { .. })) > 5);
        assert!(count(|error| matches!(error, DeltaError::Group { .. })) > 2);
        // Three bits in each byte of the four values and the three parameters.
        let read = outcomes.iter().filter(|found| found.is_ok()).count();
        assert!(read >= 3 * 4 * 7, "{read} of {}", outcomes.len());
    }

    #[test]
    fn a_value_that_is_not_finite_is_noticed() {
        assert!(delta().is_finite());
        assert!(!Delta { parameters: vec![f32::NAN], ..delta() }.is_finite());
        let mut other = delta();
        other.groups[1].rows = Table::of(3, vec![1], vec![0.0, f32::INFINITY, 0.0]).unwrap();
        assert!(!other.is_finite());
    }

    /// Ranges and rows from any numbers: sorted, and without doubles.
    fn group(dim: usize, mut bounds: Vec<u64>, mut keys: Vec<u64>) -> GroupChanges {
        bounds.sort_unstable();
        bounds.dedup();
        keys.sort_unstable();
        keys.dedup();
        let removed = bounds.chunks_exact(2).map(|pair| KeyRange { first: pair[0], last: pair[1] }).collect();
        let values = (0..keys.len() * dim).map(|place| place as f32 - 0.5).collect();
        GroupChanges { removed, rows: Table::of(dim, keys, values).unwrap() }
    }

    proptest! {
        #[test]
        fn any_delta_comes_back(
            numbers: (u64, u64, u64),
            checkpoint: String,
            groups in proptest::collection::vec(
                (1_usize..5, proptest::collection::vec(any::<u64>(), 0..9), proptest::collection::vec(any::<u64>(), 0..9)),
                0..4,
            ),
            parameters in proptest::collection::vec(-1e30_f32..1e30, 0..9),
        ) {
            let (sequence, step, published_at) = numbers;
            let groups = groups.into_iter().map(|(dim, bounds, keys)| group(dim, bounds, keys)).collect();
            let delta = Delta { sequence, step, published_at, checkpoint, groups, parameters, ..delta() };
            let (bytes, digest) = delta.encode();
            prop_assert_eq!(Delta::decode(&bytes), Ok((delta, digest)));
        }

        #[test]
        fn any_changes_with_a_digest_that_fits_are_refused_or_read(
            changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..5),
            cut in 0_usize..9,
        ) {
            let mut changed = content();
            for (place, value) in changes {
                let place = place.index(changed.len());
                changed[place] = value;
            }
            changed.truncate(changed.len() - cut);
            let is_marked = changed.starts_with(MAGIC);
            let read = assert_read_alike(&signed(changed));
            prop_assert_eq!(read == Err(DeltaError::NotADelta), !is_marked);
        }
    }
}
