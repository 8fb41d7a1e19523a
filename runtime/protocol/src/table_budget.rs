//! The memory budget of the tables in messages.

use rectrain_embedding::{Budget, BudgetUnit};
use rectrain_proto::v1;

/// The budget as a message has it.
#[must_use]
pub fn write(budget: Budget) -> v1::TableBudget {
    match budget.unit {
        BudgetUnit::Rows => v1::TableBudget { rows: budget.limit, bytes: 0 },
        BudgetUnit::Bytes => v1::TableBudget { rows: 0, bytes: budget.limit },
    }
}

/// The budget of a message. `None` unless exactly one of its numbers is above 0.
#[must_use]
pub fn read(budget: v1::TableBudget) -> Option<Budget> {
    match budget {
        v1::TableBudget { rows: limit @ 1.., bytes: 0 } => Some(Budget { unit: BudgetUnit::Rows, limit }),
        v1::TableBudget { rows: 0, bytes: limit @ 1.. } => Some(Budget { unit: BudgetUnit::Bytes, limit }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_has_one_unit() {
        for unit in [BudgetUnit::Rows, BudgetUnit::Bytes] {
            let budget = Budget { unit, limit: 7 };
            assert_eq!(read(write(budget)), Some(budget));
        }
        for (rows, bytes) in [(0, 0), (1, 1)] {
            assert_eq!(read(v1::TableBudget { rows, bytes }), None);
        }
    }
}
