//! Resolves the settings that keep tables within a budget: which ids get a row, which rows are
//! removed, and the clock. Pure; [`crate::resolve`] is the only caller.

use std::num::NonZeroU64;

use crate::defaults as d;
use crate::resolve::{Errors, at};
use crate::resolved::*;
use crate::*;

const CLOCK_NEEDED: &str = "there is no clock to expire rows by: name the column of event times in \
                            spec.data.timeColumn, or remove `expireAfter`";
const NO_BUDGET: &str = "without a budget nothing is evicted: set spec.features.memory, such as {maxBytes: 40Gi}, or \
                         remove this field";

/// The shortest and the longest `expireAfter`, in seconds.
const EXPIRY: std::ops::RangeInclusive<u64> = 60..=3650 * 86_400;

/// From this number on, a time in seconds is beyond the year 5000. It is then in a smaller unit.
const NOT_SECONDS: f64 = 1e11;

/// The settings of a feature that belong to its table.
pub(crate) struct TableSettings {
    pub(crate) life: Option<ResolvedLife>,
    pub(crate) hash_buckets: Option<u64>,
}

/// The settings of a feature that belong to its table. `path` is the feature.
pub(crate) fn table_settings(
    feature: &SparseFeature,
    spec: &RecTrainingJobSpec,
    path: &FieldPath,
    errors: &mut Errors,
) -> TableSettings {
    let has_budget = spec.features.memory.is_some();
    if has_budget && feature.hash_buckets.is_some() {
        let message = "a hashed table has a fixed size of its own, which no budget can lower: remove `hashBuckets`, or \
                       spec.features.memory";
        errors.add(path.key("hashBuckets"), message);
    }
    for (name, is_given) in [("priority", feature.priority.is_some()), ("share", feature.share.is_some())] {
        if is_given && !has_budget {
            errors.add(path.key(name), NO_BUDGET);
        }
    }
    let expire_after_seconds = feature.expire_after.as_deref().and_then(|text| expiry(text, spec, path, errors));
    let is_managed = has_budget || feature.admission.is_some() || expire_after_seconds.is_some();
    let life = is_managed.then(|| ResolvedLife {
        admission: admission(feature.admission.as_ref()),
        expire_after_seconds,
        priority: feature.priority.unwrap_or_default(),
        share_millionths: feature.share.filter(|share| *share < 1.0).map(|share| scaled(share, 1e6).max(1)),
    });
    TableSettings { life, hash_buckets: feature.hash_buckets }
}

/// `number` in units of 1/`unit`, rounded.
fn scaled(number: f64, unit: f64) -> u32 {
    (number * unit).round() as u32
}

fn expiry(text: &str, spec: &RecTrainingJobSpec, path: &FieldPath, errors: &mut Errors) -> Option<NonZeroU64> {
    let path = path.key("expireAfter");
    let seconds = seconds_of(text).filter(|seconds| EXPIRY.contains(seconds));
    if seconds.is_none() {
        let message = format!("expected a time from 1m to 3650d, such as 48h, found `{text}`");
        errors.add(path.clone(), message);
    }
    if clock_column(&spec.data).is_none() {
        errors.add(path, CLOCK_NEEDED);
        return None;
    }
    seconds.and_then(NonZeroU64::new)
}

/// The seconds of a time such as `48h`.
fn seconds_of(text: &str) -> Option<u64> {
    const UNITS: [(char, u64); 4] = [('s', 1), ('m', 60), ('h', 3_600), ('d', 86_400)];
    let (digits, unit) = UNITS.iter().find_map(|(name, unit)| Some((text.strip_suffix(*name)?, unit)))?;
    digits.parse::<u64>().ok()?.checked_mul(*unit)
}

fn admission(given: Option<&AdmissionSpec>) -> ResolvedAdmission {
    const ONE: f64 = (1_u64 << 32) as f64;
    let Some(given) = given else { return ResolvedAdmission::Always };
    match (given.probability, given.count) {
        // A rule refuses a probability of 0.
        (Some(probability), _) if probability < 1.0 => {
            ResolvedAdmission::Probability { per_2_32: scaled(probability, ONE).max(1) }
        }
        (None, Some(count @ 2..)) => ResolvedAdmission::Count { count, counters: d::ADMISSION_COUNTERS },
        _ => ResolvedAdmission::Always,
    }
}

/// The budget of all tables, and the order of evictions.
pub(crate) fn memory(spec: &RecTrainingJobSpec, errors: &mut Errors) -> Option<ResolvedMemory> {
    let given = spec.features.memory.as_ref()?;
    let eviction = spec.features.eviction.clone().unwrap_or_default();
    let eviction = ResolvedEviction {
        policy: eviction.policy.unwrap_or_default(),
        decay_per_day_millionths: scaled(eviction.decay_per_day.unwrap_or(d::EVICTION_DECAY_PER_DAY), 1e6).min(999_999),
        positive_weight_thousandths: scaled(eviction.positive_weight.unwrap_or(d::EVICTION_POSITIVE_WEIGHT), 1e3),
    };
    Some(ResolvedMemory { budget: budget(given, spec, errors)?, eviction })
}

fn budget(given: &MemorySpec, spec: &RecTrainingJobSpec, errors: &mut Errors) -> Option<ResolvedBudget> {
    if let Some(rows) = given.max_rows {
        return Some(ResolvedBudget::Rows(rows));
    }
    let Some(bytes) = &given.max_bytes else { return auto_budget(spec, errors) };
    let found = bytes.bytes().filter(|bytes| *bytes > 0);
    if found.is_none() {
        let found = match bytes {
            BytesSpec::Integer(bytes) => bytes.to_string(),
            BytesSpec::Text(text) => text.clone(),
        };
        let message = format!("expected a number of bytes such as 40Gi, 512Mi or 40G, found `{found}`");
        errors.add(at("spec.features.memory.maxBytes"), message);
    }
    found.map(ResolvedBudget::Bytes)
}

/// The bytes that `auto` takes of the parameter servers of the manifest.
fn auto_budget(spec: &RecTrainingJobSpec, errors: &mut Errors) -> Option<ResolvedBudget> {
    let bytes =
        server_memory(spec).map(|(servers, limit)| (servers as f64 * limit as f64 * d::AUTO_MEMORY_SHARE) as u64);
    if bytes.is_none() {
        let message = "`auto` takes what the memory limit of the parameter servers leaves, and there is none that can be read: \
                       set spec.roles.ps.template.resources.limits.memory, such as 16Gi, or give `maxBytes`";
        errors.add(at("spec.features.memory.auto"), message);
    }
    bytes.map(ResolvedBudget::Bytes)
}

/// The number of parameter servers, and the memory limit of each.
fn server_memory(spec: &RecTrainingJobSpec) -> Option<(u32, u64)> {
    let roles = spec.roles.as_ref()?;
    let limits = roles.template(Role::Ps)?.resources.as_ref()?.limits.as_ref()?;
    let limit = BytesSpec::Text(limits.get("memory")?.0.clone()).bytes()?;
    Some((roles.replicas(Role::Ps).unwrap_or(d::REPLICAS), limit))
}

impl MemorySpec {
    /// The same budget, without reference to the parameter servers' pods. Members of a job read
    /// this form, because they do not know the pods.
    #[must_use]
    pub fn for_members(&self, spec: &RecTrainingJobSpec) -> Self {
        match auto_budget(spec, &mut Errors::default()) {
            Some(ResolvedBudget::Bytes(bytes)) if self.auto == Some(true) => {
                Self { max_bytes: Some(BytesSpec::Text(bytes.to_string())), ..Self::default() }
            }
            _ => self.clone(),
        }
    }
}

/// The column that times the rows.
fn clock_column(data: &DataSpec) -> Option<&str> {
    let by_split = data.split.as_ref().and_then(|split| split.time.as_ref()).map(|time| time.column.as_str());
    data.time_column.as_ref().map(|time| time.name.as_str()).or(by_split)
}

impl DataSpec {
    /// The column of event times, whether a table needs a clock or not: `timeColumn`, or else the
    /// column of a split by time. `None` without either, or if the unit of the split is unknown.
    #[must_use]
    pub fn clock(&self) -> Option<TimeField> {
        let mut errors = Errors::default();
        clock(self, &mut errors).filter(|_| errors.is_empty())
    }
}

/// The clock of the rows: `timeColumn`, or else the column of a split by time.
pub(crate) fn clock(data: &DataSpec, errors: &mut Errors) -> Option<TimeField> {
    if let Some(given) = &data.time_column {
        return Some(TimeField { name: given.name.clone(), unit: given.unit.unwrap_or_default(), order: given.order });
    }
    let time = data.split.as_ref()?.time.as_ref()?;
    if bound_of(&time.test_from).is_some_and(|bound| bound.abs() >= NOT_SECONDS) {
        let message = "the tables need a clock, and the numbers of this column are no seconds since 1970: give \
                       spec.data.timeColumn with this column and its `unit`, such as milliseconds";
        errors.add(at("spec.data.split.time.testFrom"), message);
    }
    Some(TimeField { name: time.column.clone(), unit: TimeUnit::Seconds, order: date_order(time) })
}

/// The bound of a split by time if it is a number.
fn bound_of(bound: &TimeBoundSpec) -> Option<f64> {
    match bound {
        TimeBoundSpec::Integer(integer) => Some(*integer as f64),
        TimeBoundSpec::Text(text) => text.trim().parse().ok(),
    }
}

/// The order of day and month in the dates of a split by time, if the year is at their end.
fn date_order(time: &TimeSplit) -> Option<DateOrder> {
    let TimeBoundSpec::Text(text) = &time.test_from else { return time.order };
    let fits = |order: &DateOrder| Date::read(text, Some(*order)).is_ok();
    time.order.or_else(|| [DateOrder::MonthFirst, DateOrder::DayFirst].into_iter().find(fits))
}

/// Refuses a budget that does not hold the rows of one global batch.
pub(crate) fn check_budget(job: &ResolvedJob, errors: &mut Errors) {
    let Some(memory) = job.features.memory else { return };
    let (batch, features) = (job.training.global_batch_size as u64, job.features.embeddings.len() as u64);
    let value_bytes = job.training.embedding_value_type.bytes() as u64;
    let width: u64 = job.features.embeddings.iter().map(|embedding| embedding.dim.max(1) as u64 * value_bytes).sum();
    let (field, found, least, unit) = match memory.budget {
        ResolvedBudget::Rows(rows) => ("maxRows", rows, batch * features, "rows"),
        ResolvedBudget::Bytes(bytes) => ("maxBytes", bytes, batch * width, "bytes"),
    };
    if found < least {
        let message = format!(
            "a global batch of {batch} rows with {features} sparse features can need {least} {unit} of the tables at once, and \
             the budget is {found}: raise it, or lower spec.training.globalBatchSize"
        );
        errors.add(at("spec.features.memory").key(field), message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_number_with_a_unit() {
        let times = ["48h", "2d", "30m", "90s"].map(seconds_of);
        assert_eq!(times, [Some(172_800), Some(172_800), Some(1_800), Some(90)]);
        assert_eq!(["48", "h", "1.5h", "99999999999999999999s"].map(seconds_of), [None; 4]);
    }

    #[test]
    fn the_clock_is_known_without_a_table_that_needs_it() {
        let data =
            |value| serde_json::from_value::<DataSpec>(value).unwrap().clock().map(|time| (time.name, time.unit));
        let given = serde_json::json!({"timeColumn": {"name": "t", "unit": "milliseconds"}});
        assert_eq!(data(given), Some(("t".to_owned(), TimeUnit::Milliseconds)));
        let split = |from: i64| serde_json::json!({"split": {"time": {"column": "day", "testFrom": from}}});
        assert_eq!(data(split(1_700_000_000)), Some(("day".to_owned(), TimeUnit::Seconds)));
        assert_eq!((data(split(1_700_000_000_000)), data(serde_json::json!({}))), (None, None));
    }

    #[test]
    fn a_probability_of_1_admits_every_id() {
        let of = |probability, count| admission(Some(&AdmissionSpec { probability, count }));
        assert_eq!((of(Some(1.0), None), of(None, Some(1))), (ResolvedAdmission::Always, ResolvedAdmission::Always));
        assert_eq!(of(Some(0.5), None), ResolvedAdmission::Probability { per_2_32: 1 << 31 });
        assert_eq!(of(Some(1e-12), None), ResolvedAdmission::Probability { per_2_32: 1 });
        assert_eq!(of(None, Some(3)), ResolvedAdmission::Count { count: 3, counters: d::ADMISSION_COUNTERS });
    }
}
