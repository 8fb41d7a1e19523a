//! No text makes the manifest parser or the validation panic. `cargo +nightly fuzz run manifest
//! crds/fuzz/corpus/manifest docs/examples` from crds/.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| {
    let _ = rectrain_crds::load(text, "fuzz.yaml", &[]);
});
