//! Exports checkpoints, and loads them with pyarrow, safetensors, numpy and onnxruntime. Their
//! predictions must be the tower's. Where the Python packages cannot be installed, the test says so
//! and is skipped.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;
mod python;
#[allow(dead_code, reason = "a part of it is for other tests")]
mod trained;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use arrow_array::{Array, FixedSizeListArray, Float32Array, RecordBatch, StringArray, UInt64Array};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use rectrain_checkpoint::{
    Base, Begin, CheckpointWriter, DensePart, FeatureIdentity, Identity, Manifest, SlotSet, save_dense, save_rows,
};
use rectrain_data::key::TableSeed;
use rectrain_dense::tasks::{BinaryCrossEntropy, Tasks};
use rectrain_dense::{
    ComputeDevice, CrossStructure, DenseOptimizer, Features, ModelConfig, ModelSettings, Precision, Tower, TowerOptions,
};
use rectrain_embedding::{
    FeatureKey, GroupId, Initializer, LifePolicy, Missing, RowSpec, SaveScope, Slot, SparseOptimizer, Store,
    StoreConfig, ValueType,
};
use rectrain_storage::Directory;
use serde_json::json;

const SLOTS: u32 = 32;
const DENSE: usize = 3;
const SAMPLES: usize = 50;
const PACKAGES: [&str; 4] = ["numpy", "pyarrow", "safetensors", "onnxruntime"];

/// A pseudo-random number in [−1, 1) from the seed.
fn number(seed: u64) -> f32 {
    let word = TableSeed(seed).integer(1);
    (word >> 40) as f32 / (1 << 23) as f32 - 1.0
}

struct Job {
    config: ModelConfig,
    tower: Tower,
    features: Vec<FeatureIdentity>,
    store: Arc<Store>,
    dims: Vec<usize>,
    linear: bool,
}

/// A job whose first two features share a table. Its parameters differ from their initial values.
fn job(settings: ModelSettings) -> Job {
    let lr = settings == ModelSettings::Lr;
    let dims = if lr { vec![0; 3] } else { vec![4; 3] };
    let config = ModelConfig { dropout: 0.3, ..ModelConfig::new(settings, DENSE, dims.clone()) };
    let model = config.build().unwrap();
    let linear = model.needs_linear();
    let ftrl = SparseOptimizer::Ftrl { learning_rate: 0.3, beta: 1.0, l1: 0.001, l2: 0.0 };
    let spec = |value_type| RowSpec {
        dim: dims[0] + usize::from(linear),
        value_type,
        optimizer: SparseOptimizer::AdaGrad { learning_rate: 0.3, initial_accumulator: 0.1, epsilon: 1e-8 },
        life: LifePolicy::KeepAll,
        initializer: Initializer::Uniform { low: -0.5, high: 0.5 },
        zero_columns: usize::from(linear),
        first_order: (linear && !lr).then_some(ftrl),
        share: None,
    };
    let groups = vec![spec(ValueType::F32), spec(ValueType::Bf16)];
    let store = Arc::new(Store::new(StoreConfig { slots: SLOTS, seed: 9, groups, budget: None }).unwrap());
    store.track_changes(true);
    let options = TowerOptions { seed: 3, rank: 0, threads: 1, device: ComputeDevice::Cpu, precision: Precision::Fp32 };
    let mut tower = Tower::new(model, Tasks::single(BinaryCrossEntropy), DenseOptimizer::adam(0.01), options).unwrap();
    for (index, parameter) in tower.parameters_mut().unwrap().iter_mut().enumerate() {
        *parameter += number(index as u64) * 0.05;
    }
    let feature = |(index, table): (usize, &str)| FeatureIdentity {
        name: format!("feature{index}"),
        table: table.to_owned(),
        group: (index / 2) as u16,
        dim: dims[0],
        pooling: "sum".to_owned(),
        linear,
    };
    let features = ["shared", "shared", "own"].into_iter().enumerate().map(feature).collect();
    Job { config, tower, features, store, dims, linear }
}

impl Job {
    fn width(&self) -> usize {
        self.dims[0] + usize::from(self.linear)
    }

    /// Looks up and updates the rows of these ids in every feature, which creates missing ones.
    fn touch(&self, ids: std::ops::Range<i64>, count: u64) {
        for feature in &self.features {
            for id in ids.clone() {
                let key = FeatureKey(TableSeed::of(&feature.table).integer(id));
                let group = GroupId(feature.group);
                let mut row = vec![0.0; self.width()];
                self.store.lookup(group, &[key], Missing::Insert, &mut row).unwrap();
                let gradient: Vec<f32> = (0..row.len()).map(|c| number(key.0 ^ c as u64)).collect();
                self.store.update(group, &[key], &gradient, count).unwrap();
            }
        }
    }

    async fn save(&self, directory: &Directory, step: u64, base: Option<&Manifest>) -> Manifest {
        let begin = Begin {
            step,
            base: base.map(|base| Base { directory: base.directory(), id: base.id }),
            slots: SLOTS,
            identity: Identity::new([
                ("model".to_owned(), serde_json::to_value(&self.config).unwrap()),
                ("features".to_owned(), serde_json::to_value(&self.features).unwrap()),
            ]),
            info: BTreeMap::from([("job".to_owned(), json!("export"))]),
        };
        let writer = CheckpointWriter::begin(directory, begin).await.unwrap();
        let ticket = writer.ticket();
        let scope = ticket.base.as_ref().map_or(SaveScope::Everything, |b| SaveScope::ChangesSince(b.id.save_id()));
        let frozen = Arc::new(self.store.freeze(ticket.id.save_id(), scope).unwrap());
        let slots = SlotSet::new((0..SLOTS).map(Slot));
        let rows = save_rows(directory, ticket, 0, &frozen, &slots).await.unwrap();
        let parameters = self.tower.clone().parameters().unwrap().to_vec();
        let part = DensePart {
            offset: 0,
            parameters: parameters.clone(),
            optimizer: "adam".to_owned(),
            state: ["m", "v"].map(|name| (name.to_owned(), parameters.clone())).to_vec(),
            update_count: step,
        };
        let dense = save_dense(directory, ticket, 0, &part).await.unwrap();
        let manifest = writer.commit(vec![rows, dense]).await.unwrap();
        Arc::into_inner(frozen).unwrap().complete();
        manifest
    }

    /// Samples as raw ids and dense values, with the tower's prediction of each.
    fn expected(&self) -> serde_json::Value {
        let ids = |sample: usize, feature: usize| -> Vec<i64> {
            (0..1 + (sample + feature) % 3).map(|i| ((sample * 7 + feature * 3 + i * 5) % 60) as i64).collect()
        };
        let dense: Vec<f32> = (0..SAMPLES * DENSE).map(|index| number(index as u64 + 77)).collect();
        let (mut embeddings, mut linear) = (Vec::new(), Vec::new());
        let mut samples = Vec::new();
        for sample in 0..SAMPLES {
            let mut keys = Vec::new();
            for (position, feature) in self.features.iter().enumerate() {
                let of_feature: Vec<FeatureKey> = ids(sample, position)
                    .into_iter()
                    .map(|id| FeatureKey(TableSeed::of(&feature.table).integer(id)))
                    .collect();
                let mut pooled = vec![0.0; self.width()];
                for key in &of_feature {
                    let mut row = vec![0.0; self.width()];
                    let counts = self.store.lookup(GroupId(feature.group), &[*key], Missing::ReadInitial, &mut row);
                    assert_eq!(counts.unwrap().found, 1);
                    pooled.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
                }
                let (first, rest) = pooled.split_at(usize::from(self.linear));
                linear.extend_from_slice(first);
                embeddings.extend_from_slice(rest);
                keys.push(of_feature.iter().map(|key| key.0.to_string()).collect::<Vec<_>>());
            }
            samples.push(json!({ "keys": keys, "dense": dense[sample * DENSE..(sample + 1) * DENSE] }));
        }
        let features = Features { samples: SAMPLES, dense: &dense, embeddings: &embeddings, linear: &linear };
        let predictions = self.tower.clone().predict(features).unwrap();
        assert!(predictions.iter().any(|p| (p - predictions[0]).abs() > 1e-3), "predictions differ from each other");
        json!({ "samples": samples, "predictions": predictions })
    }
}

fn rectrain(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_rectrain")).args(arguments).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
}

fn kinds() -> Vec<ModelSettings> {
    let dcn = |structure, low_rank, hidden| ModelSettings::DcnV2 { structure, cross_layers: 2, low_rank, hidden };
    vec![
        ModelSettings::Dlrm { bottom: vec![8], top: vec![8, 4] },
        ModelSettings::DeepFm { hidden: vec![8, 4] },
        ModelSettings::Dnn { hidden: vec![8, 4] },
        ModelSettings::WideDeep { hidden: vec![8] },
        ModelSettings::Dcn { cross_layers: 2, hidden: vec![8, 4] },
        dcn(CrossStructure::Parallel, None, vec![8]),
        dcn(CrossStructure::Parallel, Some(3), vec![]),
        dcn(CrossStructure::Stacked, Some(3), vec![8]),
        ModelSettings::Fm,
        ModelSettings::Lr,
    ]
}

#[test]
fn other_programs_make_the_towers_predictions_from_an_export() {
    let Some(python) = python::find(&PACKAGES) else { return };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/export_check.py");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut jobs = Vec::new();
    for (index, kind) in kinds().into_iter().enumerate() {
        let job = job(kind);
        let path = folder.path().join(index.to_string());
        let directory = Directory::open(path.to_str().unwrap(), &BTreeMap::new(), true).unwrap();
        runtime.block_on(async {
            job.touch(0..50, 1);
            let full = job.save(&directory, 10, None).await;
            job.touch(30..60, 2);
            job.store.remove(GroupId(0), FeatureKey(TableSeed::of("shared").integer(1_000))).unwrap();
            job.save(&directory, 12, Some(&full)).await;
        });
        let output = path.join("export");
        let (success, text) = rectrain(&[
            "checkpoint",
            "export",
            path.to_str().unwrap(),
            "--output",
            output.to_str().unwrap(),
            "--optimizer-state",
        ]);
        assert!(success, "{text}");
        std::fs::write(output.join("expected.json"), job.expected().to_string()).unwrap();
        jobs.push(output);
    }
    let output = Command::new(python).arg(script).args(&jobs).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(text.lines().filter(|line| line.starts_with("equal")).count(), jobs.len(), "{text}");
}

#[test]
fn checkpoints_are_listed_verified_shown_and_compared() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap().to_owned();
    let directory = Directory::open(&path, &BTreeMap::new(), true).unwrap();
    let job = job(ModelSettings::Dnn { hidden: vec![8] });
    let delta = runtime.block_on(async {
        job.touch(0..50, 1);
        let full = job.save(&directory, 10, None).await;
        job.touch(40..60, 2);
        job.save(&directory, 12, Some(&full)).await
    });
    std::fs::create_dir(folder.path().join("step-000000000099")).unwrap();
    let (success, text) = rectrain(&["checkpoint", "ls", &path]);
    assert!(success && text.contains("step-000000000012-delta") && text.contains("unfinished"), "{text}");
    let (success, text) = rectrain(&["checkpoint", "ls", &path, "--json"]);
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(success && lines.len() == 3 && lines[0]["rows"] == 100, "{text}");
    let (success, text) = rectrain(&["checkpoint", "verify", &path]);
    assert!(success && text.matches(": good").count() == 2, "{text}");
    let (success, text) = rectrain(&["checkpoint", "inspect", &path]);
    assert!(success && text.contains("starts from") && text.contains("\"hidden\""), "{text}");
    let (success, text) = rectrain(&["checkpoint", "inspect", &format!("{path}/step-000000000010"), "--json"]);
    let manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(success && manifest["step"] == 10, "{text}");
    let other = format!("{path}/{}", delta.directory());
    let (success, text) = rectrain(&["checkpoint", "diff", &format!("{path}/step-000000000010"), &other]);
    // Two tables: 40 ids unchanged in each, 10 changed, 10 new.
    assert!(success && text.contains("80 equal, 20 changed"), "{text}");
    assert!(text.contains("0 only in one, 20 only in the other") && text.contains("jobs   are the same"), "{text}");
    let damaged = folder.path().join(delta.directory()).join(&delta.files[0].name);
    let mut bytes = std::fs::read(&damaged).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let (success, text) = rectrain(&["checkpoint", "verify", &path]);
    assert!(!success && text.contains("step-000000000012-delta: bad") && text.contains(&delta.files[0].name), "{text}");
    let (success, text) = rectrain(&["checkpoint", "verify", &path, "--sizes"]);
    assert!(success, "{text}");
    let (success, text) = rectrain(&["checkpoint", "inspect", &format!("{path}/none")]);
    assert!(!success && text.contains("none"), "{text}");
}

/// The batches of a Parquet file.
fn read_parquet(file: &Path) -> Vec<RecordBatch> {
    let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(file).unwrap()).unwrap().build().unwrap();
    reader.map(Result::unwrap).collect()
}

fn column<'b, T: 'static>(batch: &'b RecordBatch, name: &str) -> &'b T {
    batch.column_by_name(name).unwrap().as_any().downcast_ref().unwrap()
}

fn embeddings(batch: &RecordBatch) -> Vec<Vec<f32>> {
    let lists = column::<FixedSizeListArray>(batch, "embedding");
    let list = |row| lists.value(row).as_any().downcast_ref::<Float32Array>().unwrap().values().to_vec();
    (0..lists.len()).map(list).collect()
}

/// The ids of a feature with their embeddings, by `--embeddings`.
fn vectors(folder: &Path, feature: &str, ids: &str) -> BTreeMap<String, Vec<f32>> {
    let arguments =
        ["checkpoint", "export", "checkpoints", "--embeddings", feature, "--ids", ids, "--output", "vectors"];
    let output = common::rectrain(folder, &arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut found = BTreeMap::new();
    for batch in read_parquet(&folder.join(format!("vectors/embeddings-{feature}.parquet"))) {
        let ids = column::<StringArray>(&batch, "id");
        for (row, embedding) in embeddings(&batch).into_iter().enumerate() {
            assert_eq!(found.insert(ids.value(row).to_owned(), embedding), None, "{} is there twice", ids.value(row));
        }
    }
    found
}

#[test]
fn ids_of_a_feature_are_exported_with_their_embeddings() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    trained::train(folder, "deepfm", &[]);
    let all =
        common::rectrain(folder, &["checkpoint", "export", "checkpoints", "--format", "parquet", "--output", "all"]);
    assert!(all.status.success(), "{}", String::from_utf8_lossy(&all.stderr));
    let mut rows = BTreeMap::new();
    for batch in read_parquet(&folder.join("all/embeddings-0.parquet")) {
        rows.extend(column::<UInt64Array>(&batch, "key").values().iter().copied().zip(embeddings(&batch)));
    }
    // The training data name each id many times.
    let users = vectors(folder, "user", "train.csv");
    let expected: BTreeMap<String, Vec<f32>> = (0..60)
        .map(|user| (format!("u{user}"), rows[&TableSeed::of("user").text(format!("u{user}").as_bytes())].clone()))
        .collect();
    assert_eq!(users, expected, "a missing user has a row, and no id");
    // A list of items as Parquet, with an id that training never had, and one of a feature with
    // several values a cell.
    let names: [(&str, StringArray); 1] = [("tags", ["t3", "never", "t8", "t3"].into_iter().map(Some).collect())];
    let batch = RecordBatch::try_from_iter(names.map(|(name, ids)| (name, Arc::new(ids) as _))).unwrap();
    let mut writer =
        ArrowWriter::try_new(File::create(folder.join("tags.parquet")).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let tags = vectors(folder, "tags", "tags.parquet");
    let key = |tag: &str| TableSeed::of("tags").text(tag.as_bytes());
    assert_eq!(tags, ["t3", "t8"].map(|tag| (tag.to_owned(), rows[&key(tag)].clone())).into());
    let arguments =
        ["checkpoint", "export", "checkpoints", "--embeddings", "usr", "--ids", "train.csv", "--output", "a"];
    let refused = common::rectrain(folder, &arguments);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && message.contains("it has user, city, tags"), "{message}");
}
