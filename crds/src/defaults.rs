//! Every default of the manifest, in one place. The schema's descriptions and
//! [`crate::ResolvedJob`] both use these constants.

/// `spec.model.embeddingDim`
pub const EMBEDDING_DIM: u32 = 16;
/// `spec.model.hidden`
pub const HIDDEN: [u32; 2] = [256, 128];
/// `spec.model.bottom`, to which the embedding dimension is appended
pub const BOTTOM: [u32; 2] = [512, 256];
/// `spec.model.crossLayers`
pub const CROSS_LAYERS: u32 = 3;
/// `spec.model.dropout`
pub const DROPOUT: f64 = 0.0;

/// `spec.features.label.name`
pub const LABEL: &str = "label";
/// `spec.features.initializer.scale` of a normal distribution: its standard deviation
pub const NORMAL_STD: f64 = 0.01;
/// `spec.features.initializer.scale` of a uniform distribution: half its width
pub const UNIFORM_BOUND: f64 = 0.05;
/// `spec.features.dense[].missing`
pub const DENSE_MISSING: f64 = 0.0;
/// `spec.features.dense[].limit`: a gradient of this size has a square that f32 holds
pub const DENSE_LIMIT: f64 = 1e15;

/// `spec.features.eviction.decayPerDay`
pub const EVICTION_DECAY_PER_DAY: f64 = 0.1;
/// `spec.features.eviction.positiveWeight`
pub const EVICTION_POSITIVE_WEIGHT: f64 = 3.0;
/// Share of the memory limits of the parameter servers that `spec.features.memory.auto` takes
pub const AUTO_MEMORY_SHARE: f64 = 0.6;
/// Keys without a row that `spec.features.sparse[].admission.count` counts at a time in a row group
pub const ADMISSION_COUNTERS: u64 = 1 << 24;

/// `spec.data.synthetic.rows`
pub const SYNTHETIC_ROWS: u64 = 1_000_000;
/// `spec.data.synthetic.testRows`
pub const SYNTHETIC_TEST_ROWS: u64 = 100_000;
/// `spec.data.synthetic.vocabulary`: the ids of each sparse column of Criteo's Kaggle set, capped
/// at 100,000. Further columns repeat the list.
pub const SYNTHETIC_VOCABULARIES: [u64; 26] = rectrain_kinds::SyntheticConfig::CRITEO_VOCABULARIES;
/// `spec.data.synthetic.zipfExponent`
pub const SYNTHETIC_ZIPF_EXPONENT: f64 = 1.05;
/// `spec.data.synthetic.seed`
pub const SYNTHETIC_SEED: u64 = 1;
/// `spec.data.shuffle.windowRows`
pub const SHUFFLE_WINDOW_ROWS: u64 = 65_536;
/// `spec.data.train.kafka.lingerMillis`
pub const LINGER_MILLIS: u64 = 2_000;
/// `spec.data.train.follow.intervalSeconds`
pub const FOLLOW_INTERVAL_SECONDS: u32 = 30;
/// `spec.data.nullValues`
pub const NULL_VALUES: [&str; 3] = ["nan", "NULL", "\\N"];
/// `spec.data.badRows.limit`
pub const BAD_ROWS_LIMIT: u64 = 1_000;

/// `spec.training.globalBatchSize`
pub const GLOBAL_BATCH_SIZE: u32 = 4_096;
/// `spec.training.epochs`
pub const EPOCHS: u32 = 1;
/// `spec.training.seed`
pub const SEED: u64 = 42;
/// `spec.training.sync.lookAhead`
pub const LOOK_AHEAD: u32 = 1;
/// `spec.training.hybrid.staleness`
pub const STALENESS: u32 = 4;
/// `spec.training.gba.staleness`
pub const GBA_STALENESS: u32 = 4;
/// `spec.training.hopBs.bound`
pub const HOP_BS_BOUND: u32 = 2;
/// `spec.training.hopBw.backups`
pub const HOP_BW_BACKUPS: u32 = 1;
/// `spec.training.shadow.alpha`
pub const SHADOW_ALPHA: f64 = 0.5;
/// `spec.training.shadow.eta`
pub const SHADOW_ETA: f64 = 0.5;
/// `spec.training.shadow.momentum`
pub const SHADOW_MOMENTUM: f64 = 0.0;
/// `spec.training.shadow.threads`
pub const SHADOW_THREADS: u32 = 1;
/// `spec.training.shadow.fragments`
pub const SHADOW_FRAGMENTS: u32 = 1;
/// `spec.training.divergenceFactor`
pub const DIVERGENCE_FACTOR: f64 = 1_000.0;
/// `spec.training.auto.margin`
pub const MODE_MARGIN: f64 = 0.1;
/// `spec.training.auto.windowSeconds`
pub const MODE_WINDOW_SECONDS: u32 = 60;
/// `spec.training.auto.dwellSeconds`
pub const MODE_DWELL_SECONDS: u32 = 300;
/// `spec.training.auto.switchesPerHour`
pub const MODE_SWITCHES_PER_HOUR: u32 = 4;
/// `spec.training.auto.crowdedCpu`
pub const MODE_CROWDED_CPU: f64 = 0.85;
/// Learning rate of Adam and AdamW
pub const ADAM_LEARNING_RATE: f64 = 1e-3;
/// `beta1` of Adam and AdamW
pub const ADAM_BETA1: f64 = 0.9;
/// `beta2` of Adam and AdamW
pub const ADAM_BETA2: f64 = 0.999;
/// `epsilon` of Adam and AdamW
pub const ADAM_EPSILON: f64 = 1e-8;
/// `weightDecay` of AdamW; Adam has 0
pub const ADAM_W_WEIGHT_DECAY: f64 = 1e-2;
/// Learning rate of SGD
pub const SGD_LEARNING_RATE: f64 = 1e-2;
/// `momentum` of SGD
pub const SGD_MOMENTUM: f64 = 0.0;
/// Learning rate of AdaGrad and row-wise AdaGrad
pub const ADA_GRAD_LEARNING_RATE: f64 = 1e-2;
/// `epsilon` of AdaGrad and row-wise AdaGrad
pub const ADA_GRAD_EPSILON: f64 = 1e-10;
/// `initialAccumulator` of AdaGrad and row-wise AdaGrad
pub const ADA_GRAD_INITIAL_ACCUMULATOR: f64 = 0.0;
/// Learning rate α of FTRL
pub const FTRL_LEARNING_RATE: f64 = 0.05;
/// `beta` of FTRL
pub const FTRL_BETA: f64 = 1.0;
/// `l1` of FTRL
pub const FTRL_L1: f64 = 0.0;
/// `l2` of FTRL
pub const FTRL_L2: f64 = 0.0;

/// `spec.training.quality.windowRows`
pub const WINDOW_ROWS: u32 = 100_000;

/// `spec.roles.*.replicas`
pub const REPLICAS: u32 = 1;
/// `spec.roles.*.template.terminationGracePeriodSeconds`
pub const TERMINATION_GRACE_SECONDS: u32 = 30;
/// `spec.replicas` of a RecModelServer
pub const SERVERS: u32 = 2;
/// `spec.updateEverySeconds` of a RecModelServer
pub const SERVER_UPDATE_SECONDS: u32 = 300;
/// `spec.maxInFlight` of a RecModelServer
pub const SERVER_MAX_IN_FLIGHT: u32 = 256;
/// `spec.autoscaling.cpuPercent` of a RecModelServer
pub const SERVER_CPU_PERCENT: u32 = 70;
/// `spec.warmUp.key` of a RecModelServer
pub const WARM_UP_KEY: &str = "requests.jsonl";
/// `spec.canary.percent` of a RecModelServer
pub const CANARY_PERCENT: u32 = 10;
/// `spec.shards.replicas` of a RecModelServer
pub const SHARD_REPLICAS: u32 = 2;
/// `spec.shards.cacheRows` of a RecModelServer
pub const SERVER_CACHE_ROWS: u32 = 100_000;
/// `spec.checkpoint.fullEvery`
pub const FULL_CHECKPOINT_EVERY: u32 = 10;
/// `spec.checkpoint.keep`
pub const CHECKPOINTS_KEPT: u32 = 3;
/// `spec.serving.publish.keep`
pub const PUBLICATIONS_KEPT: u32 = 2;
/// `spec.faultTolerance.maxRestarts`
pub const MAX_RESTARTS: u32 = 10;
/// `spec.faultTolerance.backoffSeconds`
pub const BACKOFF_SECONDS: u32 = 10;
/// `spec.faultTolerance.stallSeconds`
pub const STALL_SECONDS: u32 = 600;
/// `spec.faultTolerance.replaceSlow.afterSeconds`
pub const REPLACE_SLOW_AFTER_SECONDS: u32 = 600;
/// `spec.faultTolerance.replaceSlow.perHour`
pub const REPLACE_SLOW_PER_HOUR: u32 = 2;
/// `spec.faultTolerance.sharedMemory`
pub const SHARED_MEMORY: bool = true;
/// `spec.autoscaling.*.max`, as a multiple of `spec.roles.*.replicas`
pub const MAX_REPLICAS_FACTOR: u32 = 4;
/// The most replicas of a role.
pub const MAX_REPLICAS: u32 = 1024;
/// `spec.autoscaling.ps.memoryTarget`
pub const PS_MEMORY_TARGET: f64 = 0.75;
/// `spec.autoscaling.ps.busyTarget`
pub const PS_BUSY_TARGET: f64 = 0.7;
/// `spec.autoscaling.loader.waitTarget`
pub const LOADER_WAIT_TARGET: f64 = 0.1;
/// `spec.autoscaling.denseWorker.marginalThroughput`
pub const MARGINAL_THROUGHPUT: f64 = 0.6;
/// `spec.autoscaling.loader.catchUpSeconds`
pub const CATCH_UP_SECONDS: u32 = 300;
/// `spec.autoscaling.loader.busyTarget`
pub const LOADER_BUSY_TARGET: f64 = 0.8;
/// `spec.autoscaling.coolDownSeconds`
pub const COOL_DOWN_SECONDS: u32 = 300;
/// `spec.autoscaling.upWindowSeconds`
pub const UP_WINDOW_SECONDS: u32 = 60;
/// `spec.autoscaling.downWindowSeconds`
pub const DOWN_WINDOW_SECONDS: u32 = 300;
/// `spec.managedBy`
pub const MANAGED_BY: &str = "rectrain.dev/operator";

/// The most names that a feature range such as `C{1..26}` may expand to, and the most features of a
/// job.
pub const MAX_FEATURES: usize = 4_096;
