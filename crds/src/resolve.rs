//! Turns a job with valid fields into a [`ResolvedJob`]: fills in the defaults, expands the ranges,
//! and refuses contradictions that no rule about a single object can see. Pure; [`crate::validate`]
//! is the only caller.

use std::collections::{HashMap, HashSet};

use crate::defaults as d;
use crate::life::{TableSettings, check_budget, clock, memory, table_settings};
use crate::locations::location_errors;
use crate::resolved::*;
use crate::*;

/// Resolves the job, or returns all its errors.
pub(crate) fn resolve(job: &RecTrainingJob) -> Result<ResolvedJob, Vec<FieldError>> {
    let spec = &job.spec;
    let mut errors = Errors::default();
    for error in location_errors(spec) {
        errors.add(error.path, error.message);
    }
    let features = features(spec, &mut errors);
    let data = data(spec, &features, &mut errors);
    let resolved = ResolvedJob {
        name: job.metadata.name.clone().unwrap_or_default(),
        model: model(&spec.model, &features),
        features,
        data,
        training: training(spec, &mut errors),
        roles: roles(&spec.roles.clone().unwrap_or_default()),
        autoscaling: spec.autoscaling.as_ref().map(|given| autoscaling(given, spec, &mut errors)),
        checkpoint: spec.checkpoint.as_ref().and_then(|given| checkpoint(given, publish_seconds(spec))),
        publish: publish(spec, &mut errors),
        warm_start: warm_start(spec, &mut errors),
        fault_tolerance: fault_tolerance(spec.fault_tolerance.as_ref()),
        suspend: spec.suspend.unwrap_or(false),
    };
    local_batches(&resolved, &mut errors);
    substitutions(&resolved, &mut errors);
    slices(spec, &resolved, &mut errors);
    pauses(&resolved, &mut errors);
    rolls_back(&resolved, &mut errors);
    commits(&resolved, &mut errors);
    check_budget(&resolved, &mut errors);
    if errors.0.is_empty() { Ok(resolved) } else { Err(errors.0) }
}

#[derive(Default)]
pub(crate) struct Errors(Vec<FieldError>);

impl Errors {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether further errors are left out.
    pub(crate) fn is_full(&self) -> bool {
        self.0.len() >= check::MAX_ERRORS
    }

    pub(crate) fn add(&mut self, path: FieldPath, message: impl Into<String>) {
        if !self.is_full() {
            self.0.push(FieldError::new(path, message));
        }
    }
}

pub(crate) fn at(path: &str) -> FieldPath {
    FieldPath::parse(path)
}

fn widths(given: Option<&Vec<u32>>, default: &[u32]) -> Vec<usize> {
    given.map_or(default, Vec::as_slice).iter().map(|&width| width as usize).collect()
}

fn model(given: &ModelSpec, features: &ResolvedFeatures) -> ResolvedModel {
    let hidden = widths(given.hidden.as_ref(), &d::HIDDEN);
    let cross_layers = given.cross_layers.unwrap_or(d::CROSS_LAYERS) as usize;
    let settings = match given.kind {
        ModelKind::Dlrm => ModelSettings::Dlrm { bottom: bottom(given, features), top: hidden },
        ModelKind::DeepFm => ModelSettings::DeepFm { hidden },
        ModelKind::Dnn => ModelSettings::Dnn { hidden },
        ModelKind::WideDeep => ModelSettings::WideDeep { hidden },
        ModelKind::Dcn => ModelSettings::Dcn { cross_layers, hidden },
        ModelKind::DcnV2 => ModelSettings::DcnV2 {
            structure: given.cross_structure.unwrap_or_default(),
            cross_layers,
            low_rank: given.low_rank.map(|rank| rank as usize),
            hidden,
        },
        ModelKind::Fm => ModelSettings::Fm,
        ModelKind::Lr => ModelSettings::Lr,
    };
    ResolvedModel { settings, embedding_dim: embedding_dim(given), dropout: given.dropout.unwrap_or(d::DROPOUT) }
}

/// The bottom MLP of `dlrm`: none without dense features, which are its input.
fn bottom(given: &ModelSpec, features: &ResolvedFeatures) -> Vec<usize> {
    if features.schema.dense.is_empty() {
        return Vec::new();
    }
    let mut widths = widths(given.bottom.as_ref(), &d::BOTTOM);
    widths.push(embedding_dim(given));
    widths
}

fn embedding_dim(model: &ModelSpec) -> usize {
    if !model.kind.has_embeddings() {
        return 0;
    }
    model.embedding_dim.unwrap_or(d::EMBEDDING_DIM) as usize
}

fn features(spec: &RecTrainingJobSpec, errors: &mut Errors) -> ResolvedFeatures {
    let given = &spec.features;
    let label = given.label.clone().unwrap_or_default();
    let label = label_field(label, errors);
    let mut names = Names::new(&label.name);
    let mut tables = Tables::default();
    let (mut sparse, mut embeddings) = (Vec::new(), Vec::new());
    for (index, feature) in given.sparse.iter().enumerate() {
        let path = at("spec.features.sparse").index(index);
        for name in names.expand(&feature.name, &path, errors) {
            let table = tables.place(&name, feature, spec, &path, errors);
            sparse.push(sparse_field(name, feature, &tables.list[table]));
            embeddings.push(embedding(feature, table, &tables.list[table]));
        }
    }
    let mut dense = Vec::new();
    for (index, feature) in given.dense.iter().enumerate() {
        let path = at("spec.features.dense").index(index);
        let names = names.expand(&feature.name, &path, errors);
        let (transform, missing) =
            (transform(feature, &path, errors), single(feature.missing, &path, "missing", errors));
        let missing = missing.unwrap_or(d::DENSE_MISSING as f32);
        let limit = dense_limit(feature, &path, errors);
        dense.extend(names.into_iter().map(|name| DenseField { name, transform, missing, limit }));
    }
    let needs_clock = given.memory.is_some() || tables.list.iter().any(|table| table.life.is_some());
    let time = if needs_clock { clock(&spec.data, errors) } else { None };
    let schema = Schema { sparse, dense, label, group: given.group.clone(), time };
    ResolvedFeatures { schema, embeddings, tables: tables.list, memory: memory(spec, errors) }
}

/// The names in use, each with the entry of the manifest that used it first.
struct Names {
    taken: HashMap<String, FieldPath>,
}

impl Names {
    fn new(label: &str) -> Self {
        Self { taken: HashMap::from([(label.to_string(), at("spec.features.label"))]) }
    }

    /// Expands a range. A name in use is reported and left out.
    fn expand(&mut self, range: &str, entry: &FieldPath, errors: &mut Errors) -> Vec<String> {
        let path = entry.key("name");
        let names = match expand(range) {
            Ok(names) => names,
            Err(error) => {
                errors.add(path, error.to_string());
                return Vec::new();
            }
        };
        let mut fresh = Vec::new();
        for name in names {
            if self.taken.len() > d::MAX_FEATURES {
                errors.add(path, format!("a job has at most {} features, with ranges expanded", d::MAX_FEATURES));
                break;
            }
            match self.taken.get(&name) {
                Some(earlier) if *earlier == at("spec.features.label") => {
                    errors.add(
                        path.clone(),
                        format!("`{name}` is the label: the model would read the answer; remove it from the features"),
                    );
                }
                Some(earlier) => {
                    errors.add(path.clone(), format!("the column `{name}` is named twice; it is already in {earlier}"));
                }
                None => {
                    self.taken.insert(name.clone(), entry.clone());
                    fresh.push(name);
                }
            }
        }
        fresh
    }
}

#[derive(Default)]
struct Tables {
    list: Vec<ResolvedTable>,
    by_name: HashMap<String, (usize, FieldPath)>,
}

impl Tables {
    /// The index of the feature's table. Adds the table if no earlier feature has named it.
    fn place(
        &mut self,
        name: &str,
        feature: &SparseFeature,
        spec: &RecTrainingJobSpec,
        path: &FieldPath,
        errors: &mut Errors,
    ) -> usize {
        let TableSettings { life, hash_buckets } = table_settings(feature, spec, path, errors);
        let table = ResolvedTable {
            name: feature.table.clone().unwrap_or_else(|| name.to_string()),
            dim: feature.dim.map_or_else(|| embedding_dim(&spec.model), |dim| dim as usize),
            initializer: initializer(feature.initializer.as_ref().or(spec.features.initializer.as_ref())),
            life,
            hash_buckets,
        };
        let Some((position, first)) = self.by_name.get(&table.name) else {
            let position = self.list.len();
            self.by_name.insert(table.name.clone(), (position, path.clone()));
            self.list.push(table);
            return position;
        };
        let earlier = &self.list[*position];
        if earlier.dim != table.dim {
            errors.add(
                path.key("dim"),
                format!(
                    "the table `{}` has rows of {} values in {first} and {} here: features that share a table need one width",
                    table.name, earlier.dim, table.dim
                ),
            );
        } else if earlier.initializer != table.initializer {
            errors.add(
                path.key("initializer"),
                format!(
                    "the table `{}` starts differently in {first}: features that share a table need one initializer",
                    table.name
                ),
            );
        } else if (earlier.life, earlier.hash_buckets) != (table.life, table.hash_buckets) {
            errors.add(
                path.clone(),
                format!(
                    "the table `{}` has other settings in {first}: features that share a table need the same `admission`, \
                     `expireAfter`, `priority`, `share` and `hashBuckets`",
                    table.name
                ),
            );
        }
        *position
    }
}

fn sparse_field(name: String, given: &SparseFeature, table: &ResolvedTable) -> SparseField {
    SparseField {
        name,
        table: table.name.clone(),
        multi_value: given.multi_value.as_ref().map(|multi| multi.separator.clone().unwrap_or_default()),
        missing: given.missing.unwrap_or(MissingValue::Token),
        hash_buckets: table.hash_buckets,
    }
}

fn embedding(given: &SparseFeature, position: usize, table: &ResolvedTable) -> ResolvedEmbedding {
    ResolvedEmbedding { dim: table.dim, pooling: given.pooling.unwrap_or(Pooling::Mean), table: position }
}

/// 64-bit floats hold every integer up to this one, 2^53, and round the next one to it.
const EXACT_INTEGERS: u64 = 1 << 53;

/// The first float beyond all 64-bit integers.
const TWO_TO_63: f64 = (1_u64 << 63) as f64;

fn label_field(given: LabelSpec, errors: &mut Errors) -> LabelField {
    if given.positive_from.is_some_and(|threshold| threshold.abs() >= EXACT_INTEGERS as f64) {
        errors.add(
            at("spec.features.label.positiveFrom"),
            "labels are compared as 64-bit floats, which do not hold every integer beyond 2^53: expected a number \
             below 9007199254740992, such as seconds instead of nanoseconds",
        );
    }
    let values_at = at("spec.features.label.values");
    for (word, _) in given.values.iter().filter(|(_, label)| !(0.0..=1.0).contains(*label)) {
        errors.add(values_at.key(word), "a label is a number from 0 to 1");
    }
    let mut words = HashSet::new();
    for word in given.values.keys().filter(|word| !words.insert(word.trim())) {
        let message =
            format!("`{}` has two labels, because blanks around a word do not count: remove one", word.trim());
        errors.add(values_at.key(word), message);
    }
    if given.positive_from.is_some() && !given.values.is_empty() {
        errors.add(values_at, "`values` gives labels to words and `positiveFrom` to numbers: remove one of them");
    }
    let values = given.values.iter().map(|(word, label)| (word.trim().to_owned(), *label)).collect();
    LabelField { name: given.name.unwrap_or_else(|| d::LABEL.to_string()), positive_from: given.positive_from, values }
}

/// The 32-bit float nearest to a setting of a dense feature: the model computes in 32 bits.
fn single(given: Option<f64>, feature: &FieldPath, field: &str, errors: &mut Errors) -> Option<f32> {
    let value = given? as f32;
    if value.is_infinite() {
        errors.add(feature.key(field), "expected a number within ±3.4e38, the range of 32-bit floats");
    }
    Some(value)
}

fn dense_limit(given: &DenseFeature, path: &FieldPath, errors: &mut Errors) -> f32 {
    let limit = single(given.limit, path, "limit", errors).unwrap_or(d::DENSE_LIMIT as f32);
    if limit <= 0.0 {
        errors.add(path.key("limit"), "expected a number above 0");
    }
    // Both are 32-bit floats to the model, so two equal settings are equal here.
    if given.missing.is_some_and(|missing| (missing as f32).abs() > limit) {
        errors.add(path.key("missing"), format!("this number is beyond the `limit` {limit:e} of the feature"));
    }
    limit
}

fn transform(given: &DenseFeature, path: &FieldPath, errors: &mut Errors) -> Transform {
    let mut number = |value, field, otherwise| single(value, path, field, errors).unwrap_or(otherwise);
    // CEL rules require the settings of `standardize` and `minMax`.
    let transform = match given.transform.unwrap_or(TransformKind::Identity) {
        TransformKind::Identity => Transform::Identity,
        TransformKind::Log1p => Transform::Log1p,
        TransformKind::SignedLog1p => Transform::SignedLog1p,
        TransformKind::Standardize => {
            Transform::Standardize { mean: number(given.mean, "mean", 0.0), std: number(given.std, "std", 1.0) }
        }
        TransformKind::MinMax => {
            Transform::MinMax { min: number(given.min, "min", 0.0), max: number(given.max, "max", 1.0) }
        }
    };
    match transform {
        Transform::Standardize { std: 0.0, .. } => {
            errors.add(path.key("std"), "this number is 0 in 32-bit floats: expected at least 1.4e-45");
        }
        Transform::MinMax { min, max } if min == max => {
            errors.add(path.key("max"), "`min` and `max` are equal in 32-bit floats: expected a larger difference");
        }
        _ => {}
    }
    transform
}

fn initializer(given: Option<&InitializerSpec>) -> Initializer {
    let normal = |scale: Option<f64>| Initializer::Normal {
        // Rows are computed in 32 bits.
        standard_deviation: scale.unwrap_or(d::NORMAL_STD) as f32,
    };
    let Some(given) = given else { return normal(None) };
    match given.kind {
        InitializerKind::Normal => normal(given.scale),
        InitializerKind::Uniform => {
            let bound = given.scale.unwrap_or(d::UNIFORM_BOUND);
            Initializer::Uniform { low: -bound as f32, high: bound as f32 }
        }
        InitializerKind::Zeros => Initializer::Constant(0.0),
    }
}

fn data(spec: &RecTrainingJobSpec, features: &ResolvedFeatures, errors: &mut Errors) -> ResolvedData {
    let given = &spec.data;
    let kafka = given.train.as_ref().and_then(|train| train.kafka.as_ref());
    let follow = given.train.as_ref().and_then(|train| train.follow.as_ref());
    let source = match (&given.synthetic, kafka, follow) {
        (Some(synthetic), ..) => DataSource::Synthetic(self::synthetic(synthetic, &features.schema, errors)),
        (None, Some(kafka), _) => DataSource::Stream(stream(kafka, given, spec, &features.schema, errors)),
        (None, None, Some(follow)) => {
            refuse_epochs(spec, errors);
            let files = files(given, &features.schema, errors);
            DataSource::Follow(FollowSource { follow: self::follow(follow, errors), files })
        }
        (None, None, None) => DataSource::Files(files(given, &features.schema, errors)),
    };
    let storage = given.storage.clone().unwrap_or_default();
    ResolvedData {
        source,
        shuffle_window_rows: given.shuffle.as_ref().map(|s| s.window_rows.unwrap_or(d::SHUFFLE_WINDOW_ROWS)),
        storage: ResolvedStorage { options: storage.options, secret_name: storage.secret_name },
    }
}

fn stream(
    given: &KafkaSpec,
    data: &DataSpec,
    spec: &RecTrainingJobSpec,
    schema: &Schema,
    errors: &mut Errors,
) -> StreamSource {
    let kafka = at("spec.data.train.kafka");
    let is_repeated = |at: usize| given.topics[..at].contains(&given.topics[at]);
    for place in (0..given.topics.len()).filter(|place| is_repeated(*place)) {
        errors.add(kafka.key("topics").index(place), "the topic is named twice: its records would be trained twice");
    }
    refuse_epochs(spec, errors);
    let security = given.security.clone().unwrap_or_default();
    StreamSource {
        kafka: KafkaConfig {
            bootstrap_servers: given.bootstrap_servers.clone(),
            topics: given.topics.clone(),
            format: record_format(given, schema, &kafka, errors),
            start: stream_start(given),
            until: stream_end(given),
            linger_millis: given.linger_millis.unwrap_or(d::LINGER_MILLIS),
            lost_records: lost_records(given.lost_records),
            dead_letter_topic: dead_letter_topic(given, data, errors),
            group: given.group.clone(),
            security: kafka_security(&security),
        },
        test: stream_test(data, schema, errors),
        secret_name: security.secret_name,
    }
}

/// Refuses several passes over rows that are read once.
fn refuse_epochs(spec: &RecTrainingJobSpec, errors: &mut Errors) {
    let epochs = spec.training.as_ref().and_then(|training| training.epochs);
    if epochs.is_some_and(|epochs| epochs > 1) {
        errors.add(at("spec.training.epochs"), "a stream is read once: remove `epochs`, or give `steps`");
    }
}

fn follow(given: &FollowSpec, errors: &mut Errors) -> FollowConfig {
    let paths = at("spec.data.train.follow.paths");
    let is_repeated = |at: usize| given.paths[..at].contains(&given.paths[at]);
    for place in (0..given.paths.len()).filter(|place| is_repeated(*place)) {
        errors.add(paths.index(place), "the path is named twice: its files would be trained twice");
    }
    FollowConfig {
        paths: given.paths.clone(),
        order: match given.order.unwrap_or_default() {
            FileOrderSpec::Name => FileOrder::Name,
            FileOrderSpec::Time => FileOrder::Time,
        },
        interval_seconds: given.interval_seconds.unwrap_or(d::FOLLOW_INTERVAL_SECONDS),
        whole_directories: given.whole_directories.unwrap_or(false),
        until: given.until.as_ref().and_then(follow_end),
        lost_files: lost_records(given.lost_files),
        late_files: match given.late_files.unwrap_or_default() {
            LateFilesSpec::Train => LateFiles::Train,
            LateFilesSpec::Skip => LateFiles::Skip,
        },
    }
}

fn follow_end(given: &FollowUntilSpec) -> Option<FollowEnd> {
    let idle = given.idle_seconds.map(FollowEnd::IdleSeconds);
    idle.or_else(|| given.timestamp.map(|millis| FollowEnd::Timestamp(millis as i64)))
}

fn lost_records(given: Option<LostRecordsSpec>) -> LostRecords {
    match given.unwrap_or_default() {
        LostRecordsSpec::Fail => LostRecords::Fail,
        LostRecordsSpec::Skip => LostRecords::Skip,
    }
}

/// The test files of a job on a stream, if it has any.
fn stream_test(data: &DataSpec, schema: &Schema, errors: &mut Errors) -> FilePlan {
    if data.test.is_some() {
        return files(data, schema, errors);
    }
    FilePlan {
        parts: TrainTest::Separate { train: Vec::new(), test: Vec::new() },
        format: FileFormat::Csv(CsvFormat::default()),
        bad_rows: bad_rows(data.bad_rows.as_ref()),
        null_values: null_values(data.null_values.as_deref(), errors),
    }
}

fn record_format(given: &KafkaSpec, schema: &Schema, path: &FieldPath, errors: &mut Errors) -> RecordFormat {
    let registry = || given.schema_registry.clone().unwrap_or_default();
    match given.format {
        RecordFormatSpec::Json => return RecordFormat::Json,
        RecordFormatSpec::Avro => return RecordFormat::Avro { registry: registry() },
        RecordFormatSpec::Protobuf => return RecordFormat::Protobuf { registry: registry() },
        RecordFormatSpec::Csv => {}
    }
    let mut found = Errors::default();
    let csv = text_format(given.csv.clone().unwrap_or_default(), false, &mut found);
    if csv.header || csv.columns.is_none() {
        let message = "records have no header: give the names of the columns in `columns`, and leave out `header`";
        found.add(path.key("csv"), message);
    }
    columns(&csv, schema, &TrainTest::Separate { train: Vec::new(), test: Vec::new() }, &mut found);
    separators(schema, &mut found);
    // The checks name the place of the files' settings.
    let here = |text: String| text.replace("spec.data.csv", "spec.data.train.kafka.csv");
    for FieldError { path, message } in found.0 {
        errors.add(at(&here(path.to_string())), here(message));
    }
    RecordFormat::Csv(csv)
}

fn dead_letter_topic(given: &KafkaSpec, data: &DataSpec, errors: &mut Errors) -> Option<String> {
    let topic = given.dead_letter_topic.clone()?;
    let path = at("spec.data.train.kafka.deadLetterTopic");
    if given.topics.contains(&topic) {
        errors.add(path, "the job reads this topic: bad records would come back for ever; expected another topic");
    } else if bad_rows(data.bad_rows.as_ref()) == BadRows::Fail {
        errors.add(path, "only skipped records are written to it: set spec.data.badRows.action: skip");
    }
    Some(topic)
}

fn stream_start(given: &KafkaSpec) -> StreamStart {
    match given.start.unwrap_or_default() {
        StreamStartSpec::Earliest => StreamStart::Earliest,
        StreamStartSpec::Latest => StreamStart::Latest,
        StreamStartSpec::Committed => StreamStart::Committed,
        StreamStartSpec::Timestamp => StreamStart::Timestamp(given.start_timestamp.unwrap_or(0) as i64),
    }
}

fn stream_end(given: &KafkaSpec) -> Option<StreamEnd> {
    match given.until? {
        StreamEndSpec::Latest => Some(StreamEnd::Latest),
        StreamEndSpec::Timestamp => given.until_timestamp.map(|millis| StreamEnd::Timestamp(millis as i64)),
        StreamEndSpec::Idle => given.until_idle_seconds.map(StreamEnd::IdleSeconds),
    }
}

fn kafka_security(given: &KafkaSecuritySpec) -> KafkaSecurity {
    let mechanism = |mechanism| match mechanism {
        SaslMechanismSpec::Plain => SaslMechanism::Plain,
        SaslMechanismSpec::ScramSha256 => SaslMechanism::ScramSha256,
        SaslMechanismSpec::ScramSha512 => SaslMechanism::ScramSha512,
    };
    KafkaSecurity { tls: given.tls.unwrap_or(false), sasl: given.sasl.map(mechanism) }
}

fn synthetic(given: &SyntheticSpec, schema: &Schema, errors: &mut Errors) -> SyntheticConfig {
    let sparse = schema.sparse.iter().map(|feature| feature.name.as_str());
    let sparse = criteo_columns(sparse, 'C', "spec.features.sparse", errors);
    let dense = schema.dense.iter().map(|feature| feature.name.as_str());
    let dense = criteo_columns(dense, 'I', "spec.features.dense", errors);
    if schema.label.name != d::LABEL {
        errors.add(
            at("spec.features.label.name"),
            format!("synthetic rows have the label `{}`: expected that name", d::LABEL),
        );
    }
    if !schema.label.values.is_empty() {
        errors.add(at("spec.features.label.values"), "synthetic rows have the labels 0 and 1: remove `values`");
    }
    if let Some(group) = schema.group.as_deref() {
        criteo_columns(std::iter::once(group), 'C', "spec.features.group", errors);
    }
    let usual = d::SYNTHETIC_VOCABULARIES.iter().copied().cycle();
    SyntheticConfig {
        rows: given.rows.unwrap_or(d::SYNTHETIC_ROWS),
        test_rows: given.test_rows.unwrap_or(d::SYNTHETIC_TEST_ROWS),
        vocabularies: usual.map(|usual| given.vocabulary.unwrap_or(usual)).take(sparse).collect(),
        dense,
        zipf_exponent: given.zipf_exponent.unwrap_or(d::SYNTHETIC_ZIPF_EXPONENT),
        seed: given.seed.unwrap_or(d::SYNTHETIC_SEED),
        ..SyntheticConfig::default()
    }
}

/// The largest number in names such as `C7`; synthetic rows have no others.
fn criteo_columns<'a>(names: impl Iterator<Item = &'a str>, letter: char, path: &str, errors: &mut Errors) -> usize {
    let mut last = 0;
    for name in names {
        let number = name.strip_prefix(letter).filter(|digits| !digits.starts_with(['0', '+']));
        match number.and_then(|digits| digits.parse::<usize>().ok()) {
            Some(number) if number <= d::MAX_FEATURES => last = last.max(number),
            _ => errors.add(
                at(path),
                format!("synthetic rows have no column `{name}`: expected names such as {letter}1 here"),
            ),
        }
    }
    last
}

fn files(given: &DataSpec, schema: &Schema, errors: &mut Errors) -> FilePlan {
    let paths = |paths: &Option<PathsSpec>| paths.as_ref().map(|p| p.paths.clone()).unwrap_or_default();
    let divided = given.source.as_ref().zip(given.split.as_ref());
    let parts = divided.and_then(|(source, split)| divide(&source.paths, split, errors));
    let train = given.train.as_ref().map(|train| train.file_paths().1.to_vec()).unwrap_or_default();
    let parts = parts.unwrap_or_else(|| TrainTest::Separate { train, test: paths(&given.test) });
    if let TrainTest::Separate { train, test } = &parts {
        for (index, path) in test.iter().enumerate().filter(|(_, path)| train.contains(path)) {
            errors.add(
                at("spec.data.test.paths").index(index),
                format!("`{path}` is also a training file, so the test would use rows that the model has seen; use `source` and `split` to divide it"),
            );
        }
    }
    let format = format(given, &parts, errors);
    if let FileFormat::Csv(csv) = &format {
        columns(csv, schema, &parts, errors);
        separators(schema, errors);
    }
    let null_values = null_values(given.null_values.as_deref(), errors);
    FilePlan { parts, format, bad_rows: bad_rows(given.bad_rows.as_ref()), null_values }
}

/// The markers of missing values. A number, also an infinite one, cannot be a marker: columns of
/// numbers in Parquet have no texts that could be compared with it.
fn null_values(given: Option<&[String]>, errors: &mut Errors) -> Vec<String> {
    let Some(given) = given else { return d::NULL_VALUES.map(str::to_owned).into() };
    let mut markers = Vec::with_capacity(given.len());
    for (index, marker) in given.iter().enumerate() {
        let marker = marker.trim();
        if marker.parse::<f64>().is_ok_and(|number| !number.is_nan()) {
            let path = at("spec.data.nullValues").index(index);
            errors.add(path, format!("`{marker}` is a number: expected a text that is none, such as NULL"));
        }
        markers.push(marker.to_owned());
    }
    markers
}

/// Text files have no lists, so a cell with several values needs a separator.
fn separators(schema: &Schema, errors: &mut Errors) {
    for feature in schema.sparse.iter().filter(|feature| feature.multi_value.as_deref() == Some("")) {
        let message = format!(
            "`{}` has several values in a cell of text: set `multiValue.separator` to the text between them, such as |",
            feature.name
        );
        errors.add(at("spec.features.sparse"), message);
    }
}

/// The paths, divided by the one way of the split that is given.
fn divide(paths: &[String], given: &SplitSpec, errors: &mut Errors) -> Option<TrainTest> {
    let paths = paths.to_vec();
    let split = if let Some(position) = &given.position {
        Split::Position { train_rows: position.train_rows }
    } else if let Some(fraction) = &given.fraction {
        Split::Fraction { train: fraction.train }
    } else if let Some(time) = &given.time {
        Split::Time { column: time.column.clone(), test_from: time_bound(time, errors) }
    } else {
        return given.slices.as_ref().map(|slices| TrainTest::Slices { paths, rows: slices.rows });
    };
    Some(TrainTest::Divided { paths, split })
}

/// The bound of a split by time. Fails for a text that is neither a number nor a date.
fn time_bound(given: &TimeSplit, errors: &mut Errors) -> TimeBound {
    let path = at("spec.data.split.time");
    let text = match number_or_text(&given.test_from) {
        Err(text) => text,
        Ok(number) => {
            if given.order.is_some() {
                errors.add(path.key("order"), "`order` is for dates, and `testFrom` is a number: remove it");
            }
            return number;
        }
    };
    let problem = match Date::read(text, given.order) {
        Ok(date) => return TimeBound::Date(date),
        Err(problem) => problem,
    };
    match problem {
        DateProblem::Unknown => errors.add(
            path.key("testFrom"),
            format!(
                "expected a number such as 1700000000, or a date such as 2026-11-03, 2026-11-03T10:00:00Z or \
                 11/25/2026, found `{text}`"
            ),
        ),
        DateProblem::Ambiguous => errors.add(
            path.key("testFrom"),
            format!("the day of `{text}` may be its first or its second number: set `order: monthFirst` or dayFirst"),
        ),
        DateProblem::NeedlessOrder => errors.add(
            path.key("order"),
            format!("`{text}` begins with the year, and `order` is for dates that end with it: remove it"),
        ),
    }
    TimeBound::Number(0.0)
}

/// The bound if it is a number, else its text. Text that reads as a number is one.
fn number_or_text(given: &TimeBoundSpec) -> Result<TimeBound, &str> {
    let text = match given {
        TimeBoundSpec::Integer(integer) => return Ok(whole(*integer)),
        TimeBoundSpec::Text(text) => text.trim(),
    };
    if let Ok(integer) = text.parse::<i64>() {
        return Ok(whole(integer));
    }
    match text.parse::<f64>() {
        // From 2^53 on every float is an integer, and `i64` holds it below 2^63.
        Ok(number) if (EXACT_INTEGERS as f64..TWO_TO_63).contains(&number.abs()) => Ok(whole(number as i64)),
        Ok(number) if number.is_finite() => Ok(TimeBound::Number(number)),
        _ => Err(text),
    }
}

fn whole(integer: i64) -> TimeBound {
    match integer.unsigned_abs() > EXACT_INTEGERS {
        true => TimeBound::Integer(integer),
        false => TimeBound::Number(integer as f64),
    }
}

fn bad_rows(given: Option<&BadRowsSpec>) -> BadRows {
    match given {
        Some(given) if given.action == BadRowAction::Skip => {
            BadRows::Skip { limit: given.limit.unwrap_or(d::BAD_ROWS_LIMIT) }
        }
        _ => BadRows::Fail,
    }
}

fn format(given: &DataSpec, parts: &TrainTest, errors: &mut Errors) -> FileFormat {
    let format = match given.format.unwrap_or_default() {
        DataFormat::Auto => recognize(given, parts, errors),
        format => format,
    };
    if format == DataFormat::Parquet {
        if given.csv.is_some() {
            errors.add(
                at("spec.data.csv"),
                "`csv` is only for text files, and these are Parquet: remove it, or set format: csv or tsv",
            );
        }
        return FileFormat::Parquet;
    }
    FileFormat::Csv(text_format(given.csv.clone().unwrap_or_default(), format == DataFormat::Tsv, errors))
}

fn text_format(csv: CsvSpec, is_tsv: bool, errors: &mut Errors) -> CsvFormat {
    let delimiter = match csv.delimiter.as_deref() {
        None if is_tsv => "\t",
        None => ",",
        Some("\\t") => "\t",
        Some(text) => text,
    };
    if !delimiter.is_ascii() {
        let message = format!("expected ASCII characters, such as ; or ::, found `{delimiter}`");
        errors.add(at("spec.data.csv.delimiter"), message);
    }
    let is_wide = delimiter.len() > 1;
    if is_wide && csv.quoting == Some(true) {
        errors.add(
            at("spec.data.csv.quoting"),
            format!(
                "`{delimiter}` has several characters, and quotes go with one: remove `quoting`, or set it to false"
            ),
        );
    }
    CsvFormat {
        delimiter: delimiter.to_owned(),
        header: csv.header.unwrap_or(csv.columns.is_none()),
        quoting: csv.quoting.unwrap_or(!is_tsv && !is_wide),
        columns: csv.columns.map(|columns| column_names(&columns, errors)),
    }
}

/// The format by the file extensions, which must agree.
fn recognize(given: &DataSpec, parts: &TrainTest, errors: &mut Errors) -> DataFormat {
    let (place, paths): (_, Vec<&String>) = match parts {
        TrainTest::Separate { train, test } => {
            let place = given.train.as_ref().map_or("spec.data.train.paths", |train| train.file_paths().0);
            (place, train.iter().chain(test).collect())
        }
        TrainTest::Divided { paths, .. } | TrainTest::Slices { paths, .. } => {
            ("spec.data.source.paths", paths.iter().collect())
        }
    };
    let mut recognized: Option<(DataFormat, &str)> = None;
    // A path with a wrong scheme has its own error.
    for path in paths.into_iter().filter(|path| Scheme::of(path).is_ok()) {
        let Some(format) = DataFormat::of_path(path) else {
            let guess = if given.csv.is_some() { "csv or tsv" } else { "csv, tsv or parquet" };
            let message = format!(
                "the name of `{path}` does not end with .csv, .tsv or .parquet (or one of these and .gz or .zst): set \
                 spec.data.format to {guess}; for a folder, name the files in it, such as {}/*.csv",
                path.trim_end_matches('/')
            );
            errors.add(at(place), message);
            return DataFormat::Csv;
        };
        match recognized {
            Some((first, name)) if first != format => {
                errors.add(
                    at(place),
                    format!("`{name}` and `{path}` have different formats: expected one format for all files"),
                );
                return first;
            }
            _ => recognized = Some((format, path)),
        }
    }
    recognized.map_or(DataFormat::Csv, |(format, _)| format)
}

/// The names of the columns, with ranges expanded. Reports duplicates.
fn column_names(columns: &[String], errors: &mut Errors) -> Vec<String> {
    let mut names = Vec::new();
    let mut seen = HashMap::new();
    for (index, range) in columns.iter().enumerate() {
        let path = at("spec.data.csv.columns").index(index);
        match expand(range) {
            Err(error) => errors.add(path, error.to_string()),
            Ok(expanded) => {
                for name in expanded {
                    if let Some(earlier) = seen.insert(name.clone(), index) {
                        errors.add(
                            path.clone(),
                            format!("the column `{name}` is named twice; it is already in columns[{earlier}]"),
                        );
                    }
                    names.push(name);
                }
            }
        }
        if names.len() > 2 * d::MAX_FEATURES {
            errors.add(
                at("spec.data.csv.columns"),
                format!("expected at most {} columns, with ranges expanded", 2 * d::MAX_FEATURES),
            );
            break;
        }
    }
    names
}

/// Checks the columns that the job reads against the column names in the manifest, if it has any.
fn columns(csv: &CsvFormat, schema: &Schema, parts: &TrainTest, errors: &mut Errors) {
    // A cell in quotes may have the separator of columns between its values.
    let is_split = |separator: &String| !csv.quoting && separator.contains(&csv.delimiter);
    for feature in schema.sparse.iter().filter(|feature| feature.multi_value.as_ref().is_some_and(is_split)) {
        errors.add(
            at("spec.features.sparse"),
            format!(
                "the values of `{}` are separated by the text that separates columns: expected another `separator`, or \
                 cells in quotes (spec.data.csv.quoting: true)",
                feature.name
            ),
        );
    }
    let Some(known) = &csv.columns else { return };
    let names: HashSet<&str> = known.iter().map(String::as_str).collect();
    let mut need = |name: &str, path: &str, what: &str| {
        // A suggestion compares the name with every column, for nothing if there is no room for it.
        if names.contains(name) || errors.is_full() {
            return;
        }
        let hint = suggest::nearest(name, known.iter().map(String::as_str));
        let hint = hint.map(|hint| format!("; did you mean `{hint}`?")).unwrap_or_default();
        errors.add(at(path), format!("{what} `{name}` is not among spec.data.csv.columns{hint}"));
    };
    need(&schema.label.name, "spec.features.label.name", "the label");
    for feature in &schema.sparse {
        need(&feature.name, "spec.features.sparse", "the sparse feature");
    }
    for feature in &schema.dense {
        need(&feature.name, "spec.features.dense", "the dense feature");
    }
    if let Some(group) = &schema.group {
        need(group, "spec.features.group", "the group");
    }
    if let TrainTest::Divided { split: Split::Time { column, .. }, .. } = parts {
        need(column, "spec.data.split.time.column", "the time column");
    }
    if let Some(time) = &schema.time {
        need(&time.name, "spec.data.timeColumn.name", "the time column");
    }
}

fn training(spec: &RecTrainingJobSpec, errors: &mut Errors) -> ResolvedTraining {
    let given = &spec.training.clone().unwrap_or_default();
    let optimizer = given.optimizer.clone().unwrap_or_default();
    let mode = given.mode.unwrap_or_default();
    ResolvedTraining {
        mode: mode.first(),
        auto: (mode == ModeSpec::Auto).then(|| auto_mode(&given.auto.clone().unwrap_or_default())),
        global_batch_size: given.global_batch_size.unwrap_or(d::GLOBAL_BATCH_SIZE) as usize,
        length: match given.steps {
            Some(steps) => TrainingLength::Steps(steps),
            None => TrainingLength::Epochs(given.epochs.unwrap_or(d::EPOCHS)),
        },
        seed: given.seed.unwrap_or(d::SEED),
        local_batch_size: given.local_batch_size.map(|rows| rows as usize),
        barrier_workers: given.barrier_workers.map(|workers| workers as usize),
        gba_staleness: given.gba.as_ref().and_then(|gba| gba.staleness).unwrap_or(d::GBA_STALENESS),
        gba_key_divisor: given.gba.as_ref().and_then(|gba| gba.key_divisor).unwrap_or_default(),
        hop_bs_bound: given.hop_bs.as_ref().and_then(|hop_bs| hop_bs.bound).unwrap_or(d::HOP_BS_BOUND),
        hop_bw_backups: given.hop_bw.as_ref().and_then(|hop_bw| hop_bw.backups).unwrap_or(d::HOP_BW_BACKUPS),
        bsp_aggregate: given.bsp.as_ref().and_then(|bsp| bsp.aggregate),
        shadow: shadow(&given.shadow.clone().unwrap_or_default()),
        switch_at: given.switch_at.clone(),
        look_ahead: given.sync.as_ref().and_then(|sync| sync.look_ahead).unwrap_or(d::LOOK_AHEAD),
        sync_pieces: given.sync.as_ref().and_then(|sync| sync.pieces).unwrap_or_default(),
        staleness: given.hybrid.as_ref().and_then(|hybrid| hybrid.staleness).unwrap_or(d::STALENESS),
        dense_optimizer: dense_optimizer(&optimizer.dense.unwrap_or_default()),
        sparse_optimizer: sparse_optimizer(&optimizer.sparse.unwrap_or_default(), spec.features.memory.is_some()),
        first_order_optimizer: optimizer
            .first_order
            .map(|given| sparse_optimizer(&given, spec.features.memory.is_some())),
        embedding_value_type: given.embedding_value_type.unwrap_or_default(),
        precision: given.precision.unwrap_or_default(),
        compression: given.compression.unwrap_or_default(),
        partial_pooling: given.partial_pooling.unwrap_or_default(),
        loss: match given.late_labels {
            None => LossKind::BinaryCrossEntropy,
            Some(LateLabelsSpec::FakeNegativeWeighted) => LossKind::FakeNegativeWeighted,
        },
        evaluation: evaluation(given.evaluation.as_ref()),
        quality: quality(&given.quality.clone().unwrap_or_default(), errors),
        divergence_factor: given.divergence_factor.unwrap_or(d::DIVERGENCE_FACTOR),
    }
}

fn quality(given: &QualitySpec, errors: &mut Errors) -> ResolvedQuality {
    ResolvedQuality {
        window_rows: u64::from(given.window_rows.unwrap_or(d::WINDOW_ROWS)),
        baseline: given.baseline.as_ref().and_then(|baseline| frozen(baseline, errors)),
        on_regression: given.on_regression.as_ref().map(|given| RegressionRule {
            metric: given.metric.unwrap_or_default(),
            tolerance: given.tolerance,
            action: given.action.unwrap_or_default(),
        }),
    }
}

/// The checkpoint of a frozen model. It must stay the same, so it has a step.
fn frozen(given: &BaselineSpec, errors: &mut Errors) -> Option<WarmStart> {
    let field = at("spec.training.quality.baseline.from");
    match WarmStart::parse(&given.from) {
        Ok(from) if from.step.is_some() => Some(from),
        Ok(from) => {
            let path = &from.path;
            let message = format!(
                "a frozen model stays the same, and the latest checkpoint does not: expected the number of a step, such as \
                 {path}@1200, found `{}` (`rectrain checkpoint ls {path}` lists them)",
                given.from
            );
            errors.add(field, message);
            None
        }
        Err(problem) => {
            errors.add(field, problem);
            None
        }
    }
}

/// Only a job on a stream can wait for ever without being stalled.
fn pauses(job: &ResolvedJob, errors: &mut Errors) {
    let pauses = job.training.quality.on_regression.is_some_and(|rule| rule.action == RegressionAction::Pause);
    if pauses && !matches!(job.data.source, DataSource::Stream(_) | DataSource::Follow(_)) {
        errors.add(
            at("spec.training.quality.onRegression.action"),
            "only a job on a stream can pause: train from spec.data.train.kafka or spec.data.train.follow, or choose `alert`",
        );
    }
}

/// A job can go back only to a checkpoint from before the fall. Files are read again from the place
/// in the checkpoint, with the rows that made the model worse.
fn rolls_back(job: &ResolvedJob, errors: &mut Errors) {
    if job.training.quality.on_regression.is_none_or(|rule| rule.action != RegressionAction::Rollback) {
        return;
    }
    let field = at("spec.training.quality.onRegression.action");
    if !matches!(job.data.source, DataSource::Stream(_) | DataSource::Follow(_)) {
        errors.add(
            field.clone(),
            "only a job on a stream can leave out the rows that made its model worse: train from spec.data.train.kafka or spec.data.train.follow, or choose `alert`",
        );
    }
    let is_regular = |saved: &ResolvedCheckpoint| saved.every_steps.is_some() || saved.every_seconds.is_some();
    if !job.checkpoint.as_ref().is_some_and(is_regular) {
        errors.add(
            field,
            "training goes back to a checkpoint, and none is saved while it goes on: give spec.checkpoint.path, with everySeconds or everySteps",
        );
    }
}

/// Offsets are committed with checkpoints. A job that begins at a group's offsets may leave them.
fn commits(job: &ResolvedJob, errors: &mut Errors) {
    let DataSource::Stream(StreamSource { kafka, .. }) = &job.data.source else { return };
    if kafka.group.is_some() && kafka.start != StreamStart::Committed && job.checkpoint.is_none() {
        errors.add(
            at("spec.data.train.kafka.group"),
            "offsets are committed with checkpoints, and there are none: give spec.checkpoint.path, or remove `group`",
        );
    }
}

fn shadow(given: &ShadowSpec) -> ResolvedShadow {
    ResolvedShadow {
        algorithm: given.algorithm.unwrap_or_default(),
        alpha: given.alpha.unwrap_or(d::SHADOW_ALPHA),
        every_steps: given.every_steps,
        eta: given.eta.unwrap_or(d::SHADOW_ETA),
        momentum: given.momentum.unwrap_or(d::SHADOW_MOMENTUM),
        nesterov: given.nesterov.unwrap_or_default(),
        fragments: given.fragments.unwrap_or(d::SHADOW_FRAGMENTS),
        wire_precision: given.wire_precision.unwrap_or_default(),
        threads: given.threads.unwrap_or(d::SHADOW_THREADS),
        output_model: given.output_model.unwrap_or_default(),
    }
}

fn auto_mode(given: &AutoModeSpec) -> ResolvedAutoMode {
    ResolvedAutoMode {
        margin: given.margin.unwrap_or(d::MODE_MARGIN),
        window_seconds: given.window_seconds.unwrap_or(d::MODE_WINDOW_SECONDS),
        dwell_seconds: given.dwell_seconds.unwrap_or(d::MODE_DWELL_SECONDS),
        switches_per_hour: given.switches_per_hour.unwrap_or(d::MODE_SWITCHES_PER_HOUR),
        crowded_cpu: given.crowded_cpu.unwrap_or(d::MODE_CROWDED_CPU),
    }
}

/// Leaves out roles with an external scaler, and roles whose decisions could not be carried out
/// where they should be.
fn autoscaling(given: &AutoscalingSpec, spec: &RecTrainingJobSpec, errors: &mut Errors) -> ResolvedAutoscaling {
    let replicas = roles(&spec.roles.clone().unwrap_or_default());
    let ps = given.ps.clone().unwrap_or_default();
    let embedding = given.embedding_worker.clone().unwrap_or_default();
    let dense = given.dense_worker.clone().unwrap_or_default();
    let mode = given.mode.unwrap_or_default();
    let is_ours = |scaler: Option<Scaler>| scaler.unwrap_or_default() == Scaler::Operator;
    let training = spec.training.as_ref();
    let rows = training.and_then(|training| training.global_batch_size).unwrap_or(d::GLOBAL_BATCH_SIZE);
    let local = training.and_then(|training| training.local_batch_size).filter(|local| *local > 0);
    let carries_out = mode == AutoscalingMode::Apply;
    // Each dense worker needs a local batch. Without a fixed size, it would change with every dense
    // worker.
    let has_elastic_workers = !carries_out || local.is_some();
    if !has_elastic_workers && given.dense_worker.as_ref().is_some_and(|dense| is_ours(dense.scaler)) {
        let message = "with mode: apply spec.training.localBatchSize must be set, so that a batch has a piece for every possible dense worker: \
                       set it, remove this, or choose mode: recommend";
        errors.add(at("spec.autoscaling").key("denseWorker"), message);
    }
    let pieces = local.filter(|_| carries_out).map_or(rows, |local| rows.div_ceil(local));
    ResolvedAutoscaling {
        mode,
        ps: is_ours(ps.scaler).then(|| ResolvedPsScaling {
            bounds: bounds("ps", ps.min, ps.max, replicas.members.ps, d::MAX_REPLICAS, errors),
            memory_target: ps.memory_target.unwrap_or(d::PS_MEMORY_TARGET),
            busy_target: ps.busy_target.unwrap_or(d::PS_BUSY_TARGET),
            max_memory_bytes: ps.max_memory_gib.map(|gib| u64::from(gib) << 30),
        }),
        embedding_worker: is_ours(embedding.scaler).then(|| ResolvedEmbeddingWorkerScaling {
            bounds: bounds(
                "embeddingWorker",
                embedding.min,
                embedding.max,
                replicas.members.embedding_worker,
                d::MAX_REPLICAS,
                errors,
            ),
            queue_wait_seconds: embedding.queue_wait_seconds,
        }),
        dense_worker: (is_ours(dense.scaler) && has_elastic_workers).then(|| ResolvedDenseWorkerScaling {
            bounds: bounds(
                "denseWorker",
                // In modes with a barrier, no fewer can train.
                dense.min.map(|min| min.max(training.and_then(|training| training.barrier_workers).unwrap_or(min))),
                dense.max,
                replicas.members.dense_worker,
                d::MAX_REPLICAS.min(pieces),
                errors,
            ),
            marginal_throughput: dense.marginal_throughput.unwrap_or(d::MARGINAL_THROUGHPUT),
            price_per_hour: dense.price_per_hour,
            max_cost_per_million_samples: dense.max_cost_per_million_samples,
        }),
        loader: loader_scaling(given, replicas.members.loader, errors),
        cool_down_seconds: given.cool_down_seconds.unwrap_or(d::COOL_DOWN_SECONDS),
        up_window_seconds: given.up_window_seconds.unwrap_or(d::UP_WINDOW_SECONDS),
        down_window_seconds: given.down_window_seconds.unwrap_or(d::DOWN_WINDOW_SECONDS),
    }
}

/// How loaders are scaled; `None` if an external scaler scales them.
fn loader_scaling(given: &AutoscalingSpec, role: ResolvedRole, errors: &mut Errors) -> Option<ResolvedLoaderScaling> {
    let LoaderScalingSpec { scaler, min, max, catch_up_seconds, busy_target, wait_target } =
        given.loader.clone().unwrap_or_default();
    (scaler.unwrap_or_default() == Scaler::Operator).then(|| ResolvedLoaderScaling {
        bounds: bounds("loader", min, max, role, d::MAX_REPLICAS, errors),
        catch_up_seconds: catch_up_seconds.unwrap_or(d::CATCH_UP_SECONDS),
        busy_target: busy_target.unwrap_or(d::LOADER_BUSY_TARGET),
        wait_target: wait_target.unwrap_or(d::LOADER_WAIT_TARGET),
    })
}

/// A role starts with the replicas of `spec.roles`, which must be within its bounds. By default
/// these are the lower bound, and four times as many are the upper bound.
fn bounds(
    name: &str,
    min: Option<u32>,
    max: Option<u32>,
    role: ResolvedRole,
    most: u32,
    errors: &mut Errors,
) -> ResolvedBounds {
    let start = u32::try_from(role.replicas).unwrap_or(u32::MAX);
    let path = at("spec.autoscaling").key(name);
    if let Some(max) = max.filter(|max| *max < start) {
        errors
            .add(path.key("max"), format!("expected at least the {start} of spec.roles.{name}.replicas, found {max}"));
    }
    if let Some(min) = min.filter(|min| *min > start) {
        errors.add(path.key("min"), format!("expected at most the {start} of spec.roles.{name}.replicas, found {min}"));
    }
    if let Some(max) = max.filter(|max| *max > most) {
        let message = format!(
            "every dense worker needs at least one row, or local batch, of each batch: expected at most {most}, found {max}"
        );
        errors.add(path.key("max"), message);
    }
    let max = max.unwrap_or(start.saturating_mul(d::MAX_REPLICAS_FACTOR).min(most));
    ResolvedBounds { min: min.unwrap_or(start), max: max.max(start) }
}

/// Without a barrier a global batch consists of whole local batches (M of them are a step of
/// `gba`). Scheduled switches must be in order.
fn local_batches(job: &ResolvedJob, errors: &mut Errors) {
    let training = &job.training;
    let (rows, workers) = (training.global_batch_size, job.roles.members.dense_worker.replicas);
    let later = || training.switch_at.iter().map(|switch| switch.mode).chain(training.auto.map(|_| Mode::Gba));
    let modes = || std::iter::once(training.mode).chain(later());
    if let Some(mode) = modes().find(|mode| !mode.has_barrier())
        && training.local_batch_size.is_none()
        && !rows.is_multiple_of(workers)
    {
        let message = format!(
            "mode {mode} makes a global batch of M equal local batches, and {rows} rows cannot be divided equally among {workers} \
             dense workers: give a local batch size that divides {rows}, so that M = {rows} / localBatchSize"
        );
        errors.add(at("spec.training.localBatchSize"), message);
    }
    if modes().any(|mode| mode == Mode::HopBw) && training.hop_bw_backups as usize >= workers {
        let message = format!(
            "hopBw drops the gradients of the {} slowest of {workers} dense workers: expected fewer than there are",
            training.hop_bw_backups
        );
        errors.add(at("spec.training.hopBw.backups"), message);
    }
    if training.barrier_workers.is_some_and(|some| some > workers) {
        errors.add(
            at("spec.training.barrierWorkers"),
            format!("expected at most the {workers} dense workers of spec.roles.denseWorker.replicas"),
        );
    }
    if !training.switch_at.is_sorted_by_key(|switch| switch.step) {
        errors.add(at("spec.training.switchAt"), "expected switches in ascending order of `step`");
    }
}

/// The mode `des` needs a model with a substitution.
fn substitutions(job: &ResolvedJob, errors: &mut Errors) {
    let Some(refusal) = job.model.settings.kind().refuses_substitution() else { return };
    let training = &job.training;
    if training.mode == Mode::Des {
        errors.add(at("spec.training.mode"), refusal.clone());
    }
    for (index, _) in training.switch_at.iter().enumerate().filter(|(_, switch)| switch.mode == Mode::Des) {
        errors.add(at("spec.training.switchAt").index(index).key("mode"), refusal.clone());
    }
}

/// Continual training goes through the rows once, in their order.
fn slices(spec: &RecTrainingJobSpec, job: &ResolvedJob, errors: &mut Errors) {
    let DataSource::Files(FilePlan { parts: TrainTest::Slices { rows, .. }, .. }) = &job.data.source else {
        return;
    };
    let training = &job.training;
    if !rows.is_multiple_of(training.global_batch_size as u64) {
        let message = format!("expected a multiple of spec.training.globalBatchSize ({})", training.global_batch_size);
        errors.add(at("spec.data.split.slices.rows"), message);
    }
    if job.data.shuffle_window_rows.is_some() {
        errors.add(at("spec.data.shuffle"), "slices are trained in the order of the rows: remove `shuffle`");
    }
    if training.length != TrainingLength::Epochs(1) {
        let length = if matches!(training.length, TrainingLength::Epochs(_)) { "epochs" } else { "steps" };
        errors.add(at("spec.training").key(length), "training goes through slices only once: remove it");
    }
    if spec.training.as_ref().is_some_and(|training| training.evaluation.is_some()) {
        errors.add(
            at("spec.training.evaluation"),
            "slices decide when the model is tested, and on which rows: remove it",
        );
    }
}

fn evaluation(given: Option<&EvaluationSpec>) -> ResolvedEvaluation {
    let Some(given) = given else { return ResolvedEvaluation::End };
    match (given.every.unwrap_or_default(), given.steps) {
        (EvaluationTime::Steps, Some(steps)) => ResolvedEvaluation::Steps(steps),
        (EvaluationTime::Epoch, _) => ResolvedEvaluation::Epoch,
        _ => ResolvedEvaluation::End,
    }
}

fn dense_optimizer(given: &DenseOptimizerSpec) -> DenseOptimizer {
    let kind = given.kind.unwrap_or_default();
    let learning_rate = given.learning_rate;
    let beta1 = given.beta1.unwrap_or(d::ADAM_BETA1);
    let beta2 = given.beta2.unwrap_or(d::ADAM_BETA2);
    let epsilon = given.epsilon;
    match kind {
        DenseOptimizerKind::Adam => DenseOptimizer::Adam {
            learning_rate: learning_rate.unwrap_or(d::ADAM_LEARNING_RATE),
            beta1,
            beta2,
            epsilon: epsilon.unwrap_or(d::ADAM_EPSILON),
            weight_decay: given.weight_decay.unwrap_or(0.0),
        },
        DenseOptimizerKind::AdamW => DenseOptimizer::AdamW {
            learning_rate: learning_rate.unwrap_or(d::ADAM_LEARNING_RATE),
            beta1,
            beta2,
            epsilon: epsilon.unwrap_or(d::ADAM_EPSILON),
            weight_decay: given.weight_decay.unwrap_or(d::ADAM_W_WEIGHT_DECAY),
        },
        DenseOptimizerKind::Sgd => DenseOptimizer::Sgd {
            learning_rate: learning_rate.unwrap_or(d::SGD_LEARNING_RATE),
            momentum: given.momentum.unwrap_or(d::SGD_MOMENTUM),
        },
        DenseOptimizerKind::AdaGrad => DenseOptimizer::AdaGrad {
            learning_rate: learning_rate.unwrap_or(d::ADA_GRAD_LEARNING_RATE),
            initial_accumulator: given.initial_accumulator.unwrap_or(d::ADA_GRAD_INITIAL_ACCUMULATOR),
            epsilon: epsilon.unwrap_or(d::ADA_GRAD_EPSILON),
        },
    }
}

/// The default where tables have a budget keeps one number a row (Kraken's Table II). The settings
/// of adam without a kind mean adam.
fn default_sparse_kind(given: &SparseOptimizerSpec, has_budget: bool) -> SparseOptimizerKind {
    match has_budget && given.beta1.is_none() && given.beta2.is_none() {
        true => SparseOptimizerKind::RowWiseAdaGrad,
        false => SparseOptimizerKind::Adam,
    }
}

fn sparse_optimizer(given: &SparseOptimizerSpec, has_budget: bool) -> SparseOptimizer {
    let learning_rate = given.learning_rate;
    let accumulated = |row_wise: bool| {
        let learning_rate = learning_rate.unwrap_or(d::ADA_GRAD_LEARNING_RATE);
        let initial_accumulator = given.initial_accumulator.unwrap_or(d::ADA_GRAD_INITIAL_ACCUMULATOR);
        let epsilon = given.epsilon.unwrap_or(d::ADA_GRAD_EPSILON);
        if row_wise {
            SparseOptimizer::RowWiseAdaGrad { learning_rate, initial_accumulator, epsilon }
        } else {
            SparseOptimizer::AdaGrad { learning_rate, initial_accumulator, epsilon }
        }
    };
    match given.kind.unwrap_or_else(|| default_sparse_kind(given, has_budget)) {
        SparseOptimizerKind::Adam => SparseOptimizer::Adam {
            learning_rate: learning_rate.unwrap_or(d::ADAM_LEARNING_RATE),
            beta1: given.beta1.unwrap_or(d::ADAM_BETA1),
            beta2: given.beta2.unwrap_or(d::ADAM_BETA2),
            epsilon: given.epsilon.unwrap_or(d::ADAM_EPSILON),
        },
        SparseOptimizerKind::AdaGrad => accumulated(false),
        SparseOptimizerKind::RowWiseAdaGrad => accumulated(true),
        SparseOptimizerKind::Sgd => {
            SparseOptimizer::Sgd { learning_rate: learning_rate.unwrap_or(d::SGD_LEARNING_RATE) }
        }
        SparseOptimizerKind::Ftrl => SparseOptimizer::Ftrl {
            learning_rate: learning_rate.unwrap_or(d::FTRL_LEARNING_RATE),
            beta: given.beta.unwrap_or(d::FTRL_BETA),
            l1: given.l1.unwrap_or(d::FTRL_L1),
            l2: given.l2.unwrap_or(d::FTRL_L2),
        },
    }
}

fn roles(given: &RolesSpec) -> ResolvedRoles {
    let dense_worker = given.dense_worker.clone().unwrap_or_default();
    let members = PerRole::from_fn(|role| ResolvedRole {
        replicas: given.replicas(role).unwrap_or(d::REPLICAS) as usize,
        threads: given.threads(role).map(|threads| threads as usize),
    });
    ResolvedRoles { members, device: dense_worker.device(), gpus: dense_worker.gpus() }
}

fn fault_tolerance(given: Option<&FaultToleranceSpec>) -> ResolvedFaultTolerance {
    let given = given.cloned().unwrap_or_default();
    ResolvedFaultTolerance {
        max_restarts: given.max_restarts.unwrap_or(d::MAX_RESTARTS),
        backoff_seconds: given.backoff_seconds.unwrap_or(d::BACKOFF_SECONDS),
        stall_seconds: given.stall_seconds.unwrap_or(d::STALL_SECONDS),
        shared_memory: given.shared_memory.unwrap_or(d::SHARED_MEMORY),
        replace_slow: given.replace_slow.map(|given| ResolvedReplaceSlow {
            after_seconds: given.after_seconds.unwrap_or(d::REPLACE_SLOW_AFTER_SECONDS),
            per_hour: given.per_hour.unwrap_or(d::REPLACE_SLOW_PER_HOUR),
        }),
    }
}

fn warm_start(spec: &RecTrainingJobSpec, errors: &mut Errors) -> Option<WarmStart> {
    let given = spec.checkpoint.as_ref()?;
    let field = at("spec.checkpoint.from");
    let from = match WarmStart::parse(given.from.as_deref()?) {
        Ok(from) => from,
        Err(problem) => {
            errors.add(field, problem);
            return None;
        }
    };
    if given.path.as_deref().is_some_and(|path| from.is_in(path)) {
        let path = &from.path;
        errors.add(
            field,
            format!(
                "expected the checkpoint path of another job, found this job's own spec.checkpoint.path {path}: \
                 set spec.checkpoint.resume to `latest` instead to resume there, or give this job another path"
            ),
        );
    }
    Some(from)
}

/// The seconds between two publications, if they are given.
fn publish_seconds(spec: &RecTrainingJobSpec) -> Option<f64> {
    spec.serving.as_ref()?.publish.as_ref()?.every_seconds
}

fn publish(spec: &RecTrainingJobSpec, errors: &mut Errors) -> Option<ResolvedPublish> {
    let given = spec.serving.as_ref()?.publish.as_ref()?;
    match spec.checkpoint.as_ref().and_then(|checkpoint| checkpoint.path.as_deref()) {
        None => errors.add(
            at("spec.serving.publish"),
            "models are published from checkpoints, and there are none: give spec.checkpoint.path, or remove `publish`",
        ),
        Some(path) if path.trim_end_matches('/') == given.path.trim_end_matches('/') => errors.add(
            at("spec.serving.publish.path"),
            format!("expected another path than spec.checkpoint.path, found {path}"),
        ),
        Some(_) => {}
    }
    refuse_unknown_counts(spec, given, errors);
    Some(ResolvedPublish {
        path: given.path.clone(),
        every_seconds: given.every_seconds,
        keep: given.keep.unwrap_or(d::PUBLICATIONS_KEPT) as usize,
        min_count: given.min_count,
    })
}

/// Only the policy `lfu` counts the examples of a row.
fn refuse_unknown_counts(spec: &RecTrainingJobSpec, publish: &PublishSpec, errors: &mut Errors) {
    let policy = spec.features.eviction.as_ref().and_then(|eviction| eviction.policy).unwrap_or_default();
    let found = match (publish.min_count, &spec.features.memory) {
        (None, _) => return,
        (_, Some(_)) if policy == EvictionKind::Lfu => return,
        (_, Some(_)) => format!("with the eviction policy {} they do not", policy.name()),
        (_, None) => "without a budget they do not".to_owned(),
    };
    let remedy = "set spec.features.memory and spec.features.eviction.policy: lfu, or remove `minCount`";
    errors.add(
        at("spec.serving.publish.minCount"),
        format!("a row is published once it has counted enough examples, and {found}: {remedy}"),
    );
}

/// `at_most` are the most seconds between two checkpoints that another field allows.
fn checkpoint(given: &CheckpointSpec, at_most: Option<f64>) -> Option<ResolvedCheckpoint> {
    Some(ResolvedCheckpoint {
        path: given.path.clone()?,
        every_steps: given.every_steps,
        every_seconds: given.every_seconds.map(|seconds| seconds as f64).into_iter().chain(at_most).reduce(f64::min),
        full_every: given.full_every.unwrap_or(d::FULL_CHECKPOINT_EVERY),
        keep: given.keep.unwrap_or(d::CHECKPOINTS_KEPT) as usize,
        resume: given.resume.unwrap_or_default(),
    })
}
