//! The configuration of a store: the number of slots, the seed, and the shape of the rows of every
//! group. [`StoreConfig::validate`] checks it once, and all other code relies on that.

use rectrain_kinds::{Initializer, SparseOptimizer, ValueType};

use crate::initial::InitialValues;
use crate::optimizer::RowOptimizer;
use crate::{GroupId, LifePolicy, MAX_DIM, MAX_GROUPS, MAX_SLOTS, SpecError};

/// The shape of the rows of one group, and the rules for them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSpec {
    /// Columns of a row, `1 ..= MAX_DIM`.
    pub dim: usize,
    /// The stored type of values.
    pub value_type: ValueType,
    /// The rule by which a gradient changes a row.
    pub optimizer: SparseOptimizer,
    /// The rule that decides which keys get a row, and when a row is removed.
    pub life: LifePolicy,
    /// The rule for initial values.
    pub initializer: Initializer,
    /// This many leading columns start at 0, whatever the initializer: the first-order weights of
    /// factorization machines and linear models. `0 ..= dim`.
    pub zero_columns: usize,
    /// The rule by which a gradient changes the leading columns that start at 0, with state of
    /// their own. `optimizer` then holds for the other columns alone. `None` if `optimizer` holds
    /// for the whole row. Needs both kinds of columns.
    pub first_order: Option<SparseOptimizer>,
    /// The most that the rows of this group may take of the store's [budget](StoreConfig::budget),
    /// in millionths: `1 ..= 1_000_000`.
    pub share: Option<u32>,
}

impl RowSpec {
    /// Whether rows that were made under the spec `earlier` may continue under this one. Everything
    /// must be equal but three things. Learning rates may follow a schedule or be lowered for
    /// fine-tuning. FTRL's learning rate may not change, because its weights are a function of its
    /// state *and* that rate. The share and the priority of the rows may change, as the budget may.
    #[must_use]
    pub fn continues(&self, earlier: &Self) -> bool {
        let neutral = |spec: &Self| Self {
            optimizer: spec.optimizer.without_learning_rate(),
            first_order: spec.first_order.map(RowOptimizer::without_learning_rate),
            life: spec.life.without_changeable(),
            share: None,
            ..*spec
        };
        neutral(self) == neutral(earlier)
    }

    fn validate(&self) -> Result<(), SpecError> {
        if self.dim == 0 || self.dim > MAX_DIM {
            return Err(SpecError::Dim { found: self.dim });
        }
        if self.zero_columns > self.dim {
            return Err(SpecError::ZeroColumns { found: self.zero_columns, dim: self.dim });
        }
        if let Some(share) = self.share.filter(|share| !(1..=1_000_000).contains(share)) {
            return Err(SpecError::Share { found: share });
        }
        self.optimizer.validate()?;
        if let Some(first_order) = self.first_order {
            if self.zero_columns == 0 || self.zero_columns == self.dim {
                return Err(SpecError::FirstOrder { zero_columns: self.zero_columns, dim: self.dim });
            }
            first_order.validate().map_err(|source| SpecError::OfFirstOrder { source: Box::new(source) })?;
        }
        self.life.validate()?;
        self.initializer.validate()
    }
}

/// The number that a budget limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BudgetUnit {
    /// Rows.
    Rows,
    /// Bytes of memory of rows: values, optimizer state, and 22 bytes for the row's key, word and
    /// index entry. It does not cover the counters of [`Admission::Count`](crate::Admission).
    Bytes,
}

/// The most that the rows of the whole job may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    pub unit: BudgetUnit,
    /// At least 1. Each slot may keep one row, so a lower limit than that counts as that.
    pub limit: u64,
}

impl Budget {
    pub(crate) fn validate(self) -> Result<(), SpecError> {
        if self.limit == 0 { Err(SpecError::Budget) } else { Ok(()) }
    }
}

/// The configuration of a store. Two stores with equal configurations and equal calls are equal to
/// the bit.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreConfig {
    /// Virtual shards of the whole key space, `1 ..= MAX_SLOTS`, the same in every process of a
    /// job.
    pub slots: u32,
    /// Seed of the initial values.
    pub seed: u64,
    /// The row groups, by [`GroupId`].
    pub groups: Vec<RowSpec>,
    /// The most that the rows of the whole job may take. No part of a snapshot. See
    /// [`Store::keep_budget`](crate::Store::keep_budget).
    pub budget: Option<Budget>,
}

impl StoreConfig {
    /// Checks every number against its range.
    ///
    /// # Errors
    /// The first number that is out of its range, with the group it belongs to.
    pub fn validate(&self) -> Result<(), SpecError> {
        if self.slots == 0 || self.slots > MAX_SLOTS {
            return Err(SpecError::Slots { found: self.slots });
        }
        if self.groups.is_empty() || self.groups.len() > MAX_GROUPS {
            return Err(SpecError::Groups { found: self.groups.len() });
        }
        self.budget.map_or(Ok(()), Budget::validate)?;
        for (position, spec) in self.groups.iter().enumerate() {
            spec.validate()
                .map_err(|source| SpecError::InGroup { group: GroupId(position as u16), source: Box::new(source) })?;
        }
        Ok(())
    }
}

#[cfg(test)]
impl RowSpec {
    /// For tests of something else: rows that start at 0.5 and learn by plain SGD with a rate of 1.
    pub(crate) fn plain(dim: usize) -> Self {
        Self {
            dim,
            value_type: ValueType::F32,
            optimizer: SparseOptimizer::Sgd { learning_rate: 1.0 },
            life: LifePolicy::KeepAll,
            initializer: Initializer::Constant(0.5),
            zero_columns: 0,
            first_order: None,
            share: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> RowSpec {
        RowSpec {
            dim: 8,
            value_type: ValueType::F32,
            optimizer: SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.0, epsilon: 1e-10 },
            life: LifePolicy::KeepAll,
            initializer: Initializer::Normal { standard_deviation: 0.01 },
            zero_columns: 1,
            first_order: None,
            share: None,
        }
    }

    fn refused(change: impl FnOnce(&mut RowSpec)) -> String {
        let mut changed = spec();
        change(&mut changed);
        let config = StoreConfig { slots: 4, seed: 0, groups: vec![spec(), changed], budget: None };
        config.validate().unwrap_err().to_string()
    }

    #[test]
    fn a_number_out_of_range_is_refused_with_its_group_and_name() {
        assert!(refused(|s| s.dim = 0).starts_with("row group 1: dim"));
        assert!(refused(|s| s.dim = MAX_DIM + 1).contains("dim"));
        assert!(refused(|s| s.zero_columns = 9).contains("zero_columns"));
        let first_order = Some(SparseOptimizer::Sgd { learning_rate: 0.5 });
        let all = |s: &mut RowSpec| (s.zero_columns, s.first_order) = (8, first_order);
        assert!(refused(all).contains("8 of its 8 columns"));
        assert!(refused(|s| (s.zero_columns, s.first_order) = (0, first_order)).contains("0 of its 8 columns"));
        let rate = |s: &mut RowSpec| s.first_order = Some(SparseOptimizer::Sgd { learning_rate: 0.0 });
        assert!(refused(rate).contains("first-order weights: the optimizer's learning_rate is 0"));
        assert!(refused(|s| s.share = Some(0)).contains("share"));
        assert!(refused(|s| s.share = Some(1_000_001)).contains("share"));
        assert!(refused(|s| s.initializer = Initializer::Constant(f32::NAN)).contains("initializer"));
        assert!(refused(|s| s.initializer = Initializer::Uniform { low: 1.0, high: -1.0 }).contains("initializer"));
        assert!(
            refused(|s| s.optimizer = SparseOptimizer::Sgd { learning_rate: f64::INFINITY }).contains("learning_rate")
        );
        assert!(
            refused(
                |s| s.optimizer = SparseOptimizer::Adam { learning_rate: 0.1, beta1: 1.0, beta2: 0.9, epsilon: 1e-8 }
            )
            .contains("beta1")
        );
    }

    #[test]
    fn slots_and_groups_have_ranges() {
        let config = |slots, groups| StoreConfig { slots, seed: 0, groups, budget: None };
        assert!(config(0, vec![spec()]).validate().is_err());
        assert!(config(MAX_SLOTS + 1, vec![spec()]).validate().is_err());
        assert!(config(1, vec![]).validate().is_err());
        assert!(config(MAX_SLOTS, vec![spec()]).validate().is_ok());
    }

    #[test]
    fn only_the_learning_rate_may_change_between_runs() {
        let earlier = spec();
        let with = |change: fn(&mut RowSpec)| {
            let mut later = spec();
            change(&mut later);
            later.continues(&earlier)
        };
        assert!(with(|s| if let SparseOptimizer::AdaGrad { learning_rate, .. } = &mut s.optimizer {
            *learning_rate = 0.5;
        }));
        assert!(!with(|s| s.dim = 9));
        assert!(!with(|s| s.first_order = Some(SparseOptimizer::Sgd { learning_rate: 0.1 })));
        assert!(!with(|s| s.value_type = ValueType::F16));
        assert!(!with(|s| s.zero_columns = 0));
        assert!(!with(|s| s.initializer = Initializer::Constant(0.0)));
        assert!(
            !with(|s| s.optimizer = SparseOptimizer::Sgd { learning_rate: 0.1 }),
            "an optimizer change must be noticed"
        );
        assert!(!with(|s| if let SparseOptimizer::AdaGrad { epsilon, .. } = &mut s.optimizer {
            *epsilon = 1e-7;
        }));
    }

    #[test]
    fn only_the_learning_rate_of_first_order_weights_may_change() {
        let sgd = |learning_rate| RowSpec { first_order: Some(SparseOptimizer::Sgd { learning_rate }), ..spec() };
        let ftrl = |learning_rate| RowSpec {
            first_order: Some(SparseOptimizer::Ftrl { learning_rate, beta: 1.0, l1: 0.0, l2: 0.0 }),
            ..spec()
        };
        assert!(sgd(0.5).continues(&sgd(0.1)));
        assert!(ftrl(0.5).continues(&ftrl(0.5)) && !ftrl(0.5).continues(&ftrl(0.1)));
        assert!(!ftrl(0.5).continues(&sgd(0.5)) && !spec().continues(&sgd(0.5)));
    }
}
