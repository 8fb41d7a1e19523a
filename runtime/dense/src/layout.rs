//! The layout of the flat parameter buffer: the position, shape and initial values of each
//! parameter. All-reduce, optimizers, checkpoints and digests need only the flat buffer. Models and
//! layers alone look at single parameters.

use std::ops::Range;

use crate::random::{Stream, name_key};

/// How a parameter starts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Initializer {
    /// All zero.
    Zeros,
    /// Uniform on `[-1/√fan_in, 1/√fan_in)`, as PyTorch's `nn.Linear` starts weights (Kaiming
    /// uniform with `a = √5`) and biases.
    Linear {
        /// Inputs of the layer, at least 1.
        fan_in: usize,
    },
}

impl Initializer {
    /// Fills a parameter. Each value is a pure function of (seed, name, index), computed by exactly
    /// rounded operations only. So it has the same bits on every machine and does not depend on
    /// other parameters.
    fn fill(self, seed: u64, name: &str, values: &mut [f32]) {
        match self {
            Self::Zeros => values.fill(0.0),
            Self::Linear { fan_in } => {
                let bound = 1.0 / (fan_in as f64).sqrt();
                let stream = Stream::new(&[seed, name_key(name)]);
                for (index, value) in (0..).zip(values) {
                    *value = ((2.0 * stream.unit(index) - 1.0) * bound) as f32;
                }
            }
        }
    }
}

/// One parameter of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterEntry {
    /// Unique name, such as `top.0.weight`.
    pub name: String,
    /// `[in, out]` for a weight, `[1, out]` for a bias, in row-major order. (PyTorch's `nn.Linear`
    /// stores `[out, in]`.)
    pub shape: [usize; 2],
    /// First value in the flat buffer.
    pub offset: usize,
    /// How it starts.
    pub initializer: Initializer,
}

impl ParameterEntry {
    /// Number of values.
    pub fn values(&self) -> usize {
        self.shape[0] * self.shape[1]
    }

    /// Where its values lie in the flat buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.values()
    }
}

/// A parameter of the layout that made this id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterId(pub(crate) usize);

/// The parameters of a linear layer. Its products run in the precision that the job asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LinearParameters {
    /// `[inputs, outputs]`.
    pub(crate) weight: ParameterId,
    /// `[1, outputs]`.
    pub(crate) bias: ParameterId,
    /// Rows of the weight, from the first one, that other processes multiply. Their products come
    /// as an input. 0 in all models but substitutes.
    pub(crate) summed: usize,
}

/// The parameters of a model, in the order in which they lie in the flat buffer, without gaps.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParameterLayout {
    entries: Vec<ParameterEntry>,
    linears: Vec<LinearParameters>,
    total: usize,
}

impl ParameterLayout {
    /// Appends a parameter.
    ///
    /// # Panics
    /// If the layout has a parameter of this name.
    pub fn push(&mut self, name: impl Into<String>, shape: [usize; 2], initializer: Initializer) -> ParameterId {
        let name = name.into();
        assert!(self.find(&name).is_none(), "the layout has a parameter `{name}` already");
        let entry = ParameterEntry { name, shape, offset: self.total, initializer };
        self.total += entry.values();
        self.entries.push(entry);
        ParameterId(self.entries.len() - 1)
    }

    /// Appends the weight and the bias of a linear layer. Other processes multiply the first
    /// `summed` rows of the weight.
    pub(crate) fn push_linear(&mut self, name: &str, summed: usize, inputs: usize, outputs: usize) -> LinearParameters {
        let initializer = Initializer::Linear { fan_in: inputs };
        let linear = LinearParameters {
            weight: self.push(format!("{name}.weight"), [inputs, outputs], initializer),
            bias: self.push(format!("{name}.bias"), [1, outputs], initializer),
            summed,
        };
        self.linears.push(linear);
        linear
    }

    /// Values in the flat buffer.
    pub fn total(&self) -> usize {
        self.total
    }

    /// The parameters in buffer order.
    pub fn entries(&self) -> &[ParameterEntry] {
        &self.entries
    }

    /// The parameter with this id.
    pub(crate) fn entry(&self, id: ParameterId) -> &ParameterEntry {
        &self.entries[id.0]
    }

    /// The parameter with this name.
    pub fn find(&self, name: &str) -> Option<&ParameterEntry> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    /// The linear layers, in the order in which the model made them.
    pub(crate) fn linears(&self) -> &[LinearParameters] {
        &self.linears
    }

    /// The flat buffer at the start of training: a pure function of the seed and this layout, with
    /// the same bits on every machine.
    pub fn initialize(&self, seed: u64) -> Vec<f32> {
        let mut values = vec![0.0; self.total];
        for entry in &self.entries {
            entry.initializer.fill(seed, &entry.name, &mut values[entry.range()]);
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed once from the definition (see `random`) with arbitrary-precision integers.
    const PINNED: [u32; 3] = [1_012_918_701, 996_871_430, 3_179_495_362];

    fn layout() -> ParameterLayout {
        let mut layout = ParameterLayout::default();
        layout.push("a.weight", [100, 30], Initializer::Linear { fan_in: 100 });
        layout.push("a.bias", [1, 30], Initializer::Linear { fan_in: 100 });
        layout.push("b.bias", [1, 3], Initializer::Zeros);
        layout
    }

    #[test]
    fn entries_lie_side_by_side() {
        let layout = layout();
        let ranges: Vec<_> = layout.entries().iter().map(ParameterEntry::range).collect();
        assert_eq!(ranges, [0..3000, 3000..3030, 3030..3033]);
        assert_eq!(layout.total(), 3033);
    }

    #[test]
    #[should_panic(expected = "has a parameter `b.bias` already")]
    fn a_name_is_taken_once() {
        layout().push("b.bias", [1, 1], Initializer::Zeros);
    }

    #[test]
    fn linear_parameters_start_within_one_over_root_fan_in() {
        let layout = layout();
        let values = layout.initialize(1);
        let weight = &values[layout.find("a.weight").unwrap().range()];
        let largest = weight.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        let variance = weight.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / weight.len() as f64;
        assert!(largest <= 0.1 && largest > 0.099, "{largest}");
        assert!((variance - 0.01 / 3.0).abs() < 2e-4, "{variance}");
        assert!(values[3030..].iter().all(|&value| value == 0.0));
    }

    #[test]
    fn a_parameter_starts_the_same_beside_other_parameters() {
        let mut other = ParameterLayout::default();
        other.push("first.weight", [7, 7], Initializer::Linear { fan_in: 7 });
        other.push("a.weight", [100, 30], Initializer::Linear { fan_in: 100 });
        let (here, there) = (layout().initialize(5), other.initialize(5));
        assert_eq!(here[..3000], there[49..]);
        assert_ne!(here[..3000], layout().initialize(6)[..3000]);
    }

    #[test]
    fn initial_values_are_pinned_bit_by_bit() {
        let bits: Vec<u32> = layout().initialize(42)[..3].iter().map(|value| value.to_bits()).collect();
        assert_eq!(bits, PINNED);
    }
}
