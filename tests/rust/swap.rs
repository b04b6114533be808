//! Preempted sequences in host memory: when they go there, how they come back, and who gives the room back.

use pagedkv::config::{CoreConfig, HostTier};
use pagedkv::ids::RequestId;
use pagedkv::sched::SamplingParams;
use pagedkv::sync::Stats;

use crate::simulator::{Simulator, config, greedy, prompt};

const PROMPT_LEN: usize = 8;
const NUM_TOKENS: u32 = 40;

/// Two prompts fit, but only one of the answers beside the other's beginning.
fn tight(num_host_blocks: u32) -> CoreConfig {
    CoreConfig {
        host: HostTier {
            num_blocks: num_host_blocks,
            ..HostTier::default()
        },
        ..config(16, 4)
    }
}

fn params() -> SamplingParams {
    SamplingParams {
        ignore_eos: true,
        ..greedy(NUM_TOKENS)
    }
}

fn submit(simulator: &Simulator, seed: u32) -> RequestId {
    simulator.submit(&prompt(seed, PROMPT_LEN), &params())
}

fn stats(simulator: &Simulator) -> Stats {
    simulator.scheduler.edge().stats()
}

/// Runs two requests until the second one is in host memory.
fn until_swapped(simulator: &mut Simulator) -> [RequestId; 2] {
    let ids = [submit(simulator, 1), submit(simulator, 2)];
    for _ in 0..200 {
        simulator.step().expect("two requests run");
        if stats(simulator).num_swapped == 1 {
            return ids;
        }
    }
    panic!("nobody was preempted");
}

fn finish(mut simulator: Simulator, ids: [RequestId; 2]) -> Stats {
    simulator.run(1000);
    for (seed, id) in (1..).zip(ids) {
        simulator.assert_complete((id, 0), &prompt(seed, PROMPT_LEN), &params());
    }
    simulator.assert_empty();
    stats(&simulator)
}

#[test]
fn a_victim_comes_back_from_host_memory() {
    for prefix_caching in [false, true] {
        let mut simulator = Simulator::new(CoreConfig {
            prefix_caching,
            ..tight(32)
        });
        let ids = until_swapped(&mut simulator);
        let view = simulator.scheduler.sequences().pop().unwrap();
        assert!(!view.running && view.request == ids[1]);
        assert_eq!(view.host_blocks.len() as u64, stats(&simulator).host_blocks_used);
        assert_eq!(
            stats(&simulator).swapped_out_blocks,
            stats(&simulator).host_blocks_used
        );
        let stats = finish(simulator, ids);
        assert_eq!(stats.recomputed_tokens, 0);
        assert!(stats.swapped_in_tokens > 0 && stats.swapped_in_blocks <= stats.swapped_out_blocks);
    }
}

#[test]
fn without_room_a_victim_is_computed_again() {
    for num_host_blocks in [0, 1] {
        let mut simulator = Simulator::new(CoreConfig {
            prefix_caching: false,
            ..tight(num_host_blocks)
        });
        let ids = [submit(&simulator, 1), submit(&simulator, 2)];
        simulator.run(1000);
        let stats = finish(simulator, ids);
        assert!(stats.preemptions > 0 && stats.recomputed_tokens > 0);
        assert_eq!((stats.swapped_out_blocks, stats.swapped_in_tokens), (0, 0));
    }
}

#[test]
fn what_is_dear_to_move_is_computed_again() {
    let host = HostTier {
        num_blocks: 32,
        compute_token_ns: 1,
        move_block_ns: 2,
    };
    let mut simulator = Simulator::new(CoreConfig { host, ..tight(0) });
    let ids = [submit(&simulator, 1), submit(&simulator, 2)];
    simulator.run(1000);
    let stats = finish(simulator, ids);
    assert!(stats.preemptions > 0);
    assert_eq!(stats.swapped_out_blocks, 0);
}

#[test]
fn what_the_cache_still_has_is_not_brought_in() {
    // The first one ends before anything of the second one is evicted.
    let mut simulator = Simulator::new(tight(32));
    let ids = until_swapped(&mut simulator);
    simulator.scheduler.edge().abort(ids[0]);
    simulator.run(1000);
    simulator.assert_complete((ids[1], 0), &prompt(2, PROMPT_LEN), &params());
    simulator.assert_empty();
    let stats = stats(&simulator);
    assert!(stats.recompute_hits > 0);
    assert!(
        stats.swapped_in_blocks < stats.swapped_out_blocks,
        "{} of {} blocks were brought in",
        stats.swapped_in_blocks,
        stats.swapped_out_blocks
    );
}

#[test]
fn blocks_that_others_hold_stay() {
    // Both prompts begin alike; the second one is the victim.
    let mut simulator = Simulator::new(tight(32));
    let alike = prompt(3, 12);
    let first = simulator.submit(&[alike.clone(), vec![7]].concat(), &params());
    simulator.step();
    let second = simulator.submit(&[alike, vec![9]].concat(), &params());
    while stats(&simulator).num_swapped == 0 {
        simulator.step().expect("two requests run");
    }
    let views = simulator.scheduler.sequences();
    let victim = views.iter().find(|view| view.request == second).unwrap();
    let num_computed = victim.num_tokens - 1;
    assert_eq!(
        victim.host_blocks.len() as u32,
        num_computed.div_ceil(4) - 3,
        "the three blocks of the beginning are not moved"
    );
    simulator.run(1000);
    for (id, last) in [(first, 7), (second, 9)] {
        let whole = [prompt(3, 12), vec![last]].concat();
        simulator.assert_complete((id, 0), &whole, &params());
    }
    simulator.assert_empty();
    assert!(stats(&simulator).swapped_in_tokens > 0);
}

#[test]
fn whoever_ends_in_host_memory_gives_it_back() {
    let mut simulator = Simulator::new(tight(32));
    let [first, second] = until_swapped(&mut simulator);
    simulator.scheduler.edge().abort(second);
    simulator.step();
    assert_eq!(
        (stats(&simulator).num_swapped, stats(&simulator).host_blocks_used),
        (0, 0)
    );
    simulator.run(1000);
    simulator.assert_complete((first, 0), &prompt(1, PROMPT_LEN), &params());

    let mut simulator = Simulator::new(tight(32));
    let [_, second] = until_swapped(&mut simulator);
    simulator.scheduler.edge().finish(second, 0, 2);
    simulator.step();
    assert_eq!(simulator.ended[&(second, 0)], 1);
    assert_eq!(stats(&simulator).host_blocks_used, 0);
    simulator.run(1000);
    simulator.assert_empty();
}

#[test]
fn a_reset_and_other_weights_leave_nothing_in_host_memory() {
    for exchange in [false, true] {
        let mut simulator = Simulator::new(tight(32));
        let ids = until_swapped(&mut simulator);
        if exchange {
            simulator.scheduler.set_model_epoch(1);
        } else {
            simulator.scheduler.reset_prefix_cache();
        }
        simulator.check();
        assert_eq!(
            (stats(&simulator).num_swapped, stats(&simulator).host_blocks_used),
            (0, 0)
        );
        let stats = finish(simulator, ids);
        assert!(stats.recomputed_tokens > 0);
    }
}

#[test]
fn what_was_computed_before_a_reset_is_not_moved() {
    let mut simulator = Simulator::new(tight(32));
    let ids = [submit(&simulator, 1), submit(&simulator, 2)];
    simulator.step();
    simulator.scheduler.reset_prefix_cache();
    while stats(&simulator).preemptions == 0 {
        simulator.step().expect("two requests run");
    }
    assert_eq!(stats(&simulator).swapped_out_blocks, 0);
    finish(simulator, ids);
}

#[test]
fn the_moves_of_a_failed_step_were_not_made() {
    // The step that preempts fails: a run that does not tells which one that is.
    let mut simulator = Simulator::new(tight(32));
    until_swapped(&mut simulator);
    let num_before = stats(&simulator).steps - 1;

    let mut simulator = Simulator::new(tight(32));
    let ids = [submit(&simulator, 1), submit(&simulator, 2)];
    for _ in 0..num_before {
        simulator.step();
    }
    let header = simulator.fail().unwrap();
    assert!(header.num_swaps_out > 0 && header.num_swaps_in == 0);
    assert_eq!(
        (stats(&simulator).num_swapped, stats(&simulator).host_blocks_used),
        (0, 0)
    );
    simulator.run(1000);
    assert_eq!(simulator.ended[&(ids[0], 0)], 4);
    simulator.assert_complete((ids[1], 0), &prompt(2, PROMPT_LEN), &params());
    simulator.assert_empty();
    let stats = stats(&simulator);
    assert_eq!(
        (stats.swapped_out_blocks, stats.swapped_in_blocks),
        (0, 0),
        "counted as not made"
    );
}

#[test]
fn a_failed_step_that_brings_blocks_in_loses_its_own_requests_alone() {
    let mut simulator = Simulator::new(tight(32));
    let ids = until_swapped(&mut simulator);
    while stats(&simulator).num_running == 1 {
        simulator.step().expect("the first request runs");
        if !simulator.ended.is_empty() {
            break;
        }
    }
    let header = simulator.fail().unwrap();
    assert!(header.num_swaps_in > 0, "the second request comes back");
    let now = stats(&simulator);
    assert!(now.swapped_out_blocks > 0);
    assert_eq!((now.swapped_in_blocks, now.swapped_in_tokens), (0, 0));
    simulator.run(1000);
    assert_eq!(simulator.ended[&(ids[1], 0)], 4);
    simulator.assert_complete((ids[0], 0), &prompt(1, PROMPT_LEN), &params());
    simulator.assert_empty();
}
