//! Prints charts/rectrain/README.md.

mod values;

use std::path::Path;

fn main() {
    print!("{}", values::markdown(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/rectrain")));
}
