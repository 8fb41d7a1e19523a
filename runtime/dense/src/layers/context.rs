//! The context of a forward pass: parameters, products and dropout masks.

use burn::tensor::{Device, Tensor, TensorData};

use crate::Precision;
use crate::layout::ParameterId;
use crate::linear::Packed;
use crate::random::{Stream, name_key};

/// One forward pass: the values of the parameters and, in training, the dropout masks. The tower
/// creates it, and models pass it on to their layers.
pub struct Context<'a> {
    /// In layout order. With [`Products::Packed`], a placeholder stands for each parameter of a
    /// linear layer.
    tensors: &'a [Tensor<2>],
    pub(crate) products: Products<'a>,
    /// None outside training.
    masks: Option<Masks>,
}

/// How the products of linear layers are computed.
#[derive(Clone, Copy)]
pub(crate) enum Products<'a> {
    /// By this crate, on the CPU.
    Packed(&'a Packed),
    /// By Burn, on a device with memory of its own.
    Device(Precision),
}

/// Which dropout masks a pass draws.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Masks {
    pub(crate) seed: u64,
    pub(crate) step: u64,
    pub(crate) rank: u32,
    /// Position of the pass's first sample in the batch, so that masks do not depend on the cut
    /// into shards.
    pub(crate) first_sample: usize,
}

impl<'a> Context<'a> {
    /// A pass that drops no activations.
    pub(crate) fn new(tensors: &'a [Tensor<2>], products: Products<'a>) -> Self {
        Self { tensors, products, masks: None }
    }

    /// A pass that drops activations by these masks.
    pub(crate) fn training(tensors: &'a [Tensor<2>], products: Products<'a>, masks: Masks) -> Self {
        Self { tensors, products, masks: Some(masks) }
    }

    /// A parameter that the model added by [`crate::ParameterLayout::push`], in its shape there. It
    /// is a handle: no values are copied.
    pub fn parameter(&self, id: ParameterId) -> Tensor<2> {
        self.tensors[id.0].clone()
    }
}

/// Inverted dropout (Srivastava et al. 2014, section 10). Training scales the remaining activations
/// by 1/(1−rate), so prediction needs no scaling.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    rate: f32,
    key: u64,
}

impl Dropout {
    /// Drops an activation with probability `rate`, in `[0, 1)`. Layers of different names draw
    /// different masks.
    pub fn new(name: &str, rate: f32) -> Self {
        Self { rate, key: name_key(name) }
    }

    /// Whether this pass drops activations.
    pub(super) fn is_active(&self, context: &Context<'_>) -> bool {
        context.masks.is_some() && self.rate != 0.0
    }

    /// `[B, units]` to `[B, units]`. The mask is a pure function of (seed, step, rank, layer,
    /// sample, unit).
    pub fn forward(&self, context: &Context<'_>, activations: Tensor<2>) -> Tensor<2> {
        let Some(masks) = context.masks.filter(|_| self.rate != 0.0) else {
            return activations;
        };
        let [samples, units] = activations.dims();
        let stream = Stream::new(&[masks.seed, masks.step, u64::from(masks.rank), self.key]);
        let kept = 1.0 / (1.0 - self.rate);
        let first = (masks.first_sample * units) as u64;
        let mask = (first..first + (samples * units) as u64)
            .map(|index| if stream.unit(index) < f64::from(self.rate) { 0.0 } else { kept })
            .collect();
        let device = activations.device().without_autodiff();
        activations * matrix(mask, [samples, units], &device)
    }
}

/// A matrix of a shape (rows, columns) from row-major values, which are moved, not copied.
pub(crate) fn matrix(values: Vec<f32>, shape: [usize; 2], device: &Device) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values, shape), device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropout_keeps_the_expectation() {
        let device = Device::flex();
        let masks = Masks { seed: 1, step: 2, rank: 3, first_sample: 0 };
        let context = Context::training(&[], Products::Device(Precision::Fp32), masks);
        let ones = matrix(vec![1.0; 100_000], [1000, 100], &device);
        let dropped = Dropout { rate: 0.3, key: 5 }.forward(&context, ones);
        let dropped: Vec<f32> = dropped.into_data().try_into_vec().unwrap();
        let zeros = dropped.iter().filter(|&&x| x == 0.0).count();
        assert!((zeros as f64 / 1e5 - 0.3).abs() < 0.005, "{zeros}");
        assert!(dropped.iter().all(|&x| x == 0.0 || x == 1.0 / 0.7_f32));
    }
}
