//! The metrics of the server.

use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder};
use rectrain_serving::publication::{Update, unix_milliseconds};

use crate::held::Held;

/// Buckets of times: 10 µs to 10 s.
const SECONDS: &[f64] = &[
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

macro_rules! metrics {
    ($($field:ident: $kind:ident = $name:literal, $help:literal;)*) => {
        /// All metrics of a server.
        #[derive(Clone)]
        pub(crate) struct Metrics {
            registry: Registry,
            $(#[doc = $help] pub(crate) $field: metrics!(@type $kind),)*
        }

        impl Metrics {
            /// Registers every metric.
            pub(crate) fn new() -> Result<Self, prometheus::Error> {
                let registry = Registry::new();
                $(
                    let $field = metrics!(@new $kind, $name, $help)?;
                    registry.register(Box::new($field.clone()))?;
                )*
                Ok(Self { registry, $($field,)* })
            }
        }

        /// Name, kind and meaning of every metric.
        const REFERENCE: &[(&str, &str, &str)] = &[$(($name, metrics!(@kind $kind), $help),)*];
    };
    (@type seconds) => { Histogram };
    (@type counter) => { IntCounter };
    (@type gauge) => { IntGauge };
    (@type kind) => { IntCounterVec };
    (@new seconds, $name:literal, $help:literal) => {
        Histogram::with_opts(HistogramOpts::new($name, $help).buckets(SECONDS.to_vec()))
    };
    (@new counter, $name:literal, $help:literal) => { IntCounter::new($name, $help) };
    (@new gauge, $name:literal, $help:literal) => { IntGauge::new($name, $help) };
    (@new kind, $name:literal, $help:literal) => { IntCounterVec::new(Opts::new($name, $help), &["kind"]) };
    (@kind seconds) => { "histogram" };
    (@kind gauge) => { "gauge" };
    (@kind $counter:ident) => { "counter" };
}

metrics! {
    seconds: seconds = "rectrain_serving_ps_look_up_seconds", "Time in which a look-up was answered, without the network.";
    keys: counter = "rectrain_serving_ps_keys_total", "Keys that were looked up.";
    missing_keys: counter = "rectrain_serving_ps_missing_keys_total", "Keys without a row.";
    bytes: counter = "rectrain_serving_ps_sent_bytes_total", "Bytes of rows that were sent.";
    not_held: counter = "rectrain_serving_ps_not_held_total", "Look-ups in a version that the server does not hold.";
    shed: counter = "rectrain_serving_ps_shed_look_ups_total", "Look-ups refused because too many were in progress.";
    versions: gauge = "rectrain_serving_ps_versions", "Versions that the server holds.";
    sequence: gauge = "rectrain_serving_ps_model_sequence", "Sequence number of the newest version.";
    step: gauge = "rectrain_serving_ps_model_step", "Global steps that the newest version was trained.";
    rows: gauge = "rectrain_serving_ps_rows", "Rows of the newest version in this shard.";
    updates: kind = "rectrain_serving_ps_updates_total", "Published models that were taken, by their `kind`: `full` or `delta`.";
    update_failures: counter = "rectrain_serving_ps_update_failures_total", "Attempts to take a newer model that failed. The log has the reason.";
    freshness: seconds = "rectrain_serving_ps_freshness_seconds", "Time from the publication of a model until the server holds it, by the clocks of both machines.";
}

impl Metrics {
    /// Counts an update.
    pub(crate) fn count(&self, update: &Update) {
        self.updates.with_label_values(&["full"]).inc_by(u64::from(update.loaded));
        self.updates.with_label_values(&["delta"]).inc_by(update.deltas);
    }

    /// Shows the versions.
    pub(crate) fn show(&self, held: &Held) {
        let shown = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.versions.set(shown(held.versions.len() as u64));
        if let Some(newest) = held.newest() {
            self.sequence.set(shown(newest.base.sequence));
            self.step.set(shown(newest.model.step));
            self.rows.set(shown(newest.model.rows()));
        }
    }

    /// A model that was published at this time, in milliseconds since 1970, is held now.
    pub(crate) fn freshness(&self, published_at: u64) {
        self.freshness.observe(unix_milliseconds().saturating_sub(published_at) as f64 / 1000.0);
    }

    /// The text of `/metrics`.
    pub(crate) fn encode(&self) -> Result<String, prometheus::Error> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

/// The text of docs/reference/serving-ps-metrics.md.
#[must_use]
pub fn reference_markdown() -> String {
    let mut text = String::from(
        "# Metrics of the prediction parameter server\n\n`rectrain serving-ps` serves them on `/metrics`, at the address \
         of `--http`. Times are histograms in\nseconds. [Serving](../guide/serving.md#shards) explains the server.\n\n\
         | metric | kind | meaning |\n|---|---|---|\n",
    );
    for (name, kind, help) in REFERENCE {
        text.push_str(&format!("| `{name}` | {kind} | {help} |\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_up_to_date() {
        let written = include_str!("../../../docs/reference/serving-ps-metrics.md");
        assert_eq!(written, reference_markdown(), "run `cargo xtask docs` to update it");
    }

    #[test]
    fn metrics_are_named_alike() {
        assert!(Metrics::new().is_ok());
        for (name, kind, help) in REFERENCE {
            assert!(name.starts_with("rectrain_serving_ps_") && help.ends_with('.'), "{name}");
            assert_eq!(*kind == "counter", name.ends_with("_total"), "{name}");
            assert_eq!(*kind == "histogram", name.ends_with("_seconds"), "{name}");
        }
    }
}
