//! Prints docs/reference/metrics.md. `cargo xtask docs` writes it.

fn main() {
    print!("{}", rectrain_protocol::metrics::reference_markdown());
}
