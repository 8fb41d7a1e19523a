//! "Did you mean …?": the known name that is nearest to an unknown one.

/// The candidate that a user most likely meant by `word`, if one is near enough. It may differ in
/// case and separators, contain `word` or be contained in it (`batchSize` → `globalBatchSize`), or
/// be a few edits away.
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

/// The most candidates that are equally near.
const MOST: usize = 3;

/// The candidates that a user may have meant by `word`, in their order. A misspelt name has one.
/// The names that contain `word`, or are contained in it, are equally near (`batchSize` →
/// `globalBatchSize` and `localBatchSize`). If there are more than three, it is only the nearest.
pub(crate) fn near<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let candidates: Vec<&str> = candidates.into_iter().collect();
    let Some(nearest) = nearest(word, candidates.iter().copied()) else { return Vec::new() };
    let folded = fold(word);
    let is_part = |candidate: &&str| distance(&folded, &fold(candidate)).is_some_and(|distance| distance >= PART);
    if !is_part(&nearest) {
        return vec![nearest];
    }
    let equal: Vec<&str> = candidates.into_iter().filter(is_part).collect();
    if equal.len() <= MOST { equal } else { vec![nearest] }
}

/// Whether two names differ only in case and separators.
pub(crate) fn are_alike(one: &str, other: &str) -> bool {
    fold(one) == fold(other)
}

/// Lower case, only letters and digits, and at most 64 of them: no field name is longer.
fn fold(word: &str) -> String {
    word.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).take(64).collect()
}

/// The least distance of a name from one that contains it. Misspellings have smaller ones.
const PART: usize = 4;

/// The distance of two folded names, or `None` if they are not alike.
fn distance(word: &str, candidate: &str) -> Option<usize> {
    let lengths = [word, candidate].map(|name| name.chars().count());
    let longest = lengths[0].max(lengths[1]);
    let edits = strsim::osa_distance(word, candidate);
    if edits <= (longest / 3).min(PART - 1) {
        return Some(edits);
    }
    let shortest = lengths[0].min(lengths[1]);
    let is_contained = shortest >= 4 && (word.contains(candidate) || candidate.contains(word));
    is_contained.then_some(PART + longest - shortest)
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
    fn names_that_contain_the_word_are_equally_near() {
        let fields = ["epochs", "globalBatchSize", "localBatchSize"];
        assert_eq!(near("batchSize", fields), ["globalBatchSize", "localBatchSize"]);
        assert_eq!(near("globalBachSize", fields), ["globalBatchSize"]);
        assert_eq!(near("colour", fields), Vec::<&str>::new());
        let many = ["learningRate", "sampleRate", "decayRate", "dropoutRate"];
        assert_eq!(near("rate", many), ["decayRate"]);
    }

    #[test]
    fn nothing_is_suggested_for_a_name_unlike_any() {
        for word in ["optimizer", "x", "", "…", "zzzzzzzzzzzz"] {
            assert_eq!(nearest(word, FIELDS), None, "{word}");
        }
    }
}
