//! Matrix products of 32-bit floats whose operands are rounded to bf16 and whose sums are kept in 32 bits: what a linear layer
//! needs to compute on processors with AVX512-BF16, in its forward pass (`Y = X·W`) and its backward pass (`dX = dY·Wᵀ`,
//! `dW = Xᵀ·dY`). It knows nothing of layers, tensors or threads: who calls it packs operands and multiplies them, on any thread.
//!
//! An operand is rounded and laid out for the kernel once, by [`Left::pack`] and [`Right::pack`], whichever way round it lies in
//! memory, and may then take part in any number of products ([`multiply`]). Packed operands keep their memory when they are packed
//! again, and a product allocates nothing.
//!
//! # What is computed
//!
//! - Operands are rounded to the nearest bf16, ties to even. NaN stays NaN and is made quiet; what is beyond the largest bf16
//!   becomes infinite; subnormal numbers become zero of their sign.
//! - Products of two bf16 are exact in 32 bits. They are added one after another, in the order of the inner dimension except that of
//!   each pair the second comes first, starting from what [`Start`] says. So an element of the result depends on its row, its
//!   column and the start alone: not on the other rows and columns, and not on how a product is cut into blocks of rows, or the
//!   inner dimension into products that go on from each other ([`Start::Sum`]), as long as the cuts are at even places.
//! - Every addition rounds to the nearest 32-bit float, ties to even. The instruction takes subnormal numbers for zero, in what it
//!   reads and in what it writes; the portable kernel does not. Processors that differ in anything else differ in the last bits of sums.
//!
//! # Kernels
//!
//! [`Kernel::best`] finds at run time what the processor has: AVX512-BF16 (`vdpbf16ps`), or else the portable kernel, which rounds
//! operands to the same bits and takes as long as a product of 32-bit floats or longer. A kernel for AMX is missing: it would be a further variant of
//! [`Kernel`], with the layout of [`Right`] as it is (pairs of the inner dimension side by side are what its tiles take as well) and
//! rows of the left operand in either of [`Left`]'s two ways transposed to the first.
//!
//! `unsafe` is in `kernel::avx512` only.

mod kernel;
mod left;
mod lines;
mod matrix;
mod product;
mod right;
#[cfg(test)]
mod tests;

pub use kernel::Kernel;
pub use left::Left;
pub use matrix::Matrix;
pub use product::{Finish, Start, multiply, multiply_rows};
pub use right::{Right, RightPart};
