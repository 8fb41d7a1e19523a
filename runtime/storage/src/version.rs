//! Small files that several processes replace: each replaces only the version that it has read.

use std::fs::File;
use std::io::{Error, ErrorKind, Result as IoResult, Write};
use std::path::{Path as FilePath, PathBuf};

use object_store::{GetOptions, PutMode, UpdateVersion};

use crate::StorageError;
use crate::directory::{Directory, blocking};

/// A version of a file.
#[derive(Debug, Clone)]
pub struct Version(Kind);

#[derive(Debug, Clone)]
enum Kind {
    /// The content on this machine. No two versions have the same content.
    Local(Vec<u8>),
    Bucket(UpdateVersion),
}

impl Directory {
    /// A whole small file and its version; `None` if there is no such file.
    ///
    /// # Errors
    /// [`StorageError::Io`] on this machine and [`StorageError::Store`] in a bucket.
    pub async fn read_version(&self, file: &str) -> Result<Option<(Vec<u8>, Version)>, StorageError> {
        if let Some(local) = self.local_path(file) {
            let bytes = self.locally("read", file, move || content(&local)).await?;
            return Ok(bytes.map(|bytes| (bytes.clone(), Version(Kind::Local(bytes)))));
        }
        let found = match self.store.get_opts(&self.path(file), GetOptions::default()).await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(self.failed("read", file)(error)),
        };
        let version = UpdateVersion { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
        let bytes = found.bytes().await.map_err(self.failed("read", file))?;
        Ok(Some((bytes.into(), Version(Kind::Bucket(version)))))
    }

    /// Replaces the version `expected` of a file, or makes the file if `expected` is `None`.
    /// Returns the new version; `None` if the file has another version. The content must differ
    /// from the content of every other version. A store without conditional writes replaces any
    /// version.
    ///
    /// # Errors
    /// [`StorageError::Io`] on this machine and [`StorageError::Store`] in a bucket.
    pub async fn replace(
        &self,
        file: &str,
        expected: Option<&Version>,
        bytes: Vec<u8>,
    ) -> Result<Option<Version>, StorageError> {
        if let Some(local) = self.local_path(file) {
            let expected = match expected {
                Some(Version(Kind::Local(content))) => Some(content.clone()),
                _ => None,
            };
            return self.locally("write", file, move || replace_local(&local, expected.as_deref(), bytes)).await;
        }
        let mode = match expected {
            Some(Version(Kind::Bucket(version))) => PutMode::Update(version.clone()),
            _ => PutMode::Create,
        };
        let path = self.path(file);
        let mut put = self.store.put_opts(&path, bytes.clone().into(), mode.into()).await;
        if matches!(put, Err(object_store::Error::NotImplemented { .. })) {
            put = self.store.put_opts(&path, bytes.into(), PutMode::Overwrite.into()).await;
        }
        match put {
            Ok(put) => Ok(Some(Version(Kind::Bucket(put.into())))),
            Err(
                object_store::Error::AlreadyExists { .. }
                | object_store::Error::Precondition { .. }
                | object_store::Error::NotFound { .. },
            ) => Ok(None),
            Err(error) => Err(self.failed("write", file)(error)),
        }
    }

    /// Deletes a file of this machine if it still has this version. Does nothing in a bucket.
    pub fn delete_version_now(&self, file: &str, version: &Version) {
        let (Some(local), Version(Kind::Local(expected))) = (self.local_path(file), version) else { return };
        let deleted = locked(&local, || match content(&local)? {
            Some(found) if found == *expected => std::fs::remove_file(&local),
            _ => Ok(()),
        });
        if let Err(error) = deleted {
            tracing::debug!(%error, "{} cannot be deleted", local.display());
        }
    }

    fn local_path(&self, file: &str) -> Option<PathBuf> {
        self.local.as_ref().map(|local| local.join(file))
    }

    async fn locally<T: Send + 'static>(
        &self,
        action: &'static str,
        file: &str,
        work: impl FnOnce() -> IoResult<T> + Send + 'static,
    ) -> Result<T, StorageError> {
        let path = self.name_of(file);
        blocking(move || work().map_err(|source| StorageError::Io { action, path, source })).await
    }
}

fn content(path: &FilePath) -> IoResult<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn replace_local(path: &FilePath, expected: Option<&[u8]>, bytes: Vec<u8>) -> IoResult<Option<Version>> {
    locked(path, || {
        if content(path)?.as_deref() != expected {
            return Ok(None);
        }
        let mut staged = path.as_os_str().to_owned();
        staged.push("#new");
        let mut file = File::create(&staged)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        std::fs::rename(&staged, path)?;
        Ok(Some(Version(Kind::Local(bytes))))
    })
}

/// Works while no other process does so on a file of the same folder. Some network file systems
/// cannot lock a folder. There two processes may replace the same version at the same moment.
fn locked<T>(path: &FilePath, work: impl FnOnce() -> IoResult<T>) -> IoResult<T> {
    let folder = path.parent().ok_or_else(|| Error::from(ErrorKind::NotFound))?;
    let folder = File::open(folder)?;
    if let Err(error) = folder.lock() {
        tracing::debug!(%error, "{} cannot be locked", path.display());
    }
    work()
}
