//! `kind: Simulation`, the input of `rectrain simulate`: how many workers, how fast and how
//! troubled they are, and which training modes. It is read as strictly as a job
//! ([`load_simulation`]), with the same `--set` overrides. No cluster ever sees one. Absent fields
//! hold their defaults.

use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::manifest::{DocumentKind, Sources, read_document};
use crate::typed::typed;
use crate::{
    FieldError, FieldPath, HopBsSpec, HybridSpec, ManifestError, Mode, Override, SyncPieces, defaults, schema,
};

/// The default of `spec.workers`.
const WORKERS: [u32; 1] = [8];
/// The default of `spec.seconds`.
const SECONDS: f64 = 30.0;
/// The default of `spec.localBatchSize`.
const LOCAL_BATCH_SIZE: u32 = 512;
/// The default of `spec.stepSeconds`.
const STEP_SECONDS: [f64; 1] = [0.05];
/// The default of `spec.servers.requestSeconds`.
const REQUEST_SECONDS: f64 = 4e-6;
/// The default of `spec.servers.bytesPerSecond`: 100 Gbit/s.
const SERVER_BYTES_PER_SECOND: f64 = 12.5e9;
/// The default of `spec.embeddingWorkers.count` and `spec.loaders.count`.
const MEMBERS: u32 = 2;
/// The default of `spec.loaders.batchesPerChunk`.
const BATCHES_PER_CHUNK: u32 = 4;
/// The default of `spec.network.latencySeconds`.
const LATENCY_SECONDS: f64 = 1e-4;
/// The default of `spec.network.bytesPerSecond`: 10 Gbit/s.
const BYTES_PER_SECOND: f64 = 1.25e9;
/// The default of `spec.network.denseBytes`: 250,000 parameters.
const DENSE_BYTES: f64 = 1e6;
/// The default of `spec.network.embeddingBytesPerRow`: 26 features of 16 columns.
const EMBEDDING_BYTES_PER_ROW: f64 = 1664.0;
/// The default of `spec.network.detectionSeconds`.
const DETECTION_SECONDS: f64 = 5.0;

/// A group of workers with a problem. Groups take consecutive workers, and start again at the first
/// worker after the last one: shares that add up to at most 1 do not overlap. A worker in several
/// groups has the problems of all.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct StragglersSpec {
    /// The group's share of the workers, above 0. It is rounded to a whole number of workers, at
    /// least one.
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = "all workers, or the ones in `workers`"))]
    pub share: Option<f64>,

    /// The group's workers by number, from 0.
    #[schemars(length(min = 1, max = 4096), inner(range(min = 0, max = 99_999)), extend("x-default" = "the workers of `share`"))]
    pub workers: Option<Vec<u32>>,

    /// The factor on the duration of a batch.
    #[schemars(range(min = 0.01, max = 1_000_000.0), extend("x-default" = "1"))]
    pub factor: Option<f64>,

    /// The group is slow only for the first `slowSeconds` of each period of this many seconds. The
    /// seed draws when the periods of each worker begin.
    #[schemars(range(min = 0.001, max = 10_000_000.0), extend("x-default" = "slow all the time"))]
    pub period_seconds: Option<f64>,

    /// The slow part of each period, in seconds.
    #[schemars(range(min = 0.001, max = 10_000_000.0), extend("x-default" = "required with `periodSeconds`"))]
    pub slow_seconds: Option<f64>,

    /// Batches whose duration is a Pareto-distributed multiple of the usual one.
    pub heavy_tail: Option<HeavyTailSpec>,

    /// The group is not slow before this time of the simulation.
    #[schemars(range(min = 0.0, max = 10_000_000.0), extend("x-default" = 0.0))]
    pub from_seconds: f64,

    /// The group is not slow from this time on.
    #[schemars(range(min = 0.0, max = 10_000_000.0), extend("x-default" = "slow to the end"))]
    pub until_seconds: Option<f64>,

    /// The factor on the duration of a message over the workers' links.
    #[schemars(range(min = 0.01, max = 1_000_000.0), extend("x-default" = "1"))]
    pub link_factor: Option<f64>,

    /// Workers that crash at random and come back.
    pub crashes: Option<CrashesSpec>,
}

/// Batches whose duration is multiplied by a Pareto-distributed factor: P(factor > x) = x^−shape.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HeavyTailSpec {
    /// The probability that a batch is affected.
    #[serde(default = "one")]
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = 1.0))]
    pub probability: f64,

    /// The Pareto distribution's shape. A smaller shape means a heavier tail; at 1 and below its
    /// mean is infinite. Required.
    #[schemars(range(min = 0.1, max = 100.0))]
    pub shape: f64,

    /// The largest factor.
    #[serde(default = "hundred")]
    #[schemars(range(min = 1.0, max = 1_000_000.0), extend("x-default" = 100.0))]
    pub limit: f64,
}

fn one() -> f64 {
    1.0
}

fn hundred() -> f64 {
    100.0
}

/// Crashing workers. The times between crashes are exponentially distributed, drawn by the seed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CrashesSpec {
    /// Mean seconds from a worker's start to its crash. Required.
    #[schemars(range(min = 0.001, max = 1_000_000_000.0))]
    pub mean_seconds_between: f64,

    /// Seconds from a crash until the worker is back. Required.
    #[schemars(range(min = 0.0, max = 10_000_000.0))]
    pub recovery_seconds: f64,
}

/// The parameter servers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SimulatedServersSpec {
    /// The number of servers.
    #[schemars(range(min = 1, max = 64), extend("x-default" = "one for 100 workers, from 2 to 64"))]
    pub count: Option<u32>,

    /// Seconds that a pull or a push takes a server besides its bytes. A server handles one request
    /// after another.
    #[schemars(range(min = 0.0, max = 1000.0), extend("x-default" = REQUEST_SECONDS))]
    pub request_seconds: f64,

    /// Bytes that one server sends or receives per second.
    #[schemars(range(min = 1.0, max = 1e18), extend("x-default" = SERVER_BYTES_PER_SECOND))]
    pub bytes_per_second: f64,

    /// Servers that are slower than the others.
    pub slow: Option<SlowMembersSpec>,

    /// Whether slots move away from slow servers and back, as in a job.
    #[schemars(extend("x-default" = false))]
    pub move_slots: bool,
}

impl Default for SimulatedServersSpec {
    fn default() -> Self {
        Self {
            count: None,
            request_seconds: REQUEST_SECONDS,
            bytes_per_second: SERVER_BYTES_PER_SECOND,
            slow: None,
            move_slots: false,
        }
    }
}

/// Members of a role that are slower than the others: the first ones, by number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SlowMembersSpec {
    /// The number of slow members.
    #[serde(default = "one_member")]
    #[schemars(range(min = 1, max = 64), extend("x-default" = 1))]
    pub count: u32,

    /// The factor on the duration of their work, bytes included. Required.
    #[schemars(range(min = 0.01, max = 1_000_000.0))]
    pub factor: f64,

    /// The members are not slow before this time of the simulation.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = 10_000_000.0), extend("x-default" = 0.0))]
    pub from_seconds: f64,

    /// The members are not slow from this time on.
    #[schemars(range(min = 0.0, max = 10_000_000.0), extend("x-default" = "slow to the end"))]
    pub until_seconds: Option<f64>,
}

fn one_member() -> u32 {
    1
}

/// The embedding workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SimulatedEmbeddingSpec {
    /// The number of embedding workers.
    #[schemars(range(min = 1, max = 64), extend("x-default" = MEMBERS))]
    pub count: u32,

    /// Seconds that a batch of `localBatchSize` rows takes an embedding worker, with its gradients.
    /// An embedding worker handles one batch after another. 0 leaves them out.
    #[schemars(range(min = 0.0, max = 1000.0), extend("x-default" = 0.0))]
    pub batch_seconds: f64,

    /// Embedding workers that are slower than the others.
    pub slow: Option<SlowMembersSpec>,

    /// Whether a slow embedding worker gets fewer batches, and as many again when it is well, as in
    /// a job.
    #[schemars(extend("x-default" = false))]
    pub move_pieces: bool,
}

impl Default for SimulatedEmbeddingSpec {
    fn default() -> Self {
        Self { count: MEMBERS, batch_seconds: 0.0, slow: None, move_pieces: false }
    }
}

/// The loaders.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SimulatedLoadersSpec {
    /// The number of loaders.
    #[schemars(range(min = 1, max = 64), extend("x-default" = MEMBERS))]
    pub count: u32,

    /// Seconds that a loader reads `localBatchSize` rows. 0 leaves loaders out.
    #[schemars(range(min = 0.0, max = 1000.0), extend("x-default" = 0.0))]
    pub batch_seconds: f64,

    /// Global batches of a chunk. A loader reads one chunk after another, and training needs the
    /// chunks in order.
    #[schemars(range(min = 1, max = 4096), extend("x-default" = BATCHES_PER_CHUNK))]
    pub batches_per_chunk: u32,

    /// Loaders that are slower than the others.
    pub slow: Option<SlowMembersSpec>,

    /// Whether a slow loader gets fewer chunks, which a second one reads as well, as in a job.
    #[schemars(extend("x-default" = false))]
    pub move_chunks: bool,
}

impl Default for SimulatedLoadersSpec {
    fn default() -> Self {
        Self {
            count: MEMBERS,
            batch_seconds: 0.0,
            batches_per_chunk: BATCHES_PER_CHUNK,
            slow: None,
            move_chunks: false,
        }
    }
}

/// The links between workers and servers, and the bytes they carry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct NetworkSpec {
    /// Seconds that a message takes one way, besides its bytes.
    #[schemars(range(min = 0.0, max = 1000.0), extend("x-default" = LATENCY_SECONDS))]
    pub latency_seconds: f64,

    /// Bytes per second over one worker's link, in each direction.
    #[schemars(range(min = 1.0, max = 1e18), extend("x-default" = BYTES_PER_SECOND))]
    pub bytes_per_second: f64,

    /// Bytes of all dense parameters, and of their gradients.
    #[schemars(range(min = 0.0, max = 1e15), extend("x-default" = DENSE_BYTES))]
    pub dense_bytes: f64,

    /// Bytes of the embeddings of one row of a batch, and of their gradients.
    #[schemars(range(min = 0.0, max = 1e9), extend("x-default" = EMBEDDING_BYTES_PER_ROW))]
    pub embedding_bytes_per_row: f64,

    /// Seconds until the coordinator notices that a worker has crashed.
    #[schemars(range(min = 0.0, max = 1_000_000.0), extend("x-default" = DETECTION_SECONDS))]
    pub detection_seconds: f64,
}

impl Default for NetworkSpec {
    fn default() -> Self {
        Self {
            latency_seconds: LATENCY_SECONDS,
            bytes_per_second: BYTES_PER_SECOND,
            dense_bytes: DENSE_BYTES,
            embedding_bytes_per_row: EMBEDDING_BYTES_PER_ROW,
            detection_seconds: DETECTION_SECONDS,
        }
    }
}

/// The use of a token after its worker crashed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum SimulatedLostTokens {
    /// The token is lost, as in the paper. Tokens then run ahead of the global step.
    #[default]
    Vanish,
    /// The token's value is handed out once more.
    Replace,
}

/// Settings of the mode `sync`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SimulatedSyncSpec {
    /// Which dense worker computes a piece of a global batch: each its own one (`fixed`), or any
    /// that is free (`pulled`), as in a job.
    #[schemars(extend("x-default" = SyncPieces::Fixed))]
    pub pieces: SyncPieces,

    /// Rows of a pulled piece. A global batch has workers · `spec.localBatchSize` / this pieces.
    /// Three pieces or more for each worker are best. Fixed pieces ignore it.
    #[schemars(range(min = 1, max = 16_777_216), extend("x-default" = "spec.localBatchSize"))]
    pub local_batch_size: Option<u32>,
}

/// Settings of the mode `gba`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SimulatedGbaSpec {
    /// Rows of a local batch in this mode (B_a). The gradient buffer holds the gradients of one
    /// global batch of `sync`: workers · `spec.localBatchSize` / this.
    #[schemars(range(min = 1, max = 16_777_216), extend("x-default" = "spec.localBatchSize"))]
    pub local_batch_size: Option<u32>,

    /// ι: a gradient more than this many global steps old is left out of the dense parameters.
    #[schemars(range(min = 0, max = 1024), extend("x-default" = defaults::GBA_STALENESS))]
    pub staleness: u32,

    /// The use of tokens whose worker crashed.
    #[schemars(extend("x-default" = SimulatedLostTokens::Vanish))]
    pub lost_tokens: SimulatedLostTokens,
}

impl Default for SimulatedGbaSpec {
    fn default() -> Self {
        Self { local_batch_size: None, staleness: defaults::GBA_STALENESS, lost_tokens: SimulatedLostTokens::default() }
    }
}

/// Settings of the mode `hopBw`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SimulatedHopBwSpec {
    /// b3: the number of slowest workers whose gradients each step ignores.
    #[schemars(range(min = 0, max = 99_999), extend("x-default" = "a quarter of the workers"))]
    pub backups: Option<u32>,
}

/// Settings of the mode `bsp`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SimulatedBspSpec {
    /// b2: the number of gradients in a step.
    #[schemars(range(min = 1, max = 1_000_000), extend("x-default" = "an eighth of the workers, at least 1"))]
    pub aggregate: Option<u32>,
}

/// A simulation: dense workers of unequal speed, in every training mode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SimulationSpec {
    /// The number of dense workers. Each number in the list is simulated.
    #[schemars(length(min = 1, max = 16), inner(range(min = 1, max = 100_000)), extend("x-default" = WORKERS))]
    pub workers: Vec<u32>,

    /// The training modes to compare.
    #[schemars(length(min = 1, max = 9), extend("x-default" = "all nine"))]
    pub modes: Vec<Mode>,

    /// The simulated training time, in seconds.
    #[schemars(range(min = 0.001, max = 10_000_000.0), extend("x-default" = SECONDS))]
    pub seconds: f64,

    /// Seed of everything random. The same document and seed give the same figures to the last
    /// digit.
    #[schemars(range(min = 0, max = 9_007_199_254_740_991u64), extend("x-default" = defaults::SEED))]
    pub seed: u64,

    /// Rows of a worker's batch. The global batch of `sync` is this times the number of workers.
    #[schemars(range(min = 1, max = 16_777_216), extend("x-default" = LOCAL_BATCH_SIZE))]
    pub local_batch_size: u32,

    /// Seconds that a batch takes a worker without a problem: one number for all workers, or the
    /// measured mean of each. If there are more workers than numbers, the list repeats.
    #[schemars(length(min = 1, max = 4096), inner(range(min = 0.000_001, max = 1_000_000.0)), extend("x-default" = STEP_SECONDS))]
    pub step_seconds: Vec<f64>,

    /// The part of `stepSeconds` that does not depend on the number of rows. Matters with
    /// `spec.gba.localBatchSize`.
    #[schemars(range(min = 0.0, max = 1_000_000.0), extend("x-default" = 0.0))]
    pub overhead_seconds: f64,

    /// A file with the measured seconds of each worker's batches, instead of `stepSeconds`. A CSV
    /// file has the columns `worker` and `seconds`. A .jsonl file has an object with these two
    /// fields in each line. The path is relative to the working directory of `rectrain`.
    #[schemars(length(min = 1, max = 1024), extend("x-default" = "no trace"))]
    pub trace: Option<String>,

    /// Groups of workers with a problem: constant, periodic or heavy-tailed slowness, slow links,
    /// crashes.
    #[schemars(length(max = 64), extend("x-default" = "none"))]
    pub stragglers: Vec<StragglersSpec>,

    /// The parameter servers.
    pub servers: SimulatedServersSpec,

    /// The embedding workers.
    pub embedding_workers: SimulatedEmbeddingSpec,

    /// The loaders.
    pub loaders: SimulatedLoadersSpec,

    /// The network.
    pub network: NetworkSpec,

    /// Settings of the mode `sync`.
    pub sync: SimulatedSyncSpec,

    /// Settings of the mode `hybrid`.
    pub hybrid: HybridSpec,

    /// Settings of the mode `gba`.
    pub gba: SimulatedGbaSpec,

    /// Settings of the mode `hopBs`.
    pub hop_bs: HopBsSpec,

    /// Settings of the mode `hopBw`.
    pub hop_bw: SimulatedHopBwSpec,

    /// Settings of the mode `bsp`.
    pub bsp: SimulatedBspSpec,
}

impl Default for SimulationSpec {
    fn default() -> Self {
        Self {
            workers: WORKERS.into(),
            modes: Mode::ALL.into(),
            seconds: SECONDS,
            seed: defaults::SEED,
            local_batch_size: LOCAL_BATCH_SIZE,
            step_seconds: STEP_SECONDS.into(),
            overhead_seconds: 0.0,
            trace: None,
            stragglers: Vec::new(),
            servers: SimulatedServersSpec::default(),
            embedding_workers: SimulatedEmbeddingSpec::default(),
            loaders: SimulatedLoadersSpec::default(),
            network: NetworkSpec::default(),
            sync: SimulatedSyncSpec::default(),
            hybrid: HybridSpec::default(),
            gba: SimulatedGbaSpec::default(),
            hop_bs: HopBsSpec::default(),
            hop_bw: SimulatedHopBwSpec::default(),
            bsp: SimulatedBspSpec::default(),
        }
    }
}

/// A valid simulation, with the sources of its values.
pub struct SimulationDocument<'a> {
    /// The simulation.
    pub spec: SimulationSpec,
    sources: Sources<'a>,
}

impl SimulationDocument<'_> {
    /// An error about the field at `path` (`spec.gba.localBatchSize`), with its line.
    #[must_use]
    pub fn refuse(&self, path: &str, message: impl Into<String>) -> ManifestError {
        self.sources.locate(vec![FieldError::new(FieldPath::parse(path), message)])
    }
}

/// Reads a simulation, and applies overrides in order. Errors call it `file`.
///
/// # Errors
/// Text that is not one document of this kind, and an override that cannot be applied. Fields that
/// are unknown, of the wrong type, out of bounds or contradictory.
pub fn load_simulation<'a>(
    text: &'a str,
    file: &'a str,
    overrides: &'a [Override],
) -> Result<SimulationDocument<'a>, ManifestError> {
    #[derive(Deserialize)]
    struct Root {
        spec: SimulationSpec,
    }
    let (document, sources) = read_document(&SIMULATION, text, file, overrides)?;
    let root: Root = typed(document, &FieldPath::parse("spec")).map_err(|errors| sources.locate(errors))?;
    let errors = contradictions(&root.spec);
    if errors.is_empty() { Ok(SimulationDocument { spec: root.spec, sources }) } else { Err(sources.locate(errors)) }
}

const SIMULATION: DocumentKind = DocumentKind {
    name: "Simulation",
    example: "docs/examples/straggler.yaml",
    named: false,
    without_spec: "missing: `spec` describes the simulation; `spec: {}` takes every default",
    schema: simulation_schema,
    prepare: |document| wrap_single_values(document, simulation_schema()),
};

/// The annotated schema of the whole document.
pub(crate) fn simulation_schema() -> &'static Value {
    static SCHEMA: LazyLock<Value> =
        LazyLock::new(|| json!({"properties": {"spec": schema::generate::<SimulationSpec>()}}));
    &SCHEMA
}

/// Turns a single text or number into a list of one where the schema has a list.
fn wrap_single_values(value: &mut Value, schema: &Value) {
    let list = schema.get("type").is_some_and(|kind| kind == "array");
    match value {
        Value::Number(_) | Value::String(_) if list => *value = Value::Array(vec![value.take()]),
        Value::Array(entries) => {
            if let Some(items) = schema.get("items") {
                entries.iter_mut().for_each(|entry| wrap_single_values(entry, items));
            }
        }
        Value::Object(fields) => {
            for (name, field) in schema::properties(schema).into_iter().flatten() {
                if let Some(value) = fields.get_mut(name) {
                    wrap_single_values(value, field);
                }
            }
        }
        _ => {}
    }
}

fn contradictions(spec: &SimulationSpec) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut report =
        |path: &str, message: String| errors.push(FieldError::new(FieldPath::parse(&format!("spec.{path}")), message));
    let fewest = spec.workers.iter().copied().min().unwrap_or(1);
    if spec.trace.is_some() && spec.step_seconds != STEP_SECONDS {
        report("trace", "a trace replaces `stepSeconds`: remove one of them".into());
    }
    if spec.trace.is_some() && spec.gba.local_batch_size.is_some() {
        report("gba.localBatchSize", "a trace holds seconds of batches of one size: remove this, or the trace".into());
    }
    if spec.trace.is_some() && spec.sync.local_batch_size.is_some() {
        report("sync.localBatchSize", "a trace holds seconds of batches of one size: remove this, or the trace".into());
    }
    if let Some(least) = spec.step_seconds.iter().find(|seconds| **seconds < spec.overhead_seconds) {
        report("overheadSeconds", format!("expected at most the {least} seconds that a batch takes, in `stepSeconds`"));
    }
    let (embedding, loaders) = (&spec.embedding_workers, &spec.loaders);
    for (role, slow, count) in [
        ("servers", spec.servers.slow, spec.servers.count),
        ("embeddingWorkers", embedding.slow, Some(embedding.count)),
        ("loaders", loaders.slow, Some(loaders.count)),
    ] {
        for (field, message) in slow.into_iter().flat_map(|slow| slow_contradictions(slow, count)) {
            report(&format!("{role}.slow.{field}"), message);
        }
    }
    for (role, slow, batch_seconds) in [
        ("embeddingWorkers", embedding.slow, embedding.batch_seconds),
        ("loaders", loaders.slow, loaders.batch_seconds),
    ] {
        if slow.is_some() && batch_seconds <= 0.0 {
            report(&format!("{role}.slow"), "expected `batchSeconds` above 0 too: a batch takes them no time".into());
        }
    }
    if spec.modes.contains(&Mode::HopBw) && spec.hop_bw.backups.is_some_and(|backups| backups >= fewest) {
        report("hopBw.backups", format!("expected fewer than there are workers ({fewest}): a step needs a gradient"));
    }
    for (index, group) in spec.stragglers.iter().enumerate() {
        for (field, message) in group_contradictions(group, fewest) {
            let path = format!("stragglers[{index}]{}{field}", if field.is_empty() { "" } else { "." });
            report(&path, message);
        }
    }
    errors
}

/// Mistakes in a role with so many members, by field. Their number may be unknown.
fn slow_contradictions(slow: SlowMembersSpec, count: Option<u32>) -> Vec<(&'static str, String)> {
    let mut errors = Vec::new();
    if let Some(count) = count.filter(|count| slow.count > *count) {
        errors.push(("count", format!("expected at most the {count} members of the role, found {}", slow.count)));
    }
    if slow.until_seconds.is_some_and(|until| until <= slow.from_seconds) {
        errors.push(("untilSeconds", format!("expected more than `fromSeconds` ({})", slow.from_seconds)));
    }
    errors
}

fn group_contradictions(group: &StragglersSpec, fewest: u32) -> Vec<(&'static str, String)> {
    let mut errors = Vec::new();
    let mut report = |field, message: String| errors.push((field, message));
    let slow = group.factor.is_some() || group.heavy_tail.is_some();
    if !slow && group.link_factor.is_none() && group.crashes.is_none() {
        report("", "no problem: expected at least one of `factor`, `heavyTail`, `linkFactor` and `crashes`".into());
    }
    if group.share.is_some() && group.workers.is_some() {
        report("workers", "expected either `share` or `workers`, found both".into());
    }
    if group.share.is_some_and(|share| share <= 0.0) {
        report("share", "expected a share above 0".into());
    }
    if let Some(rank) = group.workers.iter().flatten().find(|rank| **rank >= fewest) {
        report("workers", format!("there is no worker {rank} among {fewest}: they are numbered from 0"));
    }
    match (group.period_seconds, group.slow_seconds) {
        (None, None) => {}
        (Some(period), Some(slow)) if slow > period => {
            report("slowSeconds", format!("expected at most `periodSeconds` ({period}), found {slow}"));
        }
        (Some(_), Some(_)) if group.factor.is_some() => {}
        (Some(_), Some(_)) => {
            report("periodSeconds", "expected a `factor` too: how slow the group is in the period".into())
        }
        (Some(_), None) => {
            report("periodSeconds", "expected `slowSeconds` too: how long the group is slow in each period".into())
        }
        (None, Some(_)) => report("slowSeconds", "expected `periodSeconds` too: how often the group is slow".into()),
    }
    if group.until_seconds.is_some_and(|until| until <= group.from_seconds) {
        report("untilSeconds", format!("expected more than `fromSeconds` ({})", group.from_seconds));
    }
    if !slow && (group.until_seconds.is_some() || group.from_seconds > 0.0) {
        let field = if group.until_seconds.is_some() { "untilSeconds" } else { "fromSeconds" };
        report(field, "limits the time of `factor` and `heavyTail`, and the group has neither: remove it".into());
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(spec: &str) -> Result<SimulationSpec, String> {
        let text = format!("apiVersion: rectrain.dev/v1alpha1\nkind: Simulation\nspec: {spec}\n");
        load_simulation(&text, "s.yaml", &[]).map(|document| document.spec).map_err(|error| error.to_string())
    }

    #[test]
    fn an_empty_spec_takes_defaults_and_a_value_may_stand_for_a_list() {
        assert_eq!(load("{}").unwrap(), SimulationSpec::default());
        let spec = load("{workers: 80, modes: gba, stepSeconds: 0.2, stragglers: [{workers: 7, factor: 2}]}").unwrap();
        assert_eq!((spec.workers, spec.modes), (vec![80], vec![Mode::Gba]));
        assert_eq!(spec.step_seconds, [0.2]);
        assert_eq!(spec.stragglers[0].workers.as_deref(), Some(&[7][..]));
    }

    #[test]
    fn every_mistake_is_one_sentence_with_file_line_and_field() {
        for (spec, expected) in [
            ("{wrokers: 8}", "s.yaml:3:8: spec.wrokers: unknown field; did you mean `workers`?"),
            ("{workers: eight}", "spec.workers[0]: expected an integer from 1 to 100000, found the text `eight`"),
            ("{workers: [8, 0]}", "spec.workers[1]: expected an integer from 1 to 100000, found 0"),
            ("{workers: []}", "spec.workers: expected at least 1 entry, found 0"),
            ("{modes: [gab]}", "spec.modes[0]: expected one of `sync`, `hybrid`"),
            ("{modes: [hop-bs]}", "did you mean `hopBs`?"),
            ("{seconds: .inf}", "spec.seconds: expected a finite number"),
            ("{seconds: -1}", "spec.seconds: expected a number from 0.001"),
            ("{stepSeconds: [0.1, 0]}", "spec.stepSeconds[1]"),
            ("{overheadSeconds: 1}", "spec.overheadSeconds: expected at most the 0.05 seconds"),
            ("{trace: t.csv, stepSeconds: 1}", "spec.trace: a trace replaces"),
            ("{trace: t.csv, gba: {localBatchSize: 1}}", "spec.gba.localBatchSize"),
            ("{trace: t.csv, sync: {pieces: pulled, localBatchSize: 1}}", "spec.sync.localBatchSize: a trace holds"),
            ("{sync: {pieces: pull}}", "did you mean `pulled`?"),
            ("{stragglers: [{share: 0.5}]}", "spec.stragglers[0]: no problem"),
            ("{stragglers: [{share: 0.5, workers: [1], factor: 2}]}", "spec.stragglers[0].workers: expected either"),
            ("{stragglers: [{share: 0, factor: 2}]}", "spec.stragglers[0].share: expected a share above 0"),
            ("{stragglers: [{share: 2, factor: 2}]}", "spec.stragglers[0].share: expected a number from 0 to 1"),
            ("{stragglers: [{workers: [8], factor: 2}]}", "there is no worker 8 among 8"),
            ("{stragglers: [{factor: 2, periodSeconds: 3}]}", "expected `slowSeconds` too"),
            ("{stragglers: [{factor: 2, slowSeconds: 3}]}", "expected `periodSeconds` too"),
            ("{stragglers: [{factor: 2, periodSeconds: 3, slowSeconds: 4}]}", "expected at most `periodSeconds` (3)"),
            ("{stragglers: [{linkFactor: 2, periodSeconds: 4, slowSeconds: 1}]}", "expected a `factor` too"),
            ("{stragglers: [{factor: 2, fromSeconds: 4, untilSeconds: 4}]}", "expected more than `fromSeconds` (4)"),
            ("{stragglers: [{linkFactor: 2, fromSeconds: 4}]}", "spec.stragglers[0].fromSeconds"),
            ("{stragglers: [{heavyTail: {limit: 4}}]}", "spec.stragglers[0].heavyTail.shape: missing, and required"),
            ("{stragglers: [{crashes: {recoverySeconds: 4}}]}", "crashes.meanSecondsBetween: missing, and required"),
            ("{servers: {count: 2, slow: {count: 3, factor: 2}}}", "spec.servers.slow.count: expected at most"),
            (
                "{servers: {slow: {factor: 2, fromSeconds: 5, untilSeconds: 5}}}",
                "spec.servers.slow.untilSeconds: expected more than `fromSeconds` (5)",
            ),
            ("{servers: {moveSlots: 3}}", "spec.servers.moveSlots"),
            (
                "{embeddingWorkers: {batchSeconds: 1, slow: {count: 3, factor: 2}}}",
                "spec.embeddingWorkers.slow.count: expected at most the 2 members",
            ),
            ("{loaders: {slow: {factor: 2}}}", "spec.loaders.slow: expected `batchSeconds` above 0"),
            ("{loaders: {batchesPerChunk: 0}}", "spec.loaders.batchesPerChunk: expected an integer from 1"),
            ("{embeddingWorkers: {slow: {factor: 2}}}", "spec.embeddingWorkers.slow: expected `batchSeconds` above 0"),
            ("{hopBw: {backups: 8}}", "spec.hopBw.backups: expected fewer than there are workers (8)"),
            ("", "s.yaml:3:1: spec: missing: `spec` describes the simulation"),
        ] {
            let error = load(spec).unwrap_err();
            assert!(error.contains(expected) && error.starts_with("s.yaml"), "{spec}: {error}");
            assert!(!error.contains('\n'), "{spec}: {error}");
        }
    }

    #[test]
    fn another_kind_of_document_is_refused() {
        let job = "apiVersion: rectrain.dev/v1alpha1\nkind: RecTrainingJob\n";
        let error = load_simulation(job, "job.yaml", &[]).err().unwrap().to_string();
        assert_eq!(error, "job.yaml:2:1: kind: expected `Simulation`, found the text `RecTrainingJob`");
        let error = load_simulation("", "s.yaml", &[]).err().unwrap().to_string();
        assert!(error.contains("expected one Simulation, such as docs/examples/straggler.yaml"), "{error}");
    }

    #[test]
    fn every_setting_documents_its_default() {
        fn walk(schema: &Value, path: &FieldPath, missing: &mut Vec<String>) {
            let required = schema["required"].as_array().cloned().unwrap_or_default();
            for (name, field) in schema::properties(schema).into_iter().flatten() {
                let path = path.key(name);
                let leaf = schema::properties(field).is_none();
                if leaf && !required.contains(&json!(name)) && field.get(schema::DEFAULT).is_none() {
                    missing.push(path.to_string());
                }
                assert!(field["description"].as_str().is_some_and(|text| text.ends_with('.')), "{path}");
                walk(field, &path, missing);
                walk(field.get("items").unwrap_or(&Value::Null), &path.index(0), missing);
            }
        }
        let mut missing = Vec::new();
        walk(&simulation_schema()["properties"]["spec"], &FieldPath::parse("spec"), &mut missing);
        assert!(missing.is_empty(), "no x-default: {missing:?}");
    }
}
