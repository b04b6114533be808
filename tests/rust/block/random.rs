//! Random use of the pool: short runs that shrink when they fail, and long ones.

use super::op::{Op, Setup, kind};
use super::world::World;
use pagedkv::block::Eviction;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn setup() -> impl Strategy<Value = Setup> {
    (
        1..24_u32,
        0..5_u32,
        0..8_u32,
        0..4_u32,
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(
            |(num_blocks, shift, caching, partial, lru, degenerate_hash)| Setup {
                num_blocks,
                block_size: 1 << shift,
                prefix_caching: caching != 0,
                partial_matching: partial != 0,
                eviction: if lru { Eviction::Lru } else { Eviction::Turn },
                degenerate_hash,
            },
        )
}

fn op() -> impl Strategy<Value = Op> {
    (any::<u32>(), any::<u32>(), any::<u64>()).prop_map(|(number, pick, draw)| Op {
        kind: kind(number),
        pick,
        draw,
    })
}

proptest! {
    /// Set `PROPTEST_CASES` for more than 256 cases.
    #[test]
    fn pool_agrees_with_the_naive_model(setup in setup(), ops in prop::collection::vec(op(), 1..80)) {
        let mut world = World::new(setup);
        for op in ops {
            world.apply(op);
        }
        world.finish();
    }
}

/// Long runs, in which blocks come back many times over and the rare turns are taken.
#[test]
fn long_runs_agree_with_the_naive_model() {
    let mut events: BTreeMap<&str, u32> = BTreeMap::new();
    for seed in 0..24_u64 {
        let mut state = seed;
        let mut draw = || {
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        };
        let block_size = [1, 2, 4, 16][usize::try_from(seed % 4).expect("below 4")];
        let num_blocks = 8 + 2 * u32::try_from(seed).expect("below 24");
        let degenerate_hash = seed % 3 == 0;
        let mut world = World::new(Setup {
            num_blocks,
            block_size,
            prefix_caching: true,
            partial_matching: seed % 5 != 4,
            eviction: if seed % 4 == 2 {
                Eviction::Lru
            } else {
                Eviction::Turn
            },
            degenerate_hash,
        });
        for _ in 0..1500 {
            let kind = kind(u32::try_from(draw() >> 32).expect("32 bits"));
            let pick = u32::try_from(draw() >> 32).expect("32 bits");
            world.apply(Op {
                kind,
                pick,
                draw: draw(),
            });
        }
        for (event, count) in &world.model.events {
            *events.entry(event).or_default() += count;
        }
        world.finish();
    }
    for event in [
        "a fenced block lost its parent",
        "copied",
        "evicted",
        "evicted out of turn",
        "found the beginning of a block",
        "found the beginning of a tail",
        "found a whole tail",
        "idle before its parent",
        "merged",
        "not merged, because shared",
        "refused",
        "tail dropped when held no more",
        "tail dropped when idle",
        "tail known already",
        "tail published",
        "took up idle blocks",
        "unpublished",
    ] {
        assert!(events.contains_key(event), "no {event:?} in {events:?}");
    }
}
