//! f(τ, k): the weight of a gradient by its staleness (§4.1, equation 1). The
//! [`crate::gba::GradientServer`] calls it for dense gradients, and
//! [`crate::gba::aggregate_embeddings`] for each key.

use serde::{Deserialize, Serialize};

use crate::GlobalStep;
use crate::Token;

/// k − τ in global steps; negative if the token is ahead of the step that applies it.
#[must_use]
pub fn staleness(token: Token, step: GlobalStep) -> i64 {
    (i128::from(step.0) - i128::from(token.0)).clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64
}

/// A staleness decay strategy. Weights are in [0, 1], are 1 for gradients that are not stale, and
/// never rise with staleness.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Decay {
    /// Always 1 (`async`, `bsp`, `hopBs`).
    None,
    /// Equation 1: 1 if k − τ ≤ ι, else 0. `tolerance` is ι in global steps; the paper uses 3 and
    /// 4.
    Threshold { tolerance: u64 },
    /// `base`^(k − τ), `base` in (0, 1].
    Exponential { base: f32 },
    /// 1 / (1 + k − τ).
    Reciprocal,
}

impl Decay {
    /// The staleness, in global steps, up to which f is 1.
    #[must_use]
    pub fn tolerance(self) -> u64 {
        match self {
            Self::None => u64::MAX,
            Self::Threshold { tolerance } => tolerance,
            Self::Exponential { .. } | Self::Reciprocal => 0,
        }
    }

    /// f(τ, k).
    #[must_use]
    pub fn weight(self, token: Token, step: GlobalStep) -> f32 {
        let stale = step.0.saturating_sub(token.0);
        match self {
            Self::None => 1.0,
            Self::Threshold { tolerance } => f32::from(u8::from(stale <= tolerance)),
            Self::Exponential { base } => base.clamp(0.0, 1.0).powf(stale as f32),
            Self::Reciprocal => 1.0 / (1.0 + stale as f32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_decay_starts_at_one_and_never_rises() {
        for decay in
            [Decay::None, Decay::Threshold { tolerance: 3 }, Decay::Exponential { base: 0.5 }, Decay::Reciprocal]
        {
            let mut before = 1.0;
            for step in 0..50 {
                let weight = decay.weight(Token(7), GlobalStep(step));
                assert!(weight <= before && weight >= 0.0, "{decay:?} at {step}");
                assert!(step > 7 || weight == 1.0, "{decay:?}: a fresh gradient counts in full");
                before = weight;
            }
        }
        assert_eq!(Decay::Exponential { base: 0.5 }.weight(Token(0), GlobalStep(3)), 0.125);
        assert_eq!(Decay::Reciprocal.weight(Token(0), GlobalStep(3)), 0.25);
    }
}
