//! Reads straight into the spare capacity of a typed vector.
//!
//! This is the crate's only `unsafe` code. [`Filling`] grows a `Vec<T>` byte by byte. It lends a
//! reader the uninitialised bytes behind those that have arrived, and the vector's length follows
//! in whole elements. Zeroing every received tensor first would write each of its bytes twice. The
//! decoder is the only caller.

#![allow(unsafe_code)]

use std::mem::{MaybeUninit, size_of};

use bytemuck::Pod;
use tokio::io::ReadBuf;

/// The most memory taken for a vector before any of its bytes has arrived. Beyond it a vector
/// doubles as it fills. So a peer that states a false length costs at most twice the bytes it
/// really sends, plus this.
pub(crate) const FIRST_ALLOCATION_BYTES: usize = if cfg!(miri) { 1 << 10 } else { 16 << 20 };

/// A vector that is being received.
///
/// Invariants: the first `filled` bytes of the vector's buffer are initialised;
/// `vec.len() == filled / size_of::<T>()`; `filled <= total`; `total` is a multiple of
/// `size_of::<T>()`.
pub(crate) struct Filling<T> {
    vec: Vec<T>,
    filled: usize,
    total: usize,
}

impl<T: Pod> Filling<T> {
    /// A vector that will hold `elements` elements.
    pub(crate) fn new(elements: usize) -> Self {
        const { assert!(size_of::<T>() > 0) };
        let total = elements.saturating_mul(size_of::<T>());
        let first = elements.min(FIRST_ALLOCATION_BYTES / size_of::<T>());
        Self { vec: Vec::with_capacity(first), filled: 0, total }
    }

    /// Bytes that are still missing.
    pub(crate) fn missing(&self) -> usize {
        self.total - self.filled
    }

    /// Lends `read` up to `most` of the missing bytes. Returns the result of `read` and how many
    /// bytes it filled.
    pub(crate) fn fill<R>(&mut self, most: usize, read: impl FnOnce(&mut ReadBuf<'_>) -> R) -> (R, usize) {
        let room = self.spare(most);
        let start = room.as_ptr();
        let mut buffer = ReadBuf::uninit(room);
        let result = read(&mut buffer);
        let (lent, count) = (buffer.filled().as_ptr(), buffer.filled().len());
        assert!(std::ptr::eq(start.cast(), lent), "the reader put another buffer in place of the one it was lent");
        self.filled += count;
        // SAFETY: the first `filled` bytes are initialised. Those before this call are by the
        // invariant. The `count` bytes after them are because `ReadBuf` counts only written bytes
        // as filled, and the buffer is the one lent (checked above). `filled` lies within the
        // capacity, since the room did, and every bit pattern is a valid `T` because `T: Pod`.
        unsafe { self.vec.set_len(self.filled / size_of::<T>()) };
        (result, count)
    }

    /// The received bytes from `from` on; none if `from` is beyond them.
    pub(crate) fn arrived(&self, from: usize) -> &[u8] {
        // SAFETY: the vector's buffer is at least `filled` bytes long and these are initialised
        // (invariant); the borrow of `self` keeps it from moving.
        let bytes = unsafe { std::slice::from_raw_parts(self.vec.as_ptr().cast::<u8>(), self.filled) };
        &bytes[from.min(self.filled)..]
    }

    /// Bytes that have arrived.
    pub(crate) fn filled(&self) -> usize {
        self.filled
    }

    /// The complete vector. Panics if bytes are still missing.
    pub(crate) fn finish(self) -> Vec<T> {
        assert_eq!(self.missing(), 0, "a vector was taken before all of it had arrived");
        self.vec
    }

    /// Up to `most` bytes of uninitialised room behind the received ones. Grows the vector if it is
    /// full. It can only be full at a whole element, so growing never loses part of one.
    fn spare(&mut self, most: usize) -> &mut [MaybeUninit<u8>] {
        let capacity = self.vec.capacity() * size_of::<T>();
        if self.filled == capacity && self.missing() > 0 {
            let more = self.filled.max(FIRST_ALLOCATION_BYTES).min(self.missing());
            self.vec.reserve_exact(more / size_of::<T>());
        }
        let capacity = self.vec.capacity() * size_of::<T>();
        let room = (capacity.min(self.total) - self.filled).min(most);
        // SAFETY: `filled + room <= capacity` bytes, so the range lies in the vector's one
        // allocation; `MaybeUninit<u8>` has no validity or alignment requirement; the borrow of
        // `self` makes it exclusive. Only bytes at or beyond `filled` are lent, so initialised
        // bytes stay initialised.
        unsafe {
            let start = self.vec.as_mut_ptr().cast::<MaybeUninit<u8>>().add(self.filled);
            std::slice::from_raw_parts_mut(start, room)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed<T: Pod>(filling: &mut Filling<T>, mut bytes: &[u8], step: usize) {
        while !bytes.is_empty() {
            let ((), count) = filling.fill(step, |buffer| {
                let n = buffer.remaining().min(bytes.len());
                buffer.put_slice(&bytes[..n]);
            });
            bytes = &bytes[count..];
        }
    }

    #[test]
    fn bytes_that_arrive_in_odd_pieces_make_whole_elements() {
        let want: Vec<u64> = (0..1000u64).map(|i| i.wrapping_mul(0x0102_0304_0506_0708)).collect();
        for step in [1, 3, 7, 8, 4096] {
            let mut filling = Filling::<u64>::new(want.len());
            feed(&mut filling, bytemuck::cast_slice(&want), step);
            assert_eq!(filling.arrived(16), &bytemuck::cast_slice::<u64, u8>(&want)[16..]);
            assert_eq!(filling.finish(), want);
        }
    }

    #[test]
    fn a_lying_length_takes_memory_only_as_bytes_arrive() {
        let mut filling = Filling::<f32>::new(1 << 40);
        feed(&mut filling, &[1; 10], 10);
        assert!(filling.vec.capacity() * 4 <= FIRST_ALLOCATION_BYTES);
        assert_eq!(filling.missing(), (1 << 42) - 10);
    }

    #[test]
    fn growing_keeps_the_received_bytes() {
        let want: Vec<u32> = (0..FIRST_ALLOCATION_BYTES as u32).collect();
        let mut filling = Filling::<u32>::new(want.len());
        feed(&mut filling, bytemuck::cast_slice(&want), FIRST_ALLOCATION_BYTES / 16 - 1);
        assert!(filling.finish() == want);
    }

    #[test]
    #[should_panic(expected = "another buffer")]
    fn a_reader_cannot_pass_off_another_buffer() {
        let mut filling = Filling::<u8>::new(8);
        filling.fill(8, |buffer| {
            *buffer = ReadBuf::new(&mut []);
        });
    }
}
