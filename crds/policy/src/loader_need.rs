//! How many loaders a job needs whose data ends: by the time that dense workers wait for data. (The
//! loaders of a stream follow its lag: [`crate::loaders`].)

use serde::{Deserialize, Serialize};

use crate::LoaderPolicy;

/// Loaders that read for less than this share of the time are not the bottleneck.
const BUSY: f64 = 0.5;

/// The use of the loaders since the previous observation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LoaderUse {
    /// Share of the time that dense workers wait for data, from 0 to 1. The smallest of all dense
    /// workers.
    pub waiting: f64,
    /// Share of the time that a loader reads, from 0 to 1. The lower median of all loaders, so that
    /// a slow one does not count.
    pub reading: f64,
}

/// The need of loaders over their present number, and the measurements behind it in words.
///
/// Dense workers that wait for data for the share w of the time would train 1/(1 − w) times as much
/// without waiting. With the target w* the job needs (1 − w*)/(1 − w) times as many loaders, if
/// those read most of the time. Without such waits it needs reading / busy target times as many,
/// and no more than now.
pub(crate) fn ratio(policy: &LoaderPolicy, load: LoaderUse) -> (f64, String) {
    let LoaderUse { waiting, reading } = load;
    let percent = |share: f64| (share * 100.0).round();
    let facts = format!(
        "dense workers wait {} % of the time for data; the target is {} %; a loader reads {} % of the time",
        percent(waiting),
        percent(policy.wait_target),
        percent(reading)
    );
    if waiting <= policy.wait_target {
        return ((reading / policy.busy_target).min(1.0), facts);
    }
    if reading < BUSY {
        return (1.0, format!("{facts}, so more of them would not help"));
    }
    ((1.0 - policy.wait_target) / (1.0 - waiting), facts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Action, Decision, History, Observations, Policy, ReplicaBounds, ReplicaCount, Replicas, ScalingPolicy, Subject,
    };

    const BOUNDS: ReplicaBounds = ReplicaBounds { min: 1, max: 6 };

    /// Work of dense workers that so many loaders can feed. A loader reads 1,000 rows per second,
    /// and training takes up to `training` rows per second.
    fn fed(loaders: u32, training: f64) -> LoaderUse {
        let read = f64::from(loaders) * 1000.0;
        let trained = training.min(read);
        LoaderUse { waiting: 1.0 - trained / training, reading: trained / read }
    }

    /// The loaders over so many looks of 10 s, and the decisions.
    fn followed(looks: u64, mut loaders: u32, load: impl Fn(u32) -> LoaderUse) -> (u32, Vec<Decision>) {
        let policy = Policy {
            loader: Some(LoaderPolicy::new(BOUNDS)),
            scaling: ScalingPolicy { down_window_seconds: 60, ..ScalingPolicy::default() },
            ..Policy::default()
        };
        assert_eq!(policy.check(), Ok(()));
        let (mut history, mut acts) = (History::default(), Vec::new());
        for look in 1..=looks {
            let count = ReplicaCount { wanted: loaders, ready: loaders };
            let observations = Observations {
                at_seconds: 10 * look,
                loader_use: Some(load(loaders)),
                replicas: Replicas { loader: Some(count), ..Replicas::default() },
                ..Observations::default()
            };
            for decision in history.advance(&policy, &observations).into_iter().filter(Decision::acts) {
                assert_eq!(decision.subject, Subject::Loader);
                let Action::Scale { from, to } = decision.action else { panic!("{decision:?}") };
                assert_eq!(from, loaders);
                loaders = to;
                acts.push(decision);
            }
        }
        (loaders, acts)
    }

    #[test]
    fn loaders_are_added_until_dense_workers_hardly_wait() {
        let (loaders, acts) = followed(200, 1, |loaders| fed(loaders, 3_500.0));
        assert_eq!((loaders, acts.len()), (4, 2), "{acts:#?}");
        assert!(acts[0].reason.contains("dense workers wait 71 % of the time for data"), "{acts:#?}");
        assert_eq!(followed(200, 1, |loaders| fed(loaders, 90_000.0)).0, BOUNDS.max);
        assert_eq!(followed(200, 2, |loaders| fed(loaders, 2_100.0)).1, [], "within the target");
    }

    #[test]
    fn idle_loaders_are_removed_and_not_added_again() {
        let (loaders, acts) = followed(400, 6, |loaders| fed(loaders, 900.0));
        assert_eq!(loaders, 2, "{acts:#?}");
        assert_eq!(followed(400, loaders, |loaders| fed(loaders, 900.0)).1, []);
    }

    #[test]
    fn none_is_added_where_loaders_are_not_the_bottleneck() {
        let slow_one = LoaderUse { waiting: 0.6, reading: 0.3 };
        assert_eq!(followed(100, 2, |_| slow_one).1, []);
        let (ratio, facts) = ratio(&LoaderPolicy::new(BOUNDS), slow_one);
        assert!((ratio - 1.0).abs() < 1e-12 && facts.ends_with("more of them would not help"), "{ratio}: {facts}");
    }

    #[test]
    fn a_wait_without_any_training_at_most_doubles_them() {
        let (loaders, acts) = followed(8, 2, |_| LoaderUse { waiting: 1.0, reading: 1.0 });
        assert_eq!((loaders, acts.len()), (4, 1), "{acts:#?}");
    }

    #[test]
    fn wrong_settings_and_measurements_are_refused() {
        let policy = |wait_target| Policy {
            loader: Some(LoaderPolicy { wait_target, ..LoaderPolicy::new(BOUNDS) }),
            ..Policy::default()
        };
        for wrong in [0.0, 1.0, -0.1, f64::NAN] {
            assert_eq!(policy(wrong).check().map_err(|error| error.field), Err("loader.waitTarget"));
        }
        let load = |waiting, reading| Observations {
            loader_use: Some(LoaderUse { waiting, reading }),
            ..Observations::default()
        };
        assert_eq!(load(0.0, 1.0).check(), Ok(()));
        assert_eq!(load(1.5, 1.0).check().map_err(|error| error.field), Err("loaderUse.waiting"));
        assert_eq!(load(0.5, -1.0).check().map_err(|error| error.field), Err("loaderUse.reading"));
    }
}
