//! Proposes the settings that keep tables within a budget, from the figures of a profile, each with
//! its reason. Pure.

use std::collections::BTreeMap;

use rectrain_embedding::RowBytes;
use serde::Serialize;

use super::figures::{Feature, Figures, Widths};
use crate::human::{bytes, percent, thousands, time_of_seconds};

/// With fewer rows in all tables, a budget is not worth it: slots of few rows evict unevenly.
const LEAST_BUDGET_ROWS: u64 = 30_000;
/// The room of a budget beyond the expected rows.
const ROOM: f64 = 1.25;
/// A feature with fewer ids needs no admission.
const LEAST_ADMISSION_IDS: u64 = 10_000;
/// An admission is proposed if at least this share of the ids occur once.
const ONCE_SHARE: f64 = 0.5;
/// The most look-ups that an admission may leave without a row, as a share.
const MOST_WITHOUT_ROW: f64 = 0.1;
/// Rows of a feature with fewer ids need not expire.
const LEAST_EXPIRY_IDS: u64 = 1_000;
/// Fewer gaps have no 99.9th percentile.
const LEAST_GAPS: u64 = 1_000;
/// The times of the data span at least this many of the longest gaps. Longer gaps would be cut.
const LEAST_GAPS_IN_SPAN: u64 = 2;
const DAY: u64 = 86_400;
const HOUR: u64 = 3_600;
/// The longest `expireAfter` of a manifest.
const MOST_EXPIRY: u64 = 3_650 * DAY;

/// The proposed settings.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Proposal {
    /// `spec.features.memory.maxBytes`
    pub(super) memory: Option<Setting>,
    pub(super) features: Vec<FeatureSettings>,
    /// Why something is not proposed.
    pub(super) notes: Vec<String>,
    /// A fragment of `spec` with the reasons as comments; empty if nothing is proposed.
    pub(super) yaml: String,
}

/// A value of a manifest as YAML, and its reason.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Setting {
    pub(super) value: String,
    pub(super) reason: String,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FeatureSettings {
    pub(super) name: String,
    pub(super) admission: Option<Setting>,
    pub(super) expire_after: Option<Setting>,
}

/// The settings of one table, which all its features get.
#[derive(Default)]
struct TableSettings {
    admission: Option<(f64, Setting)>,
    expire_after: Option<Setting>,
}

/// The proposal for a job with global batches of so many rows.
pub(super) fn propose(figures: &Figures, widths: &Widths, batch_rows: u64) -> Proposal {
    let mut proposal = Proposal::default();
    let Some(in_budget) = &widths.in_budget else {
        let note = "nothing is proposed beside hashBuckets: a hashed table keeps all its rows";
        return Proposal { notes: vec![note.to_owned()], ..proposal };
    };
    let mut expected = Vec::new();
    for features in tables(&figures.features).values() {
        let settings = of_table(features, figures);
        let probability = settings.admission.as_ref().map(|(probability, _)| *probability);
        expected.extend(features.iter().map(|feature| (feature.name.as_str(), expected_rows(feature, probability))));
        if settings.admission.is_some() || settings.expire_after.is_some() {
            proposal.features.extend(features.iter().map(|feature| settings.of(&feature.name)));
        }
    }
    if figures.tables.rows < LEAST_BUDGET_ROWS {
        proposal.notes.push(format!(
            "no memory is proposed: {} rows of {} need no budget, if their ids do not keep coming",
            thousands(figures.tables.rows),
            bytes(figures.tables.bytes)
        ));
    } else {
        let rows = Expected::of(figures, in_budget, &expected.into_iter().collect());
        proposal.memory = Some(memory(figures, &rows, bytes_of_batch(batch_rows, in_budget)));
    }
    proposal.notes.extend(note_on_time(figures));
    proposal.yaml = yaml(&proposal);
    proposal
}

/// The features by their tables.
fn tables(features: &[Feature]) -> BTreeMap<&str, Vec<&Feature>> {
    let mut tables: BTreeMap<&str, Vec<&Feature>> = BTreeMap::new();
    for feature in features {
        tables.entry(&feature.table).or_default().push(feature);
    }
    tables
}

impl TableSettings {
    fn of(&self, name: &str) -> FeatureSettings {
        FeatureSettings {
            name: name.to_owned(),
            admission: self.admission.as_ref().map(|(_, setting)| setting.clone()),
            expire_after: self.expire_after.clone(),
        }
    }
}

fn of_table(features: &[&Feature], figures: &Figures) -> TableSettings {
    TableSettings { admission: admission(features), expire_after: expire_after(features, figures) }
}

/// The rows of a feature's table with this admission.
fn expected_rows(feature: &Feature, probability: Option<f64>) -> f64 {
    let admitted = feature.admission.iter().find(|outcome| Some(outcome.probability) == probability);
    let share = admitted.map_or(1.0, |outcome| outcome.rows / feature.ids.max(1) as f64);
    feature.rows as f64 * share
}

/// The lowest probability at which every feature of the table finds nearly all its rows.
fn admission(features: &[&Feature]) -> Option<(f64, Setting)> {
    let is_rare = |feature: &&Feature| {
        feature.ids >= LEAST_ADMISSION_IDS && feature.seen_once as f64 >= ONCE_SHARE * feature.ids as f64
    };
    let first = features.first().filter(|_| features.iter().all(is_rare))?;
    let probabilities = first.admission.iter().map(|outcome| outcome.probability);
    let finds_rows = |probability: &f64| {
        features.iter().all(|feature| {
            let mut outcomes = feature.admission.iter().filter(|outcome| outcome.probability == *probability);
            outcomes.all(|outcome| outcome.without_row <= MOST_WITHOUT_ROW)
        })
    };
    let probability = probabilities.filter(finds_rows).min_by(f64::total_cmp)?;
    let outcome = first.admission.iter().find(|outcome| outcome.probability == probability)?;
    let reason = format!(
        "{} of the ids occur once; about {} of {} rows remain, and {} of the look-ups more read initial values",
        percent(first.seen_once as f64 / first.ids.max(1) as f64),
        thousands(outcome.rows.round() as u64),
        thousands(first.ids),
        percent(outcome.without_row)
    );
    Some((probability, Setting { value: format!("{{probability: {probability}}}"), reason }))
}

/// The longest of the features' 99.9th percentiles of the time between two sightings (Kraken §V-D).
fn expire_after(features: &[&Feature], figures: &Figures) -> Option<Setting> {
    let span = figures.time.as_ref()?.span_seconds;
    let is_known = |feature: &&Feature| feature.ids >= LEAST_EXPIRY_IDS && feature.gaps >= LEAST_GAPS;
    let gap =
        features.iter().all(is_known).then(|| features.iter().filter_map(|feature| feature.gap_seconds).max())??;
    if gap.saturating_mul(LEAST_GAPS_IN_SPAN) > span || gap > MOST_EXPIRY {
        return None;
    }
    let reason = format!(
        "99.9 % of the gaps between two sightings of an id are at most {}; the data spans {}",
        time_of_seconds(gap as f64),
        time_of_seconds(span as f64)
    );
    Some(Setting { value: duration(gap), reason })
}

/// A time as a manifest has it, rounded up.
fn duration(seconds: u64) -> String {
    match seconds {
        0..HOUR => format!("{}m", seconds.div_ceil(60).max(1)),
        _ if seconds <= 2 * DAY => format!("{}h", seconds.div_ceil(HOUR)),
        _ => format!("{}d", seconds.div_ceil(DAY)),
    }
}

/// Rows and bytes that the proposed settings are expected to leave.
struct Expected {
    rows: f64,
    bytes: f64,
}

impl Expected {
    fn of(figures: &Figures, in_budget: &[RowBytes], rows: &BTreeMap<&str, f64>) -> Self {
        let mut expected = Self { rows: 0.0, bytes: 0.0 };
        for (feature, width) in figures.features.iter().zip(in_budget) {
            let rows = rows.get(feature.name.as_str()).copied().unwrap_or(0.0);
            expected.rows += rows;
            expected.bytes += rows * width.total() as f64;
        }
        expected
    }
}

/// The bytes of the rows that one global batch can need, which a budget must hold.
fn bytes_of_batch(batch_rows: u64, in_budget: &[RowBytes]) -> u64 {
    batch_rows * in_budget.iter().map(|width| width.total()).sum::<u64>()
}

fn memory(figures: &Figures, expected: &Expected, least: u64) -> Setting {
    let wanted = (expected.bytes * ROOM) as u64;
    let mut reason = format!(
        "{} expected rows take {} with their optimizer's state and their own bytes; the rest is room",
        thousands(expected.rows.round() as u64),
        bytes(expected.bytes.round() as u64)
    );
    if wanted < least {
        reason = format!("a global batch can need rows of {} at once; {reason}", bytes(least));
    }
    let read = &figures.read;
    if !read.is_all {
        let (seen_once, look_ups) = figures
            .features
            .iter()
            .fold((0, 0), |(once, all), feature| (once + feature.seen_once, all + feature.look_ups));
        reason += &format!(
            ". These are the ids of {} of about {} rows: about {} of the next look-ups meet a new id, so all rows need more",
            thousands(read.rows),
            thousands(read.all_rows),
            percent(seen_once as f64 / look_ups.max(1) as f64)
        );
    }
    Setting { value: size(wanted.max(least)), reason }
}

/// A number of bytes as a manifest has it, rounded up to two digits.
fn size(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    let (unit, name) = if bytes >= 10 * GIB { (GIB, "Gi") } else { (MIB, "Mi") };
    let mut count = bytes.div_ceil(unit).max(1);
    let step = 10_u64.pow(count.ilog10().saturating_sub(1));
    count = count.div_ceil(step) * step;
    format!("{count}{name}")
}

/// Why no expiry is proposed.
fn note_on_time(figures: &Figures) -> Option<String> {
    let Some(time) = &figures.time else {
        return Some(
            "no expireAfter is proposed: there is no column of event times; name it in spec.data.timeColumn".to_owned(),
        );
    };
    let is_long = |feature: &&Feature| {
        let gap = feature.gap_seconds.filter(|_| feature.ids >= LEAST_EXPIRY_IDS && feature.gaps >= LEAST_GAPS);
        gap.is_some_and(|gap| gap.saturating_mul(LEAST_GAPS_IN_SPAN) > time.span_seconds)
    };
    let long: Vec<&str> = figures.features.iter().filter(is_long).map(|feature| feature.name.as_str()).collect();
    let span = time_of_seconds(time.span_seconds as f64);
    (!long.is_empty()).then(|| {
        let names = long.join(", ");
        format!("no expireAfter is proposed for {names}: the data spans {span}, which is too short for their gaps")
    })
}

/// The fragment of `spec`. Names are quoted, because YAML reads some names as other values.
fn yaml(proposal: &Proposal) -> String {
    let mut yaml = String::new();
    if let Some(Setting { value, reason }) = &proposal.memory {
        yaml += &format!("  # {reason}\n  memory: {{maxBytes: {value}}}\n");
    }
    if !proposal.features.is_empty() {
        yaml += "  sparse:\n";
    }
    for feature in &proposal.features {
        // A string can always be written as JSON, which is YAML.
        let name = serde_json::to_string(&feature.name).unwrap_or_default();
        yaml += &format!("  - name: {name}\n");
        for (field, setting) in [("admission", &feature.admission), ("expireAfter", &feature.expire_after)] {
            if let Some(Setting { value, reason }) = setting {
                yaml += &format!("    # {reason}\n    {field}: {value}\n");
            }
        }
    }
    if yaml.is_empty() { yaml } else { format!("features:\n{yaml}") }
}

#[cfg(test)]
mod tests {
    use super::super::figures::{Admission, examples};
    use super::*;

    fn widths(in_budget: Option<u64>) -> Widths {
        let row = |values| RowBytes { values, state: 4, own: 22 };
        Widths { now: vec![row(64)], in_budget: in_budget.map(|values| vec![row(values)]) }
    }

    /// A feature of many ids, most of them rare, which are seen again within a day.
    fn rare() -> Feature {
        let outcome = |probability, rows, without_row| Admission { probability, rows, without_row };
        Feature {
            ids: 100_000,
            rows: 100_000,
            bytes: 100_000 * 90,
            look_ups: 1_000_000,
            seen_once: 80_000,
            gap_seconds: Some(80_000),
            gaps: 900_000,
            admission: vec![outcome(0.5, 60_000.0, 0.02), outcome(0.1, 25_000.0, 0.08), outcome(0.03, 9_000.0, 0.2)],
            ..examples::feature("query")
        }
    }

    fn figures(features: Vec<Feature>) -> Figures {
        examples::figures(features)
    }

    #[test]
    fn the_lowest_admission_that_finds_its_rows_is_proposed() {
        let proposal = propose(&figures(vec![rare()]), &widths(Some(64)), 4_096);
        let settings = &proposal.features[0];
        assert_eq!(settings.admission.as_ref().unwrap().value, "{probability: 0.1}");
        assert_eq!(settings.expire_after.as_ref().unwrap().value, "23h");
        // 25,000 rows of 90 bytes and a quarter more are 2.7 MiB.
        assert_eq!(proposal.memory.as_ref().unwrap().value, "3Mi");
        assert!(proposal.notes.is_empty(), "{:?}", proposal.notes);
        for (ids, seen_once) in [(50_000, 20_000), (9_000, 8_000)] {
            let feature = Feature { ids, seen_once, ..rare() };
            let proposal = propose(&figures(vec![feature]), &widths(Some(64)), 1);
            assert_eq!(proposal.features[0].admission, None, "{ids}");
        }
    }

    #[test]
    fn features_of_one_table_get_equal_settings() {
        let (table, gap_seconds) = ("query".to_owned(), Some(3 * DAY));
        let other = Feature { table, gap_seconds, ids: 2_000, gaps: 5_000, ..examples::feature("other") };
        let proposal = propose(&figures(vec![rare(), other]), &widths(Some(64)), 1);
        let values: Vec<_> = proposal.features.iter().map(|settings| settings.expire_after.clone()).collect();
        assert_eq!((values.len(), &values[0].as_ref().unwrap().value), (2, &"3d".to_owned()));
        assert_eq!(values[0], values[1]);
        assert!(proposal.features.iter().all(|settings| settings.admission.is_none()), "the other has few ids");
    }

    #[test]
    fn gaps_that_the_data_cuts_are_no_expiry() {
        let cut = Feature { gap_seconds: Some(6 * DAY), ..rare() };
        let proposal = propose(&figures(vec![cut]), &widths(Some(64)), 1);
        assert_eq!(proposal.features[0].expire_after, None);
        assert!(proposal.notes[0].contains("query") && proposal.notes[0].contains("too short"), "{:?}", proposal.notes);
        let timeless = Figures { time: None, ..figures(vec![rare()]) };
        let notes = propose(&timeless, &widths(Some(64)), 1).notes;
        assert!(notes[0].contains("spec.data.timeColumn"), "{notes:?}");
    }

    #[test]
    fn a_budget_holds_a_global_batch() {
        let proposal = propose(&figures(vec![rare()]), &widths(Some(64)), 1_000_000);
        let memory = proposal.memory.unwrap();
        assert_eq!(memory.value, "86Mi");
        assert!(memory.reason.starts_with("a global batch can need"), "{}", memory.reason);
    }

    #[test]
    fn small_and_hashed_tables_get_no_budget() {
        let small = propose(&figures(vec![examples::feature("user")]), &widths(Some(64)), 1);
        assert_eq!((small.memory, small.features.len(), small.yaml.as_str()), (None, 0, ""));
        assert!(small.notes[0].starts_with("no memory is proposed: 10 rows"), "{:?}", small.notes);
        let hashed = propose(&figures(vec![rare()]), &widths(None), 1);
        assert_eq!((hashed.memory, hashed.features.len()), (None, 0));
        assert!(hashed.notes[0].contains("hashBuckets"));
    }

    #[test]
    fn sizes_and_times_are_rounded_up() {
        let sizes = [1, 3 << 20, (123 << 20) + 1, 9 << 30, (10 << 30) + 1, 123 << 30].map(size);
        assert_eq!(sizes, ["1Mi", "3Mi", "130Mi", "9300Mi", "11Gi", "130Gi"]);
        let times = [0, 61, HOUR, HOUR + 1, 2 * DAY, 2 * DAY + 1].map(duration);
        assert_eq!(times, ["1m", "2m", "1h", "2h", "48h", "3d"]);
    }

    #[test]
    fn a_partial_reading_says_that_more_ids_come() {
        let mut partial = figures(vec![rare()]);
        partial.read.is_all = false;
        partial.read.all_rows = 9_000_000;
        let reason = propose(&partial, &widths(Some(64)), 1).memory.unwrap().reason;
        assert!(reason.contains("about 9,000,000 rows: about 8.0 % of the next look-ups"), "{reason}");
    }
}
