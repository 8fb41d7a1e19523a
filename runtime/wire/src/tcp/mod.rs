//! Frames over TCP, between processes. The sockets' side of `codec`: who connects, who reads,
//! who writes, what happens when a connection ends.

mod client;
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
use crate::transport::{Channel, ChannelKind, Service, Serving, ServingKind, Transport};

pub(crate) use client::TcpChannel;
pub(crate) use server::TcpServing;

/// How TCP connections behave. Both sides of a connection should be given the same limits.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// What is accepted and sent.
    pub limits: Limits,
    /// The most calls of one channel at a time. 1,024 by default.
    pub max_in_flight: usize,
    /// The most requests of one connection a service handles at a time, unsent replies included;
    /// see `transport` for handlers that wait for one another. 1,024 by default.
    pub max_concurrent: usize,
    /// The most connections a service has at a time; further ones wait to be accepted. 4,096 by
    /// default.
    pub max_connections: usize,
    /// The longest that connecting may take in one attempt, and that the handshakes may take in the first; in the
    /// second they may take twice, and in all others four times as long. Attempts are repeated, with a growing
    /// pause, until the deadline of the call that needs the connection. 5 s by default.
    pub connect_timeout: Duration,
    /// After how long without traffic a peer is probed; it is given up after three probes, a
    /// third of this apart. One that confirms nothing of what is sent to it, or has no room for
    /// it, is given up after as long in all. 30 s by default.
    pub keepalive: Duration,
    /// What both sides of a connection have to show. By default nothing is asked and nothing is encrypted: for processes of one
    /// machine.
    pub credentials: Option<Credentials>,
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
        let (host, port) = host_and_port(bind)?;
        let (serving, port) =
            TcpServing::start(service, (host, port), bind, self.config.clone(), self.counters.clone())?;
        let address = Address::Tcp { host: host.to_owned(), port, process: process(bind) };
        Ok(Serving::new(address, ServingKind::Tcp(serving)))
    }

    fn connect(&self, address: &Address) -> Result<Channel, WireError> {
        host_and_port(address)?;
        let channel = TcpChannel::new(address.clone(), self.config.clone(), self.counters.clone());
        Ok(Channel(ChannelKind::Tcp(Arc::new(channel))))
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

/// No delay for small frames, and a peer whose machine died is noticed: by probes while nothing is sent to it, and by what it does not
/// confirm while something is, for which the kernel would try on for a quarter of an hour.
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
