//! How values travel between dense workers, embedding workers and parameter servers: unchanged, or
//! as fp16 blocks scaled by κ/‖v‖∞ (Persia §4.2.3), one block for each row.

use rectrain_kinds::Compression;
use rectrain_wire::Tensor;
use rectrain_wire::compress::{self, CompressError};

use crate::error::RoleError;
use crate::message;

/// Encodes values as the tensors of a message, and decodes them.
pub trait TensorCodec: Copy {
    /// Encodes `values` [rows, dim] as one tensor (f32) or two (fp16 and scales).
    fn encode(self, values: Vec<f32>, dim: usize) -> Result<Vec<Tensor>, RoleError>;

    /// As [`Self::encode`] for gradients, which may be infinite or NaN: the parameter server counts
    /// such gradients.
    fn encode_gradients(self, values: Vec<f32>, dim: usize) -> Result<Vec<Tensor>, RoleError>;

    /// Decodes the values that [`Self::encode`] encoded, and takes their tensors from `tensors`.
    fn decode(
        self,
        message: &'static str,
        tensors: &mut impl Iterator<Item = Tensor>,
        dim: usize,
    ) -> Result<Vec<f32>, RoleError>;
}

impl TensorCodec for Compression {
    fn encode(self, values: Vec<f32>, dim: usize) -> Result<Vec<Tensor>, RoleError> {
        encode_by(self, compress::compress, values, dim)
    }

    fn encode_gradients(self, values: Vec<f32>, dim: usize) -> Result<Vec<Tensor>, RoleError> {
        encode_by(self, compress::compress_gradients, values, dim)
    }

    fn decode(
        self,
        message: &'static str,
        tensors: &mut impl Iterator<Item = Tensor>,
        dim: usize,
    ) -> Result<Vec<f32>, RoleError> {
        let values = message::next(message, tensors)?;
        match self {
            Self::None => Ok(values.expect_f32("values")?),
            Self::Fp16 => {
                let scales = message::next(message, tensors)?.expect_f32("scales")?;
                Ok(compress::decompress(&values.expect_f16("values")?, &scales, dim.max(1))?)
            }
        }
    }
}

fn encode_by<Half>(
    compression: Compression,
    compress: impl FnOnce(&[f32], usize) -> Result<(Vec<Half>, Vec<f32>), CompressError>,
    values: Vec<f32>,
    dim: usize,
) -> Result<Vec<Tensor>, RoleError>
where
    Vec<Half>: Into<Tensor>,
{
    match compression {
        Compression::None => Ok(vec![Tensor::from(values)]),
        Compression::Fp16 => {
            let (halves, scales) = compress(&values, dim.max(1))?;
            Ok(vec![halves.into(), Tensor::from(scales)])
        }
    }
}
