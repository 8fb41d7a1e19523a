//! The statistics against a naive reference, which keeps all rows and looks at them again for each
//! figure.

use rectrain_kinds::{DenseField, LabelField, MissingValue, TimeField, TimeUnit, Transform};
use rectrain_random::SplitMix64;

use super::*;

/// A row as plain values.
#[derive(Clone)]
struct Row {
    user: Option<u64>,
    tags: Vec<u64>,
    price: f32,
    label: f32,
    time: u64,
}

fn schema() -> Schema {
    let field = |name: &str, multi_value: Option<String>| SparseField {
        name: name.into(),
        table: name.into(),
        multi_value,
        missing: MissingValue::Token,
        hash_buckets: None,
    };
    Schema {
        sparse: vec![field("user", None), field("tags", Some("|".into()))],
        dense: vec![DenseField { name: "price".into(), transform: Transform::Identity, missing: 0.0, limit: 1e15 }],
        label: LabelField::of_numbers("y", None),
        group: None,
        time: Some(TimeField { name: "t".into(), unit: TimeUnit::Seconds, order: None }),
    }
}

/// The keys of a sparse feature, whose table has its name.
fn table(feature: usize) -> TableKeys {
    TableKeys::new(["user", "tags"][feature], None)
}

fn key(feature: usize, id: u64) -> u64 {
    table(feature).unsigned(id)
}

/// The keys of a feature in a row.
fn keys(feature: usize, row: &Row) -> Vec<u64> {
    match feature {
        0 => vec![row.user.map_or(table(0).missing(), |user| key(0, user))],
        _ => row.tags.iter().map(|tag| key(1, *tag)).collect(),
    }
}

fn batch(rows: &[Row]) -> Batch {
    let mut batch = Batch::of_schema(&schema());
    for row in rows {
        batch.sparse[0].keys.extend(keys(0, row));
        batch.sparse[1].keys.extend(keys(1, row));
        let end = batch.sparse[1].keys.len() as u32;
        batch.sparse[1].offsets.as_mut().unwrap().push(end);
        batch.dense.push(row.price);
        batch.labels.push(row.label);
        batch.times.as_mut().unwrap().push(row.time);
        batch.samples += 1;
    }
    batch
}

fn rows(count: u64) -> Vec<Row> {
    let mut random = SplitMix64::new(5);
    (0..count)
        .map(|at| {
            let user = random.below(1 + random.nth(0) % 90);
            let likes = random.below(10) < user % 10;
            Row {
                user: (random.below(20) > 0).then_some(user),
                tags: (0..random.below(4)).map(|_| random.below(30)).collect(),
                price: random.below(9) as f32 * 1.5,
                label: f32::from(u8::from(likes)),
                // Now and then a row is late.
                time: 1_000_000 + at * 60 - random.below(2) * random.below(200),
            }
        })
        .collect()
}

/// The statistics of rows in batches of unequal sizes.
fn profile(rows: &[Row]) -> Profile {
    let mut profile = Profile::new(&schema());
    let mut rest = rows;
    for size in (1..).step_by(7) {
        let (now, later) = rest.split_at(rest.len().min(size));
        profile.push(&batch(now));
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    profile
}

/// The gaps of an id's sightings, each from the latest time of the earlier ones.
fn naive_gaps(feature: usize, rows: &[Row]) -> Vec<u64> {
    let mut gaps = Vec::new();
    for (at, row) in rows.iter().enumerate() {
        for (place, key) in keys(feature, row).iter().enumerate() {
            let in_row = keys(feature, row)[..place].contains(key).then_some(row.time);
            let earlier = rows[..at].iter().filter(|other| keys(feature, other).contains(key)).map(|other| other.time);
            if let Some(last) = earlier.chain(in_row).max() {
                gaps.push(row.time.saturating_sub(last));
            }
        }
    }
    gaps.sort_unstable();
    gaps
}

/// The AUC of the mean label of the other half's rows with the same value: all pairs of look-ups.
fn naive_auc(values: impl Fn(&Row) -> Vec<u64>, rows: &[Row]) -> f64 {
    let look_ups: Vec<(usize, u64, f64)> = (0..)
        .zip(rows)
        .flat_map(|(at, row)| values(row).into_iter().map(move |value| (half(at), value, f64::from(row.label))))
        .collect();
    let mean = look_ups.iter().map(|look_up| look_up.2).sum::<f64>() / look_ups.len() as f64;
    let score = |(half, value, _): &(usize, u64, f64)| {
        let others: Vec<f64> = look_ups.iter().filter(|o| o.0 != *half && o.1 == *value).map(|o| o.2).collect();
        ((others.iter().sum::<f64>() + 4.0 * mean) / (others.len() as f64 + 4.0) * 1024.0).floor()
    };
    let scored: Vec<(f64, f64)> = look_ups.iter().map(|look_up| (score(look_up), look_up.2)).collect();
    let (mut ordered, mut pairs) = (0.0, 0.0);
    for (a, _) in scored.iter().filter(|(_, label)| *label == 1.0) {
        for (b, _) in scored.iter().filter(|(_, label)| *label == 0.0) {
            ordered += if a > b { 1.0 } else { f64::from(u8::from(a == b)) / 2.0 };
            pairs += 1.0;
        }
    }
    ordered / pairs
}

#[test]
fn every_figure_agrees_with_a_naive_reference() {
    let rows = rows(700);
    let summary = profile(&rows).finish();
    let ones = rows.iter().filter(|row| row.label == 1.0).count() as u64;
    assert!(ones > 100 && ones < 600);
    assert_eq!(summary.labels, LabelSummary { rows: 700, zeros: 700 - ones, ones, sum: ones as f64 });
    let times = || rows.iter().map(|row| row.time);
    let late_rows = (1..rows.len()).filter(|at| rows[..*at].iter().any(|row| row.time > rows[*at].time)).count() as u64;
    let clock = ClockSummary { first: times().min().unwrap(), last: times().max().unwrap(), late_rows };
    assert_eq!((summary.clock, late_rows > 0), (Some(clock), true));
    for (feature, found) in summary.sparse.iter().enumerate() {
        let all: Vec<u64> = rows.iter().flat_map(|row| keys(feature, row)).collect();
        let distinct: std::collections::BTreeSet<u64> = all.iter().copied().collect();
        assert_eq!((found.look_ups, found.ids), (all.len() as u64, distinct.len() as u64));
        let missing = rows.iter().filter(|row| if feature == 0 { row.user.is_none() } else { row.tags.is_empty() });
        assert_eq!(found.missing_rows, missing.count() as u64);
        let gaps = naive_gaps(feature, &rows);
        let exact = gaps[(gaps.len() as f64 * 0.999).ceil() as usize - 1];
        let gap = found.gap_seconds.unwrap();
        assert_eq!(found.gaps, gaps.len() as u64);
        assert!(gap >= exact && gap <= exact + exact / 32, "{gap}, not {exact}");
        let auc = naive_auc(|row| keys(feature, row), &rows);
        assert!((found.auc.unwrap() - auc).abs() < 1e-9, "{:?}, not {auc}", found.auc);
    }
    assert!(summary.sparse[0].auc.unwrap() > 0.55, "the user tells something");
}

#[test]
fn dense_features_agree_with_a_naive_reference() {
    let rows = rows(500);
    let found = profile(&rows).finish().dense[0];
    assert_eq!((found.min, found.max), (0.0, 12.0));
    let sum: f64 = rows.iter().map(|row| f64::from(row.price)).sum();
    assert!((found.mean - sum / 500.0).abs() < 1e-9);
    assert_eq!(found.at_missing, rows.iter().filter(|row| row.price == 0.0).count() as u64);
    // No two of the prices have the same sign, exponent and 3 bits of the mantissa.
    let auc = naive_auc(|row| vec![u64::from(row.price.to_bits())], &rows);
    assert!((found.auc.unwrap() - auc).abs() < 1e-9);
}

#[test]
fn a_feature_that_tells_the_label_has_an_auc_near_1() {
    let mut rows = rows(2_000);
    for row in &mut rows {
        row.user = Some(7 + row.label as u64);
        row.price = 3.0 - row.label;
    }
    let summary = profile(&rows).finish();
    assert!(summary.sparse[0].auc.unwrap() > 0.99 && summary.dense[0].auc.unwrap() > 0.99);
    assert!((summary.sparse[1].auc.unwrap() - 0.5).abs() < 0.1);
}

#[test]
fn an_id_of_its_own_in_every_row_tells_nothing() {
    let mut rows = rows(2_000);
    for (at, row) in rows.iter_mut().enumerate() {
        row.user = Some(1_000 + at as u64);
    }
    let found = profile(&rows).finish().sparse[0].clone();
    assert_eq!((found.ids, found.ids_seen_once(), found.gap_seconds), (2_000, 2_000, None));
    assert_eq!(found.auc, Some(0.5));
}

#[test]
fn the_order_of_the_rows_does_not_count() {
    let aucs = |rows: &[Row]| {
        let summary = profile(rows).finish();
        [summary.sparse[0].auc, summary.sparse[1].auc, summary.dense[0].auc].map(Option::unwrap)
    };
    let rows = rows(3_000);
    let mut sorted = rows.clone();
    sorted.sort_by(|a, b| a.label.total_cmp(&b.label));
    for (found, by_label) in aucs(&rows).into_iter().zip(aucs(&sorted)) {
        assert!((found - by_label).abs() < 0.05, "{found}, sorted {by_label}");
    }
}

#[test]
fn features_of_one_table_share_ids() {
    let rows = rows(300);
    // The tags are ids of the users' table.
    let mut batch = batch(&rows);
    batch.sparse[1].keys = rows.iter().flat_map(|row| row.tags.iter().map(|tag| key(0, *tag))).collect();
    let mut profile = Profile::new(&schema());
    profile.push(&batch);
    let of = |features: &[usize]| {
        let keys = features.iter().flat_map(|feature| &batch.sparse[*feature].keys);
        keys.collect::<std::collections::BTreeSet<_>>().len() as u64
    };
    assert!(of(&[0, 1]) < of(&[0]) + of(&[1]));
    for features in [&[0][..], &[1], &[0, 1]] {
        assert_eq!(profile.ids_of_table(features), of(features), "{features:?}");
    }
}

#[test]
fn memory_is_bounded_for_any_number_of_features() {
    assert_eq!((exact_ids(1), exact_ids(8), exact_ids(9), exact_ids(26)), (917_504, 917_504, 458_752, 229_376));
    assert_eq!(exact_ids(100_000), 3_584);
    assert!((1..600).all(|features| memory_bound(features, 0) < 350 << 20));
}
