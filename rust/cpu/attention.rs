//! Causal attention of a step over the paged cache: which piece of work is done where, and in what order.
//!
//! A step mixes prompts, chunks of prompts and decodes. Its queries are cut into tiles (`tile.rs`), and a tile whose
//! context is long is cut further, at the fixed split positions, so that every thread has something to do. How the
//! work was cut does not show in the result. The caller is the binding of `paged_attention`.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::cell::RefCell;
use std::cmp::Reverse;
use std::ops::Range;

use super::InvalidArgument;
use super::batch::Batch;
use super::isa::{AlignedBuffer, Isa, Kernel, Simd};
use super::pool;
use super::tensor::{CacheView, RowsView};
use super::tile::{Scratch, Tile};

/// Query rows of a tile, about: enough to pay for widening the keys, few enough for the second cache level.
const TILE_ROWS: usize = 64;

/// Widening and transposing a key costs about as much as this many query rows.
const PACK_ROWS: usize = 4;

/// Pieces of work a thread should find, so that the last ones even out what the first ones did not.
const PIECES_PER_THREAD: usize = 4;

/// Multiply-adds a nanosecond and a thread, and bytes a nanosecond, for the estimate of a call's duration.
const MULTIPLY_ADDS_PER_NS: usize = 10;
const BYTES_PER_NS: usize = 8;

thread_local! {
    /// Grows to the largest tile that the thread has met: under a megabyte for heads of 256.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
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
    /// Whose tokens these are, and where their context is.
    pub batch: Batch<'a>,
    /// Factor on the scores, usually 1 / sqrt(D).
    pub scale: f32,
}

/// A tile, and how its context is cut.
struct Task<'a> {
    tile: Tile<'a>,
    splits_per_piece: usize,
}

impl Task<'_> {
    /// Relative duration of a split of the tile.
    fn split_cost(tile: &Tile<'_>) -> usize {
        tile.num_rows() + PACK_ROWS
    }

    /// Relative duration of the tile.
    fn cost(tile: &Tile<'_>) -> usize {
        Self::split_cost(tile) * tile.num_splits()
    }

    /// Numbers that the pieces leave for the join; none where the tile is a single piece.
    fn partials_len(&self) -> usize {
        let num_splits = self.tile.num_splits();
        if self.splits_per_piece < num_splits {
            num_splits * self.tile.partial_len()
        } else {
            0
        }
    }
}

/// A range of the splits of a tile.
struct Piece<'a, 'p> {
    tile: Tile<'a>,
    splits: Range<usize>,
    /// The partial results of the splits, one after another. Empty if the piece is the whole tile, whose result is
    /// then written on the spot.
    partials: &'p mut [f32],
}

/// Computes the splits of a piece.
struct ComputePiece<'k, 'a, 'p> {
    piece: &'k mut Piece<'a, 'p>,
    scratch: &'k mut Scratch,
}

impl Kernel for ComputePiece<'_, '_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { piece, scratch } = self;
        let len = piece.tile.partial_len();
        // SAFETY: `Attention::run_on` vouches for the views.
        unsafe { piece.tile.load_queries(scratch) };
        if !piece.partials.is_empty() {
            for (split, partial) in piece.splits.clone().zip(piece.partials.chunks_exact_mut(len)) {
                // SAFETY: as above, and the queries are loaded.
                unsafe { piece.tile.compute_split(simd, scratch, split, partial) };
            }
            return;
        }
        let mut partial = std::mem::take(&mut scratch.split);
        let mut folded = std::mem::take(&mut scratch.folded);
        partial.reserve(len);
        folded.reserve(len);
        folded.slice(0..len).fill(0.0);
        for split in piece.splits.clone() {
            // SAFETY: as above, and the queries are loaded.
            unsafe {
                piece
                    .tile
                    .compute_split(simd, scratch, split, partial.slice(0..len));
            };
            piece.tile.fold(simd, folded.slice(0..len), partial.slice(0..len));
        }
        // SAFETY: as above; no other piece has this tile.
        unsafe { piece.tile.write_result(folded.slice(0..len)) };
        scratch.split = partial;
        scratch.folded = folded;
    }
}

/// Folds the partial results of a tile that was cut, and writes the result.
struct JoinSplits<'k, 'a, 'p> {
    piece: &'k mut Piece<'a, 'p>,
}

impl Kernel for JoinSplits<'_, '_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let tile = &self.piece.tile;
        let (folded, others) = self.piece.partials.split_at_mut(tile.partial_len());
        for partial in others.chunks_exact(tile.partial_len()) {
            tile.fold(simd, folded, partial);
        }
        // SAFETY: `Attention::run_on` vouches for the views, and no other piece has this tile.
        unsafe { tile.write_result(folded) };
    }
}

impl<'a> Attention<'a> {
    /// Refuses arguments that do not fit together. `run` relies on it.
    ///
    /// # Errors
    /// The first argument that does not fit.
    pub fn check(&self) -> Result<(), InvalidArgument> {
        let (query, cache) = (&self.query, &self.key_cache);
        CacheView::check_pair(cache, &self.value_cache)?;
        self.out
            .check_shape("out", [query.num_tokens, query.num_heads, query.head_dim])?;
        if query.head_dim != cache.head_dim {
            let allowed = format!("that of key_cache, {}", cache.head_dim);
            return Err(InvalidArgument::new("head_dim of query", query.head_dim, allowed));
        }
        if query.num_heads == 0 || query.num_heads % cache.num_kv_heads != 0 {
            let allowed = format!("a multiple of num_kv_heads = {}", cache.num_kv_heads);
            return Err(InvalidArgument::new("num_heads", query.num_heads, allowed));
        }
        self.batch
            .check(query.num_tokens, cache.num_blocks, cache.block_size)
    }

    /// A guess at the duration on the present number of threads, from arithmetic and memory traffic. The call must
    /// have passed `check`.
    pub fn estimated_ns(&self) -> u64 {
        let (mut row_keys, mut keys) = (0, 0);
        for idx in 0..self.batch.num_sequences() {
            let sequence = self.batch.sequence(idx);
            row_keys += sequence.query_len * (sequence.seq_len - sequence.query_len / 2);
            keys += if sequence.query_len > 0 {
                sequence.seq_len
            } else {
                0
            };
        }
        let multiply_adds = 2 * row_keys * self.query.num_heads * self.query.head_dim;
        let bytes =
            2 * keys * self.key_cache.num_kv_heads * self.key_cache.head_dim * self.key_cache.dtype.size();
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
        let estimated_ns = self.estimated_ns();
        let tasks = cut(self.tiles());
        let mut partials = AlignedBuffer::default();
        let partials_len = tasks.iter().map(Task::partials_len).sum();
        partials.reserve(partials_len);

        let mut pieces = lay_out(&tasks, partials.slice(0..partials_len));
        // Long pieces first: the short ones then fill the gaps at the end.
        pieces.sort_by_key(|piece| Reverse(Task::split_cost(&piece.tile) * piece.splits.len()));
        pool::for_each(&mut pieces, estimated_ns, |piece| {
            SCRATCH.with_borrow_mut(|scratch| isa.run(ComputePiece { piece, scratch }));
        });
        // Joining costs a hundredth of computing what is joined.
        let mut joins = lay_out_joins(&tasks, partials.slice(0..partials_len));
        pool::for_each(&mut joins, estimated_ns / 100, |piece| {
            isa.run(JoinSplits { piece });
        });
    }

    /// Cuts the queries into tiles.
    fn tiles(&self) -> Vec<Tile<'a>> {
        let group_size = self.query.num_heads / self.key_cache.num_kv_heads;
        let tile_tokens = (TILE_ROWS / group_size).max(1);
        let mut tiles = Vec::new();
        for idx in 0..self.batch.num_sequences() {
            let sequence = self.batch.sequence(idx);
            for kv_head in 0..self.key_cache.num_kv_heads {
                for first_token in (0..sequence.query_len).step_by(tile_tokens) {
                    tiles.push(Tile {
                        query: self.query,
                        out: self.out,
                        key_cache: self.key_cache,
                        value_cache: self.value_cache,
                        sequence,
                        kv_head,
                        first_token,
                        num_tokens: tile_tokens.min(sequence.query_len - first_token),
                        scale: self.scale,
                    });
                }
            }
        }
        tiles
    }
}

/// Decides for every tile into how many pieces it is cut.
fn cut(tiles: Vec<Tile<'_>>) -> Vec<Task<'_>> {
    let num_threads = pool::num_threads();
    let total: usize = tiles.iter().map(Task::cost).sum();
    let piece_cost = if num_threads == 1 {
        usize::MAX
    } else {
        total / (PIECES_PER_THREAD * num_threads)
    };
    let task = |tile| Task {
        tile,
        splits_per_piece: (piece_cost / Task::split_cost(&tile)).max(1),
    };
    tiles.into_iter().map(task).collect()
}

/// The pieces of all tiles; those of a tile that is cut share out its part of `partials`.
fn lay_out<'a, 'p>(tasks: &[Task<'a>], mut partials: &'p mut [f32]) -> Vec<Piece<'a, 'p>> {
    let mut pieces = Vec::with_capacity(tasks.len());
    for task in tasks {
        let num_splits = task.tile.num_splits();
        for first in (0..num_splits).step_by(task.splits_per_piece) {
            let splits = first..num_splits.min(first.saturating_add(task.splits_per_piece));
            let len = if task.partials_len() == 0 {
                0
            } else {
                splits.len() * task.tile.partial_len()
            };
            let (own, others) = partials.split_at_mut(len);
            partials = others;
            pieces.push(Piece {
                tile: task.tile,
                splits,
                partials: own,
            });
        }
    }
    pieces
}

/// One piece for every tile that was cut, with all of its partial results.
fn lay_out_joins<'a, 'p>(tasks: &[Task<'a>], mut partials: &'p mut [f32]) -> Vec<Piece<'a, 'p>> {
    let mut joins = Vec::new();
    for task in tasks.iter().filter(|task| task.partials_len() > 0) {
        let (own, others) = partials.split_at_mut(task.partials_len());
        partials = others;
        joins.push(Piece {
            tile: task.tile,
            splits: 0..task.tile.num_splits(),
            partials: own,
        });
    }
    joins
}
