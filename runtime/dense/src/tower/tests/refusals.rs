//! Input that a tower refuses, and values that stop a step.

use super::*;

#[test]
fn values_that_are_not_finite_stop_the_step_by_name() {
    for tower in [tower(dnn()), bf16_tower(dnn()), on_device(dnn()), bf16_on_device(dnn())] {
        check_values_that_are_not_finite(tower);
    }
}

fn check_values_that_are_not_finite(mut tower: Tower) {
    let sampled = Sampled::new(tower.model(), 4);
    let before = tower.parameters().unwrap().to_vec();
    let error = |tower: &mut Tower, sampled: &Sampled| {
        tower.forward_backward(sampled.features(), &sampled.labels, 1.0, 7).unwrap_err().to_string()
    };

    let mut broken = sampled.clone();
    broken.dense[2 * 2 + 1] = f32::NAN;
    let message = error(&mut tower, &broken);
    assert!(
        message.starts_with("the dense input of sample 2, column 1 (NaN) is not finite in training step 7"),
        "{message}"
    );
    assert!(tower.predict(broken.features()).unwrap_err().to_string().contains("in prediction"));

    let mut broken = sampled.clone();
    broken.embeddings[9 + 8] = f32::NEG_INFINITY;
    let message = error(&mut tower, &broken);
    assert!(message.starts_with("the embeddings input of sample 1, column 8 (-inf)"), "{message}");

    let mut broken = sampled.clone();
    broken.labels[3] = 2.0;
    let message = error(&mut tower, &broken);
    assert!(message.starts_with("the label of sample 3 is 2 in training step 7"), "{message}");

    tower.parameters_mut().unwrap().fill(3e38);
    let message = error(&mut tower, &sampled);
    assert!(message.contains("prediction of sample 0"), "{message}");
    tower.parameters_mut().unwrap().copy_from_slice(&before);
    assert!(tower.forward_backward(sampled.features(), &sampled.labels, 1.0, 8).is_ok());
}

#[test]
fn a_gradient_that_overflows_is_named_by_its_parameter() {
    let config = ModelConfig { embedding_dims: vec![], ..config(ModelSettings::Lr) };
    for mut tower in [tower(config.clone()), on_device(config)] {
        let features = Features { samples: 1, dense: &[1e20, -1e20], embeddings: &[], linear: &[] };
        tower.parameters_mut().unwrap().fill(0.0);
        let error = tower.forward_backward(features, &[1.0], 1e20, 1).unwrap_err();
        assert!(error.to_string().starts_with("the gradient of `firstOrder.weight` is not finite"), "{error}");
    }
}

#[test]
fn a_gradient_of_the_embeddings_that_overflows_is_named_by_its_place() {
    let config = config(ModelSettings::Dnn { hidden: vec![] });
    for mut tower in [tower(config.clone()), on_device(config)] {
        // The logit's derivative is 1e20, and the weights are 1e30. Inputs of 0 keep the gradients of
        // the weights finite.
        let features = Features { samples: 2, dense: &[0.0; 4], embeddings: &[0.0; 18], linear: &[] };
        tower.parameters_mut().unwrap().fill(1e30);
        let error = tower.forward_backward(features, &[0.0, 0.0], 1e20, 1).unwrap_err();
        assert!(error.to_string().starts_with("the gradient of the embeddings of sample 0, column 0 (inf)"), "{error}");
    }
}

#[test]
fn inputs_of_a_wrong_length_are_refused() {
    let mut tower = tower(dnn());
    let sampled = Sampled::new(tower.model(), 4);
    let short = Features { embeddings: &sampled.embeddings[1..], ..sampled.features() };
    let message = tower.forward_backward(short, &sampled.labels, 1.0, 1).unwrap_err().to_string();
    assert_eq!(
        message,
        "the embeddings input of a batch of 4 samples has 35 values, but this model takes 9 a sample (36)"
    );
    let message = tower.forward_backward(sampled.features(), &[1.0], 1.0, 1).unwrap_err().to_string();
    assert!(message.starts_with("the label input"), "{message}");
}
