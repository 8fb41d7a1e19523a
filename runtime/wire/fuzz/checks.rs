//! Properties that hold for any bytes from the network. A check returns the kind of its outcome.
//! Two drivers share the checks: `tests/fuzz.rs` in every test run, and cargo-fuzz, which is guided
//! by coverage.

#![allow(dead_code, reason = "each target of cargo-fuzz uses one check")]

use rectrain_fuzzing::{Area, Target, outcome};
use rectrain_wire::ids::UniqueIds;
use rectrain_wire::{Frame, FrameRole, HEADER_BYTES, Limits, Tensor, decode_frame, encode_frame};

pub const AREAS: &[Area] = &[Area {
    name: "frames",
    targets: &[target("decode_frame", frame, frame_seeds), target("unique_ids", unique_ids, ids_seeds)],
}];

const fn target(name: &'static str, check: fn(&[u8]) -> String, seeds: fn() -> Vec<Vec<u8>>) -> Target {
    Target { name, check, seeds, words: Vec::new, inputs: 20_000, memory: 1 << 20 }
}

const LIMITS: Limits = Limits { max_frame_bytes: 1 << 20, max_meta_bytes: 1 << 12 };

fn frame_seeds() -> Vec<Vec<u8>> {
    let encoded = |role, frame| encode_frame(role, 7, frame, &LIMITS).expect("within the limits");
    let tensors = Frame::new(3, b"meta".to_vec()).with(vec![1_u64, 2, 3]).with(vec![0.5_f32]).with(vec![9_u16]);
    vec![
        encoded(FrameRole::Request, Frame::new(1, Vec::<u8>::new())),
        encoded(FrameRole::Reply, tensors),
        encoded(FrameRole::Refusal, Frame::new(2, b"a reason".to_vec())),
    ]
}

/// An error or a frame, whose encoding is the bytes it came from. Noise never passes a checksum. So
/// the check tries the bytes as they are, and once more with valid checksums.
pub fn frame(input: &[u8]) -> String {
    [check_frame(input), check_frame(&with_checksums(input.to_vec()))].join("; ")
}

fn with_checksums(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.len() >= HEADER_BYTES + 4 {
        let end = bytes.len() - 4;
        bytes[0..6].copy_from_slice(b"RTWF\x01\x00");
        let body_bytes = (end - HEADER_BYTES) as u64;
        bytes[24..32].copy_from_slice(&body_bytes.to_le_bytes());
        let header = checksum(&bytes[..32]);
        bytes[32..36].copy_from_slice(&header.to_le_bytes());
        let body = checksum(&bytes[HEADER_BYTES..end]);
        bytes[end..].copy_from_slice(&body.to_le_bytes());
    }
    bytes
}

fn check_frame(bytes: &[u8]) -> String {
    let decoded = decode_frame(bytes, &LIMITS);
    let kind = outcome(&decoded);
    if let Ok((decoded, taken)) = decoded {
        let again = encode_frame(decoded.role, decoded.request_id, decoded.frame, &LIMITS);
        assert_eq!(again.as_deref(), Ok(&bytes[..taken]));
    }
    kind
}

/// CRC-32 (IEEE), bit by bit: another computation than the decoder's.
fn checksum(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}

/// Three tensors, with the numbers of keys and starts, the width of samples and their count first.
fn ids_seeds() -> Vec<Vec<u8>> {
    let seed = |is_wide: bool, samples: &[u16]| {
        let mut bytes = vec![2, 3, u8::from(is_wide), 4];
        [5_u64, 6].iter().for_each(|key| bytes.extend(key.to_le_bytes()));
        [0_u32, 1, samples.len() as u32].iter().for_each(|start| bytes.extend(start.to_le_bytes()));
        for sample in samples {
            let wide = u32::from(*sample).to_le_bytes();
            bytes.extend(if is_wide { &wide[..] } else { &wide[..2] });
        }
        bytes
    };
    vec![seed(false, &[0, 1, 3]), seed(true, &[2, 0, 3])]
}

/// The tensors are refused, or the result keeps every promise of [`UniqueIds`].
pub fn unique_ids(input: &[u8]) -> String {
    let Some((head, rest)) = input.split_first_chunk::<4>() else { return "empty".to_owned() };
    let [keys, starts, is_wide, sample_count] = head.map(usize::from);
    let (keys, rest) = rest.split_at(rest.len().min(keys * 8));
    let (starts, samples) = rest.split_at(rest.len().min(starts * 4));
    let keys: Vec<u64> = keys.chunks_exact(8).map(number).collect();
    let starts: Vec<u32> = starts.chunks_exact(4).map(|bytes| number(bytes) as u32).collect();
    let samples = match is_wide % 2 {
        0 => Tensor::from(samples.chunks_exact(2).map(|bytes| number(bytes) as u16).collect::<Vec<u16>>()),
        _ => Tensor::from(samples.chunks_exact(4).map(|bytes| number(bytes) as u32).collect::<Vec<u32>>()),
    };
    let ids = UniqueIds::from_tensors([keys.into(), starts.into(), samples], sample_count as u32);
    if let Ok(ids) = &ids {
        check_ids(ids);
    }
    outcome(&ids)
}

/// A little-endian number of up to eight bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn check_ids(ids: &UniqueIds) {
    let mut occurrences = 0;
    for (_, samples) in ids.iter() {
        let before = occurrences;
        for sample in samples {
            assert!(sample < ids.sample_count());
            occurrences += 1;
        }
        assert!(occurrences > before);
    }
    assert_eq!(occurrences, ids.samples().len());
}
