//! Properties that hold for any bytes. The reader of deltas accepts or refuses them. It must not
//! panic, loop or take memory out of proportion. Noise never passes a digest. So the check tries
//! the bytes as they are, and once more with a valid digest. It returns the kind of its outcome.
//! Two drivers share it: `tests/fuzz.rs` in every test run, and cargo-fuzz.

#![allow(dead_code, reason = "each target of cargo-fuzz uses one check")]

use rectrain_fuzzing::{Area, Target, outcome};
use rectrain_serving::publication::{Base, Delta, DeltaError, GroupChanges};
use rectrain_serving::{KeyRange, Table};
use sha2::{Digest, Sha256};

pub const AREAS: &[Area] = &[Area {
    name: "publications",
    targets: &[Target {
        name: "delta",
        check: delta,
        seeds: delta_seeds,
        words: Vec::new,
        inputs: 6_000,
        memory: 1 << 20,
    }],
}];

/// Bytes of the digest at the end of a delta.
const DIGEST: usize = 32;

/// A delta or an error. A delta survives encoding and decoding.
pub fn delta(input: &[u8]) -> String {
    [check_delta(input), check_delta(&with_digest(input.to_vec()))].join("; ")
}

fn check_delta(bytes: &[u8]) -> String {
    let decoded = Delta::decode(bytes);
    match &decoded {
        Ok((delta, _)) if delta.is_finite() => {
            let (again, digest) = delta.encode();
            assert_eq!(Delta::decode(&again).expect("written bytes can be read"), (delta.clone(), digest));
        }
        // Its text has the digest of the input.
        Err(DeltaError::Digest { .. }) => return "another digest".to_owned(),
        _ => {}
    }
    outcome(&decoded)
}

fn with_digest(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(content) = bytes.len().checked_sub(DIGEST) {
        let digest = Sha256::digest(&bytes[..content]);
        bytes[content..].copy_from_slice(&digest);
    }
    bytes
}

fn delta_seeds() -> Vec<Vec<u8>> {
    let group = |dim: usize, rows: u64| {
        let values = (0..rows * dim as u64).map(|place| place as f32).collect();
        let rows = Table::of(dim, (0..rows).map(|row| row << 40).collect(), values).expect("the keys rise");
        GroupChanges { removed: vec![KeyRange { first: 3, last: 9 }], rows }
    };
    let delta = |groups: Vec<GroupChanges>| Delta {
        sequence: 2,
        step: 70,
        base: Base { sequence: 1, digest: "0".repeat(64) },
        checkpoint: "step-000000000070-delta".to_owned(),
        published_at: 5,
        groups,
        parameters: vec![0.5; 3],
    };
    let all = [vec![], vec![group(1, 0)], vec![group(3, 4), group(1, 2)]];
    all.into_iter().map(|groups| delta(groups).encode().0).collect()
}
