//! Kraken's Fig. 10: the policies of eviction, each added to the ones before it.

use super::lab::{Lab, choose, measure};
use super::profile::Profile;
use super::variant::{Variant, feature_set};
use crate::TrialError;

/// The rows that fit, as a share of the ids of the training rows.
const MEMORY: f64 = 0.6;
/// The candidates for r, the weight of a positive example.
const WEIGHTS: [u32; 3] = [1, 3, 5];
/// The shortest `expireAfter`, in seconds.
const SHORTEST_EXPIRY: u64 = 60;

pub(super) fn run(profile: &Profile, lab: &mut dyn Lab) -> Result<(), TrialError> {
    measure(lab, &lfu(profile))?;
    let score = choose(lab, WEIGHTS.map(|weight| scored(profile, weight)).into())?;
    measure(lab, &score)?;
    let duration = extended(&score, "duration", expiries(profile));
    measure(lab, &duration)?;
    measure(lab, &extended(&duration, "priority", priorities(profile)))?;
    Ok(())
}

fn lfu(profile: &Profile) -> Variant {
    Variant::bounded("lfu", MEMORY, profile.ids()).with(["spec.features.eviction.policy=lfu".to_owned()])
}

fn scored(profile: &Profile, weight: u32) -> Variant {
    let eviction = "spec.features.eviction";
    let sets = [
        format!("{eviction}.policy=score"),
        format!("{eviction}.decayPerDay=0.1"),
        format!("{eviction}.positiveWeight={weight}"),
    ];
    Variant::bounded(format!("score with r {weight}"), MEMORY, profile.ids()).with(sets)
}

fn extended(variant: &Variant, with: &str, sets: Vec<String>) -> Variant {
    Variant { name: format!("{} + {with}", variant.name), ..variant.clone() }.with(sets)
}

fn expiries(profile: &Profile) -> Vec<String> {
    let features = profile.features.iter().enumerate();
    let sets = features.filter_map(|(place, feature)| {
        let seconds = feature.expire_after?.max(SHORTEST_EXPIRY);
        Some(feature_set(place, "expireAfter", format!("{seconds}s")))
    });
    sets.collect()
}

fn priorities(profile: &Profile) -> Vec<String> {
    let features = profile.features.iter().enumerate().filter(|(_, feature)| feature.is_important);
    features.map(|(place, _)| feature_set(place, "priority", "high")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kraken::lab::Tested;
    use crate::kraken::lab::tests::Faked;
    use crate::kraken::profile::Feature;

    #[test]
    fn each_policy_is_added_to_the_weight_that_validation_chose() {
        let features = vec![
            Feature { ids: 6_000, expire_after: Some(7_000), is_important: false },
            Feature { ids: 4_000, expire_after: Some(3), is_important: true },
        ];
        let mut lab = Faked::new(|variant: &Variant, tested| {
            let is_best = variant.name.contains("r 5") == (tested == Tested::Validation);
            Some(if is_best { 0.8 } else { 0.7 })
        });
        run(&Profile { features }, &mut lab).unwrap();
        let names = ["lfu", "score with r 5", "score with r 5 + duration", "score with r 5 + duration + priority"];
        assert_eq!(lab.names(), names);
        let sets = &lab.recorded[3].0.sets;
        assert_eq!(sets[0], "spec.features.memory.maxRows=6000");
        assert_eq!(sets[3], "spec.features.eviction.positiveWeight=5");
        assert_eq!(
            sets[4..],
            [
                "spec.features.sparse[0].expireAfter=7000s",
                "spec.features.sparse[1].expireAfter=60s",
                "spec.features.sparse[1].priority=high",
            ]
        );
        assert_eq!(lab.trained.len(), 4 + WEIGHTS.len());
    }
}
