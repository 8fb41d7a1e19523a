//! Prints docs/reference/serving-ps-metrics.md. `cargo xtask docs` writes it.

fn main() {
    print!("{}", rectrain_serving_ps::reference_markdown());
}
