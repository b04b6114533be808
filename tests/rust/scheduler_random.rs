//! Random operations on the scheduler: every sample ends exactly once, and what it generated is what a lone run does.

use pagedkv::config::CoreConfig;
use pagedkv::ids::RequestId;
use pagedkv::sched::{CachePriority, SamplingParams};
use proptest::prelude::*;

use crate::beams::{assert_answers, beams};
use crate::simulator::{Simulator, config, expected, greedy, prompt};

#[derive(Clone, Debug)]
struct Submit {
    seed: u32,
    len: usize,
    max_tokens: u32,
    n: u32,
    salt: u8,
    stop_token: Option<u32>,
    priority: i32,
    beam_width: Option<u32>,
}

#[derive(Clone, Debug)]
enum Operation {
    Submit(Submit),
    Step,
    FailStep,
    Abort(usize),
    Finish {
        which: usize,
        sample_index: u32,
        num_tokens: u32,
    },
    Reset,
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let submit = (
        0u32..4,
        1usize..40,
        1u32..30,
        prop_oneof![4 => Just(1u32), 1 => 2u32..5],
        0u8..2,
        prop::option::weighted(0.2, 1u32..40),
        -1i32..2,
        prop::option::weighted(0.2, 1u32..6),
    )
        .prop_map(
            |(seed, len, max_tokens, n, salt, stop_token, priority, beam_width)| {
                Operation::Submit(Submit {
                    seed,
                    len,
                    max_tokens,
                    n,
                    salt,
                    stop_token,
                    priority,
                    beam_width,
                })
            },
        );
    let operation = prop_oneof![
        8 => submit,
        24 => Just(Operation::Step),
        1 => Just(Operation::FailStep),
        2 => any::<usize>().prop_map(Operation::Abort),
        2 => (any::<usize>(), 0u32..4, 1u32..10).prop_map(|(which, sample_index, num_tokens)| {
            Operation::Finish { which, sample_index, num_tokens }
        }),
        1 => Just(Operation::Reset),
    ];
    prop::collection::vec(operation, 1..120)
}

struct Submitted {
    id: RequestId,
    prompt: Vec<u32>,
    params: SamplingParams,
}

struct World {
    simulator: Simulator,
    submitted: Vec<Submitted>,
    /// Samples that were ended from outside, at this length.
    finished: Vec<((RequestId, u32), usize)>,
}

impl World {
    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Submit(submit) => self.submit(submit),
            Operation::Step => drop(self.simulator.step()),
            Operation::FailStep => drop(self.simulator.fail()),
            Operation::Abort(which) => {
                if let Some(at) = which.checked_rem(self.submitted.len()) {
                    self.simulator.scheduler.edge().abort(self.submitted[at].id);
                }
            }
            Operation::Finish {
                which,
                sample_index,
                num_tokens,
            } => {
                if let Some(at) = which.checked_rem(self.submitted.len()) {
                    self.finish((self.submitted[at].id, *sample_index), *num_tokens);
                }
            }
            Operation::Reset => {
                self.simulator.scheduler.reset_prefix_cache();
                self.simulator.check();
            }
        }
    }

    fn submit(&mut self, submit: &Submit) {
        let prompt = prompt(submit.seed, submit.len);
        let params = SamplingParams {
            seed: u64::from(submit.seed),
            priority: submit.priority,
            cache_priority: [CachePriority::Normal, CachePriority::Low][submit.seed as usize % 2],
            stop_token_ids: submit.stop_token.into_iter().collect(),
            ..match submit.beam_width {
                Some(width) => beams(width, submit.max_tokens),
                None => SamplingParams {
                    n: submit.n,
                    ..greedy(submit.max_tokens)
                },
            }
        };
        let edge = self.simulator.scheduler.edge();
        if let Ok(id) = edge.submit(prompt.clone(), params.clone(), vec![submit.salt]) {
            self.submitted.push(Submitted { id, prompt, params });
        }
    }

    /// Ends a sample as the caller of a stop string would: at a length that it has seen.
    fn finish(&mut self, sample: (RequestId, u32), num_tokens: u32) {
        let seen = self.simulator.generated.get(&sample).map_or(0, Vec::len);
        if seen >= num_tokens as usize {
            self.simulator
                .scheduler
                .edge()
                .finish(sample.0, sample.1, num_tokens);
            self.finished.push((sample, num_tokens as usize));
        }
    }

    /// Every sample ended once; whole where nothing cut it short, and a beginning of its lone run otherwise.
    fn assert_outputs(&self) {
        let mut num_samples = 0;
        for Submitted { id, prompt, params } in &self.submitted {
            if let Some(beam) = params.beam {
                num_samples += beam.width as usize;
                if self.simulator.answers.contains_key(id) {
                    assert_answers(&self.simulator, *id, prompt, params);
                } else {
                    let reasons = (0..beam.width).map(|index| self.simulator.ended[&(*id, index)]);
                    assert!(reasons.into_iter().all(|reason| matches!(reason, 3 | 4)));
                }
                continue;
            }
            for sample_index in 0..params.n {
                num_samples += 1;
                let sample = (*id, sample_index);
                let (whole, state) = expected(prompt, params, sample_index);
                let generated = self.simulator.generated.get(&sample).cloned().unwrap_or_default();
                assert!(
                    whole.starts_with(&generated),
                    "{generated:?} does not begin {whole:?}"
                );
                let ended = self.simulator.ended[&sample];
                if generated != whole {
                    let was_finished = self.finished.iter().any(|(finished, _)| *finished == sample);
                    assert!(
                        matches!(ended, 3 | 4) || (ended == 1 && was_finished),
                        "{sample:?} ended by {ended}"
                    );
                } else if ended < 3 && !self.finished.iter().any(|(finished, _)| *finished == sample) {
                    assert_eq!(ended, state);
                }
            }
        }
        assert_eq!(self.simulator.ended.len(), num_samples);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn any_sequence_of_operations_gives_lone_run_tokens(
        operations in operations(),
        num_blocks in 4u32..40,
        block_size in prop_oneof![Just(1u32), Just(2), Just(4), Just(16)],
        max_num_seqs in 1u32..7,
        max_num_batched_tokens in 1u32..40,
        prefix_caching in any::<bool>(),
        overlap in any::<bool>(),
    ) {
        let sizes =
            CoreConfig { max_num_seqs, max_num_batched_tokens, prefix_caching, ..config(num_blocks, block_size) };
        let mut world = World { simulator: Simulator::with_overlap(sizes, overlap), submitted: Vec::new(), finished: Vec::new() };
        for operation in &operations {
            world.apply(operation);
        }
        world.simulator.run(20_000);
        world.simulator.assert_empty();
        world.assert_outputs();
    }
}
