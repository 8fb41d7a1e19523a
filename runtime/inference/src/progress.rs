//! A request in progress, for the metrics and the log of slow requests. A request whose client goes
//! away ends without a response. So counting is done where its value is dropped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use parking_lot::Mutex;

use crate::metrics::Metrics;

/// The least time between two lines about slow requests. Under overload nearly all are slow.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// The log of slow requests.
#[derive(Debug)]
pub(crate) struct SlowLog {
    /// Requests that take this long are slow.
    limit: Duration,
    state: Mutex<LogState>,
}

#[derive(Debug, Default)]
struct LogState {
    last: Option<Instant>,
    /// Slow requests since the last line.
    unlogged: u64,
}

impl SlowLog {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, state: Mutex::default() }
    }

    /// Notes a slow request. `Some` with the number of earlier ones without a line, if this one
    /// gets a line.
    fn note(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        if state.last.is_some_and(|last| now.duration_since(last) < LOG_EVERY) {
            state.unlogged += 1;
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.unlogged))
    }
}

/// See the module documentation.
pub(crate) struct Progress {
    metrics: Metrics,
    slow: Arc<SlowLog>,
    started: Instant,
    /// The client's name for the request, once it is read.
    pub(crate) id: Option<String>,
    /// Its rows, once they are read.
    pub(crate) rows: usize,
    status: Option<StatusCode>,
}

impl Progress {
    pub(crate) fn begin(metrics: &Metrics, slow: &Arc<SlowLog>) -> Self {
        metrics.in_progress.inc();
        let (metrics, slow) = (metrics.clone(), Arc::clone(slow));
        Self { metrics, slow, started: Instant::now(), id: None, rows: 0, status: None }
    }

    /// When the request came.
    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    /// The request has a response.
    pub(crate) fn finish(mut self, status: StatusCode) {
        self.status = Some(status);
    }

    fn log(&self, elapsed: Duration, status: StatusCode) {
        self.metrics.slow.inc();
        let Some(unlogged) = self.slow.note(Instant::now()) else { return };
        tracing::warn!(
            id = self.id.as_deref().unwrap_or_default(),
            rows = self.rows,
            milliseconds = elapsed.as_millis() as u64,
            status = status.as_u16(),
            unlogged,
            "slow request"
        );
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.metrics.in_progress.dec();
        let Some(status) = self.status else {
            self.metrics.cancelled.inc();
            return;
        };
        let elapsed = self.started.elapsed();
        self.metrics.seconds.observe(elapsed.as_secs_f64());
        self.metrics.requests.with_label_values(&[status.as_str()]).inc();
        if elapsed >= self.slow.limit {
            self.log(elapsed, status);
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;

    #[test]
    fn slow_requests_get_one_line_a_second() {
        let (log, start) = (SlowLog::new(Duration::ZERO), Instant::now());
        let noted = [0, 1, 999, 1000, 1001, 2000].map(|ms| log.note(start + Duration::from_millis(ms)));
        assert_eq!(noted, [Some(0), None, None, Some(2), None, Some(1)]);
    }

    #[test]
    fn a_request_without_a_response_is_a_cancelled_one() {
        let metrics = Metrics::new(Registry::new(), vec![]).unwrap();
        let slow = Arc::new(SlowLog::new(Duration::ZERO));
        let (gone, answered) = (Progress::begin(&metrics, &slow), Progress::begin(&metrics, &slow));
        assert_eq!(metrics.in_progress.get(), 2);
        drop(gone);
        answered.finish(StatusCode::OK);
        assert_eq!((metrics.in_progress.get(), metrics.cancelled.get(), metrics.slow.get()), (0, 1, 1));
        assert_eq!(metrics.requests.with_label_values(&["200"]).get(), 1);
    }
}
