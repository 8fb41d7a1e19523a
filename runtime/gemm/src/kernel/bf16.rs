//! bf16 in plain Rust, which the compiler turns into vectors of whatever the build is for.

use super::{PANEL_LINES, TILE_COLUMNS, Tile, VECTOR_ROWS};
use crate::lines::LINE;

/// The nearest bf16, ties to even; see the crate's text for what is special.
fn bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    let sign = bits >> 16 & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    if magnitude > 0x7F80_0000 {
        return bits >> 16 | 0x0040;
    }
    if magnitude < 0x0080_0000 {
        return sign;
    }
    (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
}

pub(super) fn round(values: &[f32], words: &mut [u32]) {
    for (word, pair) in words.iter_mut().zip(values.chunks(2)) {
        *word = bf16(pair[0]) | pair.get(1).map_or(0, |&second| bf16(second)) << 16;
    }
}

pub(super) fn pair<const WIDTH: usize>(first: &[f32], second: &[f32], words: &mut [u32], step: usize) {
    for (panel, (first, second)) in first.chunks(WIDTH).zip(second.chunks(WIDTH)).enumerate() {
        for ((word, &low), &high) in words[panel * step..].iter_mut().zip(first).zip(second) {
            *word = bf16(low) | bf16(high) << 16;
        }
    }
}

fn low(word: u32) -> f32 {
    f32::from_bits(word << 16)
}

fn high(word: u32) -> f32 {
    f32::from_bits(word & 0xFFFF_0000)
}

pub(super) fn tile(tile: &mut Tile<'_>) {
    for row in 0..tile.rows {
        let mut sums: [f32; TILE_COLUMNS] = tile.start(row, 0);
        for (word, lines) in tile.right[..tile.words * PANEL_LINES].chunks_exact(PANEL_LINES).enumerate() {
            let left = tile.left[word * VECTOR_ROWS + row];
            for (line, sums) in lines.iter().zip(sums.chunks_exact_mut(LINE)) {
                for (sum, &word) in sums.iter_mut().zip(&line.0) {
                    *sum += high(left) * high(word);
                    *sum += low(left) * low(word);
                }
            }
        }
        tile.finish(row, 0, &sums);
    }
}
