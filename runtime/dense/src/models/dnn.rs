//! DNN: an MLP over embeddings and dense features. Persia calls it FFNN (Lian et al. 2022, section
//! 5).

use burn::tensor::Tensor;

use super::{Model, ModelConfig, checks, concatenate, concatenate_onnx};
use crate::DenseError;
use crate::inputs::{InputWidths, Inputs};
use crate::layers::{Context, MlpLogit};
use crate::layout::ParameterLayout;
use crate::onnx::{Graph, Value};

#[derive(Debug)]
pub(super) struct Dnn {
    layout: ParameterLayout,
    widths: InputWidths,
    deep: MlpLogit,
    tasks: usize,
}

impl Dnn {
    pub(super) fn new(config: &ModelConfig, hidden: &[usize]) -> Result<Self, DenseError> {
        checks::sizes(config, "hidden", hidden)?;
        let mut layout = ParameterLayout::default();
        let deep = config.deep(&mut layout, hidden);
        Ok(Self { layout, widths: config.dense_and_embeddings(), deep, tasks: config.tasks })
    }
}

impl Model for Dnn {
    fn name(&self) -> &'static str {
        "dnn"
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
        self.deep.forward(context, concatenate(context, [inputs.embeddings, inputs.dense]))
    }

    fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value {
        let input = concatenate_onnx(graph, [inputs.embeddings.as_ref(), inputs.dense.as_ref()]);
        self.deep.onnx(graph, input)
    }
}

#[cfg(test)]
pub(super) mod reference {
    use crate::models::reference::{Case, Sample};

    pub(in crate::models) const CASES: &[Case] = &[
        (
            r#"{"kind":"dnn","hidden":[6,5],"denseFeatures":2,"embeddingDims":[4,2,3]}"#,
            [0x73CF_E919_3627_9EA6, 0x3A9A_0176_4AFA_5E04, 0x3344_181D_703C_481D],
        ),
        (
            r#"{"kind":"dnn","hidden":[6],"denseFeatures":0,"embeddingDims":[4,2,3]}"#,
            [0x7F5E_CE15_2390_3A71, 0xED5B_2394_B47C_9C25, 0xCE5E_9D05_593B_8D5F],
        ),
        (
            r#"{"kind":"dnn","hidden":[6],"denseFeatures":2,"embeddingDims":[]}"#,
            [0x6001_967B_2C33_2BA7, 0x0720_0F7C_CF38_6015, 0x1F1B_2D2C_C586_7A30],
        ),
        (
            r#"{"kind":"dnn","hidden":[],"denseFeatures":2,"embeddingDims":[4,2,3]}"#,
            [0xE376_565C_4D83_CBC5, 0xB02B_E77E_3BEF_8C70, 0xB56F_11B9_9119_09F1],
        ),
        (
            r#"{"kind":"dnn","hidden":[],"denseFeatures":0,"embeddingDims":[4,2,3]}"#,
            [0x6342_7153_D96D_682F, 0xD9EC_0F7C_A01F_5A87, 0xB77B_8EC0_5EE2_530B],
        ),
    ];

    pub(in crate::models) fn logits(sample: &Sample<'_>, hidden: &[usize], tasks: usize) -> Vec<f64> {
        sample.mlp_logits("deep", hidden, sample.both(), tasks)
    }
}
