//! Prints docs/reference/operator-metrics.md.

fn main() {
    print!("{}", rectrain_operator::metrics::reference_markdown());
}
