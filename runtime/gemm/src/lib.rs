//! Matrix products of 32-bit floats, with the operands as they are or rounded to bf16, and sums that are kept in 32 bits: what a linear
//! layer computes in its forward pass (`Y = X·W`) and its backward pass (`dX = dY·Wᵀ`, `dW = Xᵀ·dY`). It knows nothing of layers, tensors
//! or threads: who calls it packs operands and multiplies them, on any thread.
//!
//! An operand is laid out for the kernel once, by [`Left::pack`] and [`Right::pack`], whichever way round it lies in memory, and may then
//! take part in any number of products ([`multiply`]) with others that were packed for the same [`Kernel`]. Packed operands keep their
//! memory when they are packed again, and a product allocates nothing but its result (and 264 KiB once on each thread, where sums of wide
//! results are kept until they are complete).
//!
//! # What is computed
//!
//! - Kernels of bf16 round operands to the nearest, ties to even. NaN stays NaN and is made quiet; what is beyond the largest bf16
//!   becomes infinite; subnormal numbers become zero of their sign.
//! - Every addition rounds to the nearest 32-bit float, ties to even. An element of the result depends on its row, its column and the
//!   start alone: not on the other rows and columns, and not on how a product is cut into blocks of rows, or the inner dimension into
//!   products that go on from each other ([`Start::Sum`]), as long as that is cut at multiples of 32.
//! - 32-bit floats are multiplied and added at once (a fused multiply-add), one after another in the order of the inner dimension,
//!   starting from what [`Start`] says; so AVX-512, AVX2 and NEON make the same bits. (A processor of x86 without AVX2 rounds products
//!   as well.)
//! - Products of two bf16 are exact in 32 bits. AVX512-BF16 adds them one after another, of each pair the second first. AMX adds those at
//!   even and those at odd places of 32, each from 0, and then both to the sum. These instructions take subnormal numbers for zero, in what
//!   they read and in what they write. A processor without them adds the products of rounded operands as it does those of 32-bit floats.
//!
//! # Kernels
//!
//! [`Kernel::bf16`] and [`Kernel::fp32`] find at run time the fastest that the processor has: for 32-bit floats AVX-512, AVX2 with FMA, or
//! else plain Rust, which on AArch64 becomes NEON; for bf16 AMX (`tdpbf16ps`, on Linux), AVX512-BF16 (`vdpbf16ps`), or else that of 32-bit
//! floats, as fast over operands that were rounded when they were packed.
//!
//! `unsafe` is in `kernel`, and in `product` where a result is written that was not zeroed before.

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
pub use product::{Finish, ROW_GRANULE, Start, multiply, product, sum_products};
pub use right::{Right, RightPart};
