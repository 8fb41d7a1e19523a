//! Prints docs/reference/metrics.md: `cargo xtask docs` writes it.

fn main() {
    print!("{}", rectrain_roles::metrics::reference_markdown());
}
