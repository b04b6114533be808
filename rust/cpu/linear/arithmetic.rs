//! How products are summed. One arithmetic serves all calls of a process with weights of a type (of f32 two: see
//! below), since the last bits of results differ between them.
//!
//! | | an element's sum | where |
//! |---|---|---|
//! | `Fma` | f32 multiply-adds of widened elements, in the order of K | every processor |
//! | `DotBf16` | the same over pairs, the odd element of a pair first (`vdpbf16ps`) | AVX512-BF16 |
//! | `Amx` | over steps of 32: even and odd elements apart, then their sum is added (`tdpbf16ps`) | AMX |
//! | `AmxThirds` | the same for each of three bf16 numbers that an f32 is the sum of, then the three sums are added | AMX |
//!
//! The second and the third are not equal bit by bit (1 of 16 elements agrees at K = 576), so a processor with AMX
//! uses it for a single row too: a tile of one row costs less than reading its weights from memory. On the Intel
//! processors that have both, `vdpbf16ps` does 88 GFLOP/s a thread, half of what f32 multiply-adds do (175), and
//! `tdpbf16ps` ten to twenty times as many (`peak` says why they differ).
//!
//! The last one is how f32 is computed where the weights are numbers of bf16, as those of nearly every checkpoint are:
//! no digit of x or of a weight is lost (`thirds`), products are exact and sums in f32, as of multiply-adds, at a third
//! of the rate of bf16, which is several times that of `Fma`, and from half of its bytes.

#[cfg(target_arch = "x86_64")]
use super::amx;
#[cfg(target_arch = "x86_64")]
use super::dot_bf16::DotBf16;
use super::fma;
#[cfg(target_arch = "x86_64")]
use super::thirds;
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx::{Amx, DEPTH};
use crate::cpu::element::Dtype;
use crate::cpu::isa::Isa;
use crate::cpu::level::Level;

/// How products are summed.
#[derive(Clone, Copy, Debug)]
pub enum Arithmetic {
    /// f32 multiply-adds.
    Fma(Isa),
    /// Dot products of pairs of bf16.
    #[cfg(target_arch = "x86_64")]
    DotBf16(DotBf16),
    /// Products of tiles of bf16.
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    /// Products of tiles of bf16, three of which make up the f32 rows of x.
    #[cfg(target_arch = "x86_64")]
    AmxThirds(Amx),
}

impl Arithmetic {
    /// Every arithmetic that this processor has for weights of a type, the best one last.
    pub fn available(dtype: Dtype) -> Vec<Self> {
        #[cfg_attr(
            not(target_arch = "x86_64"),
            expect(unused_mut, reason = "nothing is added there")
        )]
        let mut all: Vec<Self> = Isa::available()
            .into_iter()
            .filter(|isa| !isa.has_amx())
            .map(Self::Fma)
            .collect();
        #[cfg(target_arch = "x86_64")]
        if dtype == Dtype::Bf16 {
            all.extend(DotBf16::detect().map(Self::DotBf16));
            all.extend(Amx::detect().map(Self::Amx));
        } else if dtype == Dtype::F32 {
            all.extend(Amx::detect().map(Self::AmxThirds));
        }
        all
    }

    /// The one that a process uses. `are_bf16`: whether the weights, whatever their type, are numbers of bf16.
    pub fn best(dtype: Dtype, are_bf16: impl FnOnce() -> bool) -> Self {
        let level = Level::current();
        let special = match (level, dtype) {
            #[cfg(target_arch = "x86_64")]
            (Level::AmxBf16, Dtype::F32) if are_bf16() => Amx::detect().map(Self::AmxThirds),
            #[cfg(target_arch = "x86_64")]
            (Level::AmxBf16, Dtype::Bf16) => Amx::detect().map(Self::Amx),
            #[cfg(target_arch = "x86_64")]
            (Level::Avx512Bf16, Dtype::Bf16) => DotBf16::detect().map(Self::DotBf16),
            _ => None,
        };
        special.unwrap_or_else(|| Self::Fma(level.isa().without_amx()))
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fma(isa) => isa.name(),
            #[cfg(target_arch = "x86_64")]
            Self::DotBf16(_) => "avx512_bf16",
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => "amx_bf16",
            #[cfg(target_arch = "x86_64")]
            Self::AmxThirds(_) => "amx_bf16x3",
        }
    }

    /// The instruction set of the loops around the tiles.
    pub(super) fn isa(self) -> Isa {
        match self {
            Self::Fma(isa) => isa,
            #[cfg(target_arch = "x86_64")]
            Self::DotBf16(_) => Isa::best(),
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) | Self::AmxThirds(_) => Isa::best(),
        }
    }

    /// The type that rows of x are read in.
    pub(super) fn row_dtype(self) -> Dtype {
        match self {
            Self::Fma(_) => Dtype::F32,
            #[cfg(target_arch = "x86_64")]
            Self::DotBf16(_) => Dtype::Bf16,
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) | Self::AmxThirds(_) => Dtype::Bf16,
        }
    }

    /// Rows that it reads for each row of x, one after the other.
    pub(super) fn parts(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::AmxThirds(_) => thirds::PARTS,
            _ => 1,
        }
    }

    /// The type that weights of a type lie in panels as.
    pub fn panel_dtype(self, dtype: Dtype) -> Dtype {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::AmxThirds(_) => Dtype::Bf16,
            _ => dtype,
        }
    }

    /// Whether it takes panels of bf16 whose elements are codes of twelve bits.
    pub fn takes_codes(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) | Self::AmxThirds(_) => true,
            _ => false,
        }
    }

    /// Elements along K that are multiplied in one step; rows and panels are filled up with zeros to whole steps.
    pub(super) fn step(self) -> usize {
        match self {
            Self::Fma(_) => 1,
            #[cfg(target_arch = "x86_64")]
            Self::DotBf16(_) => 2,
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) | Self::AmxThirds(_) => DEPTH,
        }
    }

    /// Elements along K of one column that lie side by side in a panel.
    pub(super) fn pair(self) -> usize {
        self.step().min(2)
    }

    /// Panels that work of so many rows is cut at: the widest tile, made even.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(unused_variables, reason = "no arithmetic there asks for it")
    )]
    pub(super) fn group_panels(self, num_rows: usize) -> usize {
        match self {
            Self::Fma(isa) => fma::group_panels(isa),
            #[cfg(target_arch = "x86_64")]
            Self::DotBf16(_) => 6,
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) | Self::AmxThirds(_) => amx::group_panels(num_rows),
        }
    }
}
