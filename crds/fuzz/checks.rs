//! No text makes the manifest parser, the validation or `--set` panic. A check returns the kind of
//! its outcome. Two drivers share the checks: `tests/fuzz.rs` in every test run, and cargo-fuzz,
//! which is guided by coverage.

#![allow(dead_code, reason = "each target of cargo-fuzz uses one check")]

use rectrain_crds::{Override, SetKind, field_paths, load};
use rectrain_fuzzing::{Area, Target, outcome};

pub const AREAS: &[Area] = &[
    Area { name: "manifest", targets: &[target("manifest", manifest, examples, manifest_words)] },
    Area { name: "set", targets: &[target("set", set, expressions, set_words)] },
];

const fn target(
    name: &'static str,
    check: fn(&[u8]) -> String,
    seeds: fn() -> Vec<Vec<u8>>,
    words: fn() -> Vec<String>,
) -> Target {
    // A short text may set long lists, such as `C{1..1024}`.
    Target { name, check, seeds, words, inputs: 2_000, memory: 64 << 20 }
}

const MINIMAL: &str = include_str!("../../docs/examples/minimal.yaml");
const EXAMPLES: &[&str] = &[
    MINIMAL,
    include_str!("../../docs/examples/synthetic.yaml"),
    include_str!("../../docs/examples/criteo.yaml"),
    include_str!("../../docs/examples/movielens-100k.yaml"),
    include_str!("../../docs/examples/continual-criteo.yaml"),
    include_str!("../../docs/examples/straggler-job.yaml"),
    include_str!("../../docs/examples/shadow.yaml"),
    include_str!("../../docs/examples/des.yaml"),
];

fn examples() -> Vec<Vec<u8>> {
    EXAMPLES.iter().map(|text| text.as_bytes().to_vec()).collect()
}

/// Names of fields, and YAML.
fn manifest_words() -> Vec<String> {
    let yaml = [
        "\n", ": ", "- ", "{", "}", "[", "]", "&a ", "*a", "!!str ", "|\n", "\t", "null", "~", "1e999", "'", "C{1..9}",
    ];
    let paths = field_paths();
    let names = paths.iter().filter_map(|path| path.rsplit('.').next());
    names.chain(yaml).map(str::to_owned).collect()
}

/// An error or a manifest.
pub fn manifest(input: &[u8]) -> String {
    match std::str::from_utf8(input) {
        Ok(text) => outcome(&load(text, "fuzz.yaml", &[])),
        Err(_) => "not UTF-8".to_owned(),
    }
}

fn expressions() -> Vec<Vec<u8>> {
    let expressions = [
        "spec.training.globalBatchSize=256,spec.training.epochs=3",
        "spec.features.sparse[0].name=user,spec.features.sparse[1].multiValue.separator=|",
        "spec.data.train.paths={a.csv,b.csv}",
        "spec.data.storage.options.endpoint=http://host:1\\,2",
        "spec.checkpoint=null",
        "spec.training.optimizer.dense.learningRate=1e-3",
    ];
    expressions.iter().map(|text| text.as_bytes().to_vec()).collect()
}

/// Paths of fields, and the grammar.
fn set_words() -> Vec<String> {
    let grammar = ["=", ",", ".", "[0]", "[4095]", "[", "]", "{", "}", "\\", "null", "true", "-1", "1e999", "{a,b}"];
    field_paths().into_iter().chain(grammar.map(str::to_owned)).collect()
}

/// An error or a manifest, for both flags.
pub fn set(input: &[u8]) -> String {
    let Ok(expression) = std::str::from_utf8(input) else { return "not UTF-8".to_owned() };
    let outcomes = [SetKind::Infer, SetKind::Text].map(|kind| {
        let set = Override { kind, expression: expression.to_owned() };
        outcome(&load(MINIMAL, "fuzz.yaml", &[set]))
    });
    outcomes.join("; ")
}
