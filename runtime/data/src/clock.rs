//! Times of the system's clock, as files and brokers tell them.

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970 (UTC). 0 for an earlier time.
pub(crate) fn unix_millis(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_count_from_1970() {
        assert_eq!(unix_millis(UNIX_EPOCH + Duration::from_micros(2_500_900)), 2_500);
        assert_eq!(unix_millis(UNIX_EPOCH - Duration::from_secs(1)), 0);
    }
}
