//! Where a service is: a host and port for TCP, a name for a service of this process.

use std::fmt;
use std::str::FromStr;

use crate::error::WireError;

/// The address of a service; its text form is what manifests and logs show.
///
/// `tcp://127.0.0.1:4000`, `tcp://ps-0.job.svc:4000`, `tcp://[::1]:4000`, `local://ps-0`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// A host (name, IPv4, or IPv6 without brackets) and a port; port 0 binds to any free port.
    Tcp { host: String, port: u16 },
    /// A name in the registry of one [`crate::InProcess`] transport.
    Local(String),
}

impl Address {
    /// `tcp://host:port`.
    pub fn tcp(host: impl Into<String>, port: u16) -> Self {
        Self::Tcp { host: host.into(), port }
    }

    /// `local://name`.
    pub fn local(name: impl Into<String>) -> Self {
        Self::Local(name.into())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
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
        Ok(Self::Tcp { host: host.to_owned(), port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_its_text_form() {
        for text in ["tcp://127.0.0.1:4000", "tcp://ps-0.ps.ns.svc:1", "tcp://[::1]:65535", "local://ps-0"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
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
        ] {
            let message = text.parse::<Address>().unwrap_err().to_string();
            assert!(message.contains(&format!("{text:?}")), "{message}");
        }
    }
}
