//! The progress of one call, over any transport: the source of its error messages.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::address::Address;
use crate::codec::Malformed;
use crate::error::{Refusal, WireError};
use crate::metrics::WireCounters;

/// One call's address, deadline and current stage. Makes the call's errors.
pub(crate) struct Progress<'a> {
    address: &'a Address,
    counters: &'a WireCounters,
    kind: Option<u16>,
    deadline: Duration,
    started: Instant,
    state: Mutex<State>,
}

#[derive(Clone, Default)]
struct State {
    stage: Stage,
    attempts: u32,
    last_failure: Option<String>,
}

/// The next event that a call waits for.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Stage {
    #[default]
    /// One of the channel's `max_in_flight` permits.
    Permit,
    Connection,
    Queue,
    Reply,
}

impl<'a> Progress<'a> {
    pub(crate) fn new(address: &'a Address, counters: &'a WireCounters, kind: Option<u16>, deadline: Duration) -> Self {
        let started = Instant::now();
        Self { address, counters, kind, deadline, started, state: Mutex::default() }
    }

    pub(crate) fn enter(&self, stage: Stage) {
        self.update(|state| state.stage = stage);
    }

    /// Records a failed attempt to connect.
    pub(crate) fn failed_attempt(&self, failure: impl fmt::Display) {
        self.update(|state| {
            state.attempts += 1;
            state.last_failure = Some(failure.to_string());
        });
    }

    /// Time since the call began.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Time left until the deadline.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_sub(self.elapsed())
    }

    pub(crate) fn closed(&self, reason: impl fmt::Display) -> WireError {
        WireError::Closed { peer: self.address.to_string(), attempted: self.attempted(), reason: reason.to_string() }
    }

    pub(crate) fn distrusted(&self, reason: impl fmt::Display) -> WireError {
        WireError::Distrusted {
            peer: self.address.to_string(),
            attempted: self.attempted(),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn refused(&self, refusal: Refusal) -> WireError {
        WireError::Refused { peer: self.address.to_string(), attempted: self.attempted(), refusal }
    }

    pub(crate) fn unsendable(&self, malformed: Malformed) -> WireError {
        WireError::Unsendable { peer: self.address.to_string(), attempted: self.attempted(), malformed }
    }

    pub(crate) fn malformed(&self, malformed: Malformed) -> WireError {
        WireError::Malformed { peer: self.address.to_string(), malformed }
    }

    /// Runs the call until its deadline.
    pub(crate) async fn within<T>(&self, call: impl Future<Output = Result<T, WireError>>) -> Result<T, WireError> {
        match tokio::time::timeout(self.deadline, call).await {
            Ok(result) => result,
            Err(_) => Err(self.out_of_time()),
        }
    }

    fn out_of_time(&self) -> WireError {
        let state = self.state.lock().clone();
        let (peer, attempted) = (self.address.to_string(), self.attempted());
        let after = self.deadline;
        match (state.stage, state.last_failure) {
            (Stage::Connection, Some(last)) => {
                WireError::Unreachable { peer, attempted, after, attempts: state.attempts, last }
            }
            (stage, _) => {
                let stage = match stage {
                    Stage::Permit => "waiting for one of the channel's permits",
                    Stage::Connection => "connecting",
                    Stage::Queue => "waiting for earlier frames to be sent",
                    Stage::Reply => "waiting for the reply",
                };
                WireError::Deadline { peer, attempted, after, stage }
            }
        }
    }

    fn attempted(&self) -> String {
        match self.kind {
            Some(kind) => format!("call {:?}", self.counters.kind_name(kind)),
            None => "connect".to_owned(),
        }
    }

    fn update(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock());
    }
}

/// The pause before attempt number `attempt` (from 0) to connect: 5 ms, doubling up to 500 ms.
pub(crate) fn back_off(attempt: u32) -> Duration {
    Duration::from_millis((5u64 << attempt.min(10)).min(500))
}
