//! The bounds of a server.

use std::time::Duration;

/// The bounds of a server. All of them are above 0, except `max_wait` and `drain`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Rows of a batch. A request with more rows is a batch of its own.
    pub max_batch_rows: usize,
    /// The longest time that a request waits for others to share its batch.
    pub max_wait: Duration,
    /// Rows that may wait for the model. Beyond them requests are shed.
    pub max_queued_rows: usize,
    /// Requests in progress: those being read, waiting, or being answered. Beyond them requests are
    /// shed before their bodies are read.
    pub max_requests: usize,
    /// Rows of a request.
    pub max_request_rows: usize,
    /// Bytes of the body of a request.
    pub max_body_bytes: usize,
    /// The time within which a request is answered. A request may ask for less.
    pub timeout: Duration,
    /// The time from the signal to end until no more connections are accepted. Meanwhile the server
    /// answers, and is not ready.
    pub drain: Duration,
    /// Requests that take this long are logged.
    pub slow: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_batch_rows: 4096,
            max_wait: Duration::from_millis(1),
            max_queued_rows: 1 << 16,
            max_requests: 256,
            max_request_rows: 1 << 14,
            max_body_bytes: 4 << 20,
            timeout: Duration::from_secs(5),
            drain: Duration::ZERO,
            slow: Duration::from_millis(500),
        }
    }
}
