//! Kraken's Fig. 9: the probability of admission. Nothing is evicted. LFU with a budget that is
//! never reached counts the examples of each row.

use super::lab::{Lab, measure};
use super::profile::Profile;
use super::variant::{ADAM, Variant, budget, feature_set};
use crate::TrialError;

const PROBABILITIES: [f64; 4] = [1.0, 0.5, 0.1, 0.03];
/// The rows of the budget for each id. Slots have different numbers of ids, and none may be full.
const AMPLE: u64 = 10;

pub(super) fn run(profile: &Profile, lab: &mut dyn Lab) -> Result<(), TrialError> {
    for probability in PROBABILITIES {
        measure(lab, &admitting(profile, probability))?;
    }
    Ok(())
}

fn admitting(profile: &Profile, probability: f64) -> Variant {
    let features = 0..profile.features.len();
    let sets = features.map(|feature| feature_set(feature, "admission.probability", probability));
    let rows = AMPLE * budget(1.0, profile.ids());
    let lfu = [format!("spec.features.memory.maxRows={rows}"), "spec.features.eviction.policy=lfu".to_owned()];
    let variant = Variant::unbounded(format!("p {probability}"), ADAM).with(lfu).with(sets);
    Variant { counts_levels: true, ..variant }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kraken::lab::tests::Faked;
    use crate::kraken::profile::Feature;

    #[test]
    fn every_feature_admits_with_each_probability() {
        let features = [2_000, 3_000].map(|ids| Feature { ids, expire_after: None, is_important: false }).into();
        let mut lab = Faked::new(|_, _| Some(0.7));
        run(&Profile { features }, &mut lab).unwrap();
        assert_eq!(lab.names(), ["p 1", "p 0.5", "p 0.1", "p 0.03"]);
        assert!(lab.recorded.iter().all(|(variant, _)| variant.counts_levels));
        assert_eq!(
            lab.recorded[3].0.sets,
            [
                "spec.features.memory.maxRows=50000",
                "spec.features.eviction.policy=lfu",
                "spec.features.sparse[0].admission.probability=0.03",
                "spec.features.sparse[1].admission.probability=0.03",
            ]
        );
    }
}
