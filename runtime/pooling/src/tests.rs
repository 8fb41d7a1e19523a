//! The parts of a piece on several servers against the whole piece on one.

mod pooled;
mod tower;

use rectrain_kinds::Pooling;
use rectrain_modes::des::{Partial, Substitution};
use rectrain_modes::migration::SlotMap;
use rectrain_protocol::layout::{FeatureLayout, FeaturePlace};
use rectrain_random::SplitMix64;
use rectrain_wire::Tensor;
use rectrain_wire::ids::{Scratch, UniqueIds};

use super::*;

const SAMPLES: usize = 40;
const POOLINGS: [Pooling; 3] = [Pooling::Sum, Pooling::Mean, Pooling::SqrtN];

/// Features of each pooling in two row groups, with embeddings of `dim` columns.
fn layout(dim: usize) -> FeatureLayout {
    let place =
        |(feature, pooling): (usize, Pooling)| FeaturePlace { group: feature % 2, dim, offset: feature * dim, pooling };
    FeatureLayout {
        features: POOLINGS.into_iter().enumerate().map(place).collect(),
        group_dims: vec![dim + 1; 2],
        linear: true,
        embedding_width: POOLINGS.len() * dim,
    }
}

/// Up to `most` values of 30 in each cell.
fn piece(layout: &FeatureLayout, most: u64, random: &mut SplitMix64) -> PreparedIds {
    let mut unique = Vec::new();
    for _feature in &layout.features {
        let (mut keys, mut offsets) = (Vec::new(), vec![0]);
        for _sample in 0..SAMPLES {
            let values = random.next_u64() % (most + 1);
            keys.extend((0..values).map(|_| (random.next_u64() % 30) * (u64::MAX / 30)));
            offsets.push(keys.len() as u32);
        }
        unique.push(UniqueIds::from_column(&keys, Some(&offsets), SAMPLES, &mut Scratch::default()).unwrap());
    }
    PreparedIds::new(SAMPLES, unique, layout)
}

/// A row is a function of its group and key.
fn rows_of(keys: &[Vec<u64>], layout: &FeatureLayout) -> Vec<Vec<f32>> {
    let value = |group: usize, key: u64, column: usize| {
        SplitMix64::new(key ^ ((group as u64) << 40) ^ column as u64).next_u64() as f32 / u64::MAX as f32 - 0.5
    };
    let of_group = |(group, keys): (usize, &Vec<u64>)| {
        keys.iter()
            .flat_map(|key| (0..layout.group_dims[group]).map(move |column| value(group, *key, column)))
            .collect()
    };
    keys.iter().enumerate().map(of_group).collect()
}

fn values(count: usize, random: &mut SplitMix64) -> Vec<f32> {
    (0..count).map(|_| random.next_u64() as f32 / u64::MAX as f32 - 0.5).collect()
}

/// The results of a piece and the gradients of its rows by key, on this number of servers.
struct Computed {
    total: Partial,
    gradients: Vec<Vec<(u64, Vec<f32>)>>,
    shared_cells: usize,
}

fn compute(piece: &PreparedIds, servers: u16, gradient: &Partial, dim: usize) -> Computed {
    let layout = layout(dim);
    let substitution = Substitution { features: POOLINGS.len(), dim };
    let parts = ServerIds::divide(piece, &SlotMap::even(64, servers), &layout, Some(substitution));
    assert_eq!(parts.len(), usize::from(servers));
    let cells: Vec<_> = parts.iter().map(ServerIds::cells).collect();
    // Each server sees only the tensors of its message.
    let prepared: Vec<_> = parts
        .iter()
        .map(|part| {
            let read = ServerIds::from_tensors("lookup", part.to_tensors(), SAMPLES as u32, &layout).unwrap();
            assert_eq!(read, *part);
            read.prepare(SAMPLES as u32, &layout)
        })
        .collect();
    let rows: Vec<_> = prepared.iter().map(|ids| rows_of(ids.keys(), &layout)).collect();
    let results: Vec<ServerResults> = prepared
        .iter()
        .zip(&rows)
        .map(|(ids, rows)| {
            let results = ids.reduce(rows, &layout, substitution);
            let mut tensors = results.clone().into_tensors(substitution).into_iter();
            let sizes = (SAMPLES, ids.shared_cells());
            assert_eq!(ServerResults::from_tensors("lookup", &mut tensors, substitution, sizes).unwrap(), results);
            results
        })
        .collect();
    let (total, whole) = ServerResults::sum(results, &cells, substitution);
    let mut gradients = vec![Vec::new(); 2];
    for ((ids, rows), vectors) in prepared.iter().zip(&rows).zip(whole) {
        let gradient = ServerResults { partial: gradient.clone(), vectors };
        let of_groups = ids.gradients(rows, &gradient, &layout, substitution);
        for (group, (keys, values)) in ids.keys().iter().zip(of_groups).enumerate() {
            let of_keys = keys.iter().zip(values.chunks_exact(dim + 1)).map(|(key, values)| (*key, values.to_vec()));
            gradients[group].extend(of_keys);
        }
    }
    gradients.iter_mut().for_each(|group| group.sort_by_key(|(key, _)| *key));
    Computed { total, gradients, shared_cells: cells.iter().map(|cells| cells.len()).sum() }
}

/// The results and the gradients of the whole piece, with the functions of `sync`'s path.
fn whole(piece: &PreparedIds, gradient: &Partial, dim: usize) -> Computed {
    let layout = layout(dim);
    let substitution = Substitution { features: POOLINGS.len(), dim };
    let pooled = piece.pool(&rows_of(piece.keys(), &layout), &layout);
    let spread = substitution.spread(gradient, &pooled.embeddings);
    let gradients = rectrain_protocol::layout::Pooled { embeddings: spread.embeddings, linear: spread.linear };
    let of_keys = |(keys, values): (&Vec<u64>, Vec<f32>)| {
        keys.iter().zip(values.chunks_exact(dim + 1)).map(|(key, values)| (*key, values.to_vec())).collect()
    };
    Computed {
        total: substitution.reduce(SAMPLES, &pooled.linear, &pooled.embeddings),
        gradients: piece.keys().iter().zip(piece.scatter(&gradients, &layout)).map(of_keys).collect(),
        shared_cells: 0,
    }
}

fn assert_close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 1e-5 * (1.0 + expected.abs()), "{found}, not {expected}");
    }
}

#[test]
fn the_parts_of_several_servers_sum_to_the_whole_piece() {
    let mut random = SplitMix64::new(3);
    for dim in [0, 1, 4] {
        for most in [1, 4] {
            let piece = piece(&layout(dim), most, &mut random);
            let columns = if dim == 0 { 0 } else { dim + 1 };
            let gradient =
                Partial { first: values(SAMPLES, &mut random), second: values(SAMPLES * columns, &mut random) };
            let expected = whole(&piece, &gradient, dim);
            for servers in [1, 2, 3, 7] {
                let found = compute(&piece, servers, &gradient, dim);
                assert_close(&found.total.first, &expected.total.first);
                assert_close(&found.total.second, &expected.total.second);
                for (found, expected) in found.gradients.iter().zip(&expected.gradients) {
                    assert_eq!(found.len(), expected.len(), "each key has one server");
                    for ((key, found), (expected_key, expected)) in found.iter().zip(expected) {
                        assert_eq!(key, expected_key);
                        assert_close(found, expected);
                    }
                }
                assert_eq!(found.shared_cells > 0, servers > 1 && most > 1 && dim > 0);
            }
        }
    }
}

#[test]
fn one_server_computes_the_whole_piece_to_the_bit() {
    let mut random = SplitMix64::new(5);
    for dim in [0, 4] {
        let piece = piece(&layout(dim), 3, &mut random);
        let columns = if dim == 0 { 0 } else { dim + 1 };
        let gradient = Partial { first: values(SAMPLES, &mut random), second: values(SAMPLES * columns, &mut random) };
        let (found, expected) = (compute(&piece, 1, &gradient, dim), whole(&piece, &gradient, dim));
        assert_eq!(found.total, expected.total);
        assert_eq!(found.gradients, expected.gradients);
    }
}

/// The refusal of a part's tensors after a change.
fn refusal(part: &ServerIds, change: impl FnOnce(&mut Vec<Tensor>)) -> String {
    let mut tensors = part.to_tensors();
    change(&mut tensors);
    ServerIds::from_tensors("lookup", tensors, SAMPLES as u32, &layout(2)).unwrap_err().to_string()
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let layout = layout(2);
    let substitution = Substitution { features: POOLINGS.len(), dim: 2 };
    let piece = piece(&layout, 3, &mut SplitMix64::new(7));
    let part = ServerIds::divide(&piece, &SlotMap::even(64, 2), &layout, Some(substitution)).remove(0);
    assert!(refusal(&part, |tensors| drop(tensors.pop())).contains("13"));
    assert!(refusal(&part, |tensors| tensors.swap(0, 1)).contains("unique keys"));
    assert!(refusal(&part, |tensors| tensors[3] = Tensor::from(vec![1.0f32; 3])).contains("3 weights"));
    let last = part.to_tensors().len() - 1;
    for cells in [vec![0u32], vec![3, 0], vec![0, SAMPLES as u32]] {
        let reason = refusal(&part, |tensors| tensors[last] = Tensor::from(cells.clone()));
        assert!(reason.contains("below 3"), "{reason}");
    }
    let results =
        ServerResults { partial: Partial { first: vec![0.0; SAMPLES - 1], second: Vec::new() }, vectors: Vec::new() };
    let mut tensors = results.into_tensors(substitution).into_iter();
    ServerResults::from_tensors("lookup", &mut tensors, substitution, (SAMPLES, 0)).unwrap_err();
}
