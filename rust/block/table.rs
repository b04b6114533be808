//! The block table of one sequence: which block holds which positions.
//!
//! A table keeps what the pool cannot see: the order of its blocks. It shares a chain as a whole, releases
//! from the tail, replaces what it may not write, and publishes in order. The scheduler owns the tables and
//! passes the pool in.

use super::pool::{BlockPool, count};
use super::prefix::{Parent, PrefixHit};
use super::root::RootId;
use crate::ids::BlockId;
use std::fmt;

/// The epoch of tables that publish nothing: the pool never gets there.
const SEALED: u64 = u64::MAX;

/// Blocks that an operation needs and the pool does not have. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfBlocks {
    /// Blocks that the operation would take.
    pub needed: u32,
    /// Blocks that can be allocated now.
    pub available: u32,
}

impl fmt::Display for OutOfBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} blocks are needed, {} are available",
            self.needed, self.available
        )
    }
}

impl std::error::Error for OutOfBlocks {}

/// The blocks of one sequence, in order. Holds every one of them, and the root of its salt, until it is
/// released.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a table that is dropped without `release` leaks its blocks"]
pub struct BlockTable {
    blocks: Vec<BlockId>,
    /// `None` after `release`.
    root: Option<RootId>,
    /// Leading blocks that are published, or were until the pool forgot everything.
    num_published: u32,
    /// Epoch of the pool when the first block came in. What was computed in an earlier epoch is not
    /// published.
    epoch: u64,
    block_size: u32,
}

impl BlockTable {
    /// An empty table under `root`, on which it takes a hold of its own.
    pub fn new(root: RootId, pool: &mut BlockPool) -> Self {
        pool.hold_root(root);
        Self {
            blocks: Vec::new(),
            root: Some(root),
            num_published: 0,
            epoch: pool.epoch(),
            block_size: pool.block_size(),
        }
    }

    /// The blocks, in order of the positions that they hold.
    #[inline]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The blocks as words of the arena. Block ids stay under 2^31, since slots have to fit an int32.
    #[inline]
    pub fn words(&self) -> &[i32] {
        let blocks = self.blocks.as_slice();
        // SAFETY: a `BlockId` is a transparent u32, so pointer and length describe as many i32 of the same layout, and
        // every bit pattern is one. The slice borrows from `self` like the one it is made of.
        unsafe { std::slice::from_raw_parts(blocks.as_ptr().cast::<i32>(), blocks.len()) }
    }

    /// Number of blocks.
    #[inline]
    pub fn len(&self) -> u32 {
        count(self.blocks.len())
    }

    /// Whether the table has no blocks.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The root of its namespace.
    ///
    /// # Panics
    /// If the table was released.
    pub fn root(&self) -> RootId {
        self.live_root()
    }

    /// Leading blocks that this table has published or adopted.
    #[inline]
    pub fn num_published(&self) -> u32 {
        self.num_published
    }

    /// Whether what the table published can be found: the pool has not forgotten everything since.
    #[inline]
    pub fn is_findable(&self, pool: &BlockPool) -> bool {
        self.epoch == pool.epoch()
    }

    /// Leading blocks that stay where they are if this table goes: another table holds them, and a lookup can find
    /// them.
    pub fn num_kept_by_others(&self, pool: &BlockPool) -> u32 {
        let is_kept = |&&block: &&BlockId| pool.is_published(block) && pool.num_tables(block) > 1;
        count(self.blocks.iter().take_while(is_kept).count())
    }

    /// Where the cache keeps `position`: `block * block_size + offset`.
    ///
    /// # Panics
    /// If no block holds the position.
    #[inline]
    pub fn slot(&self, position: u32) -> i32 {
        let block = self.blocks[(position >> self.block_size.trailing_zeros()) as usize];
        let slot = block.0 * self.block_size + (position & (self.block_size - 1));
        slot.cast_signed()
    }

    /// Shares the first `num_blocks` blocks of a hit.
    ///
    /// # Panics
    /// If the table is not empty, or if the hit is not the current one: blocks of it were evicted or
    /// forgotten.
    pub fn adopt(&mut self, pool: &mut BlockPool, hit: &PrefixHit, num_blocks: u32) {
        assert!(self.is_empty(), "a hit was adopted into a table that has blocks");
        pool.take_up(self.live_root(), hit, num_blocks);
        self.blocks.extend_from_slice(&hit.blocks[..num_blocks as usize]);
        self.num_published = num_blocks;
        self.epoch = pool.epoch();
    }

    /// Blocks that [`Self::reserve`] would take now: growth, plus one for each block from `num_computed` on
    /// that the table may not write.
    pub fn cost(&self, pool: &BlockPool, num_computed: u32, num_tokens: u32) -> u32 {
        if num_computed == num_tokens {
            return 0;
        }
        let first = self.first_written(num_computed);
        let replaced = self.blocks[first..]
            .iter()
            .filter(|&&block| !pool.is_writable(block))
            .count();
        count(replaced) + self.growth(num_tokens)
    }

    /// Makes positions `num_computed..num_tokens` writable. A block that holds the first of them beside
    /// computed ones is copied if it is shared or published: the pair (source, destination) is pushed to
    /// `copies`, and the source is leased until the step ends. Later blocks that may not be written are
    /// replaced, and the table grows.
    ///
    /// # Errors
    /// If blocks are wanting; then nothing has changed.
    ///
    /// # Panics
    /// If `num_computed` is beyond the table or beyond `num_tokens`.
    #[inline]
    pub fn reserve(
        &mut self,
        pool: &mut BlockPool,
        num_computed: u32,
        num_tokens: u32,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> Result<(), OutOfBlocks> {
        if num_computed + 1 == num_tokens {
            // A decode step, in most of which the block that it writes is at hand.
            let first = self.blocks_within(num_computed);
            let block = self.blocks.get(first as usize);
            if block.is_some_and(|&block| pool.is_writable(block)) && first + 1 == self.len() {
                self.num_published = self.num_published.min(first);
                return Ok(());
            }
        }
        self.reserve_range(pool, num_computed, num_tokens, copies)
    }

    /// [`Self::reserve`] in general.
    fn reserve_range(
        &mut self,
        pool: &mut BlockPool,
        num_computed: u32,
        num_tokens: u32,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> Result<(), OutOfBlocks> {
        let first = self.first_written(num_computed);
        assert!(
            num_computed <= num_tokens,
            "{num_computed} tokens are computed but only {num_tokens} exist"
        );
        let needed = self.cost(pool, num_computed, num_tokens);
        if needed == 0 {
            if num_computed < num_tokens {
                self.num_published = self.num_published.min(count(first));
            }
            return Ok(());
        }
        let available = pool.num_available();
        if needed > available {
            return Err(OutOfBlocks { needed, available });
        }
        for idx in (first..self.blocks.len()).rev() {
            if !pool.is_writable(self.blocks[idx]) {
                let keeps_tokens = idx == first && !num_computed.is_multiple_of(self.block_size);
                self.replace(pool, idx, keeps_tokens.then_some(&mut *copies));
            }
        }
        let taken = pool.allocate_into(self.growth(num_tokens) as usize, &mut self.blocks);
        assert!(taken, "the cost was available");
        self.num_published = self.num_published.min(count(first));
        Ok(())
    }

    /// Puts a new block in the place of one that may not be written.
    fn replace(&mut self, pool: &mut BlockPool, idx: usize, copies: Option<&mut Vec<(BlockId, BlockId)>>) {
        let new = pool.allocate().expect("the cost was available");
        let old = std::mem::replace(&mut self.blocks[idx], new);
        if let Some(copies) = copies {
            pool.lease(old);
            copies.push((old, new));
        }
        pool.release(old);
    }

    /// Blocks that [`Self::admit`] would take, of an empty table, while nothing has changed since the lookup of the hit.
    pub fn admission_cost(
        &self,
        pool: &BlockPool,
        hit: &PrefixHit,
        num_computed: u32,
        num_tokens: u32,
    ) -> u32 {
        let (adopted, left) = hit.blocks.split_at(self.blocks_for(num_computed) as usize);
        // A hit block is published, so the last one must be copied when part of it is computed anew.
        let copied = u32::from(!num_computed.is_multiple_of(self.block_size) && num_computed < num_tokens);
        let growth = self.blocks_for(num_tokens) - count(adopted.len());
        hit.num_idle - pool.num_idle_among(left) + copied + growth
    }

    /// Adopts the blocks of a hit that hold positions `0..num_computed` and reserves up to `num_tokens`, as
    /// one operation. Hit blocks that are idle count as needed.
    ///
    /// # Errors
    /// If blocks are wanting; then nothing has changed.
    pub fn admit(
        &mut self,
        pool: &mut BlockPool,
        hit: &PrefixHit,
        num_computed: u32,
        num_tokens: u32,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> Result<(), OutOfBlocks> {
        let needed = self.admission_cost(pool, hit, num_computed, num_tokens);
        let available = pool.num_available();
        if needed > available {
            return Err(OutOfBlocks { needed, available });
        }
        self.adopt(pool, hit, self.blocks_for(num_computed));
        self.reserve(pool, num_computed, num_tokens, copies)
    }

    /// A table that shares every block of this one. Full blocks should be published first: while two tables
    /// share a block that is not published, it cannot be merged with an equal one.
    pub fn fork(&self, pool: &mut BlockPool) -> Self {
        pool.hold_root(self.live_root());
        for &block in &self.blocks {
            pool.share(block);
        }
        Self {
            blocks: self.blocks.clone(),
            ..*self
        }
    }

    /// A table that shares the blocks which hold the first `num_tokens` positions of this one.
    pub fn fork_prefix(&self, pool: &mut BlockPool, num_tokens: u32) -> Self {
        let mut fork = self.fork(pool);
        fork.release_tail(pool, self.blocks_for(num_tokens));
        fork.num_published = fork.num_published.min(self.blocks_within(num_tokens));
        fork
    }

    /// Publishes the blocks that `num_computed` tokens fill, once the step that computed them is committed.
    /// `tokens` are all tokens of the sequence. Where an equal block is published already, the table takes
    /// that one and releases its own.
    ///
    /// # Panics
    /// If `num_computed` is beyond the table or beyond `tokens`.
    #[inline]
    pub fn publish(&mut self, pool: &mut BlockPool, tokens: &[u32], num_computed: u32) {
        // Most steps fill no block, and then nothing but the table's own counts is looked at.
        if !self.is_published_within(num_computed) {
            self.publish_full(pool, tokens, num_computed);
        }
    }

    /// Whether every block that `num_computed` tokens fill is published.
    #[inline]
    pub fn is_published_within(&self, num_computed: u32) -> bool {
        self.blocks_within(num_computed) <= self.num_published
    }

    /// [`Self::publish`] where there may be a block to publish.
    fn publish_full(&mut self, pool: &mut BlockPool, tokens: &[u32], num_computed: u32) {
        let num_full = self.blocks_within(num_computed) as usize;
        assert!(
            num_full <= self.blocks.len(),
            "{num_computed} computed tokens are more than the table holds"
        );
        if !pool.prefix_caching() || self.epoch != pool.epoch() {
            return;
        }
        let size = self.block_size as usize;
        let mut parent = self.last_published();
        for idx in self.num_published as usize..num_full {
            let own = self.blocks[idx];
            if !pool.is_published(own) {
                let tokens = &tokens[idx * size..(idx + 1) * size];
                let hash = pool.chain_hash(parent, tokens);
                let shared = !pool.is_writable(own);
                let canonical = pool.publish(own, parent, hash, tokens);
                if canonical != own {
                    if shared {
                        // The other holders keep their copy, and what they publish must follow what they
                        // hold.
                        return;
                    }
                    pool.share(canonical);
                    pool.release(own);
                    self.blocks[idx] = canonical;
                }
            }
            parent = Parent::Block(self.blocks[idx]);
            self.num_published = count(idx + 1);
        }
    }

    /// Publishes what `num_computed` tokens leave in a block that they do not fill, before the table is
    /// released: nothing may be added to it any more. Nothing happens where another table holds the block, or
    /// where a published block begins with the same tokens. `tokens` are all tokens of the sequence.
    pub fn publish_tail(&mut self, pool: &mut BlockPool, tokens: &[u32], num_computed: u32) {
        let num_full = self.blocks_within(num_computed);
        let start = (num_full * self.block_size) as usize;
        let tail = &tokens[start..num_computed as usize];
        let Some(&block) = self.blocks.get(num_full as usize) else {
            return;
        };
        if tail.is_empty()
            || !pool.partial_matching()
            || !pool.prefix_caching()
            || self.epoch != pool.epoch()
            || self.num_published != num_full
            || !pool.is_writable(block)
        {
            return;
        }
        let parent = self.last_published();
        if !pool.is_known(parent, tail) {
            let hash = pool.chain_hash(parent, tail);
            pool.publish(block, parent, hash, tail);
        }
    }

    /// Drops the blocks past `num_tokens` and does not keep what they hold: a published block beyond the
    /// length, or across it, is unpublished unless another table holds it or another sequence went on from
    /// it.
    pub fn truncate(&mut self, pool: &mut BlockPool, num_tokens: u32) {
        self.cut(pool, num_tokens).release(pool);
    }

    /// [`Self::truncate`] without the release: gives out a table of the dropped blocks, which a step in flight may still
    /// write to. It must be released before this one.
    pub fn cut(&mut self, pool: &mut BlockPool, num_tokens: u32) -> Self {
        let root = self.live_root();
        pool.hold_root(root);
        let num_kept = self.blocks.len().min(self.blocks_for(num_tokens) as usize);
        let dropped = Self {
            blocks: self.blocks.split_off(num_kept),
            num_published: 0,
            ..*self
        };
        for &block in dropped.blocks.iter().rev() {
            pool.unpublish_sole(block);
        }
        let num_full = self.blocks_within(num_tokens);
        if let Some(&across) = self.blocks.get(num_full as usize) {
            pool.unpublish_sole(across);
        }
        self.shortened(pool, num_full);
        dropped
    }

    /// Has the table publish nothing any more, as if the pool had forgotten everything: what it holds may be wrong.
    pub fn seal(&mut self) {
        self.epoch = SEALED;
    }

    /// Releases the blocks from `num_blocks` on, tail first; those that are published stay findable.
    pub fn release_tail(&mut self, pool: &mut BlockPool, num_blocks: u32) {
        let kept = self.blocks.len().min(num_blocks as usize);
        pool.release_all(&self.blocks[kept..]);
        self.blocks.truncate(kept);
        self.shortened(pool, num_blocks);
    }

    /// Releases every block, tail first, and the hold on the root. The table is of no use afterwards.
    ///
    /// # Panics
    /// If the table was released before.
    pub fn release(&mut self, pool: &mut BlockPool) {
        let root = self.live_root();
        self.release_tail(pool, 0);
        pool.release_root(root);
        self.root = None;
    }

    /// [`Self::release`], but the blocks from `num_found` on are the next to be evicted of those that nobody came back
    /// to.
    ///
    /// # Panics
    /// If the table was released before.
    pub fn release_first_out(&mut self, pool: &mut BlockPool, num_found: u32) {
        let kept = self.blocks.len().min(num_found as usize);
        pool.release_first_out(self.blocks.drain(kept..).rev());
        self.release(pool);
    }

    /// Called when at most `num_blocks` leading blocks are left as they were.
    fn shortened(&mut self, pool: &BlockPool, num_blocks: u32) {
        self.num_published = self.num_published.min(num_blocks);
        if self.is_empty() {
            self.epoch = pool.epoch();
        }
    }

    fn live_root(&self) -> RootId {
        self.root.expect("a table is not used after its release")
    }

    /// What the first block that is not published yet follows.
    fn last_published(&self) -> Parent {
        match self.num_published.checked_sub(1) {
            Some(last) => Parent::Block(self.blocks[last as usize]),
            None => Parent::Root(self.live_root()),
        }
    }

    /// Blocks that `num_tokens` tokens fill. A shift, because the compiler does not know of the power of two.
    #[inline]
    fn blocks_within(&self, num_tokens: u32) -> u32 {
        num_tokens >> self.block_size.trailing_zeros()
    }

    /// Blocks that hold `num_tokens` tokens.
    #[inline]
    fn blocks_for(&self, num_tokens: u32) -> u32 {
        self.blocks_within(num_tokens) + u32::from(num_tokens & (self.block_size - 1) != 0)
    }

    /// Index of the first block that holds a position from `num_computed` on.
    fn first_written(&self, num_computed: u32) -> usize {
        let first = self.blocks_within(num_computed) as usize;
        let held = self.blocks.len() * self.block_size as usize;
        assert!(
            num_computed as usize <= held,
            "{num_computed} computed tokens are more than the table holds"
        );
        first
    }

    /// Blocks to add until the table holds `num_tokens`.
    fn growth(&self, num_tokens: u32) -> u32 {
        self.blocks_for(num_tokens).saturating_sub(self.len())
    }
}
