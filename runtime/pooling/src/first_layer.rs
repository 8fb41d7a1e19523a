//! The first layer of a tower on parameter servers, in the mode `des` (Rong et al. 2020, section
//! 4.3). The layer multiplies the pooled embeddings V of a piece by a weight W.
//!
//! V is a sum over servers, as each server pools the ids that it holds. With a copy of W, each
//! server computes its part Vᵢ·W of the output (equation 9). From the gradient dY of the output it
//! computes the gradient dY·Wᵀ of its pooled embeddings, and its part Vᵢᵀ·dY of the gradient of W.
//! So no server needs whole fields, unlike in the paper.
//!
//! With one server, 32-bit results have the bits of an undivided layer: the same kernel adds in the
//! same order.

use rectrain_gemm::{Finish, Kernel, Left, Matrix, Right, Start, multiply, product};
use rectrain_kinds::Precision;
use rectrain_protocol::error::RoleError;

/// The shape of the weight W.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Rows of W: the columns of the pooled embeddings.
    pub width: usize,
    /// Columns of W: the units of the layer.
    pub units: usize,
}

impl LayerShape {
    /// Values of W.
    #[must_use]
    pub const fn values(self) -> usize {
        self.width * self.units
    }
}

/// The kernel of products in this precision, which dense workers use on a CPU, too.
#[must_use]
pub fn kernel_of(precision: Precision) -> Kernel {
    match precision {
        Precision::Fp32 => Kernel::fp32(),
        Precision::Bf16 => Kernel::bf16(),
    }
}

/// W of a step, ready for its products.
#[derive(Debug)]
pub struct FirstLayer {
    kernel: Kernel,
    /// `W`, for `V·W`.
    forward: Right,
    /// `Wᵀ`, for `dY·Wᵀ`.
    backward: Right,
    /// The start of the sums. `None` on every server but one.
    bias: Option<Vec<f32>>,
}

impl FirstLayer {
    /// The layer with `weights`, `[width, units]`. The first server starts its sums from `bias`,
    /// `[units]`. The others have none.
    ///
    /// # Errors
    /// [`RoleError::Inconsistent`] if there are more or fewer values.
    pub fn new(kernel: Kernel, shape: LayerShape, weights: &[f32], bias: Option<&[f32]>) -> Result<Self, RoleError> {
        check_length("weights", weights.len(), shape.values())?;
        check_length("biases", bias.map_or(shape.units, <[f32]>::len), shape.units)?;
        let weights = Matrix::new(weights, shape.width, shape.units);
        let (mut forward, mut backward) = (Right::new(), Right::new());
        forward.pack(kernel, weights);
        backward.pack(kernel, weights.transpose());
        Ok(Self { kernel, forward, backward, bias: bias.map(<[f32]>::to_vec) })
    }

    /// The shape of W.
    #[must_use]
    pub fn shape(&self) -> LayerShape {
        LayerShape { width: self.forward.depth(), units: self.forward.columns() }
    }

    /// The kernel of the products.
    #[must_use]
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// The sub-operator M₁ = Vᵢ·W, `[samples, units]`, of one server's pooled embeddings
    /// `[samples, width]`.
    ///
    /// # Panics
    /// If `embeddings` has another length.
    #[must_use]
    pub fn reduce(&self, samples: usize, embeddings: &[f32]) -> Vec<f32> {
        let embeddings = Matrix::new(embeddings, samples, self.forward.depth());
        let start = self.bias.as_deref().map_or(Start::Zero, Start::Row);
        product(&packed(self.kernel, embeddings), &self.forward, start, Finish::Plain)
    }

    /// The gradient dY·Wᵀ of the pooled embeddings, `[samples, width]`, from the gradient of the
    /// output, `[samples, units]`.
    ///
    /// # Panics
    /// If `gradient` has another length.
    #[must_use]
    pub fn spread(&self, samples: usize, gradient: &[f32]) -> Vec<f32> {
        let gradient = Matrix::new(gradient, samples, self.forward.columns());
        product(&packed(self.kernel, gradient), &self.backward, Start::Zero, Finish::Plain)
    }
}

/// The gradient of W, summed over the pieces of a step in their order, and then over servers.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightGradient {
    shape: LayerShape,
    values: Vec<f32>,
}

impl WeightGradient {
    /// No piece: zeros.
    #[must_use]
    pub fn new(shape: LayerShape) -> Self {
        Self { shape, values: vec![0.0; shape.values()] }
    }

    /// Adds Vᵢᵀ·dY of the next piece, from this server's pooled embeddings `[samples, width]` and
    /// the gradient of the output `[samples, units]`.
    ///
    /// # Panics
    /// If one of them has another length.
    pub fn add_piece(&mut self, kernel: Kernel, samples: usize, embeddings: &[f32], gradient: &[f32]) {
        let embeddings = Matrix::new(embeddings, samples, self.shape.width);
        let gradient = Matrix::new(gradient, samples, self.shape.units);
        let mut right = Right::new();
        right.pack(kernel, gradient);
        multiply(&packed(kernel, embeddings.transpose()), &right, &mut self.values, Start::Sum, Finish::Plain);
    }

    /// The sum ⊕ with the gradient of another server.
    ///
    /// # Errors
    /// [`RoleError::Inconsistent`] if W has another shape there.
    pub fn add(&mut self, other: &Self) -> Result<(), RoleError> {
        check_length("gradients of weights", other.values.len(), self.values.len())?;
        self.values.iter_mut().zip(&other.values).for_each(|(sum, value)| *sum += value);
        Ok(())
    }

    /// The gradient, `[width, units]`.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The gradient, `[width, units]`.
    #[must_use]
    pub fn into_values(self) -> Vec<f32> {
        self.values
    }
}

fn packed(kernel: Kernel, matrix: Matrix<'_>) -> Left {
    let mut left = Left::new();
    left.pack(kernel, matrix);
    left
}

fn check_length(what: &str, found: usize, expected: usize) -> Result<(), RoleError> {
    if found == expected {
        return Ok(());
    }
    let reason = format!("expected {expected} {what}, found {found}");
    Err(RoleError::Inconsistent { message: "first layer", reason })
}
