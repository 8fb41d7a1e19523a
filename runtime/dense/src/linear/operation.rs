//! The linear layer as an operation of Burn's graph, with a backward pass of its own.

use std::cell::RefCell;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex};
use burn::tensor::Tensor;
use rectrain_gemm::{Finish, Left, Matrix, Start, add_rows, multiply, product_into, relu_backward};

use super::{Packed, Record};
use crate::flex::{contiguous, floats, reclaim, shape, take, tensor, values, values_and_node};
use crate::layout::{LinearParameters, ParameterId};

thread_local! {
    /// The left operand of the product that this thread computes.
    static LEFT: RefCell<Left> = RefCell::default();
}

impl Packed {
    /// `x·W + b`, followed by ReLU if `relu`: `[B, inputs]` to `[B, outputs]`. `anchor` is the
    /// placeholder leaf for the weight. Through it the layer belongs to the graph even where its
    /// input does not.
    pub(crate) fn linear(
        &self,
        linear: LinearParameters,
        anchor: Tensor<2>,
        input: Tensor<2>,
        relu: bool,
    ) -> Tensor<2> {
        let Some(record) = &self.record else {
            let input = values(input);
            let output = self.forward(linear, &input, relu);
            reclaim(input);
            return Tensor::from_primitive::<Flex>(output);
        };
        let [(input, input_node), (_, anchor_node)] = [input, anchor].map(values_and_node);
        let output = self.forward(linear, &input, relu);
        let [rows, columns] = shape(&input);
        record.write(linear.weight).begin(self.kernel, Matrix::new(floats(&input), rows, columns));
        reclaim(input);
        let prepared = LinearBackward.prepare::<NoCheckpointing>([input_node, anchor_node]).compute_bound().stateful();
        let output = match prepared {
            OpsKind::Tracked(prepared) => prepared.finish(self.pending(record, linear, &output, relu), output),
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        };
        Tensor::from_primitive::<Autodiff<Flex>>(output)
    }

    /// `s + x·W₂`, followed by ReLU if `relu`: sums `[B, outputs]` and x `[B, inputs − summed]` to
    /// `[B, outputs]`. `anchor` is as for [`Self::linear`]. x has no gradient.
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
            OpsKind::Tracked(prepared) => prepared.finish(self.pending(record, linear, &output, relu), output),
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        };
        Tensor::from_primitive::<Autodiff<Flex>>(output)
    }

    /// The state for the backward pass of a layer with this output.
    fn pending(&self, record: &Arc<Record>, linear: LinearParameters, output: &FlexTensor, relu: bool) -> Pending {
        Pending {
            packed: Self { record: None, ..self.clone() },
            record: Arc::clone(record),
            weight: linear.weight,
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
        LEFT.with_borrow_mut(|left| {
            left.pack(self.kernel, beside(sums, input));
            multiply(left, &layer.forward, &mut output, Start::Sum, finish);
        });
        tensor(output, shape(sums))
    }

    /// `input` is contiguous.
    fn forward(&self, linear: LinearParameters, input: &FlexTensor, relu: bool) -> FlexTensor {
        let layer = self.layer(linear);
        let [rows, columns] = shape(input);
        let finish = if relu { Finish::Relu } else { Finish::Plain };
        let mut output = take(rows * layer.bias.len());
        LEFT.with_borrow_mut(|left| {
            left.pack(self.kernel, Matrix::new(floats(input), rows, columns));
            product_into(left, &layer.forward, Start::Row(&layer.bias), finish, &mut output);
        });
        tensor(output, [rows, layer.bias.len()])
    }
}

#[derive(Debug)]
struct LinearBackward;

/// The values that the backward pass of a layer needs.
#[derive(Debug, Clone)]
struct Pending {
    packed: Packed,
    record: Arc<Record>,
    weight: ParameterId,
    /// The layer's output, which shows where ReLU let nothing through; none without ReLU.
    output: Option<FlexTensor>,
}

impl Backward<Flex, 2> for LinearBackward {
    type State = Pending;

    fn backward(self, ops: Ops<Pending, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let mut pending = ops.state;
        let derivatives = pending.derivatives(gradients.consume::<Flex>(&ops.node));
        let Pending { packed, weight, .. } = pending;
        let [rows, columns] = shape(&derivatives);
        let [input, _] = ops.parents;
        if let (Some(input), Some(layer)) = (input, &packed.weights.0[weight.0]) {
            let mut of_input = take(rows * layer.backward.columns());
            LEFT.with_borrow_mut(|left| {
                left.pack(packed.kernel, Matrix::new(floats(&derivatives), rows, columns));
                product_into(left, &layer.backward, Start::Zero, Finish::Plain, &mut of_input);
            });
            gradients.register::<Flex>(input.id, tensor(of_input, [rows, layer.backward.columns()]));
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
        let mut recorded = self.record.write(self.weight);
        recorded.bias.clear();
        recorded.bias.resize(columns, 0.0);
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
}

/// The inputs of a layer that continues these sums. Without any, a matrix without columns.
fn beside<'a>(sums: &FlexTensor, input: Option<&'a FlexTensor>) -> Matrix<'a> {
    let [rows, _] = shape(sums);
    let values = input.map_or(&[][..], floats);
    Matrix::new(values, rows, input.map_or(0, |input| shape(input)[1]))
}
