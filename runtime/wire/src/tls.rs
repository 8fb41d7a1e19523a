//! Access to a job's members: only peers with the job's certificate. Both sides of every connection
//! show one (TLS 1.3), and both must be signed by the one authority that the job's members know.
//! The authority signs only for the job's members, so its certificate proves that its holder
//! belongs to the job. It does not tell the members apart.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{ClientConfig, Error, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

/// The host name in the certificate of every member of every job.
pub const MEMBER_NAME: &str = "member.rectrain.dev";
/// File of the authority's certificate, in the folder of a job's certificate. PEM, as in a Secret
/// of type `kubernetes.io/tls`.
pub const AUTHORITY_FILE: &str = "ca.crt";
/// File of the member's certificate.
pub const CERTIFICATE_FILE: &str = "tls.crt";
/// File of the key of the member's certificate.
pub const KEY_FILE: &str = "tls.key";

/// gRPC is spoken over HTTP/2 and says so in the handshake (ALPN). Frames name no protocol.
const HTTP_2: &[u8] = b"h2";
/// The longest that a peer may take to show its certificate.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The peer showed no certificate, or one of another authority.
const CERTIFICATE: &str = "certificate";
/// The peer does not speak TLS 1.3 as required.
const PROTOCOL: &str = "protocol";
/// The peer sent nothing for too long.
const SILENT: &str = "silent";
/// The peer hung up before it showed anything: a member that was killed, or a port probe.
const ENDED: &str = "ended";
/// The I/O errors of a peer that hung up.
const HUNG_UP: [io::ErrorKind; 3] =
    [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
/// Every reason for which a connection is refused: see [`Stranger::reason`].
pub const REASONS: [&str; 4] = [CERTIFICATE, PROTOCOL, SILENT, ENDED];

/// Why a job's certificate cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialsError {
    /// A file is missing or is not PEM.
    #[error("cannot read {file}: {source}; expected PEM, as in the Secret that the operator makes for a job", file = .file.display())]
    File { file: PathBuf, source: pem::Error },
    /// The files do not belong together.
    #[error("the certificate in {folder} cannot be used: {reason}", folder = .folder.display())]
    Unusable { folder: PathBuf, reason: String },
}

/// A job's certificate, and the check of the peers' certificates. Cheap to clone.
#[derive(Clone)]
pub struct Credentials {
    acceptor: TlsAcceptor,
    connector: TlsConnector,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}

impl Credentials {
    /// Reads `ca.crt`, `tls.crt` and `tls.key` in `folder`.
    ///
    /// # Errors
    /// Names the file that is missing or is not PEM. Says so if the files do not belong together.
    pub fn read(folder: &Path) -> Result<Self, CredentialsError> {
        let unreadable = |file: PathBuf| move |source| CredentialsError::File { file, source };
        let certificates = |name: &str| {
            let file = folder.join(name);
            let all = CertificateDer::pem_file_iter(&file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
            all.and_then(|all| if all.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(all) })
                .map_err(unreadable(file))
        };
        let (authority, chain) = (certificates(AUTHORITY_FILE)?, certificates(CERTIFICATE_FILE)?);
        let key = folder.join(KEY_FILE);
        let key = PrivateKeyDer::from_pem_file(&key).map_err(unreadable(key))?;
        Self::new(authority, chain, key)
            .map_err(|reason| CredentialsError::Unusable { folder: folder.to_owned(), reason })
    }

    fn new(
        authority: Vec<CertificateDer<'static>>,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, String> {
        let provider: Arc<CryptoProvider> = Arc::new(ring::default_provider());
        let mut roots = RootCertStore::empty();
        for certificate in authority {
            roots.add(certificate).map_err(|error| error.to_string())?;
        }
        let roots = Arc::new(roots);
        let of_clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider)).build();
        let of_clients = of_clients.map_err(|error| error.to_string())?;
        let of_servers = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
        let of_servers = of_servers.map_err(|error| error.to_string())?;
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(&[&TLS13]);
        let mut server = server
            .and_then(|server| {
                server.with_client_cert_verifier(of_clients).with_single_cert(chain.clone(), key.clone_key())
            })
            .map_err(|error| error.to_string())?;
        server.alpn_protocols = vec![HTTP_2.to_vec()];
        let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let client = client
            .and_then(|client| client.with_webpki_verifier(of_servers).with_client_auth_cert(chain, key))
            .map_err(|error| error.to_string())?;
        Ok(Self { acceptor: Arc::new(server).into(), connector: Arc::new(client).into() })
    }

    /// The TLS handshake with a peer that has connected; it must show the job's certificate.
    ///
    /// # Errors
    /// [`Stranger`] if it does not. The connection is then closed.
    pub async fn accept(&self, stream: TcpStream) -> Result<server::TlsStream<TcpStream>, Stranger> {
        match tokio::time::timeout(HANDSHAKE, self.acceptor.accept(stream)).await {
            Ok(accepted) => accepted.map_err(Stranger::from),
            Err(_) => {
                Err(Stranger { reason: SILENT, said: format!("the TLS handshake did not finish within {HANDSHAKE:?}") })
            }
        }
    }

    /// The TLS handshake with a listener. Shows the job's certificate and requires the same of the
    /// peer.
    pub(crate) async fn connect(&self, stream: TcpStream) -> io::Result<client::TlsStream<TcpStream>> {
        let name = ServerName::try_from(MEMBER_NAME).map_err(io::Error::other)?;
        self.connector.connect(name, stream).await
    }
}

/// True if a connection failed because the other side does not trust this side's certificate.
pub(crate) fn is_distrust(error: &io::Error) -> bool {
    use tokio_rustls::rustls::AlertDescription as Alert;
    let cause = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    let Some(Error::AlertReceived(alert)) = cause else { return false };
    matches!(
        alert,
        Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::CertificateRequired
            | Alert::UnknownCA
            | Alert::AccessDenied
            | Alert::DecryptError
    )
}

/// A peer that connected without showing the job's certificate.
#[derive(Debug, thiserror::Error)]
#[error("{said}")]
pub struct Stranger {
    /// One of [`REASONS`].
    pub reason: &'static str,
    said: String,
}

impl From<io::Error> for Stranger {
    fn from(error: io::Error) -> Self {
        let cause = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
        let reason = match cause {
            // A peer that does not trust this side's certificate says so with an alert.
            Some(Error::NoCertificatesPresented | Error::InvalidCertificate(_) | Error::AlertReceived(_)) => {
                CERTIFICATE
            }
            None if HUNG_UP.contains(&error.kind()) => ENDED,
            _ => PROTOCOL,
        };
        Self { reason, said: error.to_string() }
    }
}
