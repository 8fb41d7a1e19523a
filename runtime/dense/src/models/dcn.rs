//! Deep and cross network (Wang et al. 2017): cross layers with vectors, beside an MLP over the
//! same embeddings and dense features.

use burn::tensor::Tensor;

use super::{Model, ModelConfig, checks, concatenate, concatenate_onnx};
use crate::DenseError;
use crate::inputs::{InputWidths, Inputs};
use crate::layers::{Context, MlpLogit, VectorCrosses};
use crate::layout::ParameterLayout;
use crate::onnx::{Graph, Value};

#[derive(Debug)]
pub(super) struct Dcn {
    layout: ParameterLayout,
    widths: InputWidths,
    crosses: VectorCrosses,
    deep: MlpLogit,
    tasks: usize,
}

impl Dcn {
    /// The layer of the logits sees the last cross and the last hidden layer side by side. The
    /// logits are the sum of both parts.
    pub(super) fn new(config: &ModelConfig, layers: usize, hidden: &[usize]) -> Result<Self, DenseError> {
        checks::crosses_beside_mlp(config, layers, hidden)?;
        let mut layout = ParameterLayout::default();
        let crosses = config.crosses(&mut layout, layers);
        let deep = config.deep(&mut layout, hidden);
        Ok(Self { layout, widths: config.dense_and_embeddings(), crosses, deep, tasks: config.tasks })
    }
}

impl Model for Dcn {
    fn name(&self) -> &'static str {
        "dcn"
    }

    fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    fn input_widths(&self) -> InputWidths {
        self.widths
    }

    fn tasks(&self) -> usize {
        self.tasks
    }

    fn forward(&self, context: &Context<'_>, inputs: Inputs<Tensor<2>>) -> Tensor<2> {
        let x0 = concatenate(context, [inputs.embeddings, inputs.dense]);
        let crossed = self.crosses.forward(context, x0.clone());
        self.deep.forward(context, x0) + crossed
    }

    fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value {
        let x0 = concatenate_onnx(graph, [inputs.embeddings.as_ref(), inputs.dense.as_ref()]);
        let crossed = self.crosses.onnx(graph, &x0);
        let deep = self.deep.onnx(graph, x0);
        graph.op("Add", &[&deep, &crossed])
    }
}

#[cfg(test)]
pub(super) mod reference {
    use crate::models::reference::{Case, Sample, dot};

    pub(in crate::models) const CASES: &[Case] = &[
        (
            r#"{"kind":"dcn","crossLayers":3,"hidden":[6,5],"denseFeatures":2,"embeddingDims":[4,2,3]}"#,
            [0x8F17_479B_F9A2_21BF, 0xDEDC_5EA1_CCDF_7B16, 0x8D22_A283_67B7_8C34],
        ),
        (
            r#"{"kind":"dcn","crossLayers":1,"hidden":[6],"denseFeatures":0,"embeddingDims":[4,2,3]}"#,
            [0x1A26_91B9_643E_7F28, 0x97DB_3CD4_A26F_8C04, 0xFE58_A2C6_28A4_49A4],
        ),
    ];

    pub(in crate::models) fn logit(sample: &Sample<'_>, layers: usize, hidden: &[usize]) -> f64 {
        let x0 = sample.both();
        let column = |column: usize| -> Vec<f64> {
            (0..x0.len()).map(|row| sample.value("cross.weight", row * (layers + 1) + column)).collect()
        };
        let mut x = x0.clone();
        for layer in 0..layers {
            let product = dot(&x, &column(layer));
            let bias = format!("cross.{layer}.bias");
            x = (0..x.len()).map(|i| x0[i] * product + sample.value(&bias, i) + x[i]).collect();
        }
        dot(&x, &column(layers)) + sample.mlp_logit("deep", hidden, x0)
    }
}
