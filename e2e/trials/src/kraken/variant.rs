//! One way to train: the overrides of a data set's manifest, and the bytes that its rows cost.

/// Values of an embedding (Kraken's appendix).
pub(super) const EMBEDDING_DIM: usize = 4;
/// The slots of a table. Each keeps at least one row, so a smaller budget cannot be kept.
const SLOTS: u64 = 1_024;

/// A model of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Model {
    /// Its name in a manifest.
    pub(super) kind: &'static str,
    /// Whether a row has a first-order weight beside the embedding.
    has_first_order: bool,
}

/// Kraken's four models. The product has version 2 of the deep and cross network.
pub(super) const MODELS: [Model; 4] = [
    Model { kind: "deepfm", has_first_order: true },
    Model { kind: "wideDeep", has_first_order: true },
    Model { kind: "dnn", has_first_order: false },
    Model { kind: "dcnV2", has_first_order: false },
];

impl Model {
    /// The values of a row.
    fn width(self) -> usize {
        EMBEDDING_DIM + usize::from(self.has_first_order)
    }
}

/// An optimizer's name in a manifest, and its learning rate.
pub(super) type Rate = (&'static str, f64);

/// The optimizers of both kinds of parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Optimizers {
    pub(super) dense: Rate,
    pub(super) sparse: Rate,
}

/// Adam for both, as in Kraken §V-C.
pub(super) const ADAM: Optimizers = Optimizers { dense: ("adam", 0.001), sparse: ("adam", 0.001) };

impl Optimizers {
    /// The overrides that select them. Only Adam has the appendix's L2 of 1e-5 as its
    /// `weightDecay`.
    pub(super) fn sets(&self) -> Vec<String> {
        let of = |part: &str, (kind, rate): Rate| {
            let optimizer = format!("spec.training.optimizer.{part}");
            format!("{optimizer}.kind={kind},{optimizer}.learningRate={rate}")
        };
        let mut sets = vec![of("dense", self.dense), of("sparse", self.sparse)];
        if self.dense.0 == "adam" {
            sets.push("spec.training.optimizer.dense.weightDecay=0.00001".to_owned());
        }
        sets
    }

    /// The bytes of a row's values and optimizer state. Keys, policy words and indexes do not
    /// count: a hashed table of another system has none.
    pub(super) fn row_bytes(&self, model: Model) -> u64 {
        let width = model.width();
        let state = match self.sparse.0 {
            "adam" => 2 * width,
            "adaGrad" => width,
            "rowWiseAdaGrad" => 1,
            _ => 0,
        };
        ((width + state) * size_of::<f32>()) as u64
    }
}

/// One way to train.
#[derive(Clone, Debug)]
pub(super) struct Variant {
    /// Its name in the results.
    pub(super) name: String,
    /// The rows that it may have, as a share of the ids of the training rows.
    pub(super) memory: f64,
    /// The rows of all hashed tables together. `None` if every id has a row of its own.
    pub(super) hashed_rows: Option<u64>,
    /// Whether the frequency levels of the rows are a part of the result. It takes a checkpoint.
    pub(super) counts_levels: bool,
    pub(super) optimizers: Optimizers,
    /// The overrides, each an argument of `--set`, beside model, optimizers and seed.
    pub(super) sets: Vec<String>,
}

impl Variant {
    /// A way to train in which every id has a row for good.
    pub(super) fn unbounded(name: impl Into<String>, optimizers: Optimizers) -> Self {
        Self { name: name.into(), memory: 1.0, hashed_rows: None, counts_levels: false, optimizers, sets: Vec::new() }
    }

    /// A way to train with a budget for this share of `ids`.
    pub(super) fn bounded(name: impl Into<String>, memory: f64, ids: u64) -> Self {
        let budget = format!("spec.features.memory.maxRows={}", budget(memory, ids));
        Self { memory, sets: vec![budget], ..Self::unbounded(name, ADAM) }
    }

    /// Adds overrides.
    pub(super) fn with(mut self, sets: impl IntoIterator<Item = String>) -> Self {
        self.sets.extend(sets);
        self
    }
}

/// The rows of a budget for this share of `ids`.
pub(super) fn budget(memory: f64, ids: u64) -> u64 {
    ((memory * ids as f64).round() as u64).max(SLOTS)
}

/// The override of a setting of a feature.
pub(super) fn feature_set(feature: usize, setting: &str, value: impl std::fmt::Display) -> String {
    format!("spec.features.sparse[{feature}].{setting}={value}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_costs_its_values_and_the_state_of_its_optimizer() {
        let bytes = |sparse, model| Optimizers { sparse: (sparse, 0.1), ..ADAM }.row_bytes(model);
        let [deepfm, _, dnn, _] = MODELS;
        assert_eq!(["adam", "adaGrad", "rowWiseAdaGrad", "sgd"].map(|kind| bytes(kind, deepfm)), [60, 40, 24, 20]);
        assert_eq!(["adam", "adaGrad", "rowWiseAdaGrad", "sgd"].map(|kind| bytes(kind, dnn)), [48, 32, 20, 16]);
    }

    #[test]
    fn a_budget_is_at_least_one_row_a_slot() {
        assert_eq!((budget(0.1, 204_010), budget(0.1, 9_000)), (20_401, 1_024));
        assert_eq!(Variant::bounded("a", 0.6, 9_000).sets, ["spec.features.memory.maxRows=5400"]);
    }

    #[test]
    fn only_adam_decays_weights() {
        let sets = |kind| Optimizers { dense: (kind, 0.01), sparse: ("sgd", 0.1) }.sets();
        assert_eq!(
            sets("sgd"),
            [
                "spec.training.optimizer.dense.kind=sgd,spec.training.optimizer.dense.learningRate=0.01",
                "spec.training.optimizer.sparse.kind=sgd,spec.training.optimizer.sparse.learningRate=0.1",
            ]
        );
        assert_eq!(sets("adam").last().unwrap(), "spec.training.optimizer.dense.weightDecay=0.00001");
    }
}
