//! The weights over embeddings that parameter servers multiply in the mode `des` (Rong et al. 2020,
//! section 4.3). They are one matrix: all vectors that a model multiplies its pooled embeddings by.

use std::ops::Range;

use rectrain_kinds::ModelSettings;

use super::ModelConfig;
use crate::layers::hidden_sizes;
use crate::layout::ParameterLayout;

/// The weight W `[Σ dims, units]` and its biases, in parts of the flat buffer of parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirstLayer {
    /// Columns of W, side by side.
    parts: Vec<Columns>,
}

/// Some columns of W: the first rows of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Columns {
    /// `[Σ dims, units]` in the flat buffer.
    weights: Range<usize>,
    /// Number of columns.
    units: usize,
    /// `[units]` in the flat buffer. `None` means zeros.
    biases: Option<Range<usize>>,
}

impl ModelConfig {
    /// The vectors that the model multiplies its pooled embeddings by: the units of the first layer
    /// of `dnn`, `wideDeep`, `deepfm` and `dcn`, and the crosses of `dcn`. The first layer is the
    /// layer of the logits if there is no hidden layer. 0 for other models.
    pub fn first_units(&self) -> usize {
        self.tower_units() + self.cross_units()
    }

    /// The units of the first layer of the MLP over embeddings and dense features side by side.
    pub(super) fn tower_units(&self) -> usize {
        match &self.settings {
            ModelSettings::Dnn { hidden }
            | ModelSettings::WideDeep { hidden }
            | ModelSettings::DeepFm { hidden }
            | ModelSettings::Dcn { hidden, .. } => hidden_sizes(hidden).first().copied().unwrap_or(self.tasks),
            ModelSettings::Dlrm { .. } | ModelSettings::DcnV2 { .. } | ModelSettings::Fm | ModelSettings::Lr => 0,
        }
    }

    /// The vectors of the cross layers of `dcn` and of its logits. 0 for other models.
    fn cross_units(&self) -> usize {
        match &self.settings {
            ModelSettings::Dcn { cross_layers, .. } => cross_layers + self.tasks,
            _ => 0,
        }
    }

    /// The parameters of [`Self::first_units`] in the flat buffer of the model's `layout`: the
    /// first layer and then the crosses. `None` if there are no such units.
    pub fn first_layer(&self, layout: &ParameterLayout) -> Option<FirstLayer> {
        let width = self.embedding_width();
        let find = |names: [&str; 2]| names.into_iter().find_map(|name| layout.find(name)).map(|entry| entry.offset);
        let columns = |weight: usize, units: usize, bias: Option<usize>| Columns {
            weights: weight..weight + width * units,
            units,
            biases: bias.map(|bias| bias..bias + units),
        };
        let units = self.tower_units();
        let weight = find(["deep.0.weight", "deep.logit.weight"])?;
        let bias = find(["deep.0.bias", "deep.logit.bias"])?;
        let mut parts = vec![columns(weight, units, Some(bias))];
        if let Some(crosses) = layout.find("cross.weight") {
            parts.push(columns(crosses.offset, self.cross_units(), None));
        }
        (units > 0).then_some(FirstLayer { parts })
    }
}

impl FirstLayer {
    /// W, `[Σ dims, units]`, from the flat buffer of parameters.
    #[must_use]
    pub fn weights(&self, parameters: &[f32]) -> Vec<f32> {
        let mut weights = Vec::with_capacity(self.values());
        for row in 0..self.rows() {
            for part in &self.parts {
                weights.extend_from_slice(&parameters[part.row(row)]);
            }
        }
        weights
    }

    /// The biases, `[units]`, from the flat buffer of parameters.
    #[must_use]
    pub fn biases(&self, parameters: &[f32]) -> Vec<f32> {
        let mut biases = Vec::new();
        for part in &self.parts {
            match part.biases.clone() {
                Some(range) => biases.extend_from_slice(&parameters[range]),
                None => biases.resize(biases.len() + part.units, 0.0),
            }
        }
        biases
    }

    /// Adds the gradient of W, `[Σ dims, units]`, to the flat buffer of gradients.
    pub fn add_gradient(&self, gradient: &[f32], gradients: &mut [f32]) {
        let mut values = gradient.iter();
        for row in 0..self.rows() {
            for part in &self.parts {
                gradients[part.row(row)].iter_mut().zip(&mut values).for_each(|(sum, value)| *sum += value);
            }
        }
    }

    /// Values of W.
    #[must_use]
    pub fn values(&self) -> usize {
        self.parts.iter().map(|part| part.weights.len()).sum()
    }

    /// Σ dims.
    fn rows(&self) -> usize {
        self.parts.first().map_or(0, |part| part.weights.len() / part.units.max(1))
    }
}

impl Columns {
    /// A row of these columns in the flat buffer.
    fn row(&self, row: usize) -> Range<usize> {
        let start = self.weights.start + row * self.units;
        start..start + self.units
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_the_flat_buffer_lie_side_by_side() {
        // Two rows: columns 0 and 1 from the end of the buffer, and column 2 from its start.
        let pair = Columns { weights: 4..8, units: 2, biases: Some(8..10) };
        let single = Columns { weights: 1..3, units: 1, biases: None };
        let layer = FirstLayer { parts: vec![pair, single] };
        let parameters: Vec<f32> = (0..10).map(|value| value as f32).collect();
        assert_eq!(layer.values(), 6);
        assert_eq!(layer.weights(&parameters), [4.0, 5.0, 1.0, 6.0, 7.0, 2.0]);
        assert_eq!(layer.biases(&parameters), [8.0, 9.0, 0.0]);
        let mut gradients = vec![0.5; 10];
        layer.add_gradient(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &mut gradients);
        assert_eq!(gradients, [0.5, 3.5, 6.5, 0.5, 1.5, 2.5, 4.5, 5.5, 0.5, 0.5]);
    }
}
