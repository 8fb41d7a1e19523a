//! Tiny data with random changes of the files between attempts, against an oracle that knows each
//! row. Every attempt trains the rows of the epoch's files once, or is refused before its first
//! step.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::collections::BTreeMap;

use rectrain_modes::{DataLedger, FirstPass, Lease};
use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::plan::{JobPlan, small_plan};
use rectrain_protocol::token_counts::TokenCounts;

use crate::batch_index::{BatchIndex, Chunk};
use crate::files::FileList;
use crate::snapshot::{Snapshot, TrainingSnapshot};

const CASES: u64 = 1_000;
const EPOCHS: u32 = 3;
const BATCH_ROWS: u64 = 4;
const ROW_BYTES: u64 = 10;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

/// Files by name, which is the reading order. Each row is a number of its own.
#[derive(Clone, Default)]
struct Disk {
    files: BTreeMap<String, Vec<u64>>,
    next_row: u64,
    /// The time of modification of all files.
    touched: u64,
}

impl Disk {
    fn rows(&self) -> Vec<u64> {
        self.files.values().flatten().copied().collect()
    }

    fn fresh_rows(&mut self, rows: u64) -> Vec<u64> {
        self.next_row += rows;
        (self.next_row - rows..self.next_row).collect()
    }

    fn add(&mut self, random: &mut Random) {
        let name = format!("{:03}.csv", random.below(1000));
        let size = 1 + random.below(20);
        let rows = self.fresh_rows(size);
        self.files.insert(name, rows);
    }

    fn any_name(&self, random: &mut Random) -> String {
        let at = random.below(self.files.len() as u64) as usize;
        self.files.keys().nth(at).cloned().unwrap_or_default()
    }

    fn change(&mut self, random: &mut Random) {
        let name = self.any_name(random);
        let rows = self.files.get(&name).cloned().unwrap_or_default();
        match random.below(9) {
            0 => self.add(random),
            1 => {
                let other = self.fresh_rows(rows.len() as u64);
                self.files.insert(name, other);
            }
            2 => {
                self.files.insert(name, rows[..rows.len().div_ceil(2)].to_vec());
            }
            3 => {
                let more = self.fresh_rows(3);
                self.files.insert(name, [rows, more].concat());
            }
            4 => {
                self.files.remove(&name);
                self.files.insert(format!("{:03}.csv", random.below(1000)), rows);
            }
            5 => {
                let other = self.any_name(random);
                let of_other = self.files.insert(other, rows).unwrap_or_default();
                self.files.insert(name, of_other);
            }
            6 if self.files.len() > 1 => {
                self.files.remove(&name);
            }
            7 => self.touched += 1,
            _ => {}
        }
        if self.rows().is_empty() {
            self.add(random);
        }
    }

    fn found(&self) -> FileList {
        let file = |(name, rows): (&String, &Vec<u64>)| v1::DataFile {
            name: name.clone(),
            size: rows.len() as u64 * ROW_BYTES,
            version: Some(format!("modified:{}", self.touched)),
            content: Some(rows.iter().fold(7, |hash: u64, row| hash.wrapping_mul(0x0100_0000_01b3) ^ (row + 1))),
        };
        let list: Vec<v1::DataFile> = self.files.iter().map(file).collect();
        let summary = Some(v1::FilesSummary { bytes: 0, digest: 0 });
        FileList::read(&v1::FilesFound { files: list.len() as u64, list, summary, ..v1::FilesFound::default() })
            .unwrap()
    }
}

/// Rows trained in each epoch.
type Trained = BTreeMap<u32, Vec<u64>>;

/// Trains at most `batches` batches from `saved` on, as the coordinator and a loader do. Returns
/// the snapshot at the end.
fn attempt(
    plan: &JobPlan,
    saved: Option<Snapshot>,
    disk: &Disk,
    batches: u64,
    trained: &mut Trained,
) -> Result<Snapshot, RoleError> {
    let found = disk.found();
    let saved = match saved {
        Some(saved) => Some(saved.with_files(plan, &found)?.map_or(saved, |(next, _)| next)),
        None => None,
    };
    let data = rectrain_modes::DataPlan {
        global_batch_rows: plan.global_batch_rows,
        batches_per_chunk: plan.batches_per_chunk,
        length: plan.length,
    };
    let (mut ledger, mut index, from) = match &saved {
        Some(saved) => (
            DataLedger::resume_after(data, saved.position(), saved.first_pass).unwrap(),
            BatchIndex::resume(plan.global_batch_rows, saved.position(), saved.first_pass),
            saved.training.batch,
        ),
        None => (DataLedger::new(data), BatchIndex::new(plan.global_batch_rows), 0),
    };
    let (rows, mut batch) = (disk.rows(), from);
    while let Lease::Chunk(lease) = ledger.lease() {
        let chunk_rows = BATCH_ROWS * plan.batches_per_chunk;
        let first = (lease.chunk * chunk_rows).min(rows.len() as u64) as usize;
        let read = &rows[first..(first + chunk_rows as usize).min(rows.len())];
        ledger.report(lease.epoch, lease.chunk, read.len() as u64).unwrap();
        if !read.is_empty() {
            let chunk = Chunk { epoch: lease.epoch, first_batch: lease.first_step.0, rows: read.len() as u64 };
            index.add(chunk);
        }
        for (step, rows) in (lease.first_step.0..).zip(read.chunks(BATCH_ROWS as usize)) {
            if step < from || batch == from + batches {
                continue;
            }
            assert_eq!(step, batch);
            trained.entry(lease.epoch).or_default().extend(rows);
            batch += 1;
        }
        if batch == from + batches {
            break;
        }
    }
    assert_eq!(index.locate(index.row_of(batch)), (batch, 0));
    let training = TrainingSnapshot {
        step: batch,
        trained_rows: index.row_of(batch),
        dropped_rows: 0,
        dropped_batches: 0,
        batch,
        epoch: index.epoch_of(batch),
        mode: "sync".to_owned(),
        first_mode: "sync".to_owned(),
        evaluated_through: 0,
        counts: TokenCounts::default(),
        dense_since: 0,
    };
    let mut snapshot = Snapshot::new(plan, training);
    snapshot.epoch_rows = ledger.epoch_rows();
    snapshot.first_pass = ledger.first_pass();
    snapshot.files = Some(found);
    let bytes = snapshot.encode()?;
    Snapshot::decode(plan, "test", &bytes)
}

/// The counts of what happened in all cases.
#[derive(Debug, Default)]
struct Seen {
    refused: u64,
    resumed: u64,
    on_other_files: u64,
}

fn run_case(seed: u64, plan: &JobPlan, seen: &mut Seen) {
    let mut random = Random(seed);
    let mut disk = Disk::default();
    for _ in 0..1 + random.below(4) {
        disk.add(&mut random);
    }
    let mut trained = Trained::new();
    // The rows that each epoch has to train.
    let mut expected = Trained::new();
    let mut saved: Option<Snapshot> = None;
    loop {
        let before = disk.clone();
        if saved.is_some() {
            disk.change(&mut random);
        }
        let done = trained.clone();
        // An epoch that has begun and not ended must be continued on its rows.
        let open = expected.iter().find(|(epoch, rows)| done.get(epoch).is_some_and(|done| done.len() < rows.len()));
        let must_refuse = open.is_some_and(|(_, rows)| *rows != disk.rows());
        let batches = 1 + random.below(12);
        let result = attempt(plan, saved.clone(), &disk, batches, &mut trained);
        match result {
            Err(error) => {
                // An epoch whose end is not known yet counts as not ended.
                let knows_the_end = saved.as_ref().is_some_and(|saved| saved.epoch_rows.is_some());
                assert!(error.is_user_error() && (must_refuse || !knows_the_end), "case {seed}: {error}");
                assert_eq!(trained, done, "case {seed}: a refused attempt trains nothing");
                seen.refused += 1;
                let next_row = disk.next_row;
                disk = Disk { next_row, ..before };
                continue;
            }
            Ok(snapshot) => {
                assert!(!must_refuse, "case {seed}: other files were not noticed: {:?}", snapshot.files);
                seen.resumed += 1;
                seen.on_other_files +=
                    u64::from(snapshot.first_pass != saved.map_or(FirstPass::default(), |saved| saved.first_pass));
                for epoch in trained.keys() {
                    expected.entry(*epoch).or_insert_with(|| disk.rows());
                }
                let is_end = snapshot.is_all_trained(plan);
                saved = Some(snapshot);
                if is_end {
                    break;
                }
            }
        }
    }
    assert_eq!(trained, expected, "case {seed}");
    assert_eq!(trained.len(), EPOCHS as usize, "case {seed}");
}

#[test]
fn every_row_is_trained_once_an_epoch_or_the_run_is_refused() {
    let plan = small_plan(&[
        &format!("spec.training.globalBatchSize={BATCH_ROWS}"),
        &format!("spec.training.epochs={EPOCHS}"),
        "spec.data.shuffle.windowRows=8",
    ]);
    let mut seen = Seen::default();
    let cases = std::env::var("RECTRAIN_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(CASES);
    for seed in 0..cases {
        run_case(seed, &plan, &mut seen);
    }
    assert!(seen.refused > cases && seen.resumed > 3 * cases && seen.on_other_files > cases / 10, "{seen:?}");
}
