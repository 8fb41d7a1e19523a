//! The training files of a job, as a list in the coordinator's state and in every checkpoint.
//! Positions in the data count rows through all files. So a run that resumes within an epoch must
//! find the files of its checkpoint.
//!
//! Two files are equal if they have one size and one content. The version in the store, or the
//! digest of a local file, stands for the content. Names do not count, so a folder may move. The
//! time of modification counts only for a file without a digest.

use std::collections::HashSet;

use rectrain_checkpoint::Hash64;
use rectrain_data::Fingerprints;
use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

/// The training files in reading order.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FileList {
    /// The number of files.
    count: u64,
    bytes: u64,
    /// A digest of their names, sizes and versions in the store, but for times of modification.
    digest: Hash64,
    /// Empty for more files than a loader lists, so that the journal and checkpoints stay small.
    #[serde(default)]
    list: Vec<File>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    name: String,
    size: u64,
    /// A generation, an entity tag or a time of modification; see `rectrain_data::Fingerprint`.
    version: Option<String>,
    /// The digest of a local file's content.
    content: Option<Hash64>,
}

impl FileList {
    /// The list that a loader reports; `None` if it reports none, because the job saves no
    /// checkpoints.
    pub(super) fn read(found: &v1::FilesFound) -> Option<Self> {
        let summary = found.summary?;
        let file = |file: &v1::DataFile| File {
            name: file.name.clone(),
            size: file.size,
            version: file.version.clone(),
            content: file.content.map(Hash64),
        };
        let list = if found.list.len() > Fingerprints::MOST_LISTED { &[] } else { &found.list[..] };
        Some(Self {
            count: found.files,
            bytes: summary.bytes,
            digest: Hash64(summary.digest),
            list: list.iter().map(file).collect(),
        })
    }

    /// The first difference between these files and the ones found later, as a sentence without
    /// its end.
    pub(super) fn difference(&self, found: &Self) -> Option<String> {
        let is_listed = |list: &Self| list.list.len() as u64 == list.count;
        if is_listed(self) && is_listed(found) {
            return self.first_difference(found);
        }
        let key = |files: &Self| (files.count, files.bytes, files.digest);
        if key(self) == key(found) {
            return None;
        }
        Some(format!(
            "there were {} training files of {} bytes, and now there are {} of {} bytes (or files with other names or versions)",
            self.count, self.bytes, found.count, found.bytes
        ))
    }

    fn first_difference(&self, found: &Self) -> Option<String> {
        let (saved, found) = (&self.list, &found.list);
        let is_equal = |(saved, found): (&File, &File)| saved.equals(found);
        let at = saved.iter().zip(found).position(|files| !is_equal(files));
        match at.unwrap_or(saved.len().min(found.len())) {
            at if at == saved.len() && at == found.len() => None,
            at => Some(describe(saved, found, at)),
        }
    }
}

impl File {
    fn equals(&self, found: &Self) -> bool {
        self.size == found.size && self.has_content_of(found)
    }

    fn has_content_of(&self, found: &Self) -> bool {
        match (self.content, found.content) {
            (Some(saved), Some(found)) => saved == found,
            _ => self.version == found.version && (self.version.is_some() || self.name == found.name),
        }
    }
}

/// Describes the first position at which two lists differ.
fn describe(saved: &[File], found: &[File], at: usize) -> String {
    let names = |files: &[File]| files.iter().map(|file| file.name.clone()).collect::<HashSet<_>>();
    let (saved_names, found_names) = (names(saved), names(found));
    match (saved.get(at), found.get(at)) {
        (Some(saved), Some(found)) if saved.name == found.name => resized(saved, found),
        (Some(saved), _) if !found_names.contains(&saved.name) => format!("{} was removed or renamed", saved.name),
        (_, Some(found)) if !saved_names.contains(&found.name) => format!("{} was added", found.name),
        (Some(saved), Some(found)) => format!("{} now comes before {}, so the order changed", found.name, saved.name),
        // One list continues where the other ends, and both have the same names: a name
        // occurs twice.
        (saved, found) => {
            saved.or(found).map_or_else(String::new, |file| format!("{} is not there as often", file.name))
        }
    }
}

fn resized(saved: &File, found: &File) -> String {
    let (name, before, now) = (&saved.name, saved.size, found.size);
    if now > before {
        format!("{name} grew from {before} to {now} bytes")
    } else if now < before {
        format!("{name} shrank from {before} to {now} bytes")
    } else {
        format!("{name} was replaced: its {now} bytes have other content")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(files: &[(&str, u64, u64)]) -> FileList {
        let file = |&(name, size, content): &(&str, u64, u64)| v1::DataFile {
            name: name.to_owned(),
            size,
            version: Some(format!("modified:{}", content * 7)),
            content: Some(content),
        };
        read(files.iter().map(file).collect())
    }

    fn read(list: Vec<v1::DataFile>) -> FileList {
        let bytes = list.iter().map(|file| file.size).sum();
        let summary = Some(v1::FilesSummary { bytes, digest: list.len() as u64 });
        FileList::read(&v1::FilesFound { files: list.len() as u64, list, summary, ..v1::FilesFound::default() })
            .unwrap()
    }

    const THREE: [(&str, u64, u64); 3] = [("a.csv", 10, 1), ("b.csv", 20, 2), ("c.csv", 30, 3)];

    #[test]
    fn the_first_file_that_differs_is_named_with_the_difference() {
        let saved = list(&THREE);
        let [a, b, c] = THREE;
        for (found, expected) in [
            (vec![("0.csv", 5, 9), a, b, c], "0.csv was added"),
            (vec![a, b, c, ("d.csv", 5, 9)], "d.csv was added"),
            (vec![a, c], "b.csv was removed or renamed"),
            (vec![a, b], "c.csv was removed or renamed"),
            (vec![a, ("b.csv", 20, 9), c], "b.csv was replaced: its 20 bytes have other content"),
            (vec![a, b, ("c.csv", 31, 9)], "c.csv grew from 30 to 31 bytes"),
            (vec![("a.csv", 1, 9), b, c], "a.csv shrank from 10 to 1 bytes"),
            (vec![b, a, c], "b.csv now comes before a.csv, so the order changed"),
            (vec![b, c, ("z.csv", 10, 1)], "a.csv was removed or renamed"),
            (vec![], "a.csv was removed or renamed"),
        ] {
            assert_eq!(saved.difference(&list(&found)).as_deref(), Some(expected));
        }
    }

    #[test]
    fn a_touched_or_moved_file_is_the_same() {
        let saved = list(&THREE);
        assert_eq!(saved.difference(&saved), None);
        let mut touched = saved.clone();
        touched.list[1].version = Some("modified:1".to_owned());
        assert_eq!(saved.difference(&touched), None);
        let mut moved = saved.clone();
        moved.list.iter_mut().for_each(|file| file.name = format!("elsewhere/{}", file.name));
        assert_eq!(saved.difference(&moved), None);
    }

    #[test]
    fn objects_are_compared_by_their_version() {
        let object = |version: &str| v1::DataFile {
            name: "s3://b/a.csv".to_owned(),
            size: 5,
            version: Some(version.to_owned()),
            content: None,
        };
        let saved = read(vec![object("etag:1")]);
        assert_eq!(saved.difference(&read(vec![object("etag:1")])), None);
        let found = saved.difference(&read(vec![object("etag:2")])).unwrap();
        assert_eq!(found, "s3://b/a.csv was replaced: its 5 bytes have other content");
        let local = list(&[("s3://b/a.csv", 5, 1)]);
        assert!(saved.difference(&local).is_some(), "a file of another store has no version to compare");
    }

    #[test]
    fn a_long_list_is_compared_by_its_digest() {
        let many = |count: u64, digest: u64| {
            let list: Vec<v1::DataFile> = (0..count).map(|_| v1::DataFile::default()).collect();
            let summary = Some(v1::FilesSummary { bytes: 7, digest });
            FileList::read(&v1::FilesFound { files: count, list, summary, ..v1::FilesFound::default() }).unwrap()
        };
        let most = Fingerprints::MOST_LISTED as u64;
        assert_eq!(many(most, 1).list.len() as u64, most);
        let saved = many(most + 1, 1);
        assert!(saved.list.is_empty());
        assert_eq!(saved.difference(&many(most + 1, 1)), None);
        assert!(saved.difference(&many(most + 1, 2)).is_some());
        let found = saved.difference(&many(3, 1)).unwrap();
        assert!(found.starts_with("there were 1001 training files"), "{found}");
    }

    #[test]
    fn a_list_survives_its_json() {
        let saved = list(&THREE);
        let json = serde_json::to_string(&saved).unwrap();
        assert_eq!(serde_json::from_str::<FileList>(&json).unwrap(), saved);
    }
}
