//! Compares products with sums in 64 bits of operands that the tests round by definition.

use crate::{
    Finish, HiddenDerivatives, Kernel, Left, Matrix, Passes, ROW_GRANULE, Right, RightPart, Start, hidden,
    hidden_backward, multiply, product, product_into, relu_backward, sum_products,
};

/// Rows, inner dimension and columns of the products. Each is 0, 1, odd, a tile, one more or less
/// than a tile, or more than a block. The last result is so wide that sums are buffered.
const SHAPES: [[usize; 3]; 17] = [
    [0, 3, 5],
    [3, 0, 5],
    [3, 5, 0],
    [1, 1, 1],
    [1, 7, 1],
    [2, 2, 2],
    [12, 32, 32],
    [13, 31, 33],
    [11, 33, 31],
    [5, 255, 17],
    [25, 257, 65],
    [24, 513, 48],
    [265, 5, 257],
    [270, 260, 270],
    [1, 600, 300],
    [300, 1, 1],
    [26, 560, 1025],
];

/// The kernels of this processor. Prints them, as the tests cannot cover others.
fn kernels() -> Vec<Kernel> {
    let kernels: Vec<Kernel> = Kernel::all().collect();
    println!("tested: {}", kernels.iter().map(|kernel| kernel.name()).collect::<Vec<_>>().join("; "));
    kernels
}

fn bf16_kernels() -> Vec<Kernel> {
    kernels().into_iter().filter(|kernel| kernel.is_bf16()).collect()
}

/// Pseudo-random values from −1 to 1. bf16 cannot represent most of them.
pub(crate) fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The nearest bf16 by definition: the nearer of the two neighbours, or the even one at a tie.
fn nearest(value: f32) -> f32 {
    if value.is_nan() || value.is_infinite() {
        return value;
    }
    if value.is_subnormal() {
        return 0.0_f32.copysign(value);
    }
    let below = value.to_bits() & 0xFFFF_0000;
    // The neighbour further from 0. Beyond the largest bf16 it stands for 2^128.
    let above = below + 0x1_0000;
    let wide = |bits: u32| {
        if bits & 0x7FFF_FFFF == 0x7F80_0000 {
            2_f64.powi(128).copysign(f64::from(value))
        } else {
            f64::from(f32::from_bits(bits))
        }
    };
    let (down, up) = ((f64::from(value) - wide(below)).abs(), (f64::from(value) - wide(above)).abs());
    let even = if below >> 16 & 1 == 0 { below } else { above };
    f32::from_bits(if down < up {
        below
    } else if up < down {
        above
    } else {
        even
    })
}

/// A matrix. `values` are its values in row-major order, or its transpose's.
fn matrix(values: &[f32], rows: usize, columns: usize, transposed: bool) -> Matrix<'_> {
    if transposed { Matrix::new(values, columns, rows).transpose() } else { Matrix::new(values, rows, columns) }
}

fn packed(kernel: Kernel, left: Matrix<'_>, right: Matrix<'_>) -> (Left, Right) {
    let mut operands = (Left::new(), Right::new());
    operands.0.pack(kernel, left);
    operands.1.pack(kernel, right);
    operands
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn rounding_is_to_the_nearest_and_ties_are_even() {
    let one = 1.0_f32.to_bits();
    let mut cases: Vec<f32> = (0..0x4_0000).map(|step| f32::from_bits(one + step)).collect();
    cases.extend(values(10_000, 3).iter().map(|value| value * 1e30));
    cases.extend([0.0, -0.0, f32::MIN_POSITIVE, 1e-40, -1e-40, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY]);
    cases.extend([3.389e38, 3.3895314e38, 3.396e38, -3.396e38]);
    for kernel in bf16_kernels() {
        // The product of the rounded operand with 1 is the rounded operand.
        let (left, right) = packed(kernel, Matrix::new(&cases, cases.len(), 1), Matrix::new(&[1.0], 1, 1));
        let mut rounded = vec![7.0; cases.len()];
        multiply(&left, &right, &mut rounded, Start::Zero, Finish::Plain);
        for (case, got) in cases.iter().zip(rounded) {
            assert_eq!(got, nearest(*case), "{}: {case:e}", kernel.name());
        }
    }
}

#[test]
fn all_kernels_and_layouts_round_operands_to_the_same_bits() {
    let mut cases = values(37 * 41, 5);
    cases.extend([f32::NAN, f32::from_bits(0xFF80_0001), f32::INFINITY, 1e-40, 3.3895314e38, -0.0]);
    let count = cases.len();
    let mut seen: Option<Vec<u32>> = None;
    for kernel in bf16_kernels() {
        for transposed in [false, true] {
            let unit = Matrix::new(&[1.0], 1, 1);
            let column = matrix(&cases, count, 1, transposed);
            let row = matrix(&cases, 1, count, transposed);
            for (left, right) in [(column, unit), (unit, row)] {
                let (left, right) = packed(kernel, left, right);
                let mut rounded = vec![0.0; count];
                multiply(&left, &right, &mut rounded, Start::Zero, Finish::Plain);
                let found =
                    rounded.iter().map(|value| if value.is_nan() { u32::MAX } else { value.to_bits() }).collect();
                assert_eq!(seen.get_or_insert_with(|| Vec::clone(&found)), &found, "{} {transposed}", kernel.name());
            }
        }
    }
}

#[test]
fn products_of_all_shapes_and_layouts_are_correct() {
    for kernel in kernels() {
        for [rows, depth, columns] in SHAPES {
            for (turn_left, turn_right) in [(false, false), (false, true), (true, false), (true, true)] {
                check_product(kernel, [rows, depth, columns], turn_left, turn_right);
            }
        }
    }
}

fn check_product(kernel: Kernel, [rows, depth, columns]: [usize; 3], turn_left: bool, turn_right: bool) {
    let (a, b) = (values(rows * depth, 1), values(depth * columns, 2));
    let (bias, before) = (values(columns, 3), values(rows * columns, 4));
    let at = |values: &[f32], [row, column]: [usize; 2], [rows, columns]: [usize; 2], turned: bool| {
        f64::from(values[if turned { column * rows + row } else { row * columns + column }])
    };
    let (left, right) = packed(kernel, matrix(&a, rows, depth, turn_left), matrix(&b, depth, columns, turn_right));
    let rounded = |value: f32| if kernel.is_bf16() { nearest(value) } else { value };
    let round = |values: &[f32]| values.iter().copied().map(rounded).collect::<Vec<f32>>();
    let (a, b) = (round(&a), round(&b));
    for (start, finish) in
        [(Start::Zero, Finish::Plain), (Start::Row(&bias), Finish::Relu), (Start::Sum, Finish::Plain)]
    {
        let mut out = before.clone();
        multiply(&left, &right, &mut out, start, finish);
        if !matches!(start, Start::Sum) {
            assert_eq!(bits(&product(&left, &right, start, finish)), bits(&out), "in new memory");
            let mut reused = vec![f32::NAN; 7];
            product_into(&left, &right, start, finish, &mut reused);
            assert_eq!(bits(&reused), bits(&out), "in the memory of another vector");
        }
        for (index, got) in out.iter().enumerate() {
            let (row, column) = (index / columns, index % columns);
            let begin = match start {
                Start::Zero => 0.0,
                Start::Row(row) => f64::from(row[column]),
                Start::Sum => f64::from(before[index]),
            };
            let (mut sum, mut size) = (begin, begin.abs());
            for k in 0..depth {
                let term =
                    at(&a, [row, k], [rows, depth], turn_left) * at(&b, [k, column], [depth, columns], turn_right);
                (sum, size) = (sum + term, size + term.abs());
            }
            let expected = if finish == Finish::Relu { sum.max(0.0) } else { sum };
            // Each addition may be off by half a unit in the last place of the sum so far.
            let tolerance = size * f64::from(f32::EPSILON) * (2.0 + (depth as f64).sqrt());
            assert!(
                (f64::from(*got) - expected).abs() <= tolerance,
                "{} {rows}x{depth}x{columns} {turn_left} {turn_right} {start:?} {finish:?} at {row}, {column}: {got} but {expected}",
                kernel.name()
            );
        }
    }
}

#[test]
fn sums_that_fit_in_32_bits_are_exact_with_every_kernel() {
    let whole = |count, seed| values(count, seed).iter().map(|value| (value * 100.0).round()).collect::<Vec<f32>>();
    let [rows, depth, columns] = [37, 301, 45];
    let (a, b) = (whole(rows * depth, 1), whole(depth * columns, 2));
    for kernel in kernels() {
        let (left, right) = packed(kernel, Matrix::new(&a, rows, depth), Matrix::new(&b, depth, columns));
        let mut out = vec![0.0; rows * columns];
        multiply(&left, &right, &mut out, Start::Zero, Finish::Plain);
        for (index, &got) in out.iter().enumerate() {
            let sum: f32 = (0..depth).map(|k| a[index / columns * depth + k] * b[k * columns + index % columns]).sum();
            assert_eq!(got, sum, "{}", kernel.name());
        }
    }
}

#[test]
fn kernels_for_32_bit_floats_make_fused_additions_in_order() {
    let [rows, depth, columns] = [37, 301, 45];
    let (a, b) = (values(rows * depth, 1), values(depth * columns, 2));
    // Kernels for bf16 that use 32-bit floats do the same with rounded operands.
    for kernel in kernels().into_iter().filter(|kernel| kernel.name().contains("fp32")) {
        let round = |values: &[f32]| {
            values.iter().map(|&value| if kernel.is_bf16() { nearest(value) } else { value }).collect()
        };
        let (rounded_a, rounded_b): (Vec<f32>, Vec<f32>) = (round(&a), round(&b));
        let fused =
            !cfg!(target_arch = "x86_64") || cfg!(target_feature = "fma") || !kernel.name().contains("portable");
        for (turn_left, turn_right) in [(false, false), (false, true), (true, false), (true, true)] {
            let turned = |values: &[f32], rows: usize, columns: usize, turn: bool| -> Vec<f32> {
                let at = |index: usize| values[index % rows * columns + index / rows];
                if turn { (0..values.len()).map(at).collect() } else { values.to_vec() }
            };
            let (left, right) = (turned(&a, rows, depth, turn_left), turned(&b, depth, columns, turn_right));
            let (left, right) =
                packed(kernel, matrix(&left, rows, depth, turn_left), matrix(&right, depth, columns, turn_right));
            let mut out = vec![0.0; rows * columns];
            multiply(&left, &right, &mut out, Start::Zero, Finish::Plain);
            for (index, &got) in out.iter().enumerate() {
                let sum = (0..depth).fold(0.0_f32, |sum, k| {
                    let (left, right) =
                        (rounded_a[index / columns * depth + k], rounded_b[k * columns + index % columns]);
                    if fused { left.mul_add(right, sum) } else { left * right + sum }
                });
                assert_eq!(got.to_bits(), sum.to_bits(), "{} {turn_left} {turn_right}", kernel.name());
            }
        }
    }
}

#[test]
fn nan_and_infinity_affect_only_their_row() {
    let [rows, depth, columns] = [27, 35, 40];
    for kernel in kernels() {
        for (broken, turned) in [(f32::NAN, false), (f32::INFINITY, false), (f32::NAN, true)] {
            let (mut a, b) = (values(rows * depth, 1), vec![1.0; depth * columns]);
            // The last value of an odd inner dimension: the other value of its pair is 0, and 0
            // times it would be NaN.
            a[if turned { 34 * rows + 26 } else { 26 * depth + 34 }] = broken;
            let (left, right) = packed(kernel, matrix(&a, rows, depth, turned), Matrix::new(&b, depth, columns));
            for finish in [Finish::Plain, Finish::Relu] {
                let mut out = vec![0.0; rows * columns];
                multiply(&left, &right, &mut out, Start::Zero, finish);
                let (fine, row) = out.split_at(26 * columns);
                assert!(fine.iter().all(|value| value.is_finite()));
                assert!(row.iter().all(|value| !value.is_finite()), "{} {finish:?}: {row:?}", kernel.name());
            }
        }
    }
}

#[test]
fn an_operand_that_is_packed_again_forgets_its_old_values() {
    for kernel in kernels() {
        let mut operands = (Left::new(), Right::new());
        for [rows, depth, columns] in [[50, 70, 90], [3, 5, 33], [13, 1, 1], [50, 70, 90]] {
            for turned in [false, true] {
                let (a, b) = (vec![f32::NAN; 100 * 100], values(depth * columns, 2));
                operands.0.pack(kernel, matrix(&a[..100 * 99], 100, 99, turned));
                operands.1.pack(kernel, matrix(&a[..99 * 100], 99, 100, turned));
                let a = values(rows * depth, 1);
                let (left, right) = (matrix(&a, rows, depth, turned), matrix(&b, depth, columns, turned));
                operands.0.pack(kernel, left);
                operands.1.pack(kernel, right);
                let fresh = packed(kernel, left, right);
                let product = |left, right| {
                    let mut out = vec![0.0; rows * columns];
                    multiply(left, right, &mut out, Start::Zero, Finish::Plain);
                    bits(&out)
                };
                assert_eq!(product(&operands.0, &operands.1), product(&fresh.0, &fresh.1));
            }
        }
    }
}

#[test]
fn a_product_in_parts_has_the_bits_of_the_whole_product() {
    for columns in [270, 1050] {
        check_parts([300, 400, columns]);
    }
}

fn check_parts([rows, depth, columns]: [usize; 3]) {
    let (a, b) = (values(rows * depth, 1), values(depth * columns, 2));
    for kernel in kernels() {
        let (left, right) = packed(kernel, Matrix::new(&a, rows, depth), Matrix::new(&b, depth, columns));
        let mut whole = vec![0.0; rows * columns];
        multiply(&left, &right, &mut whole, Start::Zero, Finish::Plain);

        let mut parts = vec![0.0; rows * columns];
        for (block, out) in parts.chunks_mut(ROW_GRANULE * columns).enumerate() {
            let rows = block * ROW_GRANULE..rows.min((block + 1) * ROW_GRANULE);
            sum_products(&[(&left, &right)], rows, out, Start::Zero, Finish::Plain);
        }
        assert_eq!(bits(&whole), bits(&parts), "rows");

        let halves: Vec<_> = [0..160, 160..400]
            .into_iter()
            .map(|inner| {
                let part: Vec<f32> = (0..rows).flat_map(|row| &a[row * depth..][inner.clone()]).copied().collect();
                packed(
                    kernel,
                    Matrix::new(&part, rows, inner.len()),
                    Matrix::new(&b[inner.start * columns..inner.end * columns], inner.len(), columns),
                )
            })
            .collect();
        let mut sum = vec![0.0; rows * columns];
        for (left, right) in &halves {
            multiply(left, right, &mut sum, Start::Sum, Finish::Plain);
        }
        assert_eq!(bits(&whole), bits(&sum), "the inner dimension");

        let halves: Vec<_> = halves.iter().map(|(left, right)| (left, right)).collect();
        sum_products(&halves, 0..rows, &mut sum, Start::Zero, Finish::Relu);
        whole.iter_mut().for_each(|value| *value = value.max(0.0));
        assert_eq!(bits(&whole), bits(&sum), "products that are added up");

        for turned in [false, true] {
            let mut right = Right::new();
            right.parts(kernel, matrix(&b, depth, columns, turned), 64).for_each(RightPart::pack);
            let (left, at_once) = packed(kernel, Matrix::new(&a, rows, depth), matrix(&b, depth, columns, turned));
            let product = |right| {
                let mut out = vec![0.0; rows * columns];
                multiply(&left, right, &mut out, Start::Zero, Finish::Plain);
                bits(&out)
            };
            assert_eq!(product(&right), product(&at_once), "packed in parts");
        }
    }
}

#[test]
#[should_panic(expected = "inner dimensions")]
fn operands_that_do_not_fit_are_refused() {
    let (left, right) = packed(Kernel::bf16(), Matrix::new(&[1.0; 6], 2, 3), Matrix::new(&[1.0; 4], 2, 2));
    multiply(&left, &right, &mut [0.0; 4], Start::Zero, Finish::Plain);
}

#[test]
#[should_panic(expected = "the kernels that the operands were packed for")]
fn operands_for_different_kernels_are_refused() {
    let mut operands = (Left::new(), Right::new());
    operands.0.pack(Kernel::bf16(), Matrix::new(&[1.0; 4], 2, 2));
    operands.1.pack(Kernel::fp32(), Matrix::new(&[1.0; 4], 2, 2));
    multiply(&operands.0, &operands.1, &mut [0.0; 4], Start::Zero, Finish::Plain);
}

/// Rows, inner dimension and columns of hidden layers: as [`SHAPES`], with more than a block of
/// rows, of the inner dimension and of columns. A smaller layer follows each larger one.
const HIDDEN_SHAPES: [[usize; 3]; 11] = [
    [32, 64, 64],
    [12, 32, 32],
    [300, 300, 270],
    [1, 1, 1],
    [33, 5, 100],
    [13, 31, 33],
    [100, 600, 31],
    [97, 257, 13],
    [7, 20, 1030],
    [0, 3, 5],
    [40, 3, 48],
];

/// The bits of values, with one pattern for NaN.
fn bits_or_nan(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| if value.is_nan() { u32::MAX } else { value.to_bits() }).collect()
}

/// The product of a left operand with numbers, or of numbers with a right operand.
fn probe(kernel: Kernel, operand: Result<&Left, &Right>) -> Vec<u32> {
    const PROBES: usize = 9;
    let (mut left, mut right) = (Left::new(), Right::new());
    let (left, right) = match operand {
        Ok(operand) => {
            let depth = operand.depth();
            right.pack(kernel, Matrix::new(&values(depth * PROBES, 8), depth, PROBES));
            (operand, &right)
        }
        Err(operand) => {
            let depth = operand.depth();
            left.pack(kernel, Matrix::new(&values(PROBES * depth, 9), PROBES, depth));
            (&left, operand)
        }
    };
    bits_or_nan(&product(left, right, Start::Zero, Finish::Plain))
}

#[test]
fn hidden_layers_leave_the_operands_that_packing_makes() {
    for kernel in kernels() {
        let (mut outputs, mut transposed, mut passes) = (Left::new(), Left::new(), Passes::new());
        let (mut of_left, mut of_right) = (Left::new(), Right::new());
        for broken in [false, true] {
            for [rows, depth, columns] in HIDDEN_SHAPES {
                let what = format!("{}, {rows} x {depth} x {columns}, {broken}", kernel.name());
                let (mut x, w, bias) = (values(rows * depth, 1), values(depth * columns, 2), values(columns, 3));
                if broken && !x.is_empty() {
                    x[rows / 2 * depth] = f32::NAN;
                }
                let (left, right) = packed(kernel, Matrix::new(&x, rows, depth), Matrix::new(&w, depth, columns));
                let y = product(&left, &right, Start::Row(&bias), Finish::Relu);
                let matrix = Matrix::new(&y, rows, columns);
                let pack = |matrix| {
                    let mut left = Left::new();
                    left.pack(kernel, matrix);
                    left
                };
                hidden(&left, &right, &bias, &mut outputs, Some((&mut transposed, &mut passes)));
                assert_eq!([outputs.rows(), outputs.depth()], [rows, columns], "{what}");
                assert_eq!(probe(kernel, Ok(&outputs)), probe(kernel, Ok(&pack(matrix))), "outputs, {what}");
                let expected = probe(kernel, Ok(&pack(matrix.transpose())));
                assert_eq!(probe(kernel, Ok(&transposed)), expected, "transposed outputs, {what}");
                hidden(&left, &right, &bias, &mut of_left, None);
                assert_eq!(probe(kernel, Ok(&of_left)), probe(kernel, Ok(&outputs)), "without a record, {what}");

                // The derivatives of the layer above, and its weight.
                let above = depth.min(20) + 1;
                let (dy, v) = (values(rows * above, 4), values(columns * above, 5));
                let v = Matrix::new(&v, columns, above).transpose();
                let (left, right) = packed(kernel, Matrix::new(&dy, rows, above), v);
                let mut dx = product(&left, &right, Start::Zero, Finish::Plain);
                let mut expected = values(columns, 6);
                relu_backward(&mut dx, &y, &mut expected);
                for with_left in [true, false] {
                    let mut sums = values(columns, 6);
                    let left_too = with_left.then_some(&mut of_left);
                    let to = HiddenDerivatives { left: left_too, right: &mut of_right, sums: &mut sums };
                    hidden_backward(&left, &right, &passes, to);
                    assert_eq!(bits_or_nan(&sums), bits_or_nan(&expected), "sums, {what}");
                }
                let dx = Matrix::new(&dx, rows, columns);
                assert_eq!(probe(kernel, Ok(&of_left)), probe(kernel, Ok(&pack(dx))), "left, {what}");
                let mut packed = Right::new();
                packed.pack(kernel, dx);
                assert_eq!(probe(kernel, Err(&of_right)), probe(kernel, Err(&packed)), "right, {what}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "the places of ReLU")]
fn places_of_another_layer_are_refused() {
    let (left, right) = packed(Kernel::fp32(), Matrix::new(&[1.0; 4], 2, 2), Matrix::new(&[1.0; 4], 2, 2));
    let to = HiddenDerivatives { left: None, right: &mut Right::new(), sums: &mut [0.0; 2] };
    hidden_backward(&left, &right, &Passes::new(), to);
}
