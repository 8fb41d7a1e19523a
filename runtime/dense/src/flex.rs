//! The tensors of Burn's CPU backend, `flex`, as this crate's own operations see them, and the
//! memory of their values.
//!
//! A step needs the same buffers as the step before. An allocator may give the memory of large ones
//! back to the kernel in between, which then clears every page again. So each thread keeps the
//! buffers that its operations [`take`] and [`reclaim`]. A shard is computed by one thread, forward
//! and backward, so a buffer returns to the thread that took it. Buffers that Burn allocates itself
//! are left to the allocator.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use burn::backend::autodiff::ops::NodeGuard;
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex, TensorMetadata};
use burn::tensor::{Tensor, TensorData};

/// Fewest values of a buffer that is kept. The allocator is fast with smaller ones.
const LEAST_VALUES: usize = 1024;
/// The most unused buffers that a thread keeps: more than the activations of a deep model.
const MOST_KEPT: usize = 64;
/// The most buffers in use that a thread knows of.
const MOST_LENT: usize = 256;

const ON_THE_CPU: &str = "computed on the CPU";

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// A thread's buffers.
#[derive(Debug, Default)]
struct Buffers {
    /// The unused ones, in the order in which they came back.
    kept: Vec<Vec<f32>>,
    /// The addresses of the ones in use. Only these come back, so that no operation collects
    /// memory that others allocate. Burn may have freed some of them.
    lent: VecDeque<usize>,
}

impl Buffers {
    /// The smallest kept buffer with room for `values`, unless most of it would stay unused.
    fn take(&mut self, values: usize) -> Vec<f32> {
        let fitting = self.kept.iter().enumerate().filter(|(_, buffer)| {
            let room = buffer.capacity();
            room >= values && room <= 2 * values
        });
        let smallest = fitting.min_by_key(|(_, buffer)| buffer.capacity()).map(|(index, _)| index);
        let buffer = smallest.map_or_else(|| Vec::with_capacity(values), |index| self.kept.remove(index));
        if self.lent.len() == MOST_LENT {
            self.lent.pop_front();
        }
        self.lent.push_back(buffer.as_ptr().addr());
        buffer
    }

    /// Keeps a buffer that was taken. If there are too many, it replaces the one that is unused for
    /// the longest time.
    fn keep(&mut self, mut buffer: Vec<f32>) {
        let address = buffer.as_ptr().addr();
        let Some(index) = self.lent.iter().position(|&lent| lent == address) else { return };
        self.lent.remove(index);
        if self.kept.len() == MOST_KEPT {
            self.kept.remove(0);
        }
        buffer.clear();
        self.kept.push(buffer);
    }
}

/// An empty vector with room for `values`.
pub(crate) fn take(values: usize) -> Vec<f32> {
    if values < LEAST_VALUES {
        return Vec::with_capacity(values);
    }
    BUFFERS.with_borrow_mut(|buffers| buffers.take(values))
}

/// Drops a tensor, and keeps its memory if it was taken on this thread and no other tensor uses it.
pub(crate) fn reclaim(tensor: FlexTensor) {
    let bytes = tensor.data_arc();
    drop(tensor);
    let Ok(bytes) = Arc::try_unwrap(bytes) else { return };
    if let Ok(values) = bytes.try_into_vec::<f32>() {
        BUFFERS.with_borrow_mut(|buffers| buffers.keep(values));
    }
}

/// [`reclaim`] for a tensor on any device. The memory of other devices is not kept.
pub(crate) fn reclaim_values(tensor: Tensor<2>) {
    if let Ok(tensor) = tensor.inner().try_into_primitive::<Flex>() {
        reclaim(tensor);
    }
}

/// The same values, row by row. The given tensor is no longer in use.
pub(crate) fn contiguous(tensor: FlexTensor) -> FlexTensor {
    let contiguous = tensor.to_contiguous();
    // Without a copy, both are the same memory, which stays in use.
    reclaim(tensor);
    contiguous
}

/// The values of a tensor that is in no graph, row by row.
pub(crate) fn values(tensor: Tensor<2>) -> FlexTensor {
    contiguous(tensor.try_into_primitive::<Flex>().expect(ON_THE_CPU))
}

/// The values of a tensor row by row, and its node in the graph.
pub(crate) fn values_and_node(tensor: Tensor<2>) -> (FlexTensor, NodeGuard) {
    let tensor = tensor.autodiff().try_into_primitive::<Autodiff<Flex>>();
    let (values, node) = tensor.expect(ON_THE_CPU).into_parts();
    (contiguous(values), node)
}

/// A matrix of a shape (rows, columns) from row-major values, which are moved, not copied.
pub(crate) fn tensor(values: Vec<f32>, shape: [usize; 2]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape))
}

/// Rows and columns.
pub(crate) fn shape(tensor: &FlexTensor) -> [usize; 2] {
    tensor.shape().dims()
}

/// The values of a contiguous tensor.
pub(crate) fn floats(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice().expect("this crate makes f32 tensors only, and this one is contiguous")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_buffer_comes_back_with_its_memory() {
        let mut values = take(5000);
        values.resize(5000, 1.0);
        let address = values.as_ptr();
        let matrix = tensor(values, [50, 100]);
        let clone = matrix.clone();
        reclaim(matrix);
        assert_ne!(take(5000).as_ptr(), address, "another tensor uses it");
        reclaim(clone);
        let again = take(4000);
        assert!(again.is_empty() && again.as_ptr() == address && again.capacity() >= 5000);
    }

    #[test]
    fn memory_that_was_not_taken_is_not_kept() {
        let kept = || BUFFERS.with_borrow(|buffers| buffers.kept.len());
        let before = kept();
        reclaim(tensor(vec![1.0; 5000], [50, 100]));
        assert_eq!(kept(), before);
    }

    #[test]
    fn a_small_matrix_does_not_take_a_large_buffer() {
        let mut values = take(50_000);
        values.resize(50_000, 1.0);
        let address = values.as_ptr();
        reclaim(tensor(values, [500, 100]));
        assert_ne!(take(2000).as_ptr(), address);
        assert_eq!(take(50_000).as_ptr(), address);
    }

    #[test]
    fn a_thread_keeps_a_bounded_number_of_buffers() {
        let mut buffers = Buffers::default();
        let taken: Vec<Vec<f32>> = (0..2 * MOST_LENT).map(|_| buffers.take(LEAST_VALUES)).collect();
        taken.into_iter().for_each(|buffer| buffers.keep(buffer));
        assert_eq!((buffers.kept.len(), buffers.lent.len()), (MOST_KEPT, 0));
    }
}
