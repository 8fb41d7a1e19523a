//! Carries parameters from one model to another of the same settings whose features differ. A
//! weight carries over if both models have its input and its output. Inputs count as the same by
//! the names of their features and never by position. All other weights keep their initial values.

use std::collections::HashMap;

use rectrain_kinds::{CrossStructure, ModelSettings};

use crate::DenseError;
use crate::layers::hidden_sizes;
use crate::layout::{ParameterEntry, ParameterLayout};
use crate::models::ModelConfig;

/// A model with the names of its inputs.
#[derive(Debug, Clone, Copy)]
pub struct NamedModel<'a> {
    /// The model.
    pub config: &'a ModelConfig,
    /// The names of the sparse features, in the order of `config.embedding_dims`.
    pub sparse: &'a [String],
    /// The names of the dense features, in the order of their columns.
    pub dense: &'a [String],
}

/// The parameters that two models share, as runs of the flat buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    runs: Vec<Run>,
    saved_total: usize,
    own_total: usize,
}

/// Parameters that lie side by side in both buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    saved: usize,
    own: usize,
    length: usize,
}

/// The meaning of a row or a column of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Column<'a> {
    /// A column of the embedding of a sparse feature.
    Embedding(&'a str, usize),
    /// A dense feature.
    Dense(&'a str),
    /// The dot product of two vectors; see [`pair`].
    Pair(Option<&'a str>, Option<&'a str>),
    /// A column of the bottom MLP's output.
    Bottom(usize),
    /// A column that does not depend on the features.
    Hidden(usize),
}

impl Transfer {
    /// The parameters that `saved` and `own` share. Their settings must be equal.
    ///
    /// # Errors
    /// [`DenseError::InvalidModel`] if one of the models cannot be built, if the numbers of names
    /// do not fit it, or if the settings differ.
    pub fn between(saved: NamedModel<'_>, own: NamedModel<'_>) -> Result<Self, DenseError> {
        if saved.config.settings != own.config.settings || saved.config.tasks != own.config.tasks {
            return Err(invalid(own.config, "its layers differ from those of the model that it takes weights from"));
        }
        for model in [saved, own] {
            if model.sparse.len() != model.config.embedding_dims.len()
                || model.dense.len() != model.config.dense_features
            {
                return Err(invalid(model.config, "the number of its inputs differs from the number of their names"));
            }
        }
        let (saved_model, own_model) = (saved.config.build()?, own.config.build()?);
        let (saved_layout, own_layout) = (saved_model.layout(), own_model.layout());
        let mut transfer = Self { runs: Vec::new(), saved_total: saved_layout.total(), own_total: own_layout.total() };
        for entry in own_layout.entries() {
            transfer.add(entry, own, saved_layout, saved);
        }
        Ok(transfer)
    }

    fn add(
        &mut self,
        entry: &ParameterEntry,
        own: NamedModel<'_>,
        saved_layout: &ParameterLayout,
        saved: NamedModel<'_>,
    ) {
        let Some(from) = saved_layout.find(&entry.name) else { return };
        let ([own_rows, own_columns], [rows, columns]) = (own.axes(entry), saved.axes(from));
        let columns = found_in(&columns, &own_columns);
        for (row, from_row) in found_in(&rows, &own_rows) {
            for &(column, from_column) in &columns {
                let saved = from.offset + from_row * from.shape[1] + from_column;
                self.push(saved, entry.offset + row * entry.shape[1] + column);
            }
        }
    }

    /// Adds one parameter, to the last run if it follows that.
    fn push(&mut self, saved: usize, own: usize) {
        match self.runs.last_mut() {
            Some(run) if run.saved + run.length == saved && run.own + run.length == own => run.length += 1,
            _ => self.runs.push(Run { saved, own, length: 1 }),
        }
    }

    /// The parameters of the model that take no value over.
    #[must_use]
    pub fn fresh(&self) -> usize {
        self.own_total - self.runs.iter().map(|run| run.length).sum::<usize>()
    }

    /// Copies the values of all shared parameters, or of a vector of the optimizer's state.
    ///
    /// # Errors
    /// [`DenseError::RestoreLength`] if a slice is not as long as its model has parameters.
    pub fn copy(&self, saved: &[f32], own: &mut [f32]) -> Result<(), DenseError> {
        for (what, expected, got) in
            [("parameters of the checkpoint", self.saved_total, saved.len()), ("parameters", self.own_total, own.len())]
        {
            if expected != got {
                return Err(DenseError::RestoreLength { what, expected, got });
            }
        }
        for &Run { saved: from, own: to, length } in &self.runs {
            own[to..to + length].copy_from_slice(&saved[from..from + length]);
        }
        Ok(())
    }
}

impl<'a> NamedModel<'a> {
    /// The meanings of the rows and columns of a parameter of this model.
    fn axes(&self, entry: &ParameterEntry) -> [Vec<Column<'a>>; 2] {
        let [rows, columns] = entry.shape;
        let rows_of = |labels: Vec<Column<'a>>| [labels, hidden(columns)];
        match (&self.config.settings, entry.name.as_str()) {
            (_, "firstOrder.weight") => rows_of(self.dense_columns()),
            (
                ModelSettings::Dnn { hidden: sizes }
                | ModelSettings::DeepFm { hidden: sizes }
                | ModelSettings::WideDeep { hidden: sizes },
                name,
            ) if name == first_layer("deep", "deep.logit", hidden_sizes(sizes)) => rows_of(self.inputs()),
            (ModelSettings::Dlrm { bottom, top }, name) => {
                if name == first_layer("top", "top.logit", hidden_sizes(top)) {
                    rows_of(self.interactions())
                } else if name == first_layer("bottom", "bottom.output", self.without_output(bottom)) {
                    rows_of(self.dense_columns())
                } else {
                    [hidden(rows), hidden(columns)]
                }
            }
            (ModelSettings::Dcn { .. }, "cross.weight" | "deep.0.weight") => rows_of(self.inputs()),
            (ModelSettings::Dcn { .. }, name) if name.starts_with("cross.") => [hidden(rows), self.inputs()],
            (ModelSettings::DcnV2 { .. }, name) => self.axes_of_crosses(name, entry.shape),
            _ => [hidden(rows), hidden(columns)],
        }
    }

    fn axes_of_crosses(&self, name: &str, shape: [usize; 2]) -> [Vec<Column<'a>>; 2] {
        let [rows, columns] = shape.map(hidden);
        let ModelSettings::DcnV2 { structure, low_rank, hidden: sizes, .. } = &self.config.settings else {
            return [rows, columns];
        };
        let is_cross = name.starts_with("cross.");
        if is_cross && name.ends_with(".down") {
            return [self.inputs(), columns];
        }
        if is_cross && name.ends_with(".bias") {
            return [rows, self.inputs()];
        }
        if is_cross {
            return [if low_rank.is_some() { rows } else { self.inputs() }, self.inputs()];
        }
        let has_deep = !hidden_sizes(sizes).is_empty();
        match name {
            "deep.0.weight" => [self.inputs(), columns],
            "logit.weight" if !has_deep => [self.inputs(), columns],
            "logit.weight" if *structure == CrossStructure::Parallel => {
                let mut labels = self.inputs();
                labels.extend(hidden(shape[0].saturating_sub(labels.len())));
                [labels, columns]
            }
            _ => [rows, columns],
        }
    }

    /// The widths of the bottom MLP without the layer that the model adds.
    fn without_output(&self, bottom: &'a [usize]) -> &'a [usize] {
        let dim = self.config.embedding_dims.first().copied().unwrap_or_default();
        bottom.strip_suffix(&[dim]).unwrap_or(bottom)
    }

    fn dense_columns(&self) -> Vec<Column<'a>> {
        self.dense.iter().map(|name| Column::Dense(name)).collect()
    }

    /// Embeddings and dense features side by side.
    fn inputs(&self) -> Vec<Column<'a>> {
        let mut labels = Vec::new();
        for (name, dim) in self.sparse.iter().zip(&self.config.embedding_dims) {
            labels.extend((0..*dim).map(|column| Column::Embedding(name, column)));
        }
        labels.extend(self.dense_columns());
        labels
    }

    /// The inputs of DLRM's top MLP: the bottom MLP's output, and the dot products of all pairs.
    fn interactions(&self) -> Vec<Column<'a>> {
        let mut labels = Vec::new();
        let mut vectors: Vec<Option<&'a str>> = Vec::new();
        if self.config.dense_features > 0 {
            let dim = self.config.embedding_dims.first().copied().unwrap_or_default();
            labels.extend((0..dim).map(Column::Bottom));
            vectors.push(None);
        }
        vectors.extend(self.sparse.iter().map(|name| Some(name.as_str())));
        for (row, one) in vectors.iter().enumerate() {
            labels.extend(vectors[..row].iter().map(|other| pair(*one, *other)));
        }
        labels
    }
}

/// The dot product of two vectors, in either order. `None` is the bottom MLP's output.
fn pair<'a>(one: Option<&'a str>, other: Option<&'a str>) -> Column<'a> {
    Column::Pair(one.min(other), one.max(other))
}

/// The weight of the layer that takes the inputs: the first hidden layer, or else the output layer.
fn first_layer(mlp: &str, output: &str, hidden: &[usize]) -> String {
    if hidden.is_empty() { format!("{output}.weight") } else { format!("{mlp}.0.weight") }
}

fn hidden<'a>(columns: usize) -> Vec<Column<'a>> {
    (0..columns).map(Column::Hidden).collect()
}

/// The positions in `own` whose meaning `saved` has too, each with its position there.
fn found_in(saved: &[Column<'_>], own: &[Column<'_>]) -> Vec<(usize, usize)> {
    let places: HashMap<&Column<'_>, usize> = saved.iter().zip(0..).collect();
    let found = |(label, position): (&Column<'_>, usize)| Some((position, *places.get(label)?));
    own.iter().zip(0..).filter_map(found).collect()
}

fn invalid(config: &ModelConfig, reason: &str) -> DenseError {
    DenseError::InvalidModel { model: config.name().to_owned(), reason: reason.to_owned() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;

    const DIM: usize = 2;

    fn all_settings() -> Vec<ModelSettings> {
        let crosses = |structure, low_rank, hidden: &[usize]| ModelSettings::DcnV2 {
            structure,
            cross_layers: 2,
            low_rank,
            hidden: hidden.to_vec(),
        };
        vec![
            ModelSettings::Dlrm { bottom: vec![3], top: vec![4] },
            ModelSettings::Dlrm { bottom: vec![], top: vec![] },
            ModelSettings::DeepFm { hidden: vec![4, 3] },
            ModelSettings::Dnn { hidden: vec![4] },
            ModelSettings::Dnn { hidden: vec![] },
            ModelSettings::WideDeep { hidden: vec![4] },
            ModelSettings::Dcn { cross_layers: 2, hidden: vec![4] },
            crosses(CrossStructure::Parallel, None, &[4]),
            crosses(CrossStructure::Parallel, Some(2), &[]),
            crosses(CrossStructure::Stacked, Some(2), &[4]),
            ModelSettings::Fm,
            ModelSettings::Lr,
        ]
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn config(settings: &ModelSettings, sparse: &[&str], dense: &[&str]) -> ModelConfig {
        let dim = if *settings == ModelSettings::Lr { 0 } else { DIM };
        ModelConfig::new(settings.clone(), dense.len(), vec![dim; sparse.len()])
    }

    /// Carries the values 1, 2, … from a model to one with other features.
    fn carry(settings: &ModelSettings, saved: (&[&str], &[&str]), own: (&[&str], &[&str])) -> (Transfer, Vec<f32>) {
        let configs = [saved, own].map(|(sparse, dense)| config(settings, sparse, dense));
        let named = [saved, own].map(|(sparse, dense)| (names(sparse), names(dense)));
        let [one, other] =
            [0, 1].map(|at| NamedModel { config: &configs[at], sparse: &named[at].0, dense: &named[at].1 });
        let transfer = Transfer::between(one, other).unwrap();
        let values: Vec<f32> = (1..=transfer.saved_total).map(|value| value as f32).collect();
        let mut taken = vec![0.0; transfer.own_total];
        transfer.copy(&values, &mut taken).unwrap();
        (transfer, taken)
    }

    #[test]
    fn an_unchanged_model_carries_over_as_one_run() {
        for settings in all_settings() {
            let same: (&[&str], &[&str]) = (&["a", "b", "c"], &["x", "y"]);
            let (transfer, taken) = carry(&settings, same, same);
            assert_eq!((transfer.runs.len(), transfer.fresh()), (1, 0), "{settings:?}");
            assert_eq!(taken.last(), Some(&(transfer.saved_total as f32)), "{settings:?}");
        }
    }

    #[test]
    fn features_in_another_order_lose_no_weight() {
        for settings in all_settings() {
            let (transfer, mut taken) =
                carry(&settings, (&["a", "b", "c"], &["x", "y"]), (&["c", "a", "b"], &["y", "x"]));
            assert_eq!(transfer.fresh(), 0, "{settings:?}");
            taken.sort_by(f32::total_cmp);
            let all: Vec<f32> = (1..=transfer.saved_total).map(|value| value as f32).collect();
            assert_eq!(taken, all, "{settings:?}");
        }
    }

    #[test]
    fn features_that_come_and_go_leave_all_other_weights() {
        for settings in all_settings() {
            let few: (&[&str], &[&str]) = (&["a", "c"], &["x"]);
            let many: (&[&str], &[&str]) = (&["a", "b", "c"], &["w", "x"]);
            let (grown, taken) = carry(&settings, few, many);
            assert_eq!(grown.fresh(), grown.own_total - grown.saved_total, "{settings:?}");
            let (shrunk, _) = carry(&settings, many, few);
            assert_eq!(shrunk.fresh(), 0, "{settings:?}");
            // There and back, every weight is again where it was.
            let mut back = vec![0.0; shrunk.own_total];
            shrunk.copy(&taken, &mut back).unwrap();
            let all: Vec<f32> = (1..=grown.saved_total).map(|value| value as f32).collect();
            assert_eq!(back, all, "{settings:?}");
        }
    }

    #[test]
    fn a_new_feature_shifts_no_row_of_the_first_layer() {
        let settings = ModelSettings::Dnn { hidden: vec![1, 1] };
        let (_, taken) = carry(&settings, (&["a", "c"], &[]), (&["a", "b", "c"], &[]));
        // The layer has one output: two rows of `a`, two fresh ones of `b`, two of `c`, and a bias.
        assert_eq!(taken[..7], [1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 5.0]);
    }

    #[test]
    fn wider_layers_and_wrong_lengths_are_refused() {
        let (one, wider) = (ModelSettings::Dnn { hidden: vec![4] }, ModelSettings::Dnn { hidden: vec![5] });
        let (configs, sparse) = ([&one, &wider].map(|settings| config(settings, &["a"], &[])), names(&["a"]));
        let [one, wider] = [0, 1].map(|at| NamedModel { config: &configs[at], sparse: &sparse, dense: &[] });
        assert!(Transfer::between(one, wider).is_err());
        assert!(Transfer::between(one, NamedModel { sparse: &[], ..one }).is_err());
        let same = Transfer::between(one, one).unwrap();
        assert!(same.copy(&[0.0], &mut vec![0.0; same.own_total]).is_err());
    }
}
