//! Why prompts were found in the cache as far as they were, through the scheduler.

use pagedkv::block::Removal;
use pagedkv::config::CoreConfig;
use pagedkv::ids::RequestId;
use pagedkv::sched::{Explanation, SamplingParams, Verdict};

use crate::simulator::{Simulator, config, greedy, prompt};

fn submit(simulator: &Simulator, tokens: &[u32], params: &SamplingParams, salt: &[u8]) -> RequestId {
    let edge = simulator.scheduler.edge();
    edge.submit(tokens.to_vec(), params.clone(), salt.to_vec())
        .unwrap()
}

/// Runs a prompt to its end and says what was found out about it.
fn run(simulator: &mut Simulator, tokens: &[u32], salt: &[u8]) -> Explanation {
    let id = submit(simulator, tokens, &greedy(2), salt);
    simulator.run(100);
    let explanation = simulator.scheduler.explain(id, salt).unwrap().clone();
    assert_eq!(explanation.prompt_len as usize, tokens.len());
    assert_eq!(explanation.num_cached, simulator.cached[&id]);
    explanation
}

fn verdict(simulator: &mut Simulator, tokens: &[u32], salt: &[u8]) -> (Verdict, u32) {
    let explanation = run(simulator, tokens, salt);
    (explanation.verdict, explanation.token_index)
}

#[test]
fn what_was_never_there_was_never_seen_and_then_hits() {
    let mut simulator = Simulator::new(config(64, 4));
    let tokens = prompt(1, 22);
    assert_eq!(verdict(&mut simulator, &tokens, b""), (Verdict::NeverSeen, 0));
    assert_eq!(verdict(&mut simulator, &tokens, b""), (Verdict::Hit, 21));
    // Going on where the cache ends is no miss either.
    let mut longer = tokens.clone();
    longer.extend([35, 36, 37]);
    let explanation = run(&mut simulator, &longer[..23], b"");
    assert_eq!((explanation.verdict, explanation.num_cached), (Verdict::Hit, 22));
    assert_eq!(
        verdict(&mut simulator, &prompt(2, 22), b""),
        (Verdict::NeverSeen, 0)
    );
}

#[test]
fn a_divergence_is_shown() {
    for block_size in [2, 4, 16, 64] {
        let mut simulator = Simulator::new(config(512 / block_size, block_size));
        let mut tokens = prompt(1, 60);
        run(&mut simulator, &tokens, b"");
        tokens[41] = 39;
        let explanation = run(&mut simulator, &tokens, b"");
        assert_eq!(
            (explanation.verdict, explanation.token_index),
            (Verdict::Diverged, 41)
        );
        assert_eq!(explanation.before, tokens[9..41]);
        assert_eq!(
            (explanation.held[0], explanation.came[0]),
            (prompt(1, 60)[41], 39)
        );
        assert_eq!(explanation.evicted, None);
    }
}

#[test]
fn an_eviction_has_an_age_and_a_reason() {
    let mut simulator = Simulator::new(config(12, 4));
    let tokens = prompt(1, 22);
    simulator.scheduler.set_time(1_000);
    run(&mut simulator, &tokens, b"");
    simulator.scheduler.set_time(5_000);
    run(&mut simulator, &prompt(2, 44), b"");
    simulator.scheduler.set_time(9_500);
    let explanation = run(&mut simulator, &tokens, b"");
    assert_eq!(
        (explanation.verdict, explanation.token_index),
        (Verdict::Evicted, 0)
    );
    assert_eq!(explanation.evicted, Some((4_500, Removal::Capacity)));
    simulator.scheduler.reset_prefix_cache();
    simulator.scheduler.set_time(10_000);
    let explanation = run(&mut simulator, &tokens, b"");
    assert_eq!(explanation.evicted, Some((500, Removal::Reset)));
    // A prompt that fills no block is remembered by itself.
    run(&mut simulator, &[31, 32, 33], b"");
    simulator.scheduler.reset_prefix_cache();
    let explanation = run(&mut simulator, &[31, 32, 33], b"");
    assert_eq!(explanation.verdict, Verdict::Evicted);
    assert_eq!(explanation.evicted, Some((0, Removal::Reset)));
}

#[test]
fn a_divergence_from_what_is_gone_is_shown_too() {
    let mut simulator = Simulator::new(config(8, 4));
    let mut tokens = prompt(1, 16);
    run(&mut simulator, &tokens, b"");
    // Evicts the tail and the last block, but not the first ones.
    run(&mut simulator, &prompt(2, 19), b"");
    tokens[12] = 38;
    let explanation = run(&mut simulator, &tokens, b"");
    assert_eq!(
        (explanation.verdict, explanation.token_index),
        (Verdict::Diverged, 12)
    );
    assert_eq!(
        (&explanation.held[..], &explanation.came[..]),
        (&prompt(1, 16)[12..], &tokens[12..])
    );
}

#[test]
fn another_salt_has_it_and_nobody_sees_whose() {
    let mut simulator = Simulator::new(config(64, 4));
    let tokens = prompt(1, 22);
    run(&mut simulator, &tokens, b"a");
    let explanation = run(&mut simulator, &tokens, b"b");
    assert_eq!(
        (explanation.verdict, explanation.num_cached),
        (Verdict::OtherSalt, 0)
    );
    assert!(explanation.held.is_empty() && explanation.before.is_empty());
    let id = submit(&simulator, &tokens, &greedy(1), b"a");
    assert_eq!(simulator.scheduler.explain(id, b"a"), None, "not admitted yet");
    simulator.run(10);
    assert!(simulator.scheduler.explain(id, b"b").is_none());
    assert!(simulator.scheduler.explain(id, b"a").is_some());
}

#[test]
fn other_weights_have_it() {
    let mut simulator = Simulator::new(config(64, 4));
    let tokens = prompt(1, 22);
    run(&mut simulator, &tokens, b"");
    simulator.scheduler.set_model_epoch(1);
    assert_eq!(verdict(&mut simulator, &tokens, b""), (Verdict::OtherEpoch, 0));
    assert_eq!(verdict(&mut simulator, &tokens, b""), (Verdict::Hit, 21));
    // What the first weights computed is still there for them.
    simulator.scheduler.set_model_epoch(0);
    assert_eq!(verdict(&mut simulator, &tokens, b""), (Verdict::Hit, 21));
}

#[test]
fn what_another_request_computes_is_not_computed_yet() {
    let mut simulator = Simulator::new(CoreConfig {
        max_num_batched_tokens: 8,
        ..config(64, 16)
    });
    let tokens = prompt(1, 30);
    let first = submit(&simulator, &tokens, &greedy(4), b"");
    simulator.step();
    let second = submit(&simulator, &tokens, &greedy(4), b"");
    simulator.run(100);
    let verdict = |id| simulator.scheduler.explain(id, b"").unwrap().verdict;
    assert_eq!(
        (verdict(first), verdict(second)),
        (Verdict::NeverSeen, Verdict::NotComputedYet)
    );
}

#[test]
fn what_cannot_be_found_bypasses_the_cache() {
    let mut simulator = Simulator::new(config(64, 4));
    assert_eq!(run(&mut simulator, &[7], b"").verdict, Verdict::Bypassed);
    let mut simulator = Simulator::new(CoreConfig {
        prefix_caching: false,
        ..config(64, 4)
    });
    assert_eq!(
        run(&mut simulator, &prompt(1, 22), b"").verdict,
        Verdict::Bypassed
    );
    let mut simulator = Simulator::new(CoreConfig {
        partial_matching: false,
        ..config(64, 4)
    });
    assert_eq!(run(&mut simulator, &prompt(1, 4), b"").verdict, Verdict::Bypassed);
    assert_eq!(
        run(&mut simulator, &prompt(2, 5), b"").verdict,
        Verdict::NeverSeen
    );
}

#[test]
fn memory_is_bounded() {
    let mut simulator = Simulator::new(config(64, 4));
    let first = submit(&simulator, &[1, 2], &greedy(1), b"");
    simulator.run(10);
    for number in 0..1024 {
        assert!(simulator.scheduler.explain(first, b"").is_some());
        submit(&simulator, &[number, 3], &greedy(1), b"");
        simulator.run(10);
    }
    assert!(simulator.scheduler.explain(first, b"").is_none());
}
