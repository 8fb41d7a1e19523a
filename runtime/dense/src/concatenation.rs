//! Two matrices side by side on the CPU, as an operation of Burn's graph. Unlike Burn's own
//! concatenation, it keeps the memory of its result from step to step. Its backward pass copies
//! nothing: the gradients are columns of the result's gradient, where they lie.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex};
use burn::tensor::Tensor;

use crate::flex::{contiguous, floats, reclaim, shape, take, tensor, values, values_and_node};

/// `[B, l]` and `[B, r]` to `[B, l + r]`. No gradients are recorded.
pub(crate) fn forward(parts: [Tensor<2>; 2]) -> Tensor<2> {
    Tensor::from_primitive::<Flex>(side_by_side(parts.map(values)))
}

/// [`forward`] in a graph that records gradients.
pub(crate) fn forward_recorded(parts: [Tensor<2>; 2]) -> Tensor<2> {
    let [(left, left_node), (right, right_node)] = parts.map(values_and_node);
    let widths = [&left, &right].map(|part| shape(part)[1]);
    let output = side_by_side([left, right]);
    let nodes = [left_node, right_node];
    let output = match ConcatenationBackward.prepare::<NoCheckpointing>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(widths, output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(output)
}

fn side_by_side(parts: [FlexTensor; 2]) -> FlexTensor {
    let [[rows, left], [_, right]] = parts.each_ref().map(shape);
    let mut values = take(rows * (left + right));
    let [of_left, of_right] = parts.each_ref().map(floats);
    for (left, right) in of_left.chunks_exact(left).zip(of_right.chunks_exact(right)) {
        values.extend_from_slice(left);
        values.extend_from_slice(right);
    }
    parts.into_iter().for_each(reclaim);
    tensor(values, [rows, left + right])
}

#[derive(Debug)]
struct ConcatenationBackward;

impl Backward<Flex, 2> for ConcatenationBackward {
    /// The columns of each part.
    type State = [usize; 2];

    fn backward(self, ops: Ops<[usize; 2], 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = contiguous(gradients.consume::<Flex>(&ops.node));
        let [left, _] = ops.state;
        for ((parent, first), columns) in ops.parents.into_iter().zip([0, left]).zip(ops.state) {
            if let Some(parent) = parent {
                let part = gradient.layout().narrow(1, first, columns);
                gradients.register::<Flex>(parent.id, gradient.clone().with_layout(part));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    fn matrix(first: usize, rows: usize, columns: usize) -> Tensor<2> {
        let values: Vec<f32> = (first..first + rows * columns).map(|value| value as f32 / 8.0).collect();
        Tensor::from_data(TensorData::new(values, [rows, columns]), &Device::flex())
    }

    fn floats_of(tensor: Tensor<2>) -> Vec<f32> {
        tensor.into_data().try_into_vec().unwrap()
    }

    /// The output, and the gradients of both parts for weights that differ in each place.
    fn pass(concatenate: impl Fn([Tensor<2>; 2]) -> Tensor<2>, [rows, left, right]: [usize; 3]) -> [Vec<f32>; 3] {
        let parts = [matrix(1, rows, left), matrix(500, rows, right)].map(|part| part.autodiff().require_grad());
        let output = concatenate(parts.clone());
        let mut gradients = (output.clone() * matrix(900, rows, left + right)).sum().backward();
        let [of_left, of_right] = parts.map(|part| floats_of(part.grad_remove(&mut gradients).unwrap()));
        [floats_of(output.inner()), of_left, of_right]
    }

    #[test]
    fn the_result_and_its_gradients_equal_burns_concatenation() {
        for shape in [[5, 3, 2], [1, 4, 1], [300, 40, 13]] {
            let burns = pass(|parts| Tensor::cat(parts.to_vec(), 1), shape);
            assert_eq!(pass(forward_recorded, shape), burns, "{shape:?}");
            let [rows, left, right] = shape;
            let output = forward([matrix(1, rows, left), matrix(500, rows, right)]);
            assert_eq!(floats_of(output), burns[0], "{shape:?}");
        }
    }
}
