//! The ids of an evaluation that have no row, because no training row had them.
//!
//! A parameter server reports its keys without a row as a
//! [`KeySet`](crate::key_set::KeySet). The embedding worker counts them for each feature as
//! [`LookUps`], and the dense workers add these up. The coordinator computes the shares.

use std::ops::AddAssign;

use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

/// The ids of one feature that an evaluation looked up. An id counts for each sample and each of
/// its values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookUps {
    /// All ids.
    pub ids: u64,
    /// The ids without a row.
    pub unseen: u64,
}

impl LookUps {
    /// The share of the ids that have no row. `None` without ids.
    #[must_use]
    pub fn unseen_share(self) -> Option<f64> {
        (self.ids > 0).then(|| self.unseen as f64 / self.ids as f64)
    }

    /// For a message.
    #[must_use]
    pub fn write(self) -> v1::FeatureLookUps {
        v1::FeatureLookUps { ids: self.ids, unseen: self.unseen }
    }

    /// From a message.
    #[must_use]
    pub fn read(message: v1::FeatureLookUps) -> Self {
        Self { ids: message.ids, unseen: message.unseen }
    }
}

impl AddAssign for LookUps {
    fn add_assign(&mut self, other: Self) {
        self.ids += other.ids;
        self.unseen += other.unseen;
    }
}

/// Adds the look-ups of more samples, by feature. `total` may be empty.
pub fn add(total: &mut Vec<LookUps>, more: &[LookUps]) {
    if total.len() < more.len() {
        total.resize(more.len(), LookUps::default());
    }
    for (total, more) in total.iter_mut().zip(more) {
        *total += *more;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn look_ups_add_up_by_feature() {
        let mut total = Vec::new();
        let look_ups = |ids, unseen| LookUps { ids, unseen };
        add(&mut total, &[look_ups(4, 1), look_ups(0, 0)]);
        add(&mut total, &[]);
        add(&mut total, &[look_ups(4, 2), look_ups(0, 0)]);
        let shares: Vec<_> = total.iter().map(|feature| feature.unseen_share()).collect();
        assert_eq!(shares, [Some(0.375), None]);
    }
}
