//! Matches that end inside a block, with exact block ids.

use super::{HASH_KEY, computed, found, idle, ids, lookup, text};
use pagedkv::block::{BlockPool, BlockState, BlockTable, Eviction, OutOfBlocks, PoolConfig, RootId};
use pagedkv::ids::BlockId;

fn pool(num_blocks: u32, block_size: u32) -> BlockPool {
    BlockPool::new(PoolConfig {
        num_blocks,
        block_size,
        prefix_caching: true,
        partial_matching: true,
        eviction: Eviction::Turn,
        hash_key: HASH_KEY,
    })
}

/// Computes `tokens` and ends, as a sequence does that leaves its tail behind.
fn finished(pool: &mut BlockPool, root: RootId, tokens: &[u32]) {
    let mut table = computed(pool, root, tokens);
    let num_tokens = u32::try_from(tokens.len()).expect("few tokens");
    table.publish_tail(pool, tokens, num_tokens);
    table.release(pool);
    pool.check().expect("the invariants hold");
}

/// Blocks and tokens of the longest known prefix.
fn known(pool: &BlockPool, root: RootId, tokens: &[u32]) -> (Vec<u32>, u32) {
    let hit = lookup(pool, root, tokens);
    (ids(&hit.blocks), hit.num_tokens)
}

#[test]
fn a_tail_is_found_and_copied() {
    let mut pool = pool(8, 4);
    let root = pool.root(b"");
    finished(&mut pool, root, &text(1, 6));
    assert_eq!((idle(&pool), pool.num_free()), (vec![2, 1], 6));
    assert_eq!(known(&pool, root, &text(1, 12)), (vec![1, 2], 6));
    assert_eq!(known(&pool, root, &[1, 2, 3, 4, 5, 9, 9]), (vec![1], 4));
    let hit = lookup(&pool, root, &text(1, 12));
    let mut table = BlockTable::new(root, &mut pool);
    let mut copies = Vec::new();
    table
        .admit(&mut pool, &hit, 6, 12, &mut copies)
        .expect("the pool has room");
    assert_eq!(copies, [(BlockId(2), BlockId(3))]);
    assert_eq!(
        (ids(table.blocks()), pool.state(BlockId(2))),
        (vec![1, 3, 4], BlockState::Fenced)
    );
    // The longer block begins with the tail, which is not needed any more once the copy is made.
    table.publish(&mut pool, &text(1, 12), 12);
    assert_eq!(pool.state(BlockId(2)), BlockState::Fenced);
    pool.end_step();
    assert_eq!(pool.state(BlockId(2)), BlockState::Free);
    table.release(&mut pool);
    assert_eq!(idle(&pool), [4, 3, 1]);
}

#[test]
fn the_beginning_of_a_full_block_is_found() {
    let mut pool = pool(8, 4);
    let root = pool.root(b"");
    finished(&mut pool, root, &text(1, 8));
    // Everything but the last token is known: it does not matter how little of the block that is.
    assert_eq!(known(&pool, root, &text(1, 5)), (vec![1, 2], 5));
    assert_eq!(known(&pool, root, &[1, 2, 3, 4, 5, 9]), (vec![1, 2], 5));
    // Otherwise a single token is not worth a copy.
    assert_eq!(known(&pool, root, &[1, 2, 3, 4, 5, 9, 9]), (vec![1], 4));
    assert_eq!(known(&pool, root, &[1, 2, 3, 4, 5, 6, 9, 9, 9]), (vec![1, 2], 6));
    assert_eq!(known(&pool, root, &[1, 2, 9, 9]), (vec![1], 2));
    assert_eq!(known(&pool, root, &[9, 9]), (vec![], 0));
}

#[test]
fn the_longest_of_many_siblings_is_found() {
    for degenerate in [false, true] {
        let config = PoolConfig {
            num_blocks: 300,
            block_size: 8,
            prefix_caching: true,
            partial_matching: true,
            eviction: Eviction::Lru,
            hash_key: HASH_KEY,
        };
        let mut pool = if degenerate {
            BlockPool::with_degenerate_hash(config)
        } else {
            BlockPool::new(config)
        };
        let root = pool.root(b"");
        // Numbers in base 4, so that every beginning of a block is shared by many.
        let block = |number: u32| -> Vec<u32> {
            (0..4)
                .rev()
                .map(|digit| number >> (2 * digit) & 3)
                .chain([7; 4])
                .collect()
        };
        for number in (0..256).map(|i| i * 91 % 256).filter(|number| number % 5 != 0) {
            finished(&mut pool, root, &block(number));
        }
        for number in 0..256 {
            let hit = lookup(&pool, root, &block(number));
            let expected = if number % 5 != 0 {
                8
            } else {
                // A neighbour in the last digit is there.
                3
            };
            assert_eq!(hit.num_tokens, expected, "{number}");
        }
        while pool.allocate().is_some() {
            pool.check().expect("the invariants hold");
        }
        assert_eq!(pool.num_published(), 0);
    }
}

#[test]
fn what_a_longer_block_begins_with_is_not_kept() {
    let mut pool = pool(8, 8);
    let root = pool.root(b"");
    finished(&mut pool, root, &text(1, 3));
    finished(&mut pool, root, &text(1, 5));
    assert_eq!((idle(&pool).len(), pool.num_free()), (1, 7));
    // What is known already is not published again, nor is anything shorter.
    finished(&mut pool, root, &text(1, 5));
    finished(&mut pool, root, &text(1, 2));
    finished(&mut pool, root, &[1, 2, 3, 9]);
    assert_eq!((idle(&pool).len(), pool.num_free()), (2, 6));
    assert_eq!(known(&pool, root, &text(1, 7)).1, 5);
    finished(&mut pool, root, &text(1, 8));
    assert_eq!((idle(&pool).len(), pool.num_free()), (2, 6));
}

#[test]
fn a_partial_hit_counts_its_source_and_its_copy() {
    let mut pool = pool(3, 4);
    let root = pool.root(b"");
    finished(&mut pool, root, &text(1, 6));
    let mut other = computed(&mut pool, root, &[9]);
    // Two idle blocks to take up and one to copy into, but only those two are available.
    let hit = lookup(&pool, root, &text(1, 8));
    let mut table = BlockTable::new(root, &mut pool);
    let before = pool.clone();
    let refused = table.admit(&mut pool, &hit, 6, 8, &mut Vec::new());
    assert_eq!(
        refused,
        Err(OutOfBlocks {
            needed: 3,
            available: 2
        })
    );
    assert!(pool == before);
    // Without the partial block there is room: the tail makes it.
    table
        .admit(&mut pool, &hit, 4, 8, &mut Vec::new())
        .expect("two blocks suffice");
    assert_eq!((ids(table.blocks()), pool.num_evictions()), (vec![1, 2], 1));
    table.release(&mut pool);
    other.release(&mut pool);
    pool.check().expect("the invariants hold");
}

#[test]
fn tails_of_other_salts_and_epochs_are_not_found() {
    let mut pool = pool(8, 4);
    let (root, other) = (pool.root(b""), pool.root(b"k"));
    finished(&mut pool, root, &text(1, 6));
    assert!(found(&pool, other, &text(1, 6)).is_empty());
    let mut running = computed(&mut pool, root, &text(1, 7));
    pool.clear_prefix();
    running.publish_tail(&mut pool, &text(1, 7), 7);
    running.release(&mut pool);
    assert_eq!((pool.num_published(), pool.num_free()), (0, 8));
    finished(&mut pool, other, &text(1, 3));
    assert_eq!(known(&pool, other, &text(1, 4)).1, 3);
    assert!(found(&pool, root, &text(1, 4)).is_empty());
}
