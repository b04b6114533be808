//! Log probabilities of rows of logits, without a sort of the vocabulary: of the chosen token, and of the most likely ones.
//!
//! The caller is the binding of `logprobs`.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::cell::RefCell;

use super::InvalidArgument;
use super::cut::{Count, Cut};
use super::isa::{Isa, Kernel, LANES, Simd};
use super::pool;
use super::sample::{Logits, largest};

/// Logits a nanosecond and a thread, for the estimate of a call's duration.
const LOGITS_PER_NS: usize = 1;

thread_local! {
    /// Log probabilities; grows to the vocabulary.
    static SCRATCH: RefCell<Vec<f32>> = RefCell::default();
}

/// Log probabilities of a row before temperature and filters; all of them NaN where the row holds NaN or is infinite at its
/// largest.
#[derive(Clone, PartialEq, Debug)]
pub struct RowLogprobs {
    /// Of the chosen token.
    pub chosen: f32,
    /// The most likely tokens with theirs, best first, the lowest id first among equals.
    pub top: Vec<(usize, f32)>,
}

/// Log probabilities of the chosen tokens and of the `k` most likely ones, row by row.
///
/// # Errors
/// The first row whose chosen token is not in the vocabulary.
pub fn logprobs(logits: &Logits<'_>, chosen: &[i64], k: usize) -> Result<Vec<RowLogprobs>, InvalidArgument> {
    if let Some(row) = chosen
        .iter()
        .position(|&id| !usize::try_from(id).is_ok_and(|id| id < logits.vocab_size))
    {
        let allowed = format!("0 to {}", logits.vocab_size.saturating_sub(1));
        return Err(InvalidArgument::new(
            format!("chosen[{row}]"),
            chosen[row],
            allowed,
        ));
    }
    let ids = chosen.iter().map(|&id| usize::try_from(id).unwrap_or_default());
    let k = k.min(logits.vocab_size);
    let unknown = RowLogprobs {
        chosen: f32::NAN,
        top: (0..k).map(|id| (id, f32::NAN)).collect(),
    };
    let mut rows: Vec<_> = ids.map(|id| (id, unknown.clone())).enumerate().collect();
    let estimated_ns = (chosen.len() * logits.vocab_size / LOGITS_PER_NS / pool::num_threads()) as u64;
    pool::for_each(&mut rows, estimated_ns, |(row, (id, place))| {
        SCRATCH.with_borrow_mut(|values| {
            Isa::best().run(RankRow {
                logits: logits.row(*row),
                chosen: *id,
                k,
                values,
                place,
            });
        });
    });
    Ok(rows.into_iter().map(|(_, (_, place))| place).collect())
}

struct RankRow<'k> {
    logits: &'k [f32],
    chosen: usize,
    k: usize,
    values: &'k mut Vec<f32>,
    place: &'k mut RowLogprobs,
}

impl Kernel for RankRow<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Some(largest) = largest(simd, self.logits).filter(|largest| largest.is_finite()) else {
            return;
        };
        let values = self.values;
        values.clear();
        values.extend(self.logits.iter().map(|logit| logit - largest));
        let log_sum = exp_sum(simd, values).ln();
        for value in values.iter_mut() {
            // At most zero but for the rounding of the sum.
            *value = (*value - log_sum).min(0.0);
        }
        let mut top = Vec::with_capacity(self.k);
        if self.k > 0
            && let Some(cut) = Cut::find(values, &Count, self.k as u64)
        {
            let kept = values.iter().copied().enumerate();
            top.extend(kept.filter(|&(id, value)| cut.keeps(value, id)));
            top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        }
        *self.place = RowLogprobs {
            chosen: values[self.chosen],
            top,
        };
    }
}

/// Sum of e^x over numbers that are at most zero.
#[inline(always)]
fn exp_sum<S: Simd>(simd: S, values: &[f32]) -> f32 {
    let factor = simd.splat(std::f32::consts::LOG2_E);
    let (vectors, tail) = values.as_chunks::<LANES>();
    let mut last = [f32::NEG_INFINITY; LANES];
    last[..tail.len()].copy_from_slice(tail);
    let mut sums = [simd.splat(0.0); 4];
    for group in vectors.chunks(4).chain(std::iter::once(&[last][..])) {
        for (vector, sum) in group.iter().zip(&mut sums) {
            *sum = simd.add(*sum, simd.exp2(simd.mul(simd.load(vector), factor)));
        }
    }
    simd.sum_lanes(simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3])))
}
