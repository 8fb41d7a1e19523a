//! No `--set` expression panics. `cargo +nightly fuzz run set` from crds/.
#![no_main]

use rectrain_crds::{Override, SetKind, load};

const MANIFEST: &str = include_str!("../../../docs/examples/minimal.yaml");

libfuzzer_sys::fuzz_target!(|expression: &str| {
    for kind in [SetKind::Infer, SetKind::Text] {
        let set = Override { kind, expression: expression.to_string() };
        let _ = load(MANIFEST, "fuzz.yaml", &[set]);
    }
});
