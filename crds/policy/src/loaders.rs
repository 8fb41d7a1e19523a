//! The number of loaders for a job on a stream, by how far it is behind. The operator does not carry
//! this decision out yet.

use crate::{Action, ReplicaBounds, Verdict};

/// A decision at most doubles or halves the loaders.
const MOST_AT_ONCE: u32 = 2;
/// Loaders that wait for training for more than this share of the time are not the bottleneck.
const WAITS: f64 = 0.2;

/// When loaders of a stream are added and removed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoaderPolicy {
    /// The range of their number.
    pub bounds: ReplicaBounds,
    /// Seconds in which the rows that wait should be trained, above 0.
    pub catch_up_seconds: f64,
    /// Share of the time that the loaders should work, above 0 and at most 1.
    pub busy_target: f64,
}

/// Measurements of the loaders of a stream, over one window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoaderLoad {
    /// Loaders at work.
    pub loaders: u32,
    /// The most loaders that can read at once: the partitions of the topics. `None`: no bound.
    pub most_useful: Option<u32>,
    /// Rows that wait at the end of the window.
    pub lag_rows: f64,
    /// Rows that arrived, per second.
    pub arriving: f64,
    /// Rows that all loaders have read, per second.
    pub read: f64,
    /// Share of the time that the loaders were reading, from 0 to 1.
    pub reading_share: f64,
    /// Share of the time that they waited for training to take their rows, from 0 to 1.
    pub waiting_share: f64,
}

/// Decides on the loaders of a stream.
///
/// A loader that reads all the time reads c = read / (loaders · reading share) rows per second. The
/// job needs w = arriving + lag / catch-up time rows per second. So it needs ⌈w / (c · busy
/// target)⌉ loaders, within the bounds and the partitions. One decision at most doubles or halves
/// them. More are not added while they wait for training.
#[must_use]
pub fn loaders_for_lag(policy: &LoaderPolicy, load: &LoaderLoad) -> Verdict {
    let LoaderLoad { loaders, lag_rows, arriving, read, reading_share, waiting_share, .. } = *load;
    let capacity = read / (f64::from(loaders) * reading_share);
    if !capacity.is_normal() || capacity < 0.0 {
        return Verdict::keep("no loader has read a row in the window");
    }
    let wanted = arriving + lag_rows / policy.catch_up_seconds;
    let needed = (wanted / (capacity * policy.busy_target)).ceil() as u32;
    let facts = format!(
        "{arriving:.0} rows/s arrive, {lag_rows:.0} wait, and a loader reads up to {capacity:.0} rows/s: {needed} needed"
    );
    if needed > loaders && waiting_share > WAITS {
        return Verdict::keep(format!("{facts}, but the loaders wait for training"));
    }
    let most = load.most_useful.unwrap_or(u32::MAX).max(1);
    let gradual = needed.clamp(loaders.div_ceil(MOST_AT_ONCE), loaders.saturating_mul(MOST_AT_ONCE));
    match policy.bounds.clamp(gradual.min(most)) {
        to if to == loaders => Verdict::keep(facts),
        to => Verdict::act(Action::Scale { from: loaders, to }, facts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: LoaderPolicy =
        LoaderPolicy { bounds: ReplicaBounds { min: 1, max: 16 }, catch_up_seconds: 100.0, busy_target: 0.8 };

    /// Two loaders, each of which can read 1,000 rows per second.
    const LOAD: LoaderLoad = LoaderLoad {
        loaders: 2,
        most_useful: None,
        lag_rows: 0.0,
        arriving: 1_000.0,
        read: 1_000.0,
        reading_share: 0.5,
        waiting_share: 0.0,
    };

    /// The number of loaders afterwards.
    fn after(policy: &LoaderPolicy, load: LoaderLoad) -> u32 {
        match loaders_for_lag(policy, &load) {
            Verdict::Act { action: Action::Scale { from, to }, .. } => {
                assert_eq!(from, load.loaders);
                to
            }
            Verdict::Act { action, .. } => panic!("{action:?}"),
            Verdict::Keep { .. } => load.loaders,
        }
    }

    #[test]
    fn loaders_follow_a_burst_up_and_down() {
        // 1,000 rows/s need 1.25 loaders.
        assert_eq!(after(&POLICY, LOAD), 2);
        // 100,000 rows in 100 s are 1,000 rows/s more: 2.5 loaders.
        assert_eq!(after(&POLICY, LoaderLoad { lag_rows: 100_000.0, ..LOAD }), 3);
        // 12.5 loaders are more than twice as many.
        let burst = LoaderLoad { lag_rows: 900_000.0, ..LOAD };
        assert_eq!(after(&POLICY, burst), 4);
        let next = LoaderLoad { loaders: 4, read: 4_000.0, reading_share: 1.0, ..burst };
        assert_eq!(after(&POLICY, next), 8);
        let over = LoaderLoad { loaders: 8, read: 1_000.0, reading_share: 0.125, ..LOAD };
        assert_eq!(after(&POLICY, over), 4);
        assert_eq!(after(&POLICY, LoaderLoad { loaders: 4, reading_share: 0.25, ..over }), 2);
    }

    #[test]
    fn bounds_and_partitions_limit_the_loaders() {
        let burst = LoaderLoad { lag_rows: 900_000.0, ..LOAD };
        assert_eq!(after(&POLICY, LoaderLoad { most_useful: Some(3), ..burst }), 3);
        let few = LoaderPolicy { bounds: ReplicaBounds { min: 2, max: 3 }, ..POLICY };
        assert_eq!(after(&few, burst), 3);
        assert_eq!(after(&few, LoaderLoad { arriving: 1.0, ..LOAD }), 2);
        assert_eq!(after(&POLICY, LoaderLoad { arriving: 0.0, ..LOAD }), 1);
    }

    #[test]
    fn none_is_added_if_training_is_the_bottleneck_or_nothing_was_read() {
        let burst = LoaderLoad { lag_rows: 900_000.0, waiting_share: 0.5, ..LOAD };
        assert_eq!(after(&POLICY, burst), 2);
        let Verdict::Keep { reason } = loaders_for_lag(&POLICY, &burst) else { panic!("more do not help") };
        assert!(reason.ends_with("but the loaders wait for training"), "{reason}");
        // Fewer are enough all the same.
        assert_eq!(after(&POLICY, LoaderLoad { lag_rows: 0.0, arriving: 1.0, ..burst }), 1);
        for unread in [LoaderLoad { read: 0.0, ..LOAD }, LoaderLoad { reading_share: 0.0, ..LOAD }] {
            assert_eq!(after(&POLICY, unread), 2);
        }
    }
}
