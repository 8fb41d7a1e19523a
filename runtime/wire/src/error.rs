//! The errors of the wire, as sentences for a user: the attempt, the peer, the cause, and the
//! remedy. Also [`Refusal`], the answer of a service that declines a request.

use std::fmt;
use std::io;
use std::time::Duration;

use crate::codec::malformed::Malformed;

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
    /// The other side does not accept this side as a member of the job, and closed the connection.
    /// Nothing was done.
    #[error("{attempted} at {peer} failed because it does not trust this process's certificate: {reason}")]
    Distrusted { peer: String, attempted: String, reason: String },
    /// No connection could be made until the call's deadline; nothing was sent.
    #[error(
        "{attempted}: {peer} could not be reached within {after:?} ({attempts} attempts; the last \
         failed with: {last}); check that it runs and that the address is right"
    )]
    Unreachable { peer: String, attempted: String, after: Duration, attempts: u32, last: String },
    /// The service declined the request.
    #[error("{peer} refused {attempted}: {refusal}")]
    Refused { peer: String, attempted: String, refusal: Refusal },
    /// Bytes arrived that are not a frame this version can accept.
    #[error("{peer} sent bytes that are not a valid frame: {malformed}")]
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
    #[error("could not serve on {address}: there is no tokio runtime here; call it inside a tokio runtime")]
    NoRuntime { address: String },
    /// A tensor, or a list of tensors, does not fit the message.
    #[error("{name}: expected {expected}, found {found}")]
    Tensor { name: String, expected: String, found: String },
    /// Metrics could not be registered.
    #[error("could not register the wire's metrics: {0}; register them once per registry")]
    Metrics(#[from] prometheus::Error),
}

impl WireError {
    /// True if the same call may succeed when it is repeated, with nothing else changed.
    ///
    /// That holds after a lost connection, a passed deadline, an unreachable peer and a retryable
    /// refusal. The caller must know whether repeating the work is harmless.
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

    /// Every label that [`Self::label`] returns for a call.
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

/// Why a service declines a request. Travels as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefusalCode {
    /// The service failed: a panic, or a reply that cannot be sent.
    Internal,
    /// The request itself is wrong, and repeating it will not help.
    InvalidRequest,
    /// The service does not know this kind of request.
    UnknownKind,
    /// The request names something that does not exist (any longer, or yet).
    NotFound,
    /// The request was made under an old epoch of the slot map; fetch the new one.
    StaleEpoch,
    /// The service cannot do this in its current state (not configured, draining).
    NotReady,
    /// The request would exceed a limit of the service.
    Exhausted,
    /// The service abandoned the work because it is stopping or the job was cancelled.
    Cancelled,
    /// A meaning defined by the roles; any number from 256 on.
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

    /// Every label that [`Self::label`] returns.
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

    /// The number on the wire.
    pub fn number(self) -> u16 {
        match self {
            Self::Application(number) => number,
            code => Self::TABLE.iter().find(|(_, c)| *c == code).map_or(1, |(n, _)| *n),
        }
    }

    /// The code of a number. Numbers that this version does not know become `Application`.
    pub fn from_number(number: u16) -> Self {
        Self::TABLE.iter().find(|(n, _)| *n == number).map_or(Self::Application(number), |(_, code)| *code)
    }
}

/// The answer of a service that declines a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub code: RefusalCode,
    /// One sentence for a human.
    pub message: String,
    /// Whether the same request may succeed later.
    pub retryable: bool,
}

/// Longer messages are cut to this many bytes when they are sent.
const MAX_MESSAGE_BYTES: usize = 4096;

impl Refusal {
    /// A refusal that stays the same when the request is repeated.
    pub fn new(code: RefusalCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), retryable: false }
    }

    /// A refusal that may go away when the request is repeated later.
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

    /// Reads the output of [`Refusal::to_bytes`]. Any other bytes become an internal refusal that
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
        f.write_str(if self.retryable { ", retryable)" } else { ")" })
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
