//! A fuzzer for tests. It mutates valid bytes and gives them to checks, which must not panic, loop
//! or take memory out of proportion.
//!
//! A check names its outcome, such as the kind of an error. An input with a new outcome becomes a
//! seed of further mutations. So the fuzzer gets deeper into a reader, without a special compiler.
//! Long runs keep such inputs in the repository, and every test run repeats them.
//!
//! Every test run tries a few inputs. `cargo xtask fuzz --minutes 10` sets [`SECONDS`].

mod kept;
mod mutate;

use std::collections::HashSet;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use peak_alloc::PeakAlloc;

use crate::kept::Kept;
use crate::mutate::Random;

/// The variable with the seconds of each area in a long run.
pub const SECONDS: &str = "RECTRAIN_FUZZ_SECONDS";
/// The variable with the names of the areas to fuzz, separated by commas. All without it.
pub const AREAS: &str = "RECTRAIN_FUZZ_AREAS";

/// The most bytes that a check may take per byte of input, its own copies included, beside
/// [`Target::memory`]. JSON takes the most: `{"":0}` becomes a tree's node.
const BYTES_A_BYTE: usize = 160;
/// The longest that a check may take: far more than any should, even on a busy machine.
const LONGEST: Duration = Duration::from_secs(5);
/// The most inputs that become seeds for their outcome.
const MOST_FOUND: usize = 512;

/// A part of the system that reads untrusted bytes. A long run gives each area the same time.
#[derive(Clone, Copy)]
pub struct Area {
    pub name: &'static str,
    pub targets: &'static [Target],
}

/// A check, and valid inputs to start from.
#[derive(Clone, Copy)]
pub struct Target {
    pub name: &'static str,
    /// Checks bytes, and names the outcome. Panics if a property does not hold.
    pub check: fn(&[u8]) -> String,
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Words that mutations insert.
    pub words: fn() -> Vec<String>,
    /// Inputs in a test run.
    pub inputs: u64,
    /// Bytes that the check may take for any input.
    pub memory: usize,
}

/// Names an outcome: `ok`, or the kind of an error.
pub fn outcome<T, E: Display>(result: &Result<T, E>) -> String {
    result.as_ref().err().map_or_else(|| "ok".to_owned(), kind_of)
}

/// The text of an error without numbers, names and values of the input.
fn kind_of(error: &impl Display) -> String {
    let (mut kind, mut quote) = (String::new(), None);
    for letter in error.to_string().chars() {
        match quote {
            Some(end) if letter == end => quote = None,
            Some(_) => continue,
            None if matches!(letter, '`' | '"') => quote = Some(letter),
            None => {}
        }
        let letter = if letter.is_ascii_digit() { '0' } else { letter };
        if letter != '0' || !kind.ends_with('0') {
            kind.push(letter);
        }
    }
    kind.chars().take(120).collect()
}

/// Fuzzes the areas. `kept` is the folder with the inputs that earlier runs kept. `memory` is the
/// allocator of the test program, which has no other test.
///
/// # Panics
/// If a check fails. The message has the input in hexadecimal.
pub fn run(areas: &[Area], kept: &Path, memory: &PeakAlloc) {
    let seconds = std::env::var(SECONDS).ok().map(|seconds| match seconds.parse::<u32>() {
        Ok(seconds) => Duration::from_secs(seconds.into()),
        Err(error) => panic!("{SECONDS}={seconds}: {error}"),
    });
    let wanted = std::env::var(AREAS).ok();
    let is_wanted = |area: &&Area| wanted.as_deref().is_none_or(|all| all.split(',').any(|name| name == area.name));
    for area in areas.iter().filter(is_wanted) {
        for target in area.targets {
            let time = seconds.map(|seconds| seconds / area.targets.len() as u32);
            Fuzzer::new(area.name, target, Kept::of(kept, target.name), memory).run(time);
        }
    }
}

/// The fuzzing of one target.
struct Fuzzer<'a> {
    area: &'static str,
    target: &'a Target,
    memory: &'a PeakAlloc,
    kept: Kept,
    words: Vec<String>,
    seeds: Vec<Vec<u8>>,
    outcomes: HashSet<String>,
}

impl<'a> Fuzzer<'a> {
    fn new(area: &'static str, target: &'a Target, kept: Kept, memory: &'a PeakAlloc) -> Self {
        let (words, seeds) = ((target.words)(), Vec::new());
        Self { area, target, memory, kept, words, seeds, outcomes: HashSet::new() }
    }

    /// Fuzzes for this time, or tries a few inputs.
    fn run(mut self, time: Option<Duration>) {
        let started = Instant::now();
        let mut random = Random::new(if time.is_some() { seed_of_now() } else { 1 });
        self.start();
        let mut inputs = 0;
        while time.map_or(inputs < self.target.inputs, |time| started.elapsed() < time) {
            let input = random.input(&self.seeds, &self.words);
            if self.try_input(&input) && time.is_some() {
                self.kept.add(&input);
            }
            inputs += 1;
        }
        let (area, name, outcomes) = (self.area, self.target.name, self.outcomes.len());
        println!("{area}: {name}: {inputs} inputs, {outcomes} outcomes, {} kept", self.kept.inputs().len());
        self.kept.save();
    }

    /// Tries the valid inputs and the kept ones.
    fn start(&mut self) {
        self.seeds = (self.target.seeds)();
        assert!(!self.seeds.is_empty(), "{} has no seeds", self.target.name);
        for seed in self.seeds.clone() {
            // The first check may set up values that stay in memory.
            (self.target.check)(&seed);
            self.try_input(&seed);
        }
        for input in self.kept.inputs().to_vec() {
            self.try_input(&input);
            self.seeds.push(input);
        }
    }

    /// Tries an input. Returns whether its outcome is new; it is then a seed from now on.
    fn try_input(&mut self, input: &[u8]) -> bool {
        match self.checked(input) {
            Ok(outcome) => {
                let is_new = self.outcomes.len() < MOST_FOUND && self.outcomes.insert(outcome);
                if is_new {
                    self.seeds.push(input.to_vec());
                }
                is_new
            }
            Err(problem) => panic!("{}: {problem} at the input {}", self.target.name, kept::to_hex(input)),
        }
    }

    /// Runs the check.
    ///
    /// # Errors
    /// A sentence about the failure.
    fn checked(&self, input: &[u8]) -> Result<String, String> {
        self.memory.reset_peak_usage();
        let (before, start) = (self.memory.current_usage(), Instant::now());
        let ended = catch_unwind(AssertUnwindSafe(|| (self.target.check)(input)));
        let (taken, elapsed) = (self.memory.peak_usage().saturating_sub(before), start.elapsed());
        let outcome = ended.map_err(|_| "it panicked".to_owned())?;
        if taken > self.target.memory + BYTES_A_BYTE * input.len() {
            return Err(format!("it took {taken} bytes for an input of {} bytes", input.len()));
        }
        if elapsed > LONGEST {
            return Err(format!("it took {elapsed:?}"));
        }
        Ok(outcome)
    }
}

fn seed_of_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_one_kind_have_one_outcome() {
        let error = |text: &str| outcome(&Err::<(), _>(text.to_owned()));
        assert_eq!(error("row 12 of `a.csv`: 77 bytes"), error("row 3 of `another.csv`: 1 bytes"));
        assert_ne!(error("row 12 of `a.csv`: 77 bytes"), error("row 12 of `a.csv`: 77 columns"));
        assert_eq!(outcome(&Ok::<_, String>(1)), "ok");
    }
}
