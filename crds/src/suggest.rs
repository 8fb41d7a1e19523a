//! "Did you mean …?": the known name that is nearest to one that is not known.

/// The candidate a user most likely meant by `word`, if any is near enough: the same but for case and separators, one
/// that holds it or is held by it (`batchSize` → `globalBatchSize`), or one a few edits away.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let folded = fold(word);
    if folded.is_empty() {
        return None;
    }
    candidates
        .into_iter()
        .filter_map(|candidate| distance(&folded, &fold(candidate)).map(|distance| (distance, candidate)))
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}

/// Lower case, letters and digits only, and no longer than any field name is.
fn fold(word: &str) -> Vec<char> {
    word.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).take(64).collect()
}

/// How far apart two folded names are, or `None` if they are not alike.
fn distance(word: &[char], candidate: &[char]) -> Option<usize> {
    let edits = edits(word, candidate);
    if edits <= (candidate.len().max(word.len()) / 3).min(3) {
        return Some(edits);
    }
    let (short, long) = if word.len() < candidate.len() { (word, candidate) } else { (candidate, word) };
    let held = short.len() >= 4 && long.windows(short.len()).any(|window| window == short);
    held.then_some(4 + long.len() - short.len())
}

/// Insertions, deletions, substitutions and swaps of neighbours (optimal string alignment) between two words.
fn edits(a: &[char], b: &[char]) -> usize {
    let width = b.len() + 1;
    let mut table = vec![0usize; (a.len() + 1) * width];
    for (i, row) in table.chunks_mut(width).enumerate() {
        row[0] = i;
    }
    for (j, cell) in table[..width].iter_mut().enumerate() {
        *cell = j;
    }
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let at = |i: usize, j: usize| table[i * width + j];
            let mut best =
                (at(i - 1, j) + 1).min(at(i, j - 1) + 1).min(at(i - 1, j - 1) + usize::from(a[i - 1] != b[j - 1]));
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(at(i - 2, j - 2) + 1);
            }
            table[i * width + j] = best;
        }
    }
    table[a.len() * width + b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: [&str; 5] = ["mode", "globalBatchSize", "epochs", "seed", "learningRate"];

    #[test]
    fn the_nearest_name_is_found_through_misspelling_case_and_parts() {
        for (word, meant) in [
            ("globalBachSize", "globalBatchSize"),
            ("global_batch_size", "globalBatchSize"),
            ("batchSize", "globalBatchSize"),
            ("epoch", "epochs"),
            ("sede", "seed"),
            ("Mode", "mode"),
            ("learningrate", "learningRate"),
        ] {
            assert_eq!(nearest(word, FIELDS), Some(meant), "{word}");
        }
    }

    #[test]
    fn nothing_is_suggested_for_a_name_unlike_any() {
        for word in ["optimizer", "x", "", "…", "zzzzzzzzzzzz"] {
            assert_eq!(nearest(word, FIELDS), None, "{word}");
        }
    }
}
