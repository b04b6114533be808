//! Causal attention over the paged cache, layer by layer: the pieces of a step's plan on threads.
//!
//! `plan` says which piece is which, `tile` what is computed in it. The callers are the binding and `layer`.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::cell::RefCell;

use super::InvalidArgument;
use super::isa::{AlignedBuffer, Isa, Kernel, Simd};
use super::plan::{Join, Outcome, Piece, Plan, Prefix};
use super::pool;
use super::prefetch::{LEAD_SLOTS, Prefetch};
use super::tensor::{CacheView, RowsView};
use super::tile::{Scratch, Tile};
#[cfg(target_arch = "x86_64")]
use super::tile_amx;
use super::tile_loops::partial_row_len;
#[cfg(target_arch = "x86_64")]
use super::x86::Flushing;

/// Multiply-adds a nanosecond and a thread, and bytes a nanosecond, for the estimate of a call's duration.
const MULTIPLY_ADDS_PER_NS: usize = 10;
const BYTES_PER_NS: usize = 8;

thread_local! {
    /// Grows to the largest tile that the thread has met: under a megabyte for heads of 256.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    /// Partial results of the calling thread's calls.
    static PARTIALS: RefCell<AlignedBuffer> = RefCell::default();
}

/// One call. T tokens, H query heads, D elements a head.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// `[T, H, D]`, written.
    pub out: RowsView,
    /// `[T, H, D]`
    pub query: RowsView,
    /// Keys, those of this step included.
    pub key_cache: CacheView,
    /// Values, those of this step included.
    pub value_cache: CacheView,
    /// Whose tokens these are, where their context is, and how the work is cut.
    pub plan: &'a Plan,
    /// Factor on the scores, usually 1 / sqrt(D); positive.
    pub scale: f32,
}

/// The partial results of a call, which its pieces share out among them.
#[derive(Clone, Copy)]
struct Partials {
    address: *mut f32,
    row_len: usize,
}

// SAFETY: an address; whoever follows it says why nobody else does.
unsafe impl Send for Partials {}
// SAFETY: as above.
unsafe impl Sync for Partials {}

impl Partials {
    /// Some rows.
    ///
    /// # Safety
    /// They have been reserved, and for the lifetime of the result nobody else accesses them.
    unsafe fn rows<'p>(self, rows: std::ops::Range<usize>) -> &'p mut [f32] {
        let start = self.address.wrapping_add(rows.start * self.row_len);
        // SAFETY: passed on.
        unsafe { std::slice::from_raw_parts_mut(start, rows.len() * self.row_len) }
    }
}

/// Computes the pieces of a job.
struct ComputeJob<'k, 'a> {
    call: &'k Attention<'a>,
    pieces: &'k [Piece],
    partials: Partials,
    scratch: &'k mut Scratch,
}

impl Kernel for ComputeJob<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (plan, cache) = (self.call.plan, &self.call.key_cache);
        #[cfg(target_arch = "x86_64")]
        let (_configured, lead_slots) = match tile_amx::suits(simd, &self.call.query, cache) {
            None => (None, LEAD_SLOTS),
            Some(amx) => {
                let configured = tile_amx::Configured::new(amx);
                let num_rows = self
                    .pieces
                    .iter()
                    .map(|piece| plan.num_rows(&plan.tiles[piece.tile]));
                let most_rows = num_rows.max().unwrap_or(0);
                (Some(configured), tile_amx::lead_slots(cache, most_rows))
            }
        };
        #[cfg(not(target_arch = "x86_64"))]
        let lead_slots = LEAD_SLOTS;
        let caches = [cache, &self.call.value_cache];
        let mut prefetch = Prefetch::new(simd, plan, caches, self.pieces, lead_slots);
        for piece in self.pieces {
            self.call
                .compute(simd, piece, self.partials, self.scratch, &mut prefetch);
        }
    }
}

/// Folds the partial results of a tile, those of earlier splits from other tiles first, and writes the result.
struct JoinSplits<'k, 'a> {
    call: &'k Attention<'a>,
    join: Join,
    partials: Partials,
    folded: &'k mut AlignedBuffer,
}

impl Kernel for JoinSplits<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // As the pieces were computed, which other calls fold where they compute them.
        #[cfg(target_arch = "x86_64")]
        let _flushing =
            tile_amx::suits(simd, &self.call.query, &self.call.key_cache).map(|_| Flushing::new());
        let Join { tile: idx, kv_head } = self.join;
        let plan = self.call.plan;
        let tile = self.call.tile(idx, kv_head);
        let len = tile.partial_len();
        self.folded.reserve(len);
        let folded = self.folded.slice(0..len);
        folded.fill(0.0);
        let own = Prefix {
            tile: idx,
            first_token: 0,
        };
        let earlier = &plan.prefixes[plan.tiles[idx].prefixes.clone()];
        for source in earlier.iter().chain(std::iter::once(&own)) {
            let rows = plan.partial_rows(source.tile, kv_head);
            let num_partials = plan.tiles[source.tile].num_partials;
            let num_rows = rows.len() / num_partials.max(1);
            for partial in 0..num_partials {
                let start = rows.start + partial * num_rows + source.first_token * tile.group_size;
                // SAFETY: all pieces are done; joins only read.
                let partial = unsafe { self.partials.rows(start..start + tile.num_rows()) };
                tile.fold(simd, folded, partial);
            }
        }
        // SAFETY: `Attention::run_on` vouches for the views, and no other join has this tile.
        unsafe { tile.write_result(folded) };
    }
}

impl<'a> Attention<'a> {
    /// Refuses arguments that do not fit together. `run` relies on it.
    ///
    /// # Errors
    /// The first argument that does not fit.
    pub fn check(&self) -> Result<(), InvalidArgument> {
        let (query, cache, geometry) = (&self.query, &self.key_cache, self.plan.geometry);
        CacheView::check_pair(cache, &self.value_cache)?;
        self.out
            .check_shape("out", [query.num_tokens, query.num_heads, query.head_dim])?;
        query.check_shape("query", [geometry.num_tokens, geometry.num_heads, cache.head_dim])?;
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return Err(InvalidArgument::new("scale", self.scale, "a positive number"));
        }
        let planned = [
            geometry.num_blocks,
            geometry.num_kv_heads,
            geometry.block_size,
            cache.head_dim,
        ];
        let given = [
            cache.num_blocks,
            cache.num_kv_heads,
            cache.block_size,
            cache.head_dim,
        ];
        if planned != given {
            let (given, allowed) = (format!("{given:?}"), format!("{planned:?}, as planned"));
            return Err(InvalidArgument::new("shape of key_cache", given, allowed));
        }
        Ok(())
    }

    /// A guess at the duration on the present number of threads, from arithmetic and memory traffic.
    pub fn estimated_ns(&self) -> u64 {
        let cache = &self.key_cache;
        let multiply_adds = 2 * self.plan.num_scores * cache.head_dim;
        let bytes = 2 * self.plan.num_keys * cache.num_kv_heads * cache.head_dim * cache.dtype.size();
        let ns = multiply_adds / MULTIPLY_ADDS_PER_NS + bytes / BYTES_PER_NS;
        (ns / pool::num_threads()) as u64
    }

    /// Computes the call on the best instruction set.
    ///
    /// # Safety
    /// The call passed `check`; the views are valid, aligned to their types, and for the length of the call nobody
    /// writes what they cover nor reads `out`.
    pub unsafe fn run(&self) {
        // SAFETY: passed on.
        unsafe { self.run_on(Isa::best()) };
    }

    /// Computes the call on a given instruction set.
    ///
    /// # Safety
    /// As `run`.
    pub unsafe fn run_on(&self, isa: Isa) {
        PARTIALS.with_borrow_mut(|buffer| {
            let row_len = partial_row_len(self.query.head_dim);
            let len = self.plan.num_partial_rows() * row_len;
            buffer.reserve(len);
            let address = buffer.slice(0..len).as_mut_ptr();
            self.run_pieces(isa, Partials { address, row_len });
        });
    }

    fn run_pieces(&self, isa: Isa, partials: Partials) {
        let estimated_ns = self.estimated_ns();
        let jobs = self.plan.jobs.iter().cloned();
        let mut jobs: Vec<&[Piece]> = jobs.map(|pieces| &self.plan.pieces[pieces]).collect();
        pool::for_each(&mut jobs, estimated_ns, |pieces| {
            SCRATCH.with_borrow_mut(|scratch| {
                isa.run(ComputeJob {
                    call: self,
                    pieces,
                    partials,
                    scratch,
                });
            });
        });
        // Joining costs a hundredth of computing what is joined.
        let mut joins = self.plan.joins.clone();
        pool::for_each(&mut joins, estimated_ns / 100, |join| {
            SCRATCH.with_borrow_mut(|scratch| {
                isa.run(JoinSplits {
                    call: self,
                    join: *join,
                    partials,
                    folded: &mut scratch.folded,
                });
            });
        });
    }

    /// Computes the splits of a piece.
    #[inline(always)]
    fn compute<S: Simd>(
        &self,
        simd: S,
        piece: &Piece,
        partials: Partials,
        scratch: &mut Scratch,
        prefetch: &mut Prefetch<'_>,
    ) {
        let tile = self.tile(piece.tile, piece.kv_head);
        let len = tile.partial_len();
        let plan = &self.plan.tiles[piece.tile];
        let mut rows = self.plan.partial_rows(piece.tile, piece.kv_head);
        // SAFETY: `Attention::run_on` vouches for the views.
        unsafe { tile.load_queries(simd, scratch) };
        if piece.outcome == Outcome::Keep {
            rows.start += (piece.splits.start - plan.splits.start) * tile.num_rows();
            rows.end = rows.start + piece.splits.len() * tile.num_rows();
            // SAFETY: these rows are those of the piece's splits alone.
            let kept = unsafe { partials.rows(rows) };
            for (split, partial) in piece.splits.clone().zip(kept.chunks_exact_mut(len)) {
                // SAFETY: as above, and the queries are loaded.
                unsafe { tile.compute_split(simd, scratch, prefetch, split, partial) };
            }
            return;
        }
        let mut partial = std::mem::take(&mut scratch.split);
        let mut folded = std::mem::take(&mut scratch.folded);
        partial.reserve(len);
        folded.reserve(len);
        let sums = folded.slice(0..len);
        for split in piece.splits.clone() {
            if split == piece.splits.start {
                // SAFETY: as above, and the queries are loaded.
                unsafe { tile.compute_split(simd, scratch, prefetch, split, sums) };
            } else {
                // SAFETY: as above.
                unsafe { tile.compute_split(simd, scratch, prefetch, split, partial.slice(0..len)) };
                tile.fold(simd, sums, partial.slice(0..len));
            }
        }
        if piece.outcome == Outcome::Fold {
            // SAFETY: the tile is one piece, and these rows are its own.
            unsafe { partials.rows(rows) }.copy_from_slice(sums);
        } else {
            // SAFETY: `Attention::run_on` vouches for the views; no other piece has this tile.
            unsafe { tile.write_result(sums) };
        }
        scratch.split = partial;
        scratch.folded = folded;
    }

    /// A tile of the plan on the memory of this call.
    #[inline(always)]
    fn tile(&self, idx: usize, kv_head: usize) -> Tile<'a> {
        let tile = &self.plan.tiles[idx];
        Tile {
            query: self.query,
            out: self.out,
            key_cache: self.key_cache,
            value_cache: self.value_cache,
            tokens: &self.plan.tokens[tile.tokens.clone()],
            table: &self.plan.block_ids[tile.table.clone()],
            kv_head,
            group_size: self.plan.group_size(),
            scale: self.scale,
        }
    }
}
