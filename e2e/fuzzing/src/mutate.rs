//! Mutations of inputs.

use std::ops::Range;

use rectrain_random::SplitMix64;

/// Draws of a fuzzer.
pub(crate) struct Random(SplitMix64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    /// A mutated seed, or noise.
    pub(crate) fn input(&mut self, seeds: &[Vec<u8>], words: &[String]) -> Vec<u8> {
        if self.below(16) == 0 {
            let length = self.below(400);
            return self.bytes(length);
        }
        let mut bytes = seeds[self.below(seeds.len())].clone();
        for _ in 0..=self.below(6) {
            self.mutate(&mut bytes, seeds, words);
        }
        bytes
    }

    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Below `end`, which is at least 1.
    fn below(&mut self, end: usize) -> usize {
        self.0.remainder(end.max(1) as u64) as usize
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }

    fn range(&mut self, length: usize) -> Range<usize> {
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

    fn mutate(&mut self, bytes: &mut Vec<u8>, seeds: &[Vec<u8>], words: &[String]) {
        let length = bytes.len();
        let place = self.below(length);
        match self.below(11) {
            0 if length > 0 => bytes[place] ^= 1 << self.below(8),
            1 if length > 0 => bytes[place] = self.next() as u8,
            2 => bytes.truncate(place),
            3 => {
                let more = self.below(64);
                bytes.extend(self.bytes(more));
            }
            4 => drop(bytes.drain(self.range(length))),
            5 => {
                let copied = bytes[self.range(length)].to_vec();
                bytes.splice(place..place, copied);
            }
            6 => {
                let donor = &seeds[self.below(seeds.len())];
                let piece = donor[self.range(donor.len())].to_vec();
                bytes.splice(place..(place + piece.len()).min(length).max(place), piece);
            }
            7 => self.number(bytes),
            8 | 9 if !words.is_empty() => {
                let word = words[self.below(words.len())].bytes();
                let end = if self.below(2) == 0 { place } else { (place + word.len()).min(length).max(place) };
                bytes.splice(place..end, word);
            }
            _ => self.digits(bytes),
        }
    }

    /// Overwrites four or eight bytes with a number, mostly where the format has numbers.
    fn number(&mut self, bytes: &mut [u8]) {
        let width = if self.below(2) == 0 { 4 } else { 8 };
        let Some(last) = bytes.len().checked_sub(width) else { return };
        // The lengths of a file are near its ends.
        let near = last.min(120);
        let place = match self.below(3) {
            0 => self.below(near + 1),
            1 => last - self.below(near + 1),
            _ => self.below(last + 1),
        };
        let place = if self.below(4) == 0 { place } else { place / 4 * 4 };
        let number = self.edge(bytes.len()).to_le_bytes();
        bytes[place..place + width].copy_from_slice(&number[..width]);
    }

    /// Replaces a number in text.
    fn digits(&mut self, bytes: &mut Vec<u8>) {
        let is_digit = |at: &usize| bytes[*at].is_ascii_digit();
        let starts: Vec<usize> = (0..bytes.len()).filter(is_digit).collect();
        let Some(&start) = starts.get(self.below(starts.len())) else { return };
        let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        bytes.splice(start..start + digits, self.edge(start + digits).to_string().into_bytes());
    }
}
