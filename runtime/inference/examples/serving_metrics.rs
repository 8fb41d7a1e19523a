//! Prints docs/reference/serving-metrics.md. `cargo xtask docs` writes it.

fn main() {
    print!("{}", rectrain_inference::reference_markdown());
}
