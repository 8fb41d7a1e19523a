//! Any bytes as a file of dense parameters: values, or an error. Run with `cargo +nightly fuzz run dense` in
//! `runtime/checkpoint`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rectrain_checkpoint::DensePart;

fuzz_target!(|input: &[u8]| {
    check(input);
    // A header of the right length, so that what is in it is looked at.
    let header = input.len().min(400);
    check(&[&(header as u64).to_le_bytes()[..], input].concat());
});

fn check(bytes: &[u8]) {
    if let Ok((part, id)) = DensePart::decode(bytes) {
        let again = part.encode(id).expect("what was read can be written");
        let (read, _) = DensePart::decode(&again).expect("what was written is read");
        assert_eq!(read.offset, part.offset);
        assert_eq!(read.parameters.len(), part.parameters.len());
    }
}
