//! The matrix tiles of AMX: whether there are any, and their instructions.
//!
//! A tile register is sixteen rows of 64 bytes. One instruction multiplies sixteen rows of 32 bf16 by sixteen columns
//! of 32 and adds the products to sixteen rows of sixteen f32: 16,384 operations. Numbers too small for a normal bf16
//! or f32 count as zero. The compiler knows none of the registers, so what they hold stays from one function here to
//! the next; nothing else may use them meanwhile. Called by `tile_amx`.

#![cfg_attr(
    target_arch = "x86_64",
    expect(
        clippy::inline_always,
        reason = "an instruction is not worth a call, least of all between two that share registers"
    )
)]

/// Proof that this process may use the tiles, and that AVX-512 with its bf16 conversions is there too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx(());

#[cfg(not(target_arch = "x86_64"))]
impl Amx {
    /// There are none.
    pub(super) fn detect() -> Option<Self> {
        None
    }
}

/// Rows of a tile, and columns of four bytes.
#[cfg(target_arch = "x86_64")]
pub(super) const TILE_LEN: usize = 16;

/// Bytes of a row of a tile.
#[cfg(target_arch = "x86_64")]
pub(super) const ROW_BYTES: usize = 64;

#[cfg(target_arch = "x86_64")]
mod instructions {
    use std::arch::asm;
    use std::arch::is_x86_feature_detected as has;
    use std::arch::x86_64::__cpuid_count;
    use std::sync::OnceLock;

    use super::{Amx, ROW_BYTES, TILE_LEN};

    /// Bits of the processor's answer to question 7: bf16 on tiles, and tiles.
    const CPUID_BITS: u32 = 1 << 22 | 1 << 24;

    /// The shapes of the eight tiles, as `ldtilecfg` reads them: all of the largest size.
    #[repr(C, align(64))]
    struct Config([u8; 64]);

    const CONFIG: Config = {
        let mut bytes = [0; 64];
        bytes[0] = 1;
        let mut tile = 0;
        while tile < 8 {
            bytes[16 + 2 * tile] = 64;
            bytes[48 + tile] = 16;
            tile += 1;
        }
        Config(bytes)
    };

    /// Asks the system for the right to use the tiles. On Linux a process has to (its threads then may, too).
    fn permitted() -> bool {
        #[cfg(target_os = "linux")]
        {
            // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
            const CALL: i64 = 158;
            const REQUEST: i64 = 0x1023;
            const TILE_DATA: i64 = 18;
            let result: i64;
            // SAFETY: a system call that changes nothing but this right.
            unsafe {
                asm!("syscall", inlateout("rax") CALL => result, in("rdi") REQUEST, in("rsi") TILE_DATA,
                    lateout("rcx") _, lateout("r11") _, options(nostack));
            }
            result == 0
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
                let vectors = has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512bf16");
                let tiles = __cpuid_count(7, 0).edx & CPUID_BITS == CPUID_BITS;
                vectors && tiles && permitted()
            });
            found.then_some(Self(()))
        }

        /// Sets the shapes of the tiles, and zeroes them. To be called before the other functions, on each thread.
        #[inline(always)]
        pub(in crate::cpu) fn begin(self) {
            // SAFETY: `self` proves that the tiles may be used.
            unsafe { asm!("ldtilecfg [{}]", in(reg) CONFIG.0.as_ptr(), options(nostack)) };
        }

        /// Gives the tiles back, so that they need not be kept when the thread is interrupted.
        #[inline(always)]
        pub(in crate::cpu) fn end(self) {
            // SAFETY: as above.
            unsafe { asm!("tilerelease", options(nostack)) };
        }

        /// Zeroes the four accumulators.
        #[inline(always)]
        pub(in crate::cpu) fn clear(self) {
            // SAFETY: as above.
            unsafe {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    options(nostack)
                );
            };
        }

        /// Adds to accumulator i the product of the matrix at `left[i]` (rows `stride` bytes apart) and the one at
        /// `right` (dense).
        ///
        /// # Safety
        /// Tiles lie at the addresses.
        #[inline(always)]
        pub(in crate::cpu) unsafe fn add_products_of_lefts(
            self,
            left: [*const u8; 4],
            stride: usize,
            right: *const u8,
        ) {
            // SAFETY: the caller vouches for the addresses.
            unsafe {
                asm!(
                    "tileloadd tmm4, [{right} + {dense} * 1]",
                    "tileloadd tmm5, [{left0} + {stride} * 1]",
                    "tileloadd tmm6, [{left1} + {stride} * 1]",
                    "tdpbf16ps tmm0, tmm5, tmm4",
                    "tileloadd tmm7, [{left2} + {stride} * 1]",
                    "tdpbf16ps tmm1, tmm6, tmm4",
                    "tileloadd tmm5, [{left3} + {stride} * 1]",
                    "tdpbf16ps tmm2, tmm7, tmm4",
                    "tdpbf16ps tmm3, tmm5, tmm4",
                    right = in(reg) right, dense = in(reg) ROW_BYTES, stride = in(reg) stride,
                    left0 = in(reg) left[0], left1 = in(reg) left[1], left2 = in(reg) left[2], left3 = in(reg) left[3],
                    options(nostack, readonly),
                );
            }
        }

        /// Adds to accumulator i the product of the matrix at `left` and the i-th of four at `right`; all are dense.
        ///
        /// # Safety
        /// Tiles lie at the addresses.
        #[inline(always)]
        pub(in crate::cpu) unsafe fn add_products_of_rights(self, left: *const u8, right: *const u8) {
            // SAFETY: the caller vouches for the addresses.
            unsafe {
                asm!(
                    "tileloadd tmm4, [{left} + {dense} * 1]",
                    "tileloadd tmm5, [{right} + {dense} * 1]",
                    "tileloadd tmm6, [{right} + {dense} * 1 + 1024]",
                    "tdpbf16ps tmm0, tmm4, tmm5",
                    "tileloadd tmm7, [{right} + {dense} * 1 + 2048]",
                    "tdpbf16ps tmm1, tmm4, tmm6",
                    "tileloadd tmm5, [{right} + {dense} * 1 + 3072]",
                    "tdpbf16ps tmm2, tmm4, tmm7",
                    "tdpbf16ps tmm3, tmm4, tmm5",
                    left = in(reg) left, right = in(reg) right, dense = in(reg) ROW_BYTES,
                    options(nostack, readonly),
                );
            }
        }

        /// The same for two matrices and accumulators.
        ///
        /// # Safety
        /// Tiles lie at the addresses.
        #[inline(always)]
        pub(in crate::cpu) unsafe fn add_products_of_two_rights(self, left: *const u8, right: *const u8) {
            // SAFETY: the caller vouches for the addresses.
            unsafe {
                asm!(
                    "tileloadd tmm4, [{left} + {dense} * 1]",
                    "tileloadd tmm5, [{right} + {dense} * 1]",
                    "tileloadd tmm6, [{right} + {dense} * 1 + 1024]",
                    "tdpbf16ps tmm0, tmm4, tmm5",
                    "tdpbf16ps tmm1, tmm4, tmm6",
                    left = in(reg) left, right = in(reg) right, dense = in(reg) ROW_BYTES,
                    options(nostack, readonly),
                );
            }
        }

        /// Writes the four accumulators one after another.
        #[inline(always)]
        pub(in crate::cpu) fn store(self, place: &mut [f32]) {
            assert!(place.len() >= 4 * TILE_LEN * TILE_LEN);
            // SAFETY: there is room for the four.
            unsafe {
                asm!(
                    "tilestored [{place} + {dense} * 1], tmm0",
                    "tilestored [{place} + {dense} * 1 + 1024], tmm1",
                    "tilestored [{place} + {dense} * 1 + 2048], tmm2",
                    "tilestored [{place} + {dense} * 1 + 3072], tmm3",
                    place = in(reg) place.as_mut_ptr(), dense = in(reg) ROW_BYTES,
                    options(nostack),
                );
            }
        }
    }
}
