//! Time left and time between looks.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

/// The rest of `seconds` after `since`; zero when they are over.
pub(super) fn left(now: Timestamp, since: Timestamp, seconds: u64) -> Duration {
    let end = since + SignedDuration::from_secs(i64::try_from(seconds).unwrap_or(i64::MAX / 4));
    Duration::try_from(end.duration_since(now)).unwrap_or(Duration::ZERO)
}

/// Whether `seconds` have passed since `since`.
pub(super) fn is_over(now: Timestamp, since: Timestamp, seconds: u64) -> bool {
    left(now, since, seconds).is_zero()
}

/// The time between two looks, at least a tenth of a second.
pub(super) fn at_most_ten_a_second(poll: Duration) -> Duration {
    poll.max(Duration::from_millis(100))
}
