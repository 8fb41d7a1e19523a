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
use rectrain_gemm::{Finish, Left, Matrix, Start, add_rows, product_into, relu_backward};

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
            OpsKind::Tracked(prepared) => {
                let pending = Pending {
                    packed: Self { record: None, ..self.clone() },
                    record: Arc::clone(record),
                    weight: linear.weight,
                    output: relu.then(|| output.clone()),
                };
                prepared.finish(pending, output)
            }
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        };
        Tensor::from_primitive::<Autodiff<Flex>>(output)
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
        let Pending { packed, record, weight, output } = ops.state;
        let mut derivatives = contiguous(gradients.consume::<Flex>(&ops.node));
        let [rows, columns] = shape(&derivatives);
        let kernel = packed.kernel;
        let mut recorded = record.write(weight);
        recorded.bias.clear();
        recorded.bias.resize(columns, 0.0);
        match output {
            Some(output) => {
                relu_backward(derivatives.storage_mut::<f32>(), floats(&output), &mut recorded.bias);
                reclaim(output);
            }
            None => add_rows(floats(&derivatives), &mut recorded.bias),
        }
        let matrix = Matrix::new(floats(&derivatives), rows, columns);
        recorded.complete(kernel, matrix);
        drop(recorded);

        let [input, _] = ops.parents;
        if let (Some(input), Some(layer)) = (input, &packed.weights.0[weight.0]) {
            let mut of_input = take(rows * layer.backward.columns());
            LEFT.with_borrow_mut(|left| {
                left.pack(kernel, matrix);
                product_into(left, &layer.backward, Start::Zero, Finish::Plain, &mut of_input);
            });
            gradients.register::<Flex>(input.id, tensor(of_input, [rows, layer.backward.columns()]));
        }
        reclaim(derivatives);
    }
}
