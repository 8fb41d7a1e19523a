//! Any bytes: a manifest or an error, and a manifest is read again as it was. The checksum is put right first, since noise
//! never gets past it. Run with `cargo +nightly fuzz run manifest` in `runtime/checkpoint`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rectrain_checkpoint::Manifest;
use xxhash_rust::xxh3::xxh3_64;

const BEFORE: &[u8] = b"\"checksum\": \"";

fuzz_target!(|input: &[u8]| {
    check(input);
    let mut bytes = input.to_vec();
    let found = bytes.windows(BEFORE.len()).position(|window| window == BEFORE);
    if let Some(start) = found.map(|at| at + BEFORE.len()).filter(|start| start + 16 < bytes.len()) {
        bytes[start..start + 16].fill(b'0');
        let sum = format!("{:016x}", xxh3_64(&bytes));
        bytes[start..start + 16].copy_from_slice(sum.as_bytes());
        check(&bytes);
    }
});

fn check(bytes: &[u8]) {
    if let Ok(manifest) = Manifest::decode("fuzz", bytes) {
        let again = Manifest::decode("fuzz", &manifest.encode()).expect("what was written is read");
        assert_eq!(again.encode(), manifest.encode());
    }
}
