//! Pins and sessions against the simulator: what they keep, what they cost, how they end.

use pagedkv::block::{Share, WEIGHT_ONE};
use pagedkv::config::CoreConfig;
use pagedkv::error::{HoldError, SubmitError};
use pagedkv::ids::RequestId;
use pagedkv::sched::{BeamRows, HoldKey, HoldKind, HoldRequest, HoldView, SamplingParams};

use crate::simulator::{Simulator, config, greedy, prompt};

pub(crate) const TTL_MS: u64 = 10_000;

pub(crate) fn key(kind: HoldKind, salt: &[u8], name: &str) -> HoldKey {
    HoldKey {
        salt: salt.to_vec(),
        kind,
        name: name.to_owned(),
    }
}

pub(crate) fn session(name: &str) -> HoldKey {
    key(HoldKind::Session, b"", name)
}

pub(crate) fn pin(name: &str) -> HoldKey {
    key(HoldKind::Pin, b"", name)
}

/// As many blocks as `config` has, of which holds may have some.
pub(crate) fn sizes(num_blocks: u32, block_size: u32, max_pinned_blocks: u32) -> CoreConfig {
    CoreConfig {
        max_model_len: (num_blocks - max_pinned_blocks) * block_size,
        max_pinned_blocks,
        ..config(num_blocks, block_size)
    }
}

/// Submits a request that leaves a hold behind, and returns the whole prompt. A refusal breaks the promise.
pub(crate) fn submit_keeping(
    simulator: &mut Simulator,
    key: HoldKey,
    tokens: &[u32],
    params: &SamplingParams,
    append: bool,
) -> Result<(RequestId, Vec<u32>), HoldError> {
    let salt = key.salt.clone();
    let request = HoldRequest {
        key,
        ttl_ms: TTL_MS,
        tokens,
        max_tokens: params.max_tokens,
        append,
    };
    let (promise, whole) = simulator.scheduler.promise_hold(request)?;
    let params = SamplingParams {
        promise: Some(promise),
        ..params.clone()
    };
    let submitted = simulator.scheduler.edge().submit(whole.clone(), params, salt);
    match submitted {
        Ok(id) => Ok((id, whole)),
        Err(error) => {
            simulator.scheduler.break_promise(promise);
            Err(HoldError::Invalid(error.to_string()))
        }
    }
}

/// The same, run to its end.
pub(crate) fn run_keeping(
    simulator: &mut Simulator,
    key: HoldKey,
    tokens: &[u32],
    max_tokens: u32,
    append: bool,
) -> Vec<u32> {
    let params = steadily(max_tokens);
    let (id, mut whole) = submit_keeping(simulator, key, tokens, &params, append).unwrap();
    simulator.run(1000);
    simulator.assert_complete((id, 0), &whole, &params);
    whole.extend(&simulator.generated[&(id, 0)]);
    whole
}

pub(crate) fn steadily(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        ignore_eos: true,
        ..greedy(max_tokens)
    }
}

pub(crate) fn view(simulator: &mut Simulator, key: &HoldKey) -> HoldView {
    simulator.check();
    simulator.scheduler.hold(key).unwrap()
}

fn pinned(simulator: &Simulator) -> u64 {
    simulator.scheduler.edge().stats().blocks_pinned
}

/// Requests with nothing in common, more than the pool holds.
fn flood(simulator: &mut Simulator, seed: u32) {
    let num_blocks = simulator.scheduler.pool().num_blocks();
    let size = simulator.scheduler.pool().block_size();
    for number in 0..3 * num_blocks / 4 {
        let tokens: Vec<u32> = (0..4 * size)
            .map(|at| 100 + (seed * 1000 + number) * 50 + at % 50)
            .collect();
        simulator.submit(&tokens, &steadily(1));
        simulator.run(1000);
    }
}

#[test]
fn ten_turns_compute_what_is_new() {
    for block_size in [16, 64, 256] {
        for by_append in [true, false] {
            let mut simulator = Simulator::new(CoreConfig {
                max_num_batched_tokens: 4096,
                ..sizes(2048 / block_size * 4, block_size, 2048 / block_size * 2)
            });
            let mut known: Vec<u32> = Vec::new();
            for turn in 0..10 {
                let new = prompt(turn, 70 + 10 * turn as usize);
                let before = simulator.scheduler.edge().stats().scheduled_tokens;
                let (append, tokens) = if by_append && turn > 0 {
                    (true, new.clone())
                } else {
                    (false, [known.as_slice(), &new].concat())
                };
                let whole = run_keeping(&mut simulator, session("one"), &tokens, 9, append);
                let num_computed = simulator.scheduler.edge().stats().scheduled_tokens - before;
                // Of the nine generated tokens, the last is not computed. The rest of a block that the answer did not
                // fill is computed again.
                let num_recomputed = num_computed - 8;
                let bound = new.len() as u64 + 1;
                assert!(
                    num_recomputed <= bound,
                    "turn {turn}: {num_recomputed} of {bound}"
                );
                assert_eq!(simulator.scheduler.hold_tokens(&session("one")).unwrap(), whole);
                known = whole;
            }
        }
    }
}

#[test]
fn a_session_outlives_any_pressure_until_it_expires() {
    let mut simulator = Simulator::new(sizes(24, 4, 8));
    let whole = run_keeping(&mut simulator, session("kept"), &prompt(1, 21), 6, false);
    let held = view(&mut simulator, &session("kept"));
    assert_eq!((held.num_tokens, held.num_blocks), (27, 7));
    flood(&mut simulator, 1);
    let id = submit_keeping(&mut simulator, session("kept"), &[7], &steadily(2), true)
        .unwrap()
        .0;
    simulator.run(100);
    assert_eq!(simulator.cached[&id], 26);
    let now = TTL_MS + 5;
    simulator.scheduler.set_time(5);
    run_keeping(&mut simulator, session("kept"), &[], 1, true);
    simulator.scheduler.set_time(now - 1);
    assert_eq!(view(&mut simulator, &session("kept")).expires_at_ms, now);
    let num_idle = simulator.scheduler.pool().num_idle();
    simulator.scheduler.set_time(now);
    simulator.check();
    assert!(matches!(
        simulator.scheduler.hold(&session("kept")),
        Err(HoldError::NotFound { .. })
    ));
    simulator.assert_empty();
    // What has expired is found until the room is needed.
    assert!(simulator.scheduler.pool().num_idle() > num_idle);
    let id = simulator.submit(&whole, &steadily(1));
    simulator.run(100);
    assert_eq!(simulator.cached[&id], 26);
    flood(&mut simulator, 2);
    let id = simulator.submit(&whole, &steadily(1));
    simulator.run(100);
    assert_eq!(simulator.cached[&id], 0);
}

#[test]
fn a_pin_is_refreshed_by_hits_and_nothing_else() {
    let mut simulator = Simulator::new(sizes(24, 4, 8));
    let tokens = prompt(1, 18);
    simulator.scheduler.set_time(1000);
    run_keeping(&mut simulator, pin("p"), &tokens, 1, false);
    let held = view(&mut simulator, &pin("p"));
    assert_eq!(
        (held.num_tokens, held.num_blocks, held.expires_at_ms),
        (18, 5, 1000 + TTL_MS)
    );
    simulator.scheduler.set_time(2000);
    flood(&mut simulator, 1);
    assert_eq!(view(&mut simulator, &pin("p")).expires_at_ms, 1000 + TTL_MS);
    let question = [tokens.as_slice(), &[9, 9, 9]].concat();
    let id = simulator.submit(&question, &steadily(3));
    simulator.run(100);
    assert_eq!(simulator.cached[&id], 18);
    assert_eq!(view(&mut simulator, &pin("p")).expires_at_ms, 2000 + TTL_MS);
    // A clock that goes back changes nothing.
    simulator.scheduler.set_time(10);
    assert_eq!(view(&mut simulator, &pin("p")).expires_at_ms, 2000 + TTL_MS);
    simulator.scheduler.set_time(2000 + TTL_MS);
    assert!(simulator.scheduler.hold(&pin("p")).is_err());
    simulator.check();
    simulator.assert_empty();
}

#[test]
fn what_is_shared_counts_once() {
    let mut simulator = Simulator::new(sizes(24, 4, 8));
    let tokens = prompt(1, 24);
    run_keeping(&mut simulator, pin("a"), &tokens, 1, false);
    run_keeping(&mut simulator, pin("b"), &tokens, 1, false);
    assert_eq!(pinned(&simulator), 6);
    let longer = [tokens.as_slice(), &[1, 2, 3]].concat();
    run_keeping(&mut simulator, session("c"), &longer, 2, false);
    assert_eq!(pinned(&simulator), 7);
    for name in ["d", "e", "f"] {
        let fork = simulator
            .scheduler
            .fork_session(&session("c"), name, None)
            .unwrap();
        assert_eq!((fork.num_tokens, fork.num_blocks), (29, 7));
        simulator.check();
    }
    assert_eq!(pinned(&simulator), 7);
    simulator.scheduler.delete_hold(&pin("a")).unwrap();
    assert_eq!(pinned(&simulator), 7);
    for name in ["c", "d", "e", "f"] {
        simulator.scheduler.delete_hold(&session(name)).unwrap();
        simulator.check();
    }
    assert_eq!(pinned(&simulator), 6);
    simulator.scheduler.delete_hold(&pin("b")).unwrap();
    simulator.assert_empty();
}

#[test]
fn forks_go_on_by_themselves() {
    let mut simulator = Simulator::new(sizes(40, 4, 20));
    let whole = run_keeping(&mut simulator, session("a"), &prompt(1, 22), 8, false);
    simulator
        .scheduler
        .fork_session(&session("a"), "b", Some(77))
        .unwrap();
    assert_eq!(view(&mut simulator, &session("b")).expires_at_ms, 77);
    let a = run_keeping(&mut simulator, session("a"), &[3, 4], 5, true);
    let b = run_keeping(&mut simulator, session("b"), &[5, 6, 7], 5, true);
    assert!(a.starts_with(&whole) && b.starts_with(&whole));
    assert_eq!(simulator.scheduler.hold_tokens(&session("a")).unwrap(), a);
    assert_eq!(simulator.scheduler.hold_tokens(&session("b")).unwrap(), b);
    let exists = simulator
        .scheduler
        .fork_session(&session("a"), "b", None)
        .unwrap_err();
    assert_eq!(
        exists.to_string(),
        "there is a session \"b\" already; delete it first"
    );
    let unknown = simulator
        .scheduler
        .fork_session(&session("x"), "y", None)
        .unwrap_err();
    assert_eq!(
        unknown.to_string(),
        "there is no session \"x\"; it may have expired"
    );
}

#[test]
fn the_budget_is_kept_and_said() {
    let mut simulator = Simulator::new(sizes(24, 4, 8));
    run_keeping(&mut simulator, session("a"), &prompt(1, 15), 1, false);
    let refused =
        submit_keeping(&mut simulator, session("b"), &prompt(2, 20), &steadily(2), false).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the session needs up to 6 more blocks of 4 tokens, but of the 8 that pins and sessions may have together \
         (max_pinned_blocks) 4 are held and 0 promised, so 4 are left"
    );
    // A promise counts until its request ends, whichever way that is.
    let (id, _) = submit_keeping(&mut simulator, pin("c"), &prompt(2, 16), &steadily(1), false).unwrap();
    assert_eq!(simulator.scheduler.edge().stats().blocks_promised, 4);
    assert!(submit_keeping(&mut simulator, pin("d"), &prompt(3, 1), &steadily(1), false).is_err());
    simulator.scheduler.edge().abort(id);
    simulator.run(10);
    assert_eq!(simulator.scheduler.edge().stats().blocks_promised, 0);
    assert!(simulator.scheduler.hold(&pin("c")).is_err());
    run_keeping(&mut simulator, pin("d"), &prompt(3, 16), 1, false);
    // The session's own blocks do not count against what takes their place.
    run_keeping(&mut simulator, session("a"), &prompt(4, 15), 1, false);
    assert_eq!(pinned(&simulator), 8);
    assert!(submit_keeping(&mut simulator, session("a"), &prompt(4, 16), &steadily(2), false).is_err());
}

#[test]
fn one_tenant_cannot_take_the_whole_budget() {
    // A tenant that was named is one whichever salts it uses; of the others each salt is one.
    let named = Share {
        salt: b"acme/".to_vec(),
        is_prefix: true,
        floor: 0,
        weight: WEIGHT_ONE,
    };
    let mut simulator = Simulator::new(CoreConfig {
        tenants: vec![named],
        max_pinned_blocks_per_tenant: Some(4),
        ..sizes(24, 4, 10)
    });
    let pin_of = |salt: &[u8], name: &str| key(HoldKind::Pin, salt, name);
    run_keeping(&mut simulator, pin_of(b"acme/1", "a"), &prompt(1, 12), 1, false);
    let mut refused = |salt: &[u8], len: usize| {
        submit_keeping(
            &mut simulator,
            pin_of(salt, "b"),
            &prompt(2, len),
            &steadily(1),
            false,
        )
        .unwrap_err()
        .to_string()
    };
    let message = "the pin needs up to 2 more blocks of 4 tokens, but of the 4 that a tenant's pins and sessions may \
                   have (max_pinned_blocks_per_tenant) 3 are held and 0 promised, so 1 are left";
    assert_eq!(refused(b"acme/2", 8), message);
    assert!(
        refused(b"other", 17).contains("needs up to 5 more blocks of 4 tokens, but of the 4 that a tenant's")
    );
    // What it has already, and what it gives up, does not count against it.
    run_keeping(&mut simulator, pin_of(b"acme/1", "b"), &prompt(1, 16), 1, false);
    run_keeping(&mut simulator, pin_of(b"other", "a"), &prompt(1, 16), 1, false);
    assert_eq!(pinned(&simulator), 8);
    let message = submit_keeping(
        &mut simulator,
        pin_of(b"more", "a"),
        &prompt(3, 12),
        &steadily(1),
        false,
    )
    .unwrap_err()
    .to_string();
    assert!(
        message.contains("of the 10 that pins and sessions may have together"),
        "{message}"
    );
    simulator.scheduler.delete_hold(&pin_of(b"acme/1", "b")).unwrap();
    simulator.scheduler.delete_hold(&pin_of(b"acme/1", "a")).unwrap();
    run_keeping(&mut simulator, pin_of(b"acme/3", "a"), &prompt(4, 16), 1, false);

    let too_much = CoreConfig {
        max_pinned_blocks_per_tenant: Some(11),
        ..sizes(24, 4, 10)
    };
    assert_eq!(
        too_much.validate().unwrap_err().to_string(),
        "max_pinned_blocks_per_tenant is 11, allowed: 0 to 10, which is max_pinned_blocks"
    );
}

#[test]
fn the_longest_request_fits_beside_a_spent_budget() {
    let mut simulator = Simulator::new(sizes(24, 4, 8));
    run_keeping(&mut simulator, pin("a"), &prompt(1, 17), 1, false);
    run_keeping(&mut simulator, session("b"), &prompt(2, 10), 2, false);
    assert_eq!(pinned(&simulator), 8);
    let (long, params) = (prompt(3, 40), steadily(24));
    let ids = [1, 2].map(|seed| {
        let params = SamplingParams {
            seed,
            ..params.clone()
        };
        (simulator.submit(&long, &params), params)
    });
    simulator.run(1000);
    for (id, params) in ids {
        simulator.assert_complete((id, 0), &long, &params);
    }
    let refused = simulator.scheduler.edge().submit(long, steadily(25), Vec::new());
    assert!(matches!(refused, Err(SubmitError::Invalid(_))));
    let too_much = CoreConfig {
        max_pinned_blocks: 9,
        ..sizes(24, 4, 8)
    };
    let message = too_much.validate().unwrap_err().to_string();
    assert!(
        message.starts_with("max_pinned_blocks is 9, allowed: 0 to 8"),
        "{message}"
    );
    let default = |sizes: CoreConfig| sizes.with_default_pin_budget().max_pinned_blocks;
    assert_eq!(default(sizes(24, 4, 8)), 6);
    assert_eq!(default(sizes(24, 4, 2)), 2);
    assert_eq!(
        default(CoreConfig {
            prefix_caching: false,
            ..sizes(24, 4, 8)
        }),
        0
    );
}

/// A session of 12 tokens, and a request that continues it.
fn continued(simulator: &mut Simulator) -> (Vec<u32>, RequestId) {
    let whole = run_keeping(simulator, session("s"), &prompt(1, 9), 3, false);
    let (id, _) = submit_keeping(simulator, session("s"), &[4, 5], &steadily(6), true).unwrap();
    let busy = submit_keeping(simulator, session("s"), &[6], &steadily(2), true).unwrap_err();
    assert_eq!(
        busy.to_string(),
        "session \"s\" is being continued by another request; one at a time can"
    );
    (whole, id)
}

#[test]
fn who_does_not_end_well_leaves_the_session_as_it_was() {
    let mut simulator = Simulator::new(sizes(40, 4, 20));
    let ends: [fn(&mut Simulator, RequestId); 4] = [
        |simulator, id| {
            simulator.step();
            simulator.scheduler.edge().abort(id);
        },
        |simulator, id| assert!(simulator.scheduler.edge().abort(id)),
        |simulator, _| assert!(simulator.fail().is_some()),
        |simulator, _| {
            simulator.step();
            simulator.fail();
        },
    ];
    for end in ends {
        let (whole, id) = continued(&mut simulator);
        let before = view(&mut simulator, &session("s"));
        end(&mut simulator, id);
        simulator.run(100);
        assert_eq!(simulator.scheduler.hold_tokens(&session("s")).unwrap(), whole);
        assert_eq!(view(&mut simulator, &session("s")), before);
        // It can be continued again.
        run_keeping(&mut simulator, session("s"), &[6], 2, true);
        assert_eq!(simulator.scheduler.edge().stats().blocks_promised, 0);
    }
}

#[test]
fn an_abort_in_the_moment_of_the_end_counts() {
    let mut simulator = Simulator::new(sizes(40, 4, 20));
    let params = steadily(1);
    let (id, _) = submit_keeping(&mut simulator, session("s"), &prompt(1, 9), &params, false).unwrap();
    let header = simulator
        .scheduler
        .schedule(&mut simulator.arena)
        .unwrap()
        .unwrap();
    let tokens = simulator.forward(&header);
    simulator.scheduler.edge().abort(id);
    simulator
        .scheduler
        .commit(header.step_id, &tokens, &BeamRows::default(), &mut Vec::new())
        .unwrap();
    assert!(simulator.scheduler.hold(&session("s")).is_err());
}

#[test]
fn a_broken_promise_frees_the_session() {
    let mut simulator = Simulator::new(sizes(40, 4, 20));
    run_keeping(&mut simulator, session("s"), &prompt(1, 9), 3, false);
    let request = |max_tokens| HoldRequest {
        key: session("s"),
        ttl_ms: TTL_MS,
        tokens: &[],
        max_tokens,
        append: true,
    };
    let (promise, _) = simulator.scheduler.promise_hold(request(5)).unwrap();
    assert!(simulator.scheduler.promise_hold(request(5)).is_err());
    simulator.scheduler.break_promise(promise);
    simulator.scheduler.break_promise(promise);
    simulator.check();
    // One that nobody takes up breaks by itself, at last.
    simulator.scheduler.promise_hold(request(5)).unwrap();
    let unknown = HoldRequest {
        key: session("t"),
        ..request(5)
    };
    assert!(matches!(
        simulator.scheduler.promise_hold(unknown),
        Err(HoldError::NotFound { .. })
    ));
    simulator.scheduler.set_time(TTL_MS - 1);
    assert!(simulator.scheduler.promise_hold(request(5)).is_err());
    simulator.scheduler.set_time(700_000);
    simulator.check();
    assert_eq!(simulator.scheduler.edge().stats().blocks_promised, 0);
    let refused = simulator.scheduler.edge().submit(
        prompt(1, 4),
        SamplingParams {
            n: 2,
            promise: Some(1),
            ..greedy(4)
        },
        Vec::new(),
    );
    let message = refused.unwrap_err().to_string();
    assert_eq!(message, "n is 2 with a pin or a session, allowed: 1");
}

#[test]
fn what_is_deleted_does_not_come_back() {
    let mut simulator = Simulator::new(sizes(40, 4, 20));
    let (_, _) = continued(&mut simulator);
    simulator.step();
    simulator.scheduler.delete_hold(&session("s")).unwrap();
    simulator.check();
    simulator.run(100);
    assert!(simulator.scheduler.holds(b"", HoldKind::Session).is_empty());
    simulator.assert_empty();
}

#[test]
fn a_session_ends_where_its_answer_does() {
    for late in [false, true] {
        let mut simulator = Simulator::new(sizes(40, 4, 20));
        let tokens = prompt(1, 9);
        let params = steadily(8);
        let (id, _) = submit_keeping(&mut simulator, session("s"), &tokens, &params, false).unwrap();
        if late {
            simulator.run(100);
            assert_eq!(view(&mut simulator, &session("s")).num_tokens, 17);
        } else {
            (0..6).for_each(|_| assert!(simulator.step().is_some()));
        }
        simulator.scheduler.edge().finish(id, 0, 3);
        let held = view(&mut simulator, &session("s"));
        assert_eq!((held.num_tokens, held.num_blocks), (12, 3));
        let whole = [tokens.as_slice(), &simulator.generated[&(id, 0)][..3]].concat();
        assert_eq!(simulator.scheduler.hold_tokens(&session("s")).unwrap(), whole);
        simulator.run(10);
        run_keeping(&mut simulator, session("s"), &[8], 4, true);
    }
}
