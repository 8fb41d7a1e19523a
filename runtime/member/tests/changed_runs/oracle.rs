//! The oracle. It knows each row, and the rules that the guide states (`docs/guide/checkpoints.md`,
//! "Resuming"). It shares no code with the coordinator.

use std::collections::{BTreeMap, BTreeSet};

use crate::files::File;
use crate::settings::{BATCH_ROWS, Length, Settings};

/// How often each row was trained.
pub type Counts = BTreeMap<u64, u64>;

/// The result that the guide promises for an attempt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// It trains.
    Trains,
    /// It is refused before its first step.
    Refused,
    /// At the end of an epoch, it trains on other files from the next epoch on, or is refused. If
    /// nothing is left to train, it ends, or is refused for files that cannot be read.
    Either,
}

/// The state of a run at its last checkpoint.
#[derive(Clone, Debug, Default)]
pub struct Saved {
    counts: Counts,
    /// The rows of each epoch that is trained to its end.
    ended: Vec<Vec<u64>>,
    /// The files of the next epoch, or of the epoch that is not trained to its end.
    files: Vec<File>,
    /// Rows trained of these files.
    open: u64,
    skips_bad_rows: bool,
    /// The runs that have saved checkpoints.
    pub runs: BTreeSet<u64>,
}

impl Saved {
    /// Epochs that have begun.
    pub fn epochs(&self) -> u64 {
        self.ended.len() as u64 + u64::from(self.open > 0)
    }

    pub fn is_within_an_epoch(&self) -> bool {
        self.open > 0
    }

    /// Global batches trained. The last batch of an epoch may be smaller than the others.
    pub fn steps(&self) -> u64 {
        let ended: u64 = self.ended.iter().map(|rows| (rows.len() as u64).div_ceil(BATCH_ROWS)).sum();
        ended + self.open.div_ceil(BATCH_ROWS)
    }

    /// Whether a run of this length has nothing left to train.
    pub fn is_all_trained(&self, length: Length) -> bool {
        match length {
            Length::Steps(steps) => self.steps() >= steps,
            Length::Epochs(epochs) => self.ended.len() as u64 >= epochs,
        }
    }

    pub fn trained_rows(&self) -> u64 {
        self.counts.values().sum()
    }

    pub fn skips_bad_rows(&self) -> bool {
        self.skips_bad_rows
    }

    /// The state after an attempt that has trained no row. One that ends saves a checkpoint.
    fn untrained(mut self, attempt: &Settings) -> Self {
        if attempt.crash.is_none() {
            self.runs.insert(attempt.run);
        }
        self
    }

    /// Whether the next epoch is on other files than the last one.
    pub fn is_on_other_files(&self, files: &[File]) -> bool {
        self.files != files
    }
}

/// The verdict for an attempt after `saved`.
pub fn verdict(saved: Option<&Saved>, files: &[File], attempt: &Settings) -> Verdict {
    let Some(saved) = saved else { return Verdict::Trains };
    let is_anothers_path = !attempt.resumes_latest && !saved.runs.contains(&attempt.run);
    let reads_skipped_rows = saved.skips_bad_rows && !attempt.skips_bad_rows;
    if is_anothers_path || attempt.forbidden.is_some() || reads_skipped_rows {
        return Verdict::Refused;
    }
    if !saved.is_on_other_files(files) {
        return Verdict::Trains;
    }
    if saved.open > 0 && !saved.is_all_trained(attempt.length) { Verdict::Refused } else { Verdict::Either }
}

/// Checks the rows that an attempt on `files` has trained. Returns the state at its last
/// checkpoint.
///
/// # Errors
/// A sentence about rows that were not trained once an epoch.
pub fn after(
    saved: Option<&Saved>,
    files: &[File],
    attempt: &Settings,
    counts: Option<Counts>,
) -> Result<Option<Saved>, String> {
    let Some(counts) = counts else {
        return if saved.is_some() { Err("the checkpoints are gone".to_owned()) } else { Ok(None) };
    };
    let before = saved.cloned().unwrap_or_default();
    if let Some((row, count)) = before.counts.iter().find(|(row, count)| counts.get(*row) < Some(*count)) {
        return Err(format!("row {row} was trained {count} times before, and {:?} times now", counts.get(row)));
    }
    if before.counts == counts && saved.is_some() {
        return Ok(Some(before.untrained(attempt)));
    }
    let rows: Vec<u64> = files.iter().flat_map(|file| file.rows.iter().copied()).collect();
    let mut ended = before.ended;
    let mut open = counts.values().sum::<u64>() - ended.iter().map(|rows| rows.len() as u64).sum::<u64>();
    while open >= rows.len() as u64 {
        open -= rows.len() as u64;
        ended.push(rows.clone());
    }
    check(&counts, &ended, if open > 0 { &rows } else { &[] })?;
    let mut runs = before.runs;
    runs.insert(attempt.run);
    let files = files.to_vec();
    Ok(Some(Saved { counts, ended, files, open, skips_bad_rows: attempt.skips_bad_rows, runs }))
}

/// Each row of an ended epoch was trained once in it. A row of the open epoch was trained at most
/// once in that epoch.
fn check(counts: &Counts, ended: &[Vec<u64>], open: &[u64]) -> Result<(), String> {
    let mut least = Counts::new();
    for row in ended.iter().flatten() {
        *least.entry(*row).or_default() += 1;
    }
    let open: BTreeSet<u64> = open.iter().copied().collect();
    for row in counts.keys().chain(least.keys()) {
        let count = counts.get(row).copied().unwrap_or(0);
        let least = least.get(row).copied().unwrap_or(0);
        let most = least + u64::from(open.contains(row));
        if !(least..=most).contains(&count) {
            return Err(format!("row {row} was trained {count} times, expected {least} to {most}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(counts: &[(u64, u64)]) -> Counts {
        counts.iter().copied().collect()
    }

    #[test]
    fn the_oracle_finds_a_row_that_is_missing_or_trained_twice() {
        let ended = [vec![1, 2, 3], vec![1, 2, 3]];
        assert_eq!(check(&counts(&[(1, 2), (2, 2), (3, 3)]), &ended, &[3, 4]), Ok(()));
        assert!(check(&counts(&[(1, 2), (2, 1), (3, 3)]), &ended, &[3, 4]).is_err());
        assert!(check(&counts(&[(1, 3), (2, 2), (3, 2)]), &ended, &[3, 4]).is_err());
        assert!(check(&counts(&[(1, 2), (2, 2), (3, 2), (5, 1)]), &ended, &[3, 4]).is_err());
        assert!(check(&counts(&[(1, 2), (2, 2)]), &ended, &[]).is_err());
    }
}
