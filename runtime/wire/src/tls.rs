//! Who may speak with a job's members: whoever has the job's certificate. Both sides of every connection show one, and both have
//! to be of the one authority that the job's members know (TLS 1.3). The authority signs for nobody else, so a certificate of it
//! says that its holder belongs to the job; which member it is, is not told apart.

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

/// The name that the certificate of every member of every job is for.
pub const MEMBER_NAME: &str = "member.rectrain.dev";
/// File of the authority's certificate, in the folder of a job's certificate; PEM, as in a Secret of type `kubernetes.io/tls`.
pub const AUTHORITY_FILE: &str = "ca.crt";
/// File of the member's certificate.
pub const CERTIFICATE_FILE: &str = "tls.crt";
/// File of the key of the member's certificate.
pub const KEY_FILE: &str = "tls.key";

/// gRPC is spoken over HTTP/2 and says so in the handshake; frames say nothing.
const HTTP_2: &[u8] = b"h2";
/// How long a peer may take to show who it is.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// A peer that shows no certificate, or another's.
const CERTIFICATE: &str = "certificate";
/// A peer that does not speak TLS as it is asked for.
const PROTOCOL: &str = "protocol";
/// A peer that shows nothing for too long.
const SILENT: &str = "silent";
/// A peer that is gone before it has shown anything: a member that was killed, or nobody in particular.
const ENDED: &str = "ended";
/// How that is seen.
const HUNG_UP: [io::ErrorKind; 3] =
    [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
/// All reasons for which a connection is refused: [`Stranger::reason`].
pub const REASONS: [&str; 4] = [CERTIFICATE, PROTOCOL, SILENT, ENDED];

/// Why a job's certificate cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialsError {
    /// A file is not there or is not PEM.
    #[error("cannot read {file}: {source}; expected PEM, as in the Secret that the operator makes for a job", file = .file.display())]
    File { file: PathBuf, source: pem::Error },
    /// The files do not belong together.
    #[error("the certificate in {folder} cannot be used: {reason}", folder = .folder.display())]
    Unusable { folder: PathBuf, reason: String },
}

/// A job's certificate, and what is asked of others. Cheap to clone.
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
    /// Names the file that is missing or is not PEM; says so if they do not belong together.
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

    /// Asks who has connected to show the job's certificate.
    ///
    /// # Errors
    /// [`Stranger`], after which the connection is closed.
    pub async fn accept(&self, stream: TcpStream) -> Result<server::TlsStream<TcpStream>, Stranger> {
        match tokio::time::timeout(HANDSHAKE, self.acceptor.accept(stream)).await {
            Ok(accepted) => accepted.map_err(Stranger::from),
            Err(_) => Err(Stranger { reason: SILENT, said: format!("it showed nothing within {HANDSHAKE:?}") }),
        }
    }

    /// Shows the job's certificate, and asks who listens to do the same.
    pub(crate) async fn connect(&self, stream: TcpStream) -> io::Result<client::TlsStream<TcpStream>> {
        let name = ServerName::try_from(MEMBER_NAME).map_err(io::Error::other)?;
        self.connector.connect(name, stream).await
    }
}

/// Whether a connection has failed because the other side does not believe this one's certificate.
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

/// Somebody who connected and did not show the job's certificate.
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
            // A peer that does not believe this side's certificate says so with an alert.
            Some(Error::NoCertificatesPresented | Error::InvalidCertificate(_) | Error::AlertReceived(_)) => {
                CERTIFICATE
            }
            None if HUNG_UP.contains(&error.kind()) => ENDED,
            _ => PROTOCOL,
        };
        Self { reason, said: error.to_string() }
    }
}
