//! How values travel between dense workers, embedding workers and parameter servers: as they are, or as fp16 blocks scaled by
//! κ/‖v‖∞ (Persia §4.2.3), one block for each row.

use rectrain_wire::Tensor;
use rectrain_wire::compress::{self, CompressError};

use crate::error::RoleError;
use crate::message;

/// The setting `spec.training.compression`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compression {
    /// f32, unchanged.
    #[default]
    None,
    /// fp16 with one scale a row.
    Fp16,
}

impl Compression {
    /// `values` [rows, dim] as the tensors that travel: one (f32) or two (fp16 and scales).
    pub(crate) fn encode(self, values: Vec<f32>, dim: usize) -> Result<Vec<Tensor>, RoleError> {
        self.encode_by(compress::compress, values, dim)
    }

    /// As [`Self::encode`], and gradients that are not finite travel as well: the parameter server that they come to counts them.
    pub(crate) fn encode_gradients(self, values: Vec<f32>, dim: usize) -> Result<Vec<Tensor>, RoleError> {
        self.encode_by(compress::compress_gradients, values, dim)
    }

    fn encode_by<Half>(
        self,
        compress: impl FnOnce(&[f32], usize) -> Result<(Vec<Half>, Vec<f32>), CompressError>,
        values: Vec<f32>,
        dim: usize,
    ) -> Result<Vec<Tensor>, RoleError>
    where
        Vec<Half>: Into<Tensor>,
    {
        match self {
            Self::None => Ok(vec![Tensor::from(values)]),
            Self::Fp16 => {
                let (halves, scales) = compress(&values, dim.max(1))?;
                Ok(vec![halves.into(), Tensor::from(scales)])
            }
        }
    }

    /// Takes what [`Self::encode`] gave from `tensors`.
    pub(crate) fn decode(
        self,
        what: &'static str,
        tensors: &mut impl Iterator<Item = Tensor>,
        dim: usize,
    ) -> Result<Vec<f32>, RoleError> {
        let values = message::next(what, tensors)?;
        match self {
            Self::None => Ok(values.expect_f32("values")?),
            Self::Fp16 => {
                let scales = message::next(what, tensors)?.expect_f32("scales")?;
                Ok(compress::decompress(&values.expect_f16("values")?, &scales, dim.max(1))?)
            }
        }
    }
}
