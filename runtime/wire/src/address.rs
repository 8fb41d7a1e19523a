//! The address of a service: a host and port for TCP, a name for a service of this process.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use crate::error::WireError;

/// The address of a service. Manifests and logs show its text form.
///
/// `tcp://127.0.0.1:4000`, `tcp://ps-0.job.svc:4000`, `tcp://[::1]:4000` and `local://ps-0` are
/// addresses. `tcp://ew-0.job.svc:4000#00000000000000a7` names one incarnation of a process: an
/// earlier or later process at the same host and port has another number.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// A host (name, IPv4, or IPv6 without brackets) and a port; port 0 binds to any free port.
    ///
    /// Another process may later get the same host and port, and a DNS name may lead to the
    /// previous process for a while. With `process` set, a caller connects to that incarnation or
    /// not at all.
    Tcp { host: String, port: u16, process: Option<u64> },
    /// A name in the registry of one [`crate::InProcess`] transport.
    Local(String),
}

impl Address {
    /// `tcp://host:port`, for any incarnation.
    pub fn tcp(host: impl Into<String>, port: u16) -> Self {
        Self::Tcp { host: host.into(), port, process: None }
    }

    /// The same address, restricted to one incarnation. `local://` names do not change: each has
    /// one.
    #[must_use]
    pub fn of_process(mut self, number: u64) -> Self {
        if let Self::Tcp { process, .. } = &mut self {
            *process = Some(number);
        }
        self
    }

    /// `local://name`.
    pub fn local(name: impl Into<String>) -> Self {
        Self::Local(name.into())
    }
}

/// The socket addresses to try, in this order, to listen at `address`. `[::]` is followed by
/// `0.0.0.0`, for kernels without IPv6.
#[must_use]
pub fn listening_at(address: SocketAddr) -> Vec<SocketAddr> {
    let is_all = address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    let version_4 = is_all.then(|| SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port()));
    std::iter::once(address).chain(version_4).collect()
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port, process } => {
                match host.contains(':') {
                    true => write!(f, "tcp://[{host}]:{port}")?,
                    false => write!(f, "tcp://{host}:{port}")?,
                }
                process.map_or(Ok(()), |process| write!(f, "#{process:016x}"))
            }
            Self::Local(name) => write!(f, "local://{name}"),
        }
    }
}

impl FromStr for Address {
    type Err = WireError;

    fn from_str(text: &str) -> Result<Self, WireError> {
        let wrong = |reason: &'static str| WireError::Address { text: text.to_owned(), reason };
        if let Some(name) = text.strip_prefix("local://") {
            return match name {
                "" => Err(wrong("the name after local:// is empty")),
                name => Ok(Self::Local(name.to_owned())),
            };
        }
        let rest = text.strip_prefix("tcp://").ok_or_else(|| wrong("it starts with neither tcp:// nor local://"))?;
        let (rest, process) = match rest.split_once('#') {
            Some((rest, process)) => {
                let number = u64::from_str_radix(process, 16)
                    .map_err(|_| wrong("the incarnation after the # is not a hexadecimal number"))?;
                (rest, Some(number))
            }
            None => (rest, None),
        };
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| wrong("there is no port after the host"))?;
        let port = port.parse().map_err(|_| wrong("the port is not a number up to 65535"))?;
        let host = match host.strip_prefix('[') {
            Some(inner) => inner.strip_suffix(']').ok_or_else(|| wrong("a [ is not closed"))?,
            None if host.contains(':') => {
                return Err(wrong("an IPv6 host needs square brackets"));
            }
            None => host,
        };
        if host.is_empty() || host.contains(['/', '[', ']', '@', ' ']) {
            return Err(wrong("the host is not a host name or an IP address"));
        }
        Ok(Self::Tcp { host: host.to_owned(), port, process })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_its_text_form() {
        for text in [
            "tcp://127.0.0.1:4000",
            "tcp://ps-0.ps.ns.svc:1",
            "tcp://[::1]:65535",
            "local://ps-0",
            "tcp://a:1#00000000000000a7",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn the_ipv6_wildcard_falls_back_to_the_ipv4_wildcard() {
        let at = |text: &str| listening_at(text.parse().unwrap()).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(at("[::]:7000"), ["[::]:7000", "0.0.0.0:7000"]);
        assert_eq!((at("[::1]:1"), at("0.0.0.0:2")), (vec!["[::1]:1".to_owned()], vec!["0.0.0.0:2".to_owned()]));
    }

    #[test]
    fn a_wrong_address_is_refused_with_its_text() {
        for text in [
            "",
            "ps-0:4000",
            "http://a:1",
            "tcp://a",
            "tcp://a:70000",
            "tcp://:1",
            "tcp://::1:4",
            "tcp://[::1:4",
            "local://",
            "tcp://a/b:1",
            "tcp://a:1#",
            "tcp://a:1#x",
        ] {
            let message = text.parse::<Address>().unwrap_err().to_string();
            assert!(message.contains(&format!("{text:?}")), "{message}");
        }
    }
}
