//! Conversations in a pool too small for them, one turn at a time, beside the naive model: long enough for the
//! weights of policy `turn` to be learned and to matter.

use super::model::Model;
use super::op::Setup;
use super::{HASH_KEY, ids, lookup};
use pagedkv::block::{BlockPool, BlockTable, Eviction, PoolConfig};

const BLOCK_SIZE: u32 = 2;
const NUM_TURNS: u32 = 3000;

/// Runs the turns and returns the model. Two conversations in three end after their first turn.
fn run(eviction: Eviction, degenerate_hash: bool) -> Model {
    let config = PoolConfig {
        num_blocks: 64,
        block_size: BLOCK_SIZE,
        prefix_caching: true,
        partial_matching: false,
        eviction,
        hash_key: HASH_KEY,
    };
    let mut pool = if degenerate_hash {
        BlockPool::with_degenerate_hash(config)
    } else {
        BlockPool::new(config)
    };
    let mut model = Model::new(Setup {
        num_blocks: config.num_blocks,
        block_size: BLOCK_SIZE,
        prefix_caching: true,
        partial_matching: false,
        eviction,
        degenerate_hash,
    });
    let mut state = 1_u32;
    let mut draw = |bound: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % bound
    };
    let mut open: Vec<Vec<u32>> = Vec::new();
    for turn in 0..NUM_TURNS {
        let mut tokens = if open.len() > 4 {
            open.swap_remove(draw(u32::try_from(open.len()).expect("few")) as usize)
        } else {
            vec![0, 0]
        };
        tokens.extend((0..=draw(9)).map(|_| turn + 1));
        let root = pool.root(b"");
        let hit = lookup(&pool, root, &tokens);
        let num_tokens = u32::try_from(tokens.len()).expect("few");
        let num_known = u32::try_from(hit.blocks.len()).expect("few") * BLOCK_SIZE;
        let num_computed = num_known.min(num_tokens - 1);
        let mut table = BlockTable::new(root, &mut pool);
        table
            .admit(&mut pool, &hit, num_computed, num_tokens, &mut Vec::new())
            .expect("the pool holds a turn");
        let (computed, len) = (num_computed as usize, tokens.len());
        model
            .admit(turn as usize, (0, &tokens), computed, len)
            .expect("the model's pool holds a turn");
        pool.end_step();
        model.end_step();
        table.publish(&mut pool, &tokens, num_tokens);
        model.publish(turn as usize, &tokens, len);
        assert_eq!(ids(table.blocks()), model.tables[&(turn as usize)].blocks);
        table.release(&mut pool);
        pool.release_root(root);
        model.release(turn as usize);
        assert_eq!(ids(&pool.idle_blocks().collect::<Vec<_>>()), model.idle_order());
        if (draw(3) == 0 || len > 20) && len < 40 {
            open.push(tokens);
        }
    }
    pool.check().expect("the invariants hold");
    assert_eq!(pool.num_evictions(), model.num_evictions);
    model
}

#[test]
fn learned_weights_agree_with_the_naive_model() {
    for degenerate_hash in [false, true] {
        let model = run(Eviction::Turn, degenerate_hash);
        assert!(model.events["weights adapted"] > 5, "{:?}", model.events);
        assert!(model.events["evicted out of turn"] > 100, "{:?}", model.events);
    }
}

#[test]
fn lru_evicts_in_turn() {
    for degenerate_hash in [false, true] {
        let model = run(Eviction::Lru, degenerate_hash);
        assert!(
            !model.events.contains_key("evicted out of turn"),
            "{:?}",
            model.events
        );
    }
}
