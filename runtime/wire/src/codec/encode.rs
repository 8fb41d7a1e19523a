//! The encoder: lends a frame's bytes as slices of the frame's own memory, piece by piece. So one
//! vectored system call can write them without a copy. It updates the body's checksum with each
//! piece just before it lends it: the write needs these bytes in the cache anyway.

use std::io::IoSlice;

use crc32fast::Hasher;

use super::header::{DESCRIPTOR_BYTES, Descriptor};
use super::{Frame, FrameRole, HEADER_BYTES, Header, Limits, Malformed};
use crate::error::Refusal;

/// A position in the sequence of a frame's segments: header with descriptors, structured part,
/// payloads, checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Position {
    segment: usize,
    byte: usize,
}

/// A frame on its way out.
pub(crate) struct Outgoing {
    header: Header,
    head: Vec<u8>,
    frame: Frame,
    checksum: Hasher,
    trailer: [u8; 4],
    /// Everything before this position is in the checksum and may be lent.
    summed: Position,
    /// Everything before this position has been written.
    written: Position,
}

impl Outgoing {
    /// The frame, ready to be written.
    ///
    /// # Errors
    /// A frame that a receiver with these limits would refuse.
    pub(crate) fn new(role: FrameRole, request_id: u64, frame: Frame, limits: &Limits) -> Result<Self, Malformed> {
        let header = header_of(role, request_id, &frame, limits)?;
        Ok(Self::with_header(header, frame))
    }

    fn with_header(header: Header, frame: Frame) -> Self {
        let mut head = Vec::with_capacity(HEADER_BYTES + frame.tensors.len() * DESCRIPTOR_BYTES);
        head.extend_from_slice(&header.encode());
        for tensor in &frame.tensors {
            head.extend_from_slice(&Descriptor::encode(tensor));
        }
        let mut checksum = Hasher::new();
        checksum.update(&head[HEADER_BYTES..]);
        let summed = Position { segment: 1, byte: 0 };
        let written = Position::default();
        Self { header, head, frame, checksum, trailer: [0; 4], summed, written }
    }

    /// A refusal, ready to be written. Refusals are short, so no limit applies to them.
    pub(crate) fn refusal(role: FrameRole, kind: u16, request_id: u64, refusal: &Refusal) -> Self {
        let frame = Frame::new(kind, refusal.to_bytes());
        let header = Header {
            kind,
            role,
            tensors: 0,
            meta_bytes: frame.meta.len() as u32,
            request_id,
            body_bytes: frame.meta.len() as u64,
        };
        Self::with_header(header, frame)
    }

    /// The first frame of a connection that is meant for one incarnation; that process sends it
    /// back.
    pub(crate) fn greeting(process: u64) -> Self {
        let role = FrameRole::Greeting;
        let header = Header { kind: 0, role, tensors: 0, meta_bytes: 0, request_id: process, body_bytes: 0 };
        Self::with_header(header, Frame::default())
    }

    /// The whole frame in one vector.
    pub(crate) fn into_bytes(mut self) -> Vec<u8> {
        self.prepare(usize::MAX);
        let mut bytes = Vec::with_capacity(self.frame_bytes() as usize);
        for segment in 0..self.segments() {
            bytes.extend_from_slice(segment_of(&self.head, &self.frame, &self.trailer, segment));
        }
        bytes
    }

    pub(crate) fn role(&self) -> FrameRole {
        self.header.role
    }

    pub(crate) fn kind(&self) -> u16 {
        self.header.kind
    }

    pub(crate) fn request_id(&self) -> u64 {
        self.header.request_id
    }

    /// Bytes of the whole frame on the wire.
    pub(crate) fn frame_bytes(&self) -> u64 {
        self.header.frame_bytes()
    }

    /// True if the whole frame has been written.
    pub(crate) fn is_written(&self) -> bool {
        self.written.segment == self.segments()
    }

    /// True if the whole frame may be lent.
    pub(crate) fn is_prepared(&self) -> bool {
        self.summed.segment == self.segments()
    }

    /// Extends the checksum until about `budget` unwritten bytes can be lent. Returns how many
    /// bytes can be lent now.
    pub(crate) fn prepare(&mut self, budget: usize) -> usize {
        let mut lendable = self.distance(self.written, self.summed);
        let last = self.segments() - 1;
        while self.summed.segment < last && lendable < budget {
            let Position { segment, byte } = self.summed;
            let bytes = segment_of(&self.head, &self.frame, &self.trailer, segment);
            let end = bytes.len().min(byte + (budget - lendable));
            self.checksum.update(&bytes[byte..end]);
            lendable += end - byte;
            self.summed = if end == bytes.len() {
                Position { segment: segment + 1, byte: 0 }
            } else {
                Position { segment, byte: end }
            };
        }
        if self.summed.segment == last {
            self.trailer = self.checksum.clone().finalize().to_le_bytes();
            self.summed = Position { segment: last + 1, byte: 0 };
            lendable += self.trailer.len();
        }
        lendable
    }

    /// Puts the bytes that may be lent and are not yet written into `slices`, from `*used` on.
    pub(crate) fn lend<'a>(&'a self, slices: &mut [IoSlice<'a>], used: &mut usize) {
        let mut at = self.written;
        while at < self.summed && *used < slices.len() {
            let bytes = segment_of(&self.head, &self.frame, &self.trailer, at.segment);
            let end = if at.segment == self.summed.segment { self.summed.byte } else { bytes.len() };
            if at.byte < end {
                slices[*used] = IoSlice::new(&bytes[at.byte..end]);
                *used += 1;
            }
            at = Position { segment: at.segment + 1, byte: 0 };
        }
    }

    /// Records that `count` lent bytes have been written. Returns how many of them belong to later
    /// frames.
    pub(crate) fn advance(&mut self, mut count: usize) -> usize {
        while self.written < self.summed {
            let Position { segment, byte } = self.written;
            let left = segment_of(&self.head, &self.frame, &self.trailer, segment).len() - byte;
            if count < left {
                self.written.byte += count;
                return 0;
            }
            count -= left;
            self.written = Position { segment: segment + 1, byte: 0 };
        }
        count
    }

    fn segments(&self) -> usize {
        self.frame.tensors.len() + 3
    }

    /// Bytes between two positions.
    fn distance(&self, from: Position, to: Position) -> usize {
        let before: usize =
            (from.segment..to.segment).map(|i| segment_of(&self.head, &self.frame, &self.trailer, i).len()).sum();
        before + to.byte - from.byte
    }
}

fn segment_of<'a>(head: &'a [u8], frame: &'a Frame, trailer: &'a [u8; 4], i: usize) -> &'a [u8] {
    match i {
        0 => head,
        1 => &frame.meta,
        i => frame.tensors.get(i - 2).map_or(&trailer[..], |tensor| tensor.data().as_bytes()),
    }
}

fn header_of(role: FrameRole, request_id: u64, frame: &Frame, limits: &Limits) -> Result<Header, Malformed> {
    let found = frame.tensors.len();
    let tensors = u16::try_from(found).map_err(|_| Malformed::TensorCount { found })?;
    let meta_bytes = u32::try_from(frame.meta.len())
        .map_err(|_| Malformed::MetaLength { bytes: frame.meta.len() as u64, limit: limits.max_meta_bytes })?;
    let body_bytes = (frame.byte_len() + found * DESCRIPTOR_BYTES) as u64;
    let header = Header { kind: frame.kind, role, tensors, meta_bytes, request_id, body_bytes };
    header.check(limits)?;
    Ok(header)
}

/// The bytes of a frame in one vector, for tests and tools. Connections write from the frame
/// itself.
pub fn encode_frame(role: FrameRole, request_id: u64, frame: Frame, limits: &Limits) -> Result<Vec<u8>, Malformed> {
    Ok(Outgoing::new(role, request_id, frame, limits)?.into_bytes())
}
