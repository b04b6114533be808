//! Root mean square normalisation of rows, with or without the residual sum before it, in one pass over memory.
//!
//! A row is widened into a buffer in the nearest cache, and everything is computed there. The square sum is taken in
//! four vectors in turn, which are then added up: an order that depends on the width alone, so that a row has the same
//! bits in any batch and on any number of threads. The caller is the binding of `rms_norm` and `add_rms_norm`.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use super::InvalidArgument;
use super::element::{load_row, round_row, store_row};
use super::isa::{Isa, Kernel, LANES, Simd};
use super::pool;
use super::tensor::MatrixView;

/// Rows that a thread takes at a time.
const ROWS_PER_PIECE: usize = 16;

/// Elements a nanosecond and a thread, for the estimate of a call's duration.
const ELEMENTS_PER_NS: usize = 6;

/// Vectors of the square sum.
const ACCUMULATORS: usize = 4;

/// One call. N rows of width I.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// `[N, I]`, written: the normalised rows times the weight.
    pub out: MatrixView,
    /// `[N, I]`
    pub x: MatrixView,
    /// `[N, I]`: x is added to it, the sum is rounded to the type, stored here, and normalised in place of x.
    pub residual: Option<MatrixView>,
    /// `[1, I]`
    pub weight: MatrixView,
    /// Added to the mean of the squares.
    pub eps: f32,
}

impl RmsNorm {
    /// Refuses arguments that do not fit together. `run` relies on it.
    ///
    /// # Errors
    /// The first argument that does not fit.
    pub fn check(&self) -> Result<(), InvalidArgument> {
        self.out.check_like("out", &self.x, "x")?;
        if let Some(residual) = &self.residual {
            residual.check_like("residual", &self.x, "x")?;
        }
        let row = MatrixView {
            num_rows: 1,
            ..self.x
        };
        self.weight.check_like("weight", &row, "a row of x")
    }

    /// A guess at the duration on the present number of threads.
    pub fn estimated_ns(&self) -> u64 {
        (self.x.num_rows * self.x.width / ELEMENTS_PER_NS / pool::num_threads()) as u64
    }

    /// Computes the call on the best instruction set.
    ///
    /// # Safety
    /// The call passed `check`; the views are valid, aligned to their types, and for the length of the call nobody
    /// writes what they cover nor reads what is written. `out` may be `x`.
    pub unsafe fn run(&self) {
        // SAFETY: passed on.
        unsafe { self.run_on(Isa::best()) };
    }

    /// Computes the call on a given instruction set.
    ///
    /// # Safety
    /// As `run`.
    pub unsafe fn run_on(&self, isa: Isa) {
        let num_rows = self.x.num_rows;
        let mut pieces: Vec<usize> = (0..num_rows).step_by(ROWS_PER_PIECE).collect();
        pool::for_each(&mut pieces, self.estimated_ns(), |first| {
            isa.run(NormaliseRows {
                call: self,
                rows: *first..num_rows.min(*first + ROWS_PER_PIECE),
            });
        });
    }
}

/// A few consecutive rows.
struct NormaliseRows<'k> {
    call: &'k RmsNorm,
    rows: std::ops::Range<usize>,
}

impl Kernel for NormaliseRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let RmsNorm {
            out,
            x,
            residual,
            weight,
            eps,
        } = *self.call;
        // Whole vectors; the padding stays zero and adds nothing to the square sum.
        let padded = x.width.next_multiple_of(LANES);
        let mut buffer = vec![0.0; 3 * padded];
        let (values, others) = buffer.split_at_mut(padded);
        let (weights, addends) = others.split_at_mut(padded);
        // SAFETY: `RmsNorm::run` vouches for the views.
        unsafe { load_row(weight.dtype, weight.row(0), &mut weights[..x.width]) };
        for row in self.rows {
            // SAFETY: as above; the row is within the views.
            unsafe { load_row(x.dtype, x.row(row), &mut values[..x.width]) };
            if let Some(residual) = residual {
                // SAFETY: as above.
                unsafe { load_row(x.dtype, residual.row(row), &mut addends[..x.width]) };
                map(simd, values, addends, |value, addend| simd.add(addend, value));
                round_row(x.dtype, &mut values[..x.width]);
                // SAFETY: as above; no other piece has this row.
                unsafe { store_row(x.dtype, &values[..x.width], residual.row(row)) };
            }
            #[expect(clippy::cast_precision_loss, reason = "rows are shorter than 2^24")]
            let mean = square_sum(simd, values) / x.width as f32;
            let factor = simd.splat(1.0 / (mean + eps).sqrt());
            map(simd, values, weights, |value, _| simd.mul(value, factor));
            round_row(x.dtype, &mut values[..x.width]);
            map(simd, values, weights, |value, weight| simd.mul(value, weight));
            // SAFETY: as above.
            unsafe { store_row(x.dtype, &values[..x.width], out.row(row)) };
        }
    }
}

/// Replaces `values[i]` by `f(values[i], others[i])`. Whole vectors.
#[inline(always)]
fn map<S: Simd>(simd: S, values: &mut [f32], others: &[f32], f: impl Fn(S::V, S::V) -> S::V) {
    let others = others.as_chunks::<LANES>().0;
    for (value, other) in values.as_chunks_mut::<LANES>().0.iter_mut().zip(others) {
        simd.store(f(simd.load(value), simd.load(other)), value);
    }
}

/// Sum of squares: vector i goes to accumulator i mod 4.
#[inline(always)]
fn square_sum<S: Simd>(simd: S, values: &[f32]) -> f32 {
    let mut sums = [simd.splat(0.0); ACCUMULATORS];
    for group in values.as_chunks::<LANES>().0.chunks(ACCUMULATORS) {
        for (sum, vector) in sums.iter_mut().zip(group) {
            let vector = simd.load(vector);
            *sum = simd.mul_add(vector, vector, *sum);
        }
    }
    let halves = [simd.add(sums[0], sums[2]), simd.add(sums[1], sums[3])];
    simd.sum_lanes(simd.add(halves[0], halves[1]))
}
