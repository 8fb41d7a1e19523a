//! Names of checkpoints, of their directories and files, and the ticket of a checkpoint being
//! written.

use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::str::FromStr;

use rectrain_embedding::SaveId;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use xxhash_rust::xxh3::xxh3_128;

/// Distinguishes a checkpoint from every other, including other attempts at the same step. In text,
/// 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckpointId(pub u128);

impl CheckpointId {
    /// A new id, from the clock, the process id and the system's randomness.
    #[must_use]
    pub fn random() -> Self {
        let mut seed = Vec::new();
        for _ in 0..4 {
            // Each `RandomState` has new random keys.
            let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
            hasher.write_u32(std::process::id());
            seed.extend_from_slice(&hasher.finish().to_le_bytes());
        }
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        seed.extend_from_slice(&now.unwrap_or_default().as_nanos().to_le_bytes());
        Self(xxh3_128(&seed))
    }

    /// The same id for the embedding store.
    #[must_use]
    pub fn save_id(self) -> SaveId {
        SaveId(self.0)
    }

    /// Distinguishes the files of this attempt.
    pub(crate) fn short(self) -> String {
        self.to_string()[..8].to_owned()
    }
}

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for CheckpointId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let id = u128::from_str_radix(text, 16).ok().filter(|_| digits);
        id.map(Self).ok_or_else(|| format!("`{text}` is not 32 hexadecimal digits"))
    }
}

impl Serialize for CheckpointId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CheckpointId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Whether a checkpoint needs a base.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Kind {
    /// The changes since another checkpoint.
    Delta,
    /// Everything. It sorts after `Delta`: of two checkpoints of one step the full one is better.
    Full,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Delta => "delta",
            Self::Full => "full",
        })
    }
}

/// The checkpoint that a delta starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Base {
    /// Its directory, beside the delta's.
    pub directory: String,
    /// The id of the checkpoint expected there.
    pub id: CheckpointId,
}

/// Everything a process needs to write its part of a checkpoint. The coordinator makes it and sends
/// it to the processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Ticket {
    /// The checkpoint's directory in the job's checkpoint path.
    pub directory: String,
    /// The checkpoint.
    pub id: CheckpointId,
    /// The global step at whose end the checkpoint is taken.
    pub step: u64,
    /// The base of a delta; `None` for a full checkpoint.
    pub base: Option<Base>,
}

impl Ticket {
    /// Whether the checkpoint needs a base.
    #[must_use]
    pub fn kind(&self) -> Kind {
        if self.base.is_some() { Kind::Delta } else { Kind::Full }
    }

    pub(crate) fn file(&self, name: &str) -> String {
        format!("{}/{name}", self.directory)
    }
}

/// The directory of a checkpoint. Sorted names are sorted steps.
#[must_use]
pub fn directory_name(step: u64, kind: Kind) -> String {
    match kind {
        Kind::Full => format!("step-{step:012}"),
        Kind::Delta => format!("step-{step:012}-delta"),
    }
}

/// Step and kind of a directory's name; `None` if the directory is not a checkpoint's.
#[must_use]
pub fn parse_directory_name(name: &str) -> Option<(u64, Kind)> {
    let rest = name.strip_prefix("step-")?;
    let (digits, kind) = match rest.strip_suffix("-delta") {
        Some(digits) => (digits, Kind::Delta),
        None => (rest, Kind::Full),
    };
    let step = digits.parse().ok()?;
    // Accepts exactly the names that `directory_name` writes.
    (directory_name(step, kind) == name).then_some((step, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_the_written_names_are_read() {
        for (step, kind) in [(0, Kind::Full), (1_234, Kind::Delta), (u64::MAX, Kind::Full)] {
            assert_eq!(parse_directory_name(&directory_name(step, kind)), Some((step, kind)));
        }
        for other in ["step-1", "step-+00000000001", "step-000000000001-Delta", "step-", "x", "step-00000000000a"] {
            assert_eq!(parse_directory_name(other), None, "{other}");
        }
        assert!(directory_name(9, Kind::Full) < directory_name(10, Kind::Full));
    }

    #[test]
    fn ids_differ_and_survive_text() {
        let (one, other) = (CheckpointId::random(), CheckpointId::random());
        assert_ne!(one, other);
        assert_eq!(one.to_string().parse(), Ok(one));
        assert!("123".parse::<CheckpointId>().is_err());
        assert!("+0000000000000000000000000000000".parse::<CheckpointId>().is_err());
    }
}
