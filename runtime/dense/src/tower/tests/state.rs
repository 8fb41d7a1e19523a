//! Parameters and optimizer state: changed in place, saved and restored.

use super::*;

#[test]
fn bf16_computes_with_the_present_parameters() {
    let mut tower = bf16_tower(dnn());
    let sampled = Sampled::new(tower.model(), 20);
    let fresh = |parameters: &[f32]| {
        let mut fresh = bf16_tower(dnn());
        fresh.parameters_mut().unwrap().copy_from_slice(parameters);
        fresh.predict(sampled.features()).unwrap()
    };
    let check = |tower: &mut Tower| {
        let parameters = tower.parameters().unwrap().to_vec();
        assert_eq!(tower.predict(sampled.features()).unwrap(), fresh(&parameters));
        tower.predict(sampled.features()).unwrap()
    };
    let first = check(&mut tower);
    tower.forward_backward(sampled.features(), &sampled.labels, 1.0, 1).unwrap();
    tower.apply(1).unwrap();
    let second = check(&mut tower);
    tower.parameters_mut().unwrap().iter_mut().for_each(|value| *value *= 2.0);
    let third = check(&mut tower);
    assert!(first != second && second != third);
    let mut copy = tower.clone();
    copy.parameters_mut().unwrap().fill(0.0);
    assert!(check(&mut copy) != third);
    assert_eq!(check(&mut tower), third);
}

#[test]
fn a_checkpoint_of_one_precision_restores_in_the_other() {
    for (wrote, reads) in [(Precision::Bf16, Precision::Fp32), (Precision::Fp32, Precision::Bf16)] {
        let mut tower = tower_with(dnn(), 1, wrote);
        let sampled = Sampled::new(tower.model(), 8);
        for step in 1..=3 {
            tower.forward_backward(sampled.features(), &sampled.labels, 0.125, step).unwrap();
            tower.apply(step).unwrap();
        }
        let (parameters, state) = tower.state().unwrap();
        let (parameters, state) = (parameters.to_vec(), state.to_vec());
        let mut restored = tower_with(dnn(), 1, reads);
        restored.restore(&parameters, "adam", &state).unwrap();
        assert_eq!(restored.state().unwrap(), (&parameters[..], &state[..]));
        let [was, is] = [&mut tower, &mut restored].map(|tower| tower.predict(sampled.features()).unwrap());
        assert!(was != is && was.iter().zip(is).all(|(was, is)| (was - is).abs() < 0.01));
    }
}

#[test]
fn adam_continues_after_a_restore_with_its_update_count() {
    let mut uninterrupted = tower(dnn());
    steps(&mut uninterrupted, 1..6);
    let (parameters, state) = (uninterrupted.parameters().unwrap().to_vec(), uninterrupted.state().unwrap().1.to_vec());
    steps(&mut uninterrupted, 6..9);

    let mut restored = tower(dnn());
    restored.restore(&parameters, "adam", &state).unwrap();
    steps(&mut restored, 6..9);
    assert_eq!(restored.parameters().unwrap(), uninterrupted.parameters().unwrap());

    let mut recounted = tower(dnn());
    recounted.restore(&parameters, "adam", &state).unwrap();
    steps(&mut recounted, 1..4);
    assert_ne!(
        recounted.parameters().unwrap(),
        uninterrupted.parameters().unwrap(),
        "without its update count, Adam must differ"
    );
}

#[test]
fn a_restore_refuses_another_optimizer_or_model() {
    let mut tower = tower(dnn());
    let (parameters, state) = (tower.parameters().unwrap().to_vec(), tower.state().unwrap().1.to_vec());
    let message = tower.restore(&parameters, "sgd", &state).unwrap_err().to_string();
    assert!(message.contains("written by `sgd`, but the configured dense optimizer is `adam`"), "{message}");
    let message = tower.restore(&parameters[1..], "adam", &state).unwrap_err().to_string();
    assert!(message.contains("cannot restore the parameters"), "{message}");
    let message = tower.restore(&parameters, "adam", &state[1..]).unwrap_err().to_string();
    assert!(message.contains("cannot restore the optimizer state"), "{message}");
}
