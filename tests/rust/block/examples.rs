//! Examples with exact block ids and an exact order of eviction.

use super::{HASH_KEY, computed, found, idle, ids, lookup, pool, text};
use pagedkv::block::{
    BlockPool, BlockState, BlockTable, Eviction, Namespace, OutOfBlocks, Parent, PoolConfig, PrefixHit,
};
use pagedkv::ids::BlockId;

#[test]
fn eviction_takes_tails_first_and_the_least_recently_used_chain() {
    let mut pool = pool(6, 2);
    let root = pool.root(b"");
    let mut first = computed(&mut pool, root, &[1, 2, 3, 4, 5, 6]);
    let mut second = computed(&mut pool, root, &[1, 2, 9, 9]);
    assert_eq!(
        (ids(first.blocks()), ids(second.blocks())),
        (vec![1, 2, 3], vec![1, 5])
    );
    second.release(&mut pool);
    first.release(&mut pool);
    // Block 1 was held by both, so it went idle with the last of them.
    assert_eq!(idle(&pool), [5, 3, 2, 1]);
    // A lookup alone changes nothing; taking blocks up and releasing them makes them the last.
    let hit = lookup(&pool, root, &[1, 2, 9, 9]);
    assert_eq!(idle(&pool), [5, 3, 2, 1]);
    let mut third = BlockTable::new(root, &mut pool);
    third.adopt(&mut pool, &hit, 2);
    assert_eq!(idle(&pool), [3, 2]);
    third.release(&mut pool);
    assert_eq!(idle(&pool), [3, 2, 5, 1]);
    let mut taken = Vec::new();
    while let Some(block) = pool.allocate() {
        taken.push(block.0);
        pool.check().expect("the invariants hold");
    }
    assert_eq!((taken, pool.num_evictions()), (vec![4, 6, 3, 2, 5, 1], 4));
    assert_eq!(pool.num_published(), 0);
}

#[test]
fn a_refused_admission_changes_nothing_and_counts_idle_hits() {
    let mut pool = pool(8, 4);
    let root = pool.root(b"");
    let prompt = text(1, 36);
    computed(&mut pool, root, &prompt[..16]).release(&mut pool);
    let hit = lookup(&pool, root, &prompt);
    assert_eq!((hit.blocks.len(), hit.num_idle, hit.hashes.len()), (4, 4, 9));
    let before = pool.clone();
    let mut table = BlockTable::new(root, &mut pool);
    let held = pool.clone();
    let mut copies = Vec::new();
    // Five blocks are to be computed and eight are available, but four of those are the hit itself.
    let refused = table.admit(&mut pool, &hit, 16, 36, &mut copies);
    assert_eq!(
        refused,
        Err(OutOfBlocks {
            needed: 9,
            available: 8
        })
    );
    assert!(pool == held && copies.is_empty());
    table
        .admit(&mut pool, &hit, 16, 32, &mut copies)
        .expect("eight blocks suffice");
    assert_eq!((pool.num_available(), pool.num_evictions()), (0, 0));
    let refused = table.reserve(&mut pool, 32, 33, &mut copies);
    assert_eq!(
        refused,
        Err(OutOfBlocks {
            needed: 1,
            available: 0
        })
    );
    table.release(&mut pool);
    assert_eq!(
        idle(&pool),
        before.idle_blocks().map(|block| block.0).collect::<Vec<_>>()
    );
}

#[test]
fn a_reused_block_has_forgotten_what_it_was() {
    let mut pool = pool(2, 2);
    let root = pool.root(b"");
    computed(&mut pool, root, &[1, 2, 3, 4]).release(&mut pool);
    let mut table = computed(&mut pool, root, &[5, 6, 7, 8]);
    assert_eq!(pool.num_evictions(), 2);
    assert!(found(&pool, root, &[1, 2, 3, 4]).is_empty());
    assert_eq!(found(&pool, root, &[5, 6, 7, 8]), ids(table.blocks()));
    table.release(&mut pool);
}

#[test]
fn every_length_around_a_block_boundary_is_released_whole() {
    for len in [1, 3, 4, 5, 8] {
        let mut pool = pool(4, 4);
        let root = pool.root(b"");
        let mut table = computed(&mut pool, root, &text(1, len));
        assert_eq!((table.len(), pool.num_published()), (len.div_ceil(4), len / 4));
        table.release(&mut pool);
        assert_eq!((pool.num_owned(), pool.num_available()), (0, 4));
        pool.check().expect("the invariants hold");
    }
}

#[test]
fn a_hit_ends_at_the_first_hole_and_at_the_last_full_block() {
    let mut pool = pool(8, 2);
    let root = pool.root(b"");
    let mut table = computed(&mut pool, root, &[1, 2, 3, 4, 5]);
    assert_eq!(found(&pool, root, &[1, 2, 3, 4, 5, 6]), [1, 2]);
    assert_eq!(found(&pool, root, &[1, 2, 3]), [1]);
    assert!(found(&pool, root, &[9, 9, 3, 4]).is_empty());
    assert!(found(&pool, root, &[3, 4]).is_empty());
    assert!(found(&pool, root, &[1]).is_empty());
    assert!(found(&pool, root, &[]).is_empty());
    // The partial block is published only once it is full, under what it then holds.
    table
        .reserve(&mut pool, 5, 6, &mut Vec::new())
        .expect("no block is needed");
    table.publish(&mut pool, &[1, 2, 3, 4, 5, 6], 6);
    assert_eq!(found(&pool, root, &[1, 2, 3, 4, 5, 6]), [1, 2, 3]);
    assert_eq!(found(&pool, root, &[1, 2, 3, 4, 5, 5]), [1, 2]);
    table.release(&mut pool);
}

#[test]
fn salts_are_disjoint_and_their_roots_go_with_the_last_use() {
    let mut pool = pool(4, 2);
    let root = pool.root(b"a");
    let other = pool.root(b"a\0");
    assert_eq!((pool.root(b"a"), pool.num_roots()), (root, 2));
    computed(&mut pool, root, &[1, 2]).release(&mut pool);
    assert_eq!(
        (found(&pool, root, &[1, 2]), found(&pool, other, &[1, 2])),
        (vec![1], vec![])
    );
    pool.release_root(root);
    pool.release_root(root);
    pool.release_root(other);
    // A published block keeps its root; evicting it lets the root go.
    assert_eq!(pool.num_roots(), 1);
    let root = pool.root(b"a");
    assert_eq!(found(&pool, root, &[1, 2]), [1]);
    pool.release_root(root);
    while pool.allocate().is_some() {}
    assert_eq!(pool.num_roots(), 0);
    pool.check().expect("the invariants hold");
}

#[test]
fn salt_adapter_and_epoch_are_framed_and_share_nothing() {
    let mut pool = pool(4, 2);
    let of = |salt, adapter, model_epoch| Namespace {
        salt,
        adapter,
        model_epoch,
    };
    let parts: [(&[u8], &[u8], u64); 8] = [
        (b"", b"", 0),
        (b"ab", b"", 0),
        (b"a", b"b", 0),
        (b"", b"ab", 0),
        (b"", b"", 1),
        (b"", b"\x01", 0),
        (b"\x01", b"", 0),
        (&[0; 8], b"", 0),
    ];
    let roots = parts.map(|(salt, adapter, epoch)| pool.namespace(&of(salt, adapter, epoch)));
    assert_eq!(pool.num_roots(), 8);
    computed(&mut pool, roots[0], &[1, 2]).release(&mut pool);
    for root in &roots[1..] {
        assert!(found(&pool, *root, &[1, 2]).is_empty());
    }
    assert_eq!(pool.root(b"ab"), roots[1]);
    assert_eq!(found(&pool, roots[0], &[1, 2]), [1]);
}

#[test]
fn equal_blocks_computed_twice_become_one() {
    let mut pool = pool(8, 2);
    let root = pool.root(b"");
    let prompt = [1, 2, 3, 4, 5];
    let mut tables: Vec<BlockTable> = (0..2).map(|_| BlockTable::new(root, &mut pool)).collect();
    for table in &mut tables {
        table
            .reserve(&mut pool, 0, 5, &mut Vec::new())
            .expect("the pool has room");
    }
    for table in &mut tables {
        table.publish(&mut pool, &prompt, 5);
        pool.check().expect("the invariants hold");
    }
    assert_eq!(
        (ids(tables[0].blocks()), ids(tables[1].blocks())),
        (vec![1, 2, 3], vec![1, 2, 6])
    );
    assert_eq!((pool.num_owned(), pool.num_published()), (4, 2));
    for table in &mut tables {
        table.release(&mut pool);
    }
    assert_eq!(pool.num_owned(), 0);
}

#[test]
fn truncation_forgets_what_nobody_else_has() {
    let mut pool = pool(8, 2);
    let root = pool.root(b"");
    let mut table = computed(&mut pool, root, &[1, 2, 3, 4, 5, 6, 7]);
    let mut other = BlockTable::new(root, &mut pool);
    let hit = lookup(&pool, root, &[1, 2, 3, 4]);
    other.adopt(&mut pool, &hit, 2);
    // Block 4 was partial and block 3 is nobody else's. Block 2 is across the length, but another table holds
    // it.
    table.truncate(&mut pool, 3);
    pool.check().expect("the invariants hold");
    assert_eq!((ids(table.blocks()), table.num_published()), (vec![1, 2], 1));
    assert_eq!(found(&pool, root, &[1, 2, 3, 4, 5, 6]), [1, 2]);
    assert_eq!(table.cost(&pool, 3, 4), 1);
    // Once the other is gone, it is truncated away as well and may be written in place.
    other.release(&mut pool);
    table.truncate(&mut pool, 3);
    assert_eq!(table.cost(&pool, 3, 4), 0);
    assert_eq!(found(&pool, root, &[1, 2, 3, 4]), [1]);
    table.release(&mut pool);
    assert_eq!((idle(&pool), pool.num_free()), (vec![1], 7));
}

#[test]
fn a_released_tail_stays_findable() {
    let mut pool = pool(8, 2);
    let root = pool.root(b"");
    let mut table = computed(&mut pool, root, &[1, 2, 3, 4, 5]);
    table.release_tail(&mut pool, 1);
    assert_eq!(
        (ids(table.blocks()), idle(&pool), pool.num_free()),
        (vec![1], vec![2], 6)
    );
    assert_eq!(found(&pool, root, &[1, 2, 3, 4]), [1, 2]);
    table.release(&mut pool);
}

#[test]
fn nothing_computed_before_a_reset_is_published_after_it() {
    let mut pool = pool(8, 2);
    let root = pool.root(b"");
    let mut running = computed(&mut pool, root, &[1, 2, 3, 4]);
    computed(&mut pool, root, &[8, 8]).release(&mut pool);
    assert_eq!(
        (pool.clear_prefix(), pool.num_published(), pool.epoch()),
        (3, 0, 1)
    );
    assert_eq!(
        (ids(running.blocks()), idle(&pool), pool.num_free()),
        (vec![1, 2], vec![], 6)
    );
    running
        .reserve(&mut pool, 4, 6, &mut Vec::new())
        .expect("the pool has room");
    running.publish(&mut pool, &[1, 2, 3, 4, 5, 6], 6);
    assert_eq!(pool.num_published(), 0);
    // A table that starts over computes everything anew.
    running.release_tail(&mut pool, 0);
    running
        .reserve(&mut pool, 0, 2, &mut Vec::new())
        .expect("the pool has room");
    running.publish(&mut pool, &[1, 2], 2);
    assert_eq!(pool.num_published(), 1);
    running.release(&mut pool);
}

#[test]
fn without_prefix_caching_nothing_is_found() {
    let config = PoolConfig {
        num_blocks: 4,
        block_size: 2,
        prefix_caching: false,
        eviction: Eviction::Turn,
        hash_key: HASH_KEY,
    };
    let mut pool = BlockPool::new(config);
    let root = pool.root(b"");
    let mut table = computed(&mut pool, root, &[1, 2, 3, 4]);
    let hit = lookup(&pool, root, &[1, 2, 3, 4]);
    assert_eq!((pool.num_published(), hit), (0, PrefixHit::default()));
    table.release(&mut pool);
    assert_eq!(pool.num_free(), 4);
}

/// A prompt that is known to its last token, given up in the step that would have copied its last block.
#[test]
fn a_fenced_block_is_neither_reused_nor_kept_from_eviction_order() {
    let mut pool = pool(5, 2);
    let root = pool.root(b"");
    computed(&mut pool, root, &[1, 2, 3, 4]).release(&mut pool);
    let hit = lookup(&pool, root, &[1, 2, 3, 4]);
    let mut table = BlockTable::new(root, &mut pool);
    table
        .admit(&mut pool, &hit, 3, 4, &mut Vec::new())
        .expect("the pool has room");
    assert_eq!(
        (ids(table.blocks()), pool.state(BlockId(2))),
        (vec![1, 3], BlockState::Fenced)
    );
    table.release(&mut pool);
    assert_eq!(
        (idle(&pool), pool.num_fenced(), pool.num_available()),
        (vec![1], 1, 4)
    );

    // If the step ends now, the fenced block is idle again and goes before its parent.
    let mut ended = pool.clone();
    ended.end_step();
    assert_eq!((idle(&ended), ended.num_fenced()), (vec![2, 1], 0));

    // If all other blocks are wanted first, its parent is evicted; then it is unreachable, and free at the
    // end.
    let taken: Vec<u32> = std::iter::from_fn(|| pool.allocate())
        .map(|block| block.0)
        .collect();
    assert_eq!((taken, pool.num_published()), (vec![3, 4, 5, 1], 0));
    pool.check().expect("the invariants hold");
    pool.end_step();
    assert_eq!((pool.allocate(), pool.allocate()), (Some(BlockId(2)), None));
}

#[test]
#[should_panic(expected = "block 1 was released but no table holds it")]
fn releasing_a_block_twice_panics() {
    let mut pool = pool(2, 2);
    let block = pool.allocate().expect("the pool has room");
    pool.release(block);
    pool.release(block);
}

#[test]
#[should_panic(expected = "block 0 was released but no table holds it")]
fn releasing_the_null_block_panics() {
    pool(2, 2).release(BlockId::NULL);
}

#[test]
#[should_panic(expected = "block 2 was shared but is free")]
fn sharing_a_free_block_panics() {
    pool(2, 2).share(BlockId(2));
}

#[test]
#[should_panic(expected = "block 1 was published twice")]
fn publishing_a_block_twice_panics() {
    let mut pool = pool(2, 2);
    let root = Parent::Root(pool.root(b""));
    let block = pool.allocate().expect("the pool has room");
    let hash = pool.chain_hash(root, &[1, 2]);
    assert_eq!(pool.publish(block, root, hash, &[1, 2]), block);
    pool.publish(block, root, hash, &[1, 2]);
}

#[test]
#[should_panic(expected = "block 2 was published before its parent")]
fn publishing_before_the_parent_panics() {
    let mut pool = pool(2, 2);
    let parent = pool.allocate().map(Parent::Block).expect("the pool has room");
    let block = pool.allocate().expect("the pool has room");
    pool.publish(block, parent, 0, &[1, 2]);
}

#[test]
#[should_panic(expected = "block 1 of the hit has been evicted")]
fn adopting_a_stale_hit_panics() {
    let mut pool = pool(2, 2);
    let root = pool.root(b"");
    computed(&mut pool, root, &[1, 2]).release(&mut pool);
    let hit = lookup(&pool, root, &[1, 2]);
    while pool.allocate().is_some() {}
    BlockTable::new(root, &mut pool).adopt(&mut pool, &hit, 1);
}

#[test]
#[should_panic(expected = "a table is not used after its release")]
fn releasing_a_table_twice_panics() {
    let mut pool = pool(2, 2);
    let root = pool.root(b"");
    let mut table = BlockTable::new(root, &mut pool);
    table.release(&mut pool);
    table.release(&mut pool);
}

#[test]
fn hashes_made_elsewhere_find_the_same_and_wrong_ones_nothing() {
    let mut pool = pool(16, 4);
    let root = pool.root(b"salt");
    let prompt = text(1, 18);
    computed(&mut pool, root, &prompt).release(&mut pool);
    let hit = lookup(&pool, root, &prompt);
    let namespace = Namespace {
        salt: b"salt",
        ..Namespace::default()
    };
    let hashes = pool.hasher().prompt(&namespace, &prompt, 4);
    assert_eq!((hit.blocks.len(), &hit.hashes), (4, &hashes));
    // Those of the first blocks are kept, the others are added.
    let mut some = hashes[..2].to_vec();
    pool.extend_hashes(root, &prompt, &mut some);
    assert_eq!(some, hashes);
    let mut wrong = hit.clone();
    wrong.hashes.swap(2, 3);
    pool.probe(root, &prompt, &mut wrong);
    assert_eq!(wrong.blocks, hit.blocks[..2]);
    // What the pool forgot is not found by hashes that were made before.
    pool.clear_prefix();
    wrong.hashes.clone_from(&hashes);
    pool.probe(root, &prompt, &mut wrong);
    assert_eq!(wrong.blocks, []);
}

#[test]
fn what_a_sequence_takes_back_after_a_preemption_is_no_turn() {
    let mut pool = pool(16, 4);
    let root = pool.root(b"");
    let prompt = text(1, 16);
    computed(&mut pool, root, &prompt).release(&mut pool);
    let mut hit = lookup(&pool, root, &prompt);
    let before = pool.clone();
    for is_resumed in [true, false] {
        hit.is_resumed = is_resumed;
        let mut table = BlockTable::new(root, &mut pool);
        table.adopt(&mut pool, &hit, 4);
        table.release(&mut pool);
        pool.check().expect("the invariants hold");
        assert_eq!(pool == before, is_resumed);
    }
}
