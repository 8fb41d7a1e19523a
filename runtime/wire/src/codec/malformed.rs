//! Refused frames.

use super::role::{FrameRole, PROTOCOL_VERSION};

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
