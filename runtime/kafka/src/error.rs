//! Errors of the client. Each message is one sentence that names the broker or the partition.

use std::fmt;

/// Every error of this crate.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum KafkaError {
    /// A broker cannot be reached, or the connection ended.
    #[error("cannot reach the broker {broker}: {problem}")]
    Unreachable {
        /// Its address.
        broker: String,
        /// The reason.
        problem: String,
    },
    /// The broker refused the user's name or password.
    #[error("the broker {broker} refused the user: {problem}")]
    Refused {
        /// Its address.
        broker: String,
        /// The broker's reason.
        problem: String,
    },
    /// A certificate, a name or a password cannot be used.
    #[error("cannot connect securely: {problem}")]
    Security {
        /// The finding, and the expectation.
        problem: String,
    },
    /// The broker answered with an error.
    #[error("{subject}: the broker answered {code}")]
    Broker {
        /// The topic or partition.
        subject: String,
        /// The error.
        code: ErrorCode,
    },
    /// The answer of a broker cannot be read.
    #[error("{subject}: the answer cannot be read: {problem}")]
    Malformed {
        /// The request, topic or partition.
        subject: String,
        /// The finding.
        problem: String,
    },
}

impl KafkaError {
    /// Whether a later attempt may succeed: a broker restarts, or a partition gets another leader.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Broker { code, .. } => code.is_transient(),
            Self::Refused { .. } | Self::Security { .. } | Self::Malformed { .. } => false,
        }
    }
}

/// An error code of Kafka's protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorCode(pub i16);

impl ErrorCode {
    /// No error.
    pub const NONE: Self = Self(0);
    /// The offset is not one of the partition's.
    pub const OFFSET_OUT_OF_RANGE: Self = Self(1);
    /// A record batch with a wrong checksum.
    pub const CORRUPT_MESSAGE: Self = Self(2);
    /// There is no such topic or partition.
    pub const UNKNOWN_TOPIC_OR_PARTITION: Self = Self(3);
    /// The user may not read or write the topic.
    pub const TOPIC_AUTHORIZATION_FAILED: Self = Self(29);
    /// The broker does not know the mechanism of SASL.
    pub const UNSUPPORTED_SASL_MECHANISM: Self = Self(33);
    /// The broker does not know the version of a request.
    pub const UNSUPPORTED_VERSION: Self = Self(35);
    /// The topic exists already.
    pub const TOPIC_ALREADY_EXISTS: Self = Self(36);

    /// Whether a later attempt may succeed.
    #[must_use]
    pub fn is_transient(self) -> bool {
        matches!(self.0, 3 | 5 | 6 | 7 | 8 | 9 | 13 | 14 | 15 | 16 | 19 | 20 | 56 | 70 | 71 | 74 | 75 | 78)
    }

    fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            0 => "no error",
            1 => "that the offset is out of range",
            2 => "that a record is corrupt",
            3 => "that there is no such topic or partition",
            5 => "that the partition has no leader now",
            6 => "that another broker leads the partition",
            7 => "that the request took too long",
            10 => "that the record is too large",
            14..=16 => "that the offsets of the group cannot be read or written now",
            17 => "that the name of the topic is not allowed",
            22 | 25 => "that consumers are members of the group",
            29 => "that the user may not use the topic",
            30 => "that the user may not use the group",
            31 => "that the user may not use the cluster",
            33 => "that it does not know the SASL mechanism",
            35 => "that it does not know the version of the request",
            36 => "that the topic exists already",
            58 => "that the name or the password is wrong",
            76 => "that it does not know the compression",
            _ => return None,
        })
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} (error {})", self.0),
            None => write!(f, "error {} of Kafka's protocol", self.0),
        }
    }
}
