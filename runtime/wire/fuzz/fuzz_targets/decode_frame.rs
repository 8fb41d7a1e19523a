//! Any bytes: the decoder gives an error or a frame, and a frame it gives is encoded as the bytes
//! it came from. Checksums are put right first in half of the inputs, since noise never gets past
//! them. Run with `cargo +nightly fuzz run decode_frame` in `runtime/wire`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rectrain_wire::{HEADER_BYTES, Limits, decode_frame, encode_frame};

const LIMITS: Limits = Limits { max_frame_bytes: 1 << 20, max_meta_bytes: 1 << 12 };

fuzz_target!(|input: &[u8]| {
    check(input);
    let mut bytes = input.to_vec();
    if bytes.len() >= HEADER_BYTES + 4 {
        let end = bytes.len() - 4;
        bytes[0..6].copy_from_slice(b"RTWF\x01\x00");
        let body_bytes = (end - HEADER_BYTES) as u64;
        bytes[24..32].copy_from_slice(&body_bytes.to_le_bytes());
        let header = checksum(&bytes[..32]);
        bytes[32..36].copy_from_slice(&header.to_le_bytes());
        let body = checksum(&bytes[HEADER_BYTES..end]);
        bytes[end..].copy_from_slice(&body.to_le_bytes());
        check(&bytes);
    }
});

fn check(bytes: &[u8]) {
    if let Ok((decoded, taken)) = decode_frame(bytes, &LIMITS) {
        let again = encode_frame(decoded.role, decoded.request_id, decoded.frame, &LIMITS);
        assert_eq!(again.as_deref(), Ok(&bytes[..taken]));
    }
}

/// CRC-32 (IEEE), bit by bit: another computation than the decoder's.
fn checksum(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}
