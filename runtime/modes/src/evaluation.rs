//! Before which global steps the model is evaluated: a pure function that every dense worker computes alike, so that all of
//! them stop at the same place without being told.

use crate::GlobalStep;

/// When to evaluate; training's end always counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvaluationPoints {
    /// Only when training has ended.
    End,
    /// At the end of every epoch.
    Epoch,
    /// Every this many global steps.
    Steps(u64),
}

/// Walks along the steps and says where an evaluation stands before them.
#[derive(Debug, Clone)]
pub struct EvaluationSchedule {
    points: EvaluationPoints,
    epoch: u32,
}

impl EvaluationSchedule {
    /// From the first step on.
    #[must_use]
    pub fn new(points: EvaluationPoints) -> Self {
        Self { points, epoch: 0 }
    }

    /// Whether an evaluation is due before `step`, the next to be trained, which belongs to `epoch`. Asked once a step, in order.
    pub fn due_before(&mut self, step: GlobalStep, epoch: u32) -> bool {
        let new_epoch = std::mem::replace(&mut self.epoch, epoch) != epoch;
        match self.points {
            EvaluationPoints::End => false,
            EvaluationPoints::Epoch => new_epoch,
            EvaluationPoints::Steps(every) => step.0 > 0 && step.0.is_multiple_of(every.max(1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evaluations_fall_between_epochs_or_every_so_many_steps() {
        let due = |points| {
            let mut schedule = EvaluationSchedule::new(points);
            (0..9u64).filter(|&s| schedule.due_before(GlobalStep(s), (s / 3) as u32)).collect::<Vec<_>>()
        };
        assert_eq!(due(EvaluationPoints::End), [0u64; 0]);
        assert_eq!(due(EvaluationPoints::Epoch), [3, 6]);
        assert_eq!(due(EvaluationPoints::Steps(4)), [4, 8]);
    }
}
