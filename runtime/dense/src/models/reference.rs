//! An independent definition of every model for the tests: scalar loops in f64, one sample at a
//! time, with parameters found by name. It shares with the models only the parameter layout and the
//! random stream of the dropout masks. The formula of each model is in the model's file.

use rectrain_kinds::ModelSettings;

use super::{ModelConfig, dcn, dcn_v2, deepfm, dlrm, dnn, fm, lr, wide_deep};
use crate::layout::ParameterLayout;
use crate::random::{Stream, name_key};

/// A model under test: its JSON, and digests of its layout, its initial parameters and its ONNX
/// file. Checkpoints and exports outlive a version of this crate, so a digest must never change.
pub(crate) type Case = (&'static str, [u64; 3]);

/// Every model, and every branch within a model.
pub(crate) fn cases() -> Vec<Case> {
    [
        dlrm::reference::CASES,
        deepfm::reference::CASES,
        dnn::reference::CASES,
        wide_deep::reference::CASES,
        dcn::reference::CASES,
        dcn_v2::reference::CASES,
        fm::reference::CASES,
        lr::reference::CASES,
    ]
    .concat()
}

/// [`cases`] as configurations.
pub(crate) fn all_models() -> Vec<ModelConfig> {
    cases().iter().map(|(json, _)| serde_json::from_str(json).unwrap()).collect()
}

/// Dropout in training: seed, step, rank.
pub(crate) type DropoutKey = Option<[u64; 3]>;

/// A batch in f64.
#[derive(Debug, Clone)]
pub(crate) struct Batch {
    pub(crate) samples: usize,
    pub(crate) dense: Vec<f64>,
    pub(crate) embeddings: Vec<f64>,
    pub(crate) linear: Vec<f64>,
    pub(crate) labels: Vec<f64>,
}

/// A model computed from its definition.
pub(crate) struct Reference<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) layout: &'a ParameterLayout,
    pub(crate) dropout: DropoutKey,
}

impl Reference<'_> {
    /// Σ over samples of the loss, from the definition of the likelihood.
    pub(crate) fn loss_sum(&self, parameters: &[f64], batch: &Batch) -> f64 {
        (0..batch.samples)
            .map(|sample| {
                let p = 1.0 / (1.0 + (-self.logit(parameters, batch, sample)).exp());
                let y = batch.labels[sample];
                -(y * p.ln() + (1.0 - y) * (1.0 - p).ln())
            })
            .sum()
    }

    pub(crate) fn logit(&self, parameters: &[f64], batch: &Batch, sample: usize) -> f64 {
        let sample = self.sample(parameters, batch, sample);
        match &self.config.settings {
            ModelSettings::Dlrm { bottom, top } => dlrm::reference::logit(&sample, bottom, top),
            ModelSettings::DeepFm { hidden } => deepfm::reference::logit(&sample, hidden),
            ModelSettings::Dnn { hidden } => dnn::reference::logits(&sample, hidden, 1)[0],
            ModelSettings::WideDeep { hidden } => wide_deep::reference::logit(&sample, hidden),
            ModelSettings::Dcn { cross_layers, hidden } => dcn::reference::logit(&sample, *cross_layers, hidden),
            ModelSettings::DcnV2 { structure, cross_layers, low_rank, hidden } => {
                let crosses = dcn_v2::Crosses { structure: *structure, layers: *cross_layers, rank: *low_rank };
                dcn_v2::reference::logit(&sample, crosses, hidden)
            }
            ModelSettings::Fm => fm::reference::logit(&sample),
            ModelSettings::Lr => lr::reference::logit(&sample),
        }
    }

    /// The logits of a `dnn` with several tasks.
    pub(crate) fn logits(&self, parameters: &[f64], batch: &Batch, sample: usize) -> Vec<f64> {
        let ModelSettings::Dnn { hidden } = &self.config.settings else { panic!("{:?}", self.config) };
        dnn::reference::logits(&self.sample(parameters, batch, sample), hidden, self.config.tasks)
    }

    fn sample<'a>(&'a self, parameters: &'a [f64], batch: &Batch, index: usize) -> Sample<'a> {
        let row = |values: &[f64]| -> Vec<f64> {
            let width = values.len() / batch.samples;
            values[index * width..(index + 1) * width].to_vec()
        };
        let (dense, embeddings, linear) = (row(&batch.dense), row(&batch.embeddings), row(&batch.linear));
        Sample { reference: self, parameters, index, dense, embeddings, linear }
    }
}

/// One sample, with the parameters.
pub(crate) struct Sample<'a> {
    reference: &'a Reference<'a>,
    parameters: &'a [f64],
    /// Position in the batch.
    index: usize,
    pub(crate) dense: Vec<f64>,
    pub(crate) embeddings: Vec<f64>,
    pub(crate) linear: Vec<f64>,
}

impl Sample<'_> {
    /// Embeddings and dense features side by side.
    pub(crate) fn both(&self) -> Vec<f64> {
        [self.embeddings.clone(), self.dense.clone()].concat()
    }

    /// The embeddings, which have one dimension.
    pub(crate) fn vectors(&self) -> Vec<Vec<f64>> {
        self.embeddings.chunks(self.reference.config.embedding_dims[0]).map(<[f64]>::to_vec).collect()
    }

    /// A value of a parameter.
    pub(crate) fn value(&self, name: &str, index: usize) -> f64 {
        let entry = self.reference.layout.find(name).unwrap_or_else(|| panic!("no parameter {name}"));
        self.parameters[entry.range()][index]
    }

    /// A linear layer; weights are `[in, out]`.
    pub(crate) fn linear(&self, name: &str, input: &[f64], outputs: usize) -> Vec<f64> {
        let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
        (0..outputs)
            .map(|o| {
                let weighted: f64 = (0..input.len()).map(|i| input[i] * self.value(&weight, i * outputs + o)).sum();
                weighted + self.value(&bias, o)
            })
            .collect()
    }

    /// Hidden layers of these sizes.
    pub(crate) fn mlp(&self, name: &str, sizes: &[usize], mut x: Vec<f64>) -> Vec<f64> {
        for (layer, &size) in sizes.iter().enumerate() {
            let layer = format!("{name}.{layer}");
            x = self.linear(&layer, &x, size);
            for (unit, value) in x.iter_mut().enumerate() {
                *value = if *value > 0.0 { *value * self.mask(&layer, size, unit) } else { 0.0 };
            }
        }
        x
    }

    fn mask(&self, layer: &str, units: usize, unit: usize) -> f64 {
        let Some([seed, step, rank]) = self.reference.dropout else {
            return 1.0;
        };
        let rate = f64::from(self.reference.config.dropout);
        let stream = Stream::new(&[seed, step, rank, name_key(layer)]);
        let index = (self.index * units + unit) as u64;
        if stream.unit(index) < rate { 0.0 } else { 1.0 / (1.0 - rate) }
    }

    /// Hidden layers and the layer that makes the logit. A last size of 1 stands for that layer.
    pub(crate) fn mlp_logit(&self, name: &str, sizes: &[usize], x: Vec<f64>) -> f64 {
        self.mlp_logits(name, sizes, x, 1)[0]
    }

    /// [`Sample::mlp_logit`] with several logits.
    pub(crate) fn mlp_logits(&self, name: &str, sizes: &[usize], x: Vec<f64>, logits: usize) -> Vec<f64> {
        let x = self.mlp(name, sizes.strip_suffix(&[1]).unwrap_or(sizes), x);
        self.linear(&format!("{name}.logit"), &x, logits)
    }

    /// First-order weights, dense features and bias.
    pub(crate) fn first_order(&self) -> f64 {
        let mut sum: f64 = self.linear.iter().sum();
        for (index, x) in self.dense.iter().enumerate() {
            sum += x * self.value("firstOrder.weight", index);
        }
        sum + self.value("firstOrder.bias", 0)
    }

    /// Σ over pairs of features of their dot product, for which FM has a shorter formula.
    pub(crate) fn pairwise_sum(&self) -> f64 {
        let vectors = self.vectors();
        let mut sum = 0.0;
        for i in 0..vectors.len() {
            for j in i + 1..vectors.len() {
                sum += dot(&vectors[i], &vectors[j]);
            }
        }
        sum
    }
}

/// The dot product of two vectors.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
