//! The seam between the experiments, which are pure, and the runs that they ask for.

use rectrain_harness::HarnessError;
use rectrain_harness::statistics::mean;

use super::variant::Variant;
use crate::TrialError;
use crate::error::unmet;

/// The rows that a trained model is tested on. Both follow the training rows in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tested {
    /// The rows that choose between settings.
    Validation,
    /// The rows of the results, after the validation rows.
    Test,
}

/// The results of a variant's runs.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outcome {
    /// By seed.
    pub(super) aucs: Vec<f64>,
    /// The rows at the end; the most of any seed.
    pub(super) rows: u64,
    /// The rows by frequency level, with the first seed; empty unless the variant counts them.
    pub(super) levels: Vec<u64>,
}

impl Outcome {
    /// The mean over the seeds.
    pub(super) fn auc(&self) -> f64 {
        mean(self.aucs.iter().copied())
    }
}

/// Runs variants, and keeps their results.
pub(super) trait Lab {
    /// Trains a variant with every seed.
    fn train(&mut self, variant: &Variant, tested: Tested) -> Result<Outcome, TrialError>;

    /// Keeps the result of a variant on the test rows.
    fn record(&mut self, variant: &Variant, outcome: &Outcome) -> Result<(), TrialError>;

    /// Tells the person who runs the command.
    fn remark(&mut self, text: String);
}

/// A lab that trains nothing, and counts the runs of an experiment.
pub(super) struct Counter {
    /// The seeds of each variant.
    pub(super) seeds: u64,
    /// The runs so far.
    pub(super) runs: u64,
}

impl Lab for Counter {
    fn train(&mut self, variant: &Variant, tested: Tested) -> Result<Outcome, TrialError> {
        self.runs += self.seeds + u64::from(counts_levels(variant, tested));
        Ok(Outcome { aucs: vec![0.5], rows: 0, levels: Vec::new() })
    }

    fn record(&mut self, _variant: &Variant, _outcome: &Outcome) -> Result<(), TrialError> {
        Ok(())
    }

    fn remark(&mut self, _text: String) {}
}

/// Whether a run with a checkpoint follows the runs of a variant, to count its frequency levels.
pub(super) fn counts_levels(variant: &Variant, tested: Tested) -> bool {
    variant.counts_levels && tested == Tested::Test
}

/// Trains a variant, and keeps its result on the test rows.
pub(super) fn measure(lab: &mut dyn Lab, variant: &Variant) -> Result<Outcome, TrialError> {
    let outcome = lab.train(variant, Tested::Test)?;
    lab.record(variant, &outcome)?;
    Ok(outcome)
}

/// The candidate with the highest mean AUC on the validation rows. A candidate whose run fails, for
/// example because it diverges, is left out.
pub(super) fn choose(lab: &mut dyn Lab, candidates: Vec<Variant>) -> Result<Variant, TrialError> {
    let mut aucs = Vec::with_capacity(candidates.len());
    for candidate in &candidates {
        aucs.push(match lab.train(candidate, Tested::Validation) {
            Ok(outcome) => outcome.auc(),
            Err(failure @ TrialError::Harness(HarnessError::Failed { .. })) => {
                lab.remark(format!("left out {}: {failure}", candidate.name));
                f64::NAN
            }
            Err(error) => return Err(error),
        });
    }
    let best = best(&aucs).and_then(|best| candidates.into_iter().nth(best));
    let best = best.ok_or_else(|| unmet("a candidate with an AUC on the validation rows", "none"))?;
    lab.remark(format!("chosen on the validation rows: {}", best.name));
    Ok(best)
}

/// The place of the highest number, the first of equal ones. NaN is no candidate.
pub(super) fn best(aucs: &[f64]) -> Option<usize> {
    let candidates = aucs.iter().enumerate().filter(|(_, auc)| !auc.is_nan());
    candidates.rev().max_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(place, _)| place)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::kraken::variant::ADAM;

    /// A lab that trains nothing. `auc` has the AUC of a variant.
    pub(in crate::kraken) struct Faked<F> {
        pub(in crate::kraken) auc: F,
        /// The runs, in order.
        pub(in crate::kraken) trained: Vec<(Variant, Tested)>,
        pub(in crate::kraken) recorded: Vec<(Variant, Outcome)>,
        pub(in crate::kraken) remarks: Vec<String>,
    }

    impl<F: Fn(&Variant, Tested) -> Option<f64>> Faked<F> {
        pub(in crate::kraken) fn new(auc: F) -> Self {
            Self { auc, trained: Vec::new(), recorded: Vec::new(), remarks: Vec::new() }
        }

        /// The names of the recorded variants.
        pub(in crate::kraken) fn names(&self) -> Vec<&str> {
            self.recorded.iter().map(|(variant, _)| &*variant.name).collect()
        }
    }

    impl<F: Fn(&Variant, Tested) -> Option<f64>> Lab for Faked<F> {
        fn train(&mut self, variant: &Variant, tested: Tested) -> Result<Outcome, TrialError> {
            self.trained.push((variant.clone(), tested));
            let status = std::process::ExitStatus::default();
            let failed = || HarnessError::Failed { command: "run".to_owned(), status, output: "diverged".to_owned() };
            Ok(Outcome { aucs: vec![(self.auc)(variant, tested).ok_or_else(failed)?], rows: 7, levels: Vec::new() })
        }

        fn record(&mut self, variant: &Variant, outcome: &Outcome) -> Result<(), TrialError> {
            self.recorded.push((variant.clone(), outcome.clone()));
            Ok(())
        }

        fn remark(&mut self, text: String) {
            self.remarks.push(text);
        }
    }

    #[test]
    fn the_best_is_the_first_of_the_highest() {
        assert_eq!(best(&[0.7, 0.8, f64::NAN, 0.8]), Some(1));
        assert_eq!((best(&[f64::NAN]), best(&[])), (None, None));
    }

    #[test]
    fn a_choice_sees_validation_rows_only_and_leaves_failures_out() {
        let candidates = || ["a", "b", "c"].map(|name| Variant::unbounded(name, ADAM)).to_vec();
        let mut lab = Faked::new(|variant: &Variant, tested| {
            // On the test rows, the other one would be chosen.
            let is_a = variant.name == "a";
            (variant.name != "b").then_some(if is_a == (tested == Tested::Validation) { 0.8 } else { 0.7 })
        });
        assert_eq!(choose(&mut lab, candidates()).unwrap().name, "a");
        assert!(lab.trained.iter().all(|(_, tested)| *tested == Tested::Validation) && lab.recorded.is_empty());
        assert!(lab.remarks[0].contains("left out b"), "{:?}", lab.remarks);
        assert!(choose(&mut Faked::new(|_, _| None), candidates()).is_err());
    }
}
