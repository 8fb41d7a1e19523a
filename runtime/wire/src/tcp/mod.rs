//! Frames over TCP, between processes: the sockets around `codec`. `client` connects and calls,
//! `server` accepts and answers, `stream` reads and writes frames, `link` paces them in tests.

mod client;
mod link;
mod server;
mod stream;

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;

use crate::address::Address;
use crate::codec::Limits;
use crate::error::WireError;
use crate::metrics::WireCounters;
use crate::tls::Credentials;
use crate::transport::{Channel, Service, Serving, Transport};

pub use link::PacedLink;

use client::TcpChannel;
use server::TcpServing;

/// The settings of TCP connections. Both sides of a connection should have the same limits.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// The limits of frames, for sending and receiving.
    pub limits: Limits,
    /// The most calls of one channel at a time. 1,024 by default.
    pub max_in_flight: usize,
    /// The most requests of one connection that a service handles at a time, unsent replies
    /// included. 1,024 by default. See `transport` for handlers that wait for one another.
    pub max_concurrent: usize,
    /// The most connections of a service at a time; further ones wait to be accepted. 4,096 by
    /// default.
    pub max_connections: usize,
    /// The longest that one attempt to connect may take. 5 s by default. The handshakes may take as
    /// long again in the first attempt, twice as long in the second, and four times in later ones.
    /// Attempts repeat, with a growing pause, until the deadline of the call.
    pub connect_timeout: Duration,
    /// The idle time after which the kernel probes a peer. 30 s by default. It gives up a peer
    /// after three unanswered probes, a third of this apart. It gives up after the same total time
    /// if a peer does not acknowledge sent data, or has no room for it.
    pub keepalive: Duration,
    /// The certificate that both sides show. By default neither side authenticates and nothing is
    /// encrypted, which suits the processes of one machine.
    pub credentials: Option<Credentials>,
    /// For tests: limits the rate of the connections and delays their bytes. `None` by default.
    /// Connections with TLS are not paced.
    pub link: Option<PacedLink>,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            max_in_flight: 1024,
            max_concurrent: 1024,
            max_connections: 4096,
            connect_timeout: Duration::from_secs(5),
            keepalive: Duration::from_secs(30),
            credentials: None,
            link: None,
        }
    }
}

/// The TCP transport. Cheap to clone.
#[derive(Clone)]
pub struct TcpTransport {
    config: TcpConfig,
    counters: Arc<WireCounters>,
}

impl TcpTransport {
    /// A transport that counts into `counters`.
    pub fn new(config: TcpConfig, counters: Arc<WireCounters>) -> Self {
        Self { config, counters }
    }
}

impl Transport for TcpTransport {
    fn serve(&self, service: Arc<dyn Service>, bind: &Address) -> Result<Serving, WireError> {
        let (host, _) = host_and_port(bind)?;
        let (serving, port) = TcpServing::start(service, bind, self.config.clone(), self.counters.clone())?;
        let address = Address::Tcp { host: host.to_owned(), port, process: process(bind) };
        Ok(Serving::new(address, serving))
    }

    fn connect(&self, address: &Address) -> Result<Channel, WireError> {
        host_and_port(address)?;
        Ok(Channel::new(TcpChannel::new(address.clone(), self.config.clone(), self.counters.clone())))
    }
}

fn host_and_port(address: &Address) -> Result<(&str, u16), WireError> {
    match address {
        Address::Tcp { host, port, .. } => Ok((host, *port)),
        Address::Local(_) => {
            Err(WireError::WrongScheme { transport: "TCP", address: address.to_string(), expected: "tcp://HOST:PORT" })
        }
    }
}

fn process(address: &Address) -> Option<u64> {
    match address {
        Address::Tcp { process, .. } => *process,
        Address::Local(_) => None,
    }
}

/// Sends small frames without delay, and detects a peer whose machine died. Probes detect it while
/// the connection is idle, and the user timeout while data is unacknowledged. Without the latter
/// the kernel would retry for a quarter of an hour.
fn tune(stream: &TcpStream, config: &TcpConfig) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let third = (config.keepalive / 3).max(Duration::from_secs(1));
    let probes = socket2::TcpKeepalive::new()
        .with_time(config.keepalive.max(Duration::from_secs(1)))
        .with_interval(third)
        .with_retries(3);
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_keepalive(&probes)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(config.keepalive + 3 * third))?;
    Ok(())
}
