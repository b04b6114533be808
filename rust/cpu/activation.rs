//! The gated activation of the feed-forward layer, `silu(gate) * up`, in one pass. The caller is its binding.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use super::InvalidArgument;
use super::element::{load_row, round_row, store_row};
use super::isa::{Isa, Kernel, LANES, Simd};
use super::pool;
use super::tensor::MatrixView;

/// Elements that are computed at a time; their f32 copies stay in the nearest cache.
const CHUNK_LEN: usize = 512;

/// Elements of a piece of work for a thread, about.
const PIECE_LEN: usize = 8192;

/// Elements a nanosecond and a thread, for the estimate of a call's duration.
const ELEMENTS_PER_NS: usize = 2;

/// One call. T rows of width I.
#[derive(Clone, Copy, Debug)]
pub struct SiluMul {
    /// `[T, I]`, written.
    pub out: MatrixView,
    /// `[T, I]`
    pub gate: MatrixView,
    /// `[T, I]`
    pub up: MatrixView,
}

impl SiluMul {
    /// Refuses arguments that do not fit together. `run` relies on it.
    ///
    /// # Errors
    /// The first argument that does not fit.
    pub fn check(&self) -> Result<(), InvalidArgument> {
        self.out.check_like("out", &self.gate, "gate")?;
        self.up.check_like("up", &self.gate, "gate")
    }

    /// A guess at the duration on the present number of threads.
    pub fn estimated_ns(&self) -> u64 {
        (self.gate.num_rows * self.gate.width / ELEMENTS_PER_NS / pool::num_threads()) as u64
    }

    /// Computes the call on the best instruction set.
    ///
    /// # Safety
    /// The call passed `check`; the views are valid, aligned to their types, and for the length of the call nobody
    /// writes what they cover nor reads what is written. `out` may be `gate` or `up`.
    pub unsafe fn run(&self) {
        // SAFETY: passed on.
        unsafe { self.run_on(Isa::best()) };
    }

    /// Computes the call on a given instruction set.
    ///
    /// # Safety
    /// As `run`.
    pub unsafe fn run_on(&self, isa: Isa) {
        let rows_per_piece = (PIECE_LEN / self.gate.width.max(1)).max(1);
        let mut pieces = pool::deal_rows(self.gate.num_rows, rows_per_piece);
        pool::for_each(&mut pieces, self.estimated_ns(), |rows| {
            isa.run(ActivateRows {
                call: self,
                rows: rows.clone(),
            });
        });
    }
}

/// A few consecutive rows.
struct ActivateRows<'k> {
    call: &'k SiluMul,
    rows: std::ops::Range<usize>,
}

impl Kernel for ActivateRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let SiluMul { out, gate, up } = *self.call;
        let size = gate.dtype.size();
        let mut buffer = [[0.0; CHUNK_LEN]; 2];
        let [gates, ups] = &mut buffer;
        for row in self.rows {
            for start in (0..gate.width).step_by(CHUNK_LEN) {
                let len = CHUNK_LEN.min(gate.width - start);
                let address = |view: &MatrixView| view.row(row).wrapping_add(start * size);
                // SAFETY: `SiluMul::run` vouches for the views; no other piece has this row.
                unsafe {
                    load_row(gate.dtype, address(&gate), &mut gates[..len]);
                    load_row(gate.dtype, address(&up), &mut ups[..len]);
                    let vectors = len.div_ceil(LANES);
                    for vector in &mut gates.as_chunks_mut::<LANES>().0[..vectors] {
                        simd.store(silu(simd, simd.load(vector)), vector);
                    }
                    round_row(gate.dtype, &mut gates[..len]);
                    for (gate, up) in gates[..len].iter_mut().zip(&ups[..len]) {
                        *gate *= up;
                    }
                    store_row(gate.dtype, &gates[..len], address(&out));
                }
            }
        }
    }
}

/// x / (1 + e^-x), by e^-|x|, which cannot overflow. Also for gated products.
#[inline(always)]
pub(super) fn silu<S: Simd>(simd: S, x: S::V) -> S::V {
    let zero = simd.splat(0.0);
    let magnitude = simd.max(x, simd.sub(zero, x));
    let power = simd.exp2(simd.mul(magnitude, simd.splat(-std::f32::consts::LOG2_E)));
    // 1 for x >= 0, e^x below.
    let numerator = simd.max(simd.zero_where_less(simd.splat(1.0), x, 0.0), power);
    simd.div(simd.mul(x, numerator), simd.add(simd.splat(1.0), power))
}
