//! A replica that several threads of one dense worker train without locks (§3.2; Recht et al.,
//! *Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent*, 2011).
//!
//! Each thread repeats, without waiting for the others:
//!
//! 1. [`SharedReplica::read`]: copy the parameters;
//! 2. compute the gradients of a batch at this copy;
//! 3. [`SharedReplica::update`]: apply the gradients to the shared parameters of that moment.
//!
//! Each value is an atomic, which threads load and store with relaxed order. So no value is torn,
//! and there is no data race. Two updates of one value at the same moment may lose one of the two,
//! as in Hogwild. A copy may have some values from before an update and others from after it.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Parameters of an update that are loaded, computed and stored at a time. Few, so that another
/// thread rarely updates them meanwhile. Enough for vector instructions.
const BLOCK: usize = 256;

/// A value that threads share. The tests in `runtime/modes/loom` replace it by the one of a model
/// checker.
pub trait Cell: Send + Sync {
    /// A cell with these bits.
    fn new(bits: u32) -> Self;
    /// The bits, in relaxed order.
    fn load(&self) -> u32;
    /// Replaces the bits, in relaxed order.
    fn store(&self, bits: u32);
}

impl Cell for AtomicU32 {
    fn new(bits: u32) -> Self {
        Self::new(bits)
    }

    fn load(&self) -> u32 {
        self.load(Ordering::Relaxed)
    }

    fn store(&self, bits: u32) {
        self.store(bits, Ordering::Relaxed);
    }
}

/// See the module documentation.
pub struct SharedReplica<C: Cell = AtomicU32> {
    parameters: Box<[C]>,
    /// One vector as long as the parameters for each slot of the optimizer, one after another.
    state: Box<[C]>,
    /// Updates of the optimizer's state.
    updates: AtomicU64,
}

/// A part of the replica in an update.
pub struct Block<'b> {
    /// Up to 256 parameters.
    pub parameters: &'b mut [f32],
    /// Their optimizer state: for each slot, as many values as there are parameters.
    pub state: &'b mut [f32],
    /// Their gradients.
    pub gradients: &'b [f32],
    /// The updates of the optimizer's state, this one included.
    pub updates: u64,
}

impl<C: Cell> SharedReplica<C> {
    /// A replica with these parameters and optimizer state, after `updates` updates of the state.
    /// The state has one value for each slot of the optimizer and each parameter, slot by slot.
    #[must_use]
    pub fn new(parameters: &[f32], state: &[f32], updates: u64) -> Self {
        let cells = |values: &[f32]| values.iter().map(|value| C::new(value.to_bits())).collect();
        Self { parameters: cells(parameters), state: cells(state), updates: AtomicU64::new(updates) }
    }

    /// Replaces parameters, state and the number of updates. No thread trains meanwhile. Further
    /// values of a longer slice are left alone.
    pub fn replace(&self, parameters: &[f32], state: &[f32], updates: u64) {
        store(&self.parameters, parameters);
        store(&self.state, state);
        self.updates.store(updates, Ordering::Relaxed);
    }

    /// Copies the parameters. `into` is as long as they are.
    pub fn read(&self, into: &mut [f32]) {
        load(&self.parameters, into);
    }

    /// Copies the optimizer's state. `into` is as long as it is.
    pub fn read_state(&self, into: &mut [f32]) {
        load(&self.state, into);
    }

    /// Updates of the optimizer's state so far.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates.load(Ordering::Relaxed)
    }

    /// Applies the gradients of a batch, which are as many as the parameters. `apply` computes the
    /// optimizer's formula for a block of them.
    ///
    /// # Errors
    /// The first error of `apply`. The blocks before it are updated.
    pub fn update<E>(&self, gradients: &[f32], mut apply: impl FnMut(Block<'_>) -> Result<(), E>) -> Result<(), E> {
        let (total, updates) = (self.parameters.len(), self.updates.fetch_add(1, Ordering::Relaxed) + 1);
        let slots = self.state.len() / total.max(1);
        let (mut parameters, mut state) = ([0.0; BLOCK], vec![0.0; slots * BLOCK]);
        for (gradients, start) in gradients.chunks(BLOCK).zip((0..total).step_by(BLOCK)) {
            let (len, range) = (gradients.len(), start..start + gradients.len());
            let parameters = &mut parameters[..len];
            let state = &mut state[..slots * len];
            load(&self.parameters[range.clone()], parameters);
            let of_slot = |slot: usize| &self.state[slot * total..][range.clone()];
            state.chunks_exact_mut(len).enumerate().for_each(|(slot, values)| load(of_slot(slot), values));
            apply(Block { parameters, state, gradients, updates })?;
            store(&self.parameters[range.clone()], parameters);
            state.chunks_exact(len).enumerate().for_each(|(slot, values)| store(of_slot(slot), values));
        }
        Ok(())
    }

    /// w⁽ⁱ⁾ ← (1 − α) w⁽ⁱ⁾ + α w̃ for the parameters in `range` (algorithm 2, second line). Threads
    /// may train meanwhile: each value moves from its value of that moment. `copy` has the values
    /// of w̃, as many as the range.
    pub fn interpolate(&self, range: Range<usize>, copy: &[f32], alpha: f32) {
        let mut own = [0.0; BLOCK];
        for (cells, copy) in self.parameters[range].chunks(BLOCK).zip(copy.chunks(BLOCK)) {
            let own = &mut own[..cells.len()];
            load(cells, own);
            super::interpolate(own, copy, alpha);
            store(cells, own);
        }
    }
}

fn load<C: Cell>(cells: &[C], into: &mut [f32]) {
    cells.iter().zip(into).for_each(|(cell, value)| *value = f32::from_bits(cell.load()));
}

fn store<C: Cell>(cells: &[C], values: &[f32]) {
    cells.iter().zip(values).for_each(|(cell, value)| cell.store(value.to_bits()));
}
