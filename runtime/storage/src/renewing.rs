//! An object store whose client is built again when the store refuses its credentials. The new
//! client reads the files with the credentials as they are now. A client on its own reads some of
//! them only once.

use std::error::Error as StdError;
use std::fmt::{self, Debug, Display, Formatter};
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use parking_lot::Mutex;

use crate::StorageError;

/// Parts of the answers to expired or revoked credentials whose error is of no kind of its own.
/// Such are an expired token of S3 (status 400), and a refused exchange of a key for a token.
const SIGNS_OF_EXPIRY: [&str; 7] = [
    "ExpiredToken",
    "TokenRefreshRequired",
    "InvalidToken",
    "InvalidIdentityToken",
    "invalid_grant",
    "401 Unauthorized",
    "403 Forbidden",
];

/// Builds a client from the options, the environment and the files, as they are now.
pub(crate) type Build = Box<dyn Fn() -> std::result::Result<Arc<dyn ObjectStore>, StorageError> + Send + Sync>;

/// See the module documentation. A request that is refused is repeated once. An upload in several
/// parts is not: it fails, and the next one has the new client.
#[derive(Clone)]
pub(crate) struct Renewing(Arc<Shared>);

struct Shared {
    build: Build,
    /// A clause that names the place of the credentials.
    origin: String,
    client: Mutex<Client>,
}

#[derive(Clone)]
struct Client {
    store: Arc<dyn ObjectStore>,
    /// Clients built before this one.
    generation: u64,
}

/// A refusal that also names the place of the credentials.
#[derive(Debug, thiserror::Error)]
#[error("{source}; {origin}")]
struct Refused {
    source: Box<dyn StdError + Send + Sync>,
    origin: String,
}

impl Renewing {
    /// Builds the first client.
    pub(crate) fn new(build: Build, origin: String) -> std::result::Result<Self, StorageError> {
        let client = Mutex::new(Client { store: build()?, generation: 0 });
        Ok(Self(Arc::new(Shared { build, origin, client })))
    }

    fn client(&self) -> Client {
        self.0.client.lock().clone()
    }

    /// The store after one whose credentials were refused. Of several requests that were refused
    /// together, the first one builds it.
    fn after(&self, refused: u64) -> std::result::Result<Arc<dyn ObjectStore>, StorageError> {
        let mut client = self.0.client.lock();
        if client.generation == refused {
            *client = Client { store: (self.0.build)()?, generation: refused + 1 };
            tracing::info!("the object store refused the credentials; read them again: {}", self.0.origin);
        }
        Ok(Arc::clone(&client.store))
    }

    /// Makes a request, and once more with a new client if the credentials are refused.
    async fn run<T, F>(&self, request: impl Fn(Arc<dyn ObjectStore>) -> F + Send + Sync) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send,
        T: Send,
    {
        let Client { store, generation } = self.client();
        let refusal = match request(store).await {
            Err(error) if is_refusal(&error) => error,
            done => return done,
        };
        let origin = self.0.origin.clone();
        match self.after(generation) {
            Ok(store) => match request(store).await {
                Err(error) if is_refusal(&error) => Err(with_origin(error, origin)),
                done => done,
            },
            Err(problem) => Err(with_origin(refusal, format!("{origin}; reading them again failed: {problem}"))),
        }
    }

    /// A listing. Only its first page can be refused and repeated.
    fn listing(&self, begin: impl Fn(&dyn ObjectStore) -> Listing + Send + Sync + 'static) -> Listing {
        let own = self.clone();
        let listing = async move {
            match own.run(|store| first_of(begin(&*store))).await {
                Ok((first, rest)) => stream::iter(first.map(Ok)).chain(rest).boxed(),
                Err(error) => failed(error),
            }
        };
        stream::once(listing).flatten().boxed()
    }
}

/// Whether the store refuses the credentials, or cannot exchange them for a token.
fn is_refusal(error: &Error) -> bool {
    match error {
        Error::Unauthenticated { .. } | Error::PermissionDenied { .. } => true,
        Error::Generic { source, .. } => {
            let mut cause: Option<&(dyn StdError + 'static)> = Some(&**source);
            while let Some(error) = cause {
                let text = error.to_string();
                if SIGNS_OF_EXPIRY.iter().any(|sign| text.contains(sign)) {
                    return true;
                }
                cause = error.source();
            }
            false
        }
        _ => false,
    }
}

fn with_origin(error: Error, origin: String) -> Error {
    let named = |source| Box::new(Refused { source, origin });
    match error {
        Error::Unauthenticated { path, source } => Error::Unauthenticated { path, source: named(source) },
        Error::PermissionDenied { path, source } => Error::PermissionDenied { path, source: named(source) },
        Error::Generic { store, source } => Error::Generic { store, source: named(source) },
        other => other,
    }
}

type Listing = BoxStream<'static, Result<ObjectMeta>>;

/// Waits for the first object, so that a refusal shows. Returns it and the others. A listing that
/// has ended must not be polled again.
async fn first_of(found: Listing) -> Result<(Option<ObjectMeta>, Listing)> {
    let mut found = found.fuse();
    let first = found.next().await.transpose()?;
    Ok((first, found.boxed()))
}

fn failed<T: Send + 'static>(error: Error) -> BoxStream<'static, Result<T>> {
    stream::iter([Err(error)]).boxed()
}

/// Deletes the objects. The first refusal stands for all results.
async fn delete_all(store: Arc<dyn ObjectStore>, paths: Vec<Path>) -> Result<Vec<Result<Path>>> {
    let paths = stream::iter(paths.into_iter().map(Ok)).boxed();
    let mut results: Vec<Result<Path>> = store.delete_stream(paths).collect().await;
    match results.iter().position(|result| result.as_ref().is_err_and(is_refusal)) {
        Some(refused) => results.swap_remove(refused).map(|_| Vec::new()),
        None => Ok(results),
    }
}

impl Debug for Renewing {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Renewing").field(&self.client().store).finish()
    }
}

impl Display for Renewing {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        Display::fmt(&self.client().store, formatter)
    }
}

#[async_trait]
impl ObjectStore for Renewing {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.run(|store| {
            let (location, payload, opts) = (location.clone(), payload.clone(), opts.clone());
            async move { store.put_opts(&location, payload, opts).await }
        })
        .await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.run(|store| {
            let (location, opts) = (location.clone(), opts.clone());
            async move { store.put_multipart_opts(&location, opts).await }
        })
        .await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.run(|store| {
            let (location, options) = (location.clone(), options.clone());
            async move { store.get_opts(&location, options).await }
        })
        .await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let own = self.clone();
        let deletion = async move {
            let paths = match locations.try_collect::<Vec<Path>>().await {
                Ok(paths) => paths,
                Err(error) => return failed(error),
            };
            match own.run(|store| delete_all(store, paths.clone())).await {
                Ok(results) => stream::iter(results).boxed(),
                Err(error) => failed(error),
            }
        };
        stream::once(deletion).flatten().boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let prefix = prefix.cloned();
        self.listing(move |store| store.list(prefix.as_ref()))
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        let (prefix, offset) = (prefix.cloned(), offset.clone());
        self.listing(move |store| store.list_with_offset(prefix.as_ref(), &offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.run(|store| {
            let prefix = prefix.cloned();
            async move { store.list_with_delimiter(prefix.as_ref()).await }
        })
        .await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.run(|store| {
            let (from, to, options) = (from.clone(), to.clone(), options.clone());
            async move { store.copy_opts(&from, &to, options).await }
        })
        .await
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use object_store::memory::InMemory;
    use object_store::{ObjectStoreExt, PutMode};

    use super::*;

    const ORIGIN: &str = "the credentials come from the file key.json";

    /// A store that allows requests only to a client that was built with the right key.
    #[derive(Debug)]
    struct Guarded {
        inner: Arc<InMemory>,
        is_right: bool,
    }

    impl Guarded {
        fn check(&self) -> Result<&InMemory> {
            match self.is_right {
                true => Ok(&self.inner),
                false => Err(Error::Unauthenticated { path: "p".to_owned(), source: "401".into() }),
            }
        }
    }

    impl Display for Guarded {
        fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
            formatter.write_str("Guarded")
        }
    }

    #[async_trait]
    impl ObjectStore for Guarded {
        async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
            self.check()?.put_opts(location, payload, opts).await
        }

        async fn put_multipart_opts(
            &self,
            location: &Path,
            opts: PutMultipartOptions,
        ) -> Result<Box<dyn MultipartUpload>> {
            self.check()?.put_multipart_opts(location, opts).await
        }

        async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
            self.check()?.get_opts(location, options).await
        }

        fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
            match self.check() {
                Ok(inner) => inner.delete_stream(locations),
                Err(error) => failed(error),
            }
        }

        fn list(&self, prefix: Option<&Path>) -> Listing {
            match self.check() {
                Ok(inner) => inner.list(prefix),
                Err(error) => failed(error),
            }
        }

        async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
            self.check()?.list_with_delimiter(prefix).await
        }

        async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
            self.check()?.copy_opts(from, to, options).await
        }
    }

    /// A store whose clients read their key from a file when they are built.
    struct Keyed {
        folder: tempfile::TempDir,
        inner: Arc<InMemory>,
        built: Arc<AtomicUsize>,
        store: Renewing,
    }

    impl Keyed {
        fn new() -> Self {
            let (folder, inner) = (tempfile::tempdir().unwrap(), Arc::new(InMemory::new()));
            let built = Arc::new(AtomicUsize::new(0));
            let file = folder.path().join("key");
            std::fs::write(&file, "right").unwrap();
            let build = Self::build(file, Arc::clone(&inner), Arc::clone(&built));
            let store = Renewing::new(build, ORIGIN.to_owned()).unwrap();
            Self { folder, inner, built, store }
        }

        fn build(file: PathBuf, inner: Arc<InMemory>, built: Arc<AtomicUsize>) -> Build {
            Box::new(move || -> std::result::Result<Arc<dyn ObjectStore>, StorageError> {
                built.fetch_add(1, Ordering::Relaxed);
                let failed = |source| StorageError::Io { action: "read", path: "key".to_owned(), source };
                let is_right = std::fs::read_to_string(&file).map_err(failed)? == "right";
                Ok(Arc::new(Guarded { inner: Arc::clone(&inner), is_right }))
            })
        }

        fn set_key(&self, key: &str) {
            std::fs::write(self.folder.path().join("key"), key).unwrap();
        }

        /// Gives the present client an expired key, and a new key to the next one.
        fn expire(&self) {
            let expired = Guarded { inner: Arc::clone(&self.inner), is_right: false };
            self.store.0.client.lock().store = Arc::new(expired);
        }

        fn built(&self) -> usize {
            self.built.load(Ordering::Relaxed)
        }
    }

    #[tokio::test]
    async fn each_request_is_repeated_with_the_key_as_it_is_now() {
        let keyed = Keyed::new();
        let (store, path) = (&keyed.store, Path::from("a/b"));
        store.put(&path, "1".into()).await.unwrap();
        assert_eq!(keyed.built(), 1);
        keyed.expire();
        store.put_opts(&path, "2".into(), PutMode::Overwrite.into()).await.unwrap();
        assert_eq!(keyed.built(), 2);
        keyed.expire();
        assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), "2");
        keyed.expire();
        let listed: Vec<ObjectMeta> = store.list(None).try_collect().await.unwrap();
        assert_eq!(listed.len(), 1);
        keyed.expire();
        assert_eq!(store.list_with_delimiter(None).await.unwrap().common_prefixes.len(), 1);
        keyed.expire();
        store.copy(&path, &Path::from("c")).await.unwrap();
        keyed.expire();
        let mut upload = store.put_multipart(&Path::from("d")).await.unwrap();
        upload.put_part("3".into()).await.unwrap();
        upload.complete().await.unwrap();
        keyed.expire();
        store.delete(&path).await.unwrap();
        let listed: Vec<ObjectMeta> = store.list(None).try_collect().await.unwrap();
        assert_eq!((listed.len(), keyed.built()), (2, 8));
    }

    #[tokio::test]
    async fn a_lasting_refusal_names_the_place_of_the_credentials() {
        let keyed = Keyed::new();
        keyed.expire();
        keyed.set_key("wrong");
        for tries in 1..3 {
            let error = keyed.store.put(&Path::from("a"), "1".into()).await.unwrap_err();
            assert!(matches!(error, Error::Unauthenticated { .. }), "{error}");
            assert!(error.to_string().ends_with(&format!("401; {ORIGIN}")), "{error}");
            assert_eq!(keyed.built(), 1 + tries, "one repeat a request");
        }
        let error = keyed.store.list(None).try_collect::<Vec<_>>().await.unwrap_err();
        assert!(error.to_string().contains(ORIGIN), "{error}");
        std::fs::remove_file(keyed.folder.path().join("key")).unwrap();
        let error = keyed.store.get(&Path::from("a")).await.unwrap_err();
        assert!(error.to_string().contains("reading them again failed: cannot read key"), "{error}");
    }

    #[tokio::test]
    async fn requests_refused_together_build_one_client() {
        let keyed = Keyed::new();
        let generation = keyed.store.client().generation;
        let [first, second] =
            [keyed.store.after(generation), keyed.store.after(generation)].map(|store| store.unwrap());
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(keyed.built(), 2);
    }

    #[test]
    fn expired_tokens_are_refusals_and_outages_are_not() {
        let generic = |text: &str| Error::Generic { store: "S3", source: text.into() };
        for text in
            ["400 Bad Request: <Code>ExpiredToken</Code>", "{\"error\":\"invalid_grant\"}", "status: 403 Forbidden"]
        {
            assert!(is_refusal(&generic(text)), "{text}");
        }
        assert!(is_refusal(&Error::PermissionDenied { path: String::new(), source: "403".into() }));
        assert!(!is_refusal(&generic("connection refused")));
        assert!(!is_refusal(&Error::NotFound { path: String::new(), source: "404".into() }));
    }
}
