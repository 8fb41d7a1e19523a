//! Matrix products of 32-bit floats. Operands are used unchanged or rounded to bf16, and sums are
//! 32-bit floats. These are the products of a linear layer in its forward pass (`Y = X·W`) and its
//! backward pass (`dX = dY·Wᵀ`, `dW = Xᵀ·dY`). The crate does not know layers, tensors or threads.
//! Its caller packs operands and multiplies them, on any thread.
//!
//! [`Left::pack`] and [`Right::pack`] lay an operand out for a kernel. The operand may be stored as
//! it is or transposed. A packed operand may be used in any number of products ([`multiply`]) with
//! operands that were packed for the same [`Kernel`]. An operand that is packed again reuses its
//! memory. [`hidden`] and [`hidden_backward`] leave their results as operands of the next products,
//! which are then not packed. A product allocates at most its result ([`product_into`]). For wide
//! results and hidden layers, each thread also allocates 264 KiB once, as a buffer of incomplete
//! sums.
//!
//! # Numerical results
//!
//! - Kernels for bf16 round operands to the nearest bf16, ties to even. NaN becomes quiet NaN. A
//!   value beyond the largest bf16 becomes infinite. Subnormal numbers become zero with their sign.
//! - Every addition rounds to the nearest 32-bit float, ties to even. An element of the result
//!   depends only on its row, its column and the start, not on other rows and columns. The blocks
//!   of rows do not matter either. The inner dimension may be split into several products
//!   ([`Start::Sum`]), as long as each split is at a multiple of 32.
//! - Kernels for 32-bit floats use fused multiply-adds, in the order of the inner dimension, from
//!   [`Start`]. AVX-512, AVX2 and NEON therefore produce the same bits. (On x86 without AVX2,
//!   products are rounded before they are added.)
//! - Products of two bf16 are exact in 32 bits. AVX512-BF16 adds them in order, except that it adds
//!   the second of each pair first. AMX sums the products at even and at odd positions of 32
//!   separately from 0, and then adds both sums. These instructions treat subnormal inputs and
//!   outputs as zero. Without them, a kernel for 32-bit floats multiplies the rounded operands.
//!
//! # Kernels
//!
//! [`Kernel::bf16`] and [`Kernel::fp32`] find the fastest kernel of the processor at run time:
//!
//! - for 32-bit floats: AVX-512, AVX2 with FMA, or plain Rust, which compiles to NEON on AArch64;
//! - for bf16: AMX (`tdpbf16ps`, on Linux), AVX512-BF16 (`vdpbf16ps`), or a kernel for 32-bit
//!   floats with operands that packing has rounded, at the speed of 32-bit floats.
//!
//! [`Pairwise`] has a kernel of its own, for the dot products of few short vectors of each sample.
//! [`relu_backward`] and [`add_rows`] sum a matrix by column, for the gradient of a bias.
//!
//! `unsafe` is used in `kernel`, in `pairwise` and `columns` to call code compiled for a vector
//! unit, and in `product` for results in uninitialized memory.

mod columns;
mod hidden;
mod kernel;
mod left;
mod lines;
mod matrix;
mod pairwise;
mod product;
mod right;
#[cfg(test)]
mod tests;

pub use columns::{add_rows, relu_backward};
pub use hidden::{HiddenDerivatives, Passes, hidden, hidden_backward};
pub use kernel::Kernel;
pub use left::Left;
pub use matrix::Matrix;
pub use pairwise::{Pairwise, PairwiseVectors};
pub use product::{Finish, ROW_GRANULE, Start, multiply, product, product_into, sum_products};
pub use right::{Right, RightPart};
