//! The number of loaders that a job on a stream needs now, by how far it is behind. Like the needs
//! of the other roles ([`crate::needs`]), it is decided on over a window.

use serde::{Deserialize, Serialize};

use crate::{LoaderPolicy, ReplicaBounds};

/// A decision at most doubles or halves the loaders.
const MOST_AT_ONCE: u32 = 2;
/// Loaders that wait for training for more than this share of the time are not the bottleneck.
const WAITS: f64 = 0.2;

/// Measurements of the loaders of a stream since the previous observation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LoaderLoad {
    /// The most loaders that can read at once: the partitions of the topics. Absent: no bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_useful: Option<u32>,
    /// Rows that wait now.
    pub lag_rows: f64,
    /// Rows that arrived, per second.
    pub arriving: f64,
    /// Rows that all loaders have read, per second.
    pub read: f64,
    /// Share of the time that a loader was reading, from 0 to 1. The mean of all loaders.
    pub reading_share: f64,
    /// Share of the time that a loader waited for training to take its rows, from 0 to 1. The mean
    /// of all loaders.
    pub waiting_share: f64,
}

/// The number of loaders that are needed.
#[derive(Debug)]
pub(crate) struct Needed {
    pub(crate) loaders: u32,
    /// The measurements behind it, in words.
    pub(crate) facts: String,
}

/// The number of loaders that are needed, if `loaders` of them are at work. `None` if none of them
/// has read a row, although rows wait.
///
/// A loader that reads all the time reads c = read / (loaders · reading share) rows per second. The
/// job needs w = arriving + lag / catch-up time rows per second. So it needs ⌈w / (c · busy
/// target)⌉ loaders, and no more than there are partitions. One decision at most doubles or halves
/// them. More are not needed while they wait for training.
pub(crate) fn needed(policy: &LoaderPolicy, load: &LoaderLoad, loaders: u32) -> Option<Needed> {
    let LoaderLoad { lag_rows, arriving, read, reading_share, waiting_share, most_useful } = *load;
    let half = loaders.div_ceil(MOST_AT_ONCE);
    if lag_rows < 1.0 && arriving <= 0.0 {
        return Some(Needed { loaders: half, facts: "no rows arrive, and none wait".to_owned() });
    }
    let capacity = read / (f64::from(loaders) * reading_share);
    if !capacity.is_normal() || capacity < 0.0 {
        return None;
    }
    let wanted = arriving + lag_rows / policy.catch_up_seconds;
    let needed = (wanted / (capacity * policy.busy_target)).ceil() as u32;
    let facts = format!(
        "{arriving:.0} rows/s arrive, {lag_rows:.0} wait, and a loader reads up to {capacity:.0} rows/s: {needed} needed"
    );
    if needed > loaders && waiting_share > WAITS {
        return Some(Needed { loaders, facts: format!("{facts}, but the loaders wait for training") });
    }
    let useful = ReplicaBounds { min: 1, max: most_useful.unwrap_or(u32::MAX).max(1) };
    let gradual = needed.clamp(half, loaders.saturating_mul(MOST_AT_ONCE));
    Some(Needed { loaders: useful.clamp(gradual), facts })
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: LoaderPolicy = LoaderPolicy {
        bounds: ReplicaBounds { min: 1, max: 16 },
        catch_up_seconds: 100.0,
        busy_target: 0.8,
        wait_target: 0.1,
    };

    /// Two loaders. Each can read 1,000 rows per second.
    const LOAD: LoaderLoad = LoaderLoad {
        most_useful: None,
        lag_rows: 0.0,
        arriving: 1_000.0,
        read: 1_000.0,
        reading_share: 0.5,
        waiting_share: 0.0,
    };

    fn after(load: LoaderLoad, loaders: u32) -> u32 {
        needed(&POLICY, &load, loaders).unwrap().loaders
    }

    #[test]
    fn loaders_follow_a_burst_up_and_down() {
        // 1,000 rows/s need 1.25 loaders.
        assert_eq!(after(LOAD, 2), 2);
        // 100,000 rows in 100 s are 1,000 rows/s more: 2.5 loaders.
        assert_eq!(after(LoaderLoad { lag_rows: 100_000.0, ..LOAD }, 2), 3);
        // 12.5 loaders are more than twice as many.
        let burst = LoaderLoad { lag_rows: 900_000.0, ..LOAD };
        assert_eq!(after(burst, 2), 4);
        assert_eq!(after(LoaderLoad { read: 4_000.0, reading_share: 1.0, ..burst }, 4), 8);
        let over = LoaderLoad { read: 1_000.0, reading_share: 0.125, ..LOAD };
        assert_eq!(after(over, 8), 4);
        assert_eq!(after(LoaderLoad { reading_share: 0.25, ..over }, 4), 2);
    }

    #[test]
    fn a_stream_at_rest_needs_few_loaders() {
        let rest = LoaderLoad { arriving: 0.0, read: 0.0, reading_share: 0.0, ..LOAD };
        assert_eq!([8, 4, 2, 1].map(|loaders| after(rest, loaders)), [4, 2, 1, 1]);
    }

    #[test]
    fn more_loaders_than_partitions_are_not_needed() {
        let burst = LoaderLoad { lag_rows: 900_000.0, ..LOAD };
        assert_eq!(after(LoaderLoad { most_useful: Some(3), ..burst }, 2), 3);
        assert_eq!(after(LoaderLoad { most_useful: Some(0), ..burst }, 2), 1);
    }

    #[test]
    fn none_is_added_if_training_is_the_bottleneck_or_nothing_was_read() {
        let burst = LoaderLoad { lag_rows: 900_000.0, waiting_share: 0.5, ..LOAD };
        let Some(Needed { loaders: 2, facts }) = needed(&POLICY, &burst, 2) else { panic!("more do not help") };
        assert!(facts.ends_with("but the loaders wait for training"), "{facts}");
        // Fewer are enough all the same.
        assert_eq!(after(LoaderLoad { lag_rows: 0.0, arriving: 1.0, ..burst }, 2), 1);
        for unread in [LoaderLoad { read: 0.0, ..LOAD }, LoaderLoad { reading_share: 0.0, ..LOAD }] {
            assert!(needed(&POLICY, &unread, 2).is_none());
        }
    }
}
