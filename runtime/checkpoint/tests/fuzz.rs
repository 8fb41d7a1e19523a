//! Drives the checks of `fuzz/checks.rs` with mutations of valid bytes, without coverage. Every
//! test run does a little of it. For a longer run use `RECTRAIN_FUZZ_SECONDS=600 cargo test
//! --release -p rectrain-checkpoint --test fuzz -- --nocapture`. A failing input is printed in
//! hexadecimal; add it to `REGRESSIONS`. The test measures memory, so this program has only one
//! test.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[path = "../fuzz/checks.rs"]
mod checks;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use checks::{TARGETS, Target};
use peak_alloc::PeakAlloc;
use rectrain_random::SplitMix64;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Inputs of each target in a test run.
const QUICK: u64 = 6_000;
/// The most bytes that a check may take per byte of input, its own copies included, beside
/// [`ALWAYS`]. JSON takes the most: `{"":0}` becomes a tree's node.
const BYTES_A_BYTE: usize = 160;
const ALWAYS: usize = 1 << 20;
/// The longest that a check may take: far more than any should, even on a busy machine.
const LONGEST: Duration = Duration::from_secs(5);

/// Targets and inputs that failed once.
const REGRESSIONS: &[(&str, &[u8])] = &[];

/// Draws of a fuzzer.
struct Random(SplitMix64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Below `end`, which is at least 1.
    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }

    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.below(length + 1);
        start..start + self.below((length - start).min(64) + 1)
    }

    /// A number at which lengths, counts and offsets tend to go wrong.
    fn edge(&mut self, length: usize) -> u64 {
        let (edges, length) = ([0, 1, 7, 40, 1 << 16, 1 << 31, 1 << 32, 1 << 40, 1 << 63, u64::MAX], length as u64);
        match self.below(3) {
            0 => edges[self.below(edges.len())],
            1 => edges[self.below(edges.len())].wrapping_sub(1),
            _ => length.wrapping_add_signed(self.below(17) as i64 - 8),
        }
    }
}

fn input(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    if random.below(16) == 0 {
        let length = random.below(400);
        return random.bytes(length);
    }
    let mut bytes = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(6) {
        mutate(&mut bytes, random, seeds);
    }
    bytes
}

fn mutate(bytes: &mut Vec<u8>, random: &mut Random, seeds: &[Vec<u8>]) {
    let length = bytes.len();
    let place = random.below(length);
    match random.below(9) {
        0 if length > 0 => bytes[place] ^= 1 << random.below(8),
        1 if length > 0 => bytes[place] = random.next() as u8,
        2 => bytes.truncate(place),
        3 => {
            let more = random.below(64);
            bytes.extend(random.bytes(more));
        }
        4 => drop(bytes.drain(random.range(length))),
        5 => {
            let copied = bytes[random.range(length)].to_vec();
            bytes.splice(place..place, copied);
        }
        6 => {
            let donor = &seeds[random.below(seeds.len())];
            let piece = donor[random.range(donor.len())].to_vec();
            let place = place.min(donor.len());
            bytes.splice(place..(place + piece.len()).min(length).max(place), piece);
        }
        7 => number(bytes, random),
        _ => digits(bytes, random),
    }
}

/// Overwrites four or eight bytes with a number, mostly where the format has numbers.
fn number(bytes: &mut [u8], random: &mut Random) {
    let width = if random.below(2) == 0 { 4 } else { 8 };
    let Some(last) = bytes.len().checked_sub(width) else { return };
    // The lengths of a file are near its ends.
    let near = last.min(120);
    let place = match random.below(3) {
        0 => random.below(near + 1),
        1 => last - random.below(near + 1),
        _ => random.below(last + 1),
    };
    let place = if random.below(4) == 0 { place } else { place / 4 * 4 };
    let number = random.edge(bytes.len()).to_le_bytes();
    bytes[place..place + width].copy_from_slice(&number[..width]);
}

/// Replaces a number in text.
fn digits(bytes: &mut Vec<u8>, random: &mut Random) {
    let starts: Vec<usize> =
        bytes.iter().enumerate().filter(|(_, byte)| byte.is_ascii_digit()).map(|(at, _)| at).collect();
    let Some(&start) = starts.get(random.below(starts.len())) else { return };
    let end =
        bytes[start..].iter().position(|byte| !byte.is_ascii_digit()).map_or(bytes.len(), |length| start + length);
    bytes.splice(start..end, random.edge(end).to_string().into_bytes());
}

/// Runs one check.
///
/// # Errors
/// A sentence about the failure.
fn run(target: &Target, input: &[u8]) -> Result<(), String> {
    MEMORY.reset_peak_usage();
    let (before, start) = (MEMORY.current_usage(), Instant::now());
    let ended = catch_unwind(AssertUnwindSafe(|| (target.check)(input)));
    let (taken, elapsed) = (MEMORY.peak_usage().saturating_sub(before), start.elapsed());
    if ended.is_err() {
        return Err("it panicked".into());
    }
    if taken > ALWAYS + BYTES_A_BYTE * input.len() {
        return Err(format!("it took {taken} bytes for an input of {} bytes", input.len()));
    }
    if elapsed > LONGEST {
        return Err(format!("it took {elapsed:?}"));
    }
    Ok(())
}

fn checked(target: &Target, input: &[u8]) {
    if let Err(problem) = run(target, input) {
        let digits: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
        panic!("{}: {problem} at the input {digits}", target.name);
    }
}

#[test]
fn no_input_makes_a_reader_panic_loop_or_exhaust_memory() {
    let long = std::env::var("RECTRAIN_FUZZ_SECONDS").ok().map(|seconds| seconds.parse::<u64>().unwrap());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = if long.is_some() { now.as_nanos() as u64 } else { 1 };
    for target in &TARGETS {
        let seeds = (target.seeds)();
        assert!(!seeds.is_empty());
        seeds.iter().for_each(|seed| checked(target, seed));
        REGRESSIONS.iter().filter(|(name, _)| *name == target.name).for_each(|(_, input)| checked(target, input));
        let end = long.map(|seconds| Instant::now() + Duration::from_secs(seconds) / TARGETS.len() as u32);
        let (mut random, mut inputs) = (Random(SplitMix64::new(seed)), 0);
        while end.map_or(inputs < QUICK, |end| Instant::now() < end) {
            checked(target, &input(&mut random, &seeds));
            inputs += 1;
        }
        println!("{}: {inputs} inputs", target.name);
    }
}
