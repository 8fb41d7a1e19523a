//! Kraken's Fig. 8: tables within one budget against hashed tables of the same bytes.

use super::division::{EXPONENTS, divide};
use super::lab::{Lab, Outcome, best, measure};
use super::profile::Profile;
use super::variant::{ADAM, Variant, budget, feature_set};
use crate::TrialError;

/// The rows that fit, as shares of the ids of the training rows.
const MEMORY: [f64; 4] = [0.1, 0.3, 0.6, 0.9];

pub(super) fn run(profile: &Profile, lab: &mut dyn Lab) -> Result<(), TrialError> {
    for memory in MEMORY {
        let gset = measure(lab, &Variant::bounded("gset", memory, profile.ids()))?;
        let mut hashed = Vec::new();
        for exponent in EXPONENTS {
            let variant = hashed_tables(profile, memory, exponent);
            hashed.push((measure(lab, &variant)?, variant.name));
        }
        lab.remark(comparison(memory, &gset, &hashed));
    }
    measure(lab, &Variant::unbounded("every id has a row", ADAM))?;
    Ok(())
}

/// A hashed table for each feature, with the rows of the budget together.
fn hashed_tables(profile: &Profile, memory: f64, exponent: f64) -> Variant {
    let ids: Vec<u64> = profile.features.iter().map(|feature| feature.ids).collect();
    let rows = divide(&ids, budget(memory, profile.ids()), exponent);
    let sets = rows.iter().enumerate().map(|(feature, rows)| feature_set(feature, "hashBuckets", rows));
    let name = format!("hashed, exponent {exponent}");
    Variant { memory, hashed_rows: Some(rows.iter().sum()), ..Variant::unbounded(name, ADAM) }.with(sets)
}

/// The best hashed tables are the best on the test rows, as in the paper. That helps the hashed
/// tables.
fn comparison(memory: f64, gset: &Outcome, hashed: &[(Outcome, String)]) -> String {
    let aucs: Vec<f64> = hashed.iter().map(|(outcome, _)| outcome.auc()).collect();
    let Some((outcome, name)) = best(&aucs).map(|best| &hashed[best]) else { return "no hashed table".to_owned() };
    let (gset, hashed) = (gset.auc(), outcome.auc());
    format!("memory {memory}: gset {gset:.4}, best of {name} {hashed:.4}, difference {:+.4}", gset - hashed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kraken::lab::tests::Faked;
    use crate::kraken::profile::Feature;

    fn profile() -> Profile {
        let feature = |ids| Feature { ids, expire_after: None, is_important: false };
        Profile { features: vec![feature(10_000), feature(30_000)] }
    }

    #[test]
    fn each_budget_meets_five_divisions_of_the_same_rows() {
        let mut lab = Faked::new(|variant: &Variant, _| Some(if variant.hashed_rows.is_some() { 0.7 } else { 0.75 }));
        run(&profile(), &mut lab).unwrap();
        assert_eq!(lab.recorded.len(), 4 * 6 + 1);
        for (group, memory) in lab.recorded.chunks(6).zip(MEMORY) {
            let rows = (memory * 40_000.0).round() as u64;
            assert_eq!(group[0].0.sets, [format!("spec.features.memory.maxRows={rows}")]);
            assert!(group[1..].iter().all(|(variant, _)| variant.hashed_rows == Some(rows)));
        }
        assert!(lab.remarks[0].contains("difference +0.0500"), "{:?}", lab.remarks);
    }

    #[test]
    fn each_feature_gets_its_own_hashed_table() {
        let variant = hashed_tables(&profile(), 0.1, 1.0);
        assert_eq!(
            variant.sets,
            ["spec.features.sparse[0].hashBuckets=1000", "spec.features.sparse[1].hashBuckets=3000"]
        );
    }
}
