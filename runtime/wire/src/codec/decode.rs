//! The decoder: a state machine that says how many bytes it wants next, takes them from its caller,
//! and returns a frame when it has one. Payload bytes go straight into the tensor's vector. It
//! never panics on any input, and allocates memory only as bytes arrive.

use bytes::Bytes;
use crc32fast::Hasher;
use half::f16;
use tokio::io::ReadBuf;

use super::header::{DESCRIPTOR_BYTES, Descriptor};
use super::{Frame, FrameRole, HEADER_BYTES, Header, Limits, Malformed};
use crate::spare::Filling;
use crate::tensor::{DType, Tensor, TensorData};

/// A frame with its role and request id.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodedFrame {
    pub role: FrameRole,
    pub request_id: u64,
    pub frame: Frame,
    /// Size of the whole frame on the wire, in bytes.
    pub bytes: u64,
}

/// Decodes one frame after another from bytes that arrive in pieces of any size.
///
/// After an error the decoder no longer knows where a frame begins. It then returns the same error
/// for all further input.
pub struct FrameDecoder {
    limits: Limits,
    stage: Stage,
}

enum Stage {
    Header { bytes: [u8; HEADER_BYTES], filled: usize },
    Prefix { header: Header, bytes: Filling<u8> },
    Payloads(Box<Payloads>),
    Checksum { frame: DecodedFrame, computed: u32, bytes: [u8; 4], filled: usize },
    Failed(Malformed),
}

struct Payloads {
    header: Header,
    meta: Bytes,
    descriptors: Vec<Descriptor>,
    tensors: Vec<Tensor>,
    current: TensorFilling,
    checksum: Hasher,
}

impl Stage {
    const START: Self = Self::Header { bytes: [0; HEADER_BYTES], filled: 0 };
}

impl FrameDecoder {
    /// A decoder at the start of a frame.
    pub fn new(limits: Limits) -> Self {
        Self { limits, stage: Stage::START }
    }

    /// True if no byte of the next frame has been fed yet.
    pub fn is_between_frames(&self) -> bool {
        matches!(self.stage, Stage::Header { filled: 0, .. })
    }

    /// Bytes that can be fed now without a copy: the missing part of a tensor, otherwise 0.
    pub(crate) fn direct(&self) -> usize {
        match &self.stage {
            Stage::Payloads(payloads) => payloads.current.missing(),
            _ => 0,
        }
    }

    /// Lends `read` the memory for the next bytes: at least one byte and at most `most`. Returns
    /// the result of `read`, and the frame if it is now complete.
    pub fn fill<R>(
        &mut self,
        most: usize,
        read: impl FnOnce(&mut ReadBuf<'_>) -> R,
    ) -> Result<(R, Option<DecodedFrame>), Malformed> {
        let result = match &mut self.stage {
            Stage::Header { bytes, filled } => fill_array(bytes, filled, most, read),
            Stage::Prefix { bytes, .. } => bytes.fill(most, read).0,
            Stage::Payloads(payloads) => payloads.fill(most, read),
            Stage::Checksum { bytes, filled, .. } => fill_array(bytes, filled, most, read),
            Stage::Failed(malformed) => return Err(malformed.clone()),
        };
        match self.advance() {
            Ok(frame) => Ok((result, frame)),
            Err(malformed) => {
                self.stage = Stage::Failed(malformed.clone());
                Err(malformed)
            }
        }
    }

    /// Goes to the next stage for as long as the current one has all its bytes.
    fn advance(&mut self) -> Result<Option<DecodedFrame>, Malformed> {
        loop {
            let whole = match &self.stage {
                Stage::Header { filled, .. } => *filled == HEADER_BYTES,
                Stage::Prefix { bytes, .. } => bytes.missing() == 0,
                Stage::Payloads(payloads) => payloads.current.missing() == 0,
                Stage::Checksum { filled, .. } => *filled == 4,
                Stage::Failed(_) => false,
            };
            if !whole {
                return Ok(None);
            }
            self.stage = match std::mem::replace(&mut self.stage, Stage::START) {
                Stage::Header { bytes, .. } => {
                    let header = Header::decode(&bytes, &self.limits)?;
                    // At most 65,535 descriptors and the limited structured part: fits a usize.
                    let prefix = header.prefix_bytes() as usize;
                    Stage::Prefix { header, bytes: Filling::new(prefix) }
                }
                Stage::Prefix { header, bytes } => Payloads::start(header, bytes.finish())?,
                Stage::Payloads(payloads) => payloads.next(),
                Stage::Checksum { frame, computed, bytes, .. } => {
                    let stated = u32::from_le_bytes(bytes);
                    if stated != computed {
                        return Err(Malformed::BodyChecksum { stated, computed });
                    }
                    return Ok(Some(frame));
                }
                Stage::Failed(malformed) => return Err(malformed),
            };
        }
    }
}

impl Payloads {
    fn start(header: Header, prefix: Vec<u8>) -> Result<Stage, Malformed> {
        let descriptors = Descriptor::decode_all(&header, &prefix)?;
        let mut checksum = Hasher::new();
        checksum.update(&prefix);
        let meta = Bytes::from(prefix).slice(descriptors.len() * DESCRIPTOR_BYTES..);
        let tensors = Vec::with_capacity(descriptors.len());
        Ok(match descriptors.first() {
            None => checksum_stage(header, meta, tensors, checksum),
            Some(first) => {
                let current = TensorFilling::new(first);
                Stage::Payloads(Box::new(Self { header, meta, descriptors, tensors, current, checksum }))
            }
        })
    }

    fn fill<R>(&mut self, most: usize, read: impl FnOnce(&mut ReadBuf<'_>) -> R) -> R {
        let before = self.current.filled();
        let result = self.current.fill(most, read);
        self.checksum.update(self.current.arrived(before));
        result
    }

    /// Stores the tensor, which is now complete, and starts the next one or the checksum.
    fn next(mut self: Box<Self>) -> Stage {
        let descriptor = self.descriptors[self.tensors.len()];
        match self.descriptors.get(self.tensors.len() + 1) {
            Some(following) => {
                let filled = std::mem::replace(&mut self.current, TensorFilling::new(following));
                self.tensors.push(Tensor::from_checked(descriptor.shape, filled.finish()));
                Stage::Payloads(self)
            }
            None => {
                let Self { header, meta, mut tensors, current, checksum, .. } = *self;
                tensors.push(Tensor::from_checked(descriptor.shape, current.finish()));
                checksum_stage(header, meta, tensors, checksum)
            }
        }
    }
}

fn checksum_stage(header: Header, meta: Bytes, tensors: Vec<Tensor>, checksum: Hasher) -> Stage {
    Stage::Checksum {
        frame: DecodedFrame {
            role: header.role,
            request_id: header.request_id,
            frame: Frame { kind: header.kind, meta, tensors },
            bytes: header.frame_bytes(),
        },
        computed: checksum.finalize(),
        bytes: [0; 4],
        filled: 0,
    }
}

fn fill_array<R>(bytes: &mut [u8], filled: &mut usize, most: usize, read: impl FnOnce(&mut ReadBuf<'_>) -> R) -> R {
    let end = bytes.len().min(filled.saturating_add(most));
    let mut buffer = ReadBuf::new(&mut bytes[*filled..end]);
    let result = read(&mut buffer);
    let count = buffer.filled().len();
    *filled = end.min(*filled + count);
    result
}

/// The tensor that is being filled, by element type.
enum TensorFilling {
    F32(Filling<f32>),
    F16(Filling<f16>),
    U64(Filling<u64>),
    U32(Filling<u32>),
    U16(Filling<u16>),
    U8(Filling<u8>),
}

/// Runs the same expression on the vector of any element type.
macro_rules! each {
    ($data:expr, $filling:ident => $body:expr) => {
        match $data {
            TensorFilling::F32($filling) => $body,
            TensorFilling::F16($filling) => $body,
            TensorFilling::U64($filling) => $body,
            TensorFilling::U32($filling) => $body,
            TensorFilling::U16($filling) => $body,
            TensorFilling::U8($filling) => $body,
        }
    };
}

impl TensorFilling {
    fn new(descriptor: &Descriptor) -> Self {
        let elements = descriptor.elements;
        match descriptor.dtype {
            DType::F32 => Self::F32(Filling::new(elements)),
            DType::F16 => Self::F16(Filling::new(elements)),
            DType::U64 => Self::U64(Filling::new(elements)),
            DType::U32 => Self::U32(Filling::new(elements)),
            DType::U16 => Self::U16(Filling::new(elements)),
            DType::U8 => Self::U8(Filling::new(elements)),
        }
    }

    fn missing(&self) -> usize {
        each!(self, filling => filling.missing())
    }

    fn filled(&self) -> usize {
        each!(self, filling => filling.filled())
    }

    fn arrived(&self, from: usize) -> &[u8] {
        each!(self, filling => filling.arrived(from))
    }

    fn fill<R>(&mut self, most: usize, read: impl FnOnce(&mut ReadBuf<'_>) -> R) -> R {
        each!(self, filling => filling.fill(most, read).0)
    }

    fn finish(self) -> TensorData {
        each!(self, filling => TensorData::from(filling.finish()))
    }
}

/// Decodes the frame at the start of `bytes`, and returns it with its length. Never panics.
///
/// # Errors
/// [`Malformed::Truncated`] if `bytes` ends before the frame does.
pub fn decode_frame(bytes: &[u8], limits: &Limits) -> Result<(DecodedFrame, usize), Malformed> {
    let mut decoder = FrameDecoder::new(*limits);
    let mut taken = 0;
    while taken < bytes.len() {
        let (count, frame) = decoder.fill(bytes.len() - taken, |buffer| {
            let count = buffer.remaining().min(bytes.len() - taken);
            buffer.put_slice(&bytes[taken..taken + count]);
            count
        })?;
        taken += count;
        if let Some(frame) = frame {
            return Ok((frame, taken));
        }
    }
    Err(Malformed::Truncated)
}
