//! Files on disks and in object stores: from paths, globs and URLs to a sorted list of
//! [`SourceFile`]s, and from a file to its bytes. Knows nothing of rows. A data set calls it when
//! it opens, and readers call it on their threads.

use crate::blocking::{Pending, Stop, spawn};
use crate::config::SourceConfig;
use crate::error::DataError;
use crate::identity::{Identity, PartIdentity, Version};
use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path as ObjectPath;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore};
use rectrain_storage::Place;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One file.
#[derive(Debug, Clone)]
pub(crate) struct SourceFile {
    /// The path or URL, as messages show it.
    pub(crate) name: String,
    /// In bytes.
    pub(crate) size: u64,
    pub(crate) version: Option<Version>,
    pub(crate) place: FilePlace,
}

#[derive(Debug, Clone)]
pub(crate) enum FilePlace {
    Local(PathBuf),
    Object(Object),
}

/// An object in a store. If the store gives an entity tag, reading fails once the object was
/// replaced, instead of mixing two versions.
#[derive(Debug, Clone)]
pub(crate) struct Object {
    store: Arc<dyn ObjectStore>,
    path: ObjectPath,
    e_tag: Option<String>,
}

impl Object {
    fn options(&self, range: Range<u64>) -> GetOptions {
        GetOptions { range: Some(GetRange::Bounded(range)), if_match: self.e_tag.clone(), ..GetOptions::default() }
    }

    /// Starts to fetch a range of bytes.
    pub(crate) fn fetch(&self, range: Range<u64>) -> io::Result<Pending<io::Result<Bytes>>> {
        let object = self.clone();
        spawn(async move {
            let options = object.options(range.clone());
            let bytes = object.store.get_opts(&object.path, options).await?;
            let bytes = bytes.bytes().await?;
            if bytes.len() as u64 != range.end - range.start {
                let expected = range.end - range.start;
                let problem = format!("the store sent {} bytes, expected {expected}", bytes.len());
                return Err(io::Error::other(problem));
            }
            Ok(bytes)
        })
    }
}

impl SourceFile {
    /// The bytes of the file from its beginning.
    pub(crate) fn open(&self, stop: &Stop) -> io::Result<Box<dyn Read + Send>> {
        Ok(match &self.place {
            // Bytes that a writer appends later belong to another run.
            FilePlace::Local(path) => Box::new(File::open(path)?.take(self.size)),
            FilePlace::Object(object) => Box::new(ObjectReader {
                object: object.clone(),
                size: self.size,
                next: 0,
                pending: VecDeque::new(),
                current: Bytes::new(),
                stop: stop.clone(),
            }),
        })
    }

    /// The version as a listing gives it: the entity tag of an object, if there is one. Some stores
    /// name generations only for an object that is asked for alone.
    pub(crate) fn listed_version(&self) -> Option<Version> {
        match &self.place {
            FilePlace::Object(Object { e_tag: Some(tag), .. }) => Some(Version::ETag(tag.clone())),
            _ => self.version.clone(),
        }
    }

    /// The same for all names of one file: its path with links followed, or its URL in one
    /// spelling.
    pub(crate) fn canonical_name(&self) -> Result<OsString, DataError> {
        match &self.place {
            FilePlace::Local(path) => match std::fs::canonicalize(path) {
                Ok(path) => Ok(path.into_os_string()),
                Err(source) => Err(DataError::Io { action: "look at", file: self.name.clone(), source }),
            },
            FilePlace::Object(_) => Ok(one_spelling(&self.name).into()),
        }
    }

    /// The error for a read that failed with `source`.
    pub(crate) fn read_error(&self, source: io::Error) -> DataError {
        match source.downcast::<object_store::Error>() {
            Ok(error) => store_error("read", &self.name, error),
            Err(source) => DataError::Io { action: "read", file: self.name.clone(), source },
        }
    }
}

/// Reads an object front to back in ranges, and fetches a few of them ahead.
struct ObjectReader {
    object: Object,
    size: u64,
    next: u64,
    /// At most `DEPTH` ranges of at most `RANGE` bytes.
    pending: VecDeque<Pending<io::Result<Bytes>>>,
    current: Bytes,
    stop: Stop,
}

impl ObjectReader {
    const RANGE: u64 = 4 << 20;
    /// The first range is small, because some callers only read the header.
    const FIRST_RANGE: u64 = 128 << 10;
    const DEPTH: usize = 3;

    fn ask(&mut self) -> io::Result<()> {
        let (depth, length) = match self.next {
            0 => (1, Self::FIRST_RANGE),
            _ => (Self::DEPTH, Self::RANGE),
        };
        while self.pending.len() < depth && self.next < self.size {
            let end = (self.next + length).min(self.size);
            self.pending.push_back(self.object.fetch(self.next..end)?);
            self.next = end;
        }
        Ok(())
    }
}

impl Read for ObjectReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.current.is_empty() {
            if self.pending.is_empty() {
                self.ask()?;
            }
            let Some(range) = self.pending.pop_front() else {
                return Ok(0);
            };
            self.current = range.wait(&self.stop)??;
            self.ask()?;
        }
        let length = into.len().min(self.current.len());
        into[..length].copy_from_slice(&self.current.split_to(length));
        Ok(length)
    }
}

fn store_error(action: &'static str, url: &str, source: object_store::Error) -> DataError {
    match source {
        object_store::Error::NotFound { .. } => DataError::NotFound { path: url.to_owned() },
        source => DataError::ObjectStore { action, url: url.to_owned(), source },
    }
}

/// All files of a source, in reading order. Each exists, and at least one has a byte.
pub(crate) fn resolve(config: &SourceConfig) -> Result<Vec<SourceFile>, DataError> {
    if config.paths.is_empty() {
        return Err(DataError::config("paths", "a source needs at least one path"));
    }
    let found = config.paths.iter().map(|path| resolve_one(path, &config.storage_options));
    in_order(&config.paths, found.collect::<Result<_, _>>()?)
}

/// All objects of `store` that `paths` (keys or globs of keys) name, in reading order.
pub(crate) fn resolve_in(store: &Arc<dyn ObjectStore>, paths: &[String]) -> Result<Vec<SourceFile>, DataError> {
    let found = paths.iter().map(|path| objects(store, "", path));
    in_order(paths, found.collect::<Result<_, _>>()?)
}

/// The identity of a list of files.
pub(crate) fn identity_of(files: &[&SourceFile]) -> Identity {
    let part = |file: &&SourceFile| PartIdentity {
        name: file.name.clone(),
        size: Some(file.size),
        version: file.version.clone(),
    };
    Identity { parts: files.iter().map(part).collect() }
}

/// The files of each path, one path after the other.
fn in_order(paths: &[String], found: Vec<Vec<SourceFile>>) -> Result<Vec<SourceFile>, DataError> {
    refuse_repeated(paths, &found)?;
    refuse_empty(found.into_iter().flatten().collect())
}

/// Refuses a file that is found twice: its rows would count twice.
fn refuse_repeated(paths: &[String], found: &[Vec<SourceFile>]) -> Result<(), DataError> {
    let mut found_by: HashMap<OsString, &str> = HashMap::new();
    for (path, files) in paths.iter().zip(found) {
        for file in files {
            if let Some(first) = found_by.insert(file.canonical_name()?, path) {
                let name = &file.name;
                let problem = format!(
                    "{name} is found twice, by `{first}` and by `{path}`: its rows would be read twice; name it once"
                );
                return Err(DataError::config("paths", problem));
            }
        }
    }
    Ok(())
}

/// Refuses a test file that is also a training file.
pub(crate) fn refuse_common(train: &[&SourceFile], test: &[&SourceFile]) -> Result<(), DataError> {
    let trained = train.iter().map(|file| file.canonical_name()).collect::<Result<HashSet<OsString>, _>>()?;
    for file in test {
        if trained.contains(&file.canonical_name()?) {
            let problem = format!(
                "{} is found by the training paths too, so the model would be tested on rows that it has seen; \
                 narrow the training paths, or divide one source by a split",
                file.name
            );
            return Err(DataError::config("test paths", problem));
        }
    }
    Ok(())
}

/// A URL with its scheme in lower case, and with `s3` instead of the other name `s3a`.
pub(crate) fn one_spelling(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let scheme = scheme.to_ascii_lowercase();
    let scheme = if scheme == "s3a" { "s3" } else { scheme.as_str() };
    format!("{scheme}://{rest}")
}

fn refuse_empty(files: Vec<SourceFile>) -> Result<Vec<SourceFile>, DataError> {
    match files.first().filter(|_| files.iter().all(|file| file.size == 0)) {
        Some(first) => Err(DataError::Empty { file: first.name.clone() }),
        None => Ok(files),
    }
}

fn resolve_one(path: &str, options: &BTreeMap<String, String>) -> Result<Vec<SourceFile>, DataError> {
    match rectrain_storage::place_of(path)? {
        Place::Local(path) => local_files(&path),
        Place::Bucket(bucket) => objects(&bucket.store(options)?, &format!("{}/", bucket.root), &bucket.key),
    }
}

pub(crate) fn bad_path(path: &str, problem: impl Into<String>) -> DataError {
    DataError::BadPath { path: path.to_owned(), problem: problem.into() }
}

pub(crate) fn is_glob(path: &str) -> bool {
    path.contains(['*', '?', '['])
}

/// Whether a pattern means a path that it matches. It does not mean hidden files, nor files in
/// folders with names that begin with `_`: writers keep unfinished files and other things there. A
/// pattern that names such a file or folder means it.
pub(crate) fn is_meant(pattern: &str, path: &str) -> bool {
    let mut names: Vec<&str> = path.split('/').collect();
    let file = names.pop().unwrap_or_default();
    let named = |name: &&str| pattern.split('/').any(|part| part == *name);
    let names_such = |start: char| pattern.split('/').any(|part| part.starts_with(start) && is_glob(part));
    let is_left_out = |name: &str, start: char| name.starts_with(start) && !names_such(start) && !named(&name);
    let is_folder_left_out = |name: &&str| {
        let is_relative = matches!(*name, "." | "..");
        !is_relative && (is_left_out(name, '.') || is_left_out(name, '_'))
    };
    !is_left_out(file, '.') && !names.iter().any(is_folder_left_out)
}

fn local_files(path: &str) -> Result<Vec<SourceFile>, DataError> {
    if !is_glob(path) || Path::new(path).exists() {
        return Ok(vec![local_file(PathBuf::from(path))?]);
    }
    let matches = glob::glob(path).map_err(|error| bad_path(path, error.to_string()))?;
    let mut found = Vec::new();
    for entry in matches {
        let entry =
            entry.map_err(|error| DataError::Io { action: "list", file: path.to_owned(), source: error.into() })?;
        if !entry.is_dir() && is_meant(path, &entry.to_string_lossy()) {
            found.push(entry);
        }
    }
    found.sort();
    if found.is_empty() {
        return Err(DataError::NoMatch { pattern: path.to_owned() });
    }
    found.into_iter().map(local_file).collect()
}

fn local_file(path: PathBuf) -> Result<SourceFile, DataError> {
    let name = path.display().to_string();
    let metadata = match std::fs::metadata(&path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(DataError::NotFound { path: name });
        }
        Err(source) => {
            return Err(DataError::Io { action: "look at", file: name, source });
        }
    };
    if metadata.is_dir() {
        return Err(DataError::Folder { path: name.trim_end_matches('/').to_owned() });
    }
    if !metadata.is_file() {
        return Err(bad_path(&name, "it is neither a file nor a link to one"));
    }
    let version = metadata.modified().ok().map(Version::Modified);
    Ok(SourceFile { name, size: metadata.len(), version, place: FilePlace::Local(path) })
}

/// The objects of `key`, a key or a glob. Their names are `root` and the key.
fn objects(store: &Arc<dyn ObjectStore>, root: &str, key: &str) -> Result<Vec<SourceFile>, DataError> {
    let name = format!("{root}{key}");
    let found = if is_glob(key) { matching_objects(store, &name, key)? } else { vec![one_object(store, &name, key)?] };
    Ok(found
        .into_iter()
        .map(|meta| SourceFile {
            name: format!("{root}{}", meta.location),
            size: meta.size,
            version: version_of(&meta),
            place: FilePlace::Object(Object { store: Arc::clone(store), path: meta.location, e_tag: meta.e_tag }),
        })
        .collect())
}

/// The most exact version that the store gives.
fn version_of(meta: &ObjectMeta) -> Option<Version> {
    let generation = meta.version.clone().map(Version::Generation);
    let tag = || meta.e_tag.clone().map(Version::ETag);
    generation.or_else(tag).or_else(|| Some(Version::Modified(meta.last_modified.into())))
}

/// The version that [`SourceFile::listed_version`] has for this object.
pub(crate) fn listed_version_of(meta: &ObjectMeta) -> Option<Version> {
    meta.e_tag.clone().map(Version::ETag).or_else(|| version_of(meta))
}

/// Runs a request to a store, and waits for the response.
pub(crate) fn request<T, F>(action: &'static str, name: &str, future: F) -> Result<T, DataError>
where
    T: Send + 'static,
    F: Future<Output = object_store::Result<T>> + Send + 'static,
{
    spawn(future)
        .and_then(|pending| pending.wait(&Stop::default()))
        .map_err(|source| DataError::Io { action, file: name.to_owned(), source })?
        .map_err(|error| store_error(action, name, error))
}

pub(crate) fn object_path(name: &str, key: &str) -> Result<ObjectPath, DataError> {
    ObjectPath::parse(key).map_err(|error| bad_path(name, error.to_string()))
}

fn list(store: &Arc<dyn ObjectStore>, name: &str, prefix: ObjectPath) -> Result<Vec<ObjectMeta>, DataError> {
    let listing = store.list(Some(&prefix));
    request("list", name, listing.try_collect::<Vec<_>>())
}

fn one_object(store: &Arc<dyn ObjectStore>, name: &str, key: &str) -> Result<ObjectMeta, DataError> {
    let path = object_path(name, key)?;
    let (asked, location) = (Arc::clone(store), path.clone());
    let head = request("look at", name, async move {
        let options = GetOptions { head: true, ..GetOptions::default() };
        Ok(asked.get_opts(&location, options).await?.meta)
    });
    match head {
        Err(DataError::NotFound { .. }) if !list(store, name, path)?.is_empty() => {
            Err(DataError::Folder { path: name.trim_end_matches('/').to_owned() })
        }
        head => head,
    }
}

/// The folder that has every match of a glob, with a slash at its end; empty for the whole store.
pub(crate) fn glob_folder(key: &str) -> &str {
    let first = key.find(['*', '?', '[']).unwrap_or(key.len());
    &key[..key[..first].rfind('/').map_or(0, |slash| slash + 1)]
}

fn matching_objects(store: &Arc<dyn ObjectStore>, name: &str, key: &str) -> Result<Vec<ObjectMeta>, DataError> {
    let pattern = glob::Pattern::new(key).map_err(|error| bad_path(name, error.to_string()))?;
    let options = glob::MatchOptions { require_literal_separator: true, ..glob::MatchOptions::new() };
    let mut found = list(store, name, object_path(name, glob_folder(key).trim_end_matches('/'))?)?;
    found.retain(|meta| pattern.matches_with(meta.location.as_ref(), options) && is_meant(key, meta.location.as_ref()));
    found.sort_by(|a, b| a.location.cmp(&b.location));
    if found.is_empty() {
        return Err(DataError::NoMatch { pattern: name.to_owned() });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_and_unfinished_files_need_a_pattern_that_names_them() {
        for (pattern, path, is_it) in [
            ("data/**/*.csv", "data/a/b.csv", true),
            ("data/**/*.csv", "data/.ipynb_checkpoints/b.csv", false),
            ("data/**/*.csv", "data/a/.b.csv", false),
            ("data/**/*.parquet", "data/_temporary/0/part-1.parquet", false),
            ("data/*.csv", "data/_rest.csv", true),
            ("/data/.cache/_raw/*.csv", "/data/.cache/_raw/a.csv", true),
            ("../data/*/a.csv", "../data/b/a.csv", true),
            ("data/_day=*/a.csv", "data/_day=1/a.csv", true),
            ("data/.*", "data/.a.csv", true),
        ] {
            assert_eq!(is_meant(pattern, path), is_it, "{pattern}: {path}");
        }
    }

    #[test]
    fn s3a_is_another_name_of_s3() {
        assert_eq!(one_spelling("s3a://b/k"), one_spelling("S3://b/k"));
        assert_ne!(one_spelling("s3://b/k"), one_spelling("gs://b/k"));
        assert_ne!(one_spelling("s3://b/k"), one_spelling("s3://b/K"));
        assert_eq!(one_spelling("a/s3a.csv"), "a/s3a.csv");
    }
}
