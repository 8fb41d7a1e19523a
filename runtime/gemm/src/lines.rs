//! Memory in whole cache lines, so that no load of a kernel crosses a line.

/// Words of a cache line.
pub(crate) const LINE: usize = 16;

/// A cache line of words. A word is a 32-bit float, or two bf16 with the lower index in the lower
/// half.
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u32; LINE]);
