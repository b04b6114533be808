//! The work of attention in one step, cut into pieces once and used by every layer.
//!
//! A step mixes prompts, chunks of prompts and decodes. Its tokens are cut into tiles: a few tokens that read the same
//! blocks. Tokens of one sequence form a tile; so do those of sequences with few tokens in the step, decodes above all,
//! whose tables begin with the same blocks, as far as they do (a cascade: the shared keys and values are read once for
//! all of them). A tile whose context is long is cut further, at the fixed split positions, so that every thread has
//! something to do. A row's splits are folded in ascending order whoever computed them, so how the work was cut does not
//! show in the result: tables may only be shared, and tiles only cut, at whole splits. `attention` runs a plan.

use std::cmp::Reverse;
use std::ops::Range;

use super::InvalidArgument;
use super::batch::Batch;
use super::pool;
use super::tile_loops::SPLIT_LEN;

/// Query rows of a tile, about: enough to pay for reading and packing the keys, few enough for the second cache level;
/// a smaller number where otherwise threads would have no work.
const TILE_ROWS: [usize; 3] = [384, 192, 96];

/// Reading and rearranging a key costs about as much as this many query rows.
const PACK_ROWS: usize = 4;

/// Computing a split costs about as much as this many of its keys, beside what it costs by the key.
const SPLIT_KEYS: usize = 16;

/// Pieces of equal cost that the work of a thread is at least cut into.
const PIECES_PER_THREAD: usize = 8;

/// Jobs of equal cost that the work of a thread is at most cut into, so that the last ones even out what the first ones
/// did not; a job takes as long to begin as some tens of keys.
const JOBS_PER_THREAD: usize = 32;

/// Threads times this is the share of the work left that the next job gets, so that jobs are long first and short last.
const JOB_SHARE: usize = 2;

/// A sequence shares its first blocks with others if so many of it fit in a tile. Of one with more tokens in the step,
/// the tiles are large enough to read its blocks for.
const CASCADE_SEQUENCES: usize = 2;

/// What a plan depends on besides the batch. All layers of a model have the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Tokens of the step.
    pub num_tokens: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Heads of keys and values.
    pub num_kv_heads: usize,
    /// Blocks of the cache, the null block included.
    pub num_blocks: usize,
    /// Slots of a block.
    pub block_size: usize,
}

impl Geometry {
    /// Tokens of a tile of about so many rows.
    fn tile_tokens(&self, rows: usize) -> usize {
        (rows * self.num_kv_heads / self.num_heads).max(1)
    }
}

/// A token of a tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileToken {
    /// Its index in the step.
    pub(crate) token: usize,
    /// Positions that it sees, from the first one of the sequence on.
    pub(crate) visible: usize,
}

/// Tokens that read the same blocks.
#[derive(Clone, Debug)]
pub(super) struct TilePlan {
    /// Where its tokens are in the plan, in ascending order of what they see.
    pub(super) tokens: Range<usize>,
    /// Where its blocks are in the plan.
    pub(super) table: Range<usize>,
    /// The splits to compute.
    pub(super) splits: Range<usize>,
    /// Whether it is a cascade: then its result is part of that of other tiles.
    is_shared: bool,
    /// Where the earlier splits of its tokens are, in ascending order; all tokens have the same ones.
    pub(super) prefixes: Range<usize>,
    /// Rows of partial results of earlier tiles, for one key head.
    partial_start: usize,
    /// Partial results of each row: of its splits one by one, or of all of them folded.
    pub(super) num_partials: usize,
}

/// The part of a row's context that another tile computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefix {
    pub(super) tile: usize,
    /// Index of the tokens of this tile among those of the other one.
    pub(super) first_token: usize,
}

/// What to do with the splits of a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// Fold them and write the result.
    Write,
    /// Fold them and keep that as the tile's partial result.
    Fold,
    /// Keep each of them.
    Keep,
}

/// Some splits of a tile, for one key head.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) tile: usize,
    pub(super) kv_head: usize,
    pub(super) splits: Range<usize>,
    pub(super) outcome: Outcome,
    cost: usize,
}

/// A tile whose partial results are to be folded and written, for one key head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Join {
    pub(super) tile: usize,
    pub(super) kv_head: usize,
}

/// The work of one step.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) geometry: Geometry,
    pub(super) tokens: Vec<TileToken>,
    pub(super) block_ids: Vec<i32>,
    /// Tokens of a full tile.
    tile_tokens: usize,
    pub(super) tiles: Vec<TilePlan>,
    pub(super) prefixes: Vec<Prefix>,
    pub(super) pieces: Vec<Piece>,
    /// Ranges of pieces that one thread computes one after the other. Long ones first: the short ones then fill the
    /// gaps at the end.
    pub(super) jobs: Vec<Range<usize>>,
    pub(super) joins: Vec<Join>,
    /// Rows of partial results, for one key head.
    num_partial_rows: usize,
    /// Pairs of a query row and a key that it sees.
    pub(super) num_scores: usize,
    /// Keys that are read, by each key head.
    pub(super) num_keys: usize,
}

impl Plan {
    /// Checks a batch and cuts its work for the present number of threads.
    ///
    /// # Errors
    /// The first number of the batch that would lead a kernel outside the tokens or the cache.
    pub fn new(batch: &Batch<'_>, geometry: Geometry) -> Result<Self, InvalidArgument> {
        if geometry.num_kv_heads == 0
            || geometry.num_heads == 0
            || !geometry.num_heads.is_multiple_of(geometry.num_kv_heads)
        {
            let allowed = format!("a multiple of num_kv_heads = {}", geometry.num_kv_heads);
            return Err(InvalidArgument::new("num_heads", geometry.num_heads, allowed));
        }
        batch.check(geometry.num_tokens, geometry.num_blocks, geometry.block_size)?;
        let mut plan = Self {
            geometry,
            tokens: Vec::with_capacity(geometry.num_tokens),
            block_ids: batch.block_ids.to_vec(),
            tile_tokens: tile_tokens(batch, &geometry, pool::num_threads()),
            tiles: Vec::new(),
            prefixes: Vec::new(),
            pieces: Vec::new(),
            jobs: Vec::new(),
            joins: Vec::new(),
            num_partial_rows: 0,
            num_scores: 0,
            num_keys: 0,
        };
        let shared = Cascade::find(&mut plan, batch);
        plan.add_sequences(batch, &shared);
        plan.cut(pool::num_threads());
        Ok(plan)
    }

    /// Query heads that share a key head.
    pub(super) fn group_size(&self) -> usize {
        self.geometry.num_heads / self.geometry.num_kv_heads
    }

    /// Rows of a tile.
    pub(super) fn num_rows(&self, tile: &TilePlan) -> usize {
        tile.tokens.len() * self.group_size()
    }

    /// Adds a tile.
    fn push(&mut self, tokens: Range<usize>, table: Range<usize>, splits: Range<usize>, is_shared: bool) {
        self.num_keys += self.tokens[tokens.end - 1].visible - splits.start * SPLIT_LEN;
        self.tiles.push(TilePlan {
            tokens,
            table,
            splits,
            is_shared,
            prefixes: self.prefixes.len()..self.prefixes.len(),
            partial_start: 0,
            num_partials: 0,
        });
    }

    /// Adds the tiles of every sequence, from the splits on that it shares with others.
    fn add_sequences(&mut self, batch: &Batch<'_>, shared: &Cascade) {
        for idx in 0..batch.num_sequences() {
            let sequence = batch.sequence(idx);
            let before = sequence.seq_len - sequence.query_len;
            let prefixes = &shared.prefixes[idx];
            let first_split = prefixes
                .last()
                .map_or(0, |prefix| self.tiles[prefix.tile].splits.end);
            for first in (0..sequence.query_len).step_by(self.tile_tokens) {
                let start = self.tokens.len();
                let last = sequence.query_len.min(first + self.tile_tokens);
                self.tokens.extend((first..last).map(|token| TileToken {
                    token: sequence.query_start + token,
                    visible: before + token + 1,
                }));
                let splits = first_split..(before + last).div_ceil(SPLIT_LEN);
                self.push(start..self.tokens.len(), batch.table(idx), splits, false);
                let shifted = prefixes.iter().map(|prefix| Prefix {
                    first_token: prefix.first_token + first,
                    ..*prefix
                });
                self.prefixes.extend(shifted);
                if let Some(tile) = self.tiles.last_mut() {
                    tile.prefixes.end = self.prefixes.len();
                }
                self.num_scores +=
                    (first..last).map(|token| before + token + 1).sum::<usize>() * self.geometry.num_heads;
            }
        }
    }

    /// Positions that the last token of a tile sees.
    pub(super) fn num_visible(&self, tile: &TilePlan) -> usize {
        self.tokens[tile.tokens.end - 1].visible
    }

    /// Cost of some splits of a tile for one key head, in keys times rows.
    fn cost(&self, tile: &TilePlan, splits: &Range<usize>) -> usize {
        let num_keys = self.num_visible(tile).min(splits.end * SPLIT_LEN) - splits.start * SPLIT_LEN;
        (num_keys + splits.len() * SPLIT_KEYS) * (self.num_rows(tile) + PACK_ROWS)
    }

    /// Cuts the tiles into pieces.
    fn cut(&mut self, num_threads: usize) {
        let costs = self.tiles.iter().map(|tile| self.cost(tile, &tile.splits));
        let total = costs.sum::<usize>() * self.geometry.num_kv_heads;
        let most = match num_threads {
            1 => usize::MAX,
            _ => total / (PIECES_PER_THREAD * num_threads),
        };
        for idx in 0..self.tiles.len() {
            let tile = self.tiles[idx].clone();
            let split_cost = self.cost(&tile, &tile.splits) / tile.splits.len().max(1);
            let splits_per_piece = (most / split_cost.max(1)).max(1);
            let is_whole = tile.splits.start == 0 && tile.splits.len() <= splits_per_piece;
            let outcome = match (is_whole, tile.is_shared) {
                (true, false) => Outcome::Write,
                (true, true) => Outcome::Fold,
                (false, _) => Outcome::Keep,
            };
            let num_partials = match outcome {
                Outcome::Write => 0,
                Outcome::Fold => 1,
                Outcome::Keep => tile.splits.len(),
            };
            for kv_head in 0..self.geometry.num_kv_heads {
                for first in tile.splits.clone().step_by(splits_per_piece) {
                    let splits = first..tile.splits.end.min(first.saturating_add(splits_per_piece));
                    self.pieces.push(Piece {
                        tile: idx,
                        kv_head,
                        cost: self.cost(&tile, &splits),
                        splits,
                        outcome,
                    });
                }
                if outcome == Outcome::Keep && !tile.is_shared {
                    self.joins.push(Join { tile: idx, kv_head });
                }
            }
            self.tiles[idx].partial_start = self.num_partial_rows;
            self.tiles[idx].num_partials = num_partials;
            self.num_partial_rows += num_partials * self.num_rows(&tile);
        }
        // Heads of a tile stay neighbours, as their keys are.
        self.pieces.sort_by_key(|piece| Reverse(piece.cost));
        self.assign(total, num_threads);
    }

    /// Makes jobs of neighbouring pieces.
    fn assign(&mut self, total: usize, num_threads: usize) {
        let least = total / (JOBS_PER_THREAD * num_threads);
        let (mut left, mut start) = (total, 0);
        while start < self.pieces.len() {
            let wanted = match num_threads {
                1 => left,
                _ => (left / (JOB_SHARE * num_threads)).max(least),
            };
            let (mut end, mut cost) = (start, 0);
            while end < self.pieces.len() && (end == start || cost + self.pieces[end].cost <= wanted) {
                cost += self.pieces[end].cost;
                end += 1;
            }
            self.jobs.push(start..end);
            left -= cost;
            start = end;
        }
    }

    /// Rows of partial results of the whole step.
    pub(super) fn num_partial_rows(&self) -> usize {
        self.num_partial_rows * self.geometry.num_kv_heads
    }

    /// The rows of partial results of a tile and key head: partial after partial, row after row.
    pub(super) fn partial_rows(&self, tile: usize, kv_head: usize) -> Range<usize> {
        let tile = &self.tiles[tile];
        let len = tile.num_partials * self.num_rows(tile);
        let start = tile.partial_start * self.geometry.num_kv_heads + kv_head * len;
        start..start + len
    }
}

/// Tokens of a full tile.
fn tile_tokens(batch: &Batch<'_>, geometry: &Geometry, num_threads: usize) -> usize {
    let tokens = TILE_ROWS.map(|rows| geometry.tile_tokens(rows));
    let has_work = |tokens: usize| {
        let num_pieces = |idx| {
            let sequence = batch.sequence(idx);
            sequence.query_len.div_ceil(tokens) * sequence.seq_len.div_ceil(SPLIT_LEN) * geometry.num_kv_heads
        };
        let most_pieces: usize = (0..batch.num_sequences()).map(num_pieces).sum();
        num_threads == 1 || most_pieces >= PIECES_PER_THREAD * num_threads
    };
    let [larger @ .., smallest] = tokens;
    larger
        .into_iter()
        .find(|&tokens| has_work(tokens))
        .unwrap_or(smallest)
}

/// Which splits sequences share, and the tiles that compute them.
struct Cascade {
    /// For each sequence the tiles with its first splits.
    prefixes: Vec<Vec<Prefix>>,
}

/// A sequence that may share.
struct Sharer<'a> {
    idx: usize,
    tokens: Range<usize>,
    table: &'a [i32],
    /// Whole splits that all of its tokens see, such that each sees something beyond.
    num_splits: usize,
}

impl Cascade {
    /// Adds a tile for every set of sequences and run of splits that they share.
    fn find(plan: &mut Plan, batch: &Batch<'_>) -> Self {
        let mut cascade = Self {
            prefixes: vec![Vec::new(); batch.num_sequences()],
        };
        if !SPLIT_LEN.is_multiple_of(plan.geometry.block_size) {
            return cascade;
        }
        let most_tokens = (plan.tile_tokens / CASCADE_SEQUENCES).max(1);
        let mut sharers: Vec<Sharer<'_>> = (0..batch.num_sequences())
            .filter_map(|idx| {
                let sequence = batch.sequence(idx);
                let num_splits = (sequence.seq_len - sequence.query_len) / SPLIT_LEN;
                let may_share = (1..=most_tokens).contains(&sequence.query_len) && num_splits > 0;
                may_share.then_some(Sharer {
                    idx,
                    tokens: sequence.query_start..sequence.query_start + sequence.query_len,
                    table: sequence.table,
                    num_splits,
                })
            })
            .collect();
        // Tables that begin alike become neighbours.
        sharers.sort_by(|a, b| a.table.cmp(b.table));
        cascade.share(plan, batch, &sharers, 0);
        cascade
    }

    /// Adds the tiles of neighbours that share splits from `first` on.
    fn share(&mut self, plan: &mut Plan, batch: &Batch<'_>, sharers: &[Sharer<'_>], first: usize) {
        let blocks_per_split = SPLIT_LEN / plan.geometry.block_size;
        let alike = |a: &Sharer<'_>, b: &Sharer<'_>, split: usize| {
            let blocks = split * blocks_per_split..(split + 1) * blocks_per_split;
            a.num_splits.min(b.num_splits) > split && a.table[blocks.clone()] == b.table[blocks]
        };
        for run in sharers.chunk_by(|a, b| alike(a, b, first)) {
            if run.len() < 2 {
                continue;
            }
            let all_alike = |split| run.windows(2).all(|pair| alike(&pair[0], &pair[1], split));
            let mut end = first + 1;
            while all_alike(end) {
                end += 1;
            }
            self.push(plan, batch, run, first..end);
            self.share(plan, batch, run, end);
        }
    }

    /// Adds the tiles of one run.
    fn push(&mut self, plan: &mut Plan, batch: &Batch<'_>, run: &[Sharer<'_>], splits: Range<usize>) {
        let table = batch.table(run[0].idx);
        let visible = splits.end * SPLIT_LEN;
        // Tiles of about one size: a last one of few tokens would read all of the keys for them. As many as there should be
        // pieces, if they stay large: pieces of a tile would each leave partial results of all of its rows.
        let num_tokens = run.iter().map(|sharer| sharer.tokens.len()).sum::<usize>();
        let wanted = (PIECES_PER_THREAD * pool::num_threads()).div_ceil(plan.geometry.num_kv_heads);
        let large = num_tokens / plan.geometry.tile_tokens(TILE_ROWS[1]);
        let num_tiles = num_tokens.div_ceil(plan.tile_tokens).max(wanted.min(large));
        let most_tokens = run.iter().map(|sharer| sharer.tokens.len()).max();
        let tile_tokens = num_tokens
            .div_ceil(num_tiles)
            .max(CASCADE_SEQUENCES * most_tokens.unwrap_or(0));
        let mut start = plan.tokens.len();
        for sharer in run {
            if plan.tokens.len() + sharer.tokens.len() > start + tile_tokens {
                plan.push(start..plan.tokens.len(), table.clone(), splits.clone(), true);
                start = plan.tokens.len();
            }
            self.prefixes[sharer.idx].push(Prefix {
                tile: plan.tiles.len(),
                first_token: plan.tokens.len() - start,
            });
            let tokens = sharer.tokens.clone();
            plan.tokens
                .extend(tokens.map(|token| TileToken { token, visible }));
        }
        plan.push(start..plan.tokens.len(), table, splits, true);
    }
}
