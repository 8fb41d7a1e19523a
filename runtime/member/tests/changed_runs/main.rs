//! Runs whose files and settings change at random between attempts, against an oracle that knows
//! each row. Every row is trained once an epoch, or the attempt is refused with exit code 2 before
//! its first step.
//!
//! A case is one run of several attempts. An attempt stops at a random step or crashes. Then the
//! files or the manifest change. The weight of a row in the last checkpoint counts how often the
//! row was trained.
//!
//! `RECTRAIN_CASES=20000` runs that many cases. `RECTRAIN_FIRST_CASE=17 RECTRAIN_CASES=1` repeats
//! one. A failure names its case.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod attempt;
mod files;
mod oracle;
mod settings;

use std::collections::BTreeSet;
use std::panic::catch_unwind;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rectrain_protocol::events::JobEvent;
use rectrain_random::SplitMix64;

use crate::attempt::{End, end_lease, train, trained};
use crate::files::Files;
use crate::oracle::{Saved, Verdict, after, verdict};
use crate::settings::{Settings, checkpoints};

const CASES: u64 = 1_000;
/// Cases that run at once on each core. They mostly wait for messages, timers and files.
const CASES_PER_CORE: usize = 4;
/// Mixed into the number of a case.
const SEED: u64 = 0x0c0f_fee0;

/// The counts of what happened in all cases.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    attempts: u64,
    crashed: u64,
    refused: u64,
    /// Attempts that resumed from a checkpoint.
    resumed: u64,
    /// Epochs that began on other files.
    on_other_files: u64,
}

impl Seen {
    fn add(&mut self, other: Self) {
        self.attempts += other.attempts;
        self.crashed += other.crashed;
        self.refused += other.refused;
        self.resumed += other.resumed;
        self.on_other_files += other.on_other_files;
    }
}

/// One run of several attempts.
struct Case<'a> {
    root: &'a Path,
    random: SplitMix64,
    /// Rows of a window of the shuffle.
    window: u64,
    files: Files,
    /// The files that are on the disk.
    written: Option<Files>,
    saved: Option<Saved>,
    /// The files at the last checkpoint.
    files_at_save: Option<Files>,
    seen: Seen,
}

impl<'a> Case<'a> {
    fn new(number: u64, root: &'a Path) -> Self {
        let mut random = SplitMix64::of_words(&[SEED, number]);
        Self {
            root,
            window: [4, 8, 20, 65_536][random.remainder(4) as usize],
            files: Files::draw(&mut random),
            random,
            written: None,
            saved: None,
            files_at_save: None,
            seen: Seen::default(),
        }
    }

    fn run(mut self) -> Result<Seen, String> {
        let attempts = 2 + self.random.remainder(4);
        for run in 0..attempts {
            if run > 0 && self.random.remainder(2) == 0 {
                self.change_files();
            }
            let settings = Settings::draw(&mut self.random, run, self.window, self.files.format, self.saved.as_ref());
            self.attempt(settings)?;
        }
        self.restore_files();
        let last = Settings::of_the_last(attempts, self.window, self.saved.as_ref());
        self.attempt(last)?;
        let saved = self.saved.ok_or("the last attempt has saved no checkpoint")?;
        match (saved.epochs() >= 2, saved.is_within_an_epoch()) {
            (true, false) => Ok(self.seen),
            _ => Err(format!("the last attempt has not trained its epochs: {saved:?}")),
        }
    }

    fn change_files(&mut self) {
        let is_open = self.saved.as_ref().is_some_and(Saved::is_within_an_epoch);
        for _ in 0..1 + self.random.remainder(2) {
            self.files.change(&mut self.random, is_open);
        }
    }

    /// Restores the files of the last checkpoint.
    fn restore_files(&mut self) {
        if let Some(files) = &self.files_at_save {
            let next_row = self.files.next_row;
            self.files = files.clone();
            self.files.next_row = next_row;
        }
    }

    fn attempt(&mut self, mut settings: Settings) -> Result<(), String> {
        let touch = self.random.remainder(4) == 0;
        self.files.write(self.root, self.written.as_ref(), touch);
        self.written = Some(self.files.clone());
        let files = self.files.in_order();
        let verdict = verdict(self.saved.as_ref(), &files, &settings);
        if verdict == Verdict::Refused {
            settings.crash = None;
        }
        let before = names(&checkpoints(self.root));
        let (end, events) = train(settings.plan(self.root, &self.files), settings.run, settings.crash);
        self.seen.attempts += 1;
        let failed = |problem: String| Err(format!("{problem}\nexpected: {verdict:?}\n{settings:?}\n{files:?}"));
        match end {
            End::Failed(message) => failed(message),
            End::Refused(message) if verdict == Verdict::Trains => failed(message),
            End::Trained(_) | End::Crashed if verdict == Verdict::Refused => {
                failed(format!("it was not refused: {events:?}"))
            }
            End::Refused(message) => {
                self.seen.refused += 1;
                if events.iter().any(is_of_training) || names(&checkpoints(self.root)) != before {
                    return failed(format!("it was refused after its first step: {message}: {events:?}"));
                }
                self.restore_files();
                Ok(())
            }
            End::Trained(summary) => match self.record(&settings, &events) {
                Ok(()) if self.saved.as_ref().map(Saved::trained_rows) != Some(summary.trained_rows) => {
                    failed(format!("the summary and the checkpoint differ: {summary:?}"))
                }
                Ok(()) => Ok(()),
                Err(problem) => failed(problem),
            },
            End::Crashed => {
                self.seen.crashed += 1;
                end_lease(self.root);
                self.record(&settings, &events).or_else(failed)
            }
        }
    }

    /// Checks the rows that an attempt has trained.
    fn record(&mut self, settings: &Settings, events: &[JobEvent]) -> Result<(), String> {
        let counts = trained(self.root, self.files.next_row)?;
        let files = self.files.in_order();
        let saved = after(self.saved.as_ref(), &files, settings, counts)?;
        let rows = |saved: &Option<Saved>| saved.as_ref().map(Saved::trained_rows);
        if rows(&saved) != rows(&self.saved) {
            let is_other = self.saved.as_ref().is_some_and(|saved| saved.is_on_other_files(&files));
            self.seen.on_other_files += u64::from(is_other);
            self.files_at_save = Some(self.files.clone());
        }
        self.seen.resumed += u64::from(events.iter().any(|event| matches!(event, JobEvent::Resumed { .. })));
        self.saved = saved;
        Ok(())
    }
}

fn is_of_training(event: &JobEvent) -> bool {
    matches!(event, JobEvent::Resumed { .. } | JobEvent::Progress { .. } | JobEvent::CheckpointSaved { .. })
}

fn names(folder: &Path) -> BTreeSet<std::ffi::OsString> {
    std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().file_name()).collect()
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

fn run_case(number: u64) -> Result<Seen, String> {
    let root = tempfile::tempdir().unwrap();
    Case::new(number, root.path()).run()
}

/// Runs cases on all cores, several at once on each. Returns the failures.
fn run_cases(cases: std::ops::Range<u64>) -> (Seen, Vec<String>) {
    let (next, seen, failures) = (AtomicU64::new(cases.start), Mutex::new(Seen::default()), Mutex::new(Vec::new()));
    let work = || {
        while failures.lock().unwrap().is_empty() {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= cases.end {
                break;
            }
            match catch_unwind(|| run_case(number)).unwrap_or_else(|_| Err("it panicked".to_owned())) {
                Ok(case) => seen.lock().unwrap().add(case),
                Err(problem) => failures.lock().unwrap().push(format!(
                    "case {number} (RECTRAIN_FIRST_CASE={number} RECTRAIN_CASES=1 repeats it): {problem}"
                )),
            }
        }
    };
    let threads = CASES_PER_CORE * std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    (seen.into_inner().unwrap(), failures.into_inner().unwrap())
}

#[test]
fn every_row_is_trained_once_an_epoch_or_the_run_refused() {
    let (first, cases) = (number("RECTRAIN_FIRST_CASE", 0), number("RECTRAIN_CASES", CASES));
    let started = std::time::Instant::now();
    let (seen, failures) = run_cases(first..first + cases);
    println!("{cases} cases in {:.1} s: {seen:?}", started.elapsed().as_secs_f64());
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    // A few cases may lack some kind of change.
    if cases >= 100 {
        assert!(seen.resumed > cases && seen.refused > cases / 4 && seen.crashed > cases / 4, "{seen:?}");
        assert!(seen.on_other_files > cases / 20, "{seen:?}");
    }
}
