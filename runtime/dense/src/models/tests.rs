//! Tests of all models: the formats that checkpoints and exports depend on, and the settings that
//! are refused.

use std::collections::BTreeSet;

use prost::Message;
use rectrain_kinds::{CrossStructure, ModelKind, ModelSettings};

use super::reference::cases;
use super::{Model, ModelConfig};
use crate::export::export_onnx;
use crate::layout::ParameterEntry;
use crate::onnx::{DENSE, EMBEDDINGS, LINEAR, PROBABILITY, proto};
use crate::tasks::{BinaryCrossEntropy, Tasks};

fn config(settings: ModelSettings, dense_features: usize, embedding_dims: &[usize]) -> ModelConfig {
    ModelConfig::new(settings, dense_features, embedding_dims.to_vec())
}

fn dlrm() -> ModelSettings {
    ModelSettings::Dlrm { bottom: vec![512, 256], top: vec![512, 256] }
}

fn onnx(model: &dyn Model) -> proto::Model {
    let bytes = export_onnx(model, &Tasks::single(BinaryCrossEntropy), &model.layout().initialize(42)).unwrap();
    proto::Model::decode(&bytes[..]).unwrap()
}

/// FNV-1a.
fn digest(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

fn digests(model: &dyn Model) -> [u64; 3] {
    let entry = |entry: &ParameterEntry| format!("{} {:?} {}\n", entry.name, entry.shape, entry.offset);
    let layout: String = model.layout().entries().iter().map(entry).collect();
    let parameters = model.layout().initialize(42);
    // The head of the file names the version of this crate.
    let head =
        proto::Model { ir_version: 0, producer_name: String::new(), producer_version: String::new(), ..onnx(model) };
    [
        digest(layout.into_bytes()),
        digest(parameters.iter().flat_map(|value| value.to_le_bytes())),
        digest(head.encode_to_vec()),
    ]
}

#[test]
fn models_keep_their_json_parameters_and_onnx_files() {
    for (json, pinned) in cases() {
        let config: ModelConfig = serde_json::from_str(json).unwrap();
        assert_eq!(serde_json::to_string(&config).unwrap(), json);
        let found = digests(&*config.build().unwrap());
        assert_eq!(found, pinned, "{json}: found {found:#X?}");
    }
}

#[test]
fn every_kind_has_a_case_and_a_model_of_its_name() {
    let mut kinds = BTreeSet::new();
    for (json, _) in cases() {
        let config: ModelConfig = serde_json::from_str(json).unwrap();
        assert_eq!(config.build().unwrap().name(), config.name());
        kinds.insert(config.settings.kind());
    }
    assert!(kinds.into_iter().eq(ModelKind::ALL), "a kind of model has no case");
}

#[test]
fn contradictions_are_refused_in_sentences() {
    let dnn = || ModelSettings::Dnn { hidden: vec![8] };
    let dcn = |cross_layers, low_rank| ModelSettings::DcnV2 {
        structure: CrossStructure::Parallel,
        cross_layers,
        low_rank,
        hidden: vec![],
    };
    let vectors = |cross_layers, hidden: &[usize]| ModelSettings::Dcn { cross_layers, hidden: hidden.to_vec() };
    for (config, expected) in [
        (config(dlrm(), 13, &[16, 8]), "sparse feature 0 has 16 and sparse feature 1 has 8"),
        (config(dlrm(), 13, &[16, 8]), "a model that concatenates (dnn, wideDeep, dcn, dcnV2"),
        (config(ModelSettings::Fm, 13, &[16, 8]), "cannot build the `fm` model"),
        (config(ModelSettings::Fm, 13, &[]), "needs at least one sparse feature"),
        (config(dlrm(), 0, &[16]), "no pair can interact"),
        (config(ModelSettings::Lr, 1, &[0, 4]), "sparse feature 1 has an embedding of dimension 4"),
        (config(dnn(), 1, &[4, 0]), "sparse feature 1 has embedding dimension 0"),
        (config(dnn(), 0, &[]), "neither dense nor sparse features"),
        (config(ModelSettings::Dnn { hidden: vec![8, 0] }, 1, &[]), "layer 1 of `hidden` has size 0"),
        (ModelConfig { dropout: 1.0, ..config(dnn(), 1, &[]) }, "dropout is 1"),
        (ModelConfig { dropout: f32::NAN, ..config(dnn(), 1, &[]) }, "dropout is NaN"),
        (config(dcn(0, None), 1, &[4]), "0 cross layers"),
        (config(dcn(1, Some(0)), 1, &[4]), "rank of its cross layers is 0"),
        (config(vectors(0, &[8]), 1, &[4]), "0 cross layers"),
        (config(vectors(2, &[1]), 1, &[4]), "no hidden layer beside its cross layers"),
        (ModelConfig { tasks: 2, ..config(ModelSettings::Fm, 1, &[4]) }, "first-order weights are for one"),
        (ModelConfig { tasks: 0, ..config(dnn(), 1, &[4]) }, "it has no task"),
    ] {
        let message = config.build().unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn dlrm_has_the_parameters_of_the_paper() {
    let model = config(dlrm(), 13, &[16; 26]).build().unwrap();
    let bottom = (13 + 1) * 512 + (512 + 1) * 256 + (256 + 1) * 16;
    let interactions = 27 * 26 / 2 + 16;
    let top = (interactions + 1) * 512 + (512 + 1) * 256 + 257;
    assert_eq!(model.layout().total(), bottom + top);
    assert_eq!((model.input_widths().embeddings, model.input_widths().linear), (416, 0));
}

#[test]
fn sizes_that_are_appended_by_default_may_be_written_out() {
    let written = ModelSettings::Dlrm { bottom: vec![512, 256, 16], top: vec![512, 256, 1] };
    let layout = |settings| config(settings, 13, &[16; 26]).build().unwrap().layout().clone();
    assert_eq!(layout(written), layout(dlrm()));
}

#[test]
fn a_model_of_two_tasks_has_two_logits() {
    let structure = CrossStructure::Parallel;
    let dcn = ModelSettings::DcnV2 { structure, cross_layers: 1, low_rank: None, hidden: vec![] };
    for (settings, logit) in [
        (ModelSettings::Dnn { hidden: vec![8] }, "deep.logit.weight"),
        (dlrm(), "top.logit.weight"),
        (dcn, "logit.weight"),
        (ModelSettings::Dcn { cross_layers: 1, hidden: vec![4] }, "deep.logit.weight"),
    ] {
        let config = ModelConfig { tasks: 2, ..config(settings, 1, &[4, 4]) };
        let model = config.build().unwrap();
        assert_eq!((model.tasks(), model.layout().find(logit).unwrap().shape[1]), (2, 2));
        let json = serde_json::to_value(&config).unwrap();
        assert_eq!(json["tasks"], 2);
        assert_eq!(serde_json::from_value::<ModelConfig>(json).unwrap(), config);
    }
}

#[test]
fn models_say_which_inputs_they_take() {
    let needs = |settings, dims: &[usize]| {
        let model = config(settings, 1, dims).build().unwrap();
        (model.needs_embeddings(), model.needs_linear())
    };
    let hidden = vec![4];
    assert_eq!(needs(ModelSettings::Lr, &[0, 0]), (false, true));
    assert_eq!(needs(ModelSettings::Lr, &[]), (false, false));
    assert_eq!(needs(ModelSettings::Fm, &[4, 4]), (true, true));
    assert_eq!(needs(ModelSettings::DeepFm { hidden: hidden.clone() }, &[4, 4]), (true, true));
    assert_eq!(needs(ModelSettings::WideDeep { hidden: hidden.clone() }, &[4, 2]), (true, true));
    assert_eq!(needs(ModelSettings::Dnn { hidden }, &[4, 2]), (true, false));
    assert_eq!(needs(dlrm(), &[4, 4]), (true, false));
}

/// Checks that each value is made once and before its use, and that every parameter occurs once.
fn check_graph(graph: &proto::Graph) {
    let mut known: Vec<&str> = graph.input.iter().map(|input| input.name.as_str()).collect();
    known.extend(graph.initializer.iter().map(|tensor| tensor.name.as_str()));
    for node in &graph.node {
        assert!(node.input.iter().all(|input| known.contains(&input.as_str())), "{node:?}");
        known.push(&node.output[0]);
    }
    let mut unique = known.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), known.len());
    assert_eq!(known.last(), Some(&PROBABILITY));
}

#[test]
fn graphs_are_well_formed_and_take_just_the_models_inputs() {
    for (json, _) in cases() {
        let model = serde_json::from_str::<ModelConfig>(json).unwrap().build().unwrap();
        let file = onnx(&*model);
        assert_eq!(file.opset_import[0].version, proto::OPSET);
        let graph = file.graph.unwrap();
        check_graph(&graph);
        let names: Vec<&str> = graph.input.iter().map(|input| input.name.as_str()).collect();
        let widths = model.input_widths();
        let taken = [(DENSE, widths.dense), (EMBEDDINGS, widths.embeddings), (LINEAR, widths.linear)];
        let taken: Vec<&str> = taken.into_iter().filter(|(_, width)| *width > 0).map(|(name, _)| name).collect();
        assert_eq!(names, taken, "{json}");
    }
}
