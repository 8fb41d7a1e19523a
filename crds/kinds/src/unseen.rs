//! The shares of test look-ups that no training row ever had, by feature, and the warning about
//! them. The coordinator and the operator share both.

use std::collections::BTreeMap;

/// A share above this is worth a warning: most of the feature's test ids are untrained.
const HIGH: f64 = 0.5;
/// A rise above this between two evaluations is worth a warning.
const JUMP: f64 = 0.2;
/// The most features that a warning names.
const MOST_NAMED: usize = 5;

/// The most features whose shares a status has.
pub const MOST_UNSEEN_FEATURES: usize = 32;

/// By feature: the share of its test look-ups without a row.
pub type UnseenShares = BTreeMap<String, f64>;

/// The `most` features with the highest shares.
#[must_use]
pub fn highest_unseen(shares: &UnseenShares, most: usize) -> UnseenShares {
    let mut all: Vec<_> = shares.iter().collect();
    all.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    all.into_iter().take(most).map(|(feature, share)| (feature.clone(), *share)).collect()
}

/// The warning about an evaluation, if it needs one. A share that was high in the evaluation before
/// is not reported again unless it jumps.
#[must_use]
pub fn unseen_warning(shares: &UnseenShares, before: Option<&UnseenShares>) -> Option<String> {
    let earlier = |feature: &String| before.and_then(|before| before.get(feature)).copied();
    let is_new = |feature: &String, share: f64| match earlier(feature) {
        Some(earlier) => share - earlier > JUMP || (share > HIGH && earlier <= HIGH),
        None => share > HIGH,
    };
    let reported: Vec<_> = shares.iter().filter(|&(feature, share)| is_new(feature, *share)).collect();
    if reported.is_empty() {
        return None;
    }
    let describe = |&(feature, share): &(&String, &f64)| match earlier(feature) {
        Some(earlier) => format!("{} of `{feature}` (before: {})", percent(*share), percent(earlier)),
        None => format!("{} of `{feature}`", percent(*share)),
    };
    let named: Vec<_> = reported.iter().take(MOST_NAMED).map(describe).collect();
    let others = match reported.len() - named.len() {
        0 => String::new(),
        others => format!(" and of {others} more features"),
    };
    Some(format!(
        "test ids that no training row had: {}{others}; their rows are untrained. Check whether the test files write these ids in another form than the training files, have them in another column, or are of another day",
        named.join(", ")
    ))
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(shares: &[(&str, f64)]) -> UnseenShares {
        shares.iter().map(|(feature, share)| ((*feature).to_owned(), *share)).collect()
    }

    #[test]
    fn the_features_with_the_highest_shares_remain() {
        let shares = of(&[("a", 0.1), ("b", 0.9), ("c", 0.0), ("d", 0.4)]);
        assert_eq!(highest_unseen(&shares, 2), of(&[("b", 0.9), ("d", 0.4)]));
        assert_eq!(highest_unseen(&shares, 9), shares);
    }

    #[test]
    fn a_high_share_is_reported_once_and_a_jump_each_time() {
        let warned = |share, before: Option<f64>| {
            let before = before.map(|before| of(&[("user", before)]));
            unseen_warning(&of(&[("user", share)]), before.as_ref()).is_some()
        };
        assert_eq!([0.0, 0.5, 0.51, 1.0].map(|share| warned(share, None)), [false, false, true, true]);
        assert_eq!([0.1, 0.29, 0.31].map(|share| warned(share, Some(0.1))), [false, false, true]);
        assert!(warned(0.55, Some(0.45)), "it crosses the bound");
        assert!(!warned(0.65, Some(0.6)), "it was high before");
        assert!(warned(0.9, Some(0.6)) && !warned(0.1, Some(0.9)), "only a rise is a problem");
        assert!(unseen_warning(&of(&[]), None).is_none());
    }

    #[test]
    fn a_warning_names_features_shares_and_causes() {
        let message = unseen_warning(&of(&[("item", 0.2), ("user", 0.75)]), Some(&of(&[("user", 0.031)]))).unwrap();
        assert!(message.contains("75.0 % of `user` (before: 3.1 %)") && !message.contains("item"), "{message}");
        assert!(message.contains("another form") && message.contains("another column"), "{message}");
        let many: UnseenShares = (0..9).map(|feature| (format!("C{feature}"), 1.0)).collect();
        let message = unseen_warning(&many, None).unwrap();
        assert!(message.contains("`C4` and of 4 more features") && !message.contains("C5"), "{message}");
    }
}
