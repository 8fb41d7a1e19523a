//! The dot products of all pairs of a sample's vectors on the CPU. They are an operation of Burn's
//! graph with a backward pass of its own. Its input is the bottom MLP's output and the pooled
//! embeddings, each where it lies. Its output is the input of the top MLP. So nothing is
//! concatenated, transposed or selected. The arithmetic is in `rectrain_gemm`.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex};
use burn::tensor::Tensor;
use rectrain_gemm::{Pairwise, PairwiseVectors};

use crate::flex::{contiguous, floats, reclaim, shape, take, tensor, values, values_and_node};

/// The leading vector of each sample, and then its dot products: `[B, d]` and `[B, (n−1)·d]` to
/// `[B, d + n(n−1)/2]`. Without `leading`, `[B, n·d]` to `[B, n(n−1)/2]`. It records no gradients.
pub(crate) fn forward(pairwise: Pairwise, leading: Option<Tensor<2>>, others: Tensor<2>) -> Tensor<2> {
    let operands = Operands { pairwise, leading: leading.map(values), others: values(others) };
    let output = operands.forward();
    operands.leading.into_iter().chain([operands.others]).for_each(reclaim);
    Tensor::from_primitive::<Flex>(output)
}

/// [`forward`] in a graph that records gradients.
pub(crate) fn forward_recorded(pairwise: Pairwise, leading: Option<Tensor<2>>, others: Tensor<2>) -> Tensor<2> {
    let (others, others_node) = values_and_node(others);
    match leading.map(values_and_node) {
        None => Operands { pairwise, leading: None, others }.record([others_node]),
        Some((leading, node)) => Operands { pairwise, leading: Some(leading), others }.record([node, others_node]),
    }
}

/// The vectors of a shard, which the backward pass needs too.
#[derive(Debug, Clone)]
struct Operands {
    pairwise: Pairwise,
    leading: Option<FlexTensor>,
    others: FlexTensor,
}

impl Operands {
    fn vectors(&self) -> PairwiseVectors<'_> {
        PairwiseVectors { leading: self.leading.as_ref().map_or(&[], floats), others: floats(&self.others) }
    }

    fn forward(&self) -> FlexTensor {
        let ([samples, _], columns) = (shape(&self.others), self.pairwise.columns());
        let mut output = take(samples * columns);
        self.pairwise.forward(self.vectors(), &mut output);
        tensor(output, [samples, columns])
    }

    /// The output, as the child of the operands' nodes in order.
    fn record<const N: usize>(self, nodes: [NodeGuard; N]) -> Tensor<2> {
        let output = self.forward();
        let output = match PairwiseBackward.prepare::<NoCheckpointing>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(self, output),
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        };
        Tensor::from_primitive::<Autodiff<Flex>>(output)
    }
}

#[derive(Debug)]
struct PairwiseBackward;

/// The parents are the leading vectors, if there are any, and the others.
impl<const N: usize> Backward<Flex, N> for PairwiseBackward {
    type State = Operands;

    fn backward(self, ops: Ops<Operands, N>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let operands = ops.state;
        let vectors = operands.vectors();
        let gradient = contiguous(gradients.consume::<Flex>(&ops.node));
        let [mut of_leading, mut of_others] = [vectors.leading, vectors.others].map(|part| take(part.len()));
        operands.pairwise.backward(vectors, floats(&gradient), &mut of_leading, &mut of_others);
        reclaim(gradient);
        let of_leading = operands.leading.as_ref().map(|leading| tensor(of_leading, shape(leading)));
        let of_others = tensor(of_others, shape(&operands.others));
        for (parent, gradient) in ops.parents.into_iter().zip(of_leading.into_iter().chain([of_others])) {
            if let Some(parent) = parent {
                gradients.register::<Flex>(parent.id, gradient);
            }
        }
    }
}
