//! The data plane of Rectrain: what moves tensors between roles.
//!
//! A role hands a [`Frame`] (a kind, a small structured part, and tensors) to a [`Channel`] and
//! gets a frame back; the other side is a [`Service`]. Two [`Transport`]s carry frames:
//! [`TcpTransport`] between processes, where a tensor goes from its vector to the socket and from
//! the socket into a new vector with no buffer in between, and [`InProcess`], which moves the
//! vectors themselves. Both keep the same promises about deadlines, back-pressure, refusals and
//! panics, and both count into the same [`WireCounters`].
//!
//! The crate knows nothing of parameters, steps or modes: kinds are numbers and the structured
//! part is the caller's bytes. `roles` is its caller; [`ids`] and [`compress`] hold the two
//! encodings of Persia §4.2.3 that roles apply to what they put into frames.
//!
//! ```text
//!  codec   bytes <-> frames; no socket, no clock       tensor  typed vectors with a shape
//!  tcp     sockets around the codec                    local   the same without bytes
//!  transport  Service, Transport, Channel, Serving     metrics what is counted
//!  tls     whom both sides of a TCP connection take for a member of the job
//! ```

#[cfg(target_endian = "big")]
compile_error!(
    "frames are little-endian memory images: a big-endian machine would need conversions that are not written"
);

mod address;
mod codec;
pub mod compress;
mod error;
pub mod ids;
mod local;
mod metrics;
mod spare;
mod tcp;
mod tensor;
pub mod tls;
pub mod transport;

pub use address::{Address, listening_at};
pub use codec::{
    DecodedFrame, Frame, FrameDecoder, FrameRole, HEADER_BYTES, Header, Limits, Malformed, PROTOCOL_VERSION,
    decode_frame, encode_frame,
};
pub use error::{Refusal, RefusalCode, WireError};
pub use local::{InProcess, InProcessConfig};
pub use metrics::{KindTraffic, REFERENCE as METRICS_REFERENCE, WireCounters};
pub use tcp::{TcpConfig, TcpTransport};
pub use tensor::{DType, MAX_RANK, Shape, Tensor, TensorData};
pub use transport::{BoxFuture, Channel, Peer, Service, Serving, Transport};
