//! The rows with enough examples for a thinner copy of a table. LFU counts the examples of a row,
//! and its counts never fall. So a row that is in the copy stays in it until it is evicted.

use std::num::NonZeroU32;

use super::RowWord;
use super::score::score_of;
use crate::{LifePolicy, RowSpec, ScoreRule};

/// The least number of examples of a row, since it exists. Counts up to 4,096 are exact: see
/// [`ScoreRule::Lfu`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeastCount(pub NonZeroU32);

impl LeastCount {
    /// Whether the rows of a group count their examples: only LFU does.
    #[must_use]
    pub fn is_known(spec: &RowSpec) -> bool {
        matches!(spec.life, LifePolicy::Managed(managed) if managed.score == ScoreRule::Lfu)
    }

    /// Whether a row has enough examples. Rows that do not count them have. A row that a look-up
    /// made and no update has changed has none.
    #[must_use]
    pub fn keeps(self, spec: &RowSpec, RowWord(word): RowWord) -> bool {
        !Self::is_known(spec) || word != 0 && score_of(word as u16) >= f64::from(self.0.get())
    }
}
