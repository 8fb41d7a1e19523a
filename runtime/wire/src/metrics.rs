//! The wire's counters, for Prometheus and for the summary of a run. All transports, channels and
//! services of a process share one [`WireCounters`]. In-process calls count as frames of 0 bytes,
//! because nothing is serialized.
//!
//! A kind's counters are looked up once and cached. So counting a frame costs a read lock and a few
//! atomic additions.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use prometheus::{Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

use crate::codec::Malformed;
use crate::error::{RefusalCode, WireError};
use crate::tls::{self, Stranger};

/// Name, kind and meaning of every metric of the wire, for the reference.
pub const REFERENCE: &[(&str, &str, &str)] = &[
    (
        "rectrain_wire_bytes_total",
        "counter",
        "Bytes of frames moved, by `direction` (`in`, `out`) and `kind` of message.",
    ),
    ("rectrain_wire_frames_total", "counter", "Frames moved, by `direction` and `kind`."),
    (
        "rectrain_wire_call_seconds",
        "histogram",
        "Time from a call to its reply, by `kind` of request; failed calls included.",
    ),
    ("rectrain_wire_calls_in_flight", "gauge", "Calls waiting for their reply."),
    (
        "rectrain_wire_failed_calls_total",
        "counter",
        "Calls that failed, by `error`: `deadline`, `closed`, `distrusted`, `unreachable`, `refused`, `malformed`, `unsendable` or `other`.",
    ),
    (
        "rectrain_wire_late_replies_total",
        "counter",
        "Replies discarded because their call had already ended: its deadline had passed, or the caller had cancelled it.",
    ),
    ("rectrain_wire_reconnects_total", "counter", "Connections established again after one was lost."),
    ("rectrain_wire_requests_in_flight", "gauge", "Requests in progress."),
    (
        "rectrain_wire_refused_requests_total",
        "counter",
        "Requests that a service of this process refused, by `code`: `StaleEpoch`, `NotReady`, …",
    ),
    ("rectrain_wire_handler_panics_total", "counter", "Requests whose handler panicked."),
    (
        "rectrain_wire_refused_frames_total",
        "counter",
        "Frames refused because they are malformed, by `reason`; each closed its connection.",
    ),
    (
        "rectrain_wire_refused_connections_total",
        "counter",
        "Connections refused because the peer did not show the job's certificate, by `reason`: `certificate`, `protocol`, `silent`, or `ended` before anything was shown.",
    ),
    (
        "rectrain_wire_refused_greetings_total",
        "counter",
        "Connections refused because they were meant for an earlier or a later process at this address.",
    ),
];

/// Bytes and frames of one kind, since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KindTraffic {
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub frames_sent: u64,
    pub frames_received: u64,
}

/// The wire's counters and the names of the kinds.
pub struct WireCounters {
    kind_name: fn(u16) -> &'static str,
    bytes: IntCounterVec,
    frames: IntCounterVec,
    seconds: HistogramVec,
    refused_frames: IntCounterVec,
    refused_requests: IntCounterVec,
    refused_connections: IntCounterVec,
    pub(crate) refused_greetings: IntCounter,
    failed_calls: IntCounterVec,
    pub(crate) calls_in_flight: IntGauge,
    pub(crate) requests_in_flight: IntGauge,
    pub(crate) late_replies: IntCounter,
    pub(crate) reconnects: IntCounter,
    pub(crate) handler_panics: IntCounter,
    kinds: RwLock<HashMap<u16, Arc<KindCounters>>>,
}

struct KindCounters {
    bytes_sent: IntCounter,
    bytes_received: IntCounter,
    frames_sent: IntCounter,
    frames_received: IntCounter,
    seconds: Histogram,
}

impl WireCounters {
    /// Counters registered in `registry`. `kind_name` returns the label of a kind. Kinds come from
    /// other processes, so it must return one common name for all unknown kinds.
    ///
    /// # Errors
    /// The registry already has the wire's metrics.
    pub fn register(registry: &Registry, kind_name: fn(u16) -> &'static str) -> Result<Arc<Self>, WireError> {
        let counters = Self::unregistered(kind_name)?;
        registry.register(Box::new(counters.bytes.clone()))?;
        registry.register(Box::new(counters.frames.clone()))?;
        registry.register(Box::new(counters.seconds.clone()))?;
        registry.register(Box::new(counters.refused_frames.clone()))?;
        registry.register(Box::new(counters.refused_requests.clone()))?;
        registry.register(Box::new(counters.refused_connections.clone()))?;
        registry.register(Box::new(counters.refused_greetings.clone()))?;
        registry.register(Box::new(counters.failed_calls.clone()))?;
        registry.register(Box::new(counters.calls_in_flight.clone()))?;
        registry.register(Box::new(counters.requests_in_flight.clone()))?;
        registry.register(Box::new(counters.late_replies.clone()))?;
        registry.register(Box::new(counters.reconnects.clone()))?;
        registry.register(Box::new(counters.handler_panics.clone()))?;
        Ok(counters)
    }

    /// Counters that are in no registry.
    pub fn unregistered(kind_name: fn(u16) -> &'static str) -> Result<Arc<Self>, WireError> {
        let opts = |name: &str| {
            let name = format!("rectrain_wire_{name}");
            let help = REFERENCE.iter().find(|(known, _, _)| *known == name).map_or("", |(_, _, help)| help);
            Opts::new(name, help)
        };
        let counter = |name: &str| IntCounter::with_opts(opts(name));
        let gauge = |name: &str| IntGauge::with_opts(opts(name));
        let by = |name: &str, labels: &[&str]| IntCounterVec::new(opts(name), labels);
        let seconds = HistogramOpts {
            common_opts: opts("call_seconds"),
            buckets: prometheus::exponential_buckets(20e-6, 2.5, 15)?,
        };
        let counters = Self {
            kind_name,
            bytes: by("bytes_total", &["direction", "kind"])?,
            frames: by("frames_total", &["direction", "kind"])?,
            seconds: HistogramVec::new(seconds, &["kind"])?,
            refused_frames: by("refused_frames_total", &["reason"])?,
            refused_requests: by("refused_requests_total", &["code"])?,
            refused_connections: by("refused_connections_total", &["reason"])?,
            refused_greetings: counter("refused_greetings_total")?,
            failed_calls: by("failed_calls_total", &["error"])?,
            calls_in_flight: gauge("calls_in_flight")?,
            requests_in_flight: gauge("requests_in_flight")?,
            late_replies: counter("late_replies_total")?,
            reconnects: counter("reconnects_total")?,
            handler_panics: counter("handler_panics_total")?,
            kinds: RwLock::default(),
        };
        // Every label appears with 0 from the start, so that Prometheus sees the first count as an
        // increase.
        let show = |counter: &IntCounterVec, label: &str| drop(counter.with_label_values(&[label]));
        tls::REASONS.iter().for_each(|reason| show(&counters.refused_connections, reason));
        Malformed::REASONS.iter().for_each(|reason| show(&counters.refused_frames, reason));
        RefusalCode::labels().for_each(|code| show(&counters.refused_requests, &code));
        WireError::LABELS.iter().for_each(|error| show(&counters.failed_calls, error));
        Ok(Arc::new(counters))
    }

    /// The name of a kind.
    pub fn kind_name(&self, kind: u16) -> &'static str {
        (self.kind_name)(kind)
    }

    /// Bytes and frames so far, by the name of the kind.
    pub fn snapshot(&self) -> BTreeMap<&'static str, KindTraffic> {
        let kinds = self.kinds.read();
        let traffic = |counters: &KindCounters| KindTraffic {
            bytes_sent: counters.bytes_sent.get(),
            bytes_received: counters.bytes_received.get(),
            frames_sent: counters.frames_sent.get(),
            frames_received: counters.frames_received.get(),
        };
        // Kinds of the same name share their counters.
        kinds.iter().map(|(kind, counters)| (self.kind_name(*kind), traffic(counters))).collect()
    }

    /// Frames refused so far, for one of the reasons of [`Malformed::reason`].
    pub fn refused_frames(&self, reason: &str) -> u64 {
        self.refused_frames.with_label_values(&[reason]).get()
    }

    /// Connections refused so far, for one of the reasons of [`Stranger::reason`].
    pub fn refused_connections(&self, reason: &str) -> u64 {
        self.refused_connections.with_label_values(&[reason]).get()
    }

    /// Connections refused so far because they were meant for another incarnation.
    pub fn refused_greetings(&self) -> u64 {
        self.refused_greetings.get()
    }

    /// Replies discarded so far because their call had already ended.
    pub fn late_replies(&self) -> u64 {
        self.late_replies.get()
    }

    /// Reconnections so far.
    pub fn reconnects(&self) -> u64 {
        self.reconnects.get()
    }

    /// Handlers that panicked so far.
    pub fn handler_panics(&self) -> u64 {
        self.handler_panics.get()
    }

    /// Calls that wait for their reply now.
    pub fn calls_in_flight(&self) -> i64 {
        self.calls_in_flight.get()
    }

    /// Requests in progress now.
    pub fn requests_in_flight(&self) -> i64 {
        self.requests_in_flight.get()
    }

    pub(crate) fn sent(&self, kind: u16, bytes: u64) {
        let counters = self.of_kind(kind);
        counters.frames_sent.inc();
        counters.bytes_sent.inc_by(bytes);
    }

    pub(crate) fn received(&self, kind: u16, bytes: u64) {
        let counters = self.of_kind(kind);
        counters.frames_received.inc();
        counters.bytes_received.inc_by(bytes);
    }

    /// Counts a call that has ended.
    pub(crate) fn called(&self, kind: u16, took: Duration, error: Option<&WireError>) {
        self.of_kind(kind).seconds.observe(took.as_secs_f64());
        if let Some(error) = error {
            self.failed_calls.with_label_values(&[error.label()]).inc();
        }
    }

    pub(crate) fn refused_frame(&self, malformed: &Malformed) {
        self.refused_frames.with_label_values(&[malformed.reason()]).inc();
    }

    /// Counts a refused connection.
    pub fn refused_stranger(&self, stranger: &Stranger) {
        self.refused_connections.with_label_values(&[stranger.reason]).inc();
    }

    pub(crate) fn refused_request(&self, code: RefusalCode) {
        self.refused_requests.with_label_values(&[&code.label()]).inc();
    }

    fn of_kind(&self, kind: u16) -> Arc<KindCounters> {
        let kinds = self.kinds.read();
        if let Some(counters) = kinds.get(&kind) {
            return counters.clone();
        }
        drop(kinds);
        let name = self.kind_name(kind);
        let of = |vec: &IntCounterVec, direction: &str| vec.with_label_values(&[direction, name]);
        let counters = Arc::new(KindCounters {
            bytes_sent: of(&self.bytes, "out"),
            bytes_received: of(&self.bytes, "in"),
            frames_sent: of(&self.frames, "out"),
            frames_received: of(&self.frames, "in"),
            seconds: self.seconds.with_label_values(&[name]),
        });
        let mut kinds = self.kinds.write();
        kinds.entry(kind).or_insert(counters).clone()
    }
}

/// Adds one to a gauge for as long as this value lives.
pub(crate) struct InFlight(IntGauge);

impl InFlight {
    pub(crate) fn enter(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_the_metrics_of_the_reference_are_shown_from_the_start() {
        let registry = Registry::new();
        let counters = WireCounters::register(&registry, |_| "any").unwrap();
        counters.sent(1, 10);
        let shown = registry.gather();
        let shown: BTreeMap<_, _> = shown.iter().map(|family| (family.name(), family.help())).collect();
        let documented: BTreeMap<_, _> = REFERENCE.iter().map(|(name, _, help)| (*name, *help)).collect();
        assert_eq!(shown, documented);
        for (name, kind, help) in REFERENCE {
            assert!(help.ends_with(['.', '…']), "{name}");
            assert_eq!(*kind == "counter", name.ends_with("_total"), "{name}");
            assert_eq!(*kind == "histogram", name.ends_with("_seconds"), "{name}");
        }
    }
}
