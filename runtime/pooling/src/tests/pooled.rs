//! Row groups that servers pool against the whole piece on the embedding worker.

use rectrain_kinds::Compression;
use rectrain_protocol::layout::Pooled;

use super::*;

#[test]
fn the_bytes_equal_hand_computed_ones() {
    let piece = PieceSize { samples: 100, servers: 2, compression: Compression::None };
    let one = GroupSize {
        keys: 1000,
        row_columns: 9,
        features: 1,
        ids: 1000,
        occurrences: 5000,
        weighted: 0,
        embeddings: 8,
        linear: 1,
    };
    // Keys and values of 9 columns, twice.
    assert_eq!(one.row_bytes(piece), 2 * (8_000 + 36_000));
    // Ids, and on both servers 164 bytes and twice the sums of 9 columns.
    assert_eq!(one.pooled_bytes(piece), 12_000 + 10_000 + 2 * (164 + 2 * 3_600));
    let mean = GroupSize { weighted: 1, ..one };
    assert_eq!(mean.pooled_bytes(piece), one.pooled_bytes(piece) + 2 * 400);
    // A scale for each row, and for each sample in embeddings and in first-order weights.
    let halves = PieceSize { compression: Compression::Fp16, ..piece };
    assert_eq!(one.row_bytes(halves), 2 * (8_000 + 18_000 + 4_000));
    assert_eq!(one.pooled_bytes(halves), 22_000 + 2 * (164 + 2 * (2_000 + 600)));
    let shared = GroupSize { features: 2, ids: 1500, embeddings: 16, linear: 2, ..one };
    assert_eq!(shared.row_bytes(piece), one.row_bytes(piece));
    assert_eq!(shared.pooled_bytes(piece), 18_000 + 10_000 + 2 * (328 + 2 * 7_200));
    let narrow = PieceSize { samples: 65_536, ..piece };
    let wide = PieceSize { samples: 65_537, ..piece };
    assert_eq!(one.pooled_bytes(narrow), 22_000 + 2 * (164 + 2 * 36 * 65_536));
    assert_eq!(one.pooled_bytes(wide), 32_000 + 2 * (164 + 2 * 36 * 65_537));
    let without_embeddings = GroupSize { row_columns: 1, embeddings: 0, ..one };
    assert_eq!(without_embeddings.pooled_bytes(piece), 22_000 + 2 * (164 + 2 * 400));
    assert_eq!((GroupSize::default().row_bytes(piece), GroupSize::default().pooled_bytes(piece)), (0, 0));
}

/// The table of docs/development/substitution.md: 8,192 samples of 25 features of 38 ids.
#[test]
fn the_bytes_saved_for_long_lists_equal_the_documented_ones() {
    let saved = |dim: u64, servers: u64| {
        let piece = PieceSize { samples: 8_192, servers, compression: Compression::None };
        let group = GroupSize {
            keys: 1_368_316,
            row_columns: dim + 1,
            features: 25,
            ids: 1_368_316,
            occurrences: 25 * 38 * 8_192,
            weighted: 25,
            embeddings: 25 * dim,
            linear: 25,
        };
        100.0 * (1.0 - group.pooled_bytes(piece) as f64 / group.row_bytes(piece) as f64)
    };
    for (dim, documented) in [(8, [60.5, 47.6, 21.7, -30.0]), (32, [77.3, 63.0, 34.3, -23.0])] {
        for (servers, expected) in [1, 2, 4, 8].into_iter().zip(documented) {
            let found = saved(dim, servers);
            assert!((found - expected).abs() < 0.1, "d = {dim}, {servers} servers: {found} %");
        }
    }
}

/// Forty samples with one of two ids in group 0, and with fifty ids each in group 1.
fn lists() -> (FeatureLayout, PreparedIds) {
    let place = |feature| FeaturePlace { group: feature, dim: 8, offset: 8 * feature, pooling: Pooling::Sum };
    let layout = FeatureLayout {
        features: vec![place(0), place(1)],
        group_dims: vec![8; 2],
        linear: false,
        embedding_width: 16,
    };
    let few: Vec<u64> = (0..SAMPLES as u64).map(|sample| sample % 2).collect();
    let many: Vec<u64> = (0..50 * SAMPLES as u64).map(|key| key << 32).collect();
    let offsets: Vec<u32> = (0..=SAMPLES as u32).map(|sample| 50 * sample).collect();
    let ids = |keys, offsets| UniqueIds::from_column(keys, offsets, SAMPLES, &mut Scratch::default()).unwrap();
    let piece = PreparedIds::new(SAMPLES, vec![ids(&few, None), ids(&many, Some(&offsets))], &layout);
    (layout, piece)
}

#[test]
fn servers_pool_the_groups_that_this_makes_smaller() {
    let (layout, piece) = lists();
    let decide = |servers| PooledGroups::by_size(&piece, &layout, servers, Compression::None);
    let BySize { groups, saved_bytes } = decide(3).unwrap();
    assert_eq!((groups.numbers(), groups.layout().embedding_width), (vec![1], 8));
    // 2000 keys of one occurrence. Three servers return sums of 40 samples.
    assert_eq!(saved_bytes, 2000 * (16 + 64) - 2000 * (12 + 2) - 3 * (164 + 2 * 32 * 40));
    assert_eq!(decide(3), decide(3));
    assert!(decide(40).is_some() && decide(60).is_none(), "with many servers, sums are larger than rows");
}

/// The pooled piece, and the gradients of its rows by group and key, if servers pool `groups`.
/// Leaves out the sums of the servers from number `missing` on.
fn on_servers(
    piece: &PreparedIds,
    layout: &FeatureLayout,
    (groups, servers, missing): (&PooledGroups, u16, usize),
    gradients: &Pooled,
) -> (Pooled, Vec<Vec<f32>>) {
    let map = SlotMap::even(64, servers);
    let parts = ServerIds::divide_groups(piece, &map, layout, groups);
    assert_eq!(parts.len(), usize::from(servers));
    // Each server sees only the tensors of its message.
    let read = |part: &ServerIds| {
        let ids = ServerIds::from_tensors("lookup", part.to_tensors(), SAMPLES as u32, groups.layout()).unwrap();
        assert_eq!(ids, *part);
        ids.prepare(SAMPLES as u32, groups.layout())
    };
    let prepared: Vec<PreparedServerIds> = parts.iter().map(read).collect();
    let sums = prepared.iter().take(missing).map(|ids| ids.pool(&rows_of(ids.keys(), layout), groups.layout()));
    let sums = PooledGroups::sum(sums.collect());
    let mut rows = rows_of(piece.keys(), layout);
    rows.iter_mut().enumerate().filter(|(group, _)| groups.contains(*group)).for_each(|(_, rows)| rows.clear());
    let pooled = groups.pool(piece, &rows, &sums, layout);
    let (mut of_rows, of_sums) = groups.scatter(piece, gradients, layout);
    let of_servers: Vec<_> = prepared.iter().map(|ids| ids.scatter(&of_sums, groups.layout())).collect();
    for (group, of_group) in of_rows.iter_mut().enumerate().filter(|(group, _)| groups.contains(*group)) {
        assert!(of_group.is_empty(), "its gradients come from the servers");
        // Slots are ranges of keys, so the keys of one server follow the keys of the one before.
        let keys: Vec<u64> = prepared.iter().flat_map(|ids| ids.keys()[group].clone()).collect();
        assert_eq!(keys, piece.keys()[group]);
        of_group.extend(of_servers.iter().flat_map(|groups| &groups[group]));
    }
    (pooled, of_rows)
}

#[test]
fn servers_pool_what_the_embedding_worker_pools() {
    let mut random = SplitMix64::new(11);
    for (dim, linear) in [(4, true), (3, false), (0, true)] {
        let layout = FeatureLayout { linear, group_dims: vec![dim + usize::from(linear); 2], ..layout(dim) };
        let piece = piece(&layout, 5, &mut random);
        let widths = layout.pooled_widths();
        let gradients = Pooled {
            embeddings: values(SAMPLES * widths.embeddings, &mut random),
            linear: values(SAMPLES * widths.linear, &mut random),
        };
        let expected = piece.pool(&rows_of(piece.keys(), &layout), &layout);
        let expected_rows = piece.scatter(&gradients, &layout);
        for numbers in [&[0][..], &[1], &[0, 1]] {
            let groups = PooledGroups::read("lookup", numbers, &layout).unwrap();
            assert_eq!(groups.numbers(), numbers);
            for servers in [1, 2, 3, 5] {
                let all = (&groups, servers, usize::from(servers));
                let (pooled, rows) = on_servers(&piece, &layout, all, &gradients);
                assert_close(&pooled.embeddings, &expected.embeddings);
                assert_close(&pooled.linear, &expected.linear);
                // A row is on one server, which has all its occurrences.
                assert_eq!(rows, expected_rows, "{servers} servers, groups {numbers:?}");
                assert!(servers > 1 || pooled == expected, "one server has the bits of the embedding worker");
                let without_last = (&groups, servers, usize::from(servers) - 1);
                if servers > 1 {
                    let (found, _) = on_servers(&piece, &layout, without_last, &gradients);
                    let difference = |found: &[f32], expected: &[f32]| {
                        found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
                    };
                    let largest = difference(&found.embeddings, &expected.embeddings)
                        .max(difference(&found.linear, &expected.linear));
                    assert!(largest > 0.01, "the sum of a server is missed");
                }
            }
        }
    }
}

#[test]
fn wrong_numbers_of_groups_are_refused() {
    let layout = layout(2);
    for numbers in [&[][..], &[2], &[1, 0], &[0, 0]] {
        let error = PooledGroups::read("update", numbers, &layout).unwrap_err().to_string();
        assert!(error.contains("ascending numbers below 2"), "{error}");
    }
}

#[test]
fn the_ids_of_other_groups_are_refused() {
    let layout = layout(2);
    let piece = piece(&layout, 3, &mut SplitMix64::new(7));
    let [one, both] = [&[1][..], &[0, 1]].map(|numbers| PooledGroups::read("lookup", numbers, &layout).unwrap());
    let part = ServerIds::divide_groups(&piece, &SlotMap::even(64, 2), &layout, &both).remove(0);
    let error = ServerIds::from_tensors("lookup", part.to_tensors(), SAMPLES as u32, one.layout()).unwrap_err();
    assert!(error.to_string().contains('5') && error.to_string().contains("13"), "{error}");
}
