//! The figures of a profile, as its JSON has them. Pure.

use std::collections::BTreeMap;

use rectrain_data::profile::{ClockSummary, DenseSummary, LabelSummary, Profile, SparseSummary, TOP_SHARES};
use rectrain_data::profile::{exact_ids, memory_bound};
use rectrain_embedding::RowBytes;
use rectrain_kinds::Schema;
use rectrain_protocol::plan::JobPlan;
use serde::Serialize;

use super::advice::Proposal;

/// The probabilities of admission whose outcome is computed (Kraken, Fig. 9).
const PROBABILITIES: [f64; 3] = [0.5, 0.1, 0.03];
/// The most frequent ids whose share of the look-ups is shown.
pub(super) const TOP: f64 = 0.01;

/// Everything that a profile tells.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Figures {
    pub(super) job: String,
    pub(super) read: Read,
    pub(super) label: Label,
    /// `null` without a column of event times.
    pub(super) time: Option<Time>,
    pub(super) features: Vec<Feature>,
    pub(super) dense: Vec<Dense>,
    pub(super) tables: Total,
    /// The most ids of a feature that are counted exactly.
    pub(super) exact_ids: usize,
    /// The most memory that counting may take.
    pub(super) memory_bound_bytes: usize,
    pub(super) warnings: Vec<String>,
    pub(super) proposal: Proposal,
}

/// The rows that were read.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Read {
    pub(super) rows: u64,
    /// Whether they are all training rows.
    pub(super) is_all: bool,
    /// All training rows; estimated if not all were read.
    pub(super) all_rows: u64,
    /// Bad rows that were left out.
    pub(super) bad_rows: u64,
    pub(super) files: u64,
    pub(super) seconds: f64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Label {
    pub(super) name: String,
    /// The mean label.
    pub(super) rate: f64,
    pub(super) zeros: u64,
    pub(super) ones: u64,
    /// Rows with a label between 0 and 1.
    pub(super) between: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Time {
    pub(super) column: String,
    /// Seconds since 1970.
    pub(super) first_seconds: u64,
    pub(super) last_seconds: u64,
    pub(super) span_seconds: u64,
    /// The share of the rows with an earlier time than some row before.
    pub(super) late_share: f64,
}

/// A sparse feature.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Feature {
    pub(super) name: String,
    pub(super) table: String,
    pub(super) look_ups: u64,
    pub(super) missing_rows: u64,
    pub(super) missing_share: f64,
    pub(super) ids: u64,
    /// The standard error of `ids` and of `levels`, as a share; 0 if they are exact.
    pub(super) error: f64,
    pub(super) seen_once: u64,
    pub(super) levels: Vec<FrequencyLevel>,
    /// The share of the look-ups by the most frequent 1 % of the ids.
    pub(super) top_share: f64,
    pub(super) coverage: Vec<Coverage>,
    /// `null` without event times, or without an id that is seen twice.
    pub(super) gap_seconds: Option<u64>,
    pub(super) gaps: u64,
    /// `null` if all labels are equal.
    pub(super) auc: Option<f64>,
    pub(super) row_bytes: BytesOfRow,
    /// Rows of the table. Features that share a table share its rows, by their numbers of ids.
    pub(super) rows: u64,
    pub(super) bytes: u64,
    pub(super) admission: Vec<Admission>,
}

/// The ids with `from` to 2·`from` − 1 look-ups.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FrequencyLevel {
    pub(super) from: u64,
    pub(super) ids: u64,
    pub(super) look_ups: u64,
}

/// The share of the look-ups by the most frequent `top` of the ids.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Coverage {
    pub(super) top: f64,
    pub(super) look_ups: f64,
}

/// The bytes of a row.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct BytesOfRow {
    pub(super) values: u64,
    pub(super) optimizer: u64,
    pub(super) own: u64,
    pub(super) total: u64,
}

/// The expected outcome of an admission by chance.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Admission {
    pub(super) probability: f64,
    pub(super) rows: f64,
    /// The share of the look-ups that read initial values, beyond the first one of each id.
    pub(super) without_row: f64,
}

/// A dense feature, after its transform.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Dense {
    pub(super) name: String,
    pub(super) min: f32,
    pub(super) max: f32,
    pub(super) mean: f64,
    /// The share of the rows with the value that stands for a missing one.
    pub(super) at_missing_share: f64,
    pub(super) auc: Option<f64>,
}

/// All tables, each counted once.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Total {
    pub(super) rows: u64,
    pub(super) bytes: u64,
}

/// The bytes of a row of each sparse feature.
pub(super) struct Widths {
    /// As the manifest has it.
    pub(super) now: Vec<RowBytes>,
    /// With a budget, which changes the default optimizer. `None` if the job can have no budget.
    pub(super) in_budget: Option<Vec<RowBytes>>,
}

impl Figures {
    /// The figures without warnings and proposal.
    pub(super) fn new(plan: &JobPlan, schema: &Schema, profile: &Profile, read: Read, widths: &Widths) -> Self {
        let summary = profile.finish();
        let rows = summary.labels.rows;
        let rows_by_feature = rows_by_feature(plan, profile, &summary.sparse);
        let columns = schema.sparse.iter().zip(&summary.sparse).enumerate();
        let features: Vec<Feature> = columns
            .zip(widths.now.iter().zip(rows_by_feature))
            .map(|((at, (field, found)), (width, table_rows))| {
                let admission = admissions(profile, at, found);
                let names = (field.name.clone(), field.table.clone());
                feature(names, found, rows, (*width, table_rows), admission)
            })
            .collect();
        let dense = schema.dense.iter().zip(&summary.dense);
        let sum = |of: fn(&Feature) -> u64| features.iter().map(of).sum::<u64>();
        Self {
            job: plan.name.clone(),
            label: label(&schema.label.name, &summary.labels),
            time: schema.time.as_ref().zip(summary.clock).map(|(field, clock)| time(&field.name, &clock, rows)),
            dense: dense.map(|(field, found)| dense_feature(&field.name, found, rows)).collect(),
            tables: Total { rows: sum(|feature| feature.rows), bytes: sum(|feature| feature.bytes) },
            exact_ids: exact_ids(schema.sparse.len()),
            memory_bound_bytes: memory_bound(schema.sparse.len(), schema.dense.len()),
            features,
            read,
            warnings: Vec::new(),
            proposal: Proposal::default(),
        }
    }
}

/// The rows of each feature's table. Features that share a table divide its rows by their numbers
/// of ids. A hashed table has no more rows than the manifest says.
fn rows_by_feature(plan: &JobPlan, profile: &Profile, found: &[SparseSummary]) -> Vec<u64> {
    let mut tables: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, field) in plan.schema.sparse.iter().enumerate() {
        tables.entry(&field.table).or_default().push(at);
    }
    let mut rows = vec![0; found.len()];
    for features in tables.values() {
        let buckets = features.iter().filter_map(|at| plan.schema.sparse[*at].hash_buckets).min();
        let of_table = profile.ids_of_table(features).min(buckets.unwrap_or(u64::MAX));
        let ids: u64 = features.iter().map(|at| found[*at].ids).sum();
        for at in features {
            rows[*at] = (found[*at].ids as f64 * of_table as f64 / ids.max(1) as f64).round() as u64;
        }
    }
    rows
}

fn share(part: u64, all: u64) -> f64 {
    part as f64 / all.max(1) as f64
}

fn label(name: &str, found: &LabelSummary) -> Label {
    let between = found.rows - found.zeros - found.ones;
    Label { name: name.to_owned(), rate: found.mean(), zeros: found.zeros, ones: found.ones, between }
}

fn time(column: &str, found: &ClockSummary, rows: u64) -> Time {
    Time {
        column: column.to_owned(),
        first_seconds: found.first,
        last_seconds: found.last,
        span_seconds: found.span(),
        late_share: share(found.late_rows, rows),
    }
}

fn admissions(profile: &Profile, at: usize, found: &SparseSummary) -> Vec<Admission> {
    let of = |probability: f64| {
        let admitted = profile.admitted(at, probability);
        let without_row = admitted.look_ups_without_row / found.look_ups.max(1) as f64;
        Admission { probability, rows: admitted.rows, without_row }
    };
    PROBABILITIES.map(of).to_vec()
}

/// The figures of the feature of this name and table, of `rows` rows, with the width and the number
/// of its table's rows.
fn feature(
    (name, table): (String, String),
    found: &SparseSummary,
    rows: u64,
    (width, table_rows): (RowBytes, u64),
    admission: Vec<Admission>,
) -> Feature {
    let level = |(at, level): (usize, &rectrain_data::profile::Level)| FrequencyLevel {
        from: 1 << at,
        ids: level.ids,
        look_ups: level.look_ups,
    };
    let shares = TOP_SHARES.into_iter().zip(found.shares_of_top.iter().copied());
    let coverage: Vec<Coverage> = shares.map(|(top, look_ups)| Coverage { top, look_ups }).collect();
    Feature {
        name,
        table,
        look_ups: found.look_ups,
        missing_rows: found.missing_rows,
        missing_share: share(found.missing_rows, rows),
        ids: found.ids,
        error: found.error,
        seen_once: found.ids_seen_once(),
        levels: found.levels.iter().enumerate().map(level).collect(),
        top_share: coverage.iter().find(|point| point.top == TOP).map_or(0.0, |point| point.look_ups),
        coverage,
        gap_seconds: found.gap_seconds,
        gaps: found.gaps,
        auc: found.auc,
        row_bytes: BytesOfRow { values: width.values, optimizer: width.state, own: width.own, total: width.total() },
        rows: table_rows,
        bytes: table_rows * width.total(),
        admission,
    }
}

fn dense_feature(name: &str, found: &DenseSummary, rows: u64) -> Dense {
    Dense {
        name: name.to_owned(),
        min: found.min,
        max: found.max,
        mean: found.mean,
        at_missing_share: share(found.at_missing, rows),
        auc: found.auc,
    }
}

/// Figures for the tests of the other modules.
#[cfg(test)]
pub(super) mod examples {
    use super::*;

    /// A feature of 10 ids that are seen 100 times each.
    pub(in super::super) fn feature(name: &str) -> Feature {
        Feature {
            name: name.to_owned(),
            table: name.to_owned(),
            look_ups: 1_000,
            missing_rows: 0,
            missing_share: 0.0,
            ids: 10,
            error: 0.0,
            seen_once: 0,
            levels: vec![FrequencyLevel { from: 64, ids: 10, look_ups: 1_000 }],
            top_share: 0.1,
            coverage: vec![Coverage { top: TOP, look_ups: 0.1 }],
            gap_seconds: None,
            gaps: 0,
            auc: Some(0.6),
            row_bytes: BytesOfRow { values: 64, optimizer: 4, own: 22, total: 90 },
            rows: 10,
            bytes: 900,
            admission: Vec::new(),
        }
    }

    /// 1,000 rows over 10 days, half of them positive.
    pub(in super::super) fn figures(features: Vec<Feature>) -> Figures {
        let (rows, bytes) = features.iter().fold((0, 0), |(rows, bytes), f| (rows + f.rows, bytes + f.bytes));
        let days = 10 * 86_400;
        Figures {
            job: "test".to_owned(),
            read: Read { rows: 1_000, is_all: true, all_rows: 1_000, bad_rows: 0, files: 1, seconds: 0.1 },
            label: Label { name: "label".to_owned(), rate: 0.5, zeros: 500, ones: 500, between: 0 },
            time: Some(Time {
                column: "t".to_owned(),
                first_seconds: 1_700_000_000,
                last_seconds: 1_700_000_000 + days,
                span_seconds: days,
                late_share: 0.0,
            }),
            features,
            dense: Vec::new(),
            tables: Total { rows, bytes },
            exact_ids: 917_504,
            memory_bound_bytes: 1 << 20,
            warnings: Vec::new(),
            proposal: Proposal::default(),
        }
    }
}
