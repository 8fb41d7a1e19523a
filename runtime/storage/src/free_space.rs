//! The free bytes of a directory's file system.

use crate::StorageError;
use crate::directory::{Directory, blocking};

impl Directory {
    /// The bytes that this process may still write to the directory's file system. `None` for a
    /// bucket, which has no such limit.
    ///
    /// # Errors
    /// [`StorageError::Io`].
    pub async fn free_bytes(&self) -> Result<Option<u64>, StorageError> {
        let Some(local) = self.local.clone() else { return Ok(None) };
        let path = self.name().to_owned();
        blocking(move || {
            let failed = |error: rustix::io::Errno| StorageError::Io {
                action: "find the free bytes of",
                path,
                source: error.into(),
            };
            let found = rustix::fs::statvfs(local.as_path()).map_err(failed)?;
            Ok(Some(found.f_bavail.saturating_mul(found.f_frsize)))
        })
        .await
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[tokio::test]
    async fn a_folder_has_free_bytes_and_a_bucket_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let open = |path: &str| Directory::open(path, &BTreeMap::new(), false).unwrap();
        let local = open(&folder.path().display().to_string());
        assert!(local.free_bytes().await.unwrap().unwrap() > 0);
        assert_eq!(open("s3://bucket/ck").free_bytes().await.unwrap(), None);
        folder.close().unwrap();
        let error = local.free_bytes().await.unwrap_err();
        assert!(error.to_string().starts_with("cannot find the free bytes of"), "{error}");
    }
}
