//! Deadlines of calls between members.

use std::time::Duration;

/// The longest that a call may take which waits for training to advance.
pub const CALL_DEADLINE: Duration = Duration::from_secs(600);
/// The deadline of a call that is answered when something in the job's whole life happens.
pub const WHOLE_JOB: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
