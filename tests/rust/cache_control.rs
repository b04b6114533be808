//! What is asked of the whole cache against the simulator: resets, other weights, other tenants, lookups.

use pagedkv::config::CoreConfig;
use pagedkv::sched::{HoldKind, HoldRequest, Obstacle, SamplingParams};

use crate::beams::beams;
use crate::holds::{TTL_MS, key, pin, run_keeping, session, sizes, steadily, submit_keeping, view};
use crate::simulator::{Simulator, config, prompt};

#[test]
fn a_reset_leaves_sessions_their_tokens_and_pins_nothing() {
    let mut simulator = Simulator::new(sizes(80, 4, 50));
    let whole = run_keeping(&mut simulator, session("s"), &prompt(1, 13), 4, false);
    run_keeping(&mut simulator, pin("p"), &prompt(2, 13), 1, false);
    let (running, running_prompt) =
        submit_keeping(&mut simulator, session("t"), &prompt(3, 13), &steadily(9), false).unwrap();
    let (pinning, _) = submit_keeping(&mut simulator, pin("q"), &prompt(4, 90), &steadily(1), false).unwrap();
    simulator.step();
    let counts = simulator.scheduler.reset_prefix_cache();
    assert_eq!((counts.pins, counts.sessions), (1, 1));
    assert!(counts.blocks >= 7);
    simulator.check();
    let held = view(&mut simulator, &session("s"));
    assert_eq!((held.num_tokens, held.num_blocks), (17, 0));
    simulator.run(100);
    // Who ran was not disturbed, but what the reset should have forgotten is not kept.
    simulator.assert_complete((running, 0), &running_prompt, &steadily(9));
    assert_eq!(simulator.ended[&(pinning, 0)], 2);
    assert_eq!(view(&mut simulator, &session("t")).num_blocks, 0);
    assert!(simulator.scheduler.holds(b"", HoldKind::Pin).is_empty());
    simulator.assert_empty();
    let (id, _) = submit_keeping(&mut simulator, session("s"), &[1], &steadily(2), true).unwrap();
    simulator.run(100);
    assert_eq!(simulator.cached[&id], 0);
    let continued = simulator.scheduler.hold_tokens(&session("s")).unwrap();
    assert!(continued.starts_with(&whole));
    assert_eq!(view(&mut simulator, &session("s")).num_blocks, 5);
}

#[test]
fn other_weights_find_nothing() {
    let mut simulator = Simulator::new(sizes(40, 4, 20));
    let tokens = prompt(1, 13);
    run_keeping(&mut simulator, session("s"), &tokens, 4, false);
    run_keeping(&mut simulator, pin("p"), &tokens, 1, false);
    let (running, running_prompt) =
        submit_keeping(&mut simulator, session("t"), &prompt(3, 13), &steadily(9), false).unwrap();
    simulator.step();
    simulator.scheduler.set_model_epoch(1);
    simulator.check();
    assert_eq!(view(&mut simulator, &session("s")).num_blocks, 0);
    assert!(simulator.scheduler.hold(&pin("p")).is_err());
    for text in [&tokens, &running_prompt] {
        assert_eq!(simulator.scheduler.lookup(b"", text).num_cached_tokens, 0);
    }
    simulator.run(100);
    simulator.assert_complete((running, 0), &running_prompt, &steadily(9));
    assert_eq!(view(&mut simulator, &session("t")).num_blocks, 0);
    let before = simulator.scheduler.edge().stats().prefix_hits;
    let id = simulator.submit(&tokens, &steadily(2));
    simulator.run(100);
    assert_eq!(simulator.cached[&id], 0);
    assert_eq!(simulator.scheduler.edge().stats().prefix_hits, before);
    // The old weights come back: what they computed is there.
    simulator.scheduler.set_model_epoch(0);
    assert_eq!(simulator.scheduler.lookup(b"", &tokens).num_cached_tokens, 12);
}

#[test]
fn tenants_have_names_of_their_own() {
    let mut simulator = Simulator::new(sizes(60, 4, 40));
    let salts: [&[u8]; 3] = [b"", b"a", b"b"];
    for (seed, salt) in (1..).zip(salts) {
        for kind in [HoldKind::Pin, HoldKind::Session] {
            run_keeping(&mut simulator, key(kind, salt, "x"), &prompt(seed, 12), 1, false);
        }
    }
    for (seed, salt) in (1..).zip(salts) {
        for kind in [HoldKind::Pin, HoldKind::Session] {
            assert_eq!(simulator.scheduler.holds(salt, kind).len(), 1);
            let tokens = simulator.scheduler.hold_tokens(&key(kind, salt, "x")).unwrap();
            assert!(tokens.starts_with(&prompt(seed, 12)));
        }
    }
    simulator
        .scheduler
        .delete_hold(&key(HoldKind::Session, b"a", "x"))
        .unwrap();
    assert!(
        simulator
            .scheduler
            .delete_hold(&key(HoldKind::Session, b"a", "x"))
            .is_err()
    );
    assert_eq!(simulator.scheduler.holds(b"", HoldKind::Session).len(), 1);
    assert_eq!(simulator.scheduler.holds(b"b", HoldKind::Session).len(), 1);
    // A promise is good for the tenant that opened it.
    let request = HoldRequest {
        key: key(HoldKind::Session, b"a", "mine"),
        ttl_ms: TTL_MS,
        tokens: &[1, 2, 3],
        max_tokens: 2,
        append: false,
    };
    let (promise, whole) = simulator.scheduler.promise_hold(request).unwrap();
    let params = SamplingParams {
        promise: Some(promise),
        ..steadily(2)
    };
    simulator
        .scheduler
        .edge()
        .submit(whole, params, b"b".to_vec())
        .unwrap();
    simulator.run(100);
    assert!(
        simulator
            .scheduler
            .hold(&key(HoldKind::Session, b"a", "mine"))
            .is_err()
    );
    assert!(
        simulator
            .scheduler
            .hold(&key(HoldKind::Session, b"b", "mine"))
            .is_err()
    );
}

#[test]
fn without_prefix_caching_a_session_is_its_tokens() {
    let mut simulator = Simulator::new(CoreConfig {
        prefix_caching: false,
        max_model_len: 96,
        ..config(24, 4)
    });
    let whole = run_keeping(&mut simulator, session("s"), &prompt(1, 13), 4, false);
    let held = view(&mut simulator, &session("s"));
    assert_eq!((held.num_tokens, held.num_blocks), (17, 0));
    let longer = run_keeping(&mut simulator, session("s"), &[5], 4, true);
    assert!(longer.starts_with(&whole));
    let refused = submit_keeping(&mut simulator, pin("p"), &prompt(1, 13), &steadily(1), false).unwrap_err();
    assert!(refused.to_string().contains("enable_prefix_caching is off"));
    simulator.assert_empty();
}

#[test]
fn a_lookup_says_what_an_admission_would_do() {
    let mut simulator = Simulator::new(CoreConfig {
        max_num_seqs: 2,
        ..sizes(24, 4, 8)
    });
    let tokens = prompt(1, 16);
    let fresh = simulator.scheduler.lookup(b"", &tokens);
    assert_eq!(
        (fresh.num_cached_tokens, fresh.blocks_needed, fresh.obstacle),
        (0, 4, None)
    );
    assert_eq!(fresh.blocks_available, 24);
    run_keeping(&mut simulator, pin("p"), &tokens, 1, false);
    let hit = simulator.scheduler.lookup(b"", &tokens);
    // The last token is computed again, in a copy of its block.
    assert_eq!(
        (hit.num_cached_tokens, hit.blocks_needed, hit.blocks_available),
        (15, 1, 20)
    );
    assert_eq!(simulator.scheduler.lookup(b"other", &tokens).num_cached_tokens, 0);
    let longer = simulator
        .scheduler
        .lookup(b"", &[tokens.as_slice(), &prompt(5, 50)].concat());
    assert_eq!(longer.obstacle, Some(Obstacle::TooLong));
    simulator.submit(&prompt(2, 60), &steadily(4));
    simulator.step();
    let tight = simulator.scheduler.lookup(b"", &prompt(3, 30));
    assert_eq!(tight.obstacle, Some(Obstacle::NotEnoughBlocks));
    assert!(tight.blocks_needed > tight.blocks_available);
    simulator.submit(&prompt(2, 4), &steadily(4));
    simulator.step();
    let full = simulator.scheduler.lookup(b"", &tokens).obstacle;
    assert_eq!(full, Some(Obstacle::TooManySequences));
    simulator.submit(&prompt(4, 4), &steadily(4));
    simulator.step();
    assert_eq!(
        simulator.scheduler.lookup(b"", &tokens).obstacle,
        Some(Obstacle::OthersWait)
    );
    simulator.run(100);
}

#[test]
fn a_lookup_counts_the_places_of_a_search_that_has_not_forked() {
    let mut simulator = Simulator::new(CoreConfig {
        max_num_seqs: 2,
        max_num_batched_tokens: 8,
        ..sizes(24, 4, 8)
    });
    simulator.submit(&prompt(1, 16), &beams(2, 4));
    simulator.step();
    assert_eq!(simulator.scheduler.edge().stats().num_running, 1);
    let full = simulator.scheduler.lookup(b"", &prompt(2, 4)).obstacle;
    assert_eq!(full, Some(Obstacle::TooManySequences));
    simulator.run(100);
    assert_eq!(simulator.scheduler.lookup(b"", &prompt(2, 4)).obstacle, None);
}
