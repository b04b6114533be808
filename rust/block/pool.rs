//! The pool: the state of every block, and the only code that changes it.
//!
//! Callers that hold several blocks of a sequence go through [`super::BlockTable`], which keeps the order of
//! releases right. Misuse that an O(1) test can see (a release too many, a block that is not held) panics in
//! every build: going on would hand one request's memory to another.

use super::config::{Eviction, PoolConfig};
use super::hash::BlockHasher;
use super::idle::IdleLists;
use super::node::Holders;
use super::prefix::{Parent, PrefixHit, PrefixIndex};
use super::root::{Namespace, RootId};
use super::share::{Share, Shares};
use super::turn::TurnWeights;
use crate::ids::BlockId;
use std::collections::BTreeMap;

/// Where a block is in its life; see the diagram of [`super`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockState {
    /// Nobody holds it and nothing can find it.
    Free,
    /// At least one table holds it.
    Owned,
    /// Nobody holds it, but a lookup can find it.
    Idle,
    /// No table holds it, but a copy reads it: of the step in flight, or of another thread.
    Fenced,
}

/// All blocks of one cache. Owned by one thread.
#[derive(Clone, PartialEq, Eq)]
pub struct BlockPool {
    block_size: u32,
    pub(super) prefix_caching: bool,
    pub(super) partial_matching: bool,
    /// A stack, so that the block released last is used first, while it may still be in a cache.
    pub(super) free: Vec<BlockId>,
    pub(super) idle: IdleLists,
    pub(super) eviction: Eviction,
    pub(super) turns: TurnWeights,
    pub(super) index: PrefixIndex,
    /// Blocks that must not be reused before a step has ended, once for every reason, by step: those under way in
    /// their order, and the last entry also while none is.
    pub(super) leased: Vec<Vec<BlockId>>,
    /// Blocks that copies of other threads read, and how many do.
    pub(super) lent: BTreeMap<BlockId, u32>,
    /// Counts calls of `clear_prefix`.
    pub(super) epoch: u64,
    pub(super) shares: Shares,
    /// As it was told last.
    pub(super) now_ms: u64,
    pub(super) last_reset_ms: u64,
    pub(super) num_evictions: u64,
    /// Blocks handed out since the pool was made: the clock of the idle lists.
    pub(super) num_allocations: u64,
}

impl BlockPool {
    /// A pool whose blocks are all free; they will be handed out in ascending order.
    ///
    /// # Panics
    /// If `config` is not valid; see [`PoolConfig::validate`].
    pub fn new(config: PoolConfig) -> Self {
        Self::with_shares(config, Vec::new())
    }

    /// The same with shares for some tenants.
    ///
    /// # Panics
    /// If `config` is not valid, or if there are more than `MAX_SHARES`.
    pub fn with_shares(config: PoolConfig, shares: Vec<Share>) -> Self {
        Self::with_hasher(&config, BlockHasher::new(config.hash_key, false), shares)
    }

    /// A pool for tests, in which all hashes are equal: no result may depend on the hash.
    #[doc(hidden)]
    pub fn with_degenerate_hash(config: PoolConfig) -> Self {
        Self::with_hasher(&config, BlockHasher::new(config.hash_key, true), Vec::new())
    }

    fn with_hasher(config: &PoolConfig, hasher: BlockHasher, shares: Vec<Share>) -> Self {
        if let Err(message) = config.validate() {
            panic!("{message}");
        }
        let PoolConfig {
            num_blocks,
            block_size,
            prefix_caching,
            partial_matching,
            eviction,
            ..
        } = *config;
        let num_ends = IdleLists::num_ends(shares.len() + 1);
        let mut index = PrefixIndex::new(hasher, num_blocks, num_ends, block_size);
        Self {
            block_size,
            prefix_caching,
            partial_matching,
            free: (1..=num_blocks).rev().map(BlockId).collect(),
            idle: IdleLists::new(&mut index.nodes, num_blocks),
            eviction,
            turns: TurnWeights::new(num_blocks),
            index,
            leased: vec![Vec::new()],
            lent: BTreeMap::new(),
            epoch: 0,
            shares: Shares::new(shares),
            now_ms: 0,
            last_reset_ms: 0,
            num_evictions: 0,
            num_allocations: 0,
        }
    }

    /// Tokens in a block.
    #[inline]
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Usable blocks, whatever their state.
    #[inline]
    pub fn num_blocks(&self) -> u32 {
        self.index.num_blocks
    }

    /// Blocks that nobody holds and nothing can find.
    #[inline]
    pub fn num_free(&self) -> u32 {
        count(self.free.len())
    }

    /// Blocks that nobody holds but a lookup can find.
    #[inline]
    pub fn num_idle(&self) -> u32 {
        self.idle.len()
    }

    /// Blocks that can be allocated now.
    #[inline]
    pub fn num_available(&self) -> u32 {
        self.num_free() + self.num_idle()
    }

    /// Blocks that tables hold.
    pub fn num_owned(&self) -> u32 {
        self.num_blocks() - self.num_available() - self.num_fenced()
    }

    /// Blocks that a lookup can find, held or idle.
    #[inline]
    pub fn num_published(&self) -> u32 {
        self.index.table.len()
    }

    /// Idle blocks that were taken for something else, since the pool was made.
    #[inline]
    pub fn num_evictions(&self) -> u64 {
        self.num_evictions
    }

    /// How often everything published was forgotten. A table made in an earlier epoch publishes nothing any
    /// more.
    #[inline]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The state of a block.
    ///
    /// # Panics
    /// If `block` is the null block.
    pub fn state(&self, block: BlockId) -> BlockState {
        assert!(block != BlockId::NULL, "the null block has no state");
        let node = self.index.nodes[block.index()];
        match (node.holders.has_table(), node.holders.is_leased()) {
            (false, false) if node.is_published() => BlockState::Idle,
            (false, false) => BlockState::Free,
            (false, true) => BlockState::Fenced,
            (true, _) => BlockState::Owned,
        }
    }

    /// Tables that hold the block plus copies that read it.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.num_tables(block) + self.num_leases(block) + self.num_lent(block)
    }

    /// Tables that hold the block.
    pub fn num_tables(&self, block: BlockId) -> u32 {
        self.index.nodes[block.index()].holders.num_tables()
    }

    /// Whether a table or a copy holds the block.
    #[inline]
    pub(super) fn is_held(&self, block: BlockId) -> bool {
        self.index.nodes[block.index()].is_held()
    }

    /// Whether a lookup can find the block.
    #[inline]
    pub fn is_published(&self, block: BlockId) -> bool {
        self.index.is_published(block)
    }

    /// Whether the one table that holds the block may write to it: no other table holds it and nothing can
    /// find it. Leases of the step do not matter, because its copies run before its writes; a copy of another
    /// thread may run at any time.
    #[inline]
    pub fn is_writable(&self, block: BlockId) -> bool {
        let node = &self.index.nodes[block.index()];
        node.holders.num_tables() == 1
            && node.parent == 0
            && !(node.holders.is_leased() && self.lent.contains_key(&block))
    }

    /// What a published block follows.
    pub fn parent(&self, block: BlockId) -> Option<Parent> {
        self.index.parent(block)
    }

    /// The tokens under which a block is published.
    pub fn published_tokens(&self, block: BlockId) -> Option<&[u32]> {
        self.is_published(block).then(|| self.index.tokens(block))
    }

    /// The chained hash under which a block is published; 0 if it is not.
    #[inline]
    pub fn hash(&self, block: BlockId) -> u64 {
        self.index.nodes[block.index()].hash
    }

    /// Takes a hold on the namespace of `salt`, without adapter and with the first weights.
    pub fn root(&mut self, salt: &[u8]) -> RootId {
        self.namespace(&Namespace {
            salt,
            ..Namespace::default()
        })
    }

    /// Takes a hold on a namespace. Two that differ in any part share no blocks.
    pub fn namespace(&mut self, namespace: &Namespace<'_>) -> RootId {
        let key = namespace.key();
        let hash = self.index.hasher.root(&key);
        let share = self.shares.of_salt(namespace.salt);
        self.index.roots.hold(&key, hash, share)
    }

    /// A namespace that is held or has published blocks, without a hold on it.
    pub fn find_namespace(&self, namespace: &Namespace<'_>) -> Option<RootId> {
        self.index.roots.find(&namespace.key())
    }

    /// Takes one more hold on a namespace that is held.
    pub fn hold_root(&mut self, root: RootId) {
        self.index.roots.get_mut(root).num_holds += 1;
    }

    /// Gives up a hold. The namespace is forgotten when no hold and no published block is left.
    ///
    /// # Panics
    /// If nobody holds the namespace.
    pub fn release_root(&mut self, root: RootId) {
        let held = self.index.roots.get_mut(root);
        assert!(held.num_holds > 0, "a root was released that nobody holds");
        held.num_holds -= 1;
        self.index.roots.drop_if_unused(root);
    }

    /// Namespaces that are held or have published blocks.
    pub fn num_roots(&self) -> u32 {
        count(self.index.roots.len())
    }

    /// Finds the longest chain of published blocks that starts `tokens` under `root`, and after it the block
    /// that begins with the most of what follows, where that is worth a copy. Changes nothing in the pool, in
    /// particular not the order of eviction.
    pub fn lookup(&self, root: RootId, tokens: &[u32], hit: &mut PrefixHit) {
        hit.hashes.clear();
        self.extend_hashes(root, tokens, &mut hit.hashes);
        self.probe(root, tokens, hit);
    }

    /// Appends the hashes of those full blocks of `tokens` under `root` that `hashes` lacks; what it has must be the
    /// hashes of the first ones. Without prefix caching there are none.
    pub fn extend_hashes(&self, root: RootId, tokens: &[u32], hashes: &mut Vec<u64>) {
        if self.prefix_caching {
            let start = self.index.chain_hash(Parent::Root(root));
            self.index.hasher.extend(start, tokens, self.block_size, hashes);
        }
    }

    /// [`Self::lookup`] for whoever has the hashes of all full blocks already, in `hit.hashes`. Wrong ones find
    /// nothing, and never anything wrong.
    pub fn probe(&self, root: RootId, tokens: &[u32], hit: &mut PrefixHit) {
        hit.blocks.clear();
        (hit.num_tokens, hit.num_full, hit.num_idle) = (0, 0, 0);
        if self.prefix_caching {
            self.index.probe(root, tokens, hit);
            if self.partial_matching {
                self.index.look_up_partial(root, tokens, hit);
            }
        }
    }

    /// The hash of this pool, for other threads.
    pub fn hasher(&self) -> BlockHasher {
        self.index.hasher.clone()
    }

    /// How many of some published blocks are idle.
    pub(super) fn num_idle_among(&self, blocks: &[BlockId]) -> u32 {
        count(blocks.iter().filter(|&&block| !self.is_held(block)).count())
    }

    /// Takes a block for one table: a free one, or else the idle one that the policy gives up.
    #[inline]
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => self.evict()?,
        };
        self.num_allocations += 1;
        let node = &mut self.index.nodes[block.index()];
        debug_assert!(!node.is_held() && node.parent == 0);
        node.holders = Holders::ONE_TABLE;
        Some(block)
    }

    /// Adds a table to the holders of a block that is owned, idle or fenced. Whoever shares a block must
    /// share the blocks before it too.
    ///
    /// # Panics
    /// If the block is free.
    #[inline]
    pub fn share(&mut self, block: BlockId) {
        let node = &mut self.index.nodes[block.index()];
        let was_held = node.is_held();
        assert!(
            was_held || node.parent != 0,
            "block {} was shared but is free",
            block.0
        );
        node.holders.add_table();
        if !was_held {
            self.idle.remove(&mut self.index.nodes, block);
        }
    }

    /// Takes a table from the holders of a block. A table releases its blocks from the last to the first.
    ///
    /// # Panics
    /// If no table holds the block.
    #[inline]
    pub fn release(&mut self, block: BlockId) {
        let node = &mut self.index.nodes[block.index()];
        assert!(
            node.holders.has_table(),
            "block {} was released but no table holds it",
            block.0
        );
        node.holders.remove_table();
        if !node.is_held() {
            if node.parent == 0 {
                self.free.push(block);
            } else {
                self.retire(block);
            }
        }
    }

    /// Hash of a block of `tokens` after `parent`.
    #[inline]
    pub fn chain_hash(&self, parent: Parent, tokens: &[u32]) -> u64 {
        self.index.hasher.block(self.index.chain_hash(parent), tokens)
    }

    /// Whether blocks that are not full are published, and the beginning of a block is found.
    #[inline]
    pub fn partial_matching(&self) -> bool {
        self.partial_matching
    }

    /// Whether blocks are published and found again.
    #[inline]
    pub fn prefix_caching(&self) -> bool {
        self.prefix_caching
    }
}

/// A length as a number of blocks.
#[inline]
pub(super) fn count(len: usize) -> u32 {
    u32::try_from(len).expect("lengths are bounded by the pool, which has fewer than 2^31 blocks")
}
