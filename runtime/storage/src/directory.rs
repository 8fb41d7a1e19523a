//! A directory to keep files in, on this machine or in a bucket. What is put there is durable when the call returns, and
//! never seen in part.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutPayload, WriteMultipart};

use crate::{Place, StorageError, place_of};

/// See the module's text. Names of files are relative to the directory, with slashes between their parts.
#[derive(Debug, Clone)]
pub struct Directory {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    name: String,
    /// Where it is on this machine, if it is.
    local: Option<PathBuf>,
}

/// A file of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Relative to the directory.
    pub name: String,
    /// In bytes.
    pub size: u64,
}

impl Directory {
    /// The directory at a path or URL. One on this machine is made if it is not there and `create` says so.
    ///
    /// # Errors
    /// [`StorageError`]: a path that cannot be understood, a folder that cannot be made. A bucket is not asked yet.
    pub fn open(path: &str, options: &BTreeMap<String, String>, create: bool) -> Result<Self, StorageError> {
        match place_of(path)? {
            Place::Local(local) => Self::local(FilePath::new(&local), create),
            Place::Bucket(bucket) => {
                let prefix = Path::parse(bucket.key.trim_end_matches('/'))
                    .map_err(|error| StorageError::BadPath { path: path.to_owned(), problem: error.to_string() })?;
                Ok(Self::in_store(bucket.store(options)?, prefix, path.trim_end_matches('/')))
            }
        }
    }

    /// A directory of a store that the caller has opened; `name` is what messages call it.
    #[must_use]
    pub fn in_store(store: Arc<dyn ObjectStore>, prefix: Path, name: &str) -> Self {
        Self { store, prefix, name: name.to_owned(), local: None }
    }

    fn local(path: &FilePath, create: bool) -> Result<Self, StorageError> {
        let name = path.display().to_string();
        if create {
            let failed = |source| StorageError::Io { action: "make the folder", path: name.clone(), source };
            std::fs::create_dir_all(path).map_err(failed)?;
        }
        let failed = |source| StorageError::Io { action: "open the folder", path: name.clone(), source };
        let path = path.canonicalize().map_err(failed)?;
        let store = LocalFileSystem::new_with_prefix(&path)
            .map_err(|source| StorageError::Store { action: "open the folder", path: name.clone(), source })?
            .with_fsync(true);
        Ok(Self { store: Arc::new(store), prefix: Path::default(), name, local: Some(path) })
    }

    /// As it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it is on this machine.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.local.is_some()
    }

    /// What messages call a file of it.
    #[must_use]
    pub fn name_of(&self, file: &str) -> String {
        format!("{}/{file}", self.name.trim_end_matches('/'))
    }

    fn path(&self, file: &str) -> Path {
        file.split('/').filter(|part| !part.is_empty()).fold(self.prefix.clone(), |path, part| path.join(part))
    }

    fn failed<'a>(
        &'a self,
        action: &'static str,
        file: &'a str,
    ) -> impl FnOnce(object_store::Error) -> StorageError + 'a {
        move |source| StorageError::Store { action, path: self.name_of(file), source }
    }

    /// Names of the folders directly below, in order.
    ///
    /// # Errors
    /// [`StorageError::Store`].
    pub async fn folders(&self) -> Result<Vec<String>, StorageError> {
        if let Some(local) = &self.local {
            // The listing of a store shows no folder that holds only the beginnings of files.
            return local_folders(local.clone()).await;
        }
        let prefix = (!self.prefix.as_ref().is_empty()).then_some(&self.prefix);
        let listing = self.store.list_with_delimiter(prefix).await.map_err(self.failed("list", ""))?;
        let names = listing.common_prefixes.iter().filter_map(|path| path.parts().next_back());
        let mut names: Vec<String> = names.map(|part| part.as_ref().to_owned()).collect();
        names.sort();
        Ok(names)
    }

    /// All files of a folder, in order of their names; the beginnings of files that were never finished too, where they lie on
    /// this machine.
    ///
    /// # Errors
    /// [`StorageError::Store`].
    pub async fn files(&self, folder: &str) -> Result<Vec<Entry>, StorageError> {
        if let Some(local) = &self.local {
            return local_files(local.join(folder), folder.to_owned()).await;
        }
        let path = self.path(folder);
        let found: Vec<_> = self.store.list(Some(&path)).try_collect().await.map_err(self.failed("list", folder))?;
        let before = self.prefix.parts().count();
        let mut entries: Vec<Entry> = found
            .into_iter()
            .map(|meta| {
                let parts: Vec<_> = meta.location.parts().skip(before).map(|part| part.as_ref().to_owned()).collect();
                Entry { name: parts.join("/"), size: meta.size }
            })
            .collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// The size of a file in bytes; `None` if there is no such file.
    ///
    /// # Errors
    /// [`StorageError::Store`].
    pub async fn size(&self, file: &str) -> Result<Option<u64>, StorageError> {
        let options = GetOptions { head: true, ..GetOptions::default() };
        match self.store.get_opts(&self.path(file), options).await {
            Ok(found) => Ok(Some(found.meta.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed("look at", file)(error)),
        }
    }

    /// A whole file of at most `limit` bytes; `None` if there is no such file.
    ///
    /// # Errors
    /// [`StorageError::Store`], also for a file that is larger.
    pub async fn read(&self, file: &str, limit: u64) -> Result<Option<Vec<u8>>, StorageError> {
        let found = match self.store.get_opts(&self.path(file), GetOptions::default()).await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(self.failed("read", file)(error)),
        };
        if found.meta.size > limit {
            let problem = format!("it has {} bytes, more than the {limit} that such a file may have", found.meta.size);
            return Err(self.failed("read", file)(generic(problem)));
        }
        let bytes = found.bytes().await.map_err(self.failed("read", file))?;
        Ok(Some(bytes.into()))
    }

    /// A range of a file's bytes, all of it.
    ///
    /// # Errors
    /// [`StorageError::Store`], also if the file is shorter.
    pub async fn read_range(&self, file: &str, range: Range<u64>) -> Result<Bytes, StorageError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let options = GetOptions { range: Some(GetRange::Bounded(range.clone())), ..GetOptions::default() };
        let found = self.store.get_opts(&self.path(file), options).await.map_err(self.failed("read", file))?;
        let bytes = found.bytes().await.map_err(self.failed("read", file))?;
        if bytes.len() as u64 != range.end - range.start {
            let problem = format!("bytes {} to {} were asked for and {} came", range.start, range.end, bytes.len());
            return Err(self.failed("read", file)(generic(problem)));
        }
        Ok(bytes)
    }

    /// Puts a small file there, whole or not at all, in the place of one of the same name.
    ///
    /// # Errors
    /// [`StorageError::Store`].
    pub async fn put(&self, file: &str, bytes: Vec<u8>) -> Result<(), StorageError> {
        self.store.put(&self.path(file), bytes.into()).await.map_err(self.failed("write", file))?;
        Ok(())
    }

    /// Begins a file. What is written is sent in parts of `part_bytes`, or at once if it is not more than one part; it is seen
    /// when [`FileWriter::finish`] returns.
    #[must_use]
    pub fn create(&self, file: &str, part_bytes: usize) -> FileWriter {
        FileWriter {
            store: Arc::clone(&self.store),
            path: self.path(file),
            name: self.name_of(file),
            part_bytes,
            parallel: if self.is_local() { 2 } else { 4 },
            state: Writing::Small(Vec::new(), 0),
        }
    }

    /// Deletes files; one that is not there is none to delete.
    ///
    /// # Errors
    /// [`StorageError::Store`] for the first that cannot be deleted.
    pub async fn delete(&self, files: &[String]) -> Result<(), StorageError> {
        if let Some(local) = &self.local {
            return delete_local(files.iter().map(|file| local.join(file)).collect()).await;
        }
        let paths: Vec<object_store::Result<Path>> = files.iter().map(|file| Ok(self.path(file))).collect();
        let mut deleted = self.store.delete_stream(futures::stream::iter(paths).boxed());
        while let Some(result) = deleted.next().await {
            match result {
                Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(self.failed("delete files of", "")(error)),
            }
        }
        Ok(())
    }

    /// Deletes a folder with everything in it, `first` before all else; the beginnings of files that were never finished too,
    /// where they lie on this machine. (In a bucket they are the bucket's: give it a lifecycle rule for unfinished uploads.)
    ///
    /// # Errors
    /// [`StorageError`] for what cannot be deleted.
    pub async fn delete_folder(&self, folder: &str, first: &str) -> Result<(), StorageError> {
        self.delete(&[format!("{folder}/{first}")]).await?;
        if let Some(local) = &self.local {
            let path = local.join(folder);
            let name = self.name_of(folder);
            return blocking(move || match std::fs::remove_dir_all(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    Err(StorageError::Io { action: "delete the folder", path: name, source: error })
                }
                _ => Ok(()),
            })
            .await;
        }
        let files: Vec<String> = self.files(folder).await?.into_iter().map(|entry| entry.name).collect();
        self.delete(&files).await
    }
}

async fn local_folders(path: PathBuf) -> Result<Vec<String>, StorageError> {
    blocking(move || {
        let failed = |source| StorageError::Io { action: "list", path: path.display().to_string(), source };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.file_type().map_err(failed)?.is_dir()
                && let Ok(name) = entry.file_name().into_string()
            {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    })
    .await
}

async fn local_files(path: PathBuf, folder: String) -> Result<Vec<Entry>, StorageError> {
    blocking(move || {
        let failed = |source| StorageError::Io { action: "list", path: path.display().to_string(), source };
        let mut entries = Vec::new();
        let found = match std::fs::read_dir(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(entries),
            found => found.map_err(failed)?,
        };
        for entry in found {
            let entry = entry.map_err(failed)?;
            let metadata = match entry.metadata() {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                metadata => metadata.map_err(failed)?,
            };
            if metadata.is_file()
                && let Ok(name) = entry.file_name().into_string()
            {
                let name = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                entries.push(Entry { name, size: metadata.len() });
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    })
    .await
}

async fn delete_local(paths: Vec<PathBuf>) -> Result<(), StorageError> {
    blocking(move || {
        for path in paths {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(StorageError::Io { action: "delete", path: path.display().to_string(), source: error });
                }
                _ => {}
            }
        }
        Ok(())
    })
    .await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StorageError> + Send + 'static,
) -> Result<T, StorageError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(StorageError::Store { action: "work on", path: "the storage".into(), source: error.into() })
    })
}

fn generic(problem: String) -> object_store::Error {
    object_store::Error::Generic { store: "storage", source: problem.into() }
}

/// A file that is being written. At most a few parts are in memory at a time. Dropped before [`FileWriter::finish`], no file
/// appears.
#[derive(Debug)]
pub struct FileWriter {
    store: Arc<dyn ObjectStore>,
    path: Path,
    name: String,
    part_bytes: usize,
    /// Parts under way at most; who writes more waits.
    parallel: usize,
    state: Writing,
}

#[derive(Debug)]
enum Writing {
    /// Not more than one part so far: its pieces and their bytes.
    Small(Vec<Bytes>, usize),
    Parts(WriteMultipart),
    Failed,
}

impl FileWriter {
    /// Appends bytes; waits while too many parts are under way.
    ///
    /// # Errors
    /// [`StorageError::Store`], possibly for bytes that were given earlier. The file is then given up.
    pub async fn write(&mut self, bytes: impl Into<Bytes>) -> Result<(), StorageError> {
        let bytes = bytes.into();
        match std::mem::replace(&mut self.state, Writing::Failed) {
            Writing::Small(mut pieces, length) if length + bytes.len() <= self.part_bytes => {
                let length = length + bytes.len();
                pieces.push(bytes);
                self.state = Writing::Small(pieces, length);
                Ok(())
            }
            Writing::Small(pieces, _) => {
                let upload = self.store.put_multipart(&self.path).await.map_err(|error| self.failed(error))?;
                let mut upload = WriteMultipart::new_with_chunk_size(upload, self.part_bytes);
                pieces.into_iter().for_each(|piece| upload.put(piece));
                self.append(upload, bytes).await
            }
            Writing::Parts(upload) => self.append(upload, bytes).await,
            Writing::Failed => Err(self.failed(generic("an earlier part of the file failed".into()))),
        }
    }

    /// Gives the bytes on a part at a time, so that never more parts are under way than allowed.
    async fn append(&mut self, mut upload: WriteMultipart, mut bytes: Bytes) -> Result<(), StorageError> {
        while !bytes.is_empty() {
            if let Err(error) = upload.wait_for_capacity(self.parallel).await {
                give_up(upload).await;
                return Err(self.failed(error));
            }
            upload.put(bytes.split_to(bytes.len().min(self.part_bytes)));
        }
        self.state = Writing::Parts(upload);
        Ok(())
    }

    /// Writes what is left, waits until all of it is durable, and makes the file appear.
    ///
    /// # Errors
    /// [`StorageError::Store`]; no file appears then.
    pub async fn finish(mut self) -> Result<(), StorageError> {
        match std::mem::replace(&mut self.state, Writing::Failed) {
            Writing::Small(pieces, _) => {
                let payload: PutPayload = pieces.into_iter().collect();
                self.store.put(&self.path, payload).await.map_err(|error| self.failed(error))?;
                Ok(())
            }
            Writing::Parts(mut upload) => {
                // What was sent already first, so that a failure there is told as it is.
                if let Err(error) = upload.wait_for_capacity(1).await {
                    give_up(upload).await;
                    return Err(self.failed(error));
                }
                upload.finish().await.map_err(|error| self.failed(error))?;
                Ok(())
            }
            Writing::Failed => Err(self.failed(generic("an earlier part of the file failed".into()))),
        }
    }

    fn failed(&self, source: object_store::Error) -> StorageError {
        StorageError::Store { action: "write", path: self.name.clone(), source }
    }
}

/// The parts of an upload that cannot be aborted are the bucket's to clear.
async fn give_up(upload: WriteMultipart) {
    let _aborted = upload.abort().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::memory::InMemory;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// The same walk on this machine and in a store.
    async fn walk(directory: &Directory) {
        assert_eq!(directory.folders().await.unwrap(), Vec::<String>::new());
        directory.put("a/one", b"1".to_vec()).await.unwrap();
        directory.put("a/one", b"11".to_vec()).await.unwrap();
        let mut file = directory.create("b/two", 5);
        for _ in 0..10 {
            file.write(b"abc".to_vec()).await.unwrap();
        }
        assert_eq!(directory.size("b/two").await.unwrap(), None, "a file is not seen before it is whole");
        file.finish().await.unwrap();
        assert_eq!(directory.size("b/two").await.unwrap(), Some(30));
        assert_eq!(directory.read("a/one", 2).await.unwrap().unwrap(), b"11");
        assert!(directory.read("a/one", 1).await.unwrap_err().to_string().contains("a/one"));
        assert_eq!(directory.read("a/none", 1).await.unwrap(), None);
        assert_eq!(&directory.read_range("b/two", 2..7).await.unwrap()[..], b"cabca");
        assert!(directory.read_range("b/two", 28..31).await.is_err());
        let mut dropped = directory.create("b/three", 5);
        dropped.write(b"longer than a part".to_vec()).await.unwrap();
        drop(dropped);
        directory.create("b/small", 5).finish().await.unwrap();
        let names = |entries: Vec<Entry>| entries.into_iter().map(|entry| entry.name).collect::<Vec<_>>();
        let whole = |name: &String| !name.contains("three");
        let found: Vec<String> = names(directory.files("b").await.unwrap()).into_iter().filter(whole).collect();
        assert_eq!(found, ["b/small", "b/two"]);
        assert_eq!(directory.folders().await.unwrap(), ["a", "b"]);
        assert_eq!(directory.size("b/three").await.unwrap(), None);
        directory.delete(&["a/one".into(), "a/none".into()]).await.unwrap();
        directory.delete_folder("b", "two").await.unwrap();
        directory.delete_folder("none", "x").await.unwrap();
        assert_eq!(names(directory.files("").await.unwrap()), Vec::<String>::new());
    }

    #[test]
    fn a_directory_is_the_same_on_this_machine_and_in_a_store() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/down");
        let options = BTreeMap::new();
        assert!(Directory::open(path.to_str().unwrap(), &options, false).is_err(), "nothing is made by looking");
        let local = Directory::open(path.to_str().unwrap(), &options, true).unwrap();
        runtime().block_on(walk(&local));
        let store = Directory::in_store(Arc::new(InMemory::new()), Path::from("x/y"), "memory");
        runtime().block_on(walk(&store));
    }
}
