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
pub(crate) mod malformed;
mod role;

#[cfg(test)]
mod tests;

use bytes::Bytes;

use crate::error::WireError;
use crate::tensor::Tensor;

pub use decode::{DecodedFrame, FrameDecoder, decode_frame};
pub(crate) use encode::Outgoing;
pub use encode::encode_frame;
pub use header::{HEADER_BYTES, Header};
pub use malformed::Malformed;
pub use role::{FrameRole, PROTOCOL_VERSION};

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
