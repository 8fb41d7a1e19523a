//! The products of hidden layers. A hidden layer's output is an operand of the next products only:
//! of the next layer's, and of the gradient of that layer's weight. So a product leaves its result
//! as these operands. ReLU, the bias and the bias's gradient are computed on the way, while a tile
//! is in the nearest cache. Between the layers, no matrix of 32-bit floats is written.
//!
//! AMX and the AVX-512 kernel of 32-bit floats lay tiles out like this. For other kernels the
//! functions compute a matrix and pack it. The results have the same bits either way.

use std::cell::RefCell;
use std::ops::Range;

use crate::columns::relu_backward;
use crate::kernel::{Place, TILE_COLUMNS};
use crate::left::Left;
use crate::matrix::Matrix;
use crate::product::{Finish, ROW_GRANULE, Start, product_into, tiles};
use crate::right::Right;

/// The places where ReLU let values through.
#[derive(Clone, Debug, Default)]
pub struct Passes {
    /// A bit for each column of a panel, row by row and panel by panel.
    bits: Vec<u32>,
    /// The distance of panels in `bits`.
    rows: usize,
    /// ReLU's outputs, if the kernel does not lay tiles out. Then `bits` has no meaning.
    outputs: Vec<f32>,
}

/// The operands that the backward pass of a hidden layer leaves.
#[derive(Debug)]
pub struct HiddenDerivatives<'a> {
    /// The derivatives as the left operand of the product for the layer below; none if nothing
    /// below has a gradient.
    pub left: Option<&'a mut Left>,
    /// The derivatives as the right operand of the product for the gradient of the weight.
    pub right: &'a mut Right,
    /// The sum of their rows is added to these values: the gradient of the bias.
    pub sums: &'a mut [f32],
}

thread_local! {
    /// A result of this thread, for kernels that do not lay tiles out.
    static RESULT: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl Passes {
    /// No places.
    pub fn new() -> Self {
        Self::default()
    }

    fn lay(&mut self, rows: usize, columns: usize) {
        self.rows = rows.next_multiple_of(ROW_GRANULE);
        self.bits.resize(self.rows * columns.div_ceil(TILE_COLUMNS), 0);
    }

    fn of(&self, place: &Place) -> Range<usize> {
        let first = place.panel * self.rows + place.rows.start;
        first..first + ROW_GRANULE.min(self.rows - place.rows.start)
    }
}

/// `relu(inputs · weight + bias)`, as the left operand of the next product: `outputs`. `recorded`
/// gets the transpose, as a left operand too, and the places where ReLU let values through. All of
/// them are overwritten and keep their memory.
///
/// # Panics
/// If the shapes do not fit, or the operands were not packed for the same kernel.
pub fn hidden(
    inputs: &Left,
    weight: &Right,
    bias: &[f32],
    outputs: &mut Left,
    recorded: Option<(&mut Left, &mut Passes)>,
) {
    let (rows, columns) = (inputs.rows(), weight.columns());
    let kernel = inputs.packed_for();
    if !kernel.lays_tiles() {
        return RESULT.with_borrow_mut(|result| {
            let mut compute = |result: &mut Vec<f32>| {
                product_into(inputs, weight, Start::Row(bias), Finish::Relu, result);
                outputs.pack(kernel, Matrix::new(result, rows, columns));
            };
            match recorded {
                None => compute(result),
                Some((transposed, passes)) => {
                    compute(&mut passes.outputs);
                    transposed.pack(kernel, Matrix::new(&passes.outputs, rows, columns).transpose());
                }
            }
        });
    }
    let mut left = outputs.lay(kernel, rows, columns);
    let mut recorded = recorded.map(|(transposed, passes)| {
        passes.lay(rows, columns);
        (transposed.lay(kernel, columns, rows), passes)
    });
    tiles(inputs, weight, Start::Row(bias), &mut |place, tile| {
        let recorded = recorded.as_mut().map(|(transposed, passes)| {
            let places = passes.of(&place);
            (transposed, &mut passes.bits[places])
        });
        kernel.lay_outputs(tile, &place, &mut left, recorded);
    });
}

/// The derivatives of a hidden layer before its ReLU: `derivatives · weight`, and 0 where ReLU let
/// nothing through. `derivatives` are the next layer's, `weight` is the transpose of its weight,
/// and `passes` is from [`hidden`]. The operands in `to` are overwritten and keep their memory.
///
/// # Panics
/// If the shapes do not fit, or the operands were not packed for the same kernel.
pub fn hidden_backward(derivatives: &Left, weight: &Right, passes: &Passes, to: HiddenDerivatives<'_>) {
    let (rows, columns) = (derivatives.rows(), weight.columns());
    let kernel = derivatives.packed_for();
    let HiddenDerivatives { left, right, sums } = to;
    assert_eq!(sums.len(), columns, "a sum for each column");
    if !kernel.lays_tiles() {
        return RESULT.with_borrow_mut(|result| {
            product_into(derivatives, weight, Start::Zero, Finish::Plain, result);
            assert_eq!(result.len(), passes.outputs.len(), "the places of ReLU");
            if columns > 0 {
                relu_backward(result, &passes.outputs, sums);
            }
            let result = Matrix::new(result, rows, columns);
            right.pack(kernel, result);
            left.into_iter().for_each(|left| left.pack(kernel, result));
        });
    }
    let expected = [rows.next_multiple_of(ROW_GRANULE), columns.div_ceil(TILE_COLUMNS)];
    assert_eq!([passes.rows, passes.bits.len()], [expected[0], expected[0] * expected[1]], "the places of ReLU");
    let mut left = left.map(|left| left.lay(kernel, rows, columns));
    let mut right = right.lay(kernel, rows, columns);
    tiles(derivatives, weight, Start::Zero, &mut |place, tile| {
        let passes = &passes.bits[passes.of(&place)];
        let first = place.panel * TILE_COLUMNS;
        let sums = &mut sums[first..first + place.columns];
        kernel.lay_derivatives(tile, &place, (passes, sums), left.as_mut(), &mut right);
    });
}
