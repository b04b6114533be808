//! Tests of the block pool, the prefix index and the block tables.

mod examples;
mod model;
mod op;
mod partial;
mod random;
mod sessions;
mod shares;
mod weights;
mod worked_example;
mod world;

use pagedkv::block::{BlockPool, BlockTable, Eviction, PoolConfig, PrefixHit, RootId};
use pagedkv::ids::BlockId;

/// An arbitrary key.
pub(crate) const HASH_KEY: [u64; 4] = [
    0x9e37_79b9_7f4a_7c15,
    0xbf58_476d_1ce4_e5b9,
    0x94d0_49bb_1331_11eb,
    0x2545_f491_4f6c_dd1d,
];

/// A pool that finds whole blocks again.
pub(crate) fn pool(num_blocks: u32, block_size: u32) -> BlockPool {
    BlockPool::new(PoolConfig {
        num_blocks,
        block_size,
        prefix_caching: true,
        partial_matching: false,
        eviction: Eviction::Turn,
        hash_key: HASH_KEY,
    })
}

/// Block ids as numbers.
pub(crate) fn ids<'a>(blocks: impl IntoIterator<Item = &'a BlockId>) -> Vec<u32> {
    blocks.into_iter().map(|block| block.0).collect()
}

/// The blocks that a lookup finds.
pub(crate) fn lookup(pool: &BlockPool, root: RootId, tokens: &[u32]) -> PrefixHit {
    let mut hit = PrefixHit::default();
    pool.lookup(root, tokens, &mut hit);
    hit
}

/// A table whose `tokens` were computed and published.
pub(crate) fn computed(pool: &mut BlockPool, root: RootId, tokens: &[u32]) -> BlockTable {
    let num_tokens = u32::try_from(tokens.len()).expect("few tokens");
    let mut table = BlockTable::new(root, pool);
    table
        .reserve(pool, 0, num_tokens, &mut Vec::new())
        .expect("the pool has room");
    table.publish(pool, tokens, num_tokens);
    table
}

/// Tokens `from..=to`.
pub(crate) fn text(from: u32, to: u32) -> Vec<u32> {
    (from..=to).collect()
}

/// Blocks that a lookup finds, as numbers.
pub(crate) fn found(pool: &BlockPool, root: RootId, tokens: &[u32]) -> Vec<u32> {
    ids(&lookup(pool, root, tokens).blocks)
}

/// The idle blocks of a sound pool in order of eviction, as numbers.
pub(crate) fn idle(pool: &BlockPool) -> Vec<u32> {
    pool.check().expect("the invariants hold");
    pool.idle_blocks().map(|block| block.0).collect()
}
