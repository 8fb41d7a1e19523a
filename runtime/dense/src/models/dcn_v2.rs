//! DCN-V2 (Wang et al. 2021): explicit crosses of the features and an MLP, over embeddings and
//! dense features.

use burn::tensor::Tensor;
use rectrain_kinds::CrossStructure;

use super::{Model, ModelConfig, checks, concatenate, concatenate_onnx};
use crate::DenseError;
use crate::inputs::{InputWidths, Inputs};
use crate::layers::{Context, Cross, Linear, Mlp, hidden_sizes};
use crate::layout::ParameterLayout;
use crate::onnx::{Graph, Value};

#[derive(Debug)]
pub(super) struct DcnV2 {
    layout: ParameterLayout,
    widths: InputWidths,
    structure: CrossStructure,
    crosses: Vec<Cross>,
    deep: Mlp,
    logit: Linear,
    tasks: usize,
}

/// The sizes of the crosses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Crosses {
    pub(super) structure: CrossStructure,
    /// Number of cross layers.
    pub(super) layers: usize,
    /// Rank of their matrices; none for full matrices.
    pub(super) rank: Option<usize>,
}

impl DcnV2 {
    pub(super) fn new(config: &ModelConfig, crosses: Crosses, hidden: &[usize]) -> Result<Self, DenseError> {
        checks::cross_layers(config, crosses.layers)?;
        if crosses.rank == Some(0) {
            return Err(config.invalid("the rank of its cross layers is 0; use at least 1, or none for full matrices"));
        }
        checks::sizes(config, "hidden", hidden)?;
        let Crosses { structure, layers, rank } = crosses;
        let width = config.embedding_width() + config.dense_features;
        let mut layout = ParameterLayout::default();
        let crosses =
            (0..layers).map(|index| Cross::new(&mut layout, &format!("cross.{index}"), width, rank)).collect();
        let deep = Mlp::new(&mut layout, "deep", width, hidden_sizes(hidden), config.dropout);
        let last = match structure {
            CrossStructure::Parallel if !deep.is_empty() => width + deep.outputs(),
            CrossStructure::Parallel | CrossStructure::Stacked => deep.outputs(),
        };
        let logit = Linear::new(&mut layout, "logit", last, config.tasks);
        let widths = config.dense_and_embeddings();
        Ok(Self { layout, widths, structure, crosses, deep, logit, tasks: config.tasks })
    }
}

impl Model for DcnV2 {
    fn name(&self) -> &'static str {
        "dcnV2"
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
        let mut crossed = x0.clone();
        for cross in &self.crosses {
            crossed = cross.forward(context, x0.clone(), crossed);
        }
        let last = match self.structure {
            CrossStructure::Stacked => self.deep.forward(context, crossed),
            CrossStructure::Parallel if self.deep.is_empty() => crossed,
            CrossStructure::Parallel => {
                let deep = self.deep.forward(context, x0);
                concatenate(context, [Some(crossed), Some(deep)])
            }
        };
        self.logit.forward(context, last)
    }

    fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value {
        let x0 = concatenate_onnx(graph, [inputs.embeddings.as_ref(), inputs.dense.as_ref()]);
        let mut crossed = x0.clone();
        for cross in &self.crosses {
            crossed = cross.onnx(graph, &x0, &crossed);
        }
        let last = match self.structure {
            CrossStructure::Stacked => self.deep.onnx(graph, crossed),
            CrossStructure::Parallel if self.deep.is_empty() => crossed,
            CrossStructure::Parallel => {
                let deep = self.deep.onnx(graph, x0);
                graph.concatenate(&[&crossed, &deep])
            }
        };
        self.logit.onnx(graph, &last)
    }
}

#[cfg(test)]
pub(super) mod reference {
    use super::{CrossStructure, Crosses};
    use crate::models::reference::{Case, Sample};

    pub(in crate::models) const CASES: &[Case] = &[
        (
            r#"{"kind":"dcnV2","structure":"parallel","crossLayers":3,"lowRank":null,"hidden":[6,5],"denseFeatures":2,"embeddingDims":[4,2,3]}"#,
            [0x6DF5_2901_21B7_365C, 0x80A1_D1A3_9DC5_22A5, 0xDC69_5F55_30F7_0850],
        ),
        (
            r#"{"kind":"dcnV2","structure":"parallel","crossLayers":3,"lowRank":2,"hidden":[6],"denseFeatures":2,"embeddingDims":[4,2,3]}"#,
            [0xF401_8599_5B20_127B, 0xCC73_2B6B_C0E1_B33E, 0xB73B_4887_25E9_19D7],
        ),
        (
            r#"{"kind":"dcnV2","structure":"parallel","crossLayers":3,"lowRank":null,"hidden":[],"denseFeatures":2,"embeddingDims":[4,2,3]}"#,
            [0x717E_70FB_E89B_6962, 0x8B64_4CCB_7341_4176, 0x6E19_AB25_92F6_E213],
        ),
        (
            r#"{"kind":"dcnV2","structure":"parallel","crossLayers":2,"lowRank":2,"hidden":[],"denseFeatures":2,"embeddingDims":[4,2,3]}"#,
            [0xE783_3E26_57B2_78A2, 0xFFAE_8487_9FC8_30A5, 0x7AA3_60CD_F6CE_B057],
        ),
        (
            r#"{"kind":"dcnV2","structure":"stacked","crossLayers":3,"lowRank":null,"hidden":[6,5],"denseFeatures":2,"embeddingDims":[4,2,3]}"#,
            [0xEB3C_D991_1D1D_0286, 0x6BC7_9766_AD80_259D, 0xDB69_C443_C0DE_60F6],
        ),
        (
            r#"{"kind":"dcnV2","structure":"stacked","crossLayers":3,"lowRank":2,"hidden":[6],"denseFeatures":2,"embeddingDims":[4,2,3]}"#,
            [0xD105_AE1A_413C_BC11, 0x0527_63ED_59E7_6368, 0x2315_F1BB_22DE_8825],
        ),
        (
            r#"{"kind":"dcnV2","structure":"stacked","crossLayers":1,"lowRank":2,"hidden":[6],"denseFeatures":0,"embeddingDims":[4,2,3]}"#,
            [0x949C_A008_0C22_2957, 0xE72D_5213_0C81_B5E2, 0x618F_2401_79AB_5A49],
        ),
    ];

    pub(in crate::models) fn logit(sample: &Sample<'_>, crosses: Crosses, hidden: &[usize]) -> f64 {
        let x0 = sample.both();
        let mut x = x0.clone();
        for layer in 0..crosses.layers {
            x = cross(sample, layer, crosses.rank, &x0, &x);
        }
        let last = match crosses.structure {
            CrossStructure::Stacked => sample.mlp("deep", hidden, x),
            CrossStructure::Parallel if hidden.is_empty() => x,
            CrossStructure::Parallel => [x, sample.mlp("deep", hidden, x0)].concat(),
        };
        sample.linear("logit", &last, 1)[0]
    }

    fn cross(sample: &Sample<'_>, layer: usize, rank: Option<usize>, x0: &[f64], x: &[f64]) -> Vec<f64> {
        let (name, width) = (format!("cross.{layer}"), x0.len());
        let down = format!("{name}.down");
        let column = |r: usize, rank: usize| (0..width).map(|i| x[i] * sample.value(&down, i * rank + r)).sum();
        let reduced = match rank {
            None => x.to_vec(),
            Some(rank) => (0..rank).map(|r| column(r, rank)).collect(),
        };
        let mapped = sample.linear(&name, &reduced, width);
        (0..width).map(|i| x0[i] * mapped[i] + x[i]).collect()
    }
}
