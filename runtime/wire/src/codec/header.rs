//! The fixed part of a frame and the descriptors of its tensors, as values and as bytes. Pure.

use super::Limits;
use super::malformed::Malformed;
use super::role::{FrameRole, PROTOCOL_VERSION};
use crate::tensor::{DType, MAX_RANK, Shape, Tensor};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 36;

/// Bytes of a tensor's descriptor.
pub(super) const DESCRIPTOR_BYTES: usize = 40;

const MAGIC: u32 = u32::from_le_bytes(*b"RTWF");
const SUMMED_BYTES: usize = HEADER_BYTES - 4;

/// A header whose checksum and limits have been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: u16,
    pub role: FrameRole,
    pub tensors: u16,
    pub meta_bytes: u32,
    pub request_id: u64,
    /// Bytes of descriptors, structured part and payloads.
    pub body_bytes: u64,
}

impl Header {
    /// Bytes of the frame with this header: header, body and body checksum.
    pub fn frame_bytes(&self) -> u64 {
        HEADER_BYTES as u64 + self.body_bytes + 4
    }

    /// Bytes of the descriptors and the structured part.
    pub(super) fn prefix_bytes(&self) -> u64 {
        u64::from(self.tensors) * DESCRIPTOR_BYTES as u64 + u64::from(self.meta_bytes)
    }

    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        put(&mut bytes, 0, MAGIC.to_le_bytes());
        put(&mut bytes, 4, PROTOCOL_VERSION.to_le_bytes());
        put(&mut bytes, 6, self.kind.to_le_bytes());
        put(&mut bytes, 8, (self.role as u16).to_le_bytes());
        put(&mut bytes, 10, self.tensors.to_le_bytes());
        put(&mut bytes, 12, self.meta_bytes.to_le_bytes());
        put(&mut bytes, 16, self.request_id.to_le_bytes());
        put(&mut bytes, 24, self.body_bytes.to_le_bytes());
        let checksum = crc32fast::hash(&bytes[..SUMMED_BYTES]);
        put(&mut bytes, SUMMED_BYTES, checksum.to_le_bytes());
        bytes
    }

    /// Reads a header. It checks magic and version before the checksum, so that the error names
    /// another protocol's bytes as such.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES], limits: &Limits) -> Result<Self, Malformed> {
        let magic = u32::from_le_bytes(get(bytes, 0));
        if magic != MAGIC {
            return Err(Malformed::Magic { found: magic });
        }
        let version = u16::from_le_bytes(get(bytes, 4));
        if version != PROTOCOL_VERSION {
            return Err(Malformed::Version { found: version });
        }
        let stated = u32::from_le_bytes(get(bytes, SUMMED_BYTES));
        let computed = crc32fast::hash(&bytes[..SUMMED_BYTES]);
        if stated != computed {
            return Err(Malformed::HeaderChecksum { stated, computed });
        }
        let role = u16::from_le_bytes(get(bytes, 8));
        let header = Self {
            kind: u16::from_le_bytes(get(bytes, 6)),
            role: FrameRole::from_number(role).ok_or(Malformed::Role { found: role })?,
            tensors: u16::from_le_bytes(get(bytes, 10)),
            meta_bytes: u32::from_le_bytes(get(bytes, 12)),
            request_id: u64::from_le_bytes(get(bytes, 16)),
            body_bytes: u64::from_le_bytes(get(bytes, 24)),
        };
        header.check(limits)?;
        Ok(header)
    }

    /// Checks the lengths against the limits and against one another.
    pub(super) fn check(&self, limits: &Limits) -> Result<(), Malformed> {
        if self.body_bytes > limits.max_frame_bytes {
            let limit = limits.max_frame_bytes;
            return Err(Malformed::FrameLength { bytes: self.body_bytes, limit });
        }
        if self.meta_bytes > limits.max_meta_bytes {
            let limit = limits.max_meta_bytes;
            return Err(Malformed::MetaLength { bytes: self.meta_bytes.into(), limit });
        }
        if self.prefix_bytes() > self.body_bytes {
            let (stated, needed) = (self.body_bytes, self.prefix_bytes());
            return Err(Malformed::BodyLength { stated, needed });
        }
        Ok(())
    }
}

/// Type, shape and size of one tensor's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) dtype: DType,
    pub(super) shape: Shape,
    pub(super) elements: usize,
}

impl Descriptor {
    pub(super) fn encode(tensor: &Tensor) -> [u8; DESCRIPTOR_BYTES] {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[0] = tensor.dtype() as u8;
        bytes[1] = tensor.dims().len() as u8;
        for (i, dim) in tensor.dims().iter().enumerate() {
            put(&mut bytes, 8 + 8 * i, (*dim as u64).to_le_bytes());
        }
        put(&mut bytes, 32, (tensor.byte_len() as u64).to_le_bytes());
        bytes
    }

    fn decode(tensor: usize, bytes: &[u8; DESCRIPTOR_BYTES]) -> Result<Self, Malformed> {
        let (number, rank) = (bytes[0], bytes[1]);
        let dtype = DType::from_number(number).ok_or(Malformed::DType { tensor, found: number })?;
        let dims: [u64; MAX_RANK] = [0, 1, 2].map(|i| u64::from_le_bytes(get(bytes, 8 + 8 * i)));
        let canonical = bytes[2..8] == [0; 6]
            && usize::from(rank) <= MAX_RANK
            && dims.iter().skip(rank.into()).all(|dim| *dim == 0);
        if !canonical {
            return Err(Malformed::Descriptor { tensor, rank });
        }
        let stated = u64::from_le_bytes(get(bytes, 32));
        let wrong_length = Malformed::TensorLength { tensor, dims, size: dtype.size(), stated };
        let Some((shape, elements)) = shape_of(&dims[..rank.into()]) else {
            return Err(wrong_length);
        };
        if (elements as u64).checked_mul(dtype.size() as u64) != Some(stated) {
            return Err(wrong_length);
        }
        Ok(Self { dtype, shape, elements })
    }

    /// The descriptors at the start of a body, checked against the header's lengths.
    pub(super) fn decode_all(header: &Header, prefix: &[u8]) -> Result<Vec<Self>, Malformed> {
        let descriptors = &prefix[..usize::from(header.tensors) * DESCRIPTOR_BYTES];
        let mut all = Vec::with_capacity(header.tensors.into());
        let mut needed = u128::from(header.prefix_bytes());
        for (tensor, bytes) in descriptors.chunks_exact(DESCRIPTOR_BYTES).enumerate() {
            let descriptor = Self::decode(tensor, &get(bytes, 0))?;
            needed += descriptor.bytes() as u128;
            all.push(descriptor);
        }
        if needed != u128::from(header.body_bytes) {
            let needed = u64::try_from(needed).unwrap_or(u64::MAX);
            return Err(Malformed::BodyLength { stated: header.body_bytes, needed });
        }
        Ok(all)
    }

    /// Bytes of the payload.
    fn bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }
}

fn shape_of(dims: &[u64]) -> Option<(Shape, usize)> {
    let mut sizes = [0; MAX_RANK];
    for (size, dim) in sizes.iter_mut().zip(dims) {
        *size = usize::try_from(*dim).ok()?;
    }
    let shape = Shape::new(&sizes[..dims.len()]).ok()?;
    Some((shape, shape.elements()?))
}

fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

fn get<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[at..at + N]);
    value
}
