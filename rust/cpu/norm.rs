//! Root mean square normalisation of rows, in one pass over memory.
//!
//! A row is widened into a buffer in the nearest cache, and everything is computed there. The square sum is taken in
//! four vectors in turn, which are then added up: an order that depends on the width alone, so that a row has the same
//! bits in any batch and on any number of threads. The callers are the binding of `rms_norm`,
//! `layer` and `decoder`.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use super::InvalidArgument;
use super::element::{load_row, load_vector, round_vector, store_row, store_vector};
use super::isa::{Isa, Kernel, LANES, Simd};
use super::pool;
use super::prefetch::prefetch_bytes;
use super::tensor::MatrixView;

/// Most rows that a thread takes at a time.
const ROWS_PER_PIECE: usize = 16;

/// Elements a nanosecond and a thread, for the estimate of a call's duration.
const ELEMENTS_PER_NS: usize = 2;

/// Rows between the one that is read and the one that is asked for.
const ROWS_AHEAD: usize = 4;

/// Vectors of the square sum.
const ACCUMULATORS: usize = 4;

/// One call. N rows of width I.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// `[N, I]`, written: the normalised rows times the weight.
    pub out: MatrixView,
    /// `[N, I]`
    pub x: MatrixView,
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
        let mut pieces = pool::deal_rows(self.x.num_rows, ROWS_PER_PIECE);
        pool::for_each(&mut pieces, self.estimated_ns(), |rows| {
            isa.run(NormaliseRows {
                call: self,
                rows: rows.clone(),
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
        let RmsNorm { x, weight, eps, .. } = *self.call;
        // Whole vectors; the padding is zero and adds nothing to the square sum.
        let padded = x.width.next_multiple_of(LANES);
        let mut buffer = vec![0.0; 2 * padded];
        let (values, weights) = buffer.split_at_mut(padded);
        for row in self.rows.clone().take(ROWS_AHEAD) {
            self.fetch(simd, row);
        }
        // SAFETY: `RmsNorm::run` vouches for the views.
        unsafe { load_row(weight.dtype, weight.row(0), &mut weights[..x.width]) };
        for row in self.rows.clone() {
            self.fetch(simd, row + ROWS_AHEAD);
            // SAFETY: as above; the row is within the views, and no other piece has it.
            unsafe { self.widen(simd, row, values) };
            #[expect(clippy::cast_precision_loss, reason = "rows are shorter than 2^24")]
            let mean = square_sum(simd, values) / x.width as f32;
            // SAFETY: as above.
            unsafe { self.scale(simd, row, values, 1.0 / (mean + eps).sqrt(), weights) };
        }
    }
}

impl NormaliseRows<'_> {
    /// Asks for a row, if it is one of these: another thread may have written a part of it.
    #[inline(always)]
    fn fetch<S: Simd>(&self, simd: S, row: usize) {
        if self.rows.contains(&row) {
            let x = self.call.x;
            prefetch_bytes(simd, x.row(row), x.row_bytes());
        }
    }

    /// Widens a row of x.
    ///
    /// # Safety
    /// The views are valid, the row is one of these.
    #[inline(always)]
    unsafe fn widen<S: Simd>(&self, simd: S, row: usize, values: &mut [f32]) {
        let x = self.call.x;
        let (vectors, rest) = values.as_chunks_mut::<LANES>().0.split_at_mut(x.width / LANES);
        for (idx, value) in vectors.iter_mut().enumerate() {
            // SAFETY: the elements are within the row, for which the caller vouches.
            simd.store(
                unsafe { load_vector(simd, x.dtype, x.at(row, idx * LANES)) },
                value,
            );
        }
        for value in rest {
            let len = x.width % LANES;
            // SAFETY: as above.
            unsafe { load_row(x.dtype, x.at(row, x.width - len), &mut value[..len]) };
        }
    }

    /// Writes a row: the values times the factor, rounded, times the weights.
    ///
    /// # Safety
    /// As `widen`.
    #[inline(always)]
    unsafe fn scale<S: Simd>(&self, simd: S, row: usize, values: &[f32], factor: f32, weights: &[f32]) {
        let out = self.call.out;
        let factor = simd.splat(factor);
        let pairs = values
            .as_chunks::<LANES>()
            .0
            .iter()
            .zip(weights.as_chunks::<LANES>().0);
        for (idx, (value, weight)) in pairs.enumerate() {
            let start = idx * LANES;
            let (place, len) = (out.at(row, start), LANES.min(out.width - start));
            let scaled = round_vector(simd, out.dtype, simd.mul(simd.load(value), factor));
            let product = simd.mul(scaled, simd.load(weight));
            // SAFETY: the elements are within the row, for which the caller vouches.
            unsafe {
                if len == LANES {
                    store_vector(simd, out.dtype, product, place);
                } else {
                    let mut lanes = [0.0; LANES];
                    simd.store(product, &mut lanes);
                    store_row(out.dtype, &lanes[..len], place);
                }
            }
        }
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
