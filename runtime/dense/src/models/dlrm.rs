//! DLRM (Naumov et al. 2019). The bottom MLP maps the dense features to a vector of the embeddings'
//! dimension. All pairs of vectors interact by dot products. The top MLP maps the dot products and
//! the bottom MLP's output to the logit. Without dense features there is no bottom MLP.

use burn::tensor::Tensor;

use super::{Model, ModelConfig, checks, concatenate_onnx};
use crate::DenseError;
use crate::inputs::{InputWidths, Inputs};
use crate::layers::{Context, Linear, Mlp, MlpLogit, MlpShape, PairwiseDots};
use crate::layout::ParameterLayout;
use crate::onnx::{Graph, Value};

#[derive(Debug)]
pub(super) struct Dlrm {
    layout: ParameterLayout,
    widths: InputWidths,
    bottom: Option<Bottom>,
    dots: PairwiseDots,
    top: MlpLogit,
    tasks: usize,
}

/// The bottom MLP. Its output layer has ReLU and no dropout.
#[derive(Debug)]
struct Bottom {
    hidden: Mlp,
    output: Linear,
}

impl Dlrm {
    /// `bottom` may end with the embeddings' dimension, `top` with 1. The model has both layers in
    /// any case.
    pub(super) fn new(config: &ModelConfig, bottom: &[usize], top: &[usize]) -> Result<Self, DenseError> {
        let dim = checks::one_width(config)?;
        if config.dense_features == 0 && config.embedding_dims.len() == 1 {
            return Err(config.invalid(
                "it has one sparse and no dense feature, so no pair can interact; give at least two features",
            ));
        }
        checks::sizes(config, "bottom", bottom)?;
        checks::sizes(config, "top", top)?;
        let mut layout = ParameterLayout::default();
        let bottom = (config.dense_features > 0).then(|| Bottom::new(&mut layout, config, bottom, dim));
        let extra = usize::from(bottom.is_some());
        let dots = PairwiseDots { vectors: config.embedding_dims.len() + extra, dim };
        let inputs = dots.pairs() + extra * dim;
        let shape = MlpShape { inputs, hidden: top, logits: config.tasks, dropout: config.dropout };
        let top = MlpLogit::new(&mut layout, "top", shape);
        Ok(Self { layout, widths: config.dense_and_embeddings(), bottom, dots, top, tasks: config.tasks })
    }
}

impl Bottom {
    fn new(layout: &mut ParameterLayout, config: &ModelConfig, sizes: &[usize], dim: usize) -> Self {
        let sizes = sizes.strip_suffix(&[dim]).unwrap_or(sizes);
        let hidden = Mlp::new(layout, "bottom", config.dense_features, sizes, config.dropout);
        let output = Linear::new(layout, "bottom.output", hidden.outputs(), dim);
        Self { hidden, output }
    }
}

impl Model for Dlrm {
    fn name(&self) -> &'static str {
        "dlrm"
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
        let bottom = self
            .bottom
            .as_ref()
            .zip(inputs.dense)
            .map(|(bottom, dense)| bottom.hidden.forward_then(context, dense, &bottom.output, true));
        let embeddings = inputs.embeddings.expect("a DLRM has sparse features");
        self.top.forward(context, self.dots.forward_beside(context, bottom, embeddings))
    }

    fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value {
        let bottom = self.bottom.as_ref().zip(inputs.dense).map(|(bottom, dense)| {
            let hidden = bottom.hidden.onnx(graph, dense);
            bottom.output.onnx_relu(graph, &hidden)
        });
        let vectors = concatenate_onnx(graph, [bottom.as_ref(), inputs.embeddings.as_ref()]);
        let dots = self.dots.onnx(graph, &vectors);
        let input = concatenate_onnx(graph, [bottom.as_ref(), Some(&dots)]);
        self.top.onnx(graph, input)
    }
}

#[cfg(test)]
pub(super) mod reference {
    use crate::models::reference::{Case, Sample, dot};

    pub(in crate::models) const CASES: &[Case] = &[
        (
            r#"{"kind":"dlrm","bottom":[5,4],"top":[7,6],"denseFeatures":2,"embeddingDims":[4,4,4]}"#,
            [0xF879_8C68_9403_B44C, 0x5165_C082_CA43_61E3, 0x62EC_F161_D1BA_B7D7],
        ),
        (
            r#"{"kind":"dlrm","bottom":[5],"top":[7],"denseFeatures":2,"embeddingDims":[4,4,4]}"#,
            [0xA1F8_AFA3_A02D_1B4F, 0x4399_B907_E464_64C0, 0xB803_4E2E_5C1E_2FCB],
        ),
        (
            r#"{"kind":"dlrm","bottom":[5],"top":[7],"denseFeatures":0,"embeddingDims":[4,4,4]}"#,
            [0xF8F1_3E0F_B676_C8EE, 0xCA5F_519F_FB58_2EDD, 0xB117_87BB_B71D_1ADB],
        ),
        (
            r#"{"kind":"dlrm","bottom":[],"top":[7],"denseFeatures":0,"embeddingDims":[4,4,4]}"#,
            [0xF8F1_3E0F_B676_C8EE, 0xCA5F_519F_FB58_2EDD, 0xB117_87BB_B71D_1ADB],
        ),
    ];

    pub(in crate::models) fn logit(sample: &Sample<'_>, bottom: &[usize], top: &[usize]) -> f64 {
        let mut vectors = sample.vectors();
        let dim = vectors[0].len();
        let mut input = Vec::new();
        if !sample.dense.is_empty() {
            let hidden = sample.mlp("bottom", bottom.strip_suffix(&[dim]).unwrap_or(bottom), sample.dense.clone());
            let output = sample.linear("bottom.output", &hidden, dim);
            input = output.iter().map(|x| x.max(0.0)).collect();
            vectors.insert(0, input.clone());
        }
        for i in 0..vectors.len() {
            for j in 0..i {
                input.push(dot(&vectors[i], &vectors[j]));
            }
        }
        sample.mlp_logit("top", top, input)
    }
}
