//! Fuzzes the checks of `fuzz/checks.rs`. See `rectrain-fuzzing`. The test measures memory, so this
//! program has only one test.

#[path = "../fuzz/checks.rs"]
mod checks;

use std::path::Path;

use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

#[test]
fn no_input_makes_a_reader_panic_loop_or_exhaust_memory() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/kept");
    rectrain_fuzzing::run(checks::AREAS, &kept, &MEMORY);
}
