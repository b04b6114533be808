//! Which of the processor's instruction sets the kernels of this process use: the best, or a lesser one that was chosen.
//!
//! The last bits of results differ between levels, and are the same on all machines that compute on one level. So a
//! level may be chosen that several kinds of machines have. The choice holds for the process, since attention and the
//! work row by row ask at every call; weights are packed for the level of their time. The callers are the bindings, and
//! `isa` and `linear::Arithmetic` where they look for the best.

use std::sync::{OnceLock, PoisonError, RwLock};

use super::InvalidArgument;
use super::element::Dtype;
use super::isa::{Isa, Portable};
use super::linear::Arithmetic;
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512};

/// What chooses the best level.
const AUTO: &str = "auto";

/// The chosen level.
static CHOSEN: RwLock<Option<Level>> = RwLock::new(None);

/// The best one, asked for once.
static BEST: OnceLock<Level> = OnceLock::new();

/// Instruction sets that a process may use, each with all before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// Plain Rust. Not to be chosen: `torch` multiplies where there is nothing else.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 (F, BW, VL).
    Avx512,
    /// And its products of bf16, for weights in bf16.
    Avx512Bf16,
    /// And matrix tiles, for weights that are numbers of bf16 and caches in bf16.
    AmxBf16,
}

impl Level {
    /// All of them, in ascending order.
    pub const ALL: [Self; 5] = [
        Self::Portable,
        Self::Avx2,
        Self::Avx512,
        Self::Avx512Bf16,
        Self::AmxBf16,
    ];

    /// Its name; that of the arithmetic that multiplies weights in bf16 on it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::AmxBf16 => "amx_bf16",
        }
    }

    /// The levels that this processor has, in ascending order.
    pub fn available() -> Vec<Self> {
        let names: Vec<_> = Arithmetic::available(Dtype::Bf16)
            .into_iter()
            .map(Arithmetic::name)
            .collect();
        let mut levels = Self::ALL.to_vec();
        levels.retain(|level| names.contains(&level.name()));
        levels
    }

    /// The level of the process.
    pub fn current() -> Self {
        let chosen = *CHOSEN.read().unwrap_or_else(PoisonError::into_inner);
        chosen.unwrap_or_else(|| *BEST.get_or_init(Self::best))
    }

    /// The best one of this processor.
    fn best() -> Self {
        Self::available().pop().unwrap_or(Self::Portable)
    }

    /// Makes a level that of the process: by its name, or "auto" for the best.
    ///
    /// # Errors
    /// A name that is none, or of a level that this processor does not have or that is not to be chosen.
    pub fn choose(name: &str) -> Result<(), InvalidArgument> {
        let mut levels = Self::available();
        levels.retain(|&level| level != Self::Portable);
        let found = levels.iter().copied().find(|level| level.name() == name);
        if found.is_none() && name != AUTO {
            let names = levels.iter().rev().map(|level| level.name());
            let allowed: Vec<_> = std::iter::once(AUTO).chain(names).collect();
            let allowed = format!("{} on this processor", allowed.join(", "));
            return Err(InvalidArgument::new("cpu_isa", name, allowed));
        }
        *CHOSEN.write().unwrap_or_else(PoisonError::into_inner) = found;
        Ok(())
    }

    /// The vectors of the level, with matrix tiles where it has them.
    pub(super) fn isa(self) -> Isa {
        let portable = Isa::Portable(Portable);
        match self {
            Self::Portable => portable,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Avx2::detect().map_or(portable, Isa::Avx2),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 | Self::Avx512Bf16 => Avx512::detect().map_or(portable, Isa::Avx512),
            #[cfg(target_arch = "x86_64")]
            Self::AmxBf16 => Avx512::detect_with_amx().map_or(portable, Isa::Avx512),
            #[cfg(not(target_arch = "x86_64"))]
            _ => portable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_processor_lacks_is_refused() {
        for name in ["portable", "sse2", "", "AVX2"] {
            let error = Level::choose(name).unwrap_err();
            assert_eq!((error.field.as_str(), error.value.as_str()), ("cpu_isa", name));
            assert!(error.allowed.starts_with("auto"), "{error}");
        }
        for level in Level::ALL {
            let is_available = Level::available().contains(&level);
            let isa = level.isa();
            // What is there has an instruction set of its own; what is not must fall back to plain Rust at worst.
            assert!(!is_available || level == Level::Portable || isa.name() != "portable");
        }
        assert_eq!(Level::available().first(), Some(&Level::Portable));
    }
}
