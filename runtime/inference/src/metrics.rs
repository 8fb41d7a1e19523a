//! The metrics of the server. Each process has one server, so they have no label for it.

use prometheus::{
    Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
    core::Collector,
};
use rectrain_serving::LookUps;

/// Buckets of times: 100 µs to 10 s, three a decade.
const SECONDS: &[f64] =
    &[1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Buckets of numbers of rows.
const ROWS: &[f64] = &[1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0];

macro_rules! metrics {
    (
        $(#[doc = $about:literal])* $all:ident {$($own:ident: $type:ty,)*}, $reference:ident:
        $($field:ident: $kind:ident = $name:literal, $help:literal;)*
    ) => {
        $(#[doc = $about])*
        #[derive(Clone)]
        pub(crate) struct $all {
            $($own: $type,)*
            $(#[doc = $help] pub(crate) $field: metrics!(@type $kind),)*
        }

        impl $all {
            /// Registers every metric.
            fn register_in(place: &Registry $(, $own: $type)*) -> Result<Self, prometheus::Error> {
                $(let $field = register(place, metrics!(@new $kind, $name, $help)?)?;)*
                Ok(Self { $($own,)* $($field,)* })
            }
        }

        /// Name, kind and meaning of every metric.
        const $reference: &[(&str, &str, &str)] = &[$(($name, metrics!(@kind $kind), $help),)*];
    };
    (@type seconds) => { Histogram };
    (@type rows) => { Histogram };
    (@type counter) => { IntCounter };
    (@type gauge) => { IntGauge };
    (@type gauge_of_shards) => { IntGaugeVec };
    (@type $label:ident) => { IntCounterVec };
    (@new seconds, $name:literal, $help:literal) => {
        Histogram::with_opts(HistogramOpts::new($name, $help).buckets(SECONDS.to_vec()))
    };
    (@new rows, $name:literal, $help:literal) => {
        Histogram::with_opts(HistogramOpts::new($name, $help).buckets(ROWS.to_vec()))
    };
    (@new counter, $name:literal, $help:literal) => { IntCounter::new($name, $help) };
    (@new gauge, $name:literal, $help:literal) => { IntGauge::new($name, $help) };
    (@new gauge_of_shards, $name:literal, $help:literal) => { IntGaugeVec::new(Opts::new($name, $help), &["shard"]) };
    (@new $label:ident, $name:literal, $help:literal) => {
        IntCounterVec::new(Opts::new($name, $help), &[stringify!($label)])
    };
    (@kind seconds) => { "histogram" };
    (@kind rows) => { "histogram" };
    (@kind gauge) => { "gauge" };
    (@kind gauge_of_shards) => { "gauge" };
    (@kind $counter:ident) => { "counter" };
}

metrics! {
    /// The metrics of every server. It has the names of the sparse features, for
    /// their labels.
    Metrics { registry: Registry, features: Vec<String>, }, REFERENCE:
    requests: code = "rectrain_inference_requests_total", "Requests for predictions that were answered, by the status `code` of the response.";
    seconds: seconds = "rectrain_inference_request_seconds", "Time from the head of a request for predictions until its response, refused ones included.";
    in_progress: gauge = "rectrain_inference_requests_in_progress", "Requests for predictions that are being read, wait, or are being answered.";
    cancelled: counter = "rectrain_inference_cancelled_requests_total", "Requests whose client closed the connection before the response.";
    slow: counter = "rectrain_inference_slow_requests_total", "Requests that took longer than `--slow`.";
    shed: reason = "rectrain_inference_shed_requests_total", "Requests refused with status 429, by the `reason`: `requests` in progress or `rows` that wait.";
    refused_connections: reason = "rectrain_inference_refused_connections_total", "Connections whose TLS handshake failed, by the `reason`: `certificate`, `protocol`, `silent` or `ended`. `certificate`: the client shows none of the authorities, or does not trust the server's. `protocol`: it speaks no TLS. `ended`: it hung up.";
    certificates: outcome = "rectrain_inference_certificate_changes_total", "Changes of the files of the TLS certificate, by the `outcome`: `taken` or `refused`. After a refused one the certificate before goes on, and the log has the reason.";
    recorded: counter = "rectrain_inference_recorded_requests_total", "Requests written to the file of `--record`.";
    unrecorded: reason = "rectrain_inference_unrecorded_requests_total", "Requests of the sample that are not in the file of `--record`, by the `reason`: `busy`, `form` or `size`. `busy`: the file is slow. `form`: JSON cannot hold a value. `size`: the line is longer than a body may be.";
    queue: seconds = "rectrain_inference_queue_seconds", "Time that a request waited for the model.";
    queued_rows: gauge = "rectrain_inference_queued_rows", "Rows that wait for the model.";
    abandoned: counter = "rectrain_inference_abandoned_requests_total", "Requests that left the queue without a prediction, because their client had gone or their time had passed.";
    predict: seconds = "rectrain_inference_predict_seconds", "Time in which the model predicted a batch.";
    batch_rows: rows = "rectrain_inference_batch_rows", "Rows of a batch.";
    rows: counter = "rectrain_inference_rows_total", "Rows predicted.";
    ids: feature = "rectrain_inference_ids_total", "Ids looked up, by `feature`. An id counts for each row and each of its values.";
    unseen_ids: feature = "rectrain_inference_unseen_ids_total", "Ids without a row, which read as initial values, by `feature`. High shares mean that training had other ids, for instance because requests write them in another form.";
    step: gauge = "rectrain_inference_model_step", "Global steps that the model was trained.";
    model_rows: gauge = "rectrain_inference_model_rows", "Embedding rows of the model.";
    sequence: gauge = "rectrain_inference_model_sequence", "Sequence number of the published model; 0 for a model that does not change.";
    published_at: gauge = "rectrain_inference_model_published_at", "Time of the model's publication, in seconds since 1970; 0 for a model that does not change.";
    updates: kind = "rectrain_inference_model_updates_total", "Published models that were taken, by their `kind`: `full` or `delta`.";
    update_failures: counter = "rectrain_inference_model_update_failures_total", "Attempts to take a newer model that failed. The one before goes on serving, and the log has the reason.";
    freshness: seconds = "rectrain_inference_model_freshness_seconds", "Time from the publication of a model until it answers, by the clocks of both machines.";
}

metrics! {
    /// The metrics of a server whose rows are on shards.
    RowMetrics {}, ROW_REFERENCE:
    cache_hits: counter = "rectrain_inference_row_cache_hits_total", "Keys of batches that were in the cache of rows, with or without a row. A key counts once a batch.";
    cache_misses: counter = "rectrain_inference_row_cache_misses_total", "Keys of batches that were looked up in a shard.";
    cache_rows: gauge = "rectrain_inference_row_cache_rows", "Keys in the cache of rows.";
    cache_updates: counter = "rectrain_inference_row_cache_updates_total", "Keys in the cache that a newer model changed or evicted.";
    cache_cleared: counter = "rectrain_inference_row_cache_cleared_total", "Newer models whose changes are not known, so that the cache was cleared.";
    wait: seconds = "rectrain_inference_row_wait_seconds", "Time until a batch with keys outside of the cache had its rows.";
    look_ups: shard = "rectrain_inference_look_ups_total", "Look-ups of batches, by `shard`. Several requests of one look-up count once.";
    hedged: shard = "rectrain_inference_hedged_look_ups_total", "Look-ups that were sent to another replica because the first one did not reply within `--hedge`, by `shard`.";
    refused: shard = "rectrain_inference_look_up_errors_total", "Requests to a replica that failed, or that it refused, by `shard`. Another replica was asked.";
    failed: shard = "rectrain_inference_failed_look_ups_total", "Look-ups that no replica answered, by `shard`. Their requests got status 503.";
    bytes: shard = "rectrain_inference_row_bytes_total", "Bytes of rows that came, by `shard`.";
    replicas: gauge_of_shards = "rectrain_inference_shard_replicas", "Replicas of a shard that are connected and hold a version, by `shard`.";
    held_sequence: gauge_of_shards = "rectrain_inference_shard_sequence", "Sequence number of the newest version that a replica of a shard holds, by `shard`.";
}

impl Metrics {
    /// Registers every metric. `features` are the names of the sparse features.
    pub(crate) fn new(registry: Registry, features: Vec<String>) -> Result<Self, prometheus::Error> {
        Self::register_in(&registry.clone(), registry, features)
    }
}

impl RowMetrics {
    /// Registers every metric.
    pub(crate) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        Self::register_in(registry)
    }
}

fn register<T: Collector + Clone + 'static>(registry: &Registry, metric: T) -> Result<T, prometheus::Error> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

impl Metrics {
    /// Counts a batch that was predicted.
    pub(crate) fn count(&self, rows: usize, look_ups: &[LookUps]) {
        self.rows.inc_by(rows as u64);
        for (feature, look_ups) in self.features.iter().zip(look_ups) {
            self.ids.with_label_values(&[feature]).inc_by(look_ups.ids);
            self.unseen_ids.with_label_values(&[feature]).inc_by(look_ups.unseen);
        }
    }

    /// The text of `/metrics`.
    pub(crate) fn encode(&self) -> Result<String, prometheus::Error> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

/// The text of docs/reference/serving-metrics.md.
#[must_use]
pub fn reference_markdown() -> String {
    let mut text = String::from(
        "# Metrics of the inference server\n\n`rectrain serve` serves them on `/metrics`, at the address of its answers. \
         Times are histograms in seconds.\n[Serving](../guide/serving.md) explains the server.\n\n\
         | metric | kind | meaning |\n|---|---|---|\n",
    );
    for (name, kind, help) in REFERENCE {
        text.push_str(&format!("| `{name}` | {kind} | {help} |\n"));
    }
    text.push_str(
        "\nA server with [shards](../guide/serving.md#shards) also has these:\n\n| metric | kind | meaning |\n|---|---|---|\n",
    );
    for (name, kind, help) in ROW_REFERENCE {
        text.push_str(&format!("| `{name}` | {kind} | {help} |\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_up_to_date() {
        let written = include_str!("../../../docs/reference/serving-metrics.md");
        assert_eq!(written, reference_markdown(), "run `cargo xtask docs` to update it");
    }

    #[test]
    fn metrics_are_named_alike() {
        for (name, kind, help) in REFERENCE.iter().chain(ROW_REFERENCE) {
            assert!(name.starts_with("rectrain_inference_") && help.ends_with('.'), "{name}");
            assert_eq!(*kind == "counter", name.ends_with("_total"), "{name}");
            assert_eq!(*kind == "histogram", name.ends_with("_seconds") || name.ends_with("batch_rows"), "{name}");
        }
    }

    #[test]
    fn ids_are_counted_by_feature() {
        let metrics = Metrics::new(Registry::new(), vec!["user".into(), "item".into()]).unwrap();
        metrics.count(3, &[LookUps { ids: 3, unseen: 1 }, LookUps { ids: 5, unseen: 0 }]);
        let text = metrics.encode().unwrap();
        for line in [
            "rectrain_inference_rows_total 3",
            "rectrain_inference_ids_total{feature=\"item\"} 5",
            "rectrain_inference_unseen_ids_total{feature=\"user\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }
}
