//! The identity of a job in its checkpoints: the parts of the plan that must be equal for another
//! run to resume from them.
//! Learning rates, weight decay, dropout, the training mode and replicas may change between two
//! runs, so the identity leaves them out. The coordinator's state has the batch size and the
//! shuffle window, because positions in the data are counted in them.
//!
//! The sections whose names begin with `spec.` hold the meaning of rows and labels. Their paths are
//! the manifest's fields, so that an error names the field. Checkpoints of earlier versions lack
//! these sections.

use rectrain_checkpoint::{FeatureIdentity, Identity};
use rectrain_data::Format;
use rectrain_embedding::{LifePolicy, RowSpec};
use rectrain_kinds::{BadRows, CsvFormat, DenseField, DenseOptimizer, FileFormat, RecordFormat, SparseField};
use serde_json::{Map, Value, json};

use super::JobPlan;

impl JobPlan {
    /// The identity of the job. Its sections `model`, `features` and `rows` describe the trained
    /// model to a reader without the manifest.
    #[must_use]
    pub fn identity(&self) -> Identity {
        let sections = [
            // A model's configuration consists of numbers and strings, so its conversion to JSON
            // cannot fail.
            ("model", serde_json::to_value(&self.model).unwrap_or_default()),
            ("features", serde_json::to_value(self.feature_identities()).unwrap_or_default()),
            (
                "denseFeatures",
                self.schema
                    .dense
                    .iter()
                    .map(|field| {
                        json!({
                            "name": field.name,
                            "transform": field.transform,
                            "missing": field.missing,
                        })
                    })
                    .collect(),
            ),
            ("denseOptimizer", without(json!(self.dense_optimizer), &DenseOptimizer::CHANGEABLE)),
            (
                "rows",
                json!({
                    "slots": self.store.slots,
                    "seed": self.store.seed,
                    "groups": self.store.groups.iter().map(row_group).collect::<Vec<_>>(),
                }),
            ),
            ("spec.features.label", json!(self.schema.label)),
            ("spec.features.sparse", self.cells().into()),
            ("spec.features.group", json!(self.schema.group)),
            ("spec.data", self.data_identity()),
        ];
        let sections = sections.into_iter().chain(self.skipping()).chain(self.null_values());
        let sections = sections.chain(self.clock());
        Identity::new(sections.map(|(name, section)| (name.to_owned(), section)))
    }

    /// How the cells of each sparse feature become ids.
    fn cells(&self) -> Map<String, Value> {
        self.schema.sparse.iter().map(|field| (field.name.clone(), cell(field))).collect()
    }

    /// How the files become rows, and which of the rows train.
    fn data_identity(&self) -> Value {
        let (format, csv, synthetic) = match &self.train.format {
            Format::Auto => ("auto", Value::Null, Value::Null),
            Format::Files(FileFormat::Csv(format)) | Format::Follow(FileFormat::Csv(format), _) => {
                ("csv", csv(format), Value::Null)
            }
            Format::Files(FileFormat::Parquet) | Format::Follow(FileFormat::Parquet, _) => {
                ("parquet", Value::Null, Value::Null)
            }
            Format::Kafka(_) => ("kafka", Value::Null, Value::Null),
            // The test rows follow the training rows, so their number changes no training row.
            Format::Synthetic(config) => ("synthetic", Value::Null, without(json!(config), &["testRows"])),
        };
        let mut identity = json!({ "format": format, "csv": csv, "synthetic": synthetic, "split": self.split() });
        if let (Value::Object(identity), Format::Kafka(config)) = (&mut identity, &self.train.format) {
            identity.insert("train".to_owned(), json!({ "kafka": records(&config.format) }));
        }
        identity
    }

    fn split(&self) -> Value {
        match &self.train.format {
            Format::Synthetic(_) => Value::Null,
            _ if self.tests_on_the_next_slice => {
                json!({ "slices": { "rows": self.batches_per_chunk * self.global_batch_rows } })
            }
            _ => json!(self.train.split),
        }
    }

    /// The treatment of bad rows if it skips them, and the limits of numbers, which make rows bad.
    /// Positions then count good rows only, so a later run must skip the same rows. There are no
    /// such sections if a bad row ends the run. A later run may then skip bad rows or change a
    /// limit, because there are no bad rows before the position.
    fn skipping(&self) -> Vec<(&'static str, Value)> {
        match self.train.bad_rows {
            BadRows::Fail => Vec::new(),
            BadRows::Skip { .. } => {
                vec![("spec.data.badRows", json!({ "action": "skip" })), ("spec.features.dense", self.limits().into())]
            }
        }
    }

    /// Which numbers of each dense feature make a row a bad one.
    fn limits(&self) -> Map<String, Value> {
        let limit = |field: &DenseField| (field.name.clone(), json!({ "limit": field.limit }));
        self.schema.dense.iter().map(limit).collect()
    }

    /// The markers of missing values, in one order and case. Synthetic rows have none.
    fn null_values(&self) -> Option<(&'static str, Value)> {
        if matches!(self.train.format, Format::Synthetic(_)) {
            return None;
        }
        let mut markers: Vec<String> =
            self.train.null_values.iter().map(|marker| marker.to_ascii_lowercase()).collect();
        markers.sort();
        markers.dedup();
        Some(("spec.data.nullValues", json!(markers)))
    }

    /// The clock of the rows, or null if there is none. Times in the rows are by it. Jobs that keep
    /// every row have no such section.
    fn clock(&self) -> Option<(&'static str, Value)> {
        let is_managed = self.store.groups.iter().any(|group| group.life != LifePolicy::KeepAll);
        is_managed.then(|| ("spec.data.timeColumn", json!(self.schema.time)))
    }

    pub(super) fn feature_identities(&self) -> Vec<FeatureIdentity> {
        let fields = self.schema.sparse.iter().zip(&self.layout.features);
        fields
            .map(|(field, place)| FeatureIdentity {
                name: field.name.clone(),
                table: field.table.clone(),
                group: place.group as u16,
                dim: place.dim,
                pooling: place.pooling.name().to_owned(),
                linear: self.layout.linear,
            })
            .collect()
    }
}

/// A multi-valued cell without values has no id, whatever `missing` says.
fn cell(field: &SparseField) -> Value {
    let mut cell = match &field.multi_value {
        Some(separator) => json!({ "multiValue": { "separator": separator }, "missing": null }),
        None => json!({ "multiValue": null, "missing": field.missing }),
    };
    // Checkpoints of versions without hashed tables lack the field.
    if let (Value::Object(cell), Some(buckets)) = (&mut cell, field.hash_buckets) {
        cell.insert("hashBuckets".to_owned(), json!(buckets));
    }
    cell
}

fn csv(format: &CsvFormat) -> Value {
    let CsvFormat { delimiter, header, columns, quoting } = format;
    json!({ "delimiter": delimiter, "header": header, "columns": columns, "quoting": quoting })
}

/// How the values of records become rows. The offsets in the coordinator's state tell which topics.
fn records(format: &RecordFormat) -> Value {
    match format {
        RecordFormat::Json => json!({ "format": "json" }),
        RecordFormat::Avro { .. } => json!({ "format": "avro" }),
        RecordFormat::Protobuf { .. } => json!({ "format": "protobuf" }),
        RecordFormat::Csv(format) => json!({ "format": "csv", "csv": csv(format) }),
    }
}

fn row_group(spec: &RowSpec) -> Value {
    let mut group = json!({
        "dim": spec.dim,
        "zeroColumns": spec.zero_columns,
        "valueType": spec.value_type,
        "initializer": spec.initializer,
        "optimizer": without(json!(spec.optimizer), spec.optimizer.changeable()),
    });
    // Checkpoints of versions without this optimizer lack the field.
    if let (Value::Object(group), Some(first_order)) = (&mut group, spec.first_order) {
        group.insert("firstOrder".to_owned(), without(json!(first_order), first_order.changeable()));
    }
    // Checkpoints of versions without policies lack the field, and have rows of this policy.
    if let (Value::Object(group), false) = (&mut group, spec.life == LifePolicy::KeepAll) {
        group.insert("life".to_owned(), life(spec.life));
    }
    group
}

/// The policy of a row group. Its words in the rows mean nothing under another policy.
fn life(policy: LifePolicy) -> Value {
    match policy {
        LifePolicy::Managed(managed) => json!({
            "admission": format!("{:?}", managed.admission),
            "expireAfterSeconds": managed.expire_after,
            "score": format!("{:?}", managed.score),
            "priority": format!("{:?}", managed.priority),
        }),
        other => json!(format!("{other:?}")),
    }
}

/// The settings without those that a later run may change.
fn without(mut settings: Value, changeable: &[&str]) -> Value {
    if let Value::Object(settings) = &mut settings {
        settings.retain(|name, _| !changeable.contains(&name.as_str()));
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;
    use rectrain_crds::{Override, SetKind};

    fn identity(changes: &[&str]) -> Identity {
        let manifest = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: dnn, embeddingDim: 4, hidden: [16, 8]}
  features:
    sparse: [{name: 'C{1..3}'}]
    dense: [{name: 'I{1..2}'}]
  data:
    synthetic: {rows: 2000, testRows: 500, vocabulary: 1000}
  training: {globalBatchSize: 96, epochs: 2}
";
        let over = |change: &&str| Override { kind: SetKind::Infer, expression: (*change).to_owned() };
        let overrides: Vec<Override> = changes.iter().map(over).collect();
        let manifest = rectrain_crds::load(manifest, "test.yaml", &overrides).unwrap();
        JobPlan::new(&manifest.resolved).unwrap().identity()
    }

    fn difference(changes: &[&str]) -> Option<String> {
        let found = identity(&[]).difference(&identity(changes));
        found.map(|difference| difference.path)
    }

    #[test]
    fn the_model_may_not_change_but_training_settings_may() {
        let changed = |change| difference(&[change]).unwrap();
        assert_eq!(changed("spec.model.hidden={16,4}"), "model.hidden.1");
        assert_eq!(changed("spec.model.kind=wideDeep"), "spec.model.kind");
        assert_eq!(changed("spec.model.embeddingDim=8"), "features.0.dim");
        assert_eq!(changed("spec.training.seed=5"), "rows.seed");
        for change in ["spec.training.globalBatchSize=48", "spec.training.epochs=5", "spec.training.mode=hybrid"] {
            assert_eq!(difference(&[change]), None, "{change}");
        }
    }

    #[test]
    fn an_identity_describes_the_model_without_a_manifest() {
        let identity = identity(&[]);
        let model: rectrain_dense::ModelConfig =
            serde_json::from_value(identity.section("model").unwrap().clone()).unwrap();
        assert_eq!((model.name(), model.dense_features), ("dnn", 2));
        let features: Vec<FeatureIdentity> =
            serde_json::from_value(identity.section("features").unwrap().clone()).unwrap();
        assert_eq!((features.len(), features[1].name.as_str(), features[1].dim), (3, "C2", 4));
    }
}
