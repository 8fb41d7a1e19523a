//! The life of embedding rows under a memory budget: the order of eviction, the priority of a
//! feature's rows, and the unit of a column of times.

use serde::{Deserialize, Serialize};

named! {
    /// The order in which rows are evicted once the tables are over their budget.
    #[derive(Default)]
    pub enum EvictionKind as "eviction policy" {
        /// By Kraken's feature score: recent examples count more than old ones, and positive
        /// examples count more than negative ones. Take it unless you compare policies.
        #[default]
        Score = "score",
        /// By the number of examples since the row was made, without decay. Take it for data
        /// without a time column whose frequent ids stay the same.
        Lfu = "lfu",
        /// By the time of the last update. Take it if ids are seen in bursts and then never again.
        Lru = "lru",
    }
}

named! {
    /// The order of eviction between features.
    #[derive(Default)]
    pub enum RowPriority as "priority of rows" {
        /// Evicted only if no row of low priority is left. Take it for a few important features
        /// with few ids, such as the user's country.
        High = "high",
        /// Evicted first.
        #[default]
        Low = "low",
    }
}

/// The unit of a column of times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum TimeUnit {
    /// Numbers are seconds since 1970.
    #[default]
    Seconds,
    /// Numbers are milliseconds since 1970.
    Milliseconds,
    /// Numbers are microseconds since 1970.
    Microseconds,
}

impl TimeUnit {
    /// Numbers of a second.
    #[must_use]
    pub const fn per_second(self) -> u64 {
        match self {
            Self::Seconds => 1,
            Self::Milliseconds => 1_000,
            Self::Microseconds => 1_000_000,
        }
    }

    /// The whole seconds since 1970 at a time in this unit. A time before 1970 is second 0. `None`
    /// for a number that is not finite.
    #[must_use]
    pub fn seconds(self, time: f64) -> Option<u64> {
        // The conversion saturates.
        time.is_finite().then(|| (time / self.per_second() as f64).floor().max(0.0) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_whole_seconds_since_1970_in_every_unit() {
        assert_eq!(TimeUnit::Seconds.seconds(1_700_000_000.9), Some(1_700_000_000));
        assert_eq!(TimeUnit::Milliseconds.seconds(1_700_000_000_999.0), Some(1_700_000_000));
        assert_eq!(TimeUnit::Microseconds.seconds(1_700_000_000_999_999.0), Some(1_700_000_000));
        assert_eq!((TimeUnit::Seconds.seconds(-5.0), TimeUnit::Seconds.seconds(f64::NAN)), (Some(0), None));
    }
}
