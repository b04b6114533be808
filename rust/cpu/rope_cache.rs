//! Rotary position embedding of queries and keys, and the write of keys and values into the cache, in one pass.
//!
//! The convention is that of Llama in the transformers library: of the first `rot` elements of a head, element i is
//! paired with element i + rot / 2, and both are rotated by the angle of the token's position. The caller is the
//! binding of `rope_cache`.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use super::InvalidArgument;
use super::element::{Dtype, load_row, store_row};
use super::isa::{Isa, Kernel, Simd};
use super::pool;
use super::tensor::{CacheView, RowsView};

/// Tokens that a thread takes at a time.
const TOKENS_PER_PIECE: usize = 16;

/// Elements a nanosecond and a thread, for the estimate of a call's duration.
const ELEMENTS_PER_NS: usize = 1;

/// `[P, rot]`, dense: the cosines or the sines of every position. Both halves of a row are read.
#[derive(Clone, Copy, Debug)]
pub struct AngleTable<'a> {
    /// Row after row.
    pub values: &'a [f32],
    /// Rotated elements of a head; even.
    pub rot: usize,
}

/// One call. T tokens, H query heads, G key heads, D elements a head.
#[derive(Clone, Copy, Debug)]
pub struct RopeCache<'a> {
    /// `[T, H, D]`, written: the rotated queries.
    pub out: RowsView,
    /// `[T, H, D]`
    pub query: RowsView,
    /// `[T, G, D]`
    pub key: RowsView,
    /// `[T, G, D]`
    pub value: RowsView,
    /// Cosines.
    pub cos: AngleTable<'a>,
    /// Sines.
    pub sin: AngleTable<'a>,
    /// `[T]`: rows of the tables.
    pub positions: &'a [i32],
    /// Written at the slots.
    pub key_cache: CacheView,
    /// Written at the slots.
    pub value_cache: CacheView,
    /// `[T]`: `block * block_size + offset`; no two tokens have the same one.
    pub slot_mapping: &'a [i32],
}

impl RopeCache<'_> {
    /// Refuses arguments that do not fit together. `run` relies on it.
    ///
    /// # Errors
    /// The first argument that does not fit.
    pub fn check(&self) -> Result<(), InvalidArgument> {
        let (query, cache) = (&self.query, &self.key_cache);
        CacheView::check_pair(cache, &self.value_cache)?;
        self.out
            .check_shape("out", [query.num_tokens, query.num_heads, cache.head_dim])?;
        query.check_shape("query", [query.num_tokens, query.num_heads, cache.head_dim])?;
        self.key
            .check_shape("key", [query.num_tokens, cache.num_kv_heads, cache.head_dim])?;
        self.value
            .check_shape("value", [query.num_tokens, cache.num_kv_heads, cache.head_dim])?;
        let rot = self.cos.rot;
        if rot == 0 || !rot.is_multiple_of(2) || rot > cache.head_dim {
            let allowed = format!("an even number up to head_dim = {}", cache.head_dim);
            return Err(InvalidArgument::new("width of cos", rot, allowed));
        }
        if self.sin.rot != rot || self.sin.values.len() != self.cos.values.len() {
            let shape = format!(
                "[{}, {}]",
                self.sin.values.len() / self.sin.rot.max(1),
                self.sin.rot
            );
            return Err(InvalidArgument::new("shape of sin", shape, "that of cos"));
        }
        check_indices(
            "positions",
            self.positions,
            query.num_tokens,
            self.cos.values.len() / rot,
        )?;
        let num_slots = cache.num_blocks * cache.block_size;
        check_indices("slot_mapping", self.slot_mapping, query.num_tokens, num_slots)
    }

    /// A guess at the duration on the present number of threads.
    pub fn estimated_ns(&self) -> u64 {
        let heads = self.query.num_heads + 2 * self.key.num_heads;
        (self.query.num_tokens * heads * self.query.head_dim / ELEMENTS_PER_NS / pool::num_threads()) as u64
    }

    /// Computes the call.
    ///
    /// # Safety
    /// The call passed `check`; the views are valid, aligned to their types, and for the length of the call nobody
    /// writes what they cover nor reads what is written; the slots differ.
    pub unsafe fn run(&self) {
        let isa = Isa::best();
        let num_tokens = self.query.num_tokens;
        let mut pieces: Vec<usize> = (0..num_tokens).step_by(TOKENS_PER_PIECE).collect();
        pool::for_each(&mut pieces, self.estimated_ns(), |first| {
            isa.run(RotateTokens {
                call: self,
                tokens: *first..num_tokens.min(*first + TOKENS_PER_PIECE),
            });
        });
    }

    /// Rotates the heads of one token and writes its slot. `row` holds one head.
    #[inline(always)]
    unsafe fn rotate_token(&self, token: usize, row: &mut [f32]) {
        let rot = self.cos.rot;
        let angles = index(self.positions[token]) * rot;
        let (cos, sin) = (
            &self.cos.values[angles..angles + rot],
            &self.sin.values[angles..angles + rot],
        );
        for head in 0..self.query.num_heads {
            // SAFETY: token and head are within the views, for which the caller of `run` vouches.
            unsafe {
                load_row(self.query.dtype, self.query.row(token, head), row);
                rotate(row, cos, sin);
                store_row(self.out.dtype, row, self.out.row(token, head));
            }
        }
        let slot = index(self.slot_mapping[token]);
        let (block, offset) = (slot / self.key_cache.block_size, slot % self.key_cache.block_size);
        for head in 0..self.key.num_heads {
            // SAFETY: as above; the slot was checked, and no other token has it.
            unsafe {
                load_row(self.key.dtype, self.key.row(token, head), row);
                rotate(row, cos, sin);
                store_row(self.key_cache.dtype, row, self.key_cache.row(block, head, offset));
                let (from, to) = (
                    self.value.row(token, head),
                    self.value_cache.row(block, head, offset),
                );
                copy_row(self.value.dtype, from, self.value_cache.dtype, to, row);
            }
        }
    }
}

/// A few consecutive tokens.
struct RotateTokens<'k, 'a> {
    call: &'k RopeCache<'a>,
    tokens: std::ops::Range<usize>,
}

impl Kernel for RotateTokens<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        let mut row = vec![0.0; self.call.query.head_dim];
        for token in self.tokens {
            // SAFETY: `RopeCache::run` vouches for the views.
            unsafe { self.call.rotate_token(token, &mut row) };
        }
    }
}

/// Rotates the first elements of a head in place. Products and sums are rounded one by one: a fused operation would
/// give other bits than `q * cos + rotate_half(q) * sin` in torch.
#[inline(always)]
fn rotate(row: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len() / 2;
    let (first, second) = row[..cos.len()].split_at_mut(half);
    let (cos_first, cos_second) = cos.split_at(half);
    let (sin_first, sin_second) = sin.split_at(half);
    for idx in 0..half {
        let (a, b) = (first[idx], second[idx]);
        first[idx] = a * cos_first[idx] - b * sin_first[idx];
        second[idx] = b * cos_second[idx] + a * sin_second[idx];
    }
}

/// Copies a head; bit by bit where the types agree, so that a NaN keeps its payload.
#[inline(always)]
unsafe fn copy_row(from_type: Dtype, from: *const u8, to_type: Dtype, to: *mut u8, row: &mut [f32]) {
    // SAFETY: the caller vouches for both rows.
    unsafe {
        if from_type == to_type {
            std::ptr::copy_nonoverlapping(from, to, row.len() * from_type.size());
        } else {
            load_row(from_type, from, row);
            store_row(to_type, row, to);
        }
    }
}

/// Widens an index that `check` has seen.
#[inline(always)]
fn index(value: i32) -> usize {
    usize::try_from(value).expect("checked: no index is negative")
}

/// Refuses a list of another length than `len`, or an index outside `0..end`.
fn check_indices(name: &str, indices: &[i32], len: usize, end: usize) -> Result<(), InvalidArgument> {
    if indices.len() != len {
        return Err(InvalidArgument::new(
            format!("length of {name}"),
            indices.len(),
            format!("{len} (tokens)"),
        ));
    }
    let outside = |&value: &i32| !usize::try_from(value).is_ok_and(|value| value < end);
    match indices.iter().position(outside) {
        Some(idx) => {
            let allowed = format!("0 to {}", end.saturating_sub(1));
            Err(InvalidArgument::new(
                format!("{name}[{idx}]"),
                indices[idx],
                allowed,
            ))
        }
        None => Ok(()),
    }
}
