//! The description of a trained model: how cells become inputs, and how inputs become predictions.
//! It comes from the identity that every checkpoint holds. An export has a copy of it.

use std::collections::BTreeMap;

use rectrain_checkpoint::{FeatureIdentity, Identity};
use rectrain_crds::defaults::DENSE_LIMIT;
use rectrain_data::{CsvFormat, DenseField, LabelField, MissingValue, Schema, SparseField, Transform};
use rectrain_dense::ModelConfig;
use rectrain_embedding::{Initializer, LifePolicy, RowSpec, SparseOptimizer, StoreConfig, ValueType};
use rectrain_kinds::Pooling;
use rectrain_protocol::layout::{FeatureLayout, FeaturePlace};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::ServingError;

/// See the module documentation.
#[derive(Debug, Clone)]
pub struct Description {
    /// The columns of the rows and their meaning. It has no group: only GAUC needs one.
    pub schema: Schema,
    /// The place of each feature in rows and in pooled embeddings.
    pub layout: FeatureLayout,
    /// The tower.
    pub model: ModelConfig,
    /// The shape and the initial values of the rows. The optimizer is not the job's.
    pub store: StoreConfig,
    /// The text format of the training files; `None` if they were Parquet or synthetic.
    pub csv: Option<CsvFormat>,
    /// Texts that stand for a missing value.
    pub null_values: Vec<String>,
}

#[derive(Deserialize)]
struct DenseSection {
    name: String,
    transform: Transform,
    missing: f32,
}

#[derive(Deserialize)]
struct LimitSection {
    limit: f32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CellSection {
    multi_value: Option<SeparatorSection>,
    missing: Option<MissingValue>,
    #[serde(default)]
    hash_buckets: Option<u64>,
}

#[derive(Deserialize)]
struct SeparatorSection {
    separator: String,
}

#[derive(Deserialize)]
struct RowsSection {
    slots: u32,
    seed: u64,
    groups: Vec<GroupSection>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct GroupSection {
    dim: usize,
    zero_columns: usize,
    value_type: ValueType,
    initializer: Initializer,
}

#[derive(Deserialize)]
struct DataSection {
    csv: Option<CsvFormat>,
}

impl Description {
    /// Reads the identity of a checkpoint. Messages call the checkpoint `name`.
    ///
    /// # Errors
    /// [`ServingError::Description`] for a section that is missing, cannot be read, or contradicts
    /// another.
    pub fn of(identity: &Identity, name: &str) -> Result<Self, ServingError> {
        let sections = Sections { identity, name };
        let features: Vec<FeatureIdentity> = sections.read("features")?;
        let rows: RowsSection = sections.read("rows")?;
        let data: DataSection = sections.read("spec.data")?;
        let description = Self {
            schema: schema(&sections, &features)?,
            layout: layout(&sections, &features, &rows)?,
            model: sections.read("model")?,
            store: store(rows),
            csv: data.csv,
            null_values: sections.read_if_there("spec.data.nullValues")?.unwrap_or_default(),
        };
        description.check(&sections)?;
        Ok(description)
    }

    /// Whether a model with the other description takes the same requests, and has rows and dense
    /// parameters of the same sizes.
    #[must_use]
    pub fn answers_as(&self, other: &Self) -> bool {
        let same_inputs = self.schema == other.schema && self.null_values == other.null_values;
        same_inputs && self.layout == other.layout && self.model == other.model && self.store == other.store
    }

    fn check(&self, sections: &Sections<'_>) -> Result<(), ServingError> {
        let dims: Vec<usize> = self.layout.features.iter().map(|place| place.dim).collect();
        if dims != self.model.embedding_dims || self.schema.dense.len() != self.model.dense_features {
            return Err(sections.fault("its model and its features contradict each other".to_owned()));
        }
        self.store.validate().map_err(|error| sections.fault(error.to_string()))
    }
}

/// The sections of an identity, for reading.
struct Sections<'a> {
    identity: &'a Identity,
    name: &'a str,
}

impl Sections<'_> {
    fn read<T: DeserializeOwned>(&self, section: &str) -> Result<T, ServingError> {
        let missing = || {
            self.fault(format!(
                "it has no section `{section}`, so an earlier version of rectrain wrote it; resume the job for one \
                 step, and use the checkpoint that this writes"
            ))
        };
        self.read_if_there(section)?.ok_or_else(missing)
    }

    fn read_if_there<T: DeserializeOwned>(&self, section: &str) -> Result<Option<T>, ServingError> {
        let Some(value) = self.identity.section(section) else { return Ok(None) };
        let read = serde_json::from_value(Value::clone(value));
        read.map(Some).map_err(|error| self.fault(format!("its section `{section}` cannot be read: {error}")))
    }

    fn fault(&self, problem: String) -> ServingError {
        ServingError::Description { model: self.name.to_owned(), problem }
    }
}

fn schema(sections: &Sections<'_>, features: &[FeatureIdentity]) -> Result<Schema, ServingError> {
    let cells: BTreeMap<String, CellSection> = sections.read("spec.features.sparse")?;
    let limits: BTreeMap<String, LimitSection> = sections.read_if_there("spec.features.dense")?.unwrap_or_default();
    let dense: Vec<DenseSection> = sections.read("denseFeatures")?;
    let label: LabelField = sections.read("spec.features.label")?;
    let sparse = features.iter().map(|feature| {
        let cell = cells.get(&feature.name);
        let cell = cell.ok_or_else(|| sections.fault(format!("it does not say how to read `{}`", feature.name)))?;
        Ok(SparseField {
            name: feature.name.clone(),
            table: feature.table.clone(),
            multi_value: cell.multi_value.as_ref().map(|several| several.separator.clone()),
            missing: cell.missing.unwrap_or_default(),
            hash_buckets: cell.hash_buckets,
        })
    });
    let dense = dense.into_iter().map(|DenseSection { name, transform, missing }| {
        let limit = limits.get(&name).map_or(DENSE_LIMIT as f32, |section| section.limit);
        DenseField { name, transform, missing, limit }
    });
    let sparse = sparse.collect::<Result<_, ServingError>>()?;
    Ok(Schema { sparse, dense: dense.collect(), label, group: None, time: None })
}

fn layout(
    sections: &Sections<'_>,
    features: &[FeatureIdentity],
    rows: &RowsSection,
) -> Result<FeatureLayout, ServingError> {
    let linear = features.first().is_some_and(|feature| feature.linear);
    let mut offset = 0;
    let mut places = Vec::with_capacity(features.len());
    for feature in features {
        let group = usize::from(feature.group);
        let row_dim = rows.groups.get(group).map(|group| group.dim);
        if feature.linear != linear || row_dim != Some(feature.dim + usize::from(linear)) {
            return Err(sections.fault(format!("the rows of `{}` have another width than its feature", feature.name)));
        }
        let pooling = feature.pooling.parse::<Pooling>().map_err(|error| sections.fault(error.to_string()))?;
        places.push(FeaturePlace { group, dim: feature.dim, offset, pooling });
        offset += feature.dim;
    }
    let group_dims = rows.groups.iter().map(|group| group.dim).collect();
    Ok(FeatureLayout { features: places, group_dims, linear, embedding_width: offset })
}

/// Initial values do not depend on the optimizer. One without state serves.
fn store(rows: RowsSection) -> StoreConfig {
    let spec = |group: GroupSection| RowSpec {
        dim: group.dim,
        value_type: group.value_type,
        optimizer: SparseOptimizer::Sgd { learning_rate: 1.0 },
        life: LifePolicy::KeepAll,
        initializer: group.initializer,
        zero_columns: group.zero_columns,
        first_order: None,
        share: None,
    };
    let groups = rows.groups.into_iter().map(spec).collect();
    StoreConfig { slots: rows.slots, seed: rows.seed, groups, budget: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rectrain_crds::{Override, SetKind};
    use rectrain_protocol::plan::JobPlan;

    fn plan() -> JobPlan {
        let manifest = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8]}
  features:
    sparse: [{name: user, missing: skip}, {name: tags, multiValue: {separator: '|'}, pooling: mean}]
    dense: [{name: age, transform: log1p, missing: 0.5}, {name: price}]
    label: {name: rating, positiveFrom: 4}
  data: {train: {paths: ['d/*.csv']}}
";
        let ftrl = "spec.training.optimizer.firstOrder.kind=ftrl".to_owned();
        let ftrl = Override { kind: SetKind::Infer, expression: ftrl };
        let manifest = rectrain_crds::load(manifest, "test.yaml", &[ftrl]).unwrap();
        JobPlan::new(&manifest.resolved).unwrap()
    }

    #[test]
    fn an_identity_gives_the_schema_and_the_layout_of_its_job() {
        let plan = plan();
        let description = Description::of(&plan.identity(), "a checkpoint").unwrap();
        assert_eq!(description.schema, Schema { group: None, ..plan.schema.clone() });
        assert_eq!(description.layout, plan.layout);
        assert_eq!(description.model, plan.model);
        assert_eq!(description.null_values.len(), plan.train.null_values.len());
        let neutral = |spec: &RowSpec| RowSpec {
            optimizer: SparseOptimizer::Sgd { learning_rate: 1.0 },
            first_order: None,
            ..*spec
        };
        let groups: Vec<RowSpec> = plan.store.groups.iter().map(neutral).collect();
        assert_eq!((description.store.seed, description.store.groups), (plan.store.seed, groups));
    }

    #[test]
    fn a_missing_section_is_named() {
        let sections = plan().identity().sections().clone();
        for section in ["features", "rows", "spec.features.label", "spec.features.sparse", "denseFeatures", "model"] {
            let fewer = sections.clone().into_iter().filter(|(name, _)| name != section);
            let message = Description::of(&Identity::new(fewer), "step-7").unwrap_err().to_string();
            assert!(message.starts_with("step-7 cannot be served") && message.contains(section), "{message}");
        }
    }
}
