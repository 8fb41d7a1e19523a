//! Frames and their bytes. Nothing here knows a socket or a clock: the decoder is fed bytes and
//! the encoder lends them, so both can be tested and fuzzed alone. `tcp` is the caller.
//!
//! All numbers are little-endian.
//!
//! ```text
//!  header, 36 bytes                         then
//!   0  u32  magic "RTWF"                      tensors × descriptor, 40 bytes each:
//!   4  u16  protocol version                     0  u8      element type
//!   6  u16  kind                                 1  u8      rank, 0..=3
//!   8  u16  role (request, reply, ...)           2  [u8;6]  zero
//!  10  u16  tensors                              8  3 × u64 dimensions; zero beyond the rank
//!  12  u32  meta bytes                          32  u64     bytes of the payload
//!  16  u64  request id                        meta
//!  24  u64  body bytes: descriptors, meta     payloads, in the descriptors' order, unpadded
//!           and payloads                      u32 CRC-32 of the body
//!  32  u32  CRC-32 of bytes 0..32
//! ```
//!
//! The checksum is CRC-32 (IEEE) because it was the cheaper of the candidates: crc32fast picks
//! carry-less multiplication of up to 512 bits at run time (58 GB/s in the second-level cache of
//! an AVX-512 server), while xxh3 is as wide as the target the binary was compiled for (14 GB/s
//! there). It is taken piece by piece as bytes pass through the cache on their way to and from the
//! socket.

mod decode;
mod encode;
mod header;

#[cfg(test)]
mod tests;

use bytes::Bytes;

use crate::error::WireError;
use crate::tensor::Tensor;

pub use decode::{DecodedFrame, FrameDecoder, decode_frame};
pub(crate) use encode::Outgoing;
pub use encode::encode_frame;
pub use header::{FrameRole, HEADER_BYTES, Header, PROTOCOL_VERSION};

/// A message: what it is, a small structured part, and tensors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Frame {
    /// What the message is; the numbers are the caller's.
    pub kind: u16,
    /// The structured part: the caller's own encoding, small.
    pub meta: Bytes,
    pub tensors: Vec<Tensor>,
}

impl Frame {
    /// A frame without tensors.
    pub fn new(kind: u16, meta: impl Into<Bytes>) -> Self {
        Self { kind, meta: meta.into(), tensors: Vec::new() }
    }

    /// The same frame with one more tensor.
    #[must_use]
    pub fn with(mut self, tensor: impl Into<Tensor>) -> Self {
        self.tensors.push(tensor.into());
        self
    }

    /// The tensors, when there are exactly `N`; an error that calls the message `name` otherwise.
    pub fn into_tensors<const N: usize>(self, name: &str) -> Result<[Tensor; N], WireError> {
        let found = self.tensors.len();
        self.tensors.try_into().map_err(|_| WireError::Tensor {
            name: name.to_owned(),
            expected: format!("{N} tensors"),
            found: format!("{found}"),
        })
    }

    /// Bytes of all tensors and the structured part.
    pub fn byte_len(&self) -> usize {
        self.meta.len() + self.tensors.iter().map(Tensor::byte_len).sum::<usize>()
    }
}

/// What a receiver accepts, and a sender therefore sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes of a frame's body. 1 GiB by default.
    pub max_frame_bytes: u64,
    /// The most bytes of a frame's structured part. 16 MiB by default.
    pub max_meta_bytes: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_frame_bytes: 1 << 30, max_meta_bytes: 16 << 20 }
    }
}

/// Why bytes are not a frame that can be accepted. The connection they came on is closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    #[error("it begins with {found:#010x}, which is not Rectrain's magic number")]
    Magic { found: u32 },
    #[error(
        "it has protocol version {found}, and this side speaks {PROTOCOL_VERSION}; run the same release on both sides"
    )]
    Version { found: u16 },
    #[error("the header's checksum is {computed:#010x} and not {stated:#010x} as stated")]
    HeaderChecksum { stated: u32, computed: u32 },
    #[error("the role {found} is not one")]
    Role { found: u16 },
    #[error("its body has {bytes} bytes, and the limit max_frame_bytes is {limit}")]
    FrameLength { bytes: u64, limit: u64 },
    #[error("its structured part has {bytes} bytes, and the limit max_meta_bytes is {limit}")]
    MetaLength { bytes: u64, limit: u32 },
    #[error("it has {found} tensors, and at most {} fit a frame", u16::MAX)]
    TensorCount { found: usize },
    #[error("its body has {stated} bytes, and its parts have {needed}")]
    BodyLength { stated: u64, needed: u64 },
    #[error("tensor {tensor} has the element type {found}, which is not one")]
    DType { tensor: usize, found: u8 },
    #[error("tensor {tensor} has a descriptor that is not canonical (rank {rank})")]
    Descriptor { tensor: usize, rank: u8 },
    #[error("tensor {tensor} has {stated} bytes, and its shape {dims:?} of {size}-byte elements needs another number")]
    TensorLength { tensor: usize, dims: [u64; 3], size: usize, stated: u64 },
    #[error("the body's checksum is {computed:#010x} and not {stated:#010x} as stated")]
    BodyChecksum { stated: u32, computed: u32 },
    #[error("it ends in the middle")]
    Truncated,
    #[error("a {role:?} with request id {request_id} was not expected here")]
    Unexpected { role: FrameRole, request_id: u64 },
}

impl Malformed {
    /// All that [`Self::reason`] gives.
    pub const REASONS: [&str; 14] = [
        "magic",
        "version",
        "header_checksum",
        "role",
        "frame_length",
        "meta_length",
        "tensor_count",
        "body_length",
        "dtype",
        "descriptor",
        "tensor_length",
        "body_checksum",
        "truncated",
        "unexpected",
    ];

    /// A short label for metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Magic { .. } => "magic",
            Self::Version { .. } => "version",
            Self::HeaderChecksum { .. } => "header_checksum",
            Self::Role { .. } => "role",
            Self::FrameLength { .. } => "frame_length",
            Self::MetaLength { .. } => "meta_length",
            Self::TensorCount { .. } => "tensor_count",
            Self::BodyLength { .. } => "body_length",
            Self::DType { .. } => "dtype",
            Self::Descriptor { .. } => "descriptor",
            Self::TensorLength { .. } => "tensor_length",
            Self::BodyChecksum { .. } => "body_checksum",
            Self::Truncated => "truncated",
            Self::Unexpected { .. } => "unexpected",
        }
    }
}
