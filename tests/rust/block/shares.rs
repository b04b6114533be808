//! Shares of named tenants: who is evicted first.

use super::{HASH_KEY, computed, found, idle, text};
use pagedkv::block::{BlockPool, Eviction, PoolConfig, RootId, Share, WEIGHT_ONE};
use proptest::prelude::*;

fn share(salt: &[u8], floor: u32, weight: u32) -> Share {
    Share {
        salt: salt.to_vec(),
        is_prefix: false,
        floor,
        weight,
    }
}

fn pool(num_blocks: u32, shares: Vec<Share>) -> BlockPool {
    let config = PoolConfig {
        num_blocks,
        block_size: 2,
        prefix_caching: true,
        partial_matching: true,
        eviction: Eviction::Lru,
        hash_key: HASH_KEY,
    };
    BlockPool::with_shares(config, shares)
}

fn run(pool: &mut BlockPool, root: RootId, tokens: &[u32]) {
    computed(pool, root, tokens).release(pool);
    pool.check().expect("the invariants hold");
}

#[test]
fn a_floor_protects_until_nothing_else_is_left() {
    let mut pool = pool(6, vec![share(b"a", 2, WEIGHT_ONE)]);
    let (own, other) = (pool.root(b"a"), pool.root(b""));
    run(&mut pool, own, &text(1, 4));
    run(&mut pool, other, &text(11, 18));
    assert_eq!(idle(&pool).len(), 6);
    // The oldest blocks are those of the tenant, but they are within its floor.
    run(&mut pool, other, &text(21, 28));
    assert_eq!(found(&pool, own, &text(1, 4)).len(), 2);
    assert_eq!(
        pool.share_counts()
            .iter()
            .map(|counts| counts.num_evictions)
            .collect::<Vec<_>>(),
        [4, 0]
    );
    // The floor is soft: whoever needs all blocks gets them.
    run(&mut pool, other, &text(31, 42));
    assert!(found(&pool, own, &text(1, 4)).is_empty());
    assert_eq!(pool.share_counts()[1].num_published, 0);
}

#[test]
fn above_its_floor_a_tenant_gives_down_to_it() {
    let mut pool = pool(8, vec![share(b"a", 2, WEIGHT_ONE)]);
    let (own, other) = (pool.root(b"a"), pool.root(b""));
    run(&mut pool, own, &text(1, 12));
    run(&mut pool, other, &text(21, 24));
    run(&mut pool, other, &text(31, 42));
    // Two of the eight are left to it, from the start of the chain, and the others' oldest are gone.
    assert_eq!(found(&pool, own, &text(1, 12)).len(), 2);
    assert!(found(&pool, other, &text(21, 24)).is_empty());
}

#[test]
fn weights_make_blocks_seem_older_or_younger() {
    for (weight, survives) in [(WEIGHT_ONE / 4, true), (WEIGHT_ONE, false)] {
        let mut pool = pool(6, vec![share(b"a", 0, weight)]);
        let (own, other) = (pool.root(b"a"), pool.root(b""));
        run(&mut pool, own, &text(1, 4));
        run(&mut pool, other, &text(11, 14));
        run(&mut pool, other, &text(21, 24));
        run(&mut pool, other, &text(31, 34));
        assert_eq!(found(&pool, own, &text(1, 4)).len(), if survives { 2 } else { 0 });
    }
}

#[test]
fn salts_that_begin_with_a_name_belong_to_it() {
    let prefix = Share {
        is_prefix: true,
        ..share(b"\xffkey", 1, WEIGHT_ONE)
    };
    let pool = pool(
        4,
        vec![prefix, share(b"k", 1, WEIGHT_ONE), share(b"\xffkey2", 0, 1)],
    );
    let shares = [
        b"".as_slice(),
        b"\xffkey",
        b"\xffkey1",
        b"\xffkey2",
        b"\xffke",
        b"k",
        b"key",
    ];
    assert_eq!(shares.map(|salt| pool.share_of(salt)), [0, 1, 1, 3, 0, 2, 0]);
}

proptest! {
    /// Whatever is taken, children go before parents, counts agree, and floors hold while others have idle blocks.
    #[test]
    fn floors_hold_while_others_can_give(
        runs in prop::collection::vec((0usize..3, 0u32..4, 1u32..9), 1..60),
        floors in (0u32..8, 0u32..8),
        weights in (100u32..5000, 100u32..5000),
    ) {
        let shares = vec![share(b"a", floors.0, weights.0), share(b"b", floors.1, weights.1)];
        let mut pool = pool(16, shares);
        let roots = [b"".as_slice(), b"a", b"b"].map(|salt| pool.root(salt));
        for (tenant, number, len) in runs {
            let before: Vec<(u32, u64)> =
                pool.share_counts().iter().map(|counts| (counts.num_published, counts.num_evictions)).collect();
            run(&mut pool, roots[tenant], &text(100 * number, 100 * number + len));
            let _ = idle(&pool);
            for (at, floor) in [(1, floors.0), (2, floors.1)] {
                let lost = pool.share_counts()[at].num_evictions - before[at].1;
                // It lost blocks of its floor only if nobody was above theirs.
                if lost > 0 && before[at].0 <= floor {
                    let others_above = [0, 1, 2].into_iter().filter(|&other| other != at).any(|other| {
                        let floor = [0, floors.0, floors.1][other];
                        other != tenant && pool.share_counts()[other].num_published > floor && pool.share_counts()[other].num_evictions == before[other].1
                    });
                    prop_assert!(!others_above);
                }
            }
        }
    }
}
