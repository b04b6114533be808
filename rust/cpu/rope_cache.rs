//! Rotary position embedding of queries and keys, and the write of keys and values into the cache, in one pass.
//!
//! The convention is that of Llama in the transformers library: of the first `rot` elements of a head, element i is
//! paired with element i + rot / 2, and both are rotated by the angle of the token's position. The callers are the
//! binding of `rope_cache`, and `layer`.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use super::InvalidArgument;
use super::element::{Dtype, load_row, load_vector, store_row, store_vector};
use super::isa::{Isa, Kernel, LANES, Simd};
use super::pool;
use super::prefetch::prefetch_bytes;
use super::tensor::{CacheView, RowsView};

/// Most tokens that a thread takes at a time.
const TOKENS_PER_PIECE: usize = 16;

/// Tokens between the one that is rotated and the one whose heads are asked for.
const TOKENS_AHEAD: usize = 2;

/// Elements a nanosecond and a thread, for the estimate of a call's duration.
const ELEMENTS_PER_NS: usize = 1;

/// Elements that are converted at a time where the cache is of another type.
const CHUNK_LEN: usize = 64;

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
    /// writes what they cover nor reads what is written; the slots differ. `out` may be `query`.
    pub unsafe fn run(&self) {
        let isa = Isa::best();
        // A decode is cut into one piece for each thread: what a piece asks for at first, it need not wait for later.
        let mut pieces = pool::deal_rows(self.query.num_tokens, TOKENS_PER_PIECE);
        pool::for_each(&mut pieces, self.estimated_ns(), |tokens| {
            isa.run(RotateTokens {
                call: self,
                tokens: tokens.clone(),
            });
        });
    }

    /// Asks for what a token is rotated by, and for its slot: a decode writes to as many blocks as there are sequences,
    /// which are seldom in a cache.
    #[inline(always)]
    fn fetch_places<S: Simd>(&self, simd: S, token: usize) {
        let rot = self.cos.rot;
        for table in [&self.cos, &self.sin] {
            let angles = &table.values[index(self.positions[token]) * rot..];
            prefetch_bytes(simd, angles.as_ptr().cast(), rot * size_of::<f32>());
        }
        let slot = index(self.slot_mapping[token]);
        for cache in [&self.key_cache, &self.value_cache] {
            let (block, offset) = (slot / cache.block_size, slot % cache.block_size);
            let num_bytes = cache.head_dim * cache.dtype.size();
            for head in 0..cache.num_kv_heads {
                prefetch_bytes(simd, cache.row(block, head, offset), num_bytes);
            }
        }
    }

    /// Asks for a token's heads, a part of which another thread has written.
    #[inline(always)]
    fn fetch_heads<S: Simd>(&self, simd: S, token: usize) {
        for heads in [&self.query, &self.key, &self.value] {
            for head in 0..heads.num_heads {
                prefetch_bytes(simd, heads.row(token, head), heads.head_dim * heads.dtype.size());
            }
        }
    }

    /// Rotates the heads of one token and writes its slot.
    #[inline(always)]
    unsafe fn rotate_token<S: Simd>(&self, simd: S, token: usize) {
        let rot = self.cos.rot;
        let angles = index(self.positions[token]) * rot;
        let angles = [&self.cos, &self.sin].map(|table| &table.values[angles..angles + rot]);
        let (query, key, value) = (&self.query, &self.key, &self.value);
        for head in 0..query.num_heads {
            let (from, to) = (query.row(token, head), self.out.row(token, head));
            let rotation = Rotation {
                from,
                from_type: query.dtype,
                to,
                to_type: self.out.dtype,
                head_dim: query.head_dim,
            };
            // SAFETY: token and head are within the views, for which the caller of `run` vouches.
            unsafe { rotation.run(simd, angles) };
        }
        let slot = index(self.slot_mapping[token]);
        let (block, offset) = (slot / self.key_cache.block_size, slot % self.key_cache.block_size);
        for head in 0..key.num_heads {
            let rotation = Rotation {
                from: key.row(token, head),
                from_type: key.dtype,
                to: self.key_cache.row(block, head, offset),
                to_type: self.key_cache.dtype,
                head_dim: key.head_dim,
            };
            let (from, to) = (value.row(token, head), self.value_cache.row(block, head, offset));
            // SAFETY: as above; the slot was checked, and no other token has it.
            unsafe {
                rotation.run(simd, angles);
                copy_row(value.dtype, from, self.value_cache.dtype, to, value.head_dim);
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
    fn run<S: Simd>(self, simd: S) {
        let Self { call, tokens } = self;
        for token in tokens.clone() {
            call.fetch_places(simd, token);
        }
        for token in tokens.clone().take(TOKENS_AHEAD) {
            call.fetch_heads(simd, token);
        }
        for token in tokens.clone() {
            if token + TOKENS_AHEAD < tokens.end {
                call.fetch_heads(simd, token + TOKENS_AHEAD);
            }
            // SAFETY: `RopeCache::run` vouches for the views.
            unsafe { call.rotate_token(simd, token) };
        }
    }
}

/// One head, from where it is to where it goes, which may be the same place.
#[derive(Clone, Copy)]
struct Rotation {
    from: *const u8,
    from_type: Dtype,
    to: *mut u8,
    to_type: Dtype,
    head_dim: usize,
}

impl Rotation {
    /// Rotates the first elements by angles, given as cosines and sines, and copies the others. Products and sums are
    /// rounded one by one: a fused operation would give other bits than `q * cos + rotate_half(q) * sin` in torch.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S, [cos, sin]: [&[f32]; 2]) {
        let rot = cos.len();
        let half = rot / 2;
        let vectors_end = half - half % LANES;
        for idx in (0..vectors_end).step_by(LANES) {
            // SAFETY: the caller vouches for the head; both vectors end within their halves, and the slices are as
            // long as both.
            unsafe {
                let (a, b) = (self.load(simd, idx), self.load(simd, half + idx));
                let angle =
                    |angles: &[f32], idx: usize| simd.load_f32(angles[idx..idx + LANES].as_ptr().cast());
                let first = simd.sub(simd.mul(a, angle(cos, idx)), simd.mul(b, angle(sin, idx)));
                let second = simd.add(
                    simd.mul(b, angle(cos, half + idx)),
                    simd.mul(a, angle(sin, half + idx)),
                );
                self.store(simd, first, idx);
                self.store(simd, second, half + idx);
            }
        }
        for idx in vectors_end..half {
            // SAFETY: as above.
            unsafe {
                let (a, b) = (self.load_one(idx), self.load_one(half + idx));
                self.store_one(a * cos[idx] - b * sin[idx], idx);
                self.store_one(b * cos[half + idx] + a * sin[half + idx], half + idx);
            }
        }
        let (from, to) = (self.at(rot), self.to.wrapping_add(rot * self.to_type.size()));
        // SAFETY: as above.
        unsafe { copy_row(self.from_type, from, self.to_type, to, self.head_dim - rot) };
    }

    #[inline(always)]
    fn at(self, idx: usize) -> *const u8 {
        self.from.wrapping_add(idx * self.from_type.size())
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, idx: usize) -> S::V {
        // SAFETY: the caller vouches for sixteen elements.
        unsafe { load_vector(simd, self.from_type, self.at(idx)) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(self, simd: S, vector: S::V, idx: usize) {
        let to = self.to.wrapping_add(idx * self.to_type.size());
        // SAFETY: the caller vouches for sixteen elements.
        unsafe { store_vector(simd, self.to_type, vector, to) };
    }

    #[inline(always)]
    unsafe fn load_one(self, idx: usize) -> f32 {
        let mut one = [0.0];
        // SAFETY: the caller vouches for the element.
        unsafe { load_row(self.from_type, self.at(idx), &mut one) };
        one[0]
    }

    #[inline(always)]
    unsafe fn store_one(self, value: f32, idx: usize) {
        // SAFETY: the caller vouches for the element.
        unsafe {
            store_row(
                self.to_type,
                &[value],
                self.to.wrapping_add(idx * self.to_type.size()),
            );
        };
    }
}

/// Copies elements of a head; bit by bit where the types agree, so that a NaN keeps its payload.
#[inline(always)]
unsafe fn copy_row(from_type: Dtype, from: *const u8, to_type: Dtype, to: *mut u8, len: usize) {
    if from_type == to_type {
        if len > 0 && !std::ptr::eq(from, to) {
            // SAFETY: the caller vouches for both rows, which do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from, to, len * from_type.size()) };
        }
        return;
    }
    let mut chunk = [0.0; CHUNK_LEN];
    for start in (0..len).step_by(CHUNK_LEN) {
        let chunk = &mut chunk[..CHUNK_LEN.min(len - start)];
        // SAFETY: as above.
        unsafe {
            load_row(from_type, from.wrapping_add(start * from_type.size()), chunk);
            store_row(to_type, chunk, to.wrapping_add(start * to_type.size()));
        }
    }
}

/// Widens an index that `check` has seen.
#[inline(always)]
fn index(value: i32) -> usize {
    usize::try_from(value).expect("checked: no index is negative")
}

/// Refuses a list of another length than `len`, or an index outside `0..end`.
pub(super) fn check_indices(
    name: &str,
    indices: &[i32],
    len: usize,
    end: usize,
) -> Result<(), InvalidArgument> {
    if indices.len() != len {
        return Err(InvalidArgument::new(
            format!("length of {name}"),
            indices.len(),
            len.to_string(),
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
