//! From the look-ups of an evaluation to the shares of unseen ids.

use rectrain_kinds::UnseenShares;
use rectrain_protocol::unseen::LookUps;

/// The shares of the features with these names. A feature without test ids has none.
pub(crate) fn shares(features: &[String], look_ups: &[LookUps]) -> UnseenShares {
    let share = |(feature, look_ups): (&String, &LookUps)| Some((feature.clone(), look_ups.unseen_share()?));
    features.iter().zip(look_ups).filter_map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_feature_without_test_ids_has_no_share() {
        let names = ["user", "tags"].map(str::to_owned);
        let look_ups = [LookUps { ids: 8, unseen: 2 }, LookUps::default()];
        assert_eq!(shares(&names, &look_ups), UnseenShares::from([("user".to_owned(), 0.25)]));
        assert!(shares(&names, &[]).is_empty());
    }
}
