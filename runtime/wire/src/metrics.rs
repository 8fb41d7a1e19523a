//! What the wire counts, for Prometheus and for the summary of a run. One [`WireCounters`] is
//! shared by all transports, channels and services of a process; both transports count into it.
//! In-process calls count as frames of 0 bytes, because nothing is serialized.
//!
//! A kind's counters are looked up once and kept, so that counting a frame is a read lock and a
//! few atomic additions.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use prometheus::{Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

use crate::codec::Malformed;
use crate::error::{RefusalCode, WireError};
use crate::tls::{self, Stranger};

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
    /// Counters registered in `registry`. `kind_name` gives the label of a kind; kinds come from
    /// other processes, so it must give one common name to all that it does not know.
    ///
    /// Fails when the registry already has the wire's metrics.
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

    /// Counters that no registry shows.
    pub fn unregistered(kind_name: fn(u16) -> &'static str) -> Result<Arc<Self>, WireError> {
        let counter = |name: &str, help: &str| IntCounter::new(format!("rectrain_wire_{name}"), help);
        let gauge = |name: &str, help: &str| IntGauge::new(format!("rectrain_wire_{name}"), help);
        let by = |name: &str, help: &str, labels: &[&str]| {
            IntCounterVec::new(Opts::new(format!("rectrain_wire_{name}"), help), labels)
        };
        let seconds = HistogramOpts::new(
            "rectrain_wire_call_seconds",
            "Time from a call to its reply, by kind of request; failed calls included.",
        )
        .buckets(prometheus::exponential_buckets(20e-6, 2.5, 15)?);
        let refused_connections = by(
            "refused_connections_total",
            "Connections refused because whoever made them did not show the job's certificate.",
            &["reason"],
        )?;
        // Shown before there is a stranger, so that the first one is an increase.
        for reason in tls::REASONS {
            refused_connections.with_label_values(&[reason]);
        }
        Ok(Arc::new(Self {
            kind_name,
            bytes: by("bytes_total", "Bytes of frames moved.", &["direction", "kind"])?,
            frames: by("frames_total", "Frames moved.", &["direction", "kind"])?,
            seconds: HistogramVec::new(seconds, &["kind"])?,
            refused_frames: by(
                "refused_frames_total",
                "Frames refused because they are malformed; each closed its connection.",
                &["reason"],
            )?,
            refused_requests: by(
                "refused_requests_total",
                "Requests that a service of this process refused.",
                &["code"],
            )?,
            refused_connections,
            refused_greetings: counter(
                "refused_greetings_total",
                "Connections refused because they were meant for a process that was at this address before, or is to be.",
            )?,
            failed_calls: by("failed_calls_total", "Calls that failed.", &["error"])?,
            calls_in_flight: gauge("calls_in_flight", "Calls waiting for their reply.")?,
            requests_in_flight: gauge("requests_in_flight", "Requests being served.")?,
            late_replies: counter("late_replies_total", "Replies thrown away because their call had been given up.")?,
            reconnects: counter("reconnects_total", "Connections made anew after one was lost.")?,
            handler_panics: counter("handler_panics_total", "Requests whose handler panicked.")?,
            kinds: RwLock::default(),
        }))
    }

    /// The name of a kind.
    pub fn kind_name(&self, kind: u16) -> &'static str {
        (self.kind_name)(kind)
    }

    /// Bytes and frames so far, by the name of the kind.
    pub fn snapshot(&self) -> BTreeMap<&'static str, KindTraffic> {
        let kinds = self.kinds.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let traffic = |counters: &KindCounters| KindTraffic {
            bytes_sent: counters.bytes_sent.get(),
            bytes_received: counters.bytes_received.get(),
            frames_sent: counters.frames_sent.get(),
            frames_received: counters.frames_received.get(),
        };
        // Kinds of one name share their counters.
        kinds.iter().map(|(kind, counters)| (self.kind_name(*kind), traffic(counters))).collect()
    }

    /// Frames refused so far for one of the reasons of [`Malformed::reason`].
    pub fn refused_frames(&self, reason: &str) -> u64 {
        self.refused_frames.with_label_values(&[reason]).get()
    }

    /// Connections refused so far for one of the reasons of [`Stranger::reason`].
    pub fn refused_connections(&self, reason: &str) -> u64 {
        self.refused_connections.with_label_values(&[reason]).get()
    }

    /// Connections refused so far because they were meant for another process.
    pub fn refused_greetings(&self) -> u64 {
        self.refused_greetings.get()
    }

    /// Replies thrown away so far because their call had been given up.
    pub fn late_replies(&self) -> u64 {
        self.late_replies.get()
    }

    /// Connections made anew so far.
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

    /// Requests that are being served now.
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

    /// A call has ended.
    pub(crate) fn called(&self, kind: u16, took: Duration, error: Option<&WireError>) {
        self.of_kind(kind).seconds.observe(took.as_secs_f64());
        if let Some(error) = error {
            self.failed_calls.with_label_values(&[error.label()]).inc();
        }
    }

    pub(crate) fn refused_frame(&self, malformed: &Malformed) {
        self.refused_frames.with_label_values(&[malformed.reason()]).inc();
    }

    /// Counts a connection that was refused.
    pub fn refused_stranger(&self, stranger: &Stranger) {
        self.refused_connections.with_label_values(&[stranger.reason]).inc();
    }

    pub(crate) fn refused_request(&self, code: RefusalCode) {
        let label = match code {
            RefusalCode::Application(_) => "Application".to_owned(),
            code => format!("{code:?}"),
        };
        self.refused_requests.with_label_values(&[&label]).inc();
    }

    fn of_kind(&self, kind: u16) -> Arc<KindCounters> {
        let kinds = self.kinds.read().unwrap_or_else(|poisoned| poisoned.into_inner());
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
        let mut kinds = self.kinds.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        kinds.entry(kind).or_insert(counters).clone()
    }
}

/// Adds one to a gauge for as long as it lives.
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
