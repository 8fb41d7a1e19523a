//! In `sync`: look-ups that are answered before earlier steps are applied, without the keys that
//! these steps change. The fence is [`LookAhead`](rectrain_modes::barrier::LookAhead).

use std::borrow::Cow;
use std::sync::Arc;

use rectrain_embedding::FeatureKey;
use rectrain_modes::{GlobalStep, Rank};
use rectrain_protocol::key_set::KeySet;

/// The keys of a piece on this server, by row group. They ascend in each group.
pub(crate) type PieceKeys = Arc<Vec<Vec<FeatureKey>>>;

/// A look-up that may be answered early. It has all keys of its piece on this server.
pub(crate) struct EarlyLookUp {
    pub(crate) step: GlobalStep,
    pub(crate) piece: Rank,
    /// The slot map that assigned the keys.
    pub(crate) epoch: u64,
    pub(crate) keys: PieceKeys,
}

/// The keys of a look-up, divided by whether they are answered now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Divided<'k> {
    /// The keys to answer, by row group.
    pub(crate) now: Cow<'k, [Vec<FeatureKey>]>,
    /// The keys that the reply leaves out.
    pub(crate) deferred: KeySet,
}

/// Leaves out the keys that one of `earlier` has. All keys ascend.
///
/// Each list of earlier keys is passed once, by galloping: n keys in a list of m take about
/// n · log(m / n) comparisons.
pub(crate) fn divide<'k>(keys: &'k [Vec<FeatureKey>], earlier: &[PieceKeys]) -> Divided<'k> {
    let mut deferred = KeySet::none_of(keys.iter().map(Vec::len).sum());
    if earlier.is_empty() {
        return Divided { now: Cow::Borrowed(keys), deferred };
    }
    let mut now = Vec::with_capacity(keys.len());
    let mut first = 0;
    for (group, keys) in keys.iter().enumerate() {
        let mut is_deferred = vec![false; keys.len()];
        for changed in earlier.iter().filter_map(|piece| piece.get(group)) {
            mark_common(keys, changed, &mut is_deferred);
        }
        is_deferred.iter().enumerate().filter(|(_, is)| **is).for_each(|(key, _)| deferred.insert(first + key));
        now.push(keys.iter().zip(&is_deferred).filter(|(_, is)| !**is).map(|(key, _)| *key).collect::<Vec<_>>());
        first += keys.len();
    }
    Divided { now: Cow::Owned(now), deferred }
}

/// Marks each of `keys` that `others` has, too. Both ascend.
fn mark_common(keys: &[FeatureKey], others: &[FeatureKey], marks: &mut [bool]) {
    let mut rest = others;
    for (key, mark) in keys.iter().zip(marks) {
        rest = &rest[gallop(rest, *key)..];
        match rest.first() {
            Some(other) => *mark |= other == key,
            None => break,
        }
    }
}

/// The number of ascending `keys` before `key`.
fn gallop(keys: &[FeatureKey], key: FeatureKey) -> usize {
    let mut end = 1;
    while end < keys.len() && keys[end - 1] < key {
        end *= 2;
    }
    let (start, end) = (end / 2, end.min(keys.len()));
    start + keys[start..end].partition_point(|other| *other < key)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<FeatureKey> {
        numbers.into_iter().map(FeatureKey).collect()
    }

    #[test]
    fn galloping_finds_each_place_in_lists_of_each_length() {
        for length in 0..40u64 {
            let list = keys((0..length).map(|number| 2 * number + 1));
            for key in 0..=2 * length + 1 {
                let expected = list.iter().filter(|other| other.0 < key).count();
                assert_eq!(gallop(&list, FeatureKey(key)), expected, "{key} of {length}");
            }
        }
    }

    #[test]
    fn exactly_the_keys_of_earlier_pieces_are_left_out() {
        let multiples = |of: u64, until: u64| keys((1..until).filter(move |number| number.is_multiple_of(of)));
        let asked = vec![multiples(2, 300), multiples(5, 90), Vec::new()];
        let earlier = [
            Arc::new(vec![multiples(3, 250), Vec::new(), keys([4])]),
            Arc::new(vec![keys([298]), multiples(7, 500), Vec::new()]),
        ];
        let divided = divide(&asked, &earlier);
        let mut expected = Vec::new();
        for (group, asked) in asked.iter().enumerate() {
            let changed: BTreeSet<FeatureKey> = earlier.iter().flat_map(|piece| piece[group].clone()).collect();
            expected.extend(asked.iter().map(|key| changed.contains(key)));
            let now: Vec<_> = asked.iter().filter(|key| !changed.contains(key)).copied().collect();
            assert_eq!(divided.now[group], now, "group {group}");
        }
        assert!(expected.contains(&true) && expected.contains(&false));
        assert!(divided.deferred.iter().eq(expected));
    }

    #[test]
    fn without_common_keys_nothing_is_left_out() {
        let asked = vec![keys([2, 4, 6])];
        let whole = Divided { now: Cow::Borrowed(&asked), deferred: KeySet::none_of(3) };
        let earlier = [Arc::new(vec![keys([1, 3, 5, 7])])];
        assert_eq!(divide(&asked, &[]), whole);
        assert_eq!(divide(&asked, &earlier), whole);
    }
}
