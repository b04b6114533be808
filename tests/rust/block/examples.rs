//! Examples with exact block ids and an exact order of eviction.

use super::{computed, ids, lookup, pool};
use pagedkv::block::{BlockState, BlockTable, OutOfBlocks, PrefixHit};
use pagedkv::ids::BlockId;

/// Tokens `from..=to`, one letter of the worked example each.
fn text(from: u32, to: u32) -> Vec<u32> {
    (from..=to).collect()
}

/// The worked example of ARCHITECTURE.md: ten blocks of four tokens.
#[test]
fn worked_example() {
    let mut pool = pool(10, 4);
    let root = pool.root(b"");
    let mut copies = Vec::new();

    // 1. A asks with 10 tokens. Nothing is known; three blocks are taken, and two of them become full.
    let mut a = BlockTable::new(root, &mut pool);
    let hit = lookup(&pool, root, &text(1, 10));
    assert_eq!((ids(&hit.blocks), hit.hashes.len()), (vec![], 2));
    a.admit(&mut pool, &hit, 0, 10, &mut copies).unwrap();
    a.publish(&mut pool, &text(1, 10), 10);
    assert_eq!(
        (ids(a.blocks()), a.num_published(), a.slot(9)),
        (vec![1, 2, 3], 2, 3 * 4 + 1)
    );
    pool.check().unwrap();

    // 2. B asks with the first 8 of them. All of it is known, but its last token must be computed again to have its
    //    logits: block 2 is copied before it is written.
    let mut b = BlockTable::new(root, &mut pool);
    let hit = lookup(&pool, root, &text(1, 8));
    assert_eq!((ids(&hit.blocks), hit.num_idle), (vec![1, 2], 0));
    assert_eq!(b.admission_cost(&pool, &hit, 7, 8), 1);
    b.admit(&mut pool, &hit, 7, 8, &mut copies).unwrap();
    assert_eq!(
        (ids(b.blocks()), copies.clone()),
        (vec![1, 4], vec![(BlockId(2), BlockId(4))])
    );
    assert_eq!((pool.ref_count(BlockId(1)), pool.ref_count(BlockId(2))), (2, 2));
    pool.check().unwrap();

    // 3. The step is committed. Block 4 turns out equal to block 2: B takes 2, and 4 is free again.
    pool.end_step();
    copies.clear();
    b.publish(&mut pool, &text(1, 8), 8);
    assert_eq!(
        (ids(b.blocks()), pool.state(BlockId(4))),
        (vec![1, 2], BlockState::Free)
    );

    // 4. B generates token 9, which opens a new block.
    b.reserve(&mut pool, 8, 9, &mut copies).unwrap();
    assert_eq!((ids(b.blocks()), copies.len()), (vec![1, 2, 4], 0));

    // 5. B is forked into C. The first to write its shared last block copies it; the other then writes in place.
    let mut c = b.fork(&mut pool);
    assert_eq!([1, 2, 4].map(|block| pool.ref_count(BlockId(block))), [3, 3, 2]);
    c.reserve(&mut pool, 9, 10, &mut copies).unwrap();
    b.reserve(&mut pool, 9, 10, &mut copies).unwrap();
    assert_eq!((ids(b.blocks()), ids(c.blocks())), (vec![1, 2, 4], vec![1, 2, 5]));
    assert_eq!(copies, [(BlockId(4), BlockId(5))]);
    pool.check().unwrap();
    pool.end_step();

    // 6. All three end. Partial blocks become free; full ones stay findable, the tail to be evicted first.
    for table in [&mut a, &mut b, &mut c] {
        table.release(&mut pool);
        pool.check().unwrap();
    }
    assert_eq!(
        (ids(&pool.idle_blocks().collect::<Vec<_>>()), pool.num_free()),
        (vec![2, 1], 8)
    );
    assert_eq!(pool.num_owned(), 0);

    // 7. D needs 9 blocks. Eight are free; the ninth is block 2, the tail of the idle chain. Block 1 stays findable.
    let mut d = BlockTable::new(root, &mut pool);
    d.reserve(&mut pool, 0, 36, &mut copies).unwrap();
    assert_eq!(ids(d.blocks()), [5, 4, 3, 6, 7, 8, 9, 10, 2]);
    assert_eq!(
        (
            pool.num_evictions(),
            ids(&lookup(&pool, root, &text(1, 8)).blocks)
        ),
        (1, vec![1])
    );
    pool.check().unwrap();

    // 8. E asks for 1..8 again. Its hit is idle, so that taking it up costs a block too: 2 are needed, 1 is there.
    //    Nothing changes.
    let mut e = BlockTable::new(root, &mut pool);
    let hit = lookup(&pool, root, &text(1, 8));
    let before = pool.clone();
    let refused = e.admit(&mut pool, &hit, 4, 8, &mut copies);
    assert_eq!(
        refused,
        Err(OutOfBlocks {
            needed: 2,
            available: 1
        })
    );
    assert!(pool == before && e.is_empty());

    // 9. D ends without having published anything, and E goes in.
    d.release(&mut pool);
    e.admit(&mut pool, &hit, 4, 8, &mut copies).unwrap();
    assert_eq!((ids(e.blocks()), pool.num_free()), (vec![1, 5], 8));
    e.release(&mut pool);
    pool.release_root(root);
    pool.check().unwrap();
}
