//! Kraken's Table IV: one optimizer for all parameters, and another one for the rows. Every id has
//! a row, and nothing is evicted.

use super::lab::{Lab, choose, measure};
use super::profile::Profile;
use super::variant::{Optimizers, Rate, Variant};
use crate::TrialError;

/// The candidates for the learning rate (Kraken's appendix).
const RATES: [f64; 4] = [0.1, 0.01, 0.001, 0.0001];
/// The dense optimizer of the hybrids, with the rate of Kraken §V-B.
const DENSE: Rate = ("adam", 0.001);
/// One optimizer for all parameters, with one rate.
const VANILLA: [&str; 3] = ["sgd", "adaGrad", "adam"];
/// The optimizers of the rows in the hybrids. Only their rate is chosen.
const HYBRID: [&str; 3] = ["adaGrad", "sgd", "rowWiseAdaGrad"];

pub(super) fn run(_profile: &Profile, lab: &mut dyn Lab) -> Result<(), TrialError> {
    for candidates in VANILLA.map(vanilla).into_iter().chain(HYBRID.map(hybrid)) {
        let best = choose(lab, candidates)?;
        measure(lab, &best)?;
    }
    Ok(())
}

fn vanilla(kind: &'static str) -> Vec<Variant> {
    RATES.map(|rate| variant(Optimizers { dense: (kind, rate), sparse: (kind, rate) })).into()
}

fn hybrid(sparse: &'static str) -> Vec<Variant> {
    RATES.map(|rate| variant(Optimizers { dense: DENSE, sparse: (sparse, rate) })).into()
}

fn variant(optimizers: Optimizers) -> Variant {
    let Optimizers { dense: (dense, _), sparse: (sparse, rate) } = optimizers;
    Variant::unbounded(format!("{dense}/{sparse}, rate {rate}"), optimizers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kraken::lab::tests::Faked;

    #[test]
    fn each_optimizer_has_the_rate_that_validation_chose() {
        let mut lab =
            Faked::new(|variant: &Variant, _| Some(if variant.optimizers.sparse.1 == 0.01 { 0.8 } else { 0.7 }));
        run(&Profile { features: Vec::new() }, &mut lab).unwrap();
        let names = ["sgd/sgd", "adaGrad/adaGrad", "adam/adam", "adam/adaGrad", "adam/sgd", "adam/rowWiseAdaGrad"];
        assert_eq!(lab.names(), names.map(|name| format!("{name}, rate 0.01")));
        let dense: Vec<Rate> = lab.recorded.iter().map(|(variant, _)| variant.optimizers.dense).collect();
        assert_eq!(dense[..3], [("sgd", 0.01), ("adaGrad", 0.01), ("adam", 0.01)]);
        assert_eq!(dense[3..], [DENSE; 3]);
    }
}
