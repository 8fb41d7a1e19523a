//! The scores and ages of the rows of a checkpoint whose tables have a budget: as a table, and as a
//! filter for exports.

use std::collections::BTreeMap;
use std::sync::Arc;

use comfy_table::{CellAlignment, Table, presets};
use rectrain_checkpoint::{Checkpoint, FeatureIdentity, SlotSet};
use rectrain_embedding::{GroupId, RowTimes, RowUses, RowWord, Slot, Store};

use super::{scratch, store_failure};
use crate::failure::Failure;
use crate::human::{thousands, time_of_seconds};
use crate::output;

/// Rows of a checkpoint that are read for the table, about. Of a larger one, only some slots are
/// read: keys are hashes, so slots are a fair sample.
const SAMPLE_ROWS: u64 = 1 << 20;
/// Parts in which slots are restored. Only one part is in memory at a time.
const PARTS: usize = 16;
/// The quantiles of scores and ages.
const QUANTILES: [f64; 3] = [0.1, 0.5, 0.9];

/// Calls `visit` with the word of each row of every `every`-th slot.
async fn each_word(
    checkpoint: &Checkpoint,
    store: &Arc<Store>,
    every: u32,
    mut visit: impl FnMut(GroupId, RowWord),
) -> Result<(), Failure> {
    let slots: Vec<Slot> = (0..store.config().slots).step_by(every.max(1) as usize).map(Slot).collect();
    for part in slots.chunks(slots.len().div_ceil(PARTS).max(1)) {
        checkpoint.restore_rows(store, &SlotSet::new(part.iter().copied())).await?;
        for slot in part {
            store.row_words(*slot).map_err(store_failure)?.into_iter().for_each(|(group, word)| visit(group, word));
            store.clear_slot(*slot).map_err(store_failure)?;
        }
    }
    Ok(())
}

/// A filter that leaves out rows below a score. Rows of tables without scores stay.
pub(super) struct LeastScore {
    least: f64,
    uses: Vec<Option<RowUses>>,
    /// Rows that were left out, and all rows.
    counts: (u64, u64),
}

impl LeastScore {
    /// Reads the times of all rows, because scores decay up to the latest one.
    ///
    /// # Errors
    /// [`Failure::User`] if no row has a score.
    pub(super) async fn of(checkpoint: &Checkpoint, least: f64) -> Result<Self, Failure> {
        let store = scratch(checkpoint).await?;
        let mut times: Vec<Option<RowTimes>> = store.config().groups.iter().map(RowTimes::of).collect();
        if !times.iter().flatten().any(RowTimes::has_scores) {
            return Err(Failure::User(format!(
                "--min-score: the rows of {} have no scores; only a job with spec.features.memory and the eviction policy score or lfu keeps them, so leave out --min-score",
                checkpoint.name()
            )));
        }
        each_word(checkpoint, &store, 1, |group, word| {
            if let Some(times) = &mut times[usize::from(group.0)] {
                times.add(word);
            }
        })
        .await?;
        let uses = times.iter().map(|times| times.as_ref().map(RowTimes::uses)).collect();
        Ok(Self { least, uses, counts: (0, 0) })
    }

    /// Whether the row of this word stays. Counts it.
    pub(super) fn keeps(&mut self, group: GroupId, word: RowWord) -> bool {
        let uses = self.uses.get(usize::from(group.0)).and_then(Option::as_ref);
        let is_kept = uses.and_then(|uses| uses.score(word)).is_none_or(|score| score >= self.least);
        self.counts.0 += u64::from(!is_kept);
        self.counts.1 += 1;
        is_kept
    }

    /// By row group: whether each row stays, by rising key.
    pub(super) async fn kept_rows(&mut self, checkpoint: &Checkpoint) -> Result<Vec<Vec<bool>>, Failure> {
        let store = scratch(checkpoint).await?;
        let mut kept = vec![Vec::new(); store.config().groups.len()];
        each_word(checkpoint, &store, 1, |group, word| kept[usize::from(group.0)].push(self.keeps(group, word)))
            .await?;
        Ok(kept)
    }

    /// A sentence about the rows that were left out.
    pub(super) fn report(&self) -> String {
        let (left_out, rows) = self.counts;
        format!(
            "{} of {} rows are left out: their scores are below {}",
            thousands(left_out),
            thousands(rows),
            self.least
        )
    }
}

/// Prints the rows by table, with quantiles of their scores and ages. Prints nothing if no table
/// has either.
pub(super) async fn inspect(checkpoint: &Checkpoint) -> Result<(), Failure> {
    let store = match scratch(checkpoint).await {
        Err(Failure::User(_)) => return Ok(()),
        store => store?,
    };
    let specs = &store.config().groups;
    let mut times: Vec<Option<RowTimes>> = specs.iter().map(RowTimes::of).collect();
    if times.iter().all(Option::is_none) {
        return Ok(());
    }
    let rows: u64 = checkpoint.chain().iter().map(|manifest| manifest.rows).sum();
    let slots = store.config().slots;
    let every = u32::try_from(rows.div_ceil(SAMPLE_ROWS)).unwrap_or(u32::MAX).clamp(1, slots.max(1));
    let mut words: Vec<Vec<RowWord>> = vec![Vec::new(); specs.len()];
    each_word(checkpoint, &store, every, |group, word| {
        words[usize::from(group.0)].push(word);
        if let Some(times) = &mut times[usize::from(group.0)] {
            times.add(word);
        }
    })
    .await?;
    let names = names(checkpoint);
    let mut table = header();
    for (group, (words, times)) in words.iter().zip(&times).enumerate() {
        let name = names.get(&group).cloned().unwrap_or_else(|| format!("group {group}"));
        let uses = times.as_ref().map(RowTimes::uses);
        table.add_row(row(name, words, uses, (slots, slots.div_ceil(every))));
    }
    output::line(format_args!("\n{table}"))?;
    let sample = if every > 1 { format!("; from one slot of {every}") } else { String::new() };
    output::line(format_args!("ages count from the latest update of the table{sample}"))?;
    Ok(())
}

fn header() -> Table {
    let mut table = Table::new();
    let columns = ["ROWS", "SCORE 10 %", "50 %", "90 %", "AGE 10 %", "50 %", "90 %"];
    table.load_preset(presets::NOTHING).set_header([&["TABLE"][..], &columns].concat());
    for column in 1..=columns.len() {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// The line of a row group. `slots` has the slots of the checkpoint, and those that were read.
fn row(name: String, words: &[RowWord], uses: Option<RowUses>, (slots, read): (u32, u32)) -> Vec<String> {
    let rows = words.len() as u64 * u64::from(slots) / u64::from(read.max(1));
    let scores = words.iter().filter_map(|word| uses.as_ref()?.score(*word)).collect();
    let ages = words.iter().filter_map(|word| Some(uses.as_ref()?.age_seconds(*word)? as f64)).collect();
    let mut cells = vec![name, thousands(rows)];
    cells.extend(quantiles(scores).map(|score| score.map_or("-".to_owned(), |score| format!("{score:.1}"))));
    cells.extend(quantiles(ages).map(|age| age.map_or("-".to_owned(), time_of_seconds)));
    cells
}

/// The values at the [`QUANTILES`]. None of no values.
fn quantiles(mut values: Vec<f64>) -> [Option<f64>; 3] {
    values.sort_unstable_by(f64::total_cmp);
    QUANTILES.map(|part| values.get((part * values.len().saturating_sub(1) as f64).round() as usize).copied())
}

/// By row group: the names of its tables. Empty if the checkpoint does not say.
fn names(checkpoint: &Checkpoint) -> BTreeMap<usize, String> {
    let features = checkpoint.manifest().identity.section("features").cloned().unwrap_or_default();
    let features: Vec<FeatureIdentity> = serde_json::from_value(features).unwrap_or_default();
    let mut names = BTreeMap::<usize, Vec<String>>::new();
    for FeatureIdentity { table, group, .. } in features {
        let tables = names.entry(usize::from(group)).or_default();
        if !tables.contains(&table) {
            tables.push(table);
        }
    }
    names.into_iter().map(|(group, tables)| (group, tables.join(", "))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_and_few_values_suffice() {
        assert_eq!(quantiles(Vec::new()), [None; 3]);
        assert_eq!(quantiles(vec![2.5]), [Some(2.5); 3]);
        let values = (0..=100).rev().map(f64::from).collect();
        assert_eq!(quantiles(values), [Some(10.0), Some(50.0), Some(90.0)]);
    }
}
