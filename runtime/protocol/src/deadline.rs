//! Deadlines of calls between members.

use std::time::Duration;

/// Deadline of a call that waits for training to advance.
pub const CALL_DEADLINE: Duration = Duration::from_secs(600);
/// Deadline of a call that waits for an event in the life of the job. In effect it never expires.
pub const WHOLE_JOB: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
