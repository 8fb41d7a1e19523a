//! Followed paths: lists the files that are there now, and counts the rows of one of them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use futures::{StreamExt, TryStreamExt};
use object_store::{ObjectMeta, ObjectStore};
use rectrain_kinds::{FollowConfig, Schema};
use rectrain_storage::Place;

use crate::clock::unix_millis;
use crate::config::SourceConfig;
use crate::dataset::Dataset;
use crate::error::DataError;
use crate::fingerprint::{Fingerprint, version_text};
use crate::identity::Version;
use crate::pace;
use crate::storage::{bad_path, glob_folder, is_glob, is_meant, listed_version_of, object_path, one_spelling, request};

/// A file that a listing found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundFile {
    /// The path or URL.
    pub name: String,
    /// The same for all names of one file: its path with links followed, or its URL in one
    /// spelling.
    pub canonical: OsString,
    /// In bytes.
    pub size: u64,
    /// The version, in the form of [`Fingerprint::version`]. An entity tag comes before a
    /// generation.
    pub version: String,
    /// The time of the last modification, in milliseconds since 1970 (UTC).
    pub modified_millis: i64,
}

/// The state of a followed file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileState {
    /// It is there.
    There {
        /// Its content. There is no version if the file has no rows.
        fingerprint: Fingerprint,
        /// Its good rows.
        rows: u64,
    },
    /// There is no such file any longer.
    Gone,
}

/// Lists the files of followed paths, each once. A path without files is no error. Goes through the
/// objects page by page. Blocks.
///
/// Of the names of one file, the one that is no link counts. Of several such names, the name of the
/// first path counts. So a name that comes later replaces no other one.
///
/// # Errors
/// A path that cannot be understood. A disk or a store that fails. A path with more objects below
/// it than [`FollowConfig::MOST_OBJECTS`].
pub fn list_files(follow: &FollowConfig, options: &BTreeMap<String, String>) -> Result<Vec<FoundFile>, DataError> {
    let mut found = Vec::new();
    for path in &follow.paths {
        found.push(match rectrain_storage::place_of(path)? {
            Place::Local(path) => local_files(&path, follow)?,
            Place::Bucket(bucket) => objects(&bucket.store(options)?, &bucket.root, &bucket.key, follow)?,
        });
    }
    Ok(each_once(found))
}

/// A name that a path matches.
struct Match {
    file: FoundFile,
    /// Whether the name is a link to the file.
    is_link: bool,
}

/// The files of all paths, each under one of its names, by name.
fn each_once(of_paths: Vec<Vec<Match>>) -> Vec<FoundFile> {
    let numbered = of_paths.into_iter().enumerate();
    let mut found: Vec<_> =
        numbered.flat_map(|(path, files)| files.into_iter().map(move |file| (path, file))).collect();
    let rank = |(path, found): &(usize, Match)| (found.is_link, *path, found.file.name.clone());
    found.sort_by_cached_key(rank);
    let mut known = HashSet::new();
    found.retain(|(_, found)| known.insert(found.file.canonical.clone()));
    let mut files: Vec<FoundFile> = found.into_iter().map(|(_, found)| found.file).collect();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files
}

/// Looks at a followed file, and counts its good rows. `source` reads this file alone. Blocks.
///
/// # Errors
/// A file that cannot be read as the schema says.
pub fn look_at_file(source: &SourceConfig, schema: &Schema) -> Result<FileState, DataError> {
    let looked = Dataset::open(source.clone(), schema.clone()).and_then(|dataset| {
        let print = dataset.fingerprints()?.list.into_iter().next();
        let fingerprint = print.map(|print| Fingerprint { version: dataset.listed_version(), ..print });
        let rows = dataset.count_good_rows()?;
        Ok(fingerprint.map_or(FileState::Gone, |fingerprint| FileState::There { fingerprint, rows }))
    });
    match looked {
        Err(error) if error.is_absence() => Ok(FileState::Gone),
        Err(DataError::Empty { file } | DataError::NoRows { file }) => Ok(FileState::without_rows(file)),
        looked => looked,
    }
}

impl Dataset {
    /// The version of the first file, as in [`FoundFile::version`].
    #[must_use]
    pub fn listed_version(&self) -> Option<String> {
        let version = self.source_files().first().and_then(|file| file.listed_version());
        version.as_ref().map(version_text)
    }
}

impl FileState {
    fn without_rows(name: String) -> Self {
        Self::There { fingerprint: Fingerprint { name, size: 0, version: None, content: None }, rows: 0 }
    }
}

fn too_many(path: &str) -> DataError {
    let most = FollowConfig::MOST_OBJECTS;
    DataError::config(
        "spec.data.train.follow.paths",
        format!("more than {most} objects lie below {path}: move trained files away, or name a narrower path"),
    )
}

/// A writer puts the marker last. So a directory that has one before the listing begins is listed
/// with all its files.
fn local_files(path: &str, follow: &FollowConfig) -> Result<Vec<Match>, DataError> {
    if !follow.whole_directories {
        return files_in(path, None);
    }
    let whole = whole_folders(&matches(path)?)?;
    if whole.is_empty() { Ok(Vec::new()) } else { files_in(path, Some(&whole)) }
}

/// The directories of these files that have a marker.
fn whole_folders(files: &[PathBuf]) -> Result<HashSet<PathBuf>, DataError> {
    let folders: HashSet<&Path> = files.iter().filter_map(|file| file.parent()).collect();
    let mut whole = HashSet::new();
    for folder in folders {
        let marker = folder.join(FollowConfig::MARKER);
        if if_there("look at", &marker.display().to_string(), fs::metadata(&marker))?.is_some() {
            whole.insert(folder.to_owned());
        }
    }
    Ok(whole)
}

/// The files of a path. If `whole` is given, only the ones that are directly in these directories.
fn files_in(path: &str, whole: Option<&HashSet<PathBuf>>) -> Result<Vec<Match>, DataError> {
    let is_whole = |file: &Path| whole.is_none_or(|whole| file.parent().is_some_and(|folder| whole.contains(folder)));
    let (mut folders, mut found) = (Folders::default(), Vec::new());
    for file in matches(path)?.into_iter().filter(|file| is_whole(file)) {
        found.extend(local_file(&file, &mut folders)?);
    }
    Ok(found)
}

/// The names that a path means. Some are no files.
fn matches(path: &str) -> Result<Vec<PathBuf>, DataError> {
    if !is_glob(path) {
        return Ok(vec![PathBuf::from(path)]);
    }
    let folder = Some(glob_folder(path)).filter(|folder| !folder.is_empty()).unwrap_or(".");
    if if_there("list", folder, fs::metadata(folder))?.is_none() {
        return Ok(Vec::new());
    }
    let matches = glob::glob(path).map_err(|error| bad_path(path, error.to_string()))?;
    let mut found = Vec::new();
    for (number, entry) in matches.enumerate() {
        if number >= FollowConfig::MOST_OBJECTS {
            return Err(too_many(path));
        }
        // A folder that disappears meanwhile has no files.
        let Some(entry) = if_there("list", path, entry.map_err(io::Error::from))? else { continue };
        if is_meant(path, &entry.to_string_lossy()) && is_data(&entry.to_string_lossy()) {
            found.push(entry);
        }
        pace::pass(1);
    }
    Ok(found)
}

/// The paths of directories with links followed. A listing looks at each once.
#[derive(Default)]
struct Folders(HashMap<PathBuf, PathBuf>);

impl Folders {
    /// The path of a file with links followed.
    fn canonical(&mut self, file: &Path, is_link: bool) -> io::Result<PathBuf> {
        let (Some(folder), Some(name), false) = (file.parent(), file.file_name(), is_link) else {
            return fs::canonicalize(file);
        };
        if let Some(resolved) = self.0.get(folder) {
            return Ok(resolved.join(name));
        }
        let resolved = fs::canonicalize(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })?;
        let file = resolved.join(name);
        self.0.insert(folder.to_owned(), resolved);
        Ok(file)
    }
}

/// What the operating system found under a name. `None` if nothing is there.
///
/// # Errors
/// The disk or the mount failed, or refused it. The files may still be there.
fn if_there<T>(action: &'static str, name: &str, found: io::Result<T>) -> Result<Option<T>, DataError> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(DataError::Io { action, file: name.to_owned(), source }),
    }
}

fn local_file(path: &Path, folders: &mut Folders) -> Result<Option<Match>, DataError> {
    let name = path.display().to_string();
    let Some(own) = if_there("look at", &name, fs::symlink_metadata(path))? else { return Ok(None) };
    let is_link = own.is_symlink();
    let target = if is_link { if_there("look at", &name, fs::metadata(path))? } else { Some(own) };
    let Some(metadata) = target.filter(fs::Metadata::is_file) else { return Ok(None) };
    let Some(canonical) = if_there("look at", &name, folders.canonical(path, is_link))? else { return Ok(None) };
    let modified = metadata.modified().unwrap_or(UNIX_EPOCH);
    let version = version_text(&Version::Modified(modified));
    let (size, modified_millis) = (metadata.len(), unix_millis(modified));
    let file = FoundFile { name, canonical: canonical.into_os_string(), size, version, modified_millis };
    Ok(Some(Match { file, is_link }))
}

/// Whether a file may have rows: a marker has none.
fn is_data(name: &str) -> bool {
    !(name == FollowConfig::MARKER || name.ends_with("/_SUCCESS"))
}

/// The objects of `key`, a key or a glob. Their names are `root`, a slash and the key. Markers are
/// treated as in [`local_files`].
fn objects(
    store: &Arc<dyn ObjectStore>,
    root: &str,
    key: &str,
    follow: &FollowConfig,
) -> Result<Vec<Match>, DataError> {
    let name = format!("{root}/{key}");
    let listing = || list(store, &name, glob_folder(key));
    let whole = if follow.whole_directories { Some(marked_folders(&listing()?)) } else { None };
    if whole.as_ref().is_some_and(HashSet::is_empty) {
        return Ok(Vec::new());
    }
    let found = matching(listing()?, &name, key, whole.as_ref())?;
    found.iter().map(|meta| found_object(root, meta)).collect()
}

/// The objects that `key` means. If `whole` is given, only the ones that are directly in these
/// folders.
fn matching(
    mut found: Vec<ObjectMeta>,
    name: &str,
    key: &str,
    whole: Option<&HashSet<String>>,
) -> Result<Vec<ObjectMeta>, DataError> {
    let pattern = glob::Pattern::new(key).map_err(|error| bad_path(name, error.to_string()))?;
    let options = glob::MatchOptions { require_literal_separator: true, ..glob::MatchOptions::new() };
    found.retain(|meta| {
        let key_found: &str = meta.location.as_ref();
        let is_whole = whole.is_none_or(|whole| whole.contains(folder(key_found)));
        let is_match = key_found == key || pattern.matches_with(key_found, options) && is_meant(key, key_found);
        is_match && is_whole && is_data(key_found)
    });
    Ok(found)
}

/// The folders that a marker says to be whole.
fn marked_folders(found: &[ObjectMeta]) -> HashSet<String> {
    found.iter().filter_map(|meta| marked_folder(meta.location.as_ref())).map(str::to_owned).collect()
}

fn found_object(root: &str, meta: &ObjectMeta) -> Result<Match, DataError> {
    let name = format!("{root}/{}", meta.location);
    if is_glob(meta.location.as_ref()) {
        return Err(bad_path(&name, "its name has one of the characters * ? [ of a pattern: rename the object"));
    }
    let version = listed_version_of(meta).as_ref().map(version_text).unwrap_or_default();
    let (canonical, modified_millis) = (one_spelling(&name).into(), meta.last_modified.timestamp_millis());
    Ok(Match { file: FoundFile { name, canonical, size: meta.size, version, modified_millis }, is_link: false })
}

/// The folder of a key, without a slash at its end.
fn folder(key: &str) -> &str {
    key.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The folder that the marker with this key says to be whole.
fn marked_folder(key: &str) -> Option<&str> {
    (key.rsplit('/').next() == Some(FollowConfig::MARKER)).then(|| folder(key))
}

/// The objects below a folder. The store gives them page by page.
fn list(store: &Arc<dyn ObjectStore>, name: &str, folder: &str) -> Result<Vec<ObjectMeta>, DataError> {
    let prefix = object_path(name, folder.trim_end_matches('/'))?;
    let count = |meta: ObjectMeta| {
        pace::pass(1);
        meta
    };
    let listing = store.list(Some(&prefix)).map_ok(count).take(FollowConfig::MOST_OBJECTS + 1);
    let found: Vec<ObjectMeta> = request("list", name, listing.try_collect())?;
    if found.len() > FollowConfig::MOST_OBJECTS { Err(too_many(name)) } else { Ok(found) }
}

#[cfg(test)]
mod tests {
    use object_store::PutOptions;
    use object_store::memory::InMemory;
    use object_store::path::Path as ObjectPath;
    use rectrain_kinds::{BadRows, LabelField};

    use super::*;

    fn follow(path: &str, whole_directories: bool) -> FollowConfig {
        FollowConfig { paths: vec![path.to_owned()], whole_directories, ..FollowConfig::default() }
    }

    /// A file under two names would be trained twice.
    #[cfg(unix)]
    #[test]
    fn a_local_file_counts_once_under_all_its_names() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let link = |to: &str, name: &str| std::os::unix::fs::symlink(at(to), at(name)).unwrap();
        for name in ["in", "out"] {
            fs::create_dir(at(name)).unwrap();
        }
        for name in ["in/a.csv", "in/b.csv", "out/c.csv"] {
            fs::write(at(name), "label,user\n1,a\n").unwrap();
        }
        link("in/b.csv", "in/0.csv");
        link("out/c.csv", "in/z.csv");
        link("in", "other");
        let paths = ["in/*.csv", "in/../in/*.csv", "other/*.csv"].map(|path| at(path).display().to_string());
        let follow = |paths: &[String]| FollowConfig { paths: paths.to_vec(), ..FollowConfig::default() };
        let list = |paths: &[String]| list_files(&follow(paths), &BTreeMap::new()).unwrap();
        let found = list(&paths);
        assert_eq!(names(&found), ["a.csv", "b.csv", "z.csv"]);
        let expected = ["in/a.csv", "in/b.csv", "out/c.csv"];
        let expected = expected.map(|name| fs::canonicalize(at(name)).unwrap().into_os_string());
        assert_eq!(found.iter().map(|file| file.canonical.clone()).collect::<Vec<_>>(), expected);
        assert!(found.iter().all(|file| file.name.starts_with(&*at("in/").to_string_lossy())), "{found:?}");
        // Of one path alone, the names are the ones of that path.
        let linked = at("other/a.csv").display().to_string();
        assert_eq!(list(&paths[2..]).first().map(|file| &*file.name), Some(&*linked));
    }

    fn object(key: &str) -> ObjectMeta {
        let location = ObjectPath::from(key);
        ObjectMeta { location, last_modified: UNIX_EPOCH.into(), size: 5, e_tag: None, version: None }
    }

    /// The marker and the last object come between two pages of the listing.
    #[test]
    fn a_bucket_folder_whose_marker_comes_during_a_listing_waits_as_well() {
        let first = [object("in/1/_SUCCESS"), object("in/1/a.csv"), object("in/2/b.csv")];
        let second = [&first[..], &[object("in/2/_SUCCESS")]].concat();
        let keys = |listing: &[ObjectMeta], whole: &[ObjectMeta]| {
            let found = matching(listing.to_vec(), "", "in/*/*.csv", Some(&marked_folders(whole))).unwrap();
            found.into_iter().map(|meta| meta.location.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(keys(&second, &first), ["in/1/a.csv"]);
        assert_eq!(keys(&second, &second), ["in/1/a.csv", "in/2/b.csv"]);
    }

    #[test]
    fn an_object_counts_once_under_both_schemes() {
        let found = |scheme: &str| vec![found_object(&format!("{scheme}://bucket"), &object("in/a.csv")).unwrap()];
        let files = each_once(vec![found("s3a"), found("s3"), found("gs")]);
        assert_eq!(
            files.iter().map(|file| &*file.name).collect::<Vec<_>>(),
            ["gs://bucket/in/a.csv", "s3a://bucket/in/a.csv"]
        );
    }

    fn names(files: &[FoundFile]) -> Vec<&str> {
        files.iter().map(|file| file.name.rsplit("in/").next().unwrap()).collect()
    }

    #[test]
    fn local_files_are_listed_without_markers_and_hidden_ones() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let path = folder.path().join("in").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "label,user\n1,a\n").unwrap();
        };
        let pattern = format!("{}/in/*/*", folder.path().display());
        let list = |whole| list_files(&follow(&pattern, whole), &BTreeMap::new()).unwrap();
        assert!(list(false).is_empty());
        for name in ["dt=1/b.csv", "dt=1/a.csv", "dt=2/c.csv", "dt=2/.d.csv", "dt=2/_SUCCESS", "_temporary/e.csv"] {
            write(name);
        }
        assert_eq!(names(&list(false)), ["dt=1/a.csv", "dt=1/b.csv", "dt=2/c.csv"]);
        assert_eq!(names(&list(true)), ["dt=2/c.csv"]);
        let file = list(true).remove(0);
        assert_eq!(file.size, 15);
        assert!(file.version.starts_with("modified:") && file.modified_millis > 1_700_000_000_000, "{file:?}");
        // The file of a path without a pattern may come later.
        let one = folder.path().join("in/dt=3/f.csv").display().to_string();
        assert!(list_files(&follow(&one, false), &BTreeMap::new()).unwrap().is_empty());
        write("dt=3/f.csv");
        assert_eq!(list_files(&follow(&one, false), &BTreeMap::new()).unwrap().len(), 1);
    }

    /// A listing without the files of a mount that fails would say that they are gone.
    #[test]
    fn only_a_name_without_a_file_counts_as_no_file() {
        let found = |kind: io::ErrorKind| if_there::<()>("list", "in/*", Err(kind.into()));
        assert!(matches!(found(io::ErrorKind::NotFound), Ok(None)));
        for kind in [io::ErrorKind::PermissionDenied, io::ErrorKind::StaleNetworkFileHandle, io::ErrorKind::Other] {
            let error = found(kind).unwrap_err();
            assert!(error.to_string().starts_with("cannot list in/*: ") && !error.is_absence(), "{error}");
        }
    }

    /// A link to itself cannot be followed, also by root.
    #[cfg(unix)]
    #[test]
    fn a_folder_or_a_marker_that_cannot_be_read_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let list = |pattern: &str, whole| {
            let pattern = at(pattern).display().to_string();
            list_files(&follow(&pattern, whole), &BTreeMap::new()).map(|files| files.len())
        };
        std::os::unix::fs::symlink(at("loop"), at("loop")).unwrap();
        let error = list("loop/*.csv", false).unwrap_err();
        assert!(error.to_string().starts_with("cannot list ") && error.to_string().contains("loop"), "{error}");
        fs::create_dir(at("day")).unwrap();
        fs::write(at("day/a.csv"), "label,user\n1,a\n").unwrap();
        std::os::unix::fs::symlink(at("loop"), at("day/_SUCCESS")).unwrap();
        assert_eq!(list("day/*.csv", false).unwrap(), 1);
        let error = list("day/*.csv", true).unwrap_err();
        assert!(error.to_string().contains("day/_SUCCESS"), "{error}");
    }

    /// The last file and the marker come while the directory is listed.
    #[test]
    fn a_directory_whose_marker_comes_during_a_listing_waits_for_the_next() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["day=1", "day=2"] {
            fs::create_dir(folder.path().join(name)).unwrap();
            fs::write(folder.path().join(name).join("a.csv"), "label,user\n1,a\n").unwrap();
        }
        fs::write(folder.path().join("day=1/_SUCCESS"), "").unwrap();
        let pattern = folder.path().join("*/*.csv").display().to_string();
        let whole = whole_folders(&matches(&pattern).unwrap()).unwrap();
        fs::write(folder.path().join("day=2/b.csv"), "label,user\n1,a\n").unwrap();
        fs::write(folder.path().join("day=2/_SUCCESS"), "").unwrap();
        assert_eq!(files_in(&pattern, Some(&whole)).unwrap().len(), 1);
        assert_eq!(list_files(&follow(&pattern, true), &BTreeMap::new()).unwrap().len(), 3);
    }

    #[test]
    fn objects_are_listed_by_pattern_and_marker() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        for key in
            ["in/dt=1/b.csv", "in/dt=1/a.csv", "in/dt=2/c.csv", "in/dt=2/_SUCCESS", "in/dt=2/x/d.csv", "other/e.csv"]
        {
            let store = Arc::clone(&store);
            let write = async move {
                let (path, text) = (ObjectPath::from(key), "label,user\n1,a\n".into());
                store.put_opts(&path, text, PutOptions::default()).await
            };
            request("write", key, write).unwrap();
        }
        let list = |key, whole| each_once(vec![objects(&store, "s3://bucket", key, &follow("", whole)).unwrap()]);
        assert_eq!(names(&list("in/*/*.csv", false)), ["dt=1/a.csv", "dt=1/b.csv", "dt=2/c.csv"]);
        assert_eq!(names(&list("in/*/*", true)), ["dt=2/c.csv"]);
        assert_eq!(names(&list("in/dt=1/b.csv", false)), ["dt=1/b.csv"]);
        assert!(list("elsewhere/*.csv", false).is_empty());
        let found = list("in/dt=2/*", false);
        assert_eq!((found[0].name.as_str(), found[0].size), ("s3://bucket/in/dt=2/c.csv", 15));
        assert!(found[0].version.starts_with("etag:"), "{found:?}");
    }

    #[test]
    fn a_path_with_too_many_objects_is_refused() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let put = |numbers: std::ops::Range<usize>| {
            let store = Arc::clone(&store);
            let write = async move {
                for number in numbers {
                    let path = ObjectPath::from(format!("in/dt={}/{number:06}.csv", number / 1_000));
                    store.put_opts(&path, "x".into(), PutOptions::default()).await?;
                }
                Ok::<(), object_store::Error>(())
            };
            request("write", "in", write).unwrap();
        };
        put(0..FollowConfig::MOST_OBJECTS);
        assert_eq!(list(&store, "s3://bucket/in/*/*.csv", "in/").unwrap().len(), FollowConfig::MOST_OBJECTS);
        put(FollowConfig::MOST_OBJECTS..FollowConfig::MOST_OBJECTS + 1);
        let error = list(&store, "s3://bucket/in/*/*.csv", "in/").unwrap_err().to_string();
        assert!(error.contains("more than 200000 objects lie below s3://bucket/in/*/*.csv: move trained"), "{error}");
    }

    /// The name would be read as a pattern later.
    #[test]
    fn an_object_whose_name_is_a_pattern_is_refused() {
        let location = ObjectPath::parse("in/a[1].csv").unwrap();
        let Err(error) = found_object("s3://bucket", &ObjectMeta { location, ..object("in/a.csv") }) else { panic!() };
        let message = error.to_string();
        assert!(message.contains("s3://bucket/in/a[1].csv") && message.contains("rename the object"), "{message}");
    }

    #[test]
    fn a_file_is_looked_at_or_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        let source = SourceConfig { paths: vec![path.display().to_string()], ..SourceConfig::default() };
        let label = LabelField { name: "label".to_owned(), positive_from: None, values: BTreeMap::new() };
        let schema = Schema { sparse: Vec::new(), dense: Vec::new(), label, group: None, time: None };
        assert_eq!(look_at_file(&source, &schema).unwrap(), FileState::Gone);
        fs::write(&path, "label\n1\n0\nx\n").unwrap();
        let skipping = SourceConfig { bad_rows: BadRows::Skip { limit: 5 }, ..source };
        let FileState::There { fingerprint, rows } = look_at_file(&skipping, &schema).unwrap() else { panic!() };
        assert_eq!((rows, fingerprint.size), (2, 12));
        assert!(fingerprint.content.is_some());
        fs::write(&path, "").unwrap();
        let FileState::There { rows, .. } = look_at_file(&skipping, &schema).unwrap() else { panic!() };
        assert_eq!(rows, 0);
    }
}
