//! Pooling and scattering allocate their results and nothing else.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[path = "../../dense/tests/counting/mod.rs"]
mod counting;

use rectrain_kinds::Pooling;
use rectrain_pooling::PreparedIds;
use rectrain_protocol::layout::{FeatureLayout, FeaturePlace, Pooled};
use rectrain_wire::ids::{Scratch, UniqueIds};

use counting::{Counting, counted};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes of an allocation that counts. The list of the groups is smaller.
const LARGE: usize = 1 << 10;
const SAMPLES: usize = 512;
const FEATURES: usize = 4;
const DIM: usize = 16;

/// Features in two row groups, with or without first-order weights.
fn layout(linear: bool) -> FeatureLayout {
    let place =
        |feature: usize| FeaturePlace { group: feature % 2, dim: DIM, offset: feature * DIM, pooling: Pooling::Mean };
    FeatureLayout {
        features: (0..FEATURES).map(place).collect(),
        group_dims: vec![DIM + usize::from(linear); 2],
        linear,
        embedding_width: FEATURES * DIM,
    }
}

/// Two ids in each cell.
fn piece(layout: &FeatureLayout) -> PreparedIds {
    let offsets: Vec<u32> = (0..=SAMPLES as u32).map(|sample| 2 * sample).collect();
    let of_feature = |feature: usize| {
        let keys: Vec<u64> =
            (0..2 * SAMPLES as u64).map(|id| (id * 7 + feature as u64) % 300 * (u64::MAX / 300)).collect();
        UniqueIds::from_column(&keys, Some(&offsets), SAMPLES, &mut Scratch::default()).unwrap()
    };
    PreparedIds::new(SAMPLES, (0..FEATURES).map(of_feature).collect(), layout)
}

/// The number and the bytes of vectors that are allocated.
fn sizes<'a>(vectors: impl IntoIterator<Item = &'a Vec<f32>>) -> [usize; 2] {
    let lengths = vectors.into_iter().map(|vector| size_of_val(&**vector)).filter(|bytes| *bytes > 0);
    lengths.fold([0, 0], |[number, sum], bytes| [number + 1, sum + bytes])
}

#[test]
fn pooling_and_scattering_allocate_their_results_only() {
    for linear in [false, true] {
        let layout = layout(linear);
        let piece = piece(&layout);
        let rows: Vec<Vec<f32>> =
            piece.keys().iter().map(|keys| vec![0.5; keys.len() * layout.group_dims[0]]).collect();

        let mut pooled = Pooled { embeddings: Vec::new(), linear: Vec::new() };
        let found = counted(LARGE, || pooled = piece.pool(&rows, &layout));
        assert_eq!(found, sizes([&pooled.embeddings, &pooled.linear]), "pooling, {linear}");
        assert_eq!(pooled.embeddings.len(), SAMPLES * FEATURES * DIM);

        let mut scattered = Vec::new();
        let found = counted(LARGE, || scattered = piece.scatter(&pooled, &layout));
        assert_eq!(found, sizes(&scattered), "scattering, {linear}");
        assert_eq!(scattered.len(), 2);
    }
}
