//! Linear layers as operations of Burn's graph, with backward passes of their own.

use std::cell::RefCell;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex};
use burn::tensor::Tensor;
use rectrain_gemm::{
    Finish, Left, Matrix, Start, add_rows, hidden, hidden_backward, multiply, product_into, relu_backward,
};

use super::{Packed, Record};
use crate::flex::{contiguous, floats, reclaim, shape, take, tensor, values, values_and_node};
use crate::layout::LinearParameters;

thread_local! {
    /// The left operand of the product that this thread computes, and the next product's.
    static LEFTS: RefCell<[Left; 2]> = RefCell::default();
}

impl Packed {
    /// Linear layers one after another: `x·W + b`, followed by ReLU except after the last layer,
    /// where ReLU follows if `relu`. `[B, inputs]` to `[B, outputs]`. Only the last layer makes a
    /// matrix. `anchor` is the placeholder leaf for the first layer's weight. Through it the layers
    /// belong to the graph even where their input does not.
    ///
    /// # Panics
    /// If there are no layers.
    pub(crate) fn chain(
        &self,
        layers: &[LinearParameters],
        anchor: Tensor<2>,
        input: Tensor<2>,
        relu: bool,
    ) -> Tensor<2> {
        let Some(record) = &self.record else {
            let input = values(input);
            let output = self.forward(layers, &input, relu);
            reclaim(input);
            return Tensor::from_primitive::<Flex>(output);
        };
        let [(input, input_node), (_, anchor_node)] = [input, anchor].map(values_and_node);
        let output = self.forward(layers, &input, relu);
        let [rows, columns] = shape(&input);
        record.write(layers[0].weight).begin(self.kernel, Matrix::new(floats(&input), rows, columns));
        reclaim(input);
        let prepared = ChainBackward.prepare::<NoCheckpointing>([input_node, anchor_node]).compute_bound().stateful();
        let output = match prepared {
            OpsKind::Tracked(prepared) => prepared.finish(self.pending(record, layers, &output, relu), output),
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        };
        Tensor::from_primitive::<Autodiff<Flex>>(output)
    }

    /// `s + x·W₂`, followed by ReLU if `relu`: sums `[B, outputs]` and x `[B, inputs − summed]` to
    /// `[B, outputs]`. `anchor` is as for [`Self::chain`]. x has no gradient.
    pub(crate) fn summed_linear(
        &self,
        linear: LinearParameters,
        anchor: Tensor<2>,
        (sums, input): (Tensor<2>, Option<Tensor<2>>),
        relu: bool,
    ) -> Tensor<2> {
        let Some(record) = &self.record else {
            let (sums, input) = (values(sums), input.map(values));
            let output = self.continued(linear, &sums, input.as_ref(), relu);
            reclaim(sums);
            input.into_iter().for_each(reclaim);
            return Tensor::from_primitive::<Flex>(output);
        };
        let [(sums, sums_node), (_, anchor_node)] = [sums, anchor].map(values_and_node);
        let input = input.map(|input| values_and_node(input).0);
        let output = self.continued(linear, &sums, input.as_ref(), relu);
        record.write(linear.weight).begin(self.kernel, beside(&sums, input.as_ref()));
        reclaim(sums);
        input.into_iter().for_each(reclaim);
        let prepared =
            SummedLinearBackward.prepare::<NoCheckpointing>([sums_node, anchor_node]).compute_bound().stateful();
        let output = match prepared {
            OpsKind::Tracked(prepared) => prepared.finish(self.pending(record, &[linear], &output, relu), output),
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        };
        Tensor::from_primitive::<Autodiff<Flex>>(output)
    }

    /// The state for the backward pass of layers with this output.
    fn pending(&self, record: &Arc<Record>, layers: &[LinearParameters], output: &FlexTensor, relu: bool) -> Pending {
        Pending {
            packed: Self { record: None, ..self.clone() },
            record: Arc::clone(record),
            layers: layers.to_vec(),
            output: relu.then(|| output.clone()),
        }
    }

    /// `sums` and `input` are contiguous.
    fn continued(
        &self,
        linear: LinearParameters,
        sums: &FlexTensor,
        input: Option<&FlexTensor>,
        relu: bool,
    ) -> FlexTensor {
        let layer = self.layer(linear);
        let finish = if relu { Finish::Relu } else { Finish::Plain };
        let mut output = take(floats(sums).len());
        output.extend_from_slice(floats(sums));
        LEFTS.with_borrow_mut(|[left, _]| {
            left.pack(self.kernel, beside(sums, input));
            multiply(left, &layer.forward, &mut output, Start::Sum, finish);
        });
        tensor(output, shape(sums))
    }

    /// `input` is contiguous.
    fn forward(&self, layers: &[LinearParameters], input: &FlexTensor, relu: bool) -> FlexTensor {
        let (Some(&last), [rows, columns]) = (layers.last(), shape(input)) else { panic!("a chain of no layers") };
        let layer = self.layer(last);
        let mut output = take(rows * layer.bias.len());
        LEFTS.with_borrow_mut(|[left, next]| {
            left.pack(self.kernel, Matrix::new(floats(input), rows, columns));
            for (below, above) in layers.iter().zip(&layers[1..]) {
                let below = self.layer(*below);
                let mut recorded = self.record.as_ref().map(|record| record.write(above.weight));
                let recorded = recorded.as_mut().map(|recorded| recorded.begin_hidden());
                hidden(left, &below.forward, &below.bias, next, recorded);
                std::mem::swap(left, next);
            }
            let finish = if relu { Finish::Relu } else { Finish::Plain };
            product_into(left, &layer.forward, Start::Row(&layer.bias), finish, &mut output);
        });
        tensor(output, [rows, layer.bias.len()])
    }
}

#[derive(Debug)]
struct ChainBackward;

/// The values that the backward pass of layers needs.
#[derive(Debug, Clone)]
struct Pending {
    packed: Packed,
    record: Arc<Record>,
    /// From the input to the output.
    layers: Vec<LinearParameters>,
    /// The output, which shows where ReLU let nothing through; none without ReLU.
    output: Option<FlexTensor>,
}

impl Backward<Flex, 2> for ChainBackward {
    type State = Pending;

    fn backward(self, ops: Ops<Pending, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let mut pending = ops.state;
        let derivatives = pending.derivatives(gradients.consume::<Flex>(&ops.node));
        let [input, _] = ops.parents;
        let of_input = pending.backward(&derivatives, input.is_some());
        if let (Some(input), Some(of_input)) = (input, of_input) {
            gradients.register::<Flex>(input.id, of_input);
        }
        reclaim(derivatives);
    }
}

#[derive(Debug)]
struct SummedLinearBackward;

/// The gradient of the sums is the derivative of the output.
impl Backward<Flex, 2> for SummedLinearBackward {
    type State = Pending;

    fn backward(self, ops: Ops<Pending, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let mut pending = ops.state;
        let derivatives = pending.derivatives(gradients.consume::<Flex>(&ops.node));
        let [sums, _] = ops.parents;
        match sums {
            Some(sums) => gradients.register::<Flex>(sums.id, derivatives),
            None => reclaim(derivatives),
        }
    }
}

impl Pending {
    /// The derivatives before ReLU, from the derivatives of the layer's output. Leaves the operands
    /// of the parameters' gradients in the record.
    fn derivatives(&mut self, of_output: FlexTensor) -> FlexTensor {
        let mut derivatives = contiguous(of_output);
        let [rows, columns] = shape(&derivatives);
        let Some(last) = self.layers.last() else { panic!("a chain of no layers") };
        let mut recorded = self.record.write(last.weight);
        recorded.clear_bias(columns);
        match self.output.take() {
            Some(output) => {
                relu_backward(derivatives.storage_mut::<f32>(), floats(&output), &mut recorded.bias);
                reclaim(output);
            }
            None => add_rows(floats(&derivatives), &mut recorded.bias),
        }
        recorded.complete(self.packed.kernel, Matrix::new(floats(&derivatives), rows, columns));
        derivatives
    }

    /// The derivatives of the input, if they are `wanted`, from the last layer's derivatives before
    /// ReLU. Leaves the operands of the other layers' gradients in the record.
    fn backward(&self, derivatives: &FlexTensor, wanted: bool) -> Option<FlexTensor> {
        let ([rows, columns], layers) = (shape(derivatives), &self.layers[..]);
        if layers.len() == 1 && !wanted {
            return None;
        }
        LEFTS.with_borrow_mut(|[left, next]| {
            left.pack(self.packed.kernel, Matrix::new(floats(derivatives), rows, columns));
            for (below, above) in layers.iter().zip(&layers[1..]).rev() {
                let passed = self.record.layer(above.weight).read();
                let mut recorded = self.record.write(below.weight);
                // Nothing multiplies the first layer's derivatives if the input has no gradient.
                let left_below = (wanted || below != &layers[0]).then_some(&mut *next);
                let to = recorded.complete_hidden(left_below, self.packed.layer(*below).bias.len());
                hidden_backward(left, &self.packed.layer(*above).backward, &passed.passes, to);
                std::mem::swap(left, next);
            }
            wanted.then(|| {
                let first = self.packed.layer(layers[0]);
                let mut of_input = take(rows * first.backward.columns());
                product_into(left, &first.backward, Start::Zero, Finish::Plain, &mut of_input);
                tensor(of_input, [rows, first.backward.columns()])
            })
        })
    }
}

/// The inputs of a layer that continues these sums. Without any, a matrix without columns.
fn beside<'a>(sums: &FlexTensor, input: Option<&'a FlexTensor>) -> Matrix<'a> {
    let [rows, _] = shape(sums);
    let values = input.map_or(&[][..], floats);
    Matrix::new(values, rows, input.map_or(0, |input| shape(input)[1]))
}
