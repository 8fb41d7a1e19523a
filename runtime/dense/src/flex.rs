//! The tensors of Burn's CPU backend, `flex`, as this crate's own operations see them.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::TensorData;

/// A matrix of a shape (rows, columns) from row-major values, which are moved, not copied.
pub(crate) fn tensor(values: Vec<f32>, shape: [usize; 2]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape))
}

/// Rows and columns.
pub(crate) fn shape(tensor: &FlexTensor) -> [usize; 2] {
    tensor.shape().dims()
}

/// The values of a contiguous tensor.
pub(crate) fn floats(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice().expect("this crate makes f32 tensors only, and this one is contiguous")
}
