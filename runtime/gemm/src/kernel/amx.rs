//! The kernel for bf16 with AMX. One instruction adds the products of 16 rows of 32 bf16 with 16
//! columns to a tile register of 16 × 16 sums. Only for Linux, as a process must request the
//! registers from it.
#![allow(unsafe_code)] // Instructions that have no safe form, and loads through pointers.

use super::Tile;

/// Rows of a tile. A tile is two by two tile registers of sums. Two more registers hold each
/// operand, so all eight are used.
pub(super) const ROWS: usize = 32;

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
mod missing {
    use super::Tile;

    pub(in super::super) struct Configured(());

    impl Configured {
        pub(in super::super) fn new() -> Self {
            Self(())
        }
    }

    pub(in super::super) fn available() -> bool {
        false
    }

    pub(in super::super) fn tile(_: &mut Tile<'_>) {
        unreachable!("this platform does not have this kernel")
    }
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
pub(super) use missing::{Configured, available, tile};
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub(super) use x86::{Configured, available, tile};

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::__cpuid_count;
    use std::marker::PhantomData;
    use std::mem::MaybeUninit;
    use std::sync::LazyLock;

    use super::super::{PANEL_LINES, TILE_COLUMNS};
    use super::{ROWS, Tile};
    use crate::lines::{LINE, Line};

    /// The request of `arch_prctl` for permission to use a feature, and the feature number of tile
    /// data.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    /// Bytes of a row in a tile register.
    const ROW_BYTES: usize = 64;

    /// True if the processor has AMX and the operating system permits it to this process.
    pub(in super::super) fn available() -> bool {
        static AVAILABLE: LazyLock<bool> = LazyLock::new(|| {
            // AVX-512 rounds and stores rows and columns.
            super::super::avx512::bf16_available() && processor_has() && is_permitted()
        });
        *AVAILABLE
    }

    /// CPUID leaf 7 must have AMX-TILE and AMX-BF16. Leaf 1D must have eight registers of 16 rows
    /// of 64 bytes (Intel SDM, volume 1, 18.2).
    fn processor_has() -> bool {
        if __cpuid_count(0, 0).eax < 0x1D {
            return false;
        }
        let (tile, bf16) = (1 << 24, 1 << 22);
        let palette = __cpuid_count(0x1D, 1);
        let (row_bytes, registers, rows) = (palette.ebx & 0xFFFF, palette.ebx >> 16, palette.ecx & 0xFFFF);
        __cpuid_count(7, 0).edx & (tile | bf16) == tile | bf16 && row_bytes == 64 && registers == 8 && rows == 16
    }

    /// The permission is for the whole process, including later threads.
    fn is_permitted() -> bool {
        // SAFETY: the call takes two numbers and changes nothing in this process's memory.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }

    /// The configured tile registers of this thread: eight of 16 rows of 64 bytes.
    pub(in super::super) struct Configured(PhantomData<*const ()>);

    /// The operand of `ldtilecfg` (Intel SDM, volume 2, LDTILECFG).
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    static CONFIGURATION: Configuration = Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    impl Configured {
        pub(in super::super) fn new() -> Self {
            assert!(available(), "this kernel exists only if the processor has AMX");
            // SAFETY: the processor has the instruction and the process may use it. The
            // configuration has 64 bytes and is valid for palette 1.
            unsafe {
                asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, preserves_flags, readonly))
            };
            Self(PhantomData)
        }
    }

    impl Drop for Configured {
        fn drop(&mut self) {
            // SAFETY: the processor has the instruction, and the process may use it.
            unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
        }
    }

    /// Computes a tile. The thread must own a [`Configured`].
    pub(in super::super) fn tile(tile: &mut Tile<'_>) {
        // SAFETY: a `Kernel` of this kind exists only if `available` is true, which includes
        // AVX-512.
        unsafe { compute(tile) }
    }

    /// # Safety
    /// The processor has the function's target features and AMX, the thread's tile registers are
    /// configured, and `Tile::check` has passed.
    #[target_feature(enable = "avx512f")]
    unsafe fn compute(tile: &mut Tile<'_>) {
        let mut buffer = MaybeUninit::<[[f32; TILE_COLUMNS]; ROWS]>::uninit();
        let buffered = buffer.as_mut_ptr().cast::<f32>();
        let whole = tile.rows == ROWS && tile.columns == TILE_COLUMNS;
        let row: [f32; TILE_COLUMNS] = if tile.sums().is_some() { [0.0; TILE_COLUMNS] } else { tile.start(0, 0) };
        let from = match tile.sums() {
            // All rows start from the same row.
            None => (row.as_ptr(), 0),
            Some((sums, stride)) if whole => (sums.as_ptr().cast(), stride),
            Some(_) => {
                buffer.write([[0.0; TILE_COLUMNS]; ROWS]);
                // SAFETY: the buffer was written just now.
                let sums = unsafe { buffer.assume_init_mut() };
                (0..tile.rows).for_each(|row| sums[row] = tile.start(row, 0));
                (buffered.cast_const(), TILE_COLUMNS)
            }
        };
        let direct = whole && !tile.relu;
        let to = if direct { (tile.out.as_mut_ptr().cast(), tile.stride) } else { (buffered, TILE_COLUMNS) };
        // SAFETY: the thread's registers are configured. `Tile::check` has checked the operands'
        // lengths for whole tiles, and that the number of words is a multiple of 16. `from` and
        // `to` have 32 rows of 32 columns, or `from` is one row for all.
        unsafe {
            let left = (tile.left.as_ptr(), tile.row_step);
            sum(from, left, tile.right.as_ptr(), tile.words / LINE, to);
        }
        if !direct {
            // SAFETY: `sum` has written the whole buffer.
            let sums = unsafe { buffer.assume_init_ref() };
            (0..tile.rows).for_each(|row| tile.finish(row, 0, &sums[row]));
        }
    }

    /// `to = from + left · right` for 32 × 32 sums, in blocks of 16 words of the inner dimension.
    /// Each pointer comes with the distance of its rows, in values or words.
    ///
    /// # Safety
    /// As [`compute`].
    unsafe fn sum(
        (from, from_step): (*const f32, usize),
        (left, left_step): (*const u32, usize),
        right: *const Line,
        blocks: usize,
        (to, to_step): (*mut f32, usize),
    ) {
        // SAFETY: the caller upholds the contract of this function. The compiler does not use tile
        // registers.
        unsafe {
            asm!(
                "tileloadd tmm0, [{from} + {from_step}]",
                "tileloadd tmm1, [{from} + {from_step} + 64]",
                "tileloadd tmm2, [{from_below} + {from_step}]",
                "tileloadd tmm3, [{from_below} + {from_step} + 64]",
                "test {blocks}, {blocks}",
                "jz 3f",
                "2:",
                "tileloadd tmm4, [{left} + {left_step}]",
                "tileloadd tmm6, [{right} + {right_step}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{right} + {right_step} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{left_below} + {left_step}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {left}, 64",
                "add {left_below}, 64",
                "add {right}, 2048",
                "dec {blocks}",
                "jnz 2b",
                "3:",
                "tilestored [{to} + {to_step}], tmm0",
                "tilestored [{to} + {to_step} + 64], tmm1",
                "tilestored [{to_below} + {to_step}], tmm2",
                "tilestored [{to_below} + {to_step} + 64], tmm3",
                from = in(reg) from,
                from_below = in(reg) from.wrapping_add(LINE * from_step),
                from_step = in(reg) from_step * size_of::<f32>(),
                left = inout(reg) left => _,
                left_below = inout(reg) left.wrapping_add(LINE * left_step) => _,
                left_step = in(reg) left_step * size_of::<u32>(),
                right = inout(reg) right => _,
                right_step = in(reg) PANEL_LINES * ROW_BYTES,
                blocks = inout(reg) blocks => _,
                to = in(reg) to,
                to_below = in(reg) to.wrapping_add(LINE * to_step),
                to_step = in(reg) to_step * size_of::<f32>(),
                options(nostack),
            );
        }
    }
}
