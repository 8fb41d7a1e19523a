//! Towers on a device with memory of its own: the contents of the device and the host, and the
//! copies between them.

use super::*;

/// Trains for eight steps. Between the steps it changes the buffers like a dense worker.
fn train(tower: &mut Tower) {
    for step in 1..=8 {
        let sampled = Sampled::new(tower.model(), 64);
        tower.forward_backward(sampled.features(), &sampled.labels, 1.0 / 64.0, step).unwrap();
        match step {
            // Summed over workers.
            2 => tower.gradients_mut().unwrap().iter_mut().for_each(|gradient| *gradient *= 0.5),
            3 => drop(tower.gradients().unwrap().to_vec()),
            _ => {}
        }
        tower.apply(step).unwrap();
        match step {
            // Taken from parameter servers; saved; restored.
            4 => tower.parameters_mut().unwrap()[..10].fill(0.25),
            5 => drop(tower.state().unwrap().0.to_vec()),
            6 => {
                let (parameters, state) = tower.state().map(|(p, s)| (p.to_vec(), s.to_vec())).unwrap();
                let kind = tower.optimizer().kind().name();
                steps(tower, 20..22);
                tower.restore(&parameters, kind, &state).unwrap();
            }
            _ => {}
        }
    }
}

#[test]
fn a_tower_on_a_device_trains_as_one_on_the_cpu() {
    let optimizers = [
        DenseOptimizer::Sgd { learning_rate: 0.1, momentum: 0.0 },
        DenseOptimizer::Sgd { learning_rate: 0.1, momentum: 0.9 },
        DenseOptimizer::AdaGrad { learning_rate: 0.05, initial_accumulator: 0.1, epsilon: 1e-10 },
        DenseOptimizer::Adam { learning_rate: 0.01, beta1: 0.9, beta2: 0.99, epsilon: 1e-8, weight_decay: 0.1 },
        DenseOptimizer::AdamW { learning_rate: 0.01, beta1: 0.9, beta2: 0.99, epsilon: 1e-8, weight_decay: 0.1 },
    ];
    let config = ModelConfig { dropout: 0.2, ..dlrm(&[16], &[24]) };
    let options =
        TowerOptions { seed: SEED, rank: RANK, threads: 1, device: ComputeDevice::Cpu, precision: Precision::Fp32 };
    for optimizer in optimizers {
        let mut host = Tower::new(config.build().unwrap(), clicks(), optimizer, options).unwrap();
        let mut device = on_device_with(config.clone(), optimizer, Precision::Fp32);
        train(&mut host);
        train(&mut device);
        let (expected, expected_state) = host.state().unwrap();
        let (got, got_state) = device.state().unwrap();
        assert_within(slack(), &format!("{optimizer:?}: parameters"), got, &wide(expected));
        assert_within(slack(), &format!("{optimizer:?}: state"), got_state, &wide(expected_state));
    }
}

#[test]
fn a_device_that_lost_its_memory_gives_no_old_values() {
    let mut tower = on_device(dnn());
    steps(&mut tower, 1..2);
    let Compute::Accelerator(device) = &mut tower.compute else { panic!("it is on a device") };
    device.parameters.lose();
    for error in [tower.parameters().unwrap_err(), tower.apply(2).unwrap_err()] {
        assert!(error.to_string().contains("was lost in an earlier failure"), "{error}");
    }
}
