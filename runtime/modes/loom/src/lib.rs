//! Checks with loom the replica that threads of a dense worker share (`shadow` with several
//! threads). `cargo xtask race` runs these tests.
#![cfg(test)]

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use rectrain_modes::shadow::{Block, Cell, SharedReplica};

/// The cell of the model checker. It explores every order of loads and stores, and every value
/// that a relaxed load may see.
struct Checked(loom::sync::atomic::AtomicU32);

impl Cell for Checked {
    fn new(bits: u32) -> Self {
        Self(loom::sync::atomic::AtomicU32::new(bits))
    }

    fn load(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    fn store(&self, bits: u32) {
        self.0.store(bits, Ordering::Relaxed);
    }
}

/// Gradient descent with the learning rate 1, and a counter as its state.
fn descend(block: Block<'_>) -> Result<(), Infallible> {
    block.parameters.iter_mut().zip(block.gradients).for_each(|(value, gradient)| *value -= gradient);
    block.state.iter_mut().for_each(|count| *count += 1.0);
    Ok(())
}

/// All results of `run` in all orders that the checker finds.
fn outcomes(run: impl Fn() -> Vec<u32> + Send + Sync + 'static) -> BTreeSet<Vec<u32>> {
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let all = Arc::clone(&seen);
    loom::model(move || {
        let outcome = run();
        all.lock().unwrap().insert(outcome);
    });
    let seen = seen.lock().unwrap();
    seen.clone()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Two threads update one parameter with one value of state. Both updates arrive, or one of
/// them is lost. A third value never appears.
#[test]
fn two_updates_of_a_value_arrive_or_one_is_lost_in_every_order() {
    let seen = outcomes(|| {
        let replica = loom::sync::Arc::new(SharedReplica::<Checked>::new(&[8.0], &[0.0], 0));
        let other = loom::sync::Arc::clone(&replica);
        let thread = loom::thread::spawn(move || other.update(&[1.0], descend).unwrap());
        replica.update(&[2.0], descend).unwrap();
        thread.join().unwrap();
        let (mut value, mut state) = ([0.0], [0.0]);
        replica.read(&mut value);
        replica.read_state(&mut state);
        assert_eq!(replica.updates(), 2);
        bits(&[value[0], state[0]])
    });
    let values: BTreeSet<u32> = seen.iter().map(|outcome| outcome[0]).collect();
    let states: BTreeSet<u32> = seen.iter().map(|outcome| outcome[1]).collect();
    assert_eq!(values, bits(&[5.0, 6.0, 7.0]).into_iter().collect(), "both, only the second, only the first");
    assert_eq!(states, bits(&[1.0, 2.0]).into_iter().collect());
}

/// A thread reads two parameters while another one updates both.
#[test]
fn a_reader_sees_each_value_before_or_after_an_update_in_every_order() {
    let seen = outcomes(|| {
        let replica = loom::sync::Arc::new(SharedReplica::<Checked>::new(&[1.0, 1.0], &[], 0));
        let (trained, read) = (loom::sync::Arc::clone(&replica), replica);
        let training = loom::thread::spawn(move || trained.update(&[-1.0, -1.0], descend).unwrap());
        let reading = loom::thread::spawn(move || {
            let mut values = [0.0; 2];
            read.read(&mut values);
            bits(&values)
        });
        training.join().unwrap();
        reading.join().unwrap()
    });
    let expected = [[1.0, 1.0], [2.0, 1.0], [1.0, 2.0], [2.0, 2.0]];
    assert_eq!(seen, expected.iter().map(|values| bits(values)).collect());
}

/// An exchange moves the replica while a thread trains it. loom begins with the thread that was
/// spawned first, so each of the two is the first one once.
#[test]
fn an_exchange_starts_from_the_value_of_its_moment_in_every_order() {
    let train = |replica: &SharedReplica<Checked>| replica.update(&[2.0], descend).unwrap();
    let exchange = |replica: &SharedReplica<Checked>| replica.interpolate(0..1, &[8.0], 0.5);
    let mut seen = value_after(train, exchange);
    seen.extend(value_after(exchange, train));
    // Training first: (2 + 8) / 2. The exchange first: (4 + 8) / 2 - 2. One of them is lost: 2, 6.
    assert_eq!(seen, bits(&[5.0, 4.0, 2.0, 6.0]).into_iter().map(|value| vec![value]).collect());
}

/// The values of one parameter, which begins with 4, after two threads have changed it.
fn value_after(first: fn(&SharedReplica<Checked>), second: fn(&SharedReplica<Checked>)) -> BTreeSet<Vec<u32>> {
    outcomes(move || {
        let replica = loom::sync::Arc::new(SharedReplica::<Checked>::new(&[4.0], &[], 0));
        let (one, other) = (loom::sync::Arc::clone(&replica), loom::sync::Arc::clone(&replica));
        let threads = [loom::thread::spawn(move || first(&one)), loom::thread::spawn(move || second(&other))];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let mut value = [0.0];
        replica.read(&mut value);
        bits(&value)
    })
}
