//! Where a service is: a host and port for TCP, a name for a service of this process.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use crate::error::WireError;

/// The address of a service; its text form is what manifests and logs show.
///
/// `tcp://127.0.0.1:4000`, `tcp://ps-0.job.svc:4000`, `tcp://[::1]:4000`, `local://ps-0`; `tcp://ew-0.job.svc:4000#00000000000000a7` is one
/// process there, and none that comes after it or was before it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// A host (name, IPv4, or IPv6 without brackets) and a port; port 0 binds to any free port. Another process may come to have both, and
    /// a name may lead to the one before for a while: whoever names a `process` is connected to that one or to nobody.
    Tcp { host: String, port: u16, process: Option<u64> },
    /// A name in the registry of one [`crate::InProcess`] transport.
    Local(String),
}

impl Address {
    /// `tcp://host:port`.
    pub fn tcp(host: impl Into<String>, port: u16) -> Self {
        Self::Tcp { host: host.into(), port, process: None }
    }

    /// The same place, and there this process only. A name in one process has no other.
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

/// Where to listen who is told to at this address, what is possible first: all of a machine, `[::]`, is all of version 4 where its kernel has
/// no version 6.
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
                    .map_err(|_| wrong("the process after the # is no hexadecimal number"))?;
                (rest, Some(number))
            }
            None => (rest, None),
        };
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| wrong("there is no port after the host"))?;
        let port = port.parse().map_err(|_| wrong("the port is not a number up to 65535"))?;
        let host = match host.strip_prefix('[') {
            Some(inner) => inner.strip_suffix(']').ok_or_else(|| wrong("a [ is not closed"))?,
            None if host.contains(':') => {
                return Err(wrong("an IPv6 host must stand in square brackets"));
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
    fn all_of_a_machine_is_all_of_version_4_where_there_is_no_other() {
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
