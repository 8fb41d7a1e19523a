//! Every kind that a manifest can name has a documentation, a valid example and a test of its own.
#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod base;

use std::path::{Path, PathBuf};

use base::{BASE, merge};
use rectrain_crds::{KIND_FIELDS, KIND_SETS, KindField, ModeSpec, crd, explain, load};
use serde_json::Value;

/// A test of the behaviour of a kind: the field, the kind, and the test as `file::function`.
type KindTest = (&'static str, &'static str, &'static str);

const MODE: &str = "spec.training.mode";
const PIECES: &str = "spec.training.sync.pieces";
const DIVISOR: &str = "spec.training.gba.keyDivisor";
const SHADOW: &str = "spec.training.shadow.algorithm";
const WIRE: &str = "spec.training.shadow.wirePrecision";
const OUTPUT: &str = "spec.training.shadow.outputModel";
const MODEL: &str = "spec.model.kind";
const CROSS: &str = "spec.model.crossStructure";
const DENSE: &str = "spec.training.optimizer.dense.kind";
const SPARSE: &str = "spec.training.optimizer.sparse.kind";
const POOLING: &str = "spec.features.sparse.pooling";
const VALUE: &str = "spec.training.embeddingValueType";
const PRECISION: &str = "spec.training.precision";
const COMPRESSION: &str = "spec.training.compression";
const PARTIAL: &str = "spec.training.partialPooling";
const DEVICE: &str = "spec.roles.denseWorker.device";
const MISSING: &str = "spec.features.sparse.missing";
const TRANSFORM: &str = "spec.features.dense.transform";
const INITIALIZER: &str = "spec.features.initializer.kind";
const EVICTION: &str = "spec.features.eviction.policy";
const PRIORITY: &str = "spec.features.sparse.priority";

/// In place of a kind: the test covers every kind of the field, also kinds that are added later.
const EVERY: &str = "*";

const TESTS: &[KindTest] = &[
    (MODE, "sync", "runtime/member/tests/training.rs::sync_equals_a_plain_loop_to_the_bit"),
    (MODE, "hybrid", "runtime/modes/src/barrier/server.rs::hybrid_lets_at_most_tau_steps_be_in_flight"),
    (MODE, "async", "runtime/modes/tests/gba_paper.rs::s5_1_async_applies_each_gradient_alone_however_stale"),
    (MODE, "gba", "runtime/modes/tests/gba_paper.rs::gba_and_sync_count_the_same_steps_over_the_same_rows"),
    (MODE, "hopBs", "runtime/modes/tests/gba_paper.rs::s5_1_hop_bs_does_not_wait_for_a_dead_worker"),
    (MODE, "hopBw", "runtime/modes/tests/gba_paper.rs::s5_1_hop_bw_ignores_the_b3_slowest_gradients_of_each_step"),
    (MODE, "bsp", "runtime/modes/tests/gba_paper.rs::s5_1_bsp_aggregates_b2_gradients_whatever_their_version"),
    (MODE, "shadow", "runtime/modes/tests/shadow_paper.rs::algorithm_1_no_worker_waits_for_another"),
    (MODE, "des", "runtime/member/tests/training.rs::des_with_one_server_equals_sync_to_the_bit"),
    (PIECES, "fixed", "runtime/member/tests/training.rs::sync_equals_a_plain_loop_to_the_bit"),
    (PIECES, "pulled", "runtime/modes/tests/pulled_pieces.rs::every_run_has_the_bits_of_a_sequential_computation"),
    (MODE, "auto", "crds/tests/manifest.rs::auto_starts_in_sync_and_autoscaling_takes_every_default"),
    (DIVISOR, "buffer", KEY_DIVISORS),
    (DIVISOR, "workers", KEY_DIVISORS),
    (DIVISOR, "batches", KEY_DIVISORS),
    (SHADOW, "easgd", "runtime/modes/tests/shadow_paper.rs::algorithm_2_equals_a_naive_computation_of_the_paper"),
    (SHADOW, "ma", "runtime/modes/tests/shadow_paper.rs::algorithm_3_equals_a_naive_computation_of_the_paper"),
    (SHADOW, "bmuf", "runtime/modes/tests/shadow_paper.rs::algorithm_4_equals_a_naive_computation_of_the_paper"),
    (WIRE, "fp32", "runtime/parameter-server/src/tests.rs::in_shadow_an_exchange_moves_its_fragment_only"),
    (OUTPUT, "copy", "runtime/modes/src/shadow/output.rs::each_rule_takes_its_replicas"),
    (
        OUTPUT,
        "mean",
        "runtime/parameter-server/src/tests.rs::in_shadow_the_last_exchange_of_all_workers_makes_the_output_model",
    ),
    (
        OUTPUT,
        "first",
        "runtime/parameter-server/src/tests.rs::in_shadow_the_last_exchange_of_all_workers_makes_the_output_model",
    ),
    (WIRE, "bf16", "runtime/modes/tests/shadow_paper.rs::differences_as_bf16_equal_a_naive_computation_to_the_bit"),
    (MODEL, EVERY, MODELS),
    (CROSS, "parallel", MODELS),
    (CROSS, "stacked", MODELS),
    (DENSE, "adam", "runtime/dense/src/optimizer.rs::adam_is_its_formula"),
    (DENSE, "adamW", "runtime/dense/src/optimizer.rs::adamw_decays_the_parameters_and_not_the_gradients"),
    (DENSE, "sgd", "runtime/dense/src/optimizer.rs::sgd_is_its_formula"),
    (DENSE, "adaGrad", "runtime/dense/src/optimizer.rs::adagrad_is_its_formula"),
    (SPARSE, EVERY, STORED_VALUES),
    (POOLING, "sum", POOLINGS),
    (POOLING, "mean", POOLINGS),
    (POOLING, "sqrtN", POOLINGS),
    (VALUE, "f32", STORED_VALUES),
    (VALUE, "f16", STORED_VALUES),
    (VALUE, "bf16", STORED_VALUES),
    (PRECISION, "fp32", MODELS),
    (PRECISION, "bf16", "runtime/gemm/src/tests.rs::rounding_is_to_the_nearest_and_ties_are_even"),
    (COMPRESSION, "none", "runtime/wire/tests/transport.rs::every_element_type_survives_the_round_trip"),
    (COMPRESSION, "fp16", "runtime/wire/src/compress.rs::the_error_is_at_most_2_to_the_minus_11_of_the_largest"),
    (PARTIAL, "never", "runtime/member/tests/training.rs::sync_equals_a_plain_loop_to_the_bit"),
    (PARTIAL, "bySize", "runtime/member/tests/pooling.rs::pooling_on_one_server_equals_sync_to_the_bit"),
    (DEVICE, "auto", "crds/tests/manifest.rs::gpus_or_device_puts_dense_workers_on_gpus"),
    (DEVICE, "cpu", "crds/tests/manifest.rs::gpus_or_device_puts_dense_workers_on_gpus"),
    (DEVICE, "cuda", "crds/tests/manifest.rs::gpus_or_device_puts_dense_workers_on_gpus"),
    (MISSING, "token", "runtime/data/src/key.rs::other_spellings_of_a_number_have_different_keys"),
    (MISSING, "skip", "runtime/data/tests/reading.rs::every_kind_of_file_gives_the_same_batches"),
    (TRANSFORM, "identity", TRANSFORMS),
    (TRANSFORM, "log1p", TRANSFORMS),
    (TRANSFORM, "signedLog1p", TRANSFORMS),
    (TRANSFORM, "standardize", TRANSFORMS),
    (TRANSFORM, "minMax", TRANSFORMS),
    (INITIALIZER, "normal", "runtime/embedding/src/initial.rs::the_normal_quantile_agrees_with_known_values"),
    (
        INITIALIZER,
        "uniform",
        "runtime/embedding/src/initial.rs::the_uniform_has_a_uniforms_moments_and_stays_in_its_range",
    ),
    (INITIALIZER, "zeros", "crds/tests/kinds.rs::zeros_are_a_constant_of_0"),
    (EVICTION, EVERY, LIVES),
    (PRIORITY, EVERY, LIVES),
];

/// Checks every model and every cross structure against definitions in 64 bits.
const MODELS: &str = "runtime/dense/src/tower/tests/gradients.rs::every_model_and_its_gradients_match_the_definition";
/// Checks every divisor against a plain sum.
const KEY_DIVISORS: &str =
    "runtime/modes/tests/gba_paper.rs::b_an_embedding_gradient_averages_the_workers_that_met_the_key";
/// Checks that each policy and priority becomes the store's own.
const LIVES: &str = "runtime/protocol/src/plan/life.rs::every_policy_and_priority_becomes_the_stores_own";
const POOLINGS: &str = "runtime/pooling/src/prepared_ids.rs::pooling_equals_the_definition_sample_by_sample";
/// Checks every optimizer and every type of stored values against loops over single numbers.
const STORED_VALUES: &str = "runtime/embedding/tests/store.rs::the_store_behaves_to_the_bit_as_a_naive_map_does";
const TRANSFORMS: &str = "runtime/data/src/schema.rs::transforms_are_their_formulas";

/// Enums of kinds without a row in `KIND_FIELDS`. No field of the manifest names a loss. The
/// extension of a path names the format of its files.
const WITHOUT_EXAMPLES: [&str; 2] = ["loss", "format of files"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The kinds of a field: the names of its enum, and the automatic mode.
fn kinds_of(field: &KindField) -> Vec<&'static str> {
    let set = KIND_SETS.iter().find(|set| set.title == field.title).unwrap_or_else(|| panic!("{}", field.title));
    let automatic = (field.field == MODE).then_some(ModeSpec::Auto.name());
    set.names.iter().copied().chain(automatic).collect()
}

#[test]
fn every_enum_of_kinds_is_listed() {
    let mut declared = Vec::new();
    for entry in std::fs::read_dir(root().join("crds/kinds/src")).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let titles = text.lines().filter_map(|line| line.trim().strip_prefix("pub enum ")?.split_once(" as \""));
        declared.extend(titles.filter_map(|(_, rest)| Some(rest.split_once('"')?.0.to_owned())));
    }
    let mut sets: Vec<&str> = KIND_SETS.iter().map(|set| set.title).collect();
    let mut fields: Vec<&str> = KIND_FIELDS.iter().map(|field| field.title).collect();
    declared.retain(|title| !WITHOUT_EXAMPLES.contains(&title.as_str()));
    declared.sort();
    sets.sort_unstable();
    fields.sort_unstable();
    assert_eq!(declared, sets, "KIND_SETS lacks an enum of crds/kinds");
    assert_eq!(declared, fields, "KIND_FIELDS lacks an enum of crds/kinds");
}

/// The values at a path, in every entry of the lists on its way.
fn values_at<'a>(value: &'a Value, path: &[&str]) -> Vec<&'a Value> {
    match (value, path) {
        (Value::Array(entries), _) => entries.iter().flat_map(|entry| values_at(entry, path)).collect(),
        (value, []) => vec![value],
        (value, [name, rest @ ..]) => values_at(&value[*name], rest),
    }
}

#[test]
fn every_kind_has_a_valid_example_that_explain_prints() {
    for field in &KIND_FIELDS {
        let named: Vec<&str> = field.examples.iter().map(|example| example.kind).collect();
        assert_eq!(named, kinds_of(field), "{}: KIND_FIELDS needs one example per kind", field.field);
        for example in field.examples {
            let mut manifest: Value = serde_yaml::from_str(BASE).unwrap();
            let spec: Value = serde_yaml::from_str(example.spec).unwrap();
            merge(&mut manifest["spec"], &spec);
            let text = serde_yaml::to_string(&manifest).unwrap();
            let about = format!("{}={}", field.field, example.kind);
            load(&text, "example.yaml", &[]).unwrap_or_else(|error| panic!("{about}: {error}\n{text}"));
            let path: Vec<&str> = field.field.split('.').collect();
            let values = values_at(&manifest, &path);
            assert!(values.contains(&&Value::from(example.kind)), "the example of {about} does not use it");
            let page = explain(example.kind).unwrap();
            let first = example.spec.lines().next().unwrap();
            assert!(page.contains(&about) && page.contains(&format!("  spec:\n    {first}\n")), "{about}:\n{page}");
        }
    }
}

#[test]
fn every_kind_is_documented() {
    let crd = serde_json::to_value(crd()).unwrap();
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    for field in &KIND_FIELDS {
        let description = description_of(schema, field.field);
        for kind in kinds_of(field) {
            let start = format!("\n\n{kind}: ");
            let meaning = description.split(&start).nth(1).unwrap_or_default().split("\n\n").next().unwrap_or_default();
            assert!(!meaning.is_empty(), "{}={kind} has no doc comment: {description}", field.field);
        }
    }
}

/// The description of a field in the CustomResourceDefinition.
fn description_of(schema: &Value, path: &str) -> String {
    let mut at = schema;
    for name in path.split('.') {
        at = at["properties"]
            .get(name)
            .or_else(|| at["items"]["properties"].get(name))
            .unwrap_or_else(|| panic!("{path}"));
    }
    at["description"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn every_kind_has_a_test_of_its_own() {
    for field in &KIND_FIELDS {
        for kind in kinds_of(field) {
            let covers = |test: &&KindTest| test.0 == field.field && [kind, EVERY].contains(&test.1);
            let tests: Vec<&str> = TESTS.iter().filter(covers).map(|test| test.2).collect();
            let [test] = tests[..] else { panic!("{}={kind} needs one row in TESTS, found {tests:?}", field.field) };
            let (file, function) = test.split_once("::").unwrap();
            let is_there = read(file).contains(&format!("fn {function}("));
            assert!(is_there, "{file} has no test `{function}`: name another test of {kind} in TESTS");
        }
    }
    for (path, kind, _) in TESTS {
        let field = KIND_FIELDS.iter().find(|field| field.field == *path).unwrap_or_else(|| panic!("{path}"));
        assert!(*kind == EVERY || kinds_of(field).contains(kind), "TESTS has a row of {path}={kind}, which is no kind");
    }
}

#[test]
fn zeros_are_a_constant_of_0() {
    let text = BASE.replace("    dense:", "    initializer: {kind: zeros}\n    dense:");
    let resolved = load(&text, "zeros.yaml", &[]).unwrap().resolved;
    assert_eq!(resolved.features.tables[0].initializer, rectrain_crds::Initializer::Constant(0.0));
}
