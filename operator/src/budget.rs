//! The memory budget of a job's tables. Pods start with the budget of their attempt. A change of
//! its number in the manifest goes to the coordinator, without a new attempt.

use rectrain_crds::{AttemptStatus, BudgetStatus, BytesSpec, MemorySpec, RecTrainingJobSpec, Role};

/// The budget of the manifest, for an attempt that starts with this many parameter servers. `auto`
/// depends on their number. `None` without a budget.
#[must_use]
pub fn wanted(spec: &RecTrainingJobSpec, servers: Option<u32>) -> Option<BudgetStatus> {
    let mut spec = spec.clone();
    if let Some(servers) = servers {
        spec.roles.get_or_insert_default().set_replicas(Role::Ps, servers);
    }
    let memory = spec.features.memory.as_ref()?.for_members(&spec);
    let max_bytes = memory.max_bytes.as_ref().and_then(BytesSpec::bytes);
    Some(BudgetStatus { max_rows: memory.max_rows, max_bytes }).filter(|budget| *budget != BudgetStatus::default())
}

/// The budget as pods read it.
#[must_use]
pub fn for_pods(budget: BudgetStatus) -> MemorySpec {
    let max_bytes = budget.max_bytes.map(|bytes| BytesSpec::Text(bytes.to_string()));
    MemorySpec { max_rows: budget.max_rows, max_bytes, auto: None }
}

/// The parameter servers that an attempt starts with.
#[must_use]
pub fn servers(attempt: &AttemptStatus) -> Option<u32> {
    Some(attempt.replicas.as_ref()?.get(Role::Ps)?.started)
}

/// The budget to ask the coordinator for, which reports `present`. `None` if it has the wanted one,
/// or if the job has no budget.
#[must_use]
pub fn to_ask(
    spec: &RecTrainingJobSpec,
    attempt: &AttemptStatus,
    present: Option<BudgetStatus>,
) -> Option<BudgetStatus> {
    let present = present?;
    wanted(spec, servers(attempt)).filter(|wanted| *wanted != present)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifests;

    fn spec(memory: MemorySpec) -> RecTrainingJobSpec {
        let mut spec = manifests::load(manifests::AUTOMATIC).job.spec;
        spec.features.memory = Some(memory);
        spec
    }

    #[test]
    fn a_changed_number_is_asked_for_until_the_coordinator_has_it() {
        let rows = |rows| BudgetStatus { max_rows: Some(rows), max_bytes: None };
        let spec = spec(MemorySpec { max_rows: Some(700_000_000), ..MemorySpec::default() });
        let attempt = AttemptStatus { budget: Some(rows(900_000_000)), ..AttemptStatus::default() };
        assert_eq!(to_ask(&spec, &attempt, Some(rows(900_000_000))), Some(rows(700_000_000)));
        assert_eq!(to_ask(&spec, &attempt, Some(rows(700_000_000))), None);
        assert_eq!(to_ask(&spec, &attempt, None), None, "a coordinator that reports no budget");
    }

    #[test]
    fn pods_read_the_budget_that_the_attempt_starts_with() {
        let bytes = MemorySpec { max_bytes: Some(BytesSpec::Text("7Gi".to_owned())), ..MemorySpec::default() };
        let budget = wanted(&spec(bytes), Some(3)).unwrap_or_default();
        assert_eq!(budget, BudgetStatus { max_rows: None, max_bytes: Some(7 << 30) });
        assert_eq!(for_pods(budget).max_bytes.and_then(|bytes| bytes.bytes()), Some(7 << 30));
        let none = manifests::load(manifests::AUTOMATIC).job.spec;
        assert_eq!(wanted(&none, Some(3)), None);
    }
}
