//! The identity of a source: the list of its parts. Loaders compare it, so that all of them read
//! the same rows.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::SystemTime;

/// The parts of a source, in reading order. Empty for a source that is computed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// The parts. The position of a part in this list is its [`PartId`](rectrain_kinds::PartId).
    pub parts: Vec<PartIdentity>,
}

/// A part of a source: a file, or a partition of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartIdentity {
    /// The path or URL of a file, the name of a partition.
    pub name: String,
    /// Bytes of the file; `None` for a part that grows.
    pub size: Option<u64>,
    /// The version of the content, if the storage keeps one.
    pub version: Option<Version>,
}

/// The version of a file's content, in the most exact form that its storage keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Version {
    /// The generation or version ID of an object.
    Generation(String),
    /// The entity tag of an object.
    ETag(String),
    /// The time of the last modification.
    Modified(SystemTime),
}

impl Identity {
    /// A number that differs if a part has another name, size or place in the list. The versions do
    /// not count. Equal digests need programs of the same build.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for part in &self.parts {
            part.name.hash(&mut hasher);
            if let Some(size) = part.size {
                size.hash(&mut hasher);
            }
        }
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(files: &[(&str, u64)]) -> Identity {
        let part =
            |&(name, size): &(&str, u64)| PartIdentity { name: name.to_owned(), size: Some(size), version: None };
        Identity { parts: files.iter().map(part).collect() }
    }

    #[test]
    fn the_digest_covers_names_sizes_and_order() {
        let digest = |list| files(list).digest();
        let both = digest(&[("a", 1), ("b", 2)]);
        for other in [&[("b", 2), ("a", 1)][..], &[("a", 1)], &[("a", 1), ("b", 3)], &[("a", 1), ("c", 2)]] {
            assert_ne!(both, digest(other), "{other:?}");
        }
        let mut versioned = files(&[("a", 1), ("b", 2)]);
        versioned.parts[0].version = Some(Version::ETag("1".into()));
        assert_eq!(both, versioned.digest());
    }

    /// Loaders of one build compare digests: this is the hash of the (name, size) pairs.
    #[test]
    fn the_digest_is_the_hash_of_names_and_sizes() {
        let mut hasher = DefaultHasher::new();
        for file in [("s3://b/a.csv".to_owned(), 7_u64), ("b".to_owned(), 0)] {
            (&file.0, file.1).hash(&mut hasher);
        }
        assert_eq!(files(&[("s3://b/a.csv", 7), ("b", 0)]).digest(), hasher.finish());
    }
}
