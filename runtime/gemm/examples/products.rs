//! Measures the GFLOP/s of products and the time of packing, on one thread. Run it with
//! `cargo run --release -p rectrain-gemm --example products`. An argument after `--` selects the
//! kernels whose names contain it.

use std::time::Instant;

use rectrain_gemm::{Finish, Kernel, Left, Matrix, Right, Start, multiply};

fn fastest(mut work: impl FnMut()) -> f64 {
    let once = || {
        let begin = Instant::now();
        work();
        begin.elapsed().as_secs_f64()
    };
    std::iter::repeat_with(once).take(20).fold(f64::INFINITY, f64::min)
}

fn main() {
    let named = std::env::args().nth(1).unwrap_or_default();
    Kernel::all().filter(|kernel| kernel.name().contains(&named)).for_each(measure);
}

fn measure(kernel: Kernel) {
    println!("{}", kernel.name());
    for [rows, depth, columns] in [
        [512, 429, 512],
        [512, 512, 256],
        [512, 256, 128],
        [512, 128, 1],
        [512, 1, 128],
        [256, 4096, 2048],
        [4096, 1024, 2048],
        [512, 4096, 256],
    ] {
        let values = |count: usize| (0..count).map(|i| (i % 1000) as f32 * 1e-3 - 0.5).collect::<Vec<_>>();
        let (a, b) = (values(rows * depth), values(depth * columns));
        let mut out = vec![0.0; rows * columns];
        let flops = 2.0 * (rows * depth * columns) as f64;
        for transposed in [[false, false], [false, true], [true, false]] {
            let turn = |values, rows, columns, transposed| {
                if transposed {
                    Matrix::new(values, columns, rows).transpose()
                } else {
                    Matrix::new(values, rows, columns)
                }
            };
            let (mut left, mut right) = (Left::new(), Right::new());
            let (a, b) = (turn(&a, rows, depth, transposed[0]), turn(&b, depth, columns, transposed[1]));
            let packing = [fastest(|| left.pack(kernel, a)), fastest(|| right.pack(kernel, b))];
            let seconds = fastest(|| multiply(&left, &right, &mut out, Start::Zero, Finish::Plain));
            println!(
                "{rows:5} x {depth:5} x {columns:5} {transposed:?}: {:6.1} GFLOP/s, {:8.1} us; left {:7.1} us, {:5.2} G/s; right {:7.1} us, {:5.2} G/s",
                flops / seconds * 1e-9,
                seconds * 1e6,
                packing[0] * 1e6,
                (rows * depth) as f64 / packing[0] * 1e-9,
                packing[1] * 1e6,
                (depth * columns) as f64 / packing[1] * 1e-9,
            );
        }
    }
}
