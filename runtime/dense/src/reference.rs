//! An independent definition of every model for the tests: scalar loops in f64, one sample at a time, with parameters found by name.
//! It shares with the models only the parameter layout and the random stream of the dropout masks.

use crate::CrossStructure;
use crate::layout::ParameterLayout;
use crate::model::{ModelConfig, ModelKind};
use crate::random::{Stream, name_key};

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
        let row = |values: &[f64]| -> Vec<f64> {
            let width = values.len() / batch.samples;
            values[sample * width..(sample + 1) * width].to_vec()
        };
        let (dense, embeddings, linear) = (row(&batch.dense), row(&batch.embeddings), row(&batch.linear));
        let x0 = [embeddings.clone(), dense.clone()].concat();
        let net = Net { reference: self, parameters, sample };
        let first_order = |net: &Net<'_>| {
            let mut sum: f64 = linear.iter().sum();
            for (index, x) in dense.iter().enumerate() {
                sum += x * net.value("firstOrder.weight", index);
            }
            sum + net.value("firstOrder.bias", 0)
        };
        match &self.config.kind {
            ModelKind::Lr => first_order(&net),
            ModelKind::Fm => first_order(&net) + self.pairwise_sum(&embeddings),
            ModelKind::DeepFm { hidden } => {
                first_order(&net) + self.pairwise_sum(&embeddings) + net.mlp_logit("deep", hidden, x0)
            }
            ModelKind::WideDeep { hidden } => first_order(&net) + net.mlp_logit("deep", hidden, x0),
            ModelKind::Dnn { hidden } => net.mlp_logit("deep", hidden, x0),
            ModelKind::Dlrm { bottom, top } => {
                let dim = self.config.embedding_dims[0];
                let mut vectors: Vec<Vec<f64>> = embeddings.chunks(dim).map(<[f64]>::to_vec).collect();
                let mut top_input = Vec::new();
                if !dense.is_empty() {
                    let mut sizes = bottom.clone();
                    if sizes.last() == Some(&dim) {
                        sizes.pop();
                    }
                    let hidden = net.mlp("bottom", &sizes, dense);
                    let output: Vec<f64> =
                        net.linear("bottom.output", &hidden, dim).iter().map(|x| x.max(0.0)).collect();
                    vectors.insert(0, output.clone());
                    top_input = output;
                }
                for i in 0..vectors.len() {
                    for j in 0..i {
                        top_input.push(vectors[i].iter().zip(&vectors[j]).map(|(a, b)| a * b).sum());
                    }
                }
                net.mlp_logit("top", top, top_input)
            }
            ModelKind::DcnV2 { structure, cross_layers, low_rank, hidden } => {
                let width = x0.len();
                let mut x = x0.clone();
                for layer in 0..*cross_layers {
                    let reduced = match low_rank {
                        None => x.clone(),
                        Some(rank) => (0..*rank)
                            .map(|r| {
                                (0..width).map(|i| x[i] * net.value(&format!("cross.{layer}.down"), i * rank + r)).sum()
                            })
                            .collect(),
                    };
                    let mapped = net.linear(&format!("cross.{layer}"), &reduced, width);
                    x = (0..width).map(|i| x0[i] * mapped[i] + x[i]).collect();
                }
                let last = match structure {
                    CrossStructure::Stacked => net.mlp("deep", hidden, x),
                    CrossStructure::Parallel if hidden.is_empty() => x,
                    CrossStructure::Parallel => [x, net.mlp("deep", hidden, x0)].concat(),
                };
                net.linear("logit", &last, 1)[0]
            }
        }
    }

    /// Σ over pairs of fields of their dot product: what FM's formula shortens.
    fn pairwise_sum(&self, embeddings: &[f64]) -> f64 {
        let dim = self.config.embedding_dims[0];
        let vectors: Vec<&[f64]> = embeddings.chunks(dim).collect();
        let mut sum = 0.0;
        for i in 0..vectors.len() {
            for j in i + 1..vectors.len() {
                sum += vectors[i].iter().zip(vectors[j]).map(|(a, b)| a * b).sum::<f64>();
            }
        }
        sum
    }
}

struct Net<'a> {
    reference: &'a Reference<'a>,
    parameters: &'a [f64],
    sample: usize,
}

impl Net<'_> {
    fn value(&self, name: &str, index: usize) -> f64 {
        let entry = self.reference.layout.find(name).unwrap_or_else(|| panic!("no parameter {name}"));
        self.parameters[entry.range()][index]
    }

    /// Weights are `[in, out]`.
    fn linear(&self, name: &str, input: &[f64], outputs: usize) -> Vec<f64> {
        let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
        (0..outputs)
            .map(|o| {
                let weighted: f64 = (0..input.len()).map(|i| input[i] * self.value(&weight, i * outputs + o)).sum();
                weighted + self.value(&bias, o)
            })
            .collect()
    }

    fn mlp(&self, name: &str, sizes: &[usize], mut x: Vec<f64>) -> Vec<f64> {
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
        let index = (self.sample * units + unit) as u64;
        if stream.unit(index) < rate { 0.0 } else { 1.0 / (1.0 - rate) }
    }

    fn mlp_logit(&self, name: &str, sizes: &[usize], x: Vec<f64>) -> f64 {
        let x = self.mlp(name, sizes, x);
        self.linear(&format!("{name}.logit"), &x, 1)[0]
    }
}
