//! Several samples of one prompt: what they share, what each of them holds, and what happens where they do not fit.

use pagedkv::config::CoreConfig;
use pagedkv::sched::SamplingParams;

use crate::simulator::{Simulator, config, greedy, prompt};

const NUM_SAMPLES: u32 = 16;

fn sixteen(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        n: NUM_SAMPLES,
        seed: 3,
        ignore_eos: true,
        ..greedy(max_tokens)
    }
}

fn sizes(num_blocks: u32) -> CoreConfig {
    CoreConfig {
        max_num_seqs: 32,
        max_num_batched_tokens: 200,
        max_model_len: 700,
        ..config(num_blocks, 16)
    }
}

/// Runs sixteen samples of a prompt and checks at every step that they hold no more than what they share, a private tail
/// each, and what they generate.
fn run(len: usize, num_copies: u64) {
    let mut simulator = Simulator::new(sizes(200));
    let (prompt, params) = (prompt(5, len), sixteen(40));
    let id = simulator.submit(&prompt, &params);
    let (num_shared, num_of_prompt) = (len as u32 / 16, (len as u32).div_ceil(16));
    while simulator.step().is_some() {
        let sequences = simulator.scheduler.sequences();
        let of_samples = sequences
            .iter()
            .map(|one| one.num_computed.div_ceil(16).saturating_sub(num_shared));
        let held = simulator.scheduler.pool().num_owned();
        let bound = if sequences.len() == 1 {
            num_of_prompt
        } else {
            num_shared + of_samples.sum::<u32>()
        };
        assert!(held <= bound, "{held} blocks are held, {bound} may be");
    }
    for sample_index in 0..NUM_SAMPLES {
        simulator.assert_complete((id, sample_index), &prompt, &params);
    }
    let stats = simulator.scheduler.edge().stats();
    assert_eq!(
        (stats.prompt_tokens, stats.copies, stats.preemptions),
        (len as u64, num_copies, 0)
    );
    assert_eq!(stats.scheduled_tokens, len as u64 + u64::from(NUM_SAMPLES) * 39);
    simulator.assert_empty();
}

#[test]
fn sixteen_samples_compute_the_prompt_once_and_share_its_blocks() {
    run(512, 0);
}

#[test]
fn a_partial_tail_is_copied_by_all_but_its_last_owner() {
    run(520, 15);
}

#[test]
fn samples_that_do_not_fit_wait_and_end_all_the_same() {
    for (num_blocks, max_num_seqs) in [(40, 32), (44, 6), (60, 32)] {
        let mut simulator = Simulator::new(CoreConfig {
            max_num_seqs,
            ..sizes(num_blocks)
        });
        let (prompt, params) = (prompt(5, 520), sixteen(60));
        let first = simulator.submit(&prompt, &params);
        let second = simulator.submit(&prompt, &params);
        simulator.run(4000);
        for id in [first, second] {
            for sample_index in 0..NUM_SAMPLES {
                simulator.assert_complete((id, sample_index), &prompt, &params);
            }
        }
        // The second one finds the first's full blocks, and its tail too if the first has ended by then.
        let computed = simulator.scheduler.edge().stats().prompt_tokens - 520;
        assert!(computed == 1 || computed == 8, "{computed}");
        simulator.assert_empty();
    }
}
