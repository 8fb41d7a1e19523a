//! The global batches before which the model is evaluated. Pure; the coordinator calls it.

use serde::{Deserialize, Serialize};

/// When to evaluate. The end of training always counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EvaluationPoints {
    /// Only when training has ended.
    End,
    /// At the end of every epoch.
    Epoch,
    /// Every this many global batches.
    Steps(u64),
}

impl EvaluationPoints {
    /// The first batch after `evaluated` before which an evaluation is due, as far as it is known.
    /// `epoch_starts` are the known first batches of the epochs after the first, ascending.
    #[must_use]
    pub fn next_after(self, evaluated: u64, epoch_starts: &[u64]) -> Option<u64> {
        match self {
            Self::End => None,
            Self::Epoch => epoch_starts.iter().copied().find(|start| *start > evaluated),
            Self::Steps(every) => Some((evaluated / every.max(1) + 1) * every.max(1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evaluations_are_due_between_epochs_or_every_n_steps() {
        let due = |points: EvaluationPoints| {
            let next = |evaluated: &u64| points.next_after(*evaluated, &[3, 6]).filter(|due| *due < 9);
            std::iter::successors(next(&0), next).collect::<Vec<_>>()
        };
        assert_eq!(due(EvaluationPoints::End), [0u64; 0]);
        assert_eq!(due(EvaluationPoints::Epoch), [3, 6]);
        assert_eq!(due(EvaluationPoints::Steps(4)), [4, 8]);
    }
}
