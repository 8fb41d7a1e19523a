//! Access over TLS: only members of the job are accepted, and every stranger is counted.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use rectrain_wire::tls::{AUTHORITY_FILE, CERTIFICATE_FILE, Credentials, KEY_FILE, MEMBER_NAME};
use rectrain_wire::*;

mod authority;

use authority::Authority;

const SOON: Duration = Duration::from_secs(20);

/// Counts the requests that reach the handler.
#[derive(Default)]
struct Guarded(AtomicUsize);

impl Service for Guarded {
    fn call<'a>(&'a self, _peer: &'a Peer, request: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        self.0.fetch_add(1, SeqCst);
        Box::pin(async move { Ok(request) })
    }
}

struct Rig {
    job: Authority,
    guarded: Arc<Guarded>,
    counters: Arc<WireCounters>,
    serving: Serving,
}

impl Rig {
    fn start() -> Self {
        let (job, guarded) = (Authority::new(), Arc::new(Guarded::default()));
        let counters = WireCounters::unregistered(|_| "any").unwrap();
        let config = TcpConfig { credentials: Some(job.credentials()), ..TcpConfig::default() };
        let transport = TcpTransport::new(config, Arc::clone(&counters));
        let service = Arc::clone(&guarded) as Arc<dyn Service>;
        let serving = transport.serve(service, &Address::tcp("127.0.0.1", 0)).unwrap();
        Self { job, guarded, counters, serving }
    }

    fn channel(&self, credentials: Option<Credentials>) -> Channel {
        let counters = WireCounters::unregistered(|_| "any").unwrap();
        let config = TcpConfig { credentials, connect_timeout: Duration::from_millis(500), ..TcpConfig::default() };
        TcpTransport::new(config, counters).connect(self.serving.address()).unwrap()
    }

    fn socket(&self) -> TcpStream {
        let Address::Tcp { host, port, .. } = self.serving.address() else { panic!("not TCP") };
        TcpStream::connect((host.as_str(), *port)).unwrap()
    }

    async fn refused(&self, reason: &str, count: u64) {
        for _ in 0..2_000 {
            if self.counters.refused_connections(reason) >= count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("no connection was refused because of {reason}");
    }
}

async fn call(channel: &Channel) -> Result<Frame, WireError> {
    channel.call(Frame::new(1, "rows").with(vec![1f32; 100_000]), Duration::from_secs(2)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_is_accepted_and_no_refusal_is_counted() {
    let rig = Rig::start();
    call(&rig.channel(Some(rig.job.credentials()))).await.unwrap();
    assert_eq!(rig.guarded.0.load(SeqCst), 1);
    assert_eq!(rig.counters.refused_connections("certificate") + rig.counters.refused_connections("protocol"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_is_refused_and_reaches_no_handler() {
    let rig = Rig::start();
    let other = Authority::new();
    // A member of another job that would accept this job's members.
    let error = call(&rig.channel(Some(other.credentials_for(MEMBER_NAME, &rig.job)))).await.unwrap_err();
    assert!(matches!(error, WireError::Distrusted { .. }) && !error.is_retryable(), "{error}");
    rig.refused("certificate", 1).await;
    // A peer that does not trust the member's certificate.
    let error = call(&rig.channel(Some(other.credentials()))).await.unwrap_err();
    assert!(matches!(error, WireError::Unreachable { .. }) && error.to_string().contains("certificate"), "{error}");
    // A peer that does not speak TLS.
    assert!(call(&rig.channel(None)).await.is_err());
    rig.refused("protocol", 1).await;
    assert_eq!(rig.guarded.0.load(SeqCst), 0, "a stranger's request was handled");
    call(&rig.channel(Some(rig.job.credentials()))).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_are_no_handshake_get_an_alert_and_no_frame() {
    let rig = Rig::start();
    let mut socket = rig.socket();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket.write_all(&[7; 4_096]).unwrap();
    let mut answer = Vec::new();
    // The connection may be reset once the alert has been read.
    let _reset = socket.read_to_end(&mut answer);
    // A TLS record of type alert, and nothing else.
    assert!(answer.is_empty() || (answer[0] == 21 && answer.len() < 32), "{answer:?}");
    rig.refused("protocol", 1).await;
    assert_eq!(rig.guarded.0.load(SeqCst), 0);
}

/// A peer that is killed while it connects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_hangs_up_in_the_handshake_counts_as_ended() {
    let rig = Rig::start();
    // The header of a handshake record, and half of its announced bytes.
    rig.socket().write_all(&[22, 3, 1, 0, 200, 1, 0, 0, 196]).unwrap();
    rig.refused("ended", 1).await;
    assert_eq!(rig.counters.refused_connections("protocol"), 0);
}

/// Members check the other side too: a member never calls an impostor.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_calls_members_only() {
    let (job, other) = (Authority::new(), Authority::new());
    for (credentials, says) in [
        (other.credentials_for(MEMBER_NAME, &job), "certificate"),
        (job.credentials_for("coordinator.example.org", &job), "name"),
    ] {
        let config = TcpConfig { credentials: Some(credentials), ..TcpConfig::default() };
        let impostor = Arc::new(Guarded::default());
        let transport = TcpTransport::new(config, WireCounters::unregistered(|_| "any").unwrap());
        let service = Arc::clone(&impostor) as Arc<dyn Service>;
        let serving = transport.serve(service, &Address::tcp("127.0.0.1", 0)).unwrap();
        let config = TcpConfig { credentials: Some(job.credentials()), ..TcpConfig::default() };
        let member = TcpTransport::new(config, WireCounters::unregistered(|_| "any").unwrap());
        let error = call(&member.connect(serving.address()).unwrap()).await.unwrap_err();
        assert!(matches!(error, WireError::Unreachable { .. }) && error.to_string().contains(says), "{error}");
        assert_eq!(impostor.0.load(SeqCst), 0);
    }
}

#[test]
fn an_unusable_certificate_is_refused_with_the_name_of_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let job = Authority::new();
    let refusal = || Credentials::read(folder.path()).unwrap_err().to_string();
    for file in [AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE] {
        job.write(folder.path(), MEMBER_NAME, &job);
        std::fs::remove_file(folder.path().join(file)).unwrap();
        assert!(refusal().contains(file), "{}", refusal());
        std::fs::write(folder.path().join(file), "no PEM").unwrap();
        assert!(refusal().contains(file), "{}", refusal());
    }
    // The key of another certificate.
    job.write(folder.path(), MEMBER_NAME, &job);
    let key = rcgen::KeyPair::generate().unwrap();
    std::fs::write(folder.path().join(KEY_FILE), key.serialize_pem()).unwrap();
    assert!(refusal().contains("cannot be used"), "{}", refusal());
}
