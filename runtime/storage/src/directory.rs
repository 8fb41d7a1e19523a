//! A directory of files, on this machine or in a bucket. A file is durable when the call that wrote
//! it returns, and readers never see a part of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutPayload, WriteMultipart};

use crate::local_file::{LocalFile, read_direct};
use crate::{Place, StorageError, place_of};

/// How long aborting a failed upload may take. Without this limit the client would retry an
/// unreachable store for a minute.
const ABORT_TIME: Duration = Duration::from_secs(5);

/// Local reads of at least this many bytes bypass the page cache: it would not be worth the copy.
const DIRECT_BYTES: u64 = 1 << 20;

/// A directory; see the module documentation. File names are relative to the directory, with
/// slashes between their parts.
#[derive(Debug, Clone)]
pub struct Directory {
    pub(crate) store: Arc<dyn ObjectStore>,
    prefix: Path,
    name: String,
    /// Its path on this machine, if it is local.
    pub(crate) local: Option<PathBuf>,
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
    /// Opens the directory at a path or URL. With `create`, makes a missing local folder.
    ///
    /// # Errors
    /// [`StorageError`]: a path that cannot be parsed, or a folder that cannot be made. No request
    /// is made to a bucket yet.
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

    /// A directory in a store that the caller has opened. Messages call it `name`.
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
        let path = path.canonicalize().map_err(|source| cannot_open(path, source))?;
        let store = LocalFileSystem::new_with_prefix(&path)
            .map_err(|source| StorageError::Store { action: "open the folder", path: name.clone(), source })?
            .with_fsync(true);
        Ok(Self { store: Arc::new(store), prefix: Path::default(), name, local: Some(path) })
    }

    /// The path or URL as the caller gave it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True if the directory is on this machine.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.local.is_some()
    }

    /// The name of a file of this directory in messages.
    #[must_use]
    pub fn name_of(&self, file: &str) -> String {
        format!("{}/{file}", self.name.trim_end_matches('/'))
    }

    pub(crate) fn path(&self, file: &str) -> Path {
        file.split('/').filter(|part| !part.is_empty()).fold(self.prefix.clone(), |path, part| path.join(part))
    }

    pub(crate) fn failed<'a>(
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
            // The listing of a store hides folders that hold only unfinished files.
            return local_folders(local.clone()).await;
        }
        let prefix = (!self.prefix.as_ref().is_empty()).then_some(&self.prefix);
        let listing = self.store.list_with_delimiter(prefix).await.map_err(self.failed("list", ""))?;
        let names = listing.common_prefixes.iter().filter_map(|path| path.parts().next_back());
        let mut names: Vec<String> = names.map(|part| part.as_ref().to_owned()).collect();
        names.sort();
        Ok(names)
    }

    /// All files of a folder, ordered by name. On this machine the list includes unfinished files.
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
            Err(error) => Err(self.failed("find the size of", file)(error)),
        }
    }

    /// A whole file of at most `limit` bytes; `None` if there is no such file.
    ///
    /// # Errors
    /// [`StorageError::TooLarge`] and [`StorageError::Store`].
    pub async fn read(&self, file: &str, limit: u64) -> Result<Option<Vec<u8>>, StorageError> {
        let found = match self.store.get_opts(&self.path(file), GetOptions::default()).await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(self.failed("read", file)(error)),
        };
        if found.meta.size > limit {
            return Err(StorageError::TooLarge { path: self.name_of(file), found: found.meta.size, limit });
        }
        let bytes = found.bytes().await.map_err(self.failed("read", file))?;
        Ok(Some(bytes.into()))
    }

    /// All bytes of a range of a file.
    ///
    /// # Errors
    /// [`StorageError::Store`], also if the file is shorter.
    pub async fn read_range(&self, file: &str, range: Range<u64>) -> Result<Bytes, StorageError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        if let Some(local) = self.local.as_ref().filter(|_| range.end - range.start >= DIRECT_BYTES)
            && let Some(bytes) = read_direct(local.join(file), range.clone()).await
        {
            return Ok(bytes);
        }
        let options = GetOptions { range: Some(GetRange::Bounded(range.clone())), ..GetOptions::default() };
        let found = self.store.get_opts(&self.path(file), options).await.map_err(self.failed("read", file))?;
        let bytes = found.bytes().await.map_err(self.failed("read", file))?;
        if bytes.len() as u64 != range.end - range.start {
            let problem =
                format!("requested bytes {} to {} and received {} bytes", range.start, range.end, bytes.len());
            return Err(self.failed("read", file)(generic(problem)));
        }
        Ok(bytes)
    }

    /// Writes a small file, whole or not at all. Replaces a file of the same name.
    ///
    /// # Errors
    /// [`StorageError::Store`].
    pub async fn put(&self, file: &str, bytes: Vec<u8>) -> Result<(), StorageError> {
        self.store.put(&self.path(file), bytes.into()).await.map_err(self.failed("write", file))?;
        Ok(())
    }

    /// Writes, reads and deletes a small file, to learn whether the directory can be used. In a
    /// bucket the write is conditional, if the store knows conditional writes. No other file may
    /// have this name.
    ///
    /// # Errors
    /// [`StorageError::Io`] on this machine and [`StorageError::Store`] in a bucket, with the first
    /// operation that failed. The file may be left then.
    pub async fn probe(&self, file: &str) -> Result<(), StorageError> {
        if let Some(local) = &self.local {
            let (path, name) = (local.join(file), self.name_of(file));
            return blocking(move || probe_local(&path, &name)).await;
        }
        let content = file.as_bytes();
        self.put_new(file, content.to_vec()).await?;
        let read = match self.read(file, content.len() as u64).await {
            Ok(Some(bytes)) if bytes == content => Ok(()),
            Ok(_) => Err(self.failed("read", file)(object_store::Error::Precondition {
                path: self.name_of(file),
                source: CHANGED.into(),
            })),
            Err(error) => Err(error),
        };
        let deleted = self.delete(&[file.to_owned()]).await;
        read.and(deleted)
    }

    /// Writes a file that does not exist yet.
    async fn put_new(&self, file: &str, bytes: Vec<u8>) -> Result<(), StorageError> {
        let path = self.path(file);
        match self.store.put_opts(&path, bytes.clone().into(), PutMode::Create.into()).await {
            // The client repeats a write whose answer was lost.
            Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => Ok(()),
            Err(object_store::Error::NotImplemented { .. }) => self.put(file, bytes).await,
            Err(error) => Err(self.failed("write", file)(error)),
        }
    }

    /// Starts a file. Its content is sent in parts of `part_bytes`, or at once if it fits one part.
    /// The file appears when [`FileWriter::finish`] returns.
    #[must_use]
    pub fn create(&self, file: &str, part_bytes: usize) -> FileWriter {
        FileWriter {
            store: Arc::clone(&self.store),
            path: self.path(file),
            local: self.local.as_ref().map(|local| local.join(file)),
            name: self.name_of(file),
            part_bytes,
            state: Writing::Small(Vec::new(), 0),
        }
    }

    /// Deletes files. A file that does not exist counts as deleted.
    ///
    /// # Errors
    /// [`StorageError::Store`] for the first file that cannot be deleted.
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

    /// Deletes a folder with everything in it, the file `first` before all others. On this machine
    /// that includes unfinished files. Unfinished uploads in a bucket need a lifecycle rule of the
    /// bucket.
    ///
    /// # Errors
    /// [`StorageError`] if something cannot be deleted.
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

/// The file that a probe reads is another one than it wrote.
const CHANGED: &str = "its content is not the content that was written";

/// The error for a folder that cannot be opened. A relative path that is missing is shown with the
/// folder that it starts from.
fn cannot_open(path: &FilePath, source: std::io::Error) -> StorageError {
    let is_missing = path.is_relative() && source.kind() == std::io::ErrorKind::NotFound;
    let start = std::env::current_dir().ok().filter(|_| is_missing);
    let start = start.map(|folder| format!(" (it starts from {})", folder.display())).unwrap_or_default();
    StorageError::Io { action: "open the folder", path: format!("{}{start}", path.display()), source }
}

/// Not through the store's client: it retries for ever where no file can be created, as in `/proc`.
fn probe_local(path: &FilePath, name: &str) -> Result<(), StorageError> {
    let failed = |action| move |source| StorageError::Io { action, path: name.to_owned(), source };
    let content = name.as_bytes();
    let written = File::create_new(path).and_then(|mut file| {
        file.write_all(content)?;
        file.sync_all()
    });
    let read = written.map_err(failed("write")).and_then(|()| {
        let bytes = std::fs::read(path).map_err(failed("read"))?;
        let changed = || std::io::Error::new(std::io::ErrorKind::InvalidData, CHANGED);
        if bytes == content { Ok(()) } else { Err(failed("read")(changed())) }
    });
    let deleted = match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed("delete")(error)),
        _ => Ok(()),
    };
    read.and(deleted)
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

pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StorageError> + Send + 'static,
) -> Result<T, StorageError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(StorageError::Store { action: "work on", path: "the storage".into(), source: error.into() })
    })
}

fn generic(problem: String) -> object_store::Error {
    object_store::Error::Generic { store: "storage", source: problem.into() }
}

/// A file that is being written. Holds at most a few parts in memory. If it is dropped before
/// [`FileWriter::finish`], no file appears.
#[derive(Debug)]
pub struct FileWriter {
    store: Arc<dyn ObjectStore>,
    path: Path,
    /// Its path on this machine, if it is local.
    local: Option<PathBuf>,
    name: String,
    part_bytes: usize,
    state: Writing,
}

/// The most parts in flight; a further write waits.
const UPLOADS: usize = 4;

#[derive(Debug)]
enum Writing {
    /// At most one part so far: its pieces and their total length.
    Small(Vec<Bytes>, usize),
    Local(LocalFile),
    Upload(WriteMultipart),
    Failed,
}

impl FileWriter {
    /// Appends bytes. Waits while too many parts are in flight.
    ///
    /// # Errors
    /// [`StorageError`], possibly for bytes of an earlier call. The file is then abandoned.
    pub async fn write(&mut self, bytes: impl Into<Bytes>) -> Result<(), StorageError> {
        let bytes = bytes.into();
        self.state = match std::mem::replace(&mut self.state, Writing::Failed) {
            Writing::Small(mut pieces, length) if length + bytes.len() <= self.part_bytes => {
                let length = length + bytes.len();
                pieces.push(bytes);
                Writing::Small(pieces, length)
            }
            Writing::Small(mut pieces, _) => {
                pieces.push(bytes);
                let mut begun = self.begin().await?;
                for piece in pieces {
                    begun = self.append(begun, piece).await?;
                }
                begun
            }
            begun => self.append(begun, bytes).await?,
        };
        Ok(())
    }

    async fn begin(&mut self) -> Result<Writing, StorageError> {
        if let Some(path) = &self.local {
            let file = LocalFile::create(path.clone(), self.part_bytes).await;
            return file.map(Writing::Local).map_err(|error| self.failed_here(error));
        }
        let upload = self.store.put_multipart(&self.path).await.map_err(|error| self.failed(error))?;
        Ok(Writing::Upload(WriteMultipart::new_with_chunk_size(upload, self.part_bytes)))
    }

    async fn append(&mut self, begun: Writing, mut bytes: Bytes) -> Result<Writing, StorageError> {
        match begun {
            Writing::Local(mut file) => {
                file.write(&bytes).await.map_err(|error| self.failed_here(error))?;
                Ok(Writing::Local(file))
            }
            Writing::Upload(mut upload) => {
                // One part at a time, so that no more parts are in flight than allowed.
                while !bytes.is_empty() {
                    if let Err(error) = upload.wait_for_capacity(UPLOADS).await {
                        abort(upload).await;
                        return Err(self.failed(error));
                    }
                    upload.put(bytes.split_to(bytes.len().min(self.part_bytes)));
                }
                Ok(Writing::Upload(upload))
            }
            Writing::Small(..) | Writing::Failed => Err(self.failed_before()),
        }
    }

    /// Writes the rest, waits until everything is durable, and makes the file appear.
    ///
    /// # Errors
    /// [`StorageError`]; the file then does not appear.
    pub async fn finish(mut self) -> Result<(), StorageError> {
        match std::mem::replace(&mut self.state, Writing::Failed) {
            Writing::Small(pieces, _) => {
                let payload: PutPayload = pieces.into_iter().collect();
                self.store.put(&self.path, payload).await.map_err(|error| self.failed(error))?;
                Ok(())
            }
            Writing::Local(file) => file.finish().await.map_err(|error| self.failed_here(error)),
            Writing::Upload(mut upload) => {
                // Wait for the parts in flight first, so that their failure is reported as such.
                if let Err(error) = upload.wait_for_capacity(1).await {
                    abort(upload).await;
                    return Err(self.failed(error));
                }
                upload.finish().await.map_err(|error| self.failed(error))?;
                Ok(())
            }
            Writing::Failed => Err(self.failed_before()),
        }
    }

    fn failed(&self, source: object_store::Error) -> StorageError {
        StorageError::Store { action: "write", path: self.name.clone(), source }
    }

    fn failed_here(&self, source: std::io::Error) -> StorageError {
        StorageError::Io { action: "write", path: self.name.clone(), source }
    }

    fn failed_before(&self) -> StorageError {
        self.failed(generic("an earlier part of the file failed".into()))
    }
}

/// Aborts a failed upload, but not for long: the caller reports the first error. If the abort
/// fails, the bucket has to clear the upload's parts.
async fn abort(upload: WriteMultipart) {
    let _aborted = tokio::time::timeout(ABORT_TIME, upload.abort()).await;
}
