//! Forward passes and gradients, against finite differences of the definition.

use prost::Message;

use super::*;
use crate::export::export_onnx;
use crate::models::reference::{DropoutKey, Reference, all_models};
use crate::onnx::{DENSE, EMBEDDINGS, LINEAR, PROBABILITY, evaluate, proto};
use crate::workers::shards;

/// Compares one training step, on the CPU and on a device, with finite differences of the
/// reference.
fn check_step(config: ModelConfig, samples: usize, dropout: DropoutKey) {
    // A GPU's tensor cores round to TF32.
    let is_exact = slack() <= 1.0;
    for (slack, tower) in [
        (1.0, tower(config.clone())),
        (BF16_SLACK, clear_of_kinks(bf16_tower(config.clone()))),
        (slack(), if is_exact { on_device(config.clone()) } else { clear_of_kinks(on_device(config.clone())) }),
        (2.0 * BF16_SLACK, clear_of_kinks(bf16_on_device(config.clone()))),
    ] {
        check_step_of(moved(tower), slack, config.clone(), samples, dropout);
    }
}

fn check_step_of(mut tower: Tower, slack: f64, config: ModelConfig, samples: usize, dropout: DropoutKey) {
    let name = format!("{config:?}");
    let sampled = Sampled::new(tower.model(), samples);
    let scale = 1.0 / 3.0;
    let output = tower.forward_backward(sampled.features(), &sampled.labels, scale, STEP).unwrap();

    let batch = sampled.batch();
    let parameters = wide(tower.parameters().unwrap());
    let layout = tower.layout().clone();
    let reference = Reference { config: &config, layout: &layout, dropout };
    let logits: Vec<f64> = (0..samples).map(|sample| reference.logit(&parameters, &batch, sample)).collect();
    let probabilities: Vec<f64> = logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
    assert_within(slack, &format!("{name}: predictions"), &output.predictions, &probabilities);
    let loss = reference.loss_sum(&parameters, &batch);
    assert!((output.loss_sum() - loss).abs() < slack * 1e-6 * loss, "{name}: loss {} but {loss}", output.loss_sum());

    let scaled = |parameters: &[f64], batch: &Batch| f64::from(scale) * reference.loss_sum(parameters, batch);
    let expected = differences(&parameters, |point| scaled(point, &batch));
    let norm = expected.iter().map(|gradient| gradient * gradient).sum::<f64>().sqrt();
    assert_within(slack, &format!("{name}: norm"), &[tower.gradient_norm().unwrap() as f32], &[norm]);
    for entry in layout.entries() {
        let what = format!("{name}: {}", entry.name);
        assert_within(slack, &what, &tower.gradients().unwrap()[entry.range()], &expected[entry.range()]);
    }
    let expected = differences(&batch.embeddings, |point| {
        scaled(&parameters, &Batch { embeddings: point.to_vec(), ..batch.clone() })
    });
    assert_within(slack, &format!("{name}: embeddings"), &output.embedding_gradients, &expected);
    let expected =
        differences(&batch.linear, |point| scaled(&parameters, &Batch { linear: point.to_vec(), ..batch.clone() }));
    assert_within(slack, &format!("{name}: linear"), &output.linear_gradients, &expected);
}

#[test]
fn every_model_and_its_gradients_match_the_definition() {
    for config in all_models() {
        check_step(config, 5, None);
    }
}

#[test]
fn gradients_in_bf16_are_within_a_few_percent() {
    for config in all_models() {
        let gradients = |mut tower: Tower, labels: Option<f32>| {
            let mut sampled = Sampled::new(tower.model(), 200);
            if let Some(label) = labels {
                sampled.labels.fill(label);
            }
            let output = tower.forward_backward(sampled.features(), &sampled.labels, 1.0 / 200.0, 1).unwrap();
            (tower.layout().clone(), tower.gradients().unwrap().to_vec(), output.embedding_gradients)
        };
        let length = |values: &mut dyn Iterator<Item = f32>| values.map(|value| value * value).sum::<f32>().sqrt();
        let check = |what: &str, most: f32, exact: &[f32], rounded: &[f32]| {
            let error = length(&mut exact.iter().zip(rounded).map(|(exact, rounded)| exact - rounded));
            let size = length(&mut exact.iter().copied());
            assert!(error <= most * size, "{config:?}: {what} is off by {error} of {size}");
        };
        let on_the_cpu = [tower, bf16_tower].map(|tower| gradients(clear_of_kinks(moved(tower(config.clone()))), None));
        // A device rounds sums as well, so units need more distance from the kink. All labels are
        // equal. If gradients of different labels cancelled out, only the rounding might remain.
        let on_a_device = [on_device, bf16_on_device]
            .map(|tower| gradients(clear_of_kinks_by(6.0, moved(tower(config.clone()))), Some(1.0)));
        // A device has products with one column in 32 bits.
        for (columns, most, towers) in [(0, 0.02, on_the_cpu), (1, 0.04, on_a_device)] {
            let [(layout, exact, exact_embeddings), (_, rounded, embeddings)] = towers;
            for entry in layout.entries() {
                check(&entry.name, most, &exact[entry.range()], &rounded[entry.range()]);
            }
            check("the embeddings", most, &exact_embeddings, &embeddings);
            let rounds = layout.linears().iter().any(|linear| layout.entry(linear.weight).shape[1] > columns);
            assert_eq!(exact != rounded, rounds, "{config:?}: linear layers round, and nothing else does");
        }
    }
}

#[test]
fn dropout_masks_and_their_gradients_match_the_definition() {
    let key = Some([SEED, STEP, u64::from(RANK)]);
    for config in all_models() {
        check_step(ModelConfig { dropout: 0.4, ..config }, 5, key);
    }
}

#[test]
fn a_batch_cut_into_shards_has_the_gradients_of_the_whole_batch() {
    assert!(shards(600).len() > 1);
    let dropout = Some([SEED, STEP, u64::from(RANK)]);
    let small = ModelConfig { dropout: 0.3, embedding_dims: vec![], ..config(ModelSettings::Dnn { hidden: vec![4] }) };
    check_step(small, 600, dropout);
    check_step(ModelConfig { embedding_dims: vec![], ..config(ModelSettings::Lr) }, 600, None);
}

#[test]
fn predictions_match_the_definition_and_drop_nothing() {
    for config in all_models() {
        let config = ModelConfig { dropout: 0.5, ..config };
        for (slack, tower) in [
            (1.0, tower(config.clone())),
            (BF16_SLACK, bf16_tower(config.clone())),
            (slack(), on_device(config.clone())),
            (2.0 * BF16_SLACK, bf16_on_device(config.clone())),
        ] {
            let mut tower = moved(tower);
            let sampled = Sampled::new(tower.model(), 300);
            let (parameters, batch) = (wide(tower.parameters().unwrap()), sampled.batch());
            let reference = Reference { config: &config, layout: tower.layout(), dropout: None };
            let expected: Vec<f64> = (0..batch.samples)
                .map(|sample| 1.0 / (1.0 + (-reference.logit(&parameters, &batch, sample)).exp()))
                .collect();
            assert_within(slack, &format!("{config:?}"), &tower.predict(sampled.features()).unwrap(), &expected);
        }
    }
}

#[test]
fn the_exported_graph_predicts_as_the_tower_does() {
    for config in all_models() {
        let mut tower = moved(tower(config.clone()));
        let sampled = Sampled::new(tower.model(), 7);
        let parameters = tower.parameters().unwrap().to_vec();
        let file = export_onnx(tower.model(), tower.tasks(), &parameters).unwrap();
        let graph = proto::Model::decode(&file[..]).unwrap().graph.unwrap();
        let inputs: [(&str, &[f32]); 3] =
            [(DENSE, &sampled.dense), (EMBEDDINGS, &sampled.embeddings), (LINEAR, &sampled.linear)];
        let outputs = evaluate(&graph, sampled.samples, &inputs);
        assert_close(&format!("{config:?}"), &tower.predict(sampled.features()).unwrap(), &outputs[PROBABILITY]);
    }
}
