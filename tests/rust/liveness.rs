//! A long run in a pool that barely holds the largest request: every request ends exactly once, no block is lost.
//!
//! The number of steps is `PAGEDKV_LIVENESS_STEPS`, by default few enough for every run of the tests.

use pagedkv::config::CoreConfig;
use pagedkv::ids::RequestId;
use pagedkv::sched::SamplingParams;

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

fn submit(simulator: &Simulator, chance: &mut Chance) -> Option<Live> {
    let prompt = prompt(chance.below(6), 1 + chance.below(60) as usize);
    let params = SamplingParams {
        n: if chance.below(5) == 0 {
            1 + chance.below(6)
        } else {
            1
        },
        seed: u64::from(chance.below(4)),
        priority: chance.below(3).cast_signed() - 1,
        ..greedy(1 + chance.below(20))
    };
    let salt = vec![chance.below(3) as u8];
    let id = simulator
        .scheduler
        .edge()
        .submit(prompt.clone(), params.clone(), salt)
        .ok()?;
    Some(Live { id, prompt, params })
}

/// Checks the requests that ended, and forgets them.
fn collect(simulator: &mut Simulator, live: &mut Vec<Live>) -> usize {
    let before = live.len();
    live.retain(|request| {
        let samples: Vec<_> = (0..request.params.n)
            .map(|sample_index| (request.id, sample_index))
            .collect();
        if !samples.iter().all(|sample| simulator.ended.contains_key(sample)) {
            return true;
        }
        for sample in samples {
            let (whole, state) = expected(&request.prompt, &request.params, sample.1);
            let generated = simulator.generated.remove(&sample).unwrap_or_default();
            let ended = simulator.ended.remove(&sample).unwrap();
            assert!(whole.starts_with(&generated));
            assert!(
                ended == 3 || (generated == whole && ended == state),
                "{sample:?} ended by {ended}"
            );
        }
        simulator.cached.remove(&request.id);
        false
    });
    before - live.len()
}

#[test]
fn every_request_ends_in_a_pool_that_barely_holds_the_largest() {
    let num_steps: u64 =
        std::env::var("PAGEDKV_LIVENESS_STEPS").map_or(20_000, |steps| steps.parse().unwrap());
    // The largest request has 60 + 20 tokens: 20 blocks.
    let sizes = CoreConfig {
        max_num_batched_tokens: 24,
        tenants: Vec::new(),
        max_queued_requests: 40,
        ..config(22, 4)
    };
    let mut simulator = Simulator::new(sizes);
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    let mut live: Vec<Live> = Vec::new();
    let mut num_ended = 0;
    for step in 0..num_steps {
        if chance.below(4) == 0 {
            live.extend(submit(&simulator, &mut chance));
        }
        if chance.below(40) == 0 && !live.is_empty() {
            let which = chance.below(live.len() as u32) as usize;
            simulator.scheduler.edge().abort(live[which].id);
        }
        simulator.step();
        if step % 64 == 0 {
            num_ended += collect(&mut simulator, &mut live);
        }
    }
    simulator.run(10_000);
    num_ended += collect(&mut simulator, &mut live);
    assert!(live.is_empty() && simulator.ended.is_empty() && simulator.generated.is_empty());
    simulator.assert_empty();
    let stats = simulator.scheduler.edge().stats();
    assert!(stats.preemptions > num_steps / 1000 && stats.evictions > num_steps / 100);
    assert!(
        num_ended as u64 > num_steps / 20,
        "{num_ended} requests in {num_steps} steps"
    );
}
