//! How values travel between dense workers, embedding workers and parameter servers: as they are, or as fp16 blocks scaled by
//! κ/‖v‖∞ (Persia §4.2.3), one block for each row.

use rectrain_wire::Tensor;

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
        match self {
            Self::None => Ok(vec![Tensor::from(values)]),
            Self::Fp16 => {
                let (halves, scales) = rectrain_wire::compress::compress(&values, dim.max(1))?;
                Ok(vec![Tensor::from(halves), Tensor::from(scales)])
            }
        }
    }

    /// As [`Self::encode`], and gradients that are not finite travel as well: the parameter server that they come to counts them.
    pub(crate) fn encode_gradients(self, values: Vec<f32>, dim: usize) -> Result<Vec<Tensor>, RoleError> {
        match self {
            Self::None => self.encode(values, dim),
            Self::Fp16 => {
                let (halves, scales) = rectrain_wire::compress::compress_gradients(&values, dim.max(1))?;
                Ok(vec![Tensor::from(halves), Tensor::from(scales)])
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
                Ok(rectrain_wire::compress::decompress(&values.expect_f16("values")?, &scales, dim.max(1))?)
            }
        }
    }
}
