//! The layers that models are made of. A layer knows which parameters of the flat buffer are its
//! own. It maps Burn tensors to Burn tensors, and the values of an ONNX graph likewise. Whether a
//! pass records gradients is a property of the tensors, not of a layer.

mod context;
mod cross;
mod cross_vectors;
mod first_order;
mod interaction;
mod linear;

pub use self::context::{Context, Dropout};
pub(crate) use self::context::{Masks, Products, matrix};
pub use self::cross::Cross;
pub use self::cross_vectors::{CrossShape, VectorCrosses};
pub use self::first_order::FirstOrder;
pub use self::interaction::{FactorizationMachine, PairwiseDots, SummedFactorizationMachine};
pub(crate) use self::linear::hidden_sizes;
pub use self::linear::{Linear, Mlp, MlpLogit, MlpShape, SummedLinear, SummedMlpLogit};
