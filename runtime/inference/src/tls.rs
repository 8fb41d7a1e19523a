//! TLS of REST and gRPC. The files of the certificate are looked at again and again, because
//! certificates are renewed while servers run. A new certificate holds for new connections. Files
//! that cannot be used are not taken, and the certificate before goes on.

use std::fmt;
use std::fs::File;
use std::future::{pending, ready};
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use futures::{Stream, StreamExt, stream};
use parking_lot::Mutex;
use rectrain_wire::tls::Stranger;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::{Error, RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;

use crate::metrics::Metrics;

/// The longest time of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes at a time. Further connections wait to be accepted.
const HANDSHAKES: usize = 256;
/// The time after a failed accept. Most likely the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The reason of a client whose handshake did not end in time, in metrics.
const SILENT: &str = "silent";
/// The largest file. Certificates have a few KB.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The time between two looks at the files.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// The files of a server's certificate, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate of the server, then the certificates of its intermediate authorities.
    pub certificate: PathBuf,
    /// The key of the certificate.
    pub key: PathBuf,
    /// The authorities of clients' certificates. `None` admits clients without a certificate.
    pub client_authority: Option<PathBuf>,
}

/// Why files cannot be used for TLS.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file is missing, or cannot be read.
    #[error("cannot read {file}, a file of the TLS certificate: {reason}", file = .file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A file has another content.
    #[error("{file}: {problem}; expected {expected} in PEM", file = .file.display())]
    Content {
        /// The file.
        file: PathBuf,
        /// The expected content.
        expected: &'static str,
        /// The finding.
        problem: String,
    },
    /// The files do not belong together, for example because only one of them was renewed.
    #[error("the key in {key} does not belong to the first certificate in {certificate}",
        key = .key.display(), certificate = .certificate.display())]
    OtherKey {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
    },
    /// A certificate or a key is of a kind that TLS does not know.
    #[error("the certificate in {certificate} with the key in {key} cannot be used: {reason}",
        key = .key.display(), certificate = .certificate.display())]
    Unusable {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// The reason.
        reason: String,
    },
    /// An authority of clients' certificates cannot be used.
    #[error("the authorities of clients in {file} cannot be used: {reason}", file = .file.display())]
    Authority {
        /// The file.
        file: PathBuf,
        /// The reason.
        reason: String,
    },
}

/// The bytes of the files.
#[derive(PartialEq, Eq)]
struct Contents {
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_authority: Option<Vec<u8>>,
}

/// The protocol of a port, as the handshake says it (ALPN).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Rest,
    Grpc,
}

impl Protocol {
    const fn alpn(self) -> &'static [u8] {
        match self {
            Self::Rest => b"http/1.1",
            Self::Grpc => b"h2",
        }
    }
}

/// The configurations of both ports, of the same files.
struct Acceptors {
    rest: TlsAcceptor,
    grpc: TlsAcceptor,
}

/// The certificate of a server, and the check of its clients' certificates. With authorities of
/// clients, every client of gRPC needs a certificate, and every client of REST that asks for more
/// than the health of the server.
pub struct Tls {
    files: TlsFiles,
    look_every: Duration,
    acceptors: Mutex<Acceptors>,
    /// The bytes of the last look.
    seen: Mutex<Result<Contents, TlsError>>,
}

impl fmt::Debug for Tls {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// Names the file that is missing, or has another content. Says so if the files do not belong
    /// together.
    pub fn open(files: TlsFiles) -> Result<Self, TlsError> {
        let contents = files.read()?;
        let acceptors = Mutex::new(files.acceptors(&contents)?);
        Ok(Self { files, look_every: LOOK_EVERY, acceptors, seen: Mutex::new(Ok(contents)) })
    }

    /// The time between two looks at the files, by default 10 s.
    #[must_use]
    pub fn look_every(self, look_every: Duration) -> Self {
        Self { look_every, ..self }
    }

    /// Whether clients need a certificate.
    pub(crate) fn needs_clients_certificate(&self) -> bool {
        self.files.client_authority.is_some()
    }

    fn acceptor(&self, protocol: Protocol) -> TlsAcceptor {
        let acceptors = self.acceptors.lock();
        match protocol {
            Protocol::Rest => acceptors.rest.clone(),
            Protocol::Grpc => acceptors.grpc.clone(),
        }
    }

    /// Looks at the files again and again. Never ends.
    pub(crate) async fn renew(self: Arc<Self>, metrics: Metrics) {
        loop {
            tokio::time::sleep(self.look_every).await;
            let (tls, metrics) = (Arc::clone(&self), metrics.clone());
            // A panic there would repeat at the next look, and is logged by its thread.
            let _looked = tokio::task::spawn_blocking(move || tls.look(&metrics)).await;
        }
    }

    /// Takes the files if they changed. Files that stay unusable are reported once.
    fn look(&self, metrics: &Metrics) {
        let found = self.files.read();
        let mut seen = self.seen.lock();
        if *seen == found {
            return;
        }
        let taken = match &found {
            Ok(contents) => self.files.acceptors(contents),
            Err(error) => Err(error.clone()),
        };
        *seen = found;
        match taken {
            Ok(acceptors) => {
                *self.acceptors.lock() = acceptors;
                metrics.certificates.with_label_values(&["taken"]).inc();
                tracing::info!(certificate = %self.files.certificate.display(), "took the renewed TLS certificate");
            }
            Err(error) => {
                metrics.certificates.with_label_values(&["refused"]).inc();
                tracing::warn!(%error, "the changed TLS certificate is not taken; the one before goes on");
            }
        }
    }
}

impl TlsFiles {
    fn read(&self) -> Result<Contents, TlsError> {
        Ok(Contents {
            certificate: read(&self.certificate)?,
            key: read(&self.key)?,
            client_authority: self.client_authority.as_deref().map(read).transpose()?,
        })
    }

    fn acceptors(&self, contents: &Contents) -> Result<Acceptors, TlsError> {
        let chain = certificates(&self.certificate, &contents.certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&contents.key).map_err(|error| TlsError::Content {
            file: self.key.clone(),
            expected: "a private key",
            problem: finding(&error),
        })?;
        let provider = Arc::new(ring::default_provider());
        let authorities = match (&self.client_authority, &contents.client_authority) {
            (Some(file), Some(pem)) => Some((file, roots(file, pem)?)),
            _ => None,
        };
        let acceptor = |protocol| {
            let clients = match &authorities {
                Some((file, roots)) => of_clients(file, roots, protocol, &provider)?,
                None => WebPkiClientVerifier::no_client_auth(),
            };
            let config = config(chain.clone(), key.clone_key(), clients, protocol, Arc::clone(&provider));
            config.map(|config| TlsAcceptor::from(Arc::new(config))).map_err(|error| self.unusable(&error))
        };
        Ok(Acceptors { rest: acceptor(Protocol::Rest)?, grpc: acceptor(Protocol::Grpc)? })
    }

    fn unusable(&self, error: &Error) -> TlsError {
        let (certificate, key) = (self.certificate.clone(), self.key.clone());
        match error {
            Error::InconsistentKeys(_) => TlsError::OtherKey { certificate, key },
            other => TlsError::Unusable { certificate, key, reason: other.to_string() },
        }
    }
}

fn read(file: &Path) -> Result<Vec<u8>, TlsError> {
    let mut bytes = Vec::new();
    let found = File::open(file).and_then(|opened| opened.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes));
    let reason = match found {
        Ok(length) if length as u64 > MAX_FILE_BYTES => format!("it has more than {MAX_FILE_BYTES} bytes"),
        Ok(_) => return Ok(bytes),
        Err(error) => error.to_string(),
    };
    Err(TlsError::Read { file: file.to_owned(), reason })
}

fn certificates(file: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    let all = all.and_then(|all| if all.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(all) });
    let (file, expected) = (file.to_owned(), "a certificate");
    all.map_err(|error| TlsError::Content { file, expected, problem: finding(&error) })
}

/// The finding of an error in PEM, in words.
fn finding(error: &pem::Error) -> String {
    match error {
        pem::Error::NoItemsFound => "there is none in it".to_owned(),
        other => other.to_string(),
    }
}

fn roots(file: &Path, pem: &[u8]) -> Result<Arc<RootCertStore>, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file, pem)? {
        roots.add(certificate).map_err(|error| authority(file, &error))?;
    }
    Ok(Arc::new(roots))
}

fn authority(file: &Path, error: &impl ToString) -> TlsError {
    TlsError::Authority { file: file.to_owned(), reason: error.to_string() }
}

/// The check of clients' certificates. REST also admits clients without one: a kubelet that asks
/// for the health of the server has none.
fn of_clients(
    file: &Path,
    roots: &Arc<RootCertStore>,
    protocol: Protocol,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider));
    let verifier = if protocol == Protocol::Rest { verifier.allow_unauthenticated() } else { verifier };
    verifier.build().map_err(|error| authority(file, &error))
}

fn config(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    clients: Arc<dyn ClientCertVerifier>,
    protocol: Protocol,
    provider: Arc<CryptoProvider>,
) -> Result<ServerConfig, Error> {
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let mut config = builder.with_client_cert_verifier(clients).with_single_cert(chain, key)?;
    config.alpn_protocols = vec![protocol.alpn().to_vec()];
    Ok(config)
}

/// A connection whose handshake has ended well, and the address of its client.
type Connection = (TlsStream<TcpStream>, SocketAddr);

/// Accepts connections, and keeps those whose handshake ends well. The others are counted.
pub(crate) fn connections(
    listener: TcpListener,
    tls: Arc<Tls>,
    protocol: Protocol,
    metrics: Metrics,
) -> impl Stream<Item = Connection> + Send {
    let accepted = stream::unfold(listener, |listener| async move { Some((accept(&listener).await, listener)) });
    let shaken = accepted.map(move |(stream, client)| {
        let (acceptor, metrics) = (tls.acceptor(protocol), metrics.clone());
        async move { handshake(&acceptor, stream, client, &metrics).await }
    });
    shaken.buffer_unordered(HANDSHAKES).filter_map(ready)
}

async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) => {
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn handshake(
    acceptor: &TlsAcceptor,
    stream: TcpStream,
    client: SocketAddr,
    metrics: &Metrics,
) -> Option<Connection> {
    // Small responses would wait for acknowledgements otherwise.
    let _kept_as_it_is = stream.set_nodelay(true);
    let (reason, problem) = match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => return Some((stream, client)),
        Ok(Err(error)) => {
            let stranger = Stranger::from(error);
            (stranger.reason, stranger.to_string())
        }
        Err(_) => (SILENT, format!("the handshake did not end within {HANDSHAKE:?}")),
    };
    metrics.refused_connections.with_label_values(&[reason]).inc();
    // Any client can cause it, so it is no warning.
    tracing::debug!(%client, reason, problem, "refused a connection");
    None
}

/// The listener of REST with TLS.
pub(crate) struct RestListener {
    connections: Pin<Box<dyn Stream<Item = Connection> + Send>>,
    address: SocketAddr,
}

impl RestListener {
    pub(crate) fn new(listener: TcpListener, tls: Arc<Tls>, metrics: Metrics) -> std::io::Result<Self> {
        let address = listener.local_addr()?;
        Ok(Self { connections: Box::pin(connections(listener, tls, Protocol::Rest, metrics)), address })
    }
}

impl Listener for RestListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> Connection {
        match self.connections.next().await {
            Some(connection) => connection,
            // The stream of connections has no end.
            None => pending().await,
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        Ok(self.address)
    }
}

/// The client of a connection of REST with TLS.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client {
    /// Whether it has shown a certificate, which its authority has signed.
    pub(crate) has_certificate: bool,
}

impl Connected<IncomingStream<'_, RestListener>> for Client {
    fn connect_info(stream: IncomingStream<'_, RestListener>) -> Self {
        let (_, session) = stream.io().get_ref();
        Self { has_certificate: session.peer_certificates().is_some() }
    }
}
