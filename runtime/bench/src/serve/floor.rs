//! The floor of a request: the matrix products of the tower alone, on one thread.

use std::hint::black_box;
use std::time::Instant;

use rectrain_gemm::{Finish, Kernel, Left, Matrix, Right, Start, product};

use crate::error::BenchError;
use crate::figures::median;
use crate::zipf::Random;

/// Measured passes. The first ones warm the caches.
const PASSES: usize = 101;
const UNMEASURED: usize = 10;

/// The sizes of a layer: inputs and outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layer(usize, usize);

/// Reads the layers of a tower: the widths of each part, such as `13-512-256-16,367-512-256-1`.
pub(super) fn layers(text: &str) -> Result<Vec<Layer>, BenchError> {
    let expected = "widths above 0 such as 13-512-256-16,367-512-256-1";
    let wrong = || BenchError::Argument { argument: "layers", found: text.to_owned(), expected };
    let mut layers = Vec::new();
    for part in text.split(',') {
        let widths: Option<Vec<usize>> =
            part.split('-').map(|width| width.trim().parse::<usize>().ok().filter(|width| *width > 0)).collect();
        let widths = widths.filter(|widths| widths.len() > 1).ok_or_else(wrong)?;
        layers.extend(widths.windows(2).map(|pair| Layer(pair[0], pair[1])));
    }
    Ok(layers)
}

/// A layer's operands.
struct Operands {
    input: Vec<f32>,
    left: Left,
    weights: Right,
}

impl Operands {
    fn new(Layer(inputs, outputs): Layer, rows: usize, kernel: Kernel, random: &mut Random) -> Self {
        let mut values = |count: usize| -> Vec<f32> { (0..count).map(|_| random.unit() as f32 - 0.5).collect() };
        let (input, matrix) = (values(rows * inputs), values(inputs * outputs));
        let mut weights = Right::new();
        weights.pack(kernel, Matrix::new(&matrix, inputs, outputs));
        Self { input, left: Left::new(), weights }
    }

    fn multiply(&mut self, rows: usize, kernel: Kernel) {
        self.left.pack(kernel, Matrix::new(&self.input, rows, self.weights.depth()));
        black_box(product(&self.left, &self.weights, Start::Zero, Finish::Relu));
    }
}

/// The median time of all products for a request of `rows` rows, in seconds. The weights are packed
/// before.
pub(super) fn floor_seconds(layers: &[Layer], rows: usize) -> f64 {
    let (kernel, mut random) = (Kernel::fp32(), Random::new(2));
    let mut all: Vec<Operands> = layers.iter().map(|layer| Operands::new(*layer, rows, kernel, &mut random)).collect();
    let mut pass = || {
        let begin = Instant::now();
        all.iter_mut().for_each(|operands| operands.multiply(rows, kernel));
        begin.elapsed().as_secs_f64()
    };
    let passes: Vec<f64> = (0..PASSES).map(|_| pass()).collect();
    median(passes[UNMEASURED..].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_pairs_of_neighbouring_widths() {
        assert_eq!(layers("13-8-2,7-1").unwrap(), [Layer(13, 8), Layer(8, 2), Layer(7, 1)]);
        for wrong in ["", "13", "13-0", "13-a", "13-8,"] {
            let error = layers(wrong).unwrap_err();
            assert!(error.is_user_error() && error.to_string().contains("--layers"), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_floor_is_above_zero() {
        assert!(floor_seconds(&layers("3-4-1").unwrap(), 5) > 0.0);
    }
}
