//! See `delta` in `checks.rs`.

#![no_main]

#[path = "../checks.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let _outcome = checks::delta(input);
});
