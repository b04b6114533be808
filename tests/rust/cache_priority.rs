//! What a request that says its blocks are worth little does to the order of eviction.

use pagedkv::block::Eviction;
use pagedkv::config::CoreConfig;
use pagedkv::sched::{CachePriority, SamplingParams};

use crate::simulator::{Simulator, config, greedy, prompt};

fn simulators(num_blocks: u32) -> [Simulator; 2] {
    [Eviction::Lru, Eviction::Turn].map(|eviction| {
        Simulator::new(CoreConfig {
            eviction,
            ..config(num_blocks, 4)
        })
    })
}

fn low(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        cache_priority: CachePriority::Low,
        ..steadily(max_tokens)
    }
}

fn steadily(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        ignore_eos: true,
        ..greedy(max_tokens)
    }
}

fn run(simulator: &mut Simulator, tokens: &[u32], params: &SamplingParams) {
    simulator.submit(tokens, params);
    simulator.run(100);
    simulator.assert_empty();
}

fn cached(simulator: &mut Simulator, tokens: &[u32]) -> u32 {
    simulator.scheduler.lookup(b"", tokens).num_cached_tokens
}

#[test]
fn what_is_worth_little_goes_before_what_is_older() {
    for mut simulator in simulators(16) {
        // Seven blocks each.
        run(&mut simulator, &prompt(1, 24), &steadily(2));
        run(&mut simulator, &prompt(2, 24), &low(2));
        assert_eq!(
            cached(&mut simulator, &prompt(2, 24)),
            23,
            "as long as there is room"
        );
        run(&mut simulator, &prompt(3, 24), &steadily(2));
        assert_eq!(cached(&mut simulator, &prompt(1, 24)), 23);
        // Its end went first.
        assert_eq!(cached(&mut simulator, &prompt(2, 24)), 8);
        assert_eq!(cached(&mut simulator, &prompt(3, 24)), 23);
    }
}

#[test]
fn what_it_found_keeps_its_worth() {
    for mut simulator in simulators(20) {
        run(&mut simulator, &prompt(1, 24), &steadily(2));
        run(&mut simulator, &prompt(1, 32), &low(2));
        run(&mut simulator, &prompt(2, 24), &steadily(2));
        run(&mut simulator, &prompt(3, 24), &steadily(2));
        assert_eq!(cached(&mut simulator, &prompt(1, 32)), 24);
    }
}

#[test]
fn what_others_go_on_from_keeps_its_worth() {
    for mut simulator in simulators(32) {
        let first = prompt(1, 24);
        simulator.submit(&first, &low(12));
        simulator.step();
        // It finds the prompt, goes on otherwise, and ends before or after the other one.
        for max_tokens in [1, 20] {
            let mut other = first.clone();
            other.extend([35, 36, 37, 38, 30 + max_tokens / 10]);
            simulator.submit(&other, &steadily(max_tokens));
        }
        simulator.run(100);
        simulator.assert_empty();
        // Whatever is evicted, nothing is evicted before what follows it: the simulator checks every step.
        for seed in 2..8 {
            let before = cached(&mut simulator, &first);
            run(&mut simulator, &prompt(seed, 20), &low(2));
            run(&mut simulator, &prompt(seed + 1, 9), &steadily(1));
            assert_eq!((before, cached(&mut simulator, &first)), (23, 23));
        }
        run(&mut simulator, &prompt(9, 100), &steadily(20));
        assert!(cached(&mut simulator, &first) < 23);
    }
}

#[test]
fn samples_and_ends_of_all_kinds() {
    for mut simulator in simulators(24) {
        for round in 0..12 {
            let params = SamplingParams {
                n: 1 + round % 4,
                ..low(1 + round)
            };
            let id = simulator.submit(&prompt(round % 3, 10 + round as usize), &params);
            simulator.submit(&prompt(round % 5, 22), &steadily(7));
            for _ in 0..round % 5 {
                simulator.step();
            }
            match round % 3 {
                0 => drop(simulator.scheduler.edge().abort(id)),
                1 => drop(simulator.fail()),
                _ => drop(simulator.scheduler.reset_prefix_cache()),
            }
            simulator.run(100);
            simulator.assert_empty();
        }
    }
}
