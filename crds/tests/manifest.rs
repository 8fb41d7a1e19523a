//! Manifests from a user's point of view: valid ones, wrong ones with the sentence each gets, the
//! CEL rules one by one, and the files generated from the types.
#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kube::core::cel::{CompiledSchema, ValidationErrors, Validator, compile_schema};
use proptest::prelude::*;
use rectrain_crds::*;
use serde_json::{Value, json};

const BASE: &str = "\
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: base}
spec:
  model: {kind: dnn}
  features:
    sparse:
      - {name: user}
      - {name: item}
    dense: [{name: age}]
  data:
    train: {paths: [train.csv]}
    test: {paths: [test.csv]}
  training:
    globalBatchSize: 256
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn sets(expressions: &[&str]) -> Vec<Override> {
    expressions.iter().map(|e| Override { kind: SetKind::Infer, expression: e.to_string() }).collect()
}

/// BASE with these `--set`s; only its shape is checked.
fn job(expressions: &[&str]) -> RecTrainingJob {
    parse_manifest_with(BASE, "base.yaml", &sets(expressions))
        .unwrap_or_else(|error| panic!("{expressions:?}: {error}"))
}

fn resolve(expressions: &[&str]) -> ResolvedJob {
    load(BASE, "base.yaml", &sets(expressions)).unwrap_or_else(|error| panic!("{expressions:?}: {error}")).resolved
}

// -------------------------------------------------------------------------------------- valid ones

#[test]
fn a_manifest_is_written_with_its_overrides_and_no_defaults() {
    let manifest = load(BASE, "base.yaml", &sets(&["spec.training.mode=gba"])).unwrap();
    let written = manifest.to_yaml().unwrap();
    assert!(written.starts_with("apiVersion: rectrain.dev/v1alpha1\nkind: RecTrainingJob\n"), "{written}");
    assert!(written.contains("mode: gba") && !written.contains("null") && !written.contains("status"), "{written}");
    assert_eq!(load(&written, "again.yaml", &[]).unwrap().job, manifest.job);
}

#[test]
fn words_that_kubectl_reads_as_true_or_false_are_told_and_quoted() {
    let text = BASE.replacen("  features:\n", "  features:\n    label: {values: {yes: 1, 'no': 0}}\n", 1);
    let manifest = load(&text, "base.yaml", &[]).unwrap();
    let [warning] = &manifest.unquoted[..] else { panic!("{:?}", manifest.unquoted) };
    assert_eq!(
        warning,
        "base.yaml:7:22: spec.features.label.values.yes: `kubectl` reads the word `yes` without quotes as true: write \
         'yes'"
    );
    let written = manifest.to_yaml().unwrap();
    assert!(written.contains("'yes': 1") && written.contains("'no': 0"), "{written}");
    let again = load(&written, "again.yaml", &[]).unwrap();
    assert_eq!((again.job, again.unquoted), (manifest.job, Vec::new()));
}

#[test]
fn a_text_of_several_lines_is_written_unchanged() {
    let mut job = job(&["spec.features.label.values.yes=1"]);
    let value = "first\nno\nlast: no\n";
    let env = json!([{"name": "SCRIPT", "value": value}]);
    job.spec.roles = serde_json::from_value(json!({"ps": {"template": {"env": env}}})).unwrap();
    let manifest = load(&serde_yaml::to_string(&job).unwrap(), "base.yaml", &[]).unwrap();
    let again = load(&manifest.to_yaml().unwrap(), "again.yaml", &[]).unwrap();
    assert_eq!(again.job.spec.roles.unwrap().ps.unwrap().template.unwrap().env[0]["value"], value);
}

#[test]
fn checkpoints_are_taken_as_often_as_models_are_published() {
    let seconds = |expressions: &[&str]| {
        let path = "spec.checkpoint.path=/ck,spec.serving.publish.path=/p";
        let resolved = resolve(&[&[path][..], expressions].concat());
        (resolved.checkpoint.unwrap().every_seconds, resolved.publish.unwrap().every_seconds)
    };
    let (publish, checkpoint) = ("spec.serving.publish.everySeconds=5", "spec.checkpoint.everySeconds=60");
    assert_eq!(seconds(&[]), (None, None));
    assert_eq!(seconds(&[publish]), (Some(5.0), Some(5.0)));
    assert_eq!(seconds(&[publish, checkpoint]), (Some(5.0), Some(5.0)));
    assert_eq!(seconds(&[checkpoint]), (Some(60.0), None));
    assert_eq!(seconds(&[checkpoint, "spec.serving.publish.everySeconds=300"]), (Some(60.0), Some(300.0)));
    assert_eq!(seconds(&[checkpoint, "spec.serving.publish.everySeconds=0.2"]), (Some(0.2), Some(0.2)));
}

#[test]
fn publications_need_checkpoints_and_a_path_of_their_own() {
    let path = "spec.serving.publish.path";
    refused(&["spec.checkpoint.path=/ck", &format!("{path}=hdfs://nn/p")], path, "no build reads hdfs:// URLs");
    refused(&[&format!("{path}=/p")], "spec.serving.publish", "give spec.checkpoint.path, or remove `publish`");
    let found = "expected another path than spec.checkpoint.path, found /ck/";
    refused(&["spec.checkpoint.path=/ck/", &format!("{path}=/ck")], path, found);
}

#[test]
fn a_least_count_needs_rows_that_count_their_examples() {
    let (field, path) = ("spec.serving.publish.minCount", "spec.checkpoint.path=/ck,spec.serving.publish.path=/p");
    let (count, memory) = ("spec.serving.publish.minCount=3", "spec.features.memory.maxRows=1000");
    refused(&[path, count], field, "without a budget they do not: set spec.features.memory");
    refused(&[path, count, memory], field, "with the eviction policy score they do not");
    let publish = resolve(&[path, count, memory, "spec.features.eviction.policy=lfu"]).publish.unwrap();
    assert_eq!(publish.min_count, Some(3));
    assert_eq!(resolve(&[path]).publish.unwrap().min_count, None);
}

#[test]
fn late_labels_choose_the_loss() {
    let loss = |overrides: &[&str]| resolve(overrides).tasks().iter().map(|task| task.loss.name()).collect::<Vec<_>>();
    assert_eq!(loss(&[]), ["binaryCrossEntropy"]);
    assert_eq!(loss(&["spec.training.lateLabels=fakeNegativeWeighted"]), ["fakeNegativeWeighted"]);
}

#[test]
fn offsets_for_a_group_need_checkpoints_unless_the_job_begins_at_them() {
    let field = "spec.data.train.kafka.group";
    let group = format!("{field}=trainers");
    refused(&[KAFKA, &group], field, "give spec.checkpoint.path, or remove `group`");
    for valid in ["spec.checkpoint.path=/ck", "spec.data.train.kafka.start=committed"] {
        resolve(&[KAFKA, &group, valid]);
    }
}

#[test]
fn a_baseline_names_a_step_and_a_pause_needs_a_stream() {
    let from = "spec.training.quality.baseline.from";
    let quality = resolve(&[&format!("{from}=/ck@40")]).training.quality;
    assert_eq!(quality.baseline.unwrap().to_string(), "/ck@40");
    for latest in ["/ck", "/ck@latest"] {
        refused(&[&format!("{from}={latest}")], from, "expected the number of a step, such as /ck@1200");
    }
    refused(&[&format!("{from}=/ck@x")], from, "expected the number of a step");
    refused(&[&format!("{from}=hdfs://nn/p@1")], from, "no build reads hdfs:// URLs");
    let rule = "spec.training.quality.onRegression";
    let given = resolve(&[&format!("{rule}.tolerance=0.02")]).training.quality.on_regression.unwrap();
    assert_eq!(serde_json::to_value(given).unwrap(), json!({"metric": "auc", "tolerance": 0.02, "action": "alert"}));
    let pause = format!("{rule}.tolerance=0.02,{rule}.action=pause");
    refused(&[&pause], &format!("{rule}.action"), "only a job on a stream can pause");
    refused(&[&format!("{rule}.tolerance=0")], &format!("{rule}.tolerance"), "0.0001");
}

#[test]
fn a_rollback_needs_a_stream_and_regular_checkpoints() {
    let rule = "spec.training.quality.onRegression";
    let (field, back) = (format!("{rule}.action"), format!("{rule}.tolerance=0.02,{rule}.action=rollback"));
    let regular = "spec.checkpoint.path=/ck,spec.checkpoint.everySeconds=60";
    refused(&[&back, regular], &field, "only a job on a stream can leave out the rows");
    for none in [&[KAFKA, &back][..], &[KAFKA, &back, "spec.checkpoint.path=/ck"]] {
        refused(none, &field, "give spec.checkpoint.path, with everySeconds or everySteps");
    }
    for every in [regular, "spec.checkpoint.path=/ck,spec.checkpoint.everySteps=9"] {
        let given = resolve(&[KAFKA, &back, every]).training.quality.on_regression.unwrap();
        assert_eq!(serde_json::to_value(given).unwrap()["action"], "rollback");
    }
}

#[test]
fn loaders_are_scaled_on_streams_and_on_files() {
    let scaling = |expressions: &[&str]| {
        let given = ["spec.autoscaling.mode=recommend", "spec.roles.loader.replicas=2"];
        resolve(&[&given[..], expressions].concat()).autoscaling.unwrap().loader
    };
    let default = json!({"bounds": {"min": 2, "max": 8}, "catchUpSeconds": 300, "busyTarget": 0.8, "waitTarget": 0.1});
    for data in [&[][..], &[KAFKA]] {
        assert_eq!(serde_json::to_value(scaling(data)).unwrap(), default, "{data:?}");
        assert_eq!(scaling(&[data, &["spec.autoscaling.loader.scaler=external"]].concat()), None);
        let loader = "spec.autoscaling.loader.min";
        let too_many = format!("{loader}=2");
        let expected = "expected at most the 1 of spec.roles.loader.replicas";
        refused(&[data, &[too_many.as_str()]].concat(), loader, expected);
    }
}

#[test]
fn relative_paths_are_noted_for_a_cluster() {
    let note = local_paths(&job(&["spec.checkpoint.path=model"])).unwrap();
    let fields = "spec.data.train.paths[0] (`train.csv`), spec.data.test.paths[0] (`test.csv`), spec.checkpoint.path";
    assert!(note.contains("do not see this folder") && note.ends_with(&format!("{fields} (`model`)")), "{note}");
    let many = local_paths(&job(&["spec.data.train.paths={a.csv,b.csv,c.csv,d.csv}"])).unwrap();
    assert!(many.ends_with("spec.data.train.paths[2] (`c.csv`) and 2 more"), "{many}");
    let elsewhere = ["spec.data.train.paths={gs://b/a.csv}", "spec.data.test.paths={/data/b.csv}"];
    assert_eq!(local_paths(&job(&elsewhere)), None);
}

#[test]
fn a_ten_line_manifest_is_enough_and_takes_every_default() {
    let text = read("docs/examples/minimal.yaml");
    assert_eq!(text.lines().count(), 10);
    let resolved = load(&text, "minimal.yaml", &sets(&["spec.training=null"])).unwrap().resolved;
    let expected = json!({
        "name": "minimal",
        "model": {
            "kind": "deepfm", "embeddingDim": 16, "hidden": [256, 128], "dropout": 0.0,
        },
        "features": {
            "label": {"name": "label", "positiveFrom": null},
            "sparse": [
                {"name": "user_id", "multiValue": null, "table": "user_id", "missing": "token"},
                {"name": "item_id", "multiValue": null, "table": "item_id", "missing": "token"},
            ],
            "embeddings": [
                {"dim": 16, "pooling": "mean", "table": 0},
                {"dim": 16, "pooling": "mean", "table": 1},
            ],
            "dense": [],
            "group": null,
            "tables": [
                {
                    "name": "user_id", "dim": 16, "initializer": {"normal": {"standardDeviation": 0.01_f32}},
                    "life": null, "hashBuckets": null,
                },
                {
                    "name": "item_id", "dim": 16, "initializer": {"normal": {"standardDeviation": 0.01_f32}},
                    "life": null, "hashBuckets": null,
                },
            ],
            "memory": null,
        },
        "data": {
            "source": {"files": {
                "parts": {"separate": {
                    "train": ["data/movielens-100k/train.csv"], "test": ["data/movielens-100k/test.csv"],
                }},
                "format": {"csv": {"delimiter": ",", "header": true, "columns": null, "quoting": true}},
                "badRows": "fail",
                "nullValues": ["nan", "NULL", "\\N"],
            }},
            "shuffleWindowRows": null,
            "storage": {"options": {}, "secretName": null},
        },
        "training": {
            "mode": "sync", "auto": null, "globalBatchSize": 4096, "length": {"epochs": 1}, "seed": 42, "staleness": 4, "lookAhead": 1,
            "syncPieces": "fixed",
            "localBatchSize": null, "barrierWorkers": null, "gbaStaleness": 4, "gbaKeyDivisor": "buffer", "hopBsBound": 2, "hopBwBackups": 1,
            "bspAggregate": null, "shadow": {
                "algorithm": "easgd", "alpha": 0.5, "everySteps": null, "eta": 0.5, "momentum": 0.0, "nesterov": false,
                "fragments": 1, "wirePrecision": "fp32", "threads": 1, "outputModel": "copy",
            }, "switchAt": [],
            "denseOptimizer": {
                "kind": "adam", "learningRate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weightDecay": 0.0,
            },
            "sparseOptimizer": {"kind": "adam", "learningRate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
            "firstOrderOptimizer": null,
            "divergenceFactor": 1000.0, "embeddingValueType": "f32", "precision": "fp32", "compression": "none",
            "partialPooling": "never",
            "loss": "binaryCrossEntropy", "evaluation": "end", "quality": {"windowRows": 100_000, "baseline": null, "onRegression": null},
        },
        "roles": {
            "ps": {"replicas": 1, "threads": null},
            "embeddingWorker": {"replicas": 1, "threads": null},
            "denseWorker": {"replicas": 1, "threads": null},
            "device": "cpu",
            "gpus": 0,
            "loader": {"replicas": 1, "threads": null},
        },
        "autoscaling": null,
        "checkpoint": null,
        "publish": null,
        "warmStart": null,
        "faultTolerance": {"maxRestarts": 10, "backoffSeconds": 10, "stallSeconds": 600, "sharedMemory": true, "replaceSlow": null},
        "suspend": false,
    });
    assert_eq!(serde_json::to_value(&resolved).unwrap(), expected);
}

#[test]
fn the_manual_documents_the_actual_defaults() {
    let resolved = serde_json::to_value(resolve(&["spec.model.kind=dcnV2", "spec.data.shuffle.windowRows=7"])).unwrap();
    for (field, place) in [
        ("spec.model.embeddingDim", "/model/embeddingDim"),
        ("spec.model.hidden", "/model/hidden"),
        ("spec.model.crossLayers", "/model/crossLayers"),
        ("spec.model.crossStructure", "/model/structure"),
        ("spec.features.label.name", "/features/label/name"),
        ("spec.features.sparse.pooling", "/features/embeddings/0/pooling"),
        ("spec.features.sparse.missing", "/features/sparse/0/missing"),
        ("spec.features.dense.transform", "/features/dense/0/transform"),
        ("spec.features.dense.missing", "/features/dense/0/missing"),
        ("spec.training.mode", "/training/mode"),
        ("spec.training.epochs", "/training/length/epochs"),
        ("spec.training.seed", "/training/seed"),
        ("spec.training.hybrid.staleness", "/training/staleness"),
        ("spec.training.sync.lookAhead", "/training/lookAhead"),
        ("spec.training.sync.pieces", "/training/syncPieces"),
        ("spec.training.gba.staleness", "/training/gbaStaleness"),
        ("spec.training.gba.keyDivisor", "/training/gbaKeyDivisor"),
        ("spec.training.hopBs.bound", "/training/hopBsBound"),
        ("spec.training.hopBw.backups", "/training/hopBwBackups"),
        ("spec.training.shadow.algorithm", "/training/shadow/algorithm"),
        ("spec.training.shadow.alpha", "/training/shadow/alpha"),
        ("spec.training.shadow.eta", "/training/shadow/eta"),
        ("spec.training.shadow.momentum", "/training/shadow/momentum"),
        ("spec.training.shadow.nesterov", "/training/shadow/nesterov"),
        ("spec.training.shadow.fragments", "/training/shadow/fragments"),
        ("spec.training.shadow.wirePrecision", "/training/shadow/wirePrecision"),
        ("spec.training.shadow.threads", "/training/shadow/threads"),
        ("spec.training.shadow.outputModel", "/training/shadow/outputModel"),
        ("spec.training.optimizer.dense.beta1", "/training/denseOptimizer/beta1"),
        ("spec.training.optimizer.dense.beta2", "/training/denseOptimizer/beta2"),
        ("spec.training.optimizer.sparse.beta1", "/training/sparseOptimizer/beta1"),
        ("spec.training.embeddingValueType", "/training/embeddingValueType"),
        ("spec.training.precision", "/training/precision"),
        ("spec.training.compression", "/training/compression"),
        ("spec.training.partialPooling", "/training/partialPooling"),
        ("spec.training.evaluation.every", "/training/evaluation"),
        ("spec.training.quality.windowRows", "/training/quality/windowRows"),
        ("spec.roles.ps.replicas", "/roles/ps/replicas"),
        ("spec.roles.denseWorker.device", "/roles/device"),
        ("spec.suspend", "/suspend"),
    ] {
        let taken = resolved.pointer(place).unwrap_or_else(|| panic!("{place} of {resolved}"));
        let taken = match taken {
            Value::String(text) => text.clone(),
            Value::Number(number) => format!("{}", number.as_f64().unwrap()),
            other => other.to_string().replace(',', ", "),
        };
        let page = explain(field).unwrap();
        assert!(page.contains(&format!("DEFAULT:  {taken}\n")), "{field}: {taken} is taken, but\n{page}");
    }
}

#[test]
fn every_example_is_valid() {
    let folder = root().join("docs/examples");
    let mut count = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            let text = std::fs::read_to_string(&path).unwrap();
            let file = path.display().to_string();
            count += 1;
            if text.contains("\nkind: RecModelServer\n") {
                is_a_valid_server(&text);
                continue;
            }
            let error = if text.contains("\nkind: Simulation\n") {
                simulation::load_simulation(&text, &file, &[]).err()
            } else {
                load(&text, &file, &[]).err()
            };
            assert_eq!(error, None);
        }
    }
    assert!(count >= 4);
}

/// Each field of the text is one of the kind.
fn is_a_valid_server(text: &str) {
    let mut unknown = Vec::new();
    let fields: Value = serde_yaml::from_str(text).unwrap();
    let server: RecModelServer = serde_ignored::deserialize(fields, |path| unknown.push(path.to_string())).unwrap();
    // The type of an object says which kind it is, so it has no fields for these two.
    assert_eq!(unknown, ["apiVersion", "kind"]);
    assert!(server.spec.model.job.is_some() != server.spec.model.path.is_some());
}

/// The fenced YAML of a page of docs.
fn fenced_yaml(page: &str) -> Vec<String> {
    let blocks = page.split("```yaml\n").skip(1);
    blocks.map(|block| block.split("```").next().unwrap_or_default().to_owned()).collect()
}

#[test]
fn the_daily_cron_job_of_the_guide_is_valid() {
    let blocks = fenced_yaml(&read("docs/guide/daily-training.md"));
    let documents: Vec<Value> = blocks
        .iter()
        .flat_map(|block| block.split("\n---\n"))
        .map(|document| serde_yaml::from_str(document).unwrap())
        .collect();
    let of_kind = |kind: &str| documents.iter().find(|document| document["kind"] == kind).expect(kind);
    let cron = &of_kind("CronJob")["spec"];
    assert_eq!((&cron["concurrencyPolicy"], &cron["timeZone"]), (&json!("Forbid"), &json!("Etc/UTC")));
    let pod = &cron["jobTemplate"]["spec"]["template"]["spec"];
    assert_eq!(pod["serviceAccountName"], of_kind("ServiceAccount")["metadata"]["name"]);
    assert_eq!(pod["volumes"][0]["configMap"]["name"], of_kind("ConfigMap")["metadata"]["name"]);
    let script = pod["containers"][0]["args"][0].as_str().unwrap();
    assert!(script.contains("/template/day.yaml") && script.contains("s|@LAST@|$last|"), "{script}");
    let template = of_kind("ConfigMap")["data"]["day.yaml"].as_str().unwrap();
    // The first night has no model to begin with.
    let lines: Vec<&str> = template.lines().filter(|line| !line.contains("@LAST@")).collect();
    let first = load(&lines.join("\n").replace("@DAY@", "2026-06-01"), "day.yaml", &[]).unwrap().resolved;
    assert_eq!((first.name.as_str(), first.warm_start), ("clicks-2026-06-01", None));
    let path = first.checkpoint.unwrap().path;
    let second = load(&template.replace("@LAST@", &path).replace("@DAY@", "2026-06-02"), "day.yaml", &[]).unwrap();
    let from = second.resolved.warm_start.unwrap();
    assert_eq!((from.path, from.step), (path, None));
}

#[test]
fn the_manifest_of_the_page_on_gke_places_every_role() {
    let blocks = fenced_yaml(&read("docs/operations/gke.md"));
    let [manifest] = &blocks[..] else { panic!("one manifest was expected: {blocks:?}") };
    let job = load(&manifest.replace("BUCKET", "my-bucket"), "job.yaml", &[]).unwrap().job;
    assert_eq!((job.metadata.namespace.as_deref(), local_paths(&job)), (Some("ads"), None));
    let roles = job.spec.roles.unwrap();
    for role in Role::ALL {
        let template = roles.template(role).unwrap();
        assert!(template.resources.is_some(), "{role}");
        assert_eq!(template.service_account_name.is_some(), role != Role::EmbeddingWorker, "{role}");
        assert_eq!(template.node_selector.is_empty(), role == Role::Coordinator, "{role}");
    }
}

#[test]
fn the_criteo_example_is_valid_for_every_model_and_mode() {
    let text = read("docs/examples/criteo.yaml");
    let try_load = |expressions: &[&str]| load(&text, "criteo.yaml", &sets(expressions));
    let load = |expressions: &[&str]| try_load(expressions).unwrap_or_else(|e| panic!("{e}")).resolved;
    let resolved = load(&["spec.data.source.paths={/data/a.tsv.gz,s3://b/c.tsv.gz}"]);
    assert_eq!(resolved.features.schema.sparse.len(), 26);
    assert_eq!(resolved.features.schema.sparse[25].name, "C26");
    assert_eq!(resolved.features.tables.len(), 26);
    assert_eq!(resolved.features.schema.dense.len(), 13);
    assert_eq!(resolved.features.schema.dense[0].transform, Transform::Log1p);
    let ModelSettings::Dlrm { bottom, .. } = &resolved.model.settings else { panic!("{:?}", resolved.model) };
    assert_eq!(*bottom, [512, 256, 16], "the embedding dimension is appended");
    let DataSource::Files(files) = &resolved.data.source else { panic!("{:?}", resolved.data) };
    assert_eq!(
        files.parts,
        TrainTest::Divided {
            paths: vec!["/data/a.tsv.gz".into(), "s3://b/c.tsv.gz".into()],
            split: Split::Position { train_rows: 64_000 }
        }
    );
    let FileFormat::Csv(csv) = &files.format else { panic!("{:?}", files.format) };
    assert_eq!((csv.delimiter.as_str(), csv.header, csv.quoting), ("\t", false, false));
    assert_eq!(csv.columns.as_ref().unwrap().len(), 40);
    for kind in ModelKind::ALL {
        for mode in Mode::ALL {
            let model = format!("spec.model.kind={kind}");
            let embedding =
                if kind.has_embeddings() { "spec.model.embeddingDim=8" } else { "spec.model.embeddingDim=null" };
            let workers = "spec.roles.denseWorker.replicas=2";
            let mode_set = format!("spec.training.mode={mode}");
            let settings = [&*model, embedding, workers, &*mode_set];
            if mode == Mode::Des && kind.refuses_substitution().is_some() {
                let error = try_load(&settings).unwrap_err().to_string();
                assert!(error.contains("mode des has no substitution"), "{error}");
                continue;
            }
            let resolved = load(&settings);
            assert_eq!(resolved.training.mode, mode);
            let dim = if kind.has_embeddings() { 8 } else { 0 };
            assert!(resolved.features.embeddings.iter().all(|embedding| embedding.dim == dim), "{kind}");
        }
    }
}

#[test]
fn features_share_a_table_only_if_they_name_it() {
    let shared = resolve(&[
        "spec.features.sparse[0].name=C{1..3}",
        "spec.features.sparse[0].table=t",
        "spec.features.sparse[1].table=t",
    ]);
    assert_eq!(shared.features.tables.len(), 1);
    assert!(shared.features.embeddings.iter().all(|embedding| embedding.table == 0));
    let own = resolve(&["spec.features.sparse[0].name=C{01..03}"]);
    let names: Vec<_> = own.features.tables.iter().map(|table| table.name.as_str()).collect();
    assert_eq!(names, ["C01", "C02", "C03", "item"]);
}

#[test]
fn synthetic_rows_have_the_columns_that_the_features_name() {
    let resolved = load(&read("docs/examples/synthetic.yaml"), "synthetic.yaml", &[]).unwrap().resolved;
    let DataSource::Synthetic(synthetic) = resolved.data.source else { panic!() };
    assert_eq!((synthetic.rows, synthetic.test_rows, synthetic.dense), (1_000_000, 100_000, 13));
    assert_eq!(synthetic.vocabularies.len(), 26);
    assert_eq!(&synthetic.vocabularies[..3], [1_460, 583, 100_000]);
}

#[test]
fn a_split_by_time_takes_numbers_and_dates() {
    let split =
        |test_from: &str| match files_of(&by_time(test_from).iter().map(String::as_str).collect::<Vec<_>>()).parts {
            TrainTest::Divided { split: Split::Time { test_from, .. }, .. } => test_from,
            parts => panic!("{parts:?}"),
        };
    let date = |text: &str, order| TimeBound::Date(Date::read(text, order).unwrap());
    assert_eq!(split("1700000000000"), TimeBound::Number(1.7e12));
    assert_eq!(split("1700000000000000001"), TimeBound::Integer(1_700_000_000_000_000_001));
    assert_eq!(split("2026-11-03"), date("2026-11-03", None));
    assert_eq!(split("11/25/2026"), date("11/25/2026", None));
    let month_first = "11/1/2026,spec.data.split.time.order=monthFirst";
    assert_eq!(split(month_first), date("11/1/2026", Some(DateOrder::MonthFirst)));
    assert_eq!(serde_json::to_value(split("2026-11-03")).unwrap(), json!({"text": "2026-11-03"}));
    for (test_from, field, part) in [
        ("Nov 3\\, 2026", "testFrom", "expected a number such as 1700000000, or a date"),
        ("2026-02-30", "testFrom", "found `2026-02-30`"),
        ("0.8", "testFrom", "(for a share of the rows use spec.data.split.fraction), found 0.8"),
        ("11/1/2026", "testFrom", "set `order: monthFirst` or dayFirst"),
        ("2026-11-03,spec.data.split.time.order=dayFirst", "order", "begins with the year"),
        ("1700000000,spec.data.split.time.order=dayFirst", "order", "`testFrom` is a number: remove it"),
    ] {
        let sets = by_time(test_from);
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        refused(&sets, &format!("spec.data.split.time.{field}"), part);
    }
}

#[test]
fn a_time_bound_beyond_2_to_53_is_an_integer() {
    let bound = |test_from: &str| {
        let files = "train: {paths: [train.csv]}\n    test: {paths: [test.csv]}";
        let time = format!("source: {{paths: [a.csv]}}\n    split: {{time: {{column: t, testFrom: '{test_from}'}}}}");
        match load(&BASE.replacen(files, &time, 1), "base.yaml", &[]).unwrap().resolved.data.source {
            DataSource::Files(FilePlan {
                parts: TrainTest::Divided { split: Split::Time { test_from, .. }, .. },
                ..
            }) => test_from,
            source => panic!("{source:?}"),
        }
    };
    assert_eq!(bound("1.7e18"), TimeBound::Integer(1_700_000_000_000_000_000));
    assert_eq!(bound("-1.7e18"), TimeBound::Integer(-1_700_000_000_000_000_000));
    assert_eq!((bound("1e19"), bound("1.7e9")), (TimeBound::Number(1e19), TimeBound::Number(1.7e9)));
    assert_eq!(bound("0.7"), TimeBound::Number(0.7));
}

/// Overrides of BASE for a split by time.
fn by_time(test_from: &str) -> Vec<String> {
    let fixed =
        "spec.data.train=null,spec.data.test=null,spec.data.source.paths={x.parquet},spec.data.split.time.column=t";
    vec![fixed.to_owned(), format!("spec.data.split.time.testFrom={test_from}")]
}

#[test]
fn a_manifest_survives_being_written_and_read_again() {
    for path in ["minimal", "movielens-100k", "criteo", "synthetic"] {
        let job = parse_manifest(&read(&format!("docs/examples/{path}.yaml")), path).unwrap();
        let text = serde_yaml::to_string(&job).unwrap();
        assert_eq!(parse_manifest(&text, "again").unwrap_or_else(|e| panic!("{e}\n{text}")), job);
    }
}

#[test]
fn an_object_taken_from_a_cluster_is_read_with_its_status() {
    let mut object = serde_json::to_value(job(&[])).unwrap();
    object["metadata"] = json!({
        "name": "base", "namespace": "ml", "uid": "u", "resourceVersion": "5", "generation": 2,
        "creationTimestamp": "2026-11-03T10:00:00Z",
        "managedFields": [{"manager": "kubectl", "operation": "Apply", "fieldsV1": {"f:spec": {}}}],
    });
    object["status"] = json!({
        "phase": "Training", "mode": "hybrid", "step": 12, "auc": 0.78, "observedGeneration": 2,
        "conditions": [{
            "type": "Ready", "status": "True", "reason": "Training", "message": "", "lastTransitionTime": "2026-11-03T10:01:00Z",
        }],
        "replicaStatuses": {"ps": ReplicaCount::new(1, 2)},
        "fieldOfALaterVersion": 1,
    });
    let text = serde_yaml::to_string(&object).unwrap();
    let job = parse_manifest(&text, "cluster.yaml").unwrap();
    let status = job.status.unwrap();
    assert_eq!(status.phase, Some(Phase::Training));
    assert_eq!(status.replica_statuses.unwrap().members.ps.unwrap().display, "1/2");
}

#[test]
fn misspellings_in_a_pod_template_are_found() {
    let template = "spec.roles.ps.template.";
    let job = job(&[
        &format!("{template}resources.requests.memory=16Gi"),
        &format!("{template}resources.limits.nvidia\\.com/gpu=1"),
        &format!("{template}nodeSelector.cloud\\.google\\.com/gke-spot='true'"),
        &format!("{template}tolerations[0].key=spot,{template}tolerations[0].operator=Exists"),
        &format!("{template}volumes[0].name=data,{template}volumes[0].persistentVolumeClaim.claimName=clicks"),
    ]);
    validate(&job).unwrap();
    let template = job.spec.roles.unwrap().ps.unwrap().template.unwrap();
    assert_eq!(template.volumes[0]["name"], "data");
    // The API server takes integers and texts.
    let cpu = "spec.roles.ps.template.resources.requests.cpu";
    refused(&[&format!("{cpu}=0.5")], cpu, "a quantity such as 500m, 2 or 16Gi, found 0.5; put it in quotes");
    let error = parse_manifest_with(
        BASE,
        "x",
        &sets(&["spec.roles.ps.template.volumes[0].name=d,spec.roles.ps.template.volumes[0].hostPth.path=/x"]),
    );
    let error = error.unwrap_err().to_string();
    assert!(error.contains("spec.roles.ps.template.volumes[0].hostPth: unknown field"), "{error}");
}

/// The API server accepts anything in a template's lists. A mistake there must be an error of the
/// job, and not an error of reading it.
#[test]
fn a_job_with_a_wrong_template_can_be_read_and_is_refused() {
    let mut value = serde_json::to_value(job(&[])).unwrap();
    value["spec"]["roles"] = json!({
        "ps": {"template": {"env": [{"name": "DEBUG", "value": 1}]}},
        "loader": {"template": {"tolerations": [{"key": "spot"}, {"key": "gpu", "value": true}]}},
        "denseWorker": {"template": {"affinity": {"nodeAffinty": {}}}},
    });
    let job: RecTrainingJob = serde_json::from_value(value).unwrap();
    let errors: Vec<String> = validate(&job).unwrap_err().iter().map(ToString::to_string).collect();
    assert_eq!(errors.len(), 3, "{errors:?}");
    assert!(errors[0].starts_with("spec.roles.ps.template.env[0].value: invalid type: integer `1`"), "{errors:?}");
    assert_eq!(errors[1], "spec.roles.denseWorker.template.affinity.nodeAffinty: unknown field");
    assert!(errors[2].starts_with("spec.roles.loader.template.tolerations[1].value: invalid type"), "{errors:?}");
}

#[test]
fn gpus_or_device_puts_dense_workers_on_gpus() {
    let of = |sets: &[&str]| {
        let roles = resolve(sets).roles;
        (roles.device, roles.gpus)
    };
    assert_eq!(of(&[]), (DeviceKind::Cpu, 0));
    assert_eq!(of(&["spec.roles.denseWorker.gpus=1"]), (DeviceKind::Cuda, 1));
    assert_eq!(of(&["spec.roles.denseWorker.gpus=0"]), (DeviceKind::Cpu, 0));
    assert_eq!(of(&["spec.roles.denseWorker.device=cuda"]), (DeviceKind::Cuda, 1));
    assert_eq!(of(&["spec.roles.denseWorker.device=auto"]), (DeviceKind::Auto, 0));
    assert_eq!(of(&["spec.roles.denseWorker.device=auto,spec.roles.denseWorker.gpus=1"]), (DeviceKind::Auto, 1));
    for (wrong, expected) in [
        ("spec.roles.denseWorker.device=cpu,spec.roles.denseWorker.gpus=1", "contradict each other"),
        ("spec.roles.denseWorker.device=cuda,spec.roles.denseWorker.gpus=0", "contradict each other"),
        ("spec.roles.denseWorker.gpus=2", "spec.roles.denseWorker.gpus"),
    ] {
        let error = load(BASE, "job.yaml", &sets(&[wrong])).unwrap_err().to_string();
        assert!(error.contains(expected), "{wrong}: {error}");
    }
    let asked = capabilities(&job(&["spec.roles.denseWorker.gpus=1"]));
    assert_eq!((asked.len(), asked[0].capability), (1, Capability::Cuda));
    let error = refuse_missing(&job(&["spec.roles.denseWorker.gpus=1"]), &[]).unwrap_err();
    let error = error[0].to_string();
    assert_eq!(
        error,
        "spec.roles.denseWorker.gpus: this version cannot compute on a GPU: remove the field, or use a program that \
         was built with the feature `cuda` (docs/guide/gpu.md)"
    );
}

#[test]
fn a_capability_that_is_missing_is_refused_and_never_ignored() {
    assert_eq!(capabilities(&job(&[])), []);
    // Every program scales loaders.
    let others =
        ["ps", "embeddingWorker", "denseWorker"].map(|role| format!("spec.autoscaling.{role}.scaler=external"));
    let loaders_only = [others.join(","), "spec.autoscaling.mode=apply,spec.autoscaling.loader.max=3".to_owned()];
    assert_eq!(capabilities(&job(&loaders_only.each_ref().map(String::as_str))), []);
    let one_more = capabilities(&job(&[&others[1..].join(",")]));
    assert_eq!(one_more.into_iter().map(|asked| asked.capability).collect::<Vec<_>>(), [Capability::Autoscaling]);
    let job = job(&[
        "spec.checkpoint.path=/c,spec.checkpoint.resume=latest,spec.checkpoint.from=/d@7",
        "spec.roles.denseWorker.device=cuda",
        "spec.suspend=true",
        "spec.activeDeadlineSeconds=5",
        "spec.training.mode=auto,spec.autoscaling.mode=apply",
    ]);
    let all: Vec<_> = capabilities(&job).into_iter().map(|asked| asked.capability).collect();
    assert_eq!(
        all,
        [
            Capability::Checkpoint,
            Capability::Resume,
            Capability::WarmStart,
            Capability::Cuda,
            Capability::Suspend,
            Capability::Deadline,
            Capability::AutoMode,
            Capability::Autoscaling,
            Capability::ApplyScaling,
        ]
    );
    assert_eq!(refuse_missing(&job, &all), Ok(()));
    let errors = refuse_missing(&job, &all[..1]).unwrap_err();
    assert_eq!(
        errors[0].to_string(),
        "spec.checkpoint.resume: this version cannot start from a checkpoint: remove the field"
    );
    assert_eq!(errors.len(), 8);
}

#[test]
fn auto_starts_in_sync_and_autoscaling_takes_every_default() {
    let resolved = resolve(&["spec.training.mode=auto,spec.roles.ps.replicas=3,spec.autoscaling.mode=recommend"]);
    assert_eq!(resolved.training.mode, Mode::Sync);
    let auto = serde_json::to_value(resolved.training.auto).unwrap();
    let expected =
        json!({"margin": 0.1, "windowSeconds": 60, "dwellSeconds": 300, "switchesPerHour": 4, "crowdedCpu": 0.85});
    assert_eq!(auto, expected);
    let expected = json!({
        "mode": "recommend",
        "ps": {"bounds": {"min": 3, "max": 12}, "memoryTarget": 0.75, "busyTarget": 0.7, "maxMemoryBytes": null},
        "embeddingWorker": {"bounds": {"min": 1, "max": 4}, "queueWaitSeconds": null},
        "denseWorker": {
            "bounds": {"min": 1, "max": 4}, "marginalThroughput": 0.6, "pricePerHour": null, "maxCostPerMillionSamples": null,
        },
        "loader": {"bounds": {"min": 1, "max": 4}, "catchUpSeconds": 300, "busyTarget": 0.8, "waitTarget": 0.1},
        "coolDownSeconds": 300, "upWindowSeconds": 60, "downWindowSeconds": 300,
    });
    assert_eq!(serde_json::to_value(&resolved.autoscaling).unwrap(), expected);
    // `autoscaling: {}` is enough, and a role can be left to an external scaler.
    let text = BASE.replace("  training:\n", "  autoscaling: {denseWorker: {scaler: external}}\n  training:\n");
    let given = load(&text, "base.yaml", &[]).unwrap().resolved.autoscaling.unwrap();
    assert!(given.dense_worker.is_none() && given.ps.is_some() && given.embedding_worker.is_some());
    // Decisions that cannot be carried out are neither made nor requested.
    let text = BASE.replace("  training:\n", "  autoscaling: {mode: apply}\n  training:\n");
    let given = load(&text, "base.yaml", &[]).unwrap().resolved.autoscaling.unwrap();
    assert!(given.ps.is_some() && given.dense_worker.is_none() && given.embedding_worker.is_some());
    let error =
        load(&text.replace("apply}", "apply, denseWorker: {max: 3}}"), "base.yaml", &[]).unwrap_err().to_string();
    assert!(
        error.contains("spec.autoscaling.denseWorker: with mode: apply spec.training.localBatchSize must be set"),
        "{error}"
    );
    // Not more dense workers than a batch has pieces.
    let text = text.replace("globalBatchSize: 256", "globalBatchSize: 256\n    localBatchSize: 128");
    let given = load(&text, "base.yaml", &[]).unwrap().resolved.autoscaling.unwrap();
    assert_eq!(given.dense_worker.unwrap().bounds.max, 2);
    assert!(explain("auto").unwrap().contains("whichever is predicted to be faster"));
}

// -------------------------------------------------------------------------------------- wrong ones

/// The text to replace in BASE, its replacement, the start of the only error's message after the
/// file, and a part of its sentence.
const BAD_TEXTS: [(&str, &str, &str, &str); 36] = [
    (
        "globalBatchSize",
        "globalBachSize",
        "base.yaml:15:5: spec.training.globalBachSize: ",
        "did you mean `globalBatchSize`?",
    ),
    ("  training:", "  trainig:", "base.yaml:14:3: spec.trainig: ", "did you mean `training`?"),
    (
        "globalBatchSize",
        "batchSize",
        "base.yaml:15:5: spec.training.batchSize: ",
        "did you mean `globalBatchSize` or `localBatchSize`?",
    ),
    (
        "  training:",
        "    nullValues: [nan, NULL]\n  training:",
        "base.yaml:14:23: spec.data.nullValues[1]: ",
        "expected text, found null; put it in quotes",
    ),
    (
        "paths: [train.csv]",
        "paths: [*.parquet]",
        "base.yaml:12:21: this is not valid YAML: ",
        "a text cannot begin with `*` without quotes: put it in quotes",
    ),
    (
        "name: user",
        "name: user, multiValue: {separator: |}",
        "base.yaml:8:46: this is not valid YAML: ",
        "a text cannot begin with `|` without quotes: put it in quotes",
    ),
    ("name: user", "name: *user", "base.yaml:8:16: this is not valid YAML: ", "a text cannot begin with `*`"),
    (
        "{kind: dnn}",
        "{kind: dnn, globalBatchSize: 3}",
        "base.yaml:5:22: spec.model.globalBatchSize: ",
        "did you mean `spec.training.globalBatchSize`?",
    ),
    (
        "globalBatchSize: 256",
        "learningRate: 0.1",
        "base.yaml:15:5: spec.training.learningRate: ",
        "did you mean `spec.training.optimizer.dense.learningRate` or `spec.training.optimizer.firstOrder.learningRate` or \
         `spec.training.optimizer.sparse.learningRate`?",
    ),
    ("{kind: dnn}", "{kind: dnn, colour: red}", "base.yaml:5:22: spec.model.colour: ", "`spec.model` has the fields"),
    ("kind: dnn", "kind: deepFM", "base.yaml:5:11: spec.model.kind: ", "did you mean `deepfm`?"),
    ("  model: {kind: dnn}", "  model: {}", "base.yaml:5:3: spec.model.kind: ", "missing, and required"),
    ("  model: {kind: dnn}\n", "", "base.yaml:4:1: spec.model: ", "missing, and required"),
    (
        "256",
        "\"256\"",
        "base.yaml:15:5: spec.training.globalBatchSize: ",
        "expected an integer from 1 to 16777216, found the text `256`",
    ),
    ("256", "0", "base.yaml:15:5: spec.training.globalBatchSize: ", "expected an integer from 1 to 16777216, found 0"),
    (
        "256",
        "2.5",
        "base.yaml:15:5: spec.training.globalBatchSize: ",
        "expected an integer from 1 to 16777216, found 2.5",
    ),
    ("256", ".nan", "base.yaml:15:5: spec.training.globalBatchSize: ", "expected a finite number"),
    ("256", "{}", "base.yaml:15:5: spec.training.globalBatchSize: ", "found an object"),
    ("name: user", "name: 7", "base.yaml:8:10: spec.features.sparse[0].name: ", "put it in quotes"),
    ("name: user", "name: \"\"", "base.yaml:8:10: spec.features.sparse[0].name: ", "a column name such as user_id"),
    (
        "name: user",
        "name: \"C{1..}\"",
        "base.yaml:8:10: spec.features.sparse[0].name: ",
        "or a range of them such as C{1..26}, found `C{1..}`",
    ),
    (
        "name: user",
        "name: item",
        "base.yaml:9:10: spec.features.sparse[1].name: ",
        "the column `item` is named twice; it is already in spec.features.sparse[0]",
    ),
    ("- {name: user}", "- user", "base.yaml:8:9: spec.features.sparse[0]: ", "expected an object with the fields"),
    ("dense: [{name: age}]", "dense: {name: age}", "base.yaml:10:5: spec.features.dense: ", "expected a list"),
    (
        "paths: [train.csv]",
        "paths: train.csv",
        "base.yaml:12:13: spec.data.train.paths: ",
        "expected a list, each entry text, found the text `train.csv`",
    ),
    (
        "paths: [train.csv]",
        "paths: []",
        "base.yaml:12:13: spec.data.train.paths: ",
        "expected at least 1 entry, found 0",
    ),
    ("{name: base}", "{name: base, lables: {}}", "base.yaml:3:24: metadata.lables: ", "did you mean `labels`?"),
    ("metadata: {name: base}", "metadata: {}", "base.yaml:3:1: metadata.name: ", "expected the job's name"),
    ("metadata: {name: base}\n", "", "base.yaml: metadata: ", "expected the job's name"),
    ("name: base", "name: Base_1", "base.yaml:3:12: metadata.name: ", "at most 35 characters"),
    (
        "kind: RecTrainingJob",
        "kind: Deployment",
        "base.yaml:2:1: kind: ",
        "expected `RecTrainingJob`, found the text `Deployment`",
    ),
    ("rectrain.dev/v1alpha1", "rectrain.dev/v1", "base.yaml:1:1: apiVersion: ", "expected `rectrain.dev/v1alpha1`"),
    (
        "    globalBatchSize: 256",
        "    globalBatchSize: 256\n    globalBatchSize: 512",
        "base.yaml:16:5: this is not valid YAML: ",
        "the field `globalBatchSize` is there twice",
    ),
    (
        "metadata: {name: base}",
        "metadata: {name: base",
        "base.yaml:4:5: this is not valid YAML: ",
        "did not find expected",
    ),
    ("  training:", "---\n  training:", "base.yaml: ", "several YAML documents"),
    ("spec:", "Spec:", "base.yaml: spec: ", "`spec` describes the job"),
];

#[test]
fn a_small_object_names_its_own_fields() {
    let split =
        "spec.data.train=null,spec.data.test=null,spec.data.source.paths={a.csv},spec.data.split.fraction.test=0.2";
    let error = load(BASE, "base.yaml", &sets(&[split])).unwrap_err().to_string();
    let sentence = "spec.data.split.fraction.test: unknown field; `spec.data.split.fraction` has the field `train`";
    assert!(error.contains(sentence), "{error}");
}

#[test]
fn lists_need_no_separator_and_text_does() {
    let text = BASE.replacen("{name: user}", "{name: user, multiValue: {}}", 1);
    let error = load(&text, "base.yaml", &[]).unwrap_err().to_string();
    assert!(error.contains("`user` has several values in a cell of text: set `multiValue.separator`"), "{error}");
    let lists = text.replace(".csv", ".parquet");
    let resolved = load(&lists, "base.yaml", &[]).unwrap().resolved;
    assert_eq!(resolved.features.schema.sparse[0].multi_value.as_deref(), Some(""));
}

#[test]
fn a_wrong_manifest_gets_a_sentence_with_line_and_expectation() {
    for (needle, replacement, start, part) in BAD_TEXTS {
        assert!(BASE.contains(needle), "{needle}");
        let text = BASE.replacen(needle, replacement, 1);
        let error = load(&text, "base.yaml", &[]).expect_err(replacement).to_string();
        let mut lines: Vec<_> = error.lines().collect();
        if replacement == "Spec:" {
            lines.retain(|line| !line.contains("Spec: unknown field"));
        }
        assert_eq!(lines.len(), 1, "{replacement}: {error}");
        assert!(lines[0].starts_with(start) && lines[0].contains(part), "{replacement}:\n{error}\n{start}…{part}");
    }
}

#[test]
fn an_unknown_kind_is_answered_with_every_kind() {
    let error = load(&BASE.replacen("kind: dnn", "kind: mlp", 1), "base.yaml", &[]).unwrap_err().to_string();
    let [others @ .., last] = ModelKind::ALL.map(|kind| format!("`{kind}`"));
    let expected = format!("expected one of {} and {last}, found `mlp`", others.join(", "));
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.starts_with("base.yaml:5:11: spec.model.kind: ") && error.contains(&expected), "{error}");
}

/// Overrides of BASE, the field of the only error and a part of its sentence. No single field shows
/// these errors.
const BAD_JOBS: [(&[&str], &str, &str); 86] = [
    (
        &["spec.training.mode=bmuf"],
        "spec.training.mode",
        "`bmuf` is an algorithm of the mode `shadow`: set spec.training.mode to `shadow` and spec.training.shadow.algorithm to `bmuf`",
    ),
    (
        &["spec.training.mode=des,spec.model.kind=dlrm"],
        "spec.training.mode",
        "mode des has no substitution for the model dlrm: expected one of deepfm, dnn, wideDeep, dcn, fm, lr, or another mode",
    ),
    (
        &["spec.training.switchAt[0].step=9,spec.training.switchAt[0].mode=des,spec.model.kind=dcnV2"],
        "spec.training.switchAt[0].mode",
        "mode des has no substitution for the model dcnV2",
    ),
    (&["spec.training.mode=hybird"], "spec.training.mode", "did you mean `hybrid`?"),
    (&["spec.training.epochs=2,spec.training.steps=10"], "spec.training", "give one of them"),
    (&["spec.data.split.fraction.train=0.8"], "spec.data.split", "`split` divides `source`"),
    (&["spec.data.source.paths={a.csv},spec.data.split.position.trainRows=9"], "spec.data", "exactly one of `train`"),
    (&["spec.data.test.paths={train.csv}"], "spec.data.test.paths[0]", "`train.csv` is also a training file"),
    (&["spec.data.train.paths={train.txt}"], "spec.data.train.paths", "set spec.data.format to csv, tsv or parquet"),
    (&["spec.data.train.paths={train.tsv}"], "spec.data.train.paths", "different formats"),
    (
        &["spec.data.train.paths={a.parquet},spec.data.test.paths={b.parquet},spec.data.csv.header=true"],
        "spec.data.csv",
        "these are Parquet",
    ),
    (
        &["spec.data.csv.columns={label,user,itm,age}"],
        "spec.features.sparse",
        "`item` is not among spec.data.csv.columns; did you mean `itm`?",
    ),
    (&["spec.data.csv.columns={clicked,user,item,age}"], "spec.features.label.name", "the label `label` is not among"),
    (&["spec.data.csv.columns={label,user,item,age,user}"], "spec.data.csv.columns[4]", "`user` is named twice"),
    (&["spec.data.csv.delimiter=abcdefghi"], "spec.data.csv.delimiter", "at most 8 characters"),
    (&["spec.data.csv.delimiter=é"], "spec.data.csv.delimiter", "ASCII characters"),
    (
        &["spec.features.label.name=user"],
        "spec.features.sparse[0].name",
        "`user` is the label: the model would read the answer",
    ),
    (
        &["spec.features.label.name=age"],
        "spec.features.dense[0].name",
        "`age` is the label: the model would read the answer",
    ),
    (&["spec.features.dense[0].name=user"], "spec.features.dense[0].name", "the column `user` is named twice"),
    (
        &["spec.features.sparse[0].name=C{1..3},spec.features.sparse[1].name=C2"],
        "spec.features.sparse[1].name",
        "the column `C2` is named twice; it is already in spec.features.sparse[0]",
    ),
    (&["spec.features.sparse[0].name=C{3..1}"], "spec.features.sparse[0].name", "runs backwards"),
    (&["spec.features.sparse[0].name=C{1..9999}"], "spec.features.sparse[0].name", "more than 4096 names"),
    (
        &["spec.features.sparse[0].table=t,spec.features.sparse[1].table=t,spec.features.sparse[1].dim=8"],
        "spec.features.sparse[1].dim",
        "features that share a table need one width",
    ),
    (
        &[
            "spec.features.sparse[0].table=t,spec.features.sparse[1].table=t,spec.features.sparse[1].initializer.kind=zeros",
        ],
        "spec.features.sparse[1].initializer",
        "need one initializer",
    ),
    (&["spec.model.kind=fm,spec.features.sparse[1].dim=8"], "spec.features.sparse", "they need one width"),
    (
        &["spec.features.sparse[0].multiValue.separator=\\,,spec.data.csv.quoting=false"],
        "spec.features.sparse",
        "separated by the text that separates columns",
    ),
    (
        &["spec.features.dense=null,spec.data.train=null,spec.data.test=null,spec.data.synthetic.rows=10"],
        "spec.features.sparse",
        "synthetic rows have no column `user`",
    ),
    (&["spec.training.globalBatchSize=2,spec.roles.denseWorker.replicas=3"], "spec", "at least one row of each batch"),
    (
        &["spec.training.mode=gba,spec.training.globalBatchSize=256,spec.roles.denseWorker.replicas=3"],
        "spec.training.localBatchSize",
        "256 rows cannot be divided equally among 3 dense workers",
    ),
    (
        &["spec.training.sync.lookAhead=17"],
        "spec.training.sync.lookAhead",
        "expected an integer from 0 to 16, found 17",
    ),
    (
        &["spec.training.sync.lookAhead=-1"],
        "spec.training.sync.lookAhead",
        "expected an integer from 0 to 16, found -1",
    ),
    (
        &["spec.training.sync.pieces=pulled"],
        "spec.training.localBatchSize",
        "pulled pieces are local batches: expected a `localBatchSize`",
    ),
    (
        &["spec.training.sync.pieces=pulled,spec.training.localBatchSize=32,spec.training.barrierWorkers=1"],
        "spec.training.barrierWorkers",
        "all dense workers pull pieces: remove `barrierWorkers`",
    ),
    (
        &["spec.training.sync.pieces=pushed"],
        "spec.training.sync.pieces",
        "expected one of `fixed` and `pulled`, found `pushed`",
    ),
    (
        &["spec.training.partialPooling=always"],
        "spec.training.partialPooling",
        "expected one of `never` and `bySize`, found `always`",
    ),
    (&["spec.training.barrierWorkers=2"], "spec.training.barrierWorkers", "at most the 1 dense workers"),
    (&["spec.training.mode=hopBw"], "spec.training.hopBw.backups", "expected fewer than there are"),
    (
        &["spec.checkpoint.path=/ck,spec.serving.publish.path=/p,spec.serving.publish.everySeconds=0.05"],
        "spec.serving.publish.everySeconds",
        "expected a number from 0.1 to 86400, found 0.05",
    ),
    (
        &["spec.checkpoint.path=/ck,spec.serving.publish.path=/p,spec.serving.publish.everySeconds=200ms"],
        "spec.serving.publish.everySeconds",
        "expected a number from 0.1 to 86400, found the text `200ms`",
    ),
    (&["spec.training.shadow.alpha=0"], "spec.training.shadow.alpha", "expected a number from 0.001 to 1, found 0"),
    (&["spec.training.shadow.alpha=1.5"], "spec.training.shadow.alpha", "expected a number from 0.001 to 1, found 1.5"),
    (&["spec.training.shadow.algorithm=adpsgd"], "spec.training.shadow.algorithm", "expected one of"),
    (&["spec.training.shadow.eta=2.1"], "spec.training.shadow.eta", "expected a number from 0.001 to 2, found 2.1"),
    (
        &["spec.training.shadow.momentum=1"],
        "spec.training.shadow.momentum",
        "expected a number from 0 to 0.99, found 1",
    ),
    (
        &["spec.training.shadow.fragments=0"],
        "spec.training.shadow.fragments",
        "expected an integer from 1 to 256, found 0",
    ),
    (
        &["spec.training.shadow.fragments=257"],
        "spec.training.shadow.fragments",
        "expected an integer from 1 to 256, found 257",
    ),
    (&["spec.training.shadow.wirePrecision=fp16"], "spec.training.shadow.wirePrecision", "expected one of"),
    (&["spec.training.shadow.outputModel=last"], "spec.training.shadow.outputModel", "expected one of"),
    (&["spec.training.shadow.threads=0"], "spec.training.shadow.threads", "expected an integer from 1 to 64, found 0"),
    (
        &["spec.training.shadow.everySteps=0"],
        "spec.training.shadow.everySteps",
        "expected an integer from 1 to 1000000",
    ),
    (
        &["spec.training.mode=shadow,spec.training.globalBatchSize=256,spec.roles.denseWorker.replicas=3"],
        "spec.training.localBatchSize",
        "mode shadow makes a global batch of M equal local batches",
    ),
    (
        &[
            "spec.training.switchAt[0].step=9,spec.training.switchAt[0].mode=gba",
            "spec.training.switchAt[1].step=3,spec.training.switchAt[1].mode=sync",
        ],
        "spec.training.switchAt",
        "ascending order of `step`",
    ),
    (
        &["spec.training.switchAt[0].step=9,spec.training.switchAt[0].mode=auto"],
        "spec.training.switchAt[0].mode",
        "a step cannot switch to `auto`",
    ),
    (
        &["spec.training.mode=auto,spec.roles.denseWorker.replicas=3"],
        "spec.training.localBatchSize",
        "mode gba makes a global batch of M equal local batches",
    ),
    (
        &["spec.autoscaling.ps.max=2,spec.roles.ps.replicas=3"],
        "spec.autoscaling.ps.max",
        "at least the 3 of spec.roles.ps.replicas, found 2",
    ),
    (
        &["spec.autoscaling.embeddingWorker.min=2"],
        "spec.autoscaling.embeddingWorker.min",
        "at most the 1 of spec.roles.embeddingWorker.replicas, found 2",
    ),
    (
        &["spec.autoscaling.loader.min=2"],
        "spec.autoscaling.loader.min",
        "at most the 1 of spec.roles.loader.replicas, found 2",
    ),
    (
        &["spec.autoscaling.denseWorker.max=257"],
        "spec.autoscaling.denseWorker.max",
        "of each batch: expected at most 256",
    ),
    (
        &["spec.data.train=null,spec.data.test=null,spec.data.source.paths={a.csv},spec.data.split.slices.rows=1000"],
        "spec.data.split.slices.rows",
        "a multiple of spec.training.globalBatchSize (256)",
    ),
    (
        &[
            "spec.data.train=null,spec.data.test=null,spec.data.source.paths={a.csv},spec.data.split.slices.rows=512",
            "spec.training.epochs=2",
        ],
        "spec.training.epochs",
        "only once",
    ),
    (
        &[
            "spec.data.train=null,spec.data.test=null,spec.data.source.paths={a.csv},spec.data.split.slices.rows=512",
            "spec.data.shuffle.windowRows=512",
        ],
        "spec.data.shuffle",
        "in the order of the rows",
    ),
    (
        &[
            "spec.data.train=null,spec.data.test=null,spec.data.source.paths={a.csv},spec.data.split.slices.rows=512",
            "spec.training.evaluation.every=epoch",
        ],
        "spec.training.evaluation",
        "remove it",
    ),
    (&["spec.roles.coordinator.replicas=2"], "spec.roles.coordinator.replicas", "an integer, namely 1, found 2"),
    (&["spec.roles.ps.replicas=0"], "spec.roles.ps.replicas", "an integer from 1 to 1024, found 0"),
    (&["spec.features.sparse=null"], "spec.features.sparse", "missing, and required"),
    (&["spec.features.sparse={}"], "spec.features.sparse", "expected at least 1 entry, found 0"),
    (
        &["spec.data.train.paths={hdfs://nn/x.csv}"],
        "spec.data.train.paths[0]",
        "no build reads hdfs:// URLs; expected a local path, or a file://, s3:// or gs:// URL, found `hdfs://nn/x.csv`",
    ),
    (&["spec.data.train.paths={a.csv,oss://b/x}"], "spec.data.train.paths[1]", "no build reads oss:// URLs"),
    (&["spec.data.test.paths={az://b/x.csv}"], "spec.data.test.paths[0]", "no build reads az:// URLs"),
    (
        &[
            "spec.data.train=null,spec.data.test=null",
            "spec.data.source.paths={https://host/a.csv},spec.data.split.fraction.train=0.8",
        ],
        "spec.data.source.paths[0]",
        "no build reads https:// URLs",
    ),
    (&["spec.checkpoint.path=hdfs://nn/ck"], "spec.checkpoint.path", "no build reads hdfs:// URLs"),
    (&["spec.checkpoint.path=s3:/b/ck"], "spec.checkpoint.path", "two slashes after the colon"),
    (&["spec.checkpoint.path=gs:///ck"], "spec.checkpoint.path", "expected gs://BUCKET/PATH, found `gs:///ck`"),
    (
        &["spec.checkpoint.path=~/models"],
        "spec.checkpoint.path",
        "nothing expands `~` in `~/models`: write the whole path",
    ),
    (&["spec.checkpoint.path=~"], "spec.checkpoint.path", "nothing expands `~`"),
    (&["spec.checkpoint.path=$HOME/models"], "spec.checkpoint.path", "nothing expands `$HOME` in `$HOME/models`"),
    (
        &["spec.checkpoint.from=~/models@7"],
        "spec.checkpoint.from",
        "nothing expands `~` in `~/models@7`: write the whole path",
    ),
    (&["spec.checkpoint.from=hdfs://nn/ck"], "spec.checkpoint.from", "no build reads hdfs:// URLs"),
    (&["spec.checkpoint.from=/ck@newest"], "spec.checkpoint.from", "expected the number of a step or `latest`"),
    (
        &["spec.checkpoint.from=/models/day@latest,spec.checkpoint.path=/models/day/"],
        "spec.checkpoint.from",
        "set spec.checkpoint.resume to `latest` instead",
    ),
    (&["spec.data.train.paths[0]=/data/${DAY}.csv"], "spec.data.train.paths[0]", "nothing expands `${DAY}`"),
    (
        &["spec.data.test.paths[0]=file:///data/$DAY/x.csv"],
        "spec.data.test.paths[0]",
        "nothing expands `$DAY` in `file:///data/$DAY/x.csv`",
    ),
    (
        &["spec.data.train.paths={s3://b/x.csv}", "spec.data.storage.options.endpoint=minio:9000"],
        "spec.data.storage.options.endpoint",
        "expected http:// or https:// before the host, such as https://minio:9000, found `minio:9000`",
    ),
    (
        &["spec.checkpoint.path=s3a://b/ck", "spec.data.storage.options.AWS_ENDPOINT_URL=s3://minio"],
        "spec.data.storage.options.AWS_ENDPOINT_URL",
        "expected http:// or https://, such as https://minio",
    ),
    (
        &["spec.checkpoint.path=s3://b/ck", "spec.data.storage.options.endpoint=http://minio:9000"],
        "spec.data.storage.options.endpoint",
        "set the option `allow_http` to \"true\"",
    ),
    (
        &["spec.checkpoint.path=gs://b/ck", "spec.data.storage.options.endpoint=fake-gcs:4443"],
        "spec.data.storage.options.endpoint",
        "such as http://fake-gcs:4443",
    ),
];

#[test]
fn paths_and_endpoints_that_can_be_used_are_valid() {
    for expressions in [
        &["spec.data.train.paths={file:///a.csv,S3A://b/*.csv,gs://b/a.csv}"][..],
        &["spec.data.train.paths={./~/a.csv,part$1.csv,a~/b.csv,~me.csv}"],
        &["spec.checkpoint.path=s3://b/day=$DAY"],
        &["spec.checkpoint.path=s3://b/ck", "spec.data.storage.options.endpoint=https://minio:9000"],
        &[
            "spec.checkpoint.path=s3://b/ck",
            "spec.data.storage.options.endpoint=http://minio:9000",
            "spec.data.storage.options.allow_http=yes",
        ],
        // The Secret may set AWS_ALLOW_HTTP.
        &[
            "spec.checkpoint.path=s3://b/ck",
            "spec.data.storage.options.endpoint=http://minio:9000",
            "spec.data.storage.secretName=keys",
        ],
        &["spec.checkpoint.path=gs://b/ck", "spec.data.storage.options.endpoint=http://127.0.0.1:4443"],
        &["spec.checkpoint.from=s3://b/monday@latest,spec.checkpoint.path=s3://b/tuesday"],
        // A job may begin with a model and save none.
        &["spec.checkpoint.from=/models/monday@1200"],
        // No URL uses it.
        &["spec.data.storage.options.endpoint=minio:9000"],
    ] {
        resolve(expressions);
    }
}

#[test]
fn a_scheme_that_no_build_reads_is_named_with_its_line() {
    let text = BASE.replacen("paths: [test.csv]", "paths: [hdfs://nn/test.csv]", 1);
    let error = load(&text, "base.yaml", &[]).unwrap_err().to_string();
    assert!(error.starts_with("base.yaml:13:"), "{error}");
    assert!(error.contains(": spec.data.test.paths[0]: no build reads hdfs:// URLs; expected a local path"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    let error = load(BASE, "base.yaml", &sets(&["spec.checkpoint.path=~/ck"])).unwrap_err().to_string();
    assert!(error.starts_with("--set spec.checkpoint.path=~/ck: spec.checkpoint.path: nothing expands `~`"), "{error}");
}

#[test]
fn a_contradiction_gets_a_sentence_with_field_and_remedy() {
    for (expressions, path, part) in BAD_JOBS {
        let error = load(BASE, "base.yaml", &sets(expressions)).expect_err(path);
        let ManifestError::Fields { errors } = error else { panic!("{error}") };
        let about: Vec<_> =
            errors.iter().filter(|e| e.error.path.to_string() == path && e.error.message.contains(part)).collect();
        let same = errors.iter().all(|e| e.error.path.to_string() == path);
        assert!(!about.is_empty() && same, "{expressions:?}: {errors:#?}\nexpected {path}: …{part}…");
    }
}

/// Expects one error of the job with these overrides, at this field and with this part.
fn refused(expressions: &[&str], path: &str, part: &str) {
    let error = load(BASE, "base.yaml", &sets(expressions)).expect_err(path);
    let ManifestError::Fields { errors } = error else { panic!("{error}") };
    let found = |e: &LocatedError| e.error.path.to_string() == path && e.error.message.contains(part);
    assert!(errors.len() == 1 && found(&errors[0]), "{expressions:?}: {errors:#?}\nexpected {path}: …{part}…");
}

/// Lays a stream over the training files of the base.
const KAFKA: &str = "spec.data.train.paths=null,spec.data.train.kafka.bootstrapServers={kafka:9092},\
                     spec.data.train.kafka.topics={clicks},spec.data.train.kafka.format=json";

#[test]
fn a_stream_takes_every_default() {
    let DataSource::Stream(stream) = resolve(&[KAFKA]).data.source else { panic!("the job reads a stream") };
    let expected = KafkaConfig {
        bootstrap_servers: vec!["kafka:9092".to_owned()],
        topics: vec!["clicks".to_owned()],
        format: RecordFormat::Json,
        start: StreamStart::Earliest,
        until: None,
        linger_millis: 2_000,
        lost_records: LostRecords::Fail,
        dead_letter_topic: None,
        group: None,
        security: KafkaSecurity::default(),
    };
    assert_eq!((stream.kafka, stream.secret_name), (expected, None));
    let TrainTest::Separate { train, test } = stream.test.parts else { panic!("a stream has no split") };
    assert_eq!((train, test), (vec![], vec!["test.csv".to_owned()]));
}

#[test]
fn settings_of_a_stream_that_contradict_each_other_are_refused() {
    let kafka = "spec.data.train.kafka";
    let of = |setting: &str| format!("{kafka}.{setting}");
    for (settings, path, part) in [
        ("topics={clicks,clicks}", "topics[1]", "named twice"),
        ("topics={a b}", "topics[0]", ""),
        ("bootstrapServers={http://kafka:9092}", "bootstrapServers[0]", ""),
        ("deadLetterTopic=dead", "deadLetterTopic", "set spec.data.badRows.action: skip"),
        ("deadLetterTopic=clicks", "deadLetterTopic", "would come back for ever"),
        ("lingerMillis=5", "lingerMillis", ""),
    ] {
        refused(&[KAFKA, &of(settings)], &of(path), part);
    }
    let csv = |columns: &str| format!("{kafka}.format=csv,{kafka}.csv.columns={columns}");
    refused(
        &[KAFKA, &csv("{label,user,item}")],
        "spec.features.dense",
        "is not among spec.data.train.kafka.csv.columns",
    );
    let header = format!("{},{kafka}.csv.header=true", csv("{label,user,item,age}"));
    refused(&[KAFKA, &header], "spec.data.train.kafka.csv", "records have no header");
    refused(&[KAFKA, "spec.training.epochs=2"], "spec.training.epochs", "a stream is read once");
}

/// Lays followed paths over the training files of the base.
const FOLLOW: &str = "spec.data.train.paths=null,spec.data.train.follow.paths={in/*.csv}";

#[test]
fn followed_paths_take_every_default() {
    let DataSource::Follow(source) = resolve(&[FOLLOW]).data.source else { panic!("the job follows paths") };
    let expected = FollowConfig {
        paths: vec!["in/*.csv".to_owned()],
        order: FileOrder::Name,
        interval_seconds: 30,
        whole_directories: false,
        until: None,
        lost_files: LostRecords::Fail,
        late_files: LateFiles::Train,
    };
    assert_eq!(source.follow, expected);
    let TrainTest::Separate { train, test } = source.files.parts else { panic!("followed paths have no split") };
    assert_eq!((train, test), (vec!["in/*.csv".to_owned()], vec!["test.csv".to_owned()]));
}

#[test]
fn followed_paths_take_every_setting() {
    let follow = |settings: &str| format!("spec.data.train.follow.{settings}");
    let settings = [
        "order=time",
        "intervalSeconds=5",
        "wholeDirectories=true",
        "until.idleSeconds=600",
        "lostFiles=skip",
        "lateFiles=skip",
    ]
    .map(follow)
    .join(",");
    let DataSource::Follow(source) = resolve(&[FOLLOW, &settings]).data.source else { panic!("the job follows paths") };
    let expected = FollowConfig {
        paths: vec!["in/*.csv".to_owned()],
        order: FileOrder::Time,
        interval_seconds: 5,
        whole_directories: true,
        until: Some(FollowEnd::IdleSeconds(600)),
        lost_files: LostRecords::Skip,
        late_files: LateFiles::Skip,
    };
    assert_eq!(source.follow, expected);
    let until = follow("until.timestamp=1700000000000");
    let DataSource::Follow(source) = resolve(&[FOLLOW, &until]).data.source else { panic!("the job follows paths") };
    assert_eq!(source.follow.until, Some(FollowEnd::Timestamp(1_700_000_000_000)));
}

#[test]
fn settings_of_followed_paths_that_contradict_each_other_are_refused() {
    let paths = "spec.data.train.follow.paths";
    let of = |setting: &str| format!("{paths}={setting}");
    refused(&[&of("{a.csv,a.csv}"), FOLLOW_ALONE], "spec.data.train.follow.paths[1]", "named twice");
    refused(&[&of("{ftp://a/b.csv}"), FOLLOW_ALONE], "spec.data.train.follow.paths[0]", "");
    refused(&[&of("{in/*}"), FOLLOW_ALONE], paths, "set spec.data.format");
    refused(&[&of("{test.csv}"), FOLLOW_ALONE], "spec.data.test.paths[0]", "is also a training file");
    refused(&[FOLLOW, "spec.training.epochs=2"], "spec.training.epochs", "a stream is read once");
    refused(&[FOLLOW, "spec.data.train.follow.intervalSeconds=0"], "spec.data.train.follow.intervalSeconds", "");
}

const FOLLOW_ALONE: &str = "spec.data.train.paths=null";

#[test]
fn numbers_that_floats_cannot_hold_are_refused() {
    let age = |settings: &str| format!("spec.features.dense[0].transform={settings}");
    refused(&["spec.features.dense[0].limit=1e39"], "spec.features.dense[0].limit", "32-bit floats");
    refused(&["spec.features.dense[0].limit=0"], "spec.features.dense[0].limit", "above 0");
    refused(&["spec.features.dense[0].missing=1e16"], "spec.features.dense[0].missing", "beyond the `limit` 1e15");
    // The 32-bit float of 0.7 is below the 64-bit one.
    let equal = ["spec.features.dense[0].limit=0.7", "spec.features.dense[0].missing=0.7"];
    assert_eq!(resolve(&equal).features.schema.dense[0].missing, 0.7);
    refused(
        &[&age("standardize"), "spec.features.dense[0].mean=1e300", "spec.features.dense[0].std=1"],
        "spec.features.dense[0].mean",
        "32-bit floats",
    );
    refused(
        &[&age("standardize"), "spec.features.dense[0].mean=1", "spec.features.dense[0].std=1e-50"],
        "spec.features.dense[0].std",
        "is 0 in 32-bit floats",
    );
    refused(
        &[&age("minMax"), "spec.features.dense[0].min=16777216", "spec.features.dense[0].max=16777217"],
        "spec.features.dense[0].max",
        "are equal in 32-bit floats",
    );
    refused(&["spec.features.label.positiveFrom=1.7e18"], "spec.features.label.positiveFrom", "beyond 2^53");
}

#[test]
fn words_for_labels_lie_from_0_to_1_and_exclude_a_threshold() {
    let click = "spec.features.label.values.click=1";
    assert_eq!(resolve(&[click]).features.schema.label.values["click"], 1.0);
    refused(&["spec.features.label.values.click=2"], "spec.features.label.values.click", "from 0 to 1");
    refused(&[click, "spec.features.label.positiveFrom=4"], "spec.features.label.values", "remove one of them");
    let text = BASE.replacen("  features:\n", "  features:\n    label: {values: {' click': 1, click: 0}}\n", 1);
    let error = load(&text, "base.yaml", &[]).unwrap_err().to_string();
    assert!(error.contains("`click` has two labels, because blanks around a word do not count"), "{error}");
}

#[test]
fn separators_may_have_several_characters() {
    let FileFormat::Csv(csv) = files_of(&["spec.data.csv.delimiter=::"]).format else { panic!() };
    assert_eq!((csv.delimiter.as_str(), csv.quoting), ("::", false));
    refused(&["spec.data.csv.delimiter=::,spec.data.csv.quoting=true"], "spec.data.csv.quoting", "quotes go with one");
    let comma = "spec.features.sparse[0].multiValue.separator=\\,";
    assert_eq!(resolve(&[comma]).features.schema.sparse[0].multi_value.as_deref(), Some(","));
    let wide =
        ["spec.data.csv.delimiter=|", "spec.data.csv.quoting=false", "spec.features.sparse[0].multiValue.separator=||"];
    refused(&wide, "spec.features.sparse", "separated by the text that separates columns");
}

#[test]
fn a_byte_order_mark_is_skipped() {
    let marked = format!("\u{feff}{BASE}");
    assert_eq!(load(&marked, "base.yaml", &[]).unwrap().job, load(BASE, "base.yaml", &[]).unwrap().job);
    let wrong = marked.replace("kind: dnn", "kind: mlp");
    let error = load(&wrong, "base.yaml", &[]).unwrap_err().to_string();
    assert!(error.starts_with("base.yaml:5:11: spec.model.kind: "), "{error}");
}

const BUDGET: &str = "spec.features.memory.maxRows=9000";
const TIME: &str = "spec.data.timeColumn.name=time";

#[test]
fn a_budget_below_the_rows_of_one_batch_is_refused() {
    refused(&["spec.features.memory.maxRows=511"], "spec.features.memory.maxRows", "can need 512 rows");
    assert!(resolve(&["spec.features.memory.maxRows=512"]).features.memory.is_some());
    refused(&["spec.features.memory.maxBytes=31Ki"], "spec.features.memory.maxBytes", "can need 32768 bytes");
}

#[test]
fn a_budget_of_bytes_is_a_number_with_a_unit() {
    let bytes =
        |text: &str| resolve(&[&format!("spec.features.memory.maxBytes={text}")]).features.memory.unwrap().budget;
    assert_eq!((bytes("40Gi"), bytes("1000000")), (ResolvedBudget::Bytes(40 << 30), ResolvedBudget::Bytes(1_000_000)));
    refused(&["spec.features.memory.maxBytes=4.5Gi"], "spec.features.memory.maxBytes", "such as 40Gi, 512Mi or 40G");
    let float = "expected a number of bytes such as 40Gi or 512Mi, found 4.5";
    refused(&["spec.features.memory.maxBytes=4.5"], "spec.features.memory.maxBytes", float);
    refused(&["spec.features.memory.maxBytes=0"], "spec.features.memory.maxBytes", "found `0`");
}

#[test]
fn auto_takes_a_share_of_the_servers_limits() {
    refused(&["spec.features.memory.auto=true"], "spec.features.memory.auto", "limits.memory, such as 16Gi");
    let auto = [
        "spec.features.memory.auto=true",
        "spec.roles.ps.replicas=2",
        "spec.roles.ps.template.resources.limits.memory=10Gi",
    ];
    let job = job(&auto);
    let memory = job.spec.features.memory.clone().unwrap().for_members(&job.spec);
    assert_eq!(resolve(&auto).features.memory.unwrap().budget, ResolvedBudget::Bytes(12 << 30));
    assert_eq!(memory.max_bytes.and_then(|bytes| bytes.bytes()), Some(12 << 30));
}

#[test]
fn rows_expire_only_by_the_clock_of_the_data() {
    let expire = "spec.features.sparse[0].expireAfter=48h";
    refused(&[expire], "spec.features.sparse[0].expireAfter", "spec.data.timeColumn");
    let resolved = resolve(&[expire, TIME, "spec.data.timeColumn.unit=milliseconds"]).features;
    let life = resolved.tables[0].life.unwrap();
    assert_eq!(life.expire_after_seconds.map(u64::from), Some(172_800));
    assert_eq!(resolved.schema.time.unwrap().unit, TimeUnit::Milliseconds);
    assert_eq!(resolved.tables[1].life, None);
    for wrong in ["5s", "4000d"] {
        let expire = format!("spec.features.sparse[0].expireAfter={wrong}");
        refused(&[&expire, TIME], "spec.features.sparse[0].expireAfter", "from 1m to 3650d");
    }
    refused(&["spec.features.sparse[0].expireAfter=2 days", TIME], "spec.features.sparse[0].expireAfter", "48h or 30d");
}

#[test]
fn the_column_of_a_split_by_time_is_the_clock() {
    let split =
        ["spec.data.train=null,spec.data.test=null,spec.data.source.paths={a.csv}", "spec.data.split.time.column=t"];
    let clock = |bound: &str| {
        let bound = format!("spec.data.split.time.testFrom={bound}");
        resolve(&[split[0], split[1], &bound, BUDGET]).features.schema.time.unwrap()
    };
    assert_eq!((clock("2026-11-03").order, clock("25.11.2026").order), (None, Some(DateOrder::DayFirst)));
    assert_eq!(clock("1700000000").seconds_of_text(b"1700000000"), Some(1_700_000_000));
    let milliseconds = "spec.data.split.time.testFrom=1700000000000";
    refused(&[split[0], split[1], milliseconds, BUDGET], "spec.data.split.time.testFrom", "milliseconds");
    assert_eq!(resolve(&[split[0], split[1], milliseconds]).features.schema.time, None, "no table needs a clock");
}

#[test]
fn settings_of_evictions_need_a_budget() {
    for (field, value) in [("priority", "high"), ("share", "0.5")] {
        let set = format!("spec.features.sparse[0].{field}={value}");
        refused(&[&set], &format!("spec.features.sparse[0].{field}"), "set spec.features.memory");
    }
    refused(&["spec.features.sparse[0].share=1.5", BUDGET], "spec.features.sparse[0].share", "1");
    let life = resolve(&[BUDGET, "spec.features.sparse[1].share=0.25"]).features.tables[1].life.unwrap();
    assert_eq!(life.share_millionths, Some(250_000));
}

#[test]
fn a_hashed_table_has_no_budget() {
    let hashed = "spec.features.sparse[1].hashBuckets=1000";
    refused(&[hashed, BUDGET], "spec.features.sparse[1].hashBuckets", "remove `hashBuckets`");
    let features = resolve(&[hashed]).features;
    assert_eq!((features.schema.sparse[0].hash_buckets, features.schema.sparse[1].hash_buckets), (None, Some(1000)));
    let shared = ["spec.features.sparse[0].table=t", "spec.features.sparse[1].table=t", hashed];
    refused(&shared, "spec.features.sparse[1]", "need the same `admission`");
}

#[test]
fn a_budget_makes_row_wise_adagrad_the_default() {
    let kind = |sets: &[&str]| resolve(sets).training.sparse_optimizer.kind();
    assert_eq!((kind(&[]), kind(&[BUDGET])), (SparseOptimizerKind::Adam, SparseOptimizerKind::RowWiseAdaGrad));
    assert_eq!(kind(&[BUDGET, "spec.training.optimizer.sparse.beta1=0.8"]), SparseOptimizerKind::Adam);
    assert_eq!(kind(&[BUDGET, "spec.training.optimizer.sparse.kind=sgd"]), SparseOptimizerKind::Sgd);
}

#[test]
fn first_order_weights_may_have_an_optimizer_of_their_own() {
    let training = |sets: &[&str]| resolve(sets).training;
    let lr = training(&["spec.model.kind=lr", "spec.training.optimizer.firstOrder.kind=ftrl"]);
    let ftrl = SparseOptimizer::Ftrl { learning_rate: 0.05, beta: 1.0, l1: 0.0, l2: 0.0 };
    assert_eq!(lr.first_order_optimizer, Some(ftrl));
    assert_eq!(lr.sparse_optimizer.kind(), SparseOptimizerKind::Adam);
    let budget = training(&["spec.model.kind=deepfm", BUDGET, "spec.training.optimizer.firstOrder.learningRate=0.5"]);
    assert_eq!(budget.first_order_optimizer.unwrap().kind(), SparseOptimizerKind::RowWiseAdaGrad);
    refused(
        &["spec.training.optimizer.firstOrder.kind=ftrl"],
        "spec.training.optimizer.firstOrder",
        "choose lr, fm, deepfm or wideDeep",
    );
}

#[test]
fn a_number_is_no_marker_of_missing_values() {
    refused(&["spec.data.nullValues={NA,01}"], "spec.data.nullValues[1]", "`01` is a number");
    for infinite in ["inf", "-Infinity", "1e999"] {
        let markers = format!("spec.data.nullValues={{NA,{infinite}}}");
        refused(&[&markers], "spec.data.nullValues[1]", &format!("`{infinite}` is a number"));
    }
    assert_eq!(files_of(&["spec.data.nullValues={NULL,nan}"]).null_values, ["NULL", "nan"]);
    assert_eq!(files_of(&[]).null_values, ["nan", "NULL", "\\N"]);
}

fn files_of(expressions: &[&str]) -> FilePlan {
    match resolve(expressions).data.source {
        DataSource::Files(files) => files,
        DataSource::Synthetic(_) | DataSource::Stream(_) | DataSource::Follow(_) => panic!("the job reads files"),
    }
}

#[test]
fn an_error_that_an_override_causes_names_the_override() {
    let error =
        load(BASE, "base.yaml", &sets(&["spec.training.seed=1", "spec.training.mode=bmuf"])).unwrap_err().to_string();
    assert!(error.starts_with("--set spec.training.mode=bmuf: spec.training.mode: `bmuf` is an algorithm"), "{error}");
    let error = load(BASE, "base.yaml", &sets(&["spec.training.mode"])).unwrap_err().to_string();
    assert!(error.starts_with("--set spec.training.mode: expected `spec.training.mode=VALUE`"), "{error}");
    let error =
        load(BASE, "base.yaml", &sets(&["spec.training.mode=hybrid", "spec.trainng.seed=1"])).unwrap_err().to_string();
    assert_eq!(error, "--set spec.trainng.seed=1: spec.trainng: unknown field; did you mean `training`?");
}

#[test]
fn several_errors_are_reported_together() {
    let text = BASE.replace("kind: dnn", "kind: nn").replace("globalBatchSize: 256", "globalBatchSize: -1\n    mod: x");
    let error = load(&text, "base.yaml", &[]).unwrap_err().to_string();
    assert_eq!(error.lines().count(), 3, "{error}");
}

#[test]
fn a_text_that_is_not_a_manifest_is_refused() {
    for (text, part) in [
        ("", "the file is empty"),
        ("# nothing\n---\n", "the file is empty"),
        ("just text", "x.yaml: expected a RecTrainingJob with apiVersion, kind, metadata, spec"),
        ("[1, 2]", "found a list of 2"),
        ("{}", "apiVersion: missing"),
        ("? [a]\n: b\n", "put it in quotes"),
        ("a: !thing 1\n", "the YAML tag"),
        ("a: *b\n", "not valid YAML"),
        ("\u{0}", "not valid YAML"),
        ("a: &a [*a]\n", "not valid YAML"),
    ] {
        let error = load(text, "x.yaml", &[]).unwrap_err().to_string();
        assert!(error.starts_with("x.yaml") && error.contains(part), "{text:?}: {error}");
    }
}

#[test]
fn a_manifest_made_to_exhaust_the_parser_is_refused() {
    let nested = "[".repeat(10_000);
    let laughs: String = (1..=40).map(|i| format!("a{i}: &a{i} [*a{}, *a{}]\n", i - 1, i - 1)).collect();
    for text in [nested, format!("a0: &a0 [x, x]\n{laughs}")] {
        let error = load(&text, "x.yaml", &[]).unwrap_err().to_string();
        assert!(error.contains("not valid YAML"), "{error}");
    }
}

// --------------------------------------------------------------------------------------- CEL rules

/// Overrides of BASE that break one rule, and similar overrides that keep it.
const RULES: &[(&[&str], &[&str])] = &[
    (&["spec.training.sync.pieces=pulled"], &["spec.training.sync.pieces=pulled", "spec.training.localBatchSize=32"]),
    (
        &["spec.training.sync.pieces=pulled", "spec.training.localBatchSize=32", "spec.training.barrierWorkers=1"],
        &["spec.training.sync.pieces=fixed", "spec.training.localBatchSize=32", "spec.training.barrierWorkers=1"],
    ),
    (&["metadata.name=abcdefghi-abcdefghi-abcdefghi-abcdez"], &["metadata.name=abcdefghi-abcdefghi-abcdefghi-abcdz"]),
    (&["spec.model.bottom={64}"], &["spec.model.bottom={64},spec.model.kind=dlrm"]),
    (
        &["spec.model.kind=dlrm,spec.model.bottom={64},spec.features.dense=null"],
        &["spec.model.kind=dlrm,spec.features.dense=null"],
    ),
    (&["spec.model.crossLayers=2"], &["spec.model.crossLayers=2,spec.model.kind=dcnV2"]),
    (&["spec.model.crossLayers=2"], &["spec.model.crossLayers=2,spec.model.kind=dcn"]),
    (&["spec.model.crossStructure=stacked"], &["spec.model.crossStructure=stacked,spec.model.kind=dcnV2"]),
    (&["spec.model.lowRank=2"], &["spec.model.lowRank=2,spec.model.kind=dcnV2"]),
    (&["spec.model.kind=fm,spec.model.hidden={8}"], &["spec.model.hidden={8}"]),
    (&["spec.model.kind=lr,spec.model.dropout=0.5"], &["spec.model.dropout=0.5"]),
    (&["spec.model.dropout=1"], &["spec.model.dropout=0.99"]),
    (&["spec.model.kind=lr,spec.model.embeddingDim=8"], &["spec.model.kind=lr"]),
    (
        &["spec.features.initializer.kind=zeros,spec.features.initializer.scale=1"],
        &["spec.features.initializer.kind=zeros"],
    ),
    (
        &["spec.features.dense[0].transform=standardize,spec.features.dense[0].mean=1"],
        &["spec.features.dense[0].transform=standardize,spec.features.dense[0].mean=1,spec.features.dense[0].std=2"],
    ),
    (&["spec.features.dense[0].mean=1"], &["spec.features.dense[0].transform=log1p"]),
    (
        &["spec.features.dense[0].transform=minMax,spec.features.dense[0].min=1"],
        &["spec.features.dense[0].transform=minMax,spec.features.dense[0].min=1,spec.features.dense[0].max=2"],
    ),
    (
        &["spec.features.dense[0].transform=log1p,spec.features.dense[0].max=1"],
        &["spec.features.dense[0].transform=signedLog1p"],
    ),
    (
        &["spec.features.dense[0].transform=standardize,spec.features.dense[0].mean=1,spec.features.dense[0].std=0"],
        &["spec.features.dense[0].transform=standardize,spec.features.dense[0].mean=0,spec.features.dense[0].std=0.1"],
    ),
    (
        &["spec.features.dense[0].transform=minMax,spec.features.dense[0].min=1,spec.features.dense[0].max=1"],
        &["spec.features.dense[0].transform=minMax,spec.features.dense[0].min=-1,spec.features.dense[0].max=1"],
    ),
    (&["spec.features.sparse[0].name=label"], &["spec.features.sparse[0].name=label,spec.features.label.name=y"]),
    (&["spec.features.dense[0].name=label"], &["spec.features.dense[0].name=label,spec.features.label.name=y"]),
    (&["spec.features.dense[0].name=item"], &["spec.features.dense[0].name=items"]),
    (&["spec.features.sparse[0].name=item"], &["spec.features.sparse[0].name=Item"]),
    (&["spec.features.dense[1].name=age"], &["spec.features.dense[1].name=year"]),
    (&["spec.features.group=label"], &["spec.features.group=user"]),
    (&["spec.features.memory.maxRows=9000,spec.features.memory.maxBytes=8Gi"], &["spec.features.memory.maxBytes=8Gi"]),
    (&["spec.features.memory.auto=false"], &["spec.features.memory.auto=true"]),
    (&["spec.features.eviction.policy=lfu"], &["spec.features.eviction.policy=lfu,spec.features.memory.maxRows=9000"]),
    (
        &["spec.features.memory.maxRows=9000,spec.features.eviction.policy=lru,spec.features.eviction.decayPerDay=0.2"],
        &["spec.features.memory.maxRows=9000,spec.features.eviction.decayPerDay=0.2"],
    ),
    (
        &["spec.features.memory.maxRows=9000,spec.features.eviction.decayPerDay=1"],
        &["spec.features.memory.maxRows=9000,spec.features.eviction.decayPerDay=0.99"],
    ),
    (
        &["spec.features.sparse[0].admission.probability=0.1,spec.features.sparse[0].admission.count=3"],
        &["spec.features.sparse[0].admission.count=3"],
    ),
    (&["spec.features.sparse[0].admission.probability=0"], &["spec.features.sparse[0].admission.probability=0.001"]),
    (&["spec.features.sparse[0].share=0"], &["spec.features.sparse[0].share=0.5"]),
    (
        &["spec.features.sparse[0].hashBuckets=1000,spec.features.sparse[0].admission.count=3"],
        &["spec.features.sparse[0].hashBuckets=1000"],
    ),
    (
        &["spec.data.train=null,spec.data.test=null,spec.data.synthetic.rows=5,spec.data.timeColumn.name=time"],
        &["spec.data.timeColumn.name=time"],
    ),
    (&["spec.data.csv.header=false"], &["spec.data.csv.header=false,spec.data.csv.columns={label,user,item,age}"]),
    (&["spec.data.test=null,spec.data.train=null"], &["spec.data.test=null"]),
    (&[KAFKA, "spec.data.train.paths={a.csv}"], &[KAFKA]),
    (&[FOLLOW, "spec.data.train.paths={a.csv}"], &[FOLLOW]),
    (&[FOLLOW, "spec.data.shuffle.windowRows=512"], &[FOLLOW, "spec.data.badRows.action=skip"]),
    (
        &[FOLLOW, "spec.data.train.follow.until.idleSeconds=5,spec.data.train.follow.until.timestamp=5"],
        &[FOLLOW, "spec.data.train.follow.until.idleSeconds=5"],
    ),
    (&[KAFKA, "spec.data.shuffle.windowRows=512"], &[KAFKA, "spec.data.badRows.action=skip"]),
    (&[KAFKA, "spec.data.test=null,spec.data.format=csv"], &[KAFKA, "spec.data.format=csv"]),
    (
        &[KAFKA, "spec.data.train.kafka.start=timestamp"],
        &[KAFKA, "spec.data.train.kafka.start=timestamp,spec.data.train.kafka.startTimestamp=5"],
    ),
    (
        &[KAFKA, "spec.data.train.kafka.start=committed"],
        &[KAFKA, "spec.data.train.kafka.start=committed,spec.data.train.kafka.group=trainers"],
    ),
    (&[KAFKA, "spec.data.train.kafka.startTimestamp=5"], &[KAFKA, "spec.data.train.kafka.start=latest"]),
    (
        &[KAFKA, "spec.data.train.kafka.until=timestamp"],
        &[KAFKA, "spec.data.train.kafka.until=timestamp,spec.data.train.kafka.untilTimestamp=5"],
    ),
    (
        &[KAFKA, "spec.data.train.kafka.until=latest,spec.data.train.kafka.untilIdleSeconds=5"],
        &[KAFKA, "spec.data.train.kafka.until=idle,spec.data.train.kafka.untilIdleSeconds=5"],
    ),
    (
        &[KAFKA, "spec.data.train.kafka.format=csv"],
        &[KAFKA, "spec.data.train.kafka.format=csv,spec.data.train.kafka.csv.columns={label,user,item,age}"],
    ),
    (
        &[KAFKA, "spec.data.train.kafka.format=avro"],
        &[KAFKA, "spec.data.train.kafka.format=avro,spec.data.train.kafka.schemaRegistry=http://registry:8081"],
    ),
    (
        &[KAFKA, "spec.data.train.kafka.format=protobuf"],
        &[KAFKA, "spec.data.train.kafka.format=protobuf,spec.data.train.kafka.schemaRegistry=http://registry:8081"],
    ),
    (&[KAFKA, "spec.data.train.kafka.csv.columns={label,user,item,age}"], &[KAFKA]),
    (
        &[KAFKA, "spec.data.train.kafka.security.sasl=plain"],
        &[KAFKA, "spec.data.train.kafka.security.sasl=plain,spec.data.train.kafka.security.tls=true"],
    ),
    (
        &["spec.data.train=null,spec.data.source.paths={a.csv},spec.data.split.position.trainRows=5"],
        &[
            "spec.data.train=null,spec.data.test=null,spec.data.source.paths={a.csv},spec.data.split.position.trainRows=5",
        ],
    ),
    (
        &["spec.data.train=null,spec.data.test=null,spec.data.source.paths={a.csv}"],
        &["spec.data.train=null,spec.data.test=null,spec.data.source.paths={a.csv},spec.data.split.fraction.train=0.5"],
    ),
    (&["spec.data.split.position.trainRows=5"], &[]),
    (
        &[
            "spec.data.train=null,spec.data.test=null,spec.data.source.paths={a.csv},spec.data.split.position.trainRows=5,spec.data.split.fraction.train=0.5",
        ],
        &[
            "spec.data.train=null,spec.data.test=null,spec.data.source.paths={a.csv},spec.data.split.time.column=t,spec.data.split.time.testFrom=5",
        ],
    ),
    (
        &["spec.data.train=null,spec.data.test=null,spec.data.source.paths={a.csv},spec.data.split.fraction.train=1"],
        &[
            "spec.data.train=null,spec.data.test=null,spec.data.source.paths={a.csv},spec.data.split.fraction.train=0.99",
        ],
    ),
    (&["spec.data.format=parquet,spec.data.csv.header=true"], &["spec.data.format=csv,spec.data.csv.header=true"]),
    (
        &["spec.data.train=null,spec.data.test=null,spec.data.synthetic.rows=5,spec.data.badRows.action=fail"],
        &["spec.data.badRows.action=fail"],
    ),
    (
        &["spec.data.badRows.action=fail,spec.data.badRows.limit=5"],
        &["spec.data.badRows.action=skip,spec.data.badRows.limit=5"],
    ),
    (
        &["spec.data.train=null,spec.data.test=null,spec.data.synthetic.zipfExponent=0"],
        &[
            "spec.data.train=null,spec.data.test=null,spec.data.synthetic.zipfExponent=0.5,spec.features.sparse[0].name=C{1..2},spec.features.sparse[1].name=C3,spec.features.dense[0].name=I1",
        ],
    ),
    (&["spec.training.epochs=1,spec.training.steps=1"], &["spec.training.steps=1"]),
    (
        &["spec.training.evaluation.every=steps"],
        &["spec.training.evaluation.every=steps,spec.training.evaluation.steps=5"],
    ),
    (&["spec.training.optimizer.dense.learningRate=0"], &["spec.training.optimizer.dense.learningRate=1"]),
    (
        &["spec.training.optimizer.dense.kind=sgd,spec.training.optimizer.dense.beta1=0.5"],
        &["spec.training.optimizer.dense.kind=adamW,spec.training.optimizer.dense.beta1=0.5"],
    ),
    (&["spec.training.optimizer.dense.beta2=1"], &["spec.training.optimizer.dense.beta2=0"]),
    (
        &["spec.training.optimizer.dense.momentum=0.9"],
        &["spec.training.optimizer.dense.momentum=0.9,spec.training.optimizer.dense.kind=sgd"],
    ),
    (
        &["spec.training.optimizer.dense.momentum=1,spec.training.optimizer.dense.kind=sgd"],
        &["spec.training.optimizer.dense.momentum=0,spec.training.optimizer.dense.kind=sgd"],
    ),
    (
        &["spec.training.optimizer.dense.weightDecay=0.1,spec.training.optimizer.dense.kind=sgd"],
        &["spec.training.optimizer.dense.weightDecay=0.1"],
    ),
    (
        &["spec.training.optimizer.dense.initialAccumulator=0.1"],
        &["spec.training.optimizer.dense.initialAccumulator=0.1,spec.training.optimizer.dense.kind=adaGrad"],
    ),
    (&["spec.training.optimizer.dense.epsilon=0"], &["spec.training.optimizer.dense.epsilon=1e-9"]),
    (
        &["spec.training.optimizer.dense.epsilon=0.1,spec.training.optimizer.dense.kind=sgd"],
        &["spec.training.optimizer.dense.epsilon=0.1,spec.training.optimizer.dense.kind=adaGrad"],
    ),
    (&["spec.training.optimizer.sparse.learningRate=0"], &["spec.training.optimizer.sparse.learningRate=0.5"]),
    (
        &["spec.training.optimizer.sparse.beta2=0.5,spec.training.optimizer.sparse.kind=ftrl"],
        &["spec.training.optimizer.sparse.beta2=0.5"],
    ),
    (&["spec.training.optimizer.sparse.beta1=1"], &["spec.training.optimizer.sparse.beta1=0"]),
    (&["spec.training.optimizer.sparse.epsilon=0"], &["spec.training.optimizer.sparse.epsilon=1e-6"]),
    (
        &["spec.training.optimizer.sparse.kind=ftrl,spec.training.optimizer.sparse.beta=0"],
        &["spec.training.optimizer.sparse.kind=ftrl,spec.training.optimizer.sparse.beta=0.5"],
    ),
    (
        &["spec.training.optimizer.sparse.epsilon=0.1,spec.training.optimizer.sparse.kind=ftrl"],
        &["spec.training.optimizer.sparse.epsilon=0.1,spec.training.optimizer.sparse.kind=rowWiseAdaGrad"],
    ),
    (
        &["spec.training.optimizer.sparse.initialAccumulator=0.1"],
        &["spec.training.optimizer.sparse.initialAccumulator=0.1,spec.training.optimizer.sparse.kind=rowWiseAdaGrad"],
    ),
    (
        &["spec.training.optimizer.sparse.l1=0.1"],
        &["spec.training.optimizer.sparse.l1=0.1,spec.training.optimizer.sparse.kind=ftrl"],
    ),
    (
        &["spec.training.optimizer.firstOrder.kind=ftrl"],
        &["spec.training.optimizer.firstOrder.kind=ftrl,spec.model.kind=deepfm"],
    ),
    (&["spec.training.localBatchSize=100"], &["spec.training.localBatchSize=64"]),
    (
        &[
            "spec.training.switchAt[0].step=9,spec.training.switchAt[0].mode=gba",
            "spec.training.switchAt[1].step=9,spec.training.switchAt[1].mode=sync",
        ],
        &[
            "spec.training.switchAt[0].step=9,spec.training.switchAt[0].mode=gba",
            "spec.training.switchAt[1].step=10,spec.training.switchAt[1].mode=sync",
        ],
    ),
    (
        &["spec.training.mode=auto,spec.training.switchAt[0].step=9,spec.training.switchAt[0].mode=gba"],
        &["spec.training.mode=auto,spec.training.auto.margin=0.2"],
    ),
    (&["spec.training.auto.dwellSeconds=50"], &["spec.training.auto.dwellSeconds=60"]),
    (&["spec.autoscaling.ps.min=3,spec.autoscaling.ps.max=2"], &["spec.autoscaling.ps.max=2"]),
    (
        &["spec.autoscaling.ps.scaler=external,spec.autoscaling.ps.max=2"],
        &["spec.autoscaling.ps.scaler=operator,spec.autoscaling.ps.max=2"],
    ),
    (
        &["spec.autoscaling.embeddingWorker.min=3,spec.autoscaling.embeddingWorker.max=2"],
        &["spec.autoscaling.embeddingWorker.max=2"],
    ),
    (
        &["spec.autoscaling.embeddingWorker.scaler=external,spec.autoscaling.embeddingWorker.queueWaitSeconds=1"],
        &["spec.autoscaling.embeddingWorker.scaler=external"],
    ),
    (
        &["spec.autoscaling.loader.min=3,spec.autoscaling.loader.max=2"],
        &["spec.autoscaling.loader.max=2,spec.autoscaling.loader.waitTarget=0.2"],
    ),
    (
        &["spec.autoscaling.loader.scaler=external,spec.autoscaling.loader.waitTarget=0.2"],
        &["spec.autoscaling.loader.scaler=external"],
    ),
    (
        &["spec.autoscaling.denseWorker.min=3,spec.autoscaling.denseWorker.max=2"],
        &["spec.autoscaling.denseWorker.max=2"],
    ),
    (
        &["spec.autoscaling.denseWorker.scaler=external,spec.autoscaling.denseWorker.marginalThroughput=0.5"],
        &["spec.autoscaling.denseWorker.scaler=external"],
    ),
    (
        &["spec.autoscaling.denseWorker.maxCostPerMillionSamples=1"],
        &["spec.autoscaling.denseWorker.maxCostPerMillionSamples=1,spec.autoscaling.denseWorker.pricePerHour=2"],
    ),
    (
        &["spec.autoscaling.loader.scaler=external,spec.autoscaling.loader.catchUpSeconds=60"],
        &["spec.autoscaling.loader.scaler=external"],
    ),
    (&["spec.checkpoint.everySteps=5"], &["spec.checkpoint.everySteps=5,spec.checkpoint.path=/c"]),
    (&["spec.checkpoint.everySeconds=60"], &["spec.checkpoint.everySeconds=60,spec.checkpoint.path=/c"]),
    (&["spec.model.kind=dlrm,spec.features.sparse[0].dim=8"], &["spec.model.kind=dlrm,spec.features.sparse[0].dim=16"]),
    (&["spec.model.kind=lr,spec.features.sparse[0].dim=8"], &["spec.features.sparse[0].dim=8"]),
    (
        &["spec.training.globalBatchSize=1,spec.roles.denseWorker.replicas=2"],
        &["spec.training.globalBatchSize=2,spec.roles.denseWorker.replicas=2"],
    ),
    (
        &["spec.roles.denseWorker.device=cpu,spec.roles.denseWorker.gpus=1"],
        &["spec.roles.denseWorker.device=cuda,spec.roles.denseWorker.gpus=1"],
    ),
];

/// A change that breaks a rule about changes, and a similar one that keeps it.
const CHANGES: &[(&[&str], &[&str], &[&str])] = &[
    (
        &["spec.training.precision=bf16"],
        &["spec.training.precision=bf16,spec.training.seed=7"],
        &["spec.training.precision=fp32"],
    ),
    (&[], &["spec.model.hidden={64}"], &["spec.training.mode=hybrid"]),
    (&[], &["spec.features.sparse[0].dim=8"], &["spec.training.globalBatchSize=512"]),
    (
        &["spec.features.memory.maxRows=9000"],
        &["spec.features.memory.maxRows=9000,spec.features.group=user"],
        &["spec.features.memory.maxRows=8000"],
    ),
    (
        &["spec.features.memory.maxRows=9000,spec.training.optimizer.sparse.kind=sgd"],
        &["spec.training.optimizer.sparse.kind=sgd"],
        &["spec.features.memory.maxBytes=8Gi,spec.training.optimizer.sparse.kind=sgd"],
    ),
    (&[], &["spec.training.seed=7"], &["spec.training.seed=42"]),
    (&[], &["spec.training.embeddingValueType=bf16"], &["spec.training.embeddingValueType=f32"]),
    (
        &[],
        &["spec.training.optimizer.sparse.kind=sgd"],
        &["spec.training.optimizer.sparse.kind=adam,spec.training.optimizer.sparse.learningRate=0.1"],
    ),
    (
        &["spec.model.kind=deepfm,spec.training.optimizer.firstOrder.kind=ftrl"],
        &["spec.model.kind=deepfm,spec.training.optimizer.firstOrder.kind=sgd"],
        &[
            "spec.model.kind=deepfm,spec.training.optimizer.firstOrder.kind=ftrl,spec.training.optimizer.firstOrder.l1=0.1",
        ],
    ),
    (&["spec.managedBy=a"], &["spec.managedBy=b"], &["spec.managedBy=a,spec.suspend=true"]),
];

/// The messages of the rules that a job breaks, from the rules of the CustomResourceDefinition.
/// `validate_cel` would compile them for each job.
fn broken(job: &RecTrainingJob, old: Option<&RecTrainingJob>) -> Vec<String> {
    thread_local! {
        static RULES: (Validator, CompiledSchema) = (Validator::new(), compile_schema(&schema()));
    }
    let value = |job: &RecTrainingJob| serde_json::to_value(job).unwrap();
    let old = old.map(value);
    let result = RULES.with(|(validator, rules)| validator.validate_compiled(rules, &value(job), old.as_ref()));
    messages(result)
}

fn messages(result: Result<(), ValidationErrors>) -> Vec<String> {
    result.err().into_iter().flatten().map(|error| error.message).collect()
}

#[test]
fn kubes_own_helpers_find_the_same() {
    let (good, bad) = (job(&[]), job(&["spec.model.bottom={64}", "spec.training.seed=1"]));
    assert_eq!(messages(good.validate_cel()), broken(&good, None));
    assert_eq!(messages(bad.validate_cel()), broken(&bad, None));
    assert_eq!(messages(bad.validate_cel_update(&good)), broken(&bad, Some(&good)));
    assert_eq!(broken(&bad, Some(&good)).len(), 3);
}

#[test]
fn every_cel_rule_refuses_its_case_and_accepts_a_similar_one() {
    let mut seen = BTreeSet::new();
    for (breaks, keeps) in RULES {
        let found = broken(&job(breaks), None);
        assert_eq!(
            found.len(),
            1,
            "{breaks:?} must break one rule, and no other that could hide its absence: {found:?}"
        );
        seen.extend(found);
        assert_eq!(broken(&job(keeps), None), Vec::<String>::new(), "{keeps:?}");
    }
    for (before, breaks, keeps) in CHANGES {
        let old = job(before);
        assert_eq!(broken(&job(breaks), None), Vec::<String>::new(), "{breaks:?} is only wrong as a change");
        let found = broken(&job(breaks), Some(&old));
        assert_eq!(found.len(), 1, "{breaks:?}: {found:?}");
        seen.extend(found);
        assert_eq!(broken(&job(keeps), Some(&old)), Vec::<String>::new(), "{keeps:?}");
        assert!(validate_update(&job(breaks), &old).is_err());
        validate_update(&job(keeps), &old).unwrap();
    }
    let mut all = BTreeSet::new();
    rule_messages(&schema(), &mut all);
    assert_eq!(all.difference(&seen).collect::<Vec<_>>(), Vec::<&String>::new(), "rules without a row in the tables");
}

/// CEL rules cannot read Rust's constants, so they repeat a few of them.
#[test]
fn the_rules_know_the_same_defaults_as_the_code() {
    let breaks = |expression: String| !broken(&job(&[&expression]), None).is_empty();
    let changes = |expression: String| !broken(&job(&[&expression]), Some(&job(&[]))).is_empty();
    let dlrm = |dim: u32| breaks(format!("spec.model.kind=dlrm,spec.features.sparse[0].dim={dim}"));
    assert!(!dlrm(defaults::EMBEDDING_DIM) && dlrm(defaults::EMBEDDING_DIM + 1));
    assert!(breaks(format!("spec.features.sparse[0].name={}", defaults::LABEL)));
    assert!(breaks(format!("spec.features.dense[0].name={}", defaults::LABEL)));
    assert!(!changes(format!("spec.training.seed={}", defaults::SEED)) && changes("spec.training.seed=0".into()));
    let crowd = |replicas: u32| {
        let mut job = job(&[&format!("spec.roles.denseWorker.replicas={replicas}")]);
        job.spec.training = None;
        !broken(&job, None).is_empty()
    };
    assert!(!crowd(defaults::GLOBAL_BATCH_SIZE.min(1024)) && !crowd(defaults::REPLICAS));
    let mut rules = String::new();
    collect_rules(&schema(), &mut rules);
    assert!(rules.contains(&format!("self.training.globalBatchSize : {})", defaults::GLOBAL_BATCH_SIZE)));
}

fn collect_rules(schema: &Value, rules: &mut String) {
    for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
        rules.push_str(rule["rule"].as_str().unwrap());
    }
    for field in schema["properties"].as_object().into_iter().flat_map(|fields| fields.values()) {
        collect_rules(field, rules);
    }
}

fn schema() -> Value {
    serde_json::to_value(crd().spec.versions[0].schema.clone().unwrap().open_api_v3_schema.unwrap()).unwrap()
}

fn rule_messages(schema: &Value, messages: &mut BTreeSet<String>) {
    for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
        messages.insert(rule["message"].as_str().expect("every rule has a sentence").to_string());
    }
    for field in
        schema["properties"].as_object().into_iter().flat_map(|fields| fields.values()).chain(schema.get("items"))
    {
        rule_messages(field, messages);
    }
}

/// kube-cel's static analysis stands in for the API server's estimate. The cluster tests ask a real
/// API server.
#[test]
fn no_rule_is_too_expensive() {
    use kube::core::cel::{ScopeContext, WarningKind, analyze_rule};
    fn visit(schema: &Value) {
        let compiled = compile_schema(schema);
        for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
            let rule = rule["rule"].as_str().unwrap();
            let warnings = analyze_rule(rule, &compiled, ScopeContext::CrdValidation);
            let serious: Vec<_> = warnings.iter().filter(|w| w.kind == WarningKind::CostExceeded).collect();
            assert!(serious.is_empty(), "{rule}: {serious:?}");
        }
        for field in
            schema["properties"].as_object().into_iter().flat_map(|fields| fields.values()).chain(schema.get("items"))
        {
            visit(field);
        }
    }
    visit(&schema());
}

// --------------------------------------------------------------------------------- generated files

#[test]
fn the_generated_files_are_those_of_the_types() {
    for (path, generated) in [
        ("crds/rectrainingjobs.yaml", crd_yaml()),
        ("charts/rectrain/files/rectrainingjobs.yaml", crd_yaml()),
        ("crds/recmodelservers.yaml", server_crd_yaml()),
        ("charts/rectrain/files/recmodelservers.yaml", server_crd_yaml()),
        ("docs/reference/model-server.md", server_reference_markdown()),
        ("docs/reference/manifest.md", reference_markdown()),
        ("docs/reference/simulation.md", simulation_reference_markdown()),
    ] {
        assert!(
            read(path) == generated,
            "{path} differs from the types: run `cargo run --release -p rectrain-crds --example generate`"
        );
    }
}

#[test]
fn the_reference_names_every_field() {
    let reference = reference_markdown();
    for field in ["globalBatchSize", "testFrom", "initialAccumulator", "secretName", "parametersSha256", "nodeSelector"]
    {
        assert!(reference.contains(&format!("| `{field}` |")), "{field}");
    }
}

// ---------------------------------------------------------------------------------------- no panic

/// Pieces with a meaning in YAML and `--set`, so that random texts get far into the parser.
fn piece() -> impl Strategy<Value = String> {
    let known = prop::sample::select(vec![
        "spec", "model", "kind", "data", "features", "sparse", "name", "label", "train", "paths", "C{1..3}", "dnn",
        "lr", "0", "-1", "1e309", ".inf", "null", "~", "true", ":", ": ", "- ", "[", "]", "{", "}", ",", "\n", "\n  ",
        "\n    ", "&a", "*a", "<<", "!!", "!x ", "|", ">", "\"", "'", "\\", "#", "---\n", "...\n", "%", "@", "\t", "=",
        ".", "é", "\u{0}", "\u{feff}",
    ]);
    prop_oneof![4 => known.prop_map(str::to_string), 1 => any::<char>().prop_map(String::from)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_text_makes_the_parser_panic(pieces in prop::collection::vec(piece(), 0..60)) {
        let _ = load(&pieces.concat(), "x.yaml", &[]);
    }

    #[test]
    fn no_damage_to_a_manifest_makes_it_panic(at in 0..BASE.len(), length in 0..40usize, insert in prop::collection::vec(piece(), 0..4)) {
        let end = (at + length).min(BASE.len());
        let text = format!("{}{}{}", &BASE[..at], insert.concat(), &BASE[end..]);
        let _ = load(&text, "x.yaml", &[]);
    }

    #[test]
    fn no_override_makes_it_panic(pieces in prop::collection::vec(piece(), 0..12), known in any::<bool>()) {
        let expression = if known { format!("spec.{}", pieces.concat()) } else { pieces.concat() };
        for kind in [SetKind::Infer, SetKind::Text] {
            let _ = load(BASE, "x.yaml", &[Override { kind, expression: expression.clone() }]);
        }
        let _ = explain(&expression);
        let _ = expand(&expression);
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = load(&String::from_utf8_lossy(&bytes), "x.yaml", &[]);
    }
}
