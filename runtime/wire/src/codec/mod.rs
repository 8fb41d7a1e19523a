//! Frames and their bytes. Nothing here knows a socket or a clock: the caller feeds bytes to the
//! decoder and takes them from the encoder, so both can be tested and fuzzed alone. `tcp` is the
//! caller.
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
//! The checksum is CRC-32 (IEEE), the cheapest candidate. crc32fast picks carry-less multiplication
//! of up to 512 bits at run time: 58 GB/s in the second-level cache of an AVX-512 server. xxh3 is
//! only as wide as the target the binary was compiled for: 14 GB/s there. The checksum is updated
//! piece by piece, as bytes pass through the cache on their way to and from the socket.

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

/// A message: its kind, a small structured part, and tensors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Frame {
    /// The kind of message; the caller assigns the numbers.
    pub kind: u16,
    /// The structured part: small, in the caller's own encoding.
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

    /// Takes the tensors out of the message `name`.
    ///
    /// # Errors
    /// Any other number of tensors than `N`.
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

/// The limits of a receiver. The sender checks them before it sends.
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

/// Why a receiver refuses bytes as a frame. It then closes the connection they came on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    #[error("it begins with {found:#010x}, which is not Rectrain's magic number")]
    Magic { found: u32 },
    #[error(
        "it has protocol version {found}, and this side speaks {PROTOCOL_VERSION}; run the same release on both sides"
    )]
    Version { found: u16 },
    #[error("the header's checksum is {computed:#010x}, and the header states {stated:#010x}")]
    HeaderChecksum { stated: u32, computed: u32 },
    #[error("its role {found} is unknown")]
    Role { found: u16 },
    #[error("its body has {bytes} bytes, and the limit max_frame_bytes is {limit}")]
    FrameLength { bytes: u64, limit: u64 },
    #[error("its structured part has {bytes} bytes, and the limit max_meta_bytes is {limit}")]
    MetaLength { bytes: u64, limit: u32 },
    #[error("it has {found} tensors, and a frame has at most {}", u16::MAX)]
    TensorCount { found: usize },
    #[error("its body has {stated} bytes, and its parts need {needed}")]
    BodyLength { stated: u64, needed: u64 },
    #[error("tensor {tensor} has the unknown element type {found}")]
    DType { tensor: usize, found: u8 },
    #[error("tensor {tensor} has a descriptor that is not canonical (rank {rank})")]
    Descriptor { tensor: usize, rank: u8 },
    #[error("tensor {tensor} has {stated} bytes, which is wrong for its shape {dims:?} of {size}-byte elements")]
    TensorLength { tensor: usize, dims: [u64; 3], size: usize, stated: u64 },
    #[error("the body's checksum is {computed:#010x}, and the frame states {stated:#010x}")]
    BodyChecksum { stated: u32, computed: u32 },
    #[error("it ends in the middle of a frame")]
    Truncated,
    #[error("a {role:?} with request id {request_id} was not expected here")]
    Unexpected { role: FrameRole, request_id: u64 },
}

impl Malformed {
    /// Every label that [`Self::reason`] returns.
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
