//! The cross layer of DCN-V2.

use burn::tensor::Tensor;

use super::{Context, Linear};
use crate::layout::{Initializer, ParameterId, ParameterLayout};
use crate::onnx::{Graph, Value};

/// `x0 ⊙ (x·W + b) + x` (Wang et al. 2021, equation 1). With a low rank r, `W = U·V` of shapes `[D,
/// r]` and `[r, D]` (equation 2).
#[derive(Debug, Clone)]
pub struct Cross {
    down: Option<ParameterId>,
    up: Linear,
}

impl Cross {
    /// Adds the linear layer `name`, and with a rank the parameter `{name}.down` for `U`.
    ///
    /// # Panics
    /// As [`Linear::new`].
    pub fn new(layout: &mut ParameterLayout, name: &str, width: usize, rank: Option<usize>) -> Self {
        let down = rank.map(|rank| {
            let initializer = Initializer::Linear { fan_in: width };
            layout.push(format!("{name}.down"), [width, rank], initializer)
        });
        Self { down, up: Linear::new(layout, name, rank.unwrap_or(width), width) }
    }

    /// `[B, D]` twice to `[B, D]`.
    ///
    /// # Panics
    /// As [`Linear::forward`].
    pub fn forward(&self, context: &Context<'_>, x0: Tensor<2>, x: Tensor<2>) -> Tensor<2> {
        let reduced = match self.down {
            Some(down) => x.clone().matmul(context.parameter(down)),
            None => x.clone(),
        };
        x0 * self.up.forward(context, reduced) + x
    }

    /// [`Cross::forward`] in a graph.
    pub fn onnx(&self, graph: &mut Graph<'_>, x0: &Value, x: &Value) -> Value {
        let reduced = match self.down {
            Some(down) => {
                let down = graph.parameter(down);
                graph.op("MatMul", &[x, &down])
            }
            None => x.clone(),
        };
        let up = self.up.onnx(graph, &reduced);
        let product = graph.op("Mul", &[x0, &up]);
        graph.op("Add", &[&product, x])
    }
}
