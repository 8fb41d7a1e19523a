//! Compares two checkpoints: their jobs, their dense parameters, and their rows.

use std::collections::BTreeMap;

use rectrain_checkpoint::{Checkpoint, CheckpointError, DenseState};
use rectrain_embedding::{Slot, Store};

use super::{by_slots, scratch, store_failure};
use crate::failure::Failure;
use crate::human::thousands;
use crate::output;

/// The numbers of equal and different rows.
#[derive(Debug, Default, PartialEq)]
struct RowDifferences {
    only_in_one: u64,
    only_in_other: u64,
    changed: u64,
    equal: u64,
    /// The largest absolute difference of a value in a changed row.
    largest: f32,
}

/// The values and the optimizer state of a slot's rows, by (group, key).
type Rows = BTreeMap<(u16, u64), (Vec<f32>, Vec<f32>)>;

/// Prints the differences.
pub(super) async fn run(one: &Checkpoint, other: &Checkpoint) -> Result<(), Failure> {
    output::line(format_args!("one    {}", one.name()))?;
    output::line(format_args!("other  {}", other.name()))?;
    match one.manifest().identity.difference(&other.manifest().identity) {
        Some(difference) => {
            let shown =
                |value: Option<serde_json::Value>| value.map_or("missing".to_owned(), |value| value.to_string());
            output::line(format_args!(
                "jobs   differ: {} is {} in one and {} in the other",
                difference.path,
                shown(difference.saved),
                shown(difference.wanted)
            ))?;
        }
        None => output::line("jobs   are the same")?,
    }
    match (if_present(one.dense().await)?, if_present(other.dense().await)?) {
        (Some(one), Some(other)) => output::line(format_args!("dense  {}", dense(&one, &other)))?,
        (one, other) => {
            output::line(format_args!("dense  in one: {}, in the other: {}", one.is_some(), other.is_some()))?
        }
    }
    if one.manifest().slots != other.manifest().slots {
        let slots = (one.manifest().slots, other.manifest().slots);
        output::line(format_args!("rows   cannot be compared: one has {} slots, the other {}", slots.0, slots.1))?;
        return Ok(());
    }
    let found = rows(one, other).await?;
    output::line(format_args!(
        "rows   {} equal, {} changed (by at most {:e}), {} only in one, {} only in the other",
        thousands(found.equal),
        thousands(found.changed),
        found.largest,
        thousands(found.only_in_one),
        thousands(found.only_in_other)
    ))?;
    Ok(())
}

/// `None` if a checkpoint has no dense parameters.
fn if_present(dense: Result<DenseState, CheckpointError>) -> Result<Option<DenseState>, Failure> {
    match dense {
        Ok(dense) => Ok(Some(dense)),
        Err(CheckpointError::NotHeld { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn dense(one: &DenseState, other: &DenseState) -> String {
    if one.parameters.len() != other.parameters.len() {
        return format!("{} parameters in one and {} in the other", one.parameters.len(), other.parameters.len());
    }
    let pairs = one.parameters.iter().zip(&other.parameters);
    let changed = pairs.clone().filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    let largest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    format!(
        "{} of {} parameters differ (by at most {largest:e}); {} and {} updates",
        thousands(changed as u64),
        thousands(one.parameters.len() as u64),
        thousands(one.update_count),
        thousands(other.update_count)
    )
}

async fn rows(one: &Checkpoint, other: &Checkpoint) -> Result<RowDifferences, Failure> {
    let (store, other_store) = (scratch(one).await?, scratch(other).await?);
    let mut found = RowDifferences::default();
    by_slots(one, &store, async |range| {
        let wanted = rectrain_checkpoint::SlotSet::new(range.clone().map(Slot));
        other.restore_rows(&other_store, &wanted).await?;
        for slot in range.map(Slot) {
            compare(&rows_of(&store, slot)?, &rows_of(&other_store, slot)?, &mut found);
            other_store.clear_slot(slot).map_err(store_failure)?;
        }
        Ok(())
    })
    .await?;
    Ok(found)
}

fn rows_of(store: &Store, slot: Slot) -> Result<Rows, Failure> {
    let mut rows = Rows::new();
    store
        .for_each_row(slot, |group, key, values, state| {
            rows.insert((group.0, key.0), (values.to_vec(), state.to_vec()));
        })
        .map_err(store_failure)?;
    Ok(rows)
}

fn compare(one: &Rows, other: &Rows, found: &mut RowDifferences) {
    for (name, row) in one {
        match other.get(name) {
            None => found.only_in_one += 1,
            Some(other_row) if other_row == row => found.equal += 1,
            Some((values, _)) => {
                found.changed += 1;
                let differences = row.0.iter().zip(values).map(|(a, b)| (a - b).abs());
                found.largest = differences.fold(found.largest, f32::max);
            }
        }
    }
    found.only_in_other += other.keys().filter(|name| !one.contains_key(name)).count() as u64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_compared_by_group_and_key() {
        let row = |value: f32| (vec![value, 1.0], vec![0.5]);
        let one = Rows::from([((0, 1), row(1.0)), ((0, 2), row(2.0)), ((1, 1), row(3.0))]);
        let other = Rows::from([((0, 1), row(1.0)), ((0, 2), row(2.5)), ((1, 7), row(3.0))]);
        let mut found = RowDifferences::default();
        compare(&one, &other, &mut found);
        let expected = RowDifferences { only_in_one: 1, only_in_other: 1, changed: 1, equal: 1, largest: 0.5 };
        assert_eq!(found, expected);
    }
}
