//! Dense optimizers as element-wise formulas over flat slices, fused into one pass. They follow
//! PyTorch's definitions exactly. They keep no counter: the caller passes the update count for the
//! bias correction. So a count restored with the parameters restores Adam. The tower applies them
//! to its buffer, a parameter server to its partition.

use burn::tensor::Tensor;
use rectrain_kinds::DenseOptimizer;

use crate::DenseError;

/// The computation of a [`DenseOptimizer`] over flat slices.
pub trait FlatOptimizer {
    /// Checks that all settings are in their ranges.
    ///
    /// # Errors
    /// [`DenseError::InvalidOptimizer`] for the first setting out of its range.
    fn validate(&self) -> Result<(), DenseError>;

    /// The flat state before the first update, for this many parameters.
    fn initial_state(&self, parameters: usize) -> Vec<f32>;

    /// One update, in place. `state` is flat: `slots().len()` vectors of `parameters.len()` values.
    /// `update_count` counts the updates of these parameters including this one, from 1.
    ///
    /// # Errors
    /// [`DenseError::UpdateCount`] for count 0.
    ///
    /// # Panics
    /// When the slices' lengths do not fit each other.
    fn update(
        &self,
        parameters: &mut [f32],
        state: &mut [f32],
        gradients: &[f32],
        update_count: u64,
    ) -> Result<(), DenseError>;
}

impl FlatOptimizer for DenseOptimizer {
    fn validate(&self) -> Result<(), DenseError> {
        let check = |setting, value: f64, valid: bool, expected| {
            // The formulas take f32, where this setting may become infinite or 0.
            let fits = (value as f32).is_finite() && (value == 0.0 || value as f32 != 0.0);
            let expected = if valid { "a number that f32 can hold" } else { expected };
            if valid && fits {
                return Ok(());
            }
            Err(DenseError::InvalidOptimizer { optimizer: self.kind().name(), setting, value, expected })
        };
        let positive = |setting, value: f64| check(setting, value, value > 0.0, "a number above 0");
        let not_negative = |setting, value: f64| check(setting, value, value >= 0.0, "a number from 0");
        let fraction = |setting, value: f64| {
            check(setting, value, (0.0..1.0).contains(&value), "a number from 0 up to, not including, 1")
        };
        match *self {
            Self::Sgd { learning_rate, momentum } => {
                positive("the learning rate", learning_rate)?;
                fraction("the momentum", momentum)
            }
            Self::AdaGrad { learning_rate, initial_accumulator, epsilon } => {
                positive("the learning rate", learning_rate)?;
                not_negative("the initial accumulator", initial_accumulator)?;
                positive("epsilon", epsilon)
            }
            Self::Adam { learning_rate, beta1, beta2, epsilon, weight_decay }
            | Self::AdamW { learning_rate, beta1, beta2, epsilon, weight_decay } => {
                positive("the learning rate", learning_rate)?;
                fraction("beta1", beta1)?;
                fraction("beta2", beta2)?;
                positive("epsilon", epsilon)?;
                not_negative("the weight decay", weight_decay)
            }
        }
    }

    fn initial_state(&self, parameters: usize) -> Vec<f32> {
        let start = match *self {
            Self::AdaGrad { initial_accumulator, .. } => initial_accumulator as f32,
            _ => 0.0,
        };
        vec![start; parameters * self.slots().len()]
    }

    fn update(
        &self,
        parameters: &mut [f32],
        state: &mut [f32],
        gradients: &[f32],
        update_count: u64,
    ) -> Result<(), DenseError> {
        let rule = rule(*self, update_count)?;
        let count = parameters.len();
        assert_eq!(gradients.len(), count, "one gradient a parameter");
        assert_eq!(state.len(), count * self.slots().len(), "one value a slot and parameter");
        let slots = state.chunks_exact_mut(count.max(1)).collect();
        rule.apply(parameters, slots, gradients);
        Ok(())
    }
}

/// The formula of this update, with its constants.
pub(crate) fn rule(optimizer: DenseOptimizer, update_count: u64) -> Result<Rule, DenseError> {
    if update_count == 0 {
        return Err(DenseError::UpdateCount);
    }
    let adam = |learning_rate: f64, beta1, beta2, epsilon: f64| AdamConstants {
        gain1: (1.0 - beta1) as f32,
        beta2: beta2 as f32,
        gain2: (1.0 - beta2) as f32,
        step_size: (learning_rate / (1.0 - power(beta1, update_count))) as f32,
        root_correction2: (1.0 - power(beta2, update_count)).sqrt() as f32,
        epsilon: epsilon as f32,
        l2: 0.0,
        keep: 1.0,
    };
    Ok(match optimizer {
        DenseOptimizer::Sgd { learning_rate, momentum: 0.0 } => Rule::Sgd { learning_rate: learning_rate as f32 },
        DenseOptimizer::Sgd { learning_rate, momentum } => {
            Rule::Momentum { learning_rate: learning_rate as f32, momentum: momentum as f32 }
        }
        DenseOptimizer::AdaGrad { learning_rate, epsilon, .. } => {
            Rule::AdaGrad { learning_rate: learning_rate as f32, epsilon: epsilon as f32 }
        }
        DenseOptimizer::Adam { learning_rate, beta1, beta2, epsilon, weight_decay } => {
            Rule::Adam(AdamConstants { l2: weight_decay as f32, ..adam(learning_rate, beta1, beta2, epsilon) })
        }
        DenseOptimizer::AdamW { learning_rate, beta1, beta2, epsilon, weight_decay } => Rule::Adam(AdamConstants {
            keep: (1.0 - learning_rate * weight_decay) as f32,
            ..adam(learning_rate, beta1, beta2, epsilon)
        }),
    })
}

/// `base^exponent` by squaring. It only multiplies, so every machine computes the same bits, which
/// `powf` does not promise.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut result = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    result
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct AdamConstants {
    /// 1 − β₁.
    gain1: f32,
    beta2: f32,
    /// 1 − β₂.
    gain2: f32,
    /// lr / (1 − β₁ᵗ).
    step_size: f32,
    /// √(1 − β₂ᵗ).
    root_correction2: f32,
    epsilon: f32,
    /// λ of Adam.
    l2: f32,
    /// 1 − lr·λ of AdamW.
    keep: f32,
}

/// The formula of one update. It works element by element, so any split of the slices gives the
/// same bits.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule {
    Sgd { learning_rate: f32 },
    Momentum { learning_rate: f32, momentum: f32 },
    AdaGrad { learning_rate: f32, epsilon: f32 },
    Adam(AdamConstants),
}

impl Rule {
    /// Applies the formula. `slots` has the optimizer's slots, each as long as `parameters`.
    pub(crate) fn apply(self, parameters: &mut [f32], slots: Vec<&mut [f32]>, gradients: &[f32]) {
        let mut slots = slots.into_iter();
        let mut slot = || slots.next().unwrap_or_default().iter_mut();
        let pairs = parameters.iter_mut().zip(gradients);
        match self {
            Self::Sgd { learning_rate } => pairs.for_each(|(p, g)| *p -= learning_rate * g),
            Self::Momentum { learning_rate, momentum } => pairs.zip(slot()).for_each(|((p, g), b)| {
                *b = momentum * *b + g;
                *p -= learning_rate * *b;
            }),
            Self::AdaGrad { learning_rate, epsilon } => pairs.zip(slot()).for_each(|((p, g), s)| {
                *s += g * g;
                *p -= learning_rate * g / (s.sqrt() + epsilon);
            }),
            Self::Adam(c) => pairs.zip(slot()).zip(slot()).for_each(|(((p, g), m), v)| {
                let kept = *p * c.keep;
                let g = g + c.l2 * kept;
                *m += c.gain1 * (g - *m);
                *v = c.beta2 * *v + c.gain2 * (g * g);
                *p = kept - c.step_size * (*m / (v.sqrt() / c.root_correction2 + c.epsilon));
            }),
        }
    }

    /// The same formula on tensors of one shape: the new parameter and the new slots. A device that
    /// fuses element-wise operations makes one kernel of it.
    pub(crate) fn apply_to_tensor(
        self,
        parameter: Tensor<2>,
        slots: Vec<Tensor<2>>,
        gradient: Tensor<2>,
    ) -> (Tensor<2>, Vec<Tensor<2>>) {
        let mut slots = slots.into_iter();
        match (self, slots.next(), slots.next()) {
            (Self::Momentum { learning_rate, momentum }, Some(b), _) => {
                let b = b.mul_scalar(momentum) + gradient;
                (parameter - b.clone().mul_scalar(learning_rate), vec![b])
            }
            (Self::AdaGrad { learning_rate, epsilon }, Some(s), _) => {
                let s = s + gradient.clone() * gradient.clone();
                (parameter - gradient.mul_scalar(learning_rate) / s.clone().sqrt().add_scalar(epsilon), vec![s])
            }
            (Self::Adam(c), Some(m), Some(v)) => {
                let kept = parameter.mul_scalar(c.keep);
                let g = gradient + kept.clone().mul_scalar(c.l2);
                let m = m.clone() + (g.clone() - m).mul_scalar(c.gain1);
                let v = v.mul_scalar(c.beta2) + (g.clone() * g).mul_scalar(c.gain2);
                let root = v.clone().sqrt().div_scalar(c.root_correction2).add_scalar(c.epsilon);
                (kept - (m.clone() / root).mul_scalar(c.step_size), vec![m, v])
            }
            (Self::Sgd { learning_rate }, ..) => (parameter - gradient.mul_scalar(learning_rate), Vec::new()),
            (Self::Momentum { .. } | Self::AdaGrad { .. } | Self::Adam(_), ..) => {
                unreachable!("an optimizer's state has as many slots as its rule")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: [f32; 3] = [1.0, -2.0, 0.5];

    /// The gradient of step t: arbitrary numbers of both signs and several sizes.
    fn gradients(t: u64) -> [f32; 3] {
        [0.3 / t as f32, -1.5 + 0.5 * t as f32, 1e-4]
    }

    /// Runs ten updates, and the formula `step(t, parameter, gradient, state)` in f64 beside them.
    fn check(optimizer: DenseOptimizer, mut step: impl FnMut(u64, &mut f64, f64, &mut [f64; 4])) {
        let mut parameters = START;
        let mut state = optimizer.initial_state(3);
        let mut expected = START.map(f64::from);
        let mut expected_state = [[0.0, 0.0, 1.0, 1.0]; 3];
        for t in 1..=10 {
            optimizer.update(&mut parameters, &mut state, &gradients(t), t).unwrap();
            for index in 0..3 {
                let gradient = f64::from(gradients(t)[index]);
                step(t, &mut expected[index], gradient, &mut expected_state[index]);
                let error = (f64::from(parameters[index]) - expected[index]).abs();
                assert!(
                    error < 2e-6 * expected[index].abs().max(1.0),
                    "{optimizer:?}, update {t}, parameter {index}: {error}"
                );
            }
        }
        assert!(parameters.iter().zip(START).all(|(now, start)| (now - start).abs() > 1e-3));
    }

    #[test]
    fn sgd_is_its_formula() {
        let sgd = DenseOptimizer::Sgd { learning_rate: 0.1, momentum: 0.0 };
        assert!(sgd.initial_state(3).is_empty());
        check(DenseOptimizer::Sgd { learning_rate: 10.0, momentum: 0.0 }, |_, p, g, _| *p -= 10.0 * g);
    }

    #[test]
    fn momentum_is_its_formula() {
        check(DenseOptimizer::Sgd { learning_rate: 5.0, momentum: 0.9 }, |t, p, g, s| {
            s[0] = if t == 1 { g } else { 0.9 * s[0] + g };
            *p -= 5.0 * s[0];
        });
    }

    #[test]
    fn adagrad_is_its_formula() {
        let optimizer = DenseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-3 };
        check(
            DenseOptimizer::AdaGrad { learning_rate: 20.0, initial_accumulator: 0.1, epsilon: 1e-3 },
            |t, p, g, s| {
                s[0] = if t == 1 { 0.1 } else { s[0] } + g * g;
                *p -= 20.0 * g / (s[0].sqrt() + 1e-3);
            },
        );
        assert_eq!(optimizer.initial_state(2), [0.1, 0.1]);
    }

    /// Adam's paper (Kingma & Ba 2015, algorithm 1), with the powers of beta as running products.
    fn adam_paper(p: &mut f64, g: f64, s: &mut [f64; 4]) {
        s[0] = 0.9 * s[0] + 0.1 * g;
        s[1] = 0.99 * s[1] + 0.01 * g * g;
        s[2] *= 0.9;
        s[3] *= 0.99;
        let (m, v) = (s[0] / (1.0 - s[2]), s[1] / (1.0 - s[3]));
        *p -= 0.05 * m / (v.sqrt() + 1e-6);
    }

    #[test]
    fn adam_is_its_formula() {
        for weight_decay in [0.0, 0.1] {
            let adam =
                DenseOptimizer::Adam { learning_rate: 0.05, beta1: 0.9, beta2: 0.99, epsilon: 1e-6, weight_decay };
            check(adam, |_, p, g, s| adam_paper(p, g + weight_decay * *p, s));
        }
    }

    #[test]
    fn adamw_decays_the_parameters_and_not_the_gradients() {
        let adamw =
            DenseOptimizer::AdamW { learning_rate: 0.05, beta1: 0.9, beta2: 0.99, epsilon: 1e-6, weight_decay: 0.2 };
        check(adamw, |_, p, g, s| {
            *p -= 0.05 * 0.2 * *p;
            adam_paper(p, g, s);
        });
    }

    #[test]
    fn bias_correction_is_computed_from_the_update_count() {
        let adam = DenseOptimizer::adam(0.1);
        let update = |count| {
            let (mut parameters, mut state) = ([0.0], [0.0; 2]);
            adam.update(&mut parameters, &mut state, &[0.5], count).unwrap();
            parameters[0]
        };
        assert!((update(1) + 0.1).abs() < 1e-6, "the first step has the length of the learning rate");
        let (m, v) = (0.05, 0.001 * 0.25_f64);
        let expected = -0.1 * (m / (1.0 - 0.9_f64.powi(100))) / ((v / (1.0 - 0.999_f64.powi(100))).sqrt() + 1e-8);
        assert!((f64::from(update(100)) - expected).abs() < 1e-6);
        assert_eq!(adam.update(&mut [0.0], &mut [0.0; 2], &[0.5], 0), Err(DenseError::UpdateCount));
    }

    #[test]
    fn powers_are_exact_for_huge_counts() {
        for count in [1, 2, 3, 1000, 123_457] {
            let expected = 0.999_f64.powf(count as f64);
            assert!((power(0.999, count) - expected).abs() < 1e-12 * expected.max(1e-6));
        }
        assert_eq!(power(0.999, u64::MAX), 0.0);
        assert_eq!(power(0.0, 5), 0.0);
    }

    #[test]
    fn settings_outside_their_ranges_are_named() {
        let message = DenseOptimizer::adam(0.0).validate().unwrap_err().to_string();
        assert!(message.contains("`adam`: the learning rate is 0, expected a number above 0"), "{message}");
        let sgd = DenseOptimizer::Sgd { learning_rate: 0.1, momentum: 1.0 };
        assert!(sgd.validate().unwrap_err().to_string().contains("momentum"));
        let adagrad = DenseOptimizer::AdaGrad { learning_rate: f64::NAN, initial_accumulator: 0.0, epsilon: 1e-10 };
        assert!(adagrad.validate().is_err());
        assert!(DenseOptimizer::adam(1e-3).validate().is_ok());
        for epsilon in [1e-50, 1e40] {
            let lost = DenseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.0, epsilon };
            assert!(lost.validate().unwrap_err().to_string().contains("f32"));
        }
    }
}
