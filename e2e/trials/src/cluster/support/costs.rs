//! The operator's costs, from its leader's metrics.

use std::time::Duration;

use rectrain_harness::kubectl::Kubectl;
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};

use crate::TrialError;
use crate::error::unmet;

/// How long there may be no leader.
pub(crate) const TAKEOVER: Duration = Duration::from_secs(20);
/// The share of reconciles that must be quick.
const SHARE: f64 = 0.99;
/// The time limit of a quick reconcile, in seconds.
const QUICK: f64 = 1.0;
/// The limit of the operator's memory, in bytes.
const MEMORY: f64 = 200e6;

/// Counters of the leader since it started.
#[derive(Debug, Default)]
pub(crate) struct Costs {
    pub(crate) reconciles: f64,
    /// Requests to the API server.
    pub(crate) calls: f64,
    /// For bounds in seconds, ascending: the number of reconciles that took at most the bound.
    within: Vec<(f64, f64)>,
    /// Resident memory in bytes.
    memory: f64,
}

impl Costs {
    /// Reads the present leader's counters.
    pub(crate) fn read(kubectl: &Kubectl) -> Result<Self, HarnessError> {
        // Between two leaders there is none.
        let leader = eventually(TAKEOVER, "a leader", || match kubectl.leader()? {
            name if name.is_empty() => Err(not_yet("the lease has no holder")),
            name => Ok(name),
        })?;
        Self::parse(&kubectl.operator_metrics(&leader)?)
    }

    fn parse(text: &str) -> Result<Self, HarnessError> {
        let samples = || text.lines().filter_map(|line| line.rsplit_once(' '));
        let value = |name: &str| {
            let sample = samples().find(|(sample, _)| *sample == name);
            sample.and_then(|(_, value)| value.parse().ok()).ok_or_else(|| HarnessError::NoField {
                document: "the page of the operator's metrics".to_owned(),
                field: name.to_owned(),
                found: format!("{} lines", text.lines().count()),
            })
        };
        let requests = samples().filter(|(sample, _)| sample.starts_with("rectrain_operator_api_requests_total{"));
        let bucket = |(sample, count): (&str, &str)| -> Option<(f64, f64)> {
            let bound = sample.strip_prefix("rectrain_operator_reconcile_seconds_bucket{le=\"")?.strip_suffix("\"}")?;
            Some((bound.parse().ok()?, count.parse().ok()?))
        };
        Ok(Self {
            reconciles: value("rectrain_operator_reconcile_seconds_count")?,
            calls: requests.filter_map(|(_, value)| value.parse::<f64>().ok()).sum(),
            within: samples().filter_map(bucket).collect(),
            memory: value("process_resident_memory_bytes")?,
        })
    }

    /// The smallest bound in seconds that 99 in 100 reconciles since `before` kept; infinite if
    /// there is none.
    fn p99(&self, before: &Self) -> f64 {
        let most = SHARE * (self.reconciles - before.reconciles);
        let earlier = |bound: f64| before.within.iter().find(|(at, _)| *at == bound).map_or(0.0, |(_, count)| *count);
        let kept = self.within.iter().find(|(bound, count)| count - earlier(*bound) >= most);
        kept.map_or(f64::INFINITY, |(bound, _)| *bound)
    }

    /// Checks that the costs since `before` are within the bounds for a thousand jobs.
    pub(crate) fn within_bounds(&self, before: &Self) -> Result<(), TrialError> {
        if self.p99(before) <= QUICK && self.memory <= MEMORY {
            return Ok(());
        }
        let expected = format!("99 in 100 reconciles within {QUICK} s, and at most {:.0} MB", MEMORY / 1e6);
        Err(unmet(expected, self.since(before)))
    }

    /// The costs since `before`, in words.
    pub(crate) fn since(&self, before: &Self) -> String {
        let (reconciles, p99) = (self.reconciles - before.reconciles, self.p99(before));
        format!("{reconciles} reconciles, 99 in 100 of them within {p99} s; {:.0} MB", self.memory / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_read_from_metrics_and_bounded() {
        let text = "rectrain_operator_reconcile_seconds_bucket{le=\"1\"} 99\n\
                    rectrain_operator_reconcile_seconds_bucket{le=\"5\"} 100\n\
                    rectrain_operator_reconcile_seconds_count 100\n\
                    rectrain_operator_api_requests_total{verb=\"get\"} 7\n\
                    rectrain_operator_api_requests_total{verb=\"patch\"} 5\nprocess_resident_memory_bytes 1e8\n";
        let costs = Costs::parse(text).unwrap();
        assert_eq!((costs.reconciles, costs.calls), (100.0, 12.0));
        costs.within_bounds(&Costs::default()).unwrap();
        let slow = text.replace("} 99", "} 98");
        assert!(Costs::parse(&slow).unwrap().within_bounds(&Costs::default()).is_err());
        assert!(Costs::parse("").is_err());
    }
}
