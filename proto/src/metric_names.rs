//! Names of the metrics that one program of Rectrain reads from another: the runtime registers
//! them, and the operator reads them from the `/metrics` of a job's processes. Constants only.
//!
//! A name that ends in `_seconds` is a histogram. Its text format has the series `NAME_sum` and
//! `NAME_count`.

/// Gauge of a parameter server: bytes that its rows use.
pub const PS_BYTES: &str = "rectrain_ps_bytes";
/// Histogram of a parameter server: seconds of a look-up of a batch's rows.
pub const PS_LOOKUP_SECONDS: &str = "rectrain_ps_lookup_seconds";
/// Histogram of a parameter server: seconds to sum and apply the gradients of a step.
pub const PS_UPDATE_SECONDS: &str = "rectrain_ps_update_seconds";
/// Counter of a parameter server: looked-up rows that existed.
pub const PS_FOUND_ROWS_TOTAL: &str = "rectrain_ps_found_rows_total";
/// Counter of a parameter server: rows created because training met their key for the first time.
pub const PS_INSERTED_ROWS_TOTAL: &str = "rectrain_ps_inserted_rows_total";

/// Histogram of an embedding worker: seconds that a piece of work waits for a free core.
pub const EMBEDDING_WORKER_QUEUE_SECONDS: &str = "rectrain_embedding_worker_queue_seconds";
/// Histogram of an embedding worker: seconds that a core then works on it.
pub const EMBEDDING_WORKER_SERVICE_SECONDS: &str = "rectrain_embedding_worker_service_seconds";

/// Histogram of a dense worker: seconds of a training step.
pub const DENSE_WORKER_STEP_SECONDS: &str = "rectrain_dense_worker_step_seconds";
/// Histogram of a dense worker: seconds that it waits for a loader.
pub const DENSE_WORKER_BATCH_WAIT_SECONDS: &str = "rectrain_dense_worker_batch_wait_seconds";
/// Histogram of a dense worker: seconds that a step waits for its embeddings.
pub const DENSE_WORKER_EMBEDDING_WAIT_SECONDS: &str = "rectrain_dense_worker_embedding_wait_seconds";
/// Histogram of a dense worker: seconds of the forward and backward pass.
pub const DENSE_WORKER_COMPUTE_SECONDS: &str = "rectrain_dense_worker_compute_seconds";
/// Histogram of a dense worker: seconds to sum gradients over the dense workers.
pub const DENSE_WORKER_ALL_REDUCE_SECONDS: &str = "rectrain_dense_worker_all_reduce_seconds";
/// Counter of a dense worker: samples trained.
pub const DENSE_WORKER_SAMPLES_TOTAL: &str = "rectrain_dense_worker_samples_total";

/// Histogram of a loader: seconds to read and parse a chunk of data.
pub const LOADER_READ_SECONDS: &str = "rectrain_loader_read_seconds";
/// Histogram of a loader: seconds in which the frozen model predicts a chunk of data.
pub const LOADER_PREDICT_SECONDS: &str = "rectrain_loader_predict_seconds";
/// Histogram of a loader: seconds until the embedding workers have accepted a global batch.
pub const LOADER_ACCEPT_SECONDS: &str = "rectrain_loader_accept_seconds";
/// Counter of a loader: rows read.
pub const LOADER_ROWS_TOTAL: &str = "rectrain_loader_rows_total";

/// Every name of this module.
pub const ALL: [&str; 17] = [
    PS_BYTES,
    PS_LOOKUP_SECONDS,
    PS_UPDATE_SECONDS,
    PS_FOUND_ROWS_TOTAL,
    PS_INSERTED_ROWS_TOTAL,
    EMBEDDING_WORKER_QUEUE_SECONDS,
    EMBEDDING_WORKER_SERVICE_SECONDS,
    DENSE_WORKER_STEP_SECONDS,
    DENSE_WORKER_BATCH_WAIT_SECONDS,
    DENSE_WORKER_EMBEDDING_WAIT_SECONDS,
    DENSE_WORKER_COMPUTE_SECONDS,
    DENSE_WORKER_ALL_REDUCE_SECONDS,
    DENSE_WORKER_SAMPLES_TOTAL,
    LOADER_READ_SECONDS,
    LOADER_PREDICT_SECONDS,
    LOADER_ACCEPT_SECONDS,
    LOADER_ROWS_TOTAL,
];
