//! In `sync`: what the look-ups of the last steps were answered. A step's rows are gone once it is applied, and a dense worker may still have to
//! compute it: one that takes the place of another that died before the dense gradients of the step were summed, if the embedding worker that
//! knew what the other one got has died with it. What it is given then is what the other one got, to the bit.
//!
//! Nobody computes a step before the one that is applied last, because the next one's gradients come from those who have summed it.

use std::collections::BTreeMap;

use rectrain_embedding::FeatureKey;
use rectrain_modes::GlobalStep;
use rectrain_wire::Tensor;

/// The keys of a look-up, by group.
type Keys = Vec<Vec<FeatureKey>>;

/// The look-ups of a step, and what they were answered.
type Answers = Vec<(Keys, Vec<Tensor>)>;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Answered {
    /// Look-ups that are kept of a step at most: one a piece.
    most: usize,
    steps: BTreeMap<GlobalStep, Answers>,
}

impl Answered {
    /// Of batches of so many `pieces`.
    pub(super) fn of(pieces: u32) -> Self {
        Self { most: pieces as usize, steps: BTreeMap::new() }
    }

    /// A look-up for `step` is answered, before which all steps are applied. Gives what is not kept any more.
    pub(super) fn keep(&mut self, step: GlobalStep, keys: Keys, tensors: Vec<Tensor>) -> BTreeMap<GlobalStep, Answers> {
        let kept = self.steps.split_off(&GlobalStep(step.0.saturating_sub(1)));
        let old = std::mem::replace(&mut self.steps, kept);
        let answers = self.steps.entry(step).or_default();
        if answers.len() < self.most && !answers.iter().any(|(known, _)| *known == keys) {
            answers.push((keys, tensors));
        }
        old
    }

    /// What these keys were answered for `step`.
    pub(super) fn again(&self, step: GlobalStep, keys: &Keys) -> Option<Vec<Tensor>> {
        let (_, tensors) = self.steps.get(&step)?.iter().find(|(known, _)| known == keys)?;
        Some(tensors.clone())
    }

    pub(super) fn forget_all(&mut self) {
        self.steps.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(of: u64) -> Keys {
        vec![vec![FeatureKey(of), FeatureKey(of + 1)], vec![FeatureKey(7)]]
    }

    fn tensors(value: f32) -> Vec<Tensor> {
        vec![Tensor::from(vec![value]), Tensor::from(vec![value; 2])]
    }

    #[test]
    fn the_last_applied_step_and_the_present_one_are_answered_again() {
        let mut answered = Answered::of(2);
        for step in 3..6 {
            let old = answered.keep(GlobalStep(step), keys(step), tensors(step as f32));
            assert_eq!(old.len(), usize::from(step == 5));
            answered.keep(GlobalStep(step), keys(100 + step), tensors(100.0));
        }
        assert_eq!(answered.again(GlobalStep(3), &keys(3)), None, "nobody computes it any more");
        assert_eq!(answered.again(GlobalStep(4), &keys(4)), Some(tensors(4.0)));
        assert_eq!(answered.again(GlobalStep(5), &keys(105)), Some(tensors(100.0)));
        assert_eq!(answered.again(GlobalStep(5), &keys(4)), None, "other keys");
        answered.forget_all();
        assert_eq!(answered.again(GlobalStep(5), &keys(5)), None);
    }

    #[test]
    fn a_look_up_that_comes_again_is_kept_once_and_no_more_than_there_are_pieces() {
        let mut answered = Answered::of(1);
        answered.keep(GlobalStep(0), keys(1), tensors(1.0));
        answered.keep(GlobalStep(0), keys(1), tensors(2.0));
        answered.keep(GlobalStep(0), keys(2), tensors(3.0));
        assert_eq!(answered.again(GlobalStep(0), &keys(1)), Some(tensors(1.0)), "as it was first");
        assert_eq!(answered.again(GlobalStep(0), &keys(2)), None);
    }
}
