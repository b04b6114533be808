//! The matrix tiles of AMX: whether there are any, their configuration, and attention's instructions.
//!
//! A tile register is sixteen rows of 64 bytes. One instruction multiplies sixteen rows of 32 bf16 by sixteen columns
//! of 32 and adds the products to sixteen rows of sixteen f32: 16,384 operations. Numbers too small for a normal bf16
//! or f32 count as zero. The compiler knows none of the registers, so what they hold stays from one function here to
//! the next; nothing else may use them meanwhile. Called by attention (`tile_amx`, `prompt_amx`, `few_rows`), and by
//! `linear/amx` and `peak`, which have loops of their own.

#![cfg_attr(
    target_arch = "x86_64",
    expect(
        clippy::inline_always,
        reason = "an instruction is not worth a call, least of all between two that share registers"
    )
)]

/// Proof that this process may use the tiles, and that AVX-512 with its bf16 conversions and its permutations of bytes is
/// there too.
#[derive(Clone, Copy, Debug)]
pub struct Amx(());

#[cfg(target_arch = "x86_64")]
pub(super) use instructions::{DEPTH, ROW_BYTES, Shapes, TILE_LEN};

#[cfg(target_arch = "x86_64")]
mod instructions {
    use std::arch::asm;
    use std::arch::is_x86_feature_detected as has;
    use std::arch::x86_64::__cpuid_count;
    use std::sync::OnceLock;

    use super::Amx;

    /// Rows of a tile, and columns of four bytes.
    pub(in crate::cpu) const TILE_LEN: usize = 16;

    /// Bytes of a row of a tile.
    pub(in crate::cpu) const ROW_BYTES: usize = 64;

    /// bf16 of a row of a tile, and products that one instruction adds up.
    pub(in crate::cpu) const DEPTH: usize = ROW_BYTES / size_of::<u16>();

    /// Bits of the processor's answer to question 7: bf16 on tiles, and tiles.
    const CPUID_BITS: u32 = 1 << 22 | 1 << 24;

    /// The shapes of the eight tiles, as `ldtilecfg` reads them.
    #[derive(Clone, Copy, Debug)]
    #[repr(C, align(64))]
    pub(in crate::cpu) struct Shapes {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    impl Shapes {
        /// All of the largest size.
        pub(in crate::cpu) const FULL: Self = Self::new([16; 8]);

        /// Tiles of so many rows, 1 to 16, of 64 bytes each.
        pub(in crate::cpu) const fn new(rows: [u8; 8]) -> Self {
            let mut shapes = Self {
                palette: 1,
                start_row: 0,
                reserved: [0; 14],
                row_bytes: [0; 16],
                rows: [0; 16],
            };
            let mut tile = 0;
            while tile < rows.len() {
                assert!(1 <= rows[tile] && rows[tile] <= 16);
                shapes.row_bytes[tile] = 64;
                shapes.rows[tile] = rows[tile];
                tile += 1;
            }
            shapes
        }
    }

    /// Asks the system for the right to use the tiles. On Linux a process has to (its threads then may, too):
    /// `arch_prctl`, `ARCH_REQ_XCOMP_PERM`, `XTILEDATA`.
    fn permitted() -> bool {
        #[cfg(target_os = "linux")]
        {
            const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
            const XTILEDATA: libc::c_long = 18;
            // SAFETY: a system call that takes two numbers and touches no memory of ours.
            unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 }
        }
        #[cfg(not(target_os = "linux"))]
        false
    }

    #[expect(clippy::unused_self, reason = "the value is the proof that there are tiles")]
    impl Amx {
        /// Asks the processor and the system, once.
        pub(in crate::cpu) fn detect() -> Option<Self> {
            static FOUND: OnceLock<bool> = OnceLock::new();
            let found = *FOUND.get_or_init(|| {
                let vectors = has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
                let vectors = vectors && has!("avx512bf16") && has!("avx512vbmi") && has!("avx512vbmi2");
                let tiles = __cpuid_count(7, 0).edx & CPUID_BITS == CPUID_BITS;
                vectors && tiles && permitted()
            });
            found.then_some(Self(()))
        }

        /// Sets the shapes of the tiles, and zeroes them. To be called before the tiles are used, on each thread.
        #[inline(always)]
        pub(in crate::cpu) fn configure(self, shapes: &Shapes) {
            // SAFETY: `self` proves that the tiles may be used; the shapes are valid, and live during the instruction.
            unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const *shapes, options(nostack, readonly)) };
        }

        /// Gives the tiles back: the system saves their 8 KB whenever it stops a thread that has them.
        #[inline(always)]
        pub(in crate::cpu) fn release(self) {
            // SAFETY: as above.
            unsafe { asm!("tilerelease", options(nostack, nomem)) };
        }

        /// Zeroes accumulators 0 and 1.
        #[inline(always)]
        pub(in crate::cpu) fn clear_two(self) {
            // SAFETY: as above.
            unsafe { asm!("tilezero tmm0", "tilezero tmm1", options(nostack)) };
        }

        /// Keeps the unit that multiplies awake while vectors compute: 0.2 to 0.4 us after its last product it falls asleep,
        /// and the next one then takes 0.3 us. Accumulator 0 is lost.
        #[inline(always)]
        pub(in crate::cpu) fn keep_awake(self) {
            // SAFETY: as above; what is multiplied does not matter.
            unsafe { asm!("tdpbf16ps tmm0, tmm5, tmm6", options(nostack)) };
        }

        /// Adds to accumulators 0 and 1 the products of the matrices at `left`, whose rows lie `step` bytes apart, and the
        /// one at `right`, which is dense.
        ///
        /// # Safety
        /// Tiles lie at the addresses.
        #[inline(always)]
        pub(in crate::cpu) unsafe fn add_products_of_rows(
            self,
            left: [*const u8; 2],
            step: usize,
            right: *const u8,
        ) {
            // SAFETY: the caller vouches for the addresses.
            unsafe {
                asm!(
                    "tileloadd tmm4, [{right} + {dense} * 1]",
                    "tileloadd tmm5, [{left0} + {step} * 1]",
                    "tdpbf16ps tmm0, tmm5, tmm4",
                    "tileloadd tmm6, [{left1} + {step} * 1]",
                    "tdpbf16ps tmm1, tmm6, tmm4",
                    right = in(reg) right, dense = in(reg) ROW_BYTES, step = in(reg) step,
                    left0 = in(reg) left[0], left1 = in(reg) left[1],
                    options(nostack, readonly),
                );
            }
        }

        /// Writes accumulator 0, and 1 `step` bytes behind it. Rows may lie `stride` bytes apart that are fewer than they
        /// have: they are written one after the other, so that of each but the last one the beginning is left.
        ///
        /// # Safety
        /// There is room for them, whole rows at the end.
        #[inline(always)]
        pub(in crate::cpu) unsafe fn store_two(self, place: *mut u8, step: usize, stride: usize) {
            // SAFETY: the caller vouches for the room.
            unsafe {
                asm!(
                    "tilestored [{place0} + {stride} * 1], tmm0",
                    "tilestored [{place1} + {stride} * 1], tmm1",
                    place0 = in(reg) place, place1 = in(reg) place.wrapping_add(step),
                    stride = in(reg) stride,
                    options(nostack),
                );
            }
        }

        /// Zeroes a tile.
        #[inline(always)]
        pub(in crate::cpu) fn zero<const TILE: usize>(self) {
            // SAFETY: as above.
            unsafe { asm!("tilezero tmm{tile}", tile = const TILE, options(nostack)) };
        }

        /// Loads a matrix, which is dense.
        ///
        /// # Safety
        /// A tile lies at the address.
        #[inline(always)]
        pub(in crate::cpu) unsafe fn load<const TILE: usize>(self, place: *const u8) {
            // SAFETY: the caller vouches for the address.
            unsafe {
                asm!(
                    "tileloadd tmm{tile}, [{place} + {dense} * 1]",
                    tile = const TILE, place = in(reg) place, dense = in(reg) ROW_BYTES,
                    options(nostack, readonly),
                );
            }
        }

        /// Loads a matrix, which is dense, past the nearest cache: that keeps what it holds.
        ///
        /// # Safety
        /// A tile lies at the address.
        #[inline(always)]
        pub(in crate::cpu) unsafe fn load_past<const TILE: usize>(self, place: *const u8) {
            // SAFETY: the caller vouches for the address.
            unsafe {
                asm!(
                    "tileloaddt1 tmm{tile}, [{place} + {dense} * 1]",
                    tile = const TILE, place = in(reg) place, dense = in(reg) ROW_BYTES,
                    options(nostack, readonly),
                );
            }
        }

        /// Adds to a tile the products of two others.
        #[inline(always)]
        pub(in crate::cpu) fn multiply<const SUM: usize, const LEFT: usize, const RIGHT: usize>(self) {
            // SAFETY: as above.
            unsafe {
                asm!(
                    "tdpbf16ps tmm{sum}, tmm{left}, tmm{right}",
                    sum = const SUM, left = const LEFT, right = const RIGHT,
                    options(nostack),
                );
            }
        }

        /// Writes a tile, whose rows lie `stride` bytes apart.
        ///
        /// # Safety
        /// There is room for it.
        #[inline(always)]
        pub(in crate::cpu) unsafe fn store<const TILE: usize>(self, place: *mut u8, stride: usize) {
            // SAFETY: the caller vouches for the room.
            unsafe {
                asm!(
                    "tilestored [{place} + {stride} * 1], tmm{tile}",
                    tile = const TILE, place = in(reg) place, stride = in(reg) stride,
                    options(nostack),
                );
            }
        }
    }
}
