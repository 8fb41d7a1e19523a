//! Converts the manifest's settings of row life to the settings of the store. The numbers are
//! integers in both, so no setting changes here.

use rectrain_crds as crds;
use rectrain_crds::{ResolvedAdmission, ResolvedBudget, ResolvedJob, ResolvedLife, ResolvedMemory};
use rectrain_embedding::{Admission, Budget, BudgetUnit, LifePolicy, Managed, Priority, RowSpec, ScoreRule};
use rectrain_kinds::{EvictionKind, RowPriority};

use super::JobPlan;

impl JobPlan {
    /// By row group: whether gradients carry the examples of each key. Only scores need them.
    #[must_use]
    pub fn counts_examples(&self) -> Vec<bool> {
        self.store.groups.iter().map(counts_examples).collect()
    }

    /// Whether some group has a policy that does not keep every row.
    #[must_use]
    pub fn has_managed_rows(&self) -> bool {
        self.store.groups.iter().any(|spec| spec.life != LifePolicy::KeepAll)
    }

    /// Whether rows of some group may be removed.
    #[must_use]
    pub fn removes_rows(&self) -> bool {
        let removes = |spec: &RowSpec| match spec.life {
            LifePolicy::Managed(managed) => self.store.budget.is_some() || managed.expire_after.is_some(),
            _ => false,
        };
        self.store.groups.iter().any(removes)
    }

    /// By row group: the names of its tables, for metrics. A group of many tables is named by its
    /// first and their number.
    #[must_use]
    pub fn group_names(&self) -> Vec<String> {
        let mut names: Vec<Vec<&str>> = vec![Vec::new(); self.store.groups.len()];
        for (field, place) in self.schema.sparse.iter().zip(&self.layout.features) {
            if !names[place.group].contains(&field.table.as_str()) {
                names[place.group].push(&field.table);
            }
        }
        names.into_iter().map(|tables| group_name(&tables)).collect()
    }
}

fn group_name(tables: &[&str]) -> String {
    match tables {
        [first, _, _, _, ..] => format!("{first} and {} more", tables.len() - 1),
        few => few.join(", "),
    }
}

fn counts_examples(spec: &RowSpec) -> bool {
    match spec.life {
        LifePolicy::Managed(managed) => managed.score != ScoreRule::Lru,
        _ => false,
    }
}

/// The policy of a table's rows.
pub(super) fn life(job: &ResolvedJob, table: &crds::ResolvedTable) -> LifePolicy {
    let Some(life) = &table.life else { return LifePolicy::KeepAll };
    LifePolicy::Managed(Managed {
        admission: admission(life),
        expire_after: life.expire_after_seconds,
        // Nothing is evicted without a budget, and the least work is to keep no scores.
        score: job.features.memory.as_ref().map_or(ScoreRule::Lru, score),
        priority: match life.priority {
            RowPriority::High => Priority::High,
            RowPriority::Low => Priority::Low,
        },
    })
}

fn admission(life: &ResolvedLife) -> Admission {
    match life.admission {
        ResolvedAdmission::Always => Admission::Always,
        ResolvedAdmission::Count { count, counters } => Admission::Count { count, counters },
        ResolvedAdmission::Probability { per_2_32 } => Admission::Probability { per_2_32 },
    }
}

fn score(memory: &ResolvedMemory) -> ScoreRule {
    let eviction = &memory.eviction;
    match eviction.policy {
        EvictionKind::Score => ScoreRule::Score {
            decay_per_day_millionths: eviction.decay_per_day_millionths,
            positive_weight_thousandths: eviction.positive_weight_thousandths,
        },
        EvictionKind::Lfu => ScoreRule::Lfu,
        EvictionKind::Lru => ScoreRule::Lru,
    }
}

/// The budget of the whole job.
pub(super) fn budget(job: &ResolvedJob) -> Option<Budget> {
    let memory = job.features.memory.as_ref()?;
    Some(match memory.budget {
        ResolvedBudget::Rows(limit) => Budget { unit: BudgetUnit::Rows, limit },
        ResolvedBudget::Bytes(limit) => Budget { unit: BudgetUnit::Bytes, limit },
    })
}

#[cfg(test)]
mod tests {
    use super::super::small_plan;
    use super::*;

    const BUDGET: &str = "spec.features.memory.maxRows=500";

    fn managed(changes: &[&str], group: usize) -> Managed {
        let plan = small_plan(changes);
        let LifePolicy::Managed(managed) = plan.store.groups[group].life else { panic!("{changes:?}") };
        managed
    }

    #[test]
    fn every_policy_and_priority_becomes_the_stores_own() {
        let score = |policy: &str| managed(&[BUDGET, &format!("spec.features.eviction.policy={policy}")], 0).score;
        let by_default = ScoreRule::Score { decay_per_day_millionths: 100_000, positive_weight_thousandths: 3_000 };
        assert_eq!([score("score"), score("lfu"), score("lru")], [by_default, ScoreRule::Lfu, ScoreRule::Lru]);
        let priority = |name: &str| managed(&[BUDGET, &format!("spec.features.sparse[0].priority={name}")], 0).priority;
        assert_eq!((priority("high"), priority("low")), (Priority::High, Priority::Low));
    }

    #[test]
    fn features_of_other_settings_lie_in_other_groups() {
        let one = small_plan(&[BUDGET]);
        assert_eq!((one.store.groups.len(), one.group_names()), (1, vec!["C1, C2".to_owned()]));
        let two =
            small_plan(&[BUDGET, "spec.features.sparse[1].admission.count=3", "spec.features.sparse[1].share=0.5"]);
        assert_eq!(two.group_names(), ["C1", "C2"]);
        assert_eq!((two.store.groups[0].share, two.store.groups[1].share), (None, Some(500_000)));
        let LifePolicy::Managed(counted) = two.store.groups[1].life else { panic!() };
        assert_eq!(counted.admission, Admission::Count { count: 3, counters: 1 << 24 });
        assert_eq!(two.store.budget, Some(Budget { unit: BudgetUnit::Rows, limit: 500 }));
    }

    #[test]
    fn only_scores_need_the_examples_of_keys() {
        let counts = |changes: &[&str]| small_plan(changes).counts_examples();
        assert_eq!((counts(&[]), counts(&[BUDGET])), (vec![false], vec![true]));
        assert_eq!(counts(&[BUDGET, "spec.features.eviction.policy=lru"]), [false]);
        let admitting = ["spec.features.sparse[0].admission.probability=0.5"];
        assert_eq!(counts(&admitting), [false, false]);
        assert_eq!((small_plan(&[]).removes_rows(), small_plan(&admitting).removes_rows()), (false, false));
        assert!(small_plan(&[BUDGET]).removes_rows());
    }

    #[test]
    fn only_jobs_that_keep_all_rows_look_ahead() {
        const AHEAD: &str = "spec.training.sync.lookAhead=3";
        assert_eq!((small_plan(&[]).look_ahead(), small_plan(&[AHEAD]).look_ahead()), (1, 3));
        assert_eq!(small_plan(&["spec.training.sync.lookAhead=0"]).look_ahead(), 0);
        assert_eq!(small_plan(&[AHEAD, BUDGET]).look_ahead(), 0);
        assert_eq!(small_plan(&[AHEAD, "spec.features.sparse[0].admission.count=2"]).look_ahead(), 0);
    }

    #[test]
    fn many_tables_of_a_group_are_counted_in_its_name() {
        assert_eq!(group_name(&["a", "b", "c"]), "a, b, c");
        assert_eq!(group_name(&["a", "b", "c", "d"]), "a and 3 more");
    }
}
