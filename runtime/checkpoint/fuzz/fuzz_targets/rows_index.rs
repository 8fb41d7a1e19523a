//! Any header and tail of a rows file: an index that contradicts nothing, or an error. The checksum is put right first in half
//! of the runs. Run with `cargo +nightly fuzz run rows_index` in `runtime/checkpoint`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rectrain_checkpoint::{decode_index, encode_index};
use xxhash_rust::xxh3::xxh3_64;

fuzz_target!(|input: (Vec<u8>, Vec<u8>, u64)| {
    let (mut head, mut tail, size) = input;
    check(&head, &tail, size);
    if head.len() >= 64 && tail.len() >= 32 {
        head.truncate(64);
        head[..12].copy_from_slice(b"RECTROWS\x01\x00\x00\x00");
        head[48..].fill(0);
        let index = tail.len() - 32;
        let entries = (index / 40) as u32;
        let offset = u64::from_le_bytes(tail[index..index + 8].try_into().unwrap_or_default());
        tail[index + 8..index + 12].copy_from_slice(&entries.to_le_bytes());
        tail[index + 12..index + 16].fill(0);
        let sum = xxh3_64(&[&head[..], &tail[..index]].concat());
        tail[index + 16..index + 24].copy_from_slice(&sum.to_le_bytes());
        tail[index + 24..].copy_from_slice(b"RECTEND.");
        check(&head, &tail, offset.wrapping_add(tail.len() as u64));
    }
});

fn check(head: &[u8], tail: &[u8], size: u64) {
    if let Ok((header, entries)) = decode_index(head, tail, size) {
        assert!(entries.iter().all(|entry| entry.slot.0 < header.slots));
        assert!(entries.windows(2).all(|pair| pair[0].slot < pair[1].slot));
        assert_eq!(encode_index(&header, &entries).0, tail);
    }
}
