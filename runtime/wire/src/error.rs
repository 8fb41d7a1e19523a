//! What can go wrong on the wire, said so that the sentence can be shown to a user: what was
//! attempted, with whom, and what to do. Also [`Refusal`], the answer of a service that will not
//! do what it was asked.

use std::fmt;
use std::io;
use std::time::Duration;

use crate::codec::Malformed;

/// Every failure of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The call's deadline passed. The callee may or may not have done the work.
    #[error("{attempted} at {peer} did not finish within {after:?}: it was still {stage}")]
    Deadline { peer: String, attempted: String, after: Duration, stage: &'static str },
    /// The connection was lost, or the service stopped, while the call was pending. The callee
    /// may or may not have done the work.
    #[error("{attempted} at {peer} failed because the connection closed: {reason}")]
    Closed { peer: String, attempted: String, reason: String },
    /// The other side does not take this one for a member of the job, and closed the connection; nothing was done.
    #[error("{attempted} at {peer} failed because it does not trust this process's certificate: {reason}")]
    Distrusted { peer: String, attempted: String, reason: String },
    /// No connection could be made until the call's deadline; nothing was sent.
    #[error(
        "{attempted}: {peer} could not be reached within {after:?} ({attempts} attempts; the last \
         failed with: {last}); check that it runs and that the address is right"
    )]
    Unreachable { peer: String, attempted: String, after: Duration, attempts: u32, last: String },
    /// The service answered that it will not do it.
    #[error("{peer} refused {attempted}: {refusal}")]
    Refused { peer: String, attempted: String, refusal: Refusal },
    /// Bytes arrived that are not a frame this version can accept.
    #[error("{peer} sent what is not a frame: {malformed}")]
    Malformed { peer: String, malformed: Malformed },
    /// A frame was not sent because the receiver would refuse it.
    #[error("{attempted} to {peer} was not sent: {malformed}; send it in smaller parts or raise the limit")]
    Unsendable { peer: String, attempted: String, malformed: Malformed },
    /// An address could not be read.
    #[error("{text:?} is not an address: {reason}; write tcp://HOST:PORT or local://NAME")]
    Address { text: String, reason: &'static str },
    /// The transport does not serve this kind of address.
    #[error("the {transport} transport cannot use {address}: its addresses are {expected}")]
    WrongScheme { transport: &'static str, address: String, expected: &'static str },
    /// A service could not be bound.
    #[error("could not serve on {address}: {source}")]
    Bind { address: String, source: io::Error },
    /// The transport was used outside a tokio runtime.
    #[error("could not serve on {address}: there is no tokio runtime here; call it from inside one")]
    NoRuntime { address: String },
    /// A tensor, or a list of tensors, is not what the message needs.
    #[error("{name}: expected {expected}, found {found}")]
    Tensor { name: String, expected: String, found: String },
    /// Metrics could not be registered.
    #[error("could not register the wire's metrics: {0}; register them once per registry")]
    Metrics(#[from] prometheus::Error),
}

impl WireError {
    /// Whether the same call may succeed if it is made again, with nothing else changed.
    ///
    /// True after a lost connection, a passed deadline, an unreachable peer and a refusal marked
    /// retryable. The caller must know whether doing the work twice is harmless.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Deadline { .. } | Self::Closed { .. } | Self::Unreachable { .. } => true,
            Self::Refused { refusal, .. } => refusal.retryable,
            _ => false,
        }
    }

    /// The refusal, if the service answered with one.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Refused { refusal, .. } => Some(refusal),
            _ => None,
        }
    }

    /// What [`Self::label`] gives of calls.
    pub(crate) const LABELS: [&str; 8] =
        ["deadline", "closed", "distrusted", "unreachable", "refused", "malformed", "unsendable", "other"];

    /// A short label for metrics.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Deadline { .. } => "deadline",
            Self::Closed { .. } => "closed",
            Self::Distrusted { .. } => "distrusted",
            Self::Unreachable { .. } => "unreachable",
            Self::Refused { .. } => "refused",
            Self::Malformed { .. } => "malformed",
            Self::Unsendable { .. } => "unsendable",
            _ => "other",
        }
    }
}

/// Why a service will not do what it was asked; travels as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefusalCode {
    /// The service failed: a panic, or a reply that cannot be sent.
    Internal,
    /// The request itself is wrong and will be wrong again.
    InvalidRequest,
    /// The service does not know this kind of request.
    UnknownKind,
    /// What the request names does not exist (any more, or yet).
    NotFound,
    /// The request was made under an old epoch of the slot map; fetch the new one.
    StaleEpoch,
    /// The service is not in a state in which it can do this (not configured, draining).
    NotReady,
    /// A limit of the service would be passed.
    Exhausted,
    /// The work was given up because the service is stopping or the job was cancelled.
    Cancelled,
    /// A meaning that the roles give; any number from 256 on.
    Application(u16),
}

impl RefusalCode {
    const TABLE: [(u16, Self); 8] = [
        (1, Self::Internal),
        (2, Self::InvalidRequest),
        (3, Self::UnknownKind),
        (4, Self::NotFound),
        (5, Self::StaleEpoch),
        (6, Self::NotReady),
        (7, Self::Exhausted),
        (8, Self::Cancelled),
    ];

    /// All that [`Self::label`] gives.
    pub(crate) fn labels() -> impl Iterator<Item = String> {
        Self::TABLE.into_iter().map(|(_, code)| code).chain([Self::Application(256)]).map(Self::label)
    }

    /// A short label for metrics.
    pub(crate) fn label(self) -> String {
        match self {
            Self::Application(_) => "Application".to_owned(),
            code => format!("{code:?}"),
        }
    }

    /// The number that travels.
    pub fn number(self) -> u16 {
        match self {
            Self::Application(number) => number,
            code => Self::TABLE.iter().find(|(_, c)| *c == code).map_or(1, |(n, _)| *n),
        }
    }

    /// The code of a number; one that this version does not know stays an `Application` number.
    pub fn from_number(number: u16) -> Self {
        Self::TABLE.iter().find(|(n, _)| *n == number).map_or(Self::Application(number), |(_, code)| *code)
    }
}

/// A service's answer that it will not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub code: RefusalCode,
    /// One sentence for a person.
    pub message: String,
    /// Whether the same request may succeed later.
    pub retryable: bool,
}

/// Longer messages are cut at this many bytes when they travel.
const MAX_MESSAGE_BYTES: usize = 4096;

impl Refusal {
    /// A refusal that will not change when the request is repeated.
    pub fn new(code: RefusalCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), retryable: false }
    }

    /// A refusal that may change when the request is repeated later.
    pub fn retryable(code: RefusalCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), retryable: true }
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut end = self.message.len().min(MAX_MESSAGE_BYTES);
        while !self.message.is_char_boundary(end) {
            end -= 1;
        }
        let mut bytes = Vec::with_capacity(3 + end);
        bytes.extend_from_slice(&self.code.number().to_le_bytes());
        bytes.push(u8::from(self.retryable));
        bytes.extend_from_slice(&self.message.as_bytes()[..end]);
        bytes
    }

    /// Reads what [`Refusal::to_bytes`] wrote; anything else becomes an internal refusal that
    /// says so, because a refusal must never be lost.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        match bytes {
            [low, high, retryable, message @ ..] => Self {
                code: RefusalCode::from_number(u16::from_le_bytes([*low, *high])),
                message: String::from_utf8_lossy(&message[..message.len().min(MAX_MESSAGE_BYTES)]).into_owned(),
                retryable: *retryable != 0,
            },
            _ => Self::new(RefusalCode::Internal, "the refusal came without a reason"),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?}", self.message, self.code)?;
        f.write_str(if self.retryable { ", may be tried again)" } else { ")" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_code_survives_the_wire() {
        for number in 0..=u16::MAX {
            assert_eq!(RefusalCode::from_number(number).number(), number);
        }
    }

    #[test]
    fn a_long_message_is_cut_at_a_character() {
        let refusal = Refusal::retryable(RefusalCode::StaleEpoch, "ü".repeat(4000));
        let back = Refusal::from_bytes(&refusal.to_bytes());
        assert_eq!(back.message, "ü".repeat(MAX_MESSAGE_BYTES / 2));
        assert_eq!((back.code, back.retryable), (RefusalCode::StaleEpoch, true));
        assert_eq!(Refusal::from_bytes(&[7]).code, RefusalCode::Internal);
    }
}
