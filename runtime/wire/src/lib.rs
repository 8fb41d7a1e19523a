//! The data plane of Rectrain: it moves tensors between roles.
//!
//! A role hands a [`Frame`] (a kind, a small structured part, and tensors) to a [`Channel`] and
//! gets a frame back. The other side is a [`Service`]. Two [`Transport`]s carry frames:
//!
//! - [`TcpTransport`] works between processes. A tensor goes from its vector to the socket, and
//!   from the socket into a new vector, with no buffer in between.
//! - [`InProcess`] moves the vectors themselves.
//!
//! Both make the same guarantees about deadlines, back-pressure, refusals and panics. Both count
//! into the same [`WireCounters`].
//!
//! The crate knows nothing of parameters, steps or modes: kinds are numbers, and the structured
//! part is the caller's bytes. `roles` is its caller. [`ids`] and [`compress`] hold the two
//! encodings of Persia §4.2.3 that roles apply before they fill a frame.
//!
//! ```text
//!  codec   bytes <-> frames; no socket, no clock       tensor  typed vectors with a shape
//!  tcp     sockets around the codec                    local   the same without bytes
//!  transport  Service, Transport, Channel, Serving     progress  how far a call has come
//!  tls     certificates of a job's members             metrics   counters of all transports
//! ```
//!
//! A new transport is one file beside `local` and a `mod` line here: it implements [`Transport`]
//! and the two traits behind [`Channel`] and [`Serving`]. No other module lists the transports.

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
mod progress;
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
pub use tcp::{PacedLink, TcpConfig, TcpTransport};
pub use tensor::{DType, MAX_RANK, Shape, Tensor, TensorData};
pub use transport::{BoxFuture, Channel, Peer, Service, Serving, Transport};
