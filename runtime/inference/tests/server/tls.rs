//! TLS of both interfaces, with certificates of an authority that the tests make.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rectrain_inference::{Tls, TlsFiles};
use rectrain_proto::inference::ServerReadyRequest;
use rectrain_proto::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Identity};

use crate::host::{Host, Reply, infer_request, inputs, limits, until};

/// The host name in the servers' certificates.
const NAME: &str = "clicks.test";

struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
struct Issued {
    certificate: String,
    key: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn issue(&self) -> Issued {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new([NAME.to_owned()]).unwrap().signed_by(&key, &self.0).unwrap();
        Issued { certificate: certificate.pem(), key: key.serialize_pem() }
    }
}

/// Writes a certificate of this authority. The files also name it as the authority of clients.
fn write(folder: &Path, authority: &Authority) -> TlsFiles {
    let issued = authority.issue();
    std::fs::write(folder.join("tls.crt"), issued.certificate).unwrap();
    std::fs::write(folder.join("tls.key"), issued.key).unwrap();
    std::fs::write(folder.join("ca.crt"), authority.0.pem()).unwrap();
    let [certificate, key, authority] = ["tls.crt", "tls.key", "ca.crt"].map(|name| folder.join(name));
    TlsFiles { certificate, key, client_authority: Some(authority) }
}

/// A client that trusts an authority, and shows a certificate if it has one.
fn connector(trusted: &Authority, own: Option<&Issued>) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(trusted.0.pem().as_bytes()).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    let config = match own {
        Some(own) => {
            let chain = vec![CertificateDer::from_pem_slice(own.certificate.as_bytes()).unwrap()];
            let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
        None => builder.with_no_client_auth(),
    };
    Arc::new(config).into()
}

async fn exchange(address: SocketAddr, client: &TlsConnector, request: &str) -> std::io::Result<Reply> {
    let stream = TcpStream::connect(address).await?;
    let mut stream = client.connect(ServerName::try_from(NAME).unwrap(), stream).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(Reply::parse(&answer))
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
}

/// The value of a metric; 0 if it has none yet.
async fn metric(host: &Host, client: &TlsConnector, name: &str) -> u64 {
    let text = exchange(host.address, client, &get("/metrics")).await.unwrap().body;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.map_or(0, |value| value.parse().unwrap())
}

async fn until_metric(host: &Host, client: &TlsConnector, name: &str, value: u64) {
    until(&format!("{name} is {value}"), async || metric(host, client, name).await == value).await;
}

/// Asks over gRPC whether the server is ready.
async fn is_ready(host: &Host, trusted: &Authority, own: Option<&Issued>) -> Result<bool, String> {
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(trusted.0.pem())).domain_name(NAME);
    if let Some(own) = own {
        tls = tls.identity(Identity::from_pem(&own.certificate, &own.key));
    }
    let endpoint = Channel::from_shared(format!("https://{}", host.grpc)).unwrap().tls_config(tls).unwrap();
    let channel = endpoint.connect().await.map_err(|error| error.to_string())?;
    let answer = GrpcInferenceServiceClient::new(channel).server_ready(ServerReadyRequest {}).await;
    answer.map(|answer| answer.into_inner().ready).map_err(|status| status.to_string())
}

/// A server with these files, which looks at them all the time.
async fn start(files: TlsFiles) -> Host {
    let tls = Tls::open(files).unwrap().look_every(Duration::from_millis(5));
    Host::start_as(limits(), |server| server.with_tls(tls)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn both_interfaces_answer_over_tls_and_only_over_tls() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let mut host = start(TlsFiles { client_authority: None, ..write(folder.path(), &authority) }).await;
    let client = connector(&authority, None);
    let request = infer_request("", &json!({"inputs": inputs(&[1.0, 2.0])}));
    let reply = exchange(host.address, &client, &request).await.unwrap();
    assert_eq!((reply.status, &reply.json()["outputs"][0]["data"]), (200, &json!([1.25, 2.25])));
    assert_eq!(is_ready(&host, &authority, None).await, Ok(true));
    // A client that trusts another authority goes away, and one without TLS gets no answer.
    let other = connector(&Authority::new(), None);
    assert!(exchange(host.address, &other, &request).await.is_err());
    let mut plain = TcpStream::connect(host.address).await.unwrap();
    plain.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _reset_or_ended = plain.read_to_end(&mut answer).await;
    assert!(!String::from_utf8_lossy(&answer).contains("HTTP"), "{answer:?}");
    let refused = |reason| format!("rectrain_inference_refused_connections_total{{reason=\"{reason}\"}}");
    until_metric(&host, &client, &refused("certificate"), 1).await;
    until_metric(&host, &client, &refused("protocol"), 1).await;
    // No client waits for another one in the middle of its handshake.
    let _silent = TcpStream::connect(host.address).await.unwrap();
    assert_eq!(exchange(host.address, &client, &request).await.unwrap().status, 200);
    host.end();
    host.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_need_a_certificate_except_for_health() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let host = start(write(folder.path(), &authority)).await;
    let own = authority.issue();
    let (known, unknown) = (connector(&authority, Some(&own)), connector(&authority, None));
    let request = infer_request("", &json!({"inputs": inputs(&[1.0])}));
    let status = async |client: &TlsConnector, request: &str| exchange(host.address, client, request).await;
    assert_eq!(status(&known, &request).await.unwrap().status, 200);
    for path in ["/v2/health/live", "/v2/health/ready"] {
        assert_eq!(status(&unknown, &get(path)).await.unwrap().status, 200, "{path}");
    }
    for request in [request.clone(), get("/metrics"), get("/v2"), get("/v3"), get("/v2/health/ready/")] {
        let reply = status(&unknown, &request).await.unwrap();
        assert!(reply.status == 403 && reply.body.contains("--tls-client-ca"), "{request}: {}", reply.body);
    }
    let stranger = Authority::new().issue();
    assert!(status(&connector(&authority, Some(&stranger)), &get("/v2/health/live")).await.is_err());
    assert_eq!(is_ready(&host, &authority, Some(&own)).await, Ok(true));
    assert!(is_ready(&host, &authority, None).await.is_err());
    assert!(is_ready(&host, &authority, Some(&stranger)).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_certificate_is_taken_and_a_broken_one_is_not() {
    let (folder, before, after) = (tempfile::tempdir().unwrap(), Authority::new(), Authority::new());
    let host = start(TlsFiles { client_authority: None, ..write(folder.path(), &before) }).await;
    let (old, new) = (connector(&before, None), connector(&after, None));
    let status =
        async |client: &TlsConnector| exchange(host.address, client, &get("/v2")).await.map(|reply| reply.status);
    assert_eq!(status(&old).await.unwrap(), 200);
    let changes = |outcome| format!("rectrain_inference_certificate_changes_total{{outcome=\"{outcome}\"}}");
    // The key of another certificate.
    std::fs::write(folder.path().join("other.key"), after.issue().key).unwrap();
    std::fs::rename(folder.path().join("other.key"), folder.path().join("tls.key")).unwrap();
    until_metric(&host, &old, &changes("refused"), 1).await;
    assert_eq!(status(&old).await.unwrap(), 200);
    // Each file is replaced as a whole.
    let renewed = tempfile::tempdir().unwrap();
    write(renewed.path(), &after);
    std::fs::rename(renewed.path().join("tls.key"), folder.path().join("tls.key")).unwrap();
    std::fs::rename(renewed.path().join("tls.crt"), folder.path().join("tls.crt")).unwrap();
    until("the renewed certificate is taken", async || status(&new).await.is_ok()).await;
    assert!(status(&old).await.is_err());
    assert_eq!(is_ready(&host, &after, None).await, Ok(true));
    assert_eq!(metric(&host, &new, &changes("taken")).await, 1);
}

#[test]
fn files_that_cannot_be_used_get_a_sentence() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let files = write(folder.path(), &authority);
    let message = |name: &str, content: Option<&str>| {
        write(folder.path(), &authority);
        let file = folder.path().join(name);
        match content {
            Some(content) => std::fs::write(&file, content).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        Tls::open(files.clone()).unwrap_err().to_string()
    };
    let place = |name: &str| folder.path().join(name).display().to_string();
    for name in ["tls.crt", "tls.key", "ca.crt"] {
        let missing = message(name, None);
        assert!(
            missing.starts_with(&format!("cannot read {}, a file of the TLS certificate: ", place(name))),
            "{missing}"
        );
        let expected = if name == "tls.key" { "a private key" } else { "a certificate" };
        let empty = message(name, Some("hello"));
        assert_eq!(empty, format!("{}: there is none in it; expected {expected} in PEM", place(name)));
    }
    let other = message("tls.key", Some(&authority.issue().key));
    let sentence =
        format!("the key in {} does not belong to the first certificate in {}", place("tls.key"), place("tls.crt"));
    assert_eq!(other, sentence);
    let large = message("ca.crt", Some(&"x".repeat(2 << 20)));
    assert!(large.ends_with("it has more than 1048576 bytes"), "{large}");
    assert!(!format!("{:?}", Tls::open(write(folder.path(), &authority)).unwrap()).contains("PRIVATE"));
}
