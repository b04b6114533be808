//! A long run in a pool that barely holds the largest request beside what pins and sessions may keep: every request
//! ends exactly once, no block is lost.
//!
//! The number of steps is `PAGEDKV_LIVENESS_STEPS`, by default few enough for every run of the tests.

use pagedkv::config::{CoreConfig, HostTier};
use pagedkv::ids::RequestId;
use pagedkv::sched::{CachePriority, HoldKey, HoldKind, SamplingParams};

use crate::beams::{assert_answers, beams};
use crate::holds::{TTL_MS, key, submit_keeping};
use crate::simulator::{Simulator, config, expected, greedy, prompt};

/// xorshift64*: enough to mix operations, and the same in every run.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % u64::from(bound)) as u32
    }
}

struct Live {
    id: RequestId,
    prompt: Vec<u32>,
    params: SamplingParams,
}

fn cache_priority(chance: &mut Chance) -> CachePriority {
    match chance.below(3) {
        0 => CachePriority::Low,
        _ => CachePriority::Normal,
    }
}

fn params(chance: &mut Chance) -> SamplingParams {
    let seed = u64::from(chance.below(4));
    let priority = chance.below(3).cast_signed() - 1;
    if chance.below(3) == 0 {
        // Longer than what admission leaves room for, so that groups are preempted.
        return SamplingParams {
            priority,
            cache_priority: cache_priority(chance),
            ignore_eos: true,
            ..beams(2, 30 + chance.below(11))
        };
    }
    SamplingParams {
        seed,
        priority,
        cache_priority: cache_priority(chance),
        n: if chance.below(5) == 0 {
            1 + chance.below(6)
        } else {
            1
        },
        ..greedy(1 + chance.below(20))
    }
}

fn submit(simulator: &Simulator, chance: &mut Chance) -> Option<Live> {
    let params = params(chance);
    let longest = if params.beam.is_some() { 8 } else { 60 };
    let prompt = prompt(chance.below(6), 1 + chance.below(longest) as usize);
    let salt = vec![chance.below(3) as u8];
    let id = simulator
        .scheduler
        .edge()
        .submit(prompt.clone(), params.clone(), salt)
        .ok()?;
    Some(Live { id, prompt, params })
}

fn hold_key(chance: &mut Chance) -> HoldKey {
    let kind = [HoldKind::Pin, HoldKind::Session][chance.below(2) as usize];
    key(
        kind,
        &[chance.below(3) as u8],
        ["a", "b"][chance.below(2) as usize],
    )
}

/// Begins or continues a session, or pins a prompt, where the budget and whoever continues the session now allow it.
fn keep(simulator: &mut Simulator, chance: &mut Chance) -> Option<Live> {
    let key = hold_key(chance);
    let is_pin = key.kind == HoldKind::Pin;
    let params = SamplingParams {
        cache_priority: cache_priority(chance),
        ..greedy(if is_pin { 1 } else { 1 + chance.below(8) })
    };
    let tokens = prompt(chance.below(6), 1 + chance.below(12) as usize);
    let append = !is_pin && chance.below(2) == 0;
    let (id, prompt) = submit_keeping(simulator, key, &tokens, &params, append).ok()?;
    Some(Live { id, prompt, params })
}

/// One of the commands about holds, in whatever state they are.
fn command(simulator: &mut Simulator, chance: &mut Chance, now_ms: u64) {
    let key = hold_key(chance);
    let scheduler = &mut simulator.scheduler;
    match chance.below(8) {
        0 => drop(scheduler.delete_hold(&key)),
        1 => drop(scheduler.fork_session(&key, "b", None)),
        2 => scheduler.set_model_epoch(u64::from(chance.below(2))),
        3 => drop(scheduler.reset_prefix_cache()),
        _ => scheduler.set_time(now_ms),
    }
    simulator.check();
}

fn is_search(live: &[Live], id: RequestId) -> bool {
    live.iter()
        .any(|request| request.id == id && request.params.beam.is_some())
}

/// Checks the requests that ended, and forgets them.
fn collect(simulator: &mut Simulator, live: &mut Vec<Live>) -> usize {
    let before = live.len();
    live.retain(|request| {
        let num_samples = request.params.beam.map_or(request.params.n, |beam| beam.width);
        let samples: Vec<_> = (0..num_samples)
            .map(|sample_index| (request.id, sample_index))
            .collect();
        if !samples.iter().all(|sample| simulator.ended.contains_key(sample)) {
            return true;
        }
        simulator.cached.remove(&request.id);
        if request.params.beam.is_some() {
            let reasons = samples
                .iter()
                .map(|sample| simulator.ended.remove(sample).unwrap());
            if reasons.max() < Some(3) {
                assert_answers(simulator, request.id, &request.prompt, &request.params);
                simulator.answers.remove(&request.id);
            }
            return false;
        }
        for sample in samples {
            let (whole, state) = expected(&request.prompt, &request.params, sample.1);
            let generated = simulator.generated.remove(&sample).unwrap_or_default();
            let ended = simulator.ended.remove(&sample).unwrap();
            assert!(whole.starts_with(&generated));
            assert!(
                ended == 3 || simulator.broken.contains(&sample.0) || (generated == whole && ended == state),
                "{sample:?} ended by {ended}"
            );
        }
        false
    });
    before - live.len()
}

#[test]
fn every_request_ends_in_a_pool_that_barely_holds_the_largest() {
    run(false);
}

#[test]
fn every_request_ends_also_where_steps_overlap() {
    run(true);
}

fn run(overlap: bool) {
    let num_steps: u64 =
        std::env::var("PAGEDKV_LIVENESS_STEPS").map_or(20_000, |steps| steps.parse().unwrap());
    // The largest request has 60 + 20 tokens: 20 blocks. Holds may have 6 besides.
    let sizes = CoreConfig {
        max_num_batched_tokens: 24,
        tenants: Vec::new(),
        max_queued_requests: 40,
        max_model_len: 88,
        max_pinned_blocks: 6,
        // Room for one or two sequences: now and then there is none.
        host: HostTier {
            num_blocks: 16,
            ..HostTier::default()
        },
        ..config(28, 4)
    };
    let mut simulator = Simulator::with_overlap(sizes, overlap);
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    let mut live: Vec<Live> = Vec::new();
    let (mut num_ended, mut num_parked, mut num_kept) = (0, 0, 0);
    for step in 0..num_steps {
        if chance.below(4) == 0 {
            live.extend(submit(&simulator, &mut chance));
        }
        if chance.below(10) == 0
            && let Some(kept) = keep(&mut simulator, &mut chance)
        {
            live.push(kept);
            num_kept += 1;
        }
        if chance.below(50) == 0 {
            command(&mut simulator, &mut chance, step * TTL_MS / 1000);
        }
        if chance.below(40) == 0 && !live.is_empty() {
            let which = chance.below(live.len() as u32) as usize;
            simulator.scheduler.edge().abort(live[which].id);
        }
        if chance.below(60) == 0 && !live.is_empty() {
            let which = chance.below(live.len() as u32) as usize;
            simulator.broken.insert(live[which].id);
        }
        simulator.step();
        // A group that waits with tokens beyond its prompt has been preempted.
        num_parked += simulator
            .scheduler
            .sequences()
            .iter()
            .filter(|one| !one.running && one.num_preemptions > 0 && is_search(&live, one.request))
            .count();
        if step % 64 == 0 {
            num_ended += collect(&mut simulator, &mut live);
        }
    }
    simulator.run(10_000);
    num_ended += collect(&mut simulator, &mut live);
    assert!(
        num_parked as u64 > num_steps / 100,
        "groups are preempted: {num_parked}"
    );
    assert!(
        live.is_empty()
            && simulator.answers.is_empty()
            && simulator.ended.is_empty()
            && simulator.generated.is_empty()
    );
    simulator.scheduler.set_time(num_steps * TTL_MS);
    simulator.check();
    simulator.assert_empty();
    let stats = simulator.scheduler.edge().stats();
    assert!(stats.preemptions > num_steps / 1000 && stats.evictions > num_steps / 100);
    // Where steps overlap, half of the calls wait for a commit.
    assert!(stats.swapped_in_tokens > num_steps / 200 && stats.recomputed_tokens > num_steps / 200);
    assert_eq!((stats.blocks_pinned, stats.blocks_promised), (0, 0));
    assert!(num_kept > num_steps / 200, "{num_kept} requests left a hold");
    assert!(
        num_ended as u64 > num_steps / 20,
        "{num_ended} requests in {num_steps} steps"
    );
}
