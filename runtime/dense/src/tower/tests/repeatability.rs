//! Results have the same bits from run to run, for any number of threads, and beside other towers.

use super::*;
use crate::workers::shards;

/// Three steps of training: all results, as bits.
fn train(config: &ModelConfig, threads: usize, precision: Precision, samples: usize) -> Vec<u32> {
    let mut tower = tower_with(config.clone(), threads, precision);
    let sampled = Sampled::new(tower.model(), samples);
    let scale = 1.0 / samples as f32;
    let mut bits = Vec::new();
    for step in 1..=3 {
        let output = tower.forward_backward(sampled.features(), &sampled.labels, scale, step).unwrap();
        tower.apply(step).unwrap();
        let loss = output.loss_sum().to_bits();
        bits.extend([loss as u32, (loss >> 32) as u32]);
        let all = [&output.predictions, &output.embedding_gradients, &output.linear_gradients];
        bits.extend(all.into_iter().flatten().map(|value| value.to_bits()));
    }
    let predictions = tower.predict(sampled.features()).unwrap();
    let gradients = tower.gradients().unwrap().to_vec();
    let (parameters, state) = tower.state().unwrap();
    let flat = [parameters, &gradients, state, &predictions];
    bits.extend(flat.into_iter().flatten().map(|value| value.to_bits()));
    bits
}

#[test]
fn training_is_bit_equal_for_any_number_of_threads() {
    let dcn = ModelSettings::DcnV2 {
        structure: CrossStructure::Parallel,
        cross_layers: 3,
        low_rank: Some(2),
        hidden: vec![96, 64],
    };
    let models = [dlrm(&[64, 32], &[96, 64]), config(ModelSettings::DeepFm { hidden: vec![96, 64] }), config(dcn)];
    for config in models {
        let config = ModelConfig { dropout: 0.1, ..config };
        for precision in [Precision::Fp32, Precision::Bf16] {
            let once = train(&config, 1, precision, 1500);
            for threads in [1, 2, 3] {
                assert!(
                    once == train(&config, threads, precision, 1500),
                    "{config:?} {precision:?}, {threads} threads"
                );
            }
        }
    }
}

#[test]
fn towers_compute_at_the_same_time_undisturbed() {
    let config = dlrm(&[16], &[16]);
    for precision in [Precision::Fp32, Precision::Bf16] {
        let alone = train(&config, 2, precision, 1500);
        std::thread::scope(|scope| {
            let runs: Vec<_> = (0..4).map(|_| scope.spawn(|| train(&config, 2, precision, 1500))).collect();
            for run in runs {
                assert!(alone == run.join().unwrap());
            }
        });
    }
}

#[test]
fn gradients_in_bf16_do_not_depend_on_the_size_of_a_wave() {
    let config = dlrm(&[8], &[8]);
    // Nine shards: two waves on one thread, one on five.
    let samples = 9000;
    assert_eq!(shards(samples).len(), 9);
    let once = train(&config, 1, Precision::Bf16, samples);
    assert!(once == train(&config, 5, Precision::Bf16, samples));
    assert!(once != train(&config, 1, Precision::Fp32, samples));
}
