//! Prefix hits that end inside a block, through the scheduler: what is computed again, and that no token differs.

use pagedkv::config::CoreConfig;
use proptest::prelude::*;

use crate::simulator::{Simulator, config, greedy, prompt};

/// Room for a few thousand tokens in blocks of any size.
fn roomy(block_size: u32) -> CoreConfig {
    CoreConfig {
        max_num_batched_tokens: 512,
        max_model_len: 2048,
        ..config(4096 / block_size, block_size)
    }
}

#[test]
fn an_exact_repeat_computes_one_token() {
    for block_size in (0..=8).map(|shift| 1 << shift) {
        for len in [2, 3, 5, 16, 17, 63, 64, 255, 256, 257, 300, 511] {
            for max_tokens in [1, 2, 40] {
                let mut simulator = Simulator::new(roomy(block_size));
                let (prompt, params) = (prompt(1, len), greedy(max_tokens));
                simulator.submit(&prompt, &params);
                simulator.run(100);
                let again = simulator.submit(&prompt, &params);
                let header = simulator.step().unwrap();
                assert_eq!(header.num_tokens, 1, "{block_size} {len} {max_tokens}");
                simulator.run(100);
                assert_eq!(simulator.cached[&again] as usize, len - 1);
                simulator.assert_complete((again, 0), &prompt, &params);
                simulator.assert_empty();
            }
        }
    }
}

#[test]
fn a_turn_computes_what_is_new_and_one_token() {
    for block_size in [1, 4, 16, 64, 256] {
        let mut simulator = Simulator::new(roomy(block_size));
        let mut tokens = prompt(5, 37);
        let mut known = 0;
        for turn in 0..10 {
            let params = greedy(3 + turn * 7);
            let computed = simulator.scheduler.edge().stats().prompt_tokens;
            let id = simulator.submit(&tokens, &params);
            simulator.run(200);
            simulator.assert_complete((id, 0), &tokens, &params);
            let computed = simulator.scheduler.edge().stats().prompt_tokens - computed;
            let new = (tokens.len() - known) as u64;
            assert!(
                computed <= new + 1,
                "{computed} computed for {new}, blocks of {block_size}"
            );
            tokens.extend(&simulator.generated[&(id, 0)]);
            known = tokens.len();
            tokens.extend(prompt(turn, 11 + turn as usize));
        }
    }
}

#[test]
fn a_partial_hit_without_room_for_the_copy_is_not_used() {
    let mut simulator = Simulator::new(config(4, 4));
    let (prompt, params) = (prompt(1, 15), greedy(2));
    simulator.submit(&prompt, &params);
    simulator.run(10);
    let again = simulator.submit(&prompt, &params);
    let header = simulator.step().unwrap();
    assert_eq!((header.num_tokens, header.num_copies), (3, 0));
    simulator.run(10);
    assert_eq!(simulator.cached[&again], 12);
    simulator.assert_complete((again, 0), &prompt, &params);
    simulator.assert_empty();
}

#[test]
fn a_failed_step_publishes_no_tail() {
    let mut simulator = Simulator::new(config(16, 4));
    let (prompt, params) = (prompt(1, 14), greedy(1));
    simulator.submit(&prompt, &params);
    simulator.run(10);
    let published = simulator.scheduler.pool().num_published();
    // The copy of the partial block is part of the step that fails.
    let mut longer = prompt.clone();
    longer.push(31);
    simulator.submit(&longer, &params);
    let header = simulator.fail().unwrap();
    assert_eq!((header.num_tokens, header.num_copies), (1, 1));
    assert_eq!(simulator.scheduler.pool().num_published(), published);
    let again = simulator.submit(&longer, &params);
    simulator.run(10);
    simulator.assert_complete((again, 0), &longer, &params);
}

#[test]
fn without_partial_matching_whole_blocks_are_found() {
    let mut simulator = Simulator::new(CoreConfig {
        partial_matching: false,
        ..config(32, 4)
    });
    let (prompt, params) = (prompt(1, 14), greedy(9));
    for cached in [0, 12] {
        let id = simulator.submit(&prompt, &params);
        simulator.run(40);
        assert_eq!(simulator.cached[&id], cached);
        simulator.assert_complete((id, 0), &prompt, &params);
    }
}

proptest! {
    #[test]
    fn conversations_and_branches_give_lone_run_tokens(
        turns in prop::collection::vec((any::<usize>(), any::<usize>(), 1u32..12, 1u32..9), 1..25),
        num_blocks in 8u32..40,
        block_size in prop_oneof![Just(2u32), Just(4), Just(16), Just(64)],
        partial_matching in prop::bool::weighted(0.9),
    ) {
        let sizes = CoreConfig { partial_matching, ..config(num_blocks, block_size) };
        let mut simulator = Simulator::new(sizes);
        let mut texts: Vec<Vec<u32>> = vec![vec![1, 2, 3]];
        for (text, cut, more, max_tokens) in turns {
            // From anywhere within anything that was said before.
            let text = &texts[text % texts.len()];
            let mut tokens = text[..=cut % text.len()].to_vec();
            tokens.extend(prompt(more % 4, more as usize));
            let params = greedy(max_tokens);
            let edge = simulator.scheduler.edge();
            let Ok(id) = edge.submit(tokens.clone(), params.clone(), Vec::new()) else { continue };
            simulator.run(200);
            simulator.assert_complete((id, 0), &tokens, &params);
            simulator.assert_empty();
            tokens.extend(&simulator.generated[&(id, 0)]);
            texts.push(tokens);
        }
    }
}
