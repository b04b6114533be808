//! Beam search in the scheduler against a model of it that knows no cache: the same answers, whatever is preempted.

use pagedkv::config::CoreConfig;
use pagedkv::error::{StepError, SubmitError};
use pagedkv::ids::RequestId;
use pagedkv::sched::{BeamParams, BeamRows, EarlyStopping, FinishReason, SamplingParams};

use crate::simulator::{EOS, Simulator, VOCABULARY, chain_of, config, greedy, logprob, prompt};

pub(crate) fn beams(width: u32, max_tokens: u32) -> SamplingParams {
    SamplingParams {
        beam: Some(BeamParams {
            width,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::Heuristic,
        }),
        ..greedy(max_tokens)
    }
}

/// An answer of the model: generated tokens, their sum, the score.
type Answer = (Vec<u32>, f32, f32);

/// Beam search as it is told in a few sentences, over whole token lists and the whole vocabulary.
pub(crate) fn expected_answers(prompt: &[u32], params: &SamplingParams) -> Vec<Answer> {
    let beam = params.beam.unwrap();
    let width = beam.width as usize;
    let is_end = |token: u32| (token == EOS && !params.ignore_eos) || params.stop_token_ids.contains(&token);
    let score = |sum: f32, len: usize| sum / f64::from(len as u32).powf(beam.length_penalty) as f32;
    let num_ends = usize::from(!params.ignore_eos) + params.stop_token_ids.len();
    let mut running = vec![(Vec::new(), 0.0f32)];
    let mut answers: Vec<Answer> = Vec::new();
    for len in 1..=params.max_tokens as usize {
        let mut next: Vec<(Vec<u32>, f32)> = Vec::new();
        for (tokens, sum) in &running {
            let chain = chain_of(&[prompt, tokens].concat());
            next.extend((0..VOCABULARY as u32).map(|token| {
                let tokens = [tokens.as_slice(), &[token]].concat();
                (tokens, sum + logprob(chain, token))
            }));
        }
        // Stable: of equal sums the earlier beam's stays first, then the lower token.
        next.sort_by(|a, b| b.1.total_cmp(&a.1));
        next.truncate(width * (1 + num_ends).max(2));
        let at_end = len == params.max_tokens as usize;
        let ends = |tokens: &[u32]| at_end || is_end(*tokens.last().unwrap());
        for (tokens, sum) in next.iter().take(width).filter(|(tokens, _)| ends(tokens)) {
            answers.push((tokens.clone(), *sum, score(*sum, len)));
        }
        answers.sort_by(|a, b| b.2.total_cmp(&a.2));
        answers.truncate(width);
        running = next
            .into_iter()
            .filter(|(tokens, _)| !ends(tokens))
            .take(width)
            .collect();
        if at_end {
            break;
        }
        let reach = match beam.early_stopping {
            EarlyStopping::Never if beam.length_penalty > 0.0 => params.max_tokens as usize,
            _ => len,
        };
        let can_improve = score(running[0].1, reach) > answers.last().map_or(0.0, |worst| worst.2);
        let stops = beam.early_stopping == EarlyStopping::Always || !can_improve;
        if answers.len() == width && stops {
            break;
        }
    }
    answers
}

pub(crate) fn assert_answers(simulator: &Simulator, id: RequestId, prompt: &[u32], params: &SamplingParams) {
    let answers: Vec<Answer> = simulator.answers[&id]
        .iter()
        .map(|one| (one.tokens.clone(), one.cum_logprob, one.score))
        .collect();
    assert_eq!(answers, expected_answers(prompt, params), "{params:?}");
    for one in &simulator.answers[&id] {
        let last = *one.tokens.last().unwrap();
        let is_end = (last == EOS && !params.ignore_eos) || params.stop_token_ids.contains(&last);
        assert_eq!(one.reason == FinishReason::Stop, is_end);
    }
}

fn variants() -> Vec<SamplingParams> {
    let mut variants = Vec::new();
    for width in [1, 2, 4, 8] {
        for early_stopping in [
            EarlyStopping::Always,
            EarlyStopping::Heuristic,
            EarlyStopping::Never,
        ] {
            for length_penalty in [-1.0, 0.0, 1.0, 2.0] {
                let beam = Some(BeamParams {
                    width,
                    length_penalty,
                    early_stopping,
                });
                for (ignore_eos, stop_token_ids) in
                    [(false, vec![]), (true, vec![]), (false, vec![5, 11, 17])]
                {
                    variants.push(SamplingParams {
                        beam,
                        ignore_eos,
                        stop_token_ids,
                        ..greedy(17)
                    });
                }
            }
        }
    }
    variants
}

#[test]
fn answers_are_those_of_the_model() {
    for (seed, params) in (0..).zip(variants()) {
        for block_size in [1, 4, 16] {
            let mut simulator = Simulator::new(config(160, block_size));
            let prompt = prompt(seed, 1 + seed as usize % 21);
            let id = simulator.submit(&prompt, &params);
            simulator.run(40);
            assert_answers(&simulator, id, &prompt, &params);
            simulator.assert_empty();
            let stats = simulator.scheduler.edge().stats();
            assert_eq!((stats.prompt_tokens, stats.preemptions), (prompt.len() as u64, 0));
        }
    }
}

#[test]
fn searches_side_by_side_disturb_nobody() {
    for num_blocks in [100, 160, 500] {
        let sizes = CoreConfig {
            max_num_seqs: 24,
            ..config(num_blocks, 4)
        };
        let mut simulator = Simulator::new(sizes);
        let lone = SamplingParams {
            ignore_eos: true,
            ..greedy(180)
        };
        let mut searches = Vec::new();
        let mut others = Vec::new();
        for (seed, width) in [(0, 8), (1, 4), (0, 3), (2, 8), (1, 1), (3, 2)] {
            let params = SamplingParams {
                ignore_eos: seed == 2,
                ..beams(width, 45)
            };
            let prompt = prompt(seed, 9 + 3 * seed as usize);
            searches.push((simulator.submit(&prompt, &params), prompt.clone(), params));
            others.push((simulator.submit(&prompt, &lone), prompt));
            simulator.step();
        }
        simulator.run(2000);
        for (id, prompt, params) in &searches {
            assert_answers(&simulator, *id, prompt, params);
        }
        for (id, prompt) in &others {
            simulator.assert_complete((*id, 0), prompt, &lone);
        }
        simulator.assert_empty();
        let preemptions = simulator.scheduler.edge().stats().preemptions;
        assert!(
            if num_blocks == 500 {
                preemptions == 0
            } else {
                preemptions > 0
            },
            "{preemptions} at {num_blocks}"
        );
    }
}

#[test]
fn full_blocks_are_shared_and_only_partial_ones_copied() {
    let mut simulator = Simulator::new(config(100, 4));
    let params = SamplingParams {
        ignore_eos: true,
        ..beams(8, 12)
    };
    let header = {
        simulator.submit(&prompt(1, 30), &params);
        simulator.step().unwrap()
    };
    assert_eq!(
        (header.num_tokens, header.num_rows, header.num_beam_rows),
        (30, 1, 1)
    );
    assert_eq!(
        simulator.scheduler.pool().num_owned(),
        8,
        "the beams hold the prompt's blocks"
    );
    let header = simulator.step().unwrap();
    assert_eq!(
        (header.num_decodes, header.num_copies),
        (8, 7),
        "the last owner writes in place"
    );
    while let Some(header) = simulator.step() {
        assert!(header.num_tokens == 0 || header.num_decodes == 8);
        assert!(header.num_copies <= 7);
        // Seven full blocks of the prompt, and at most what each beam has beyond them.
        assert!(simulator.scheduler.pool().num_owned() <= 7 + 8 * 4);
    }
    simulator.assert_empty();
}

#[test]
fn a_search_in_a_pool_of_its_worst_case_ends_alone() {
    for block_size in [1u32, 4, 16] {
        for (len, max_tokens, width) in [
            (1u32, 9u32, 4u32),
            (8, 1, 8),
            (15, 2, 8),
            (16, 5, 2),
            (17, 20, 5),
            (32, 33, 8),
        ] {
            let blocks = (len + max_tokens - 1).div_ceil(block_size);
            let shared = len / block_size;
            let num_branches = if max_tokens == 1 { 1 } else { width };
            let sizes = config(shared + num_branches * (blocks - shared), block_size);
            let params = SamplingParams {
                ignore_eos: true,
                ..beams(width, max_tokens)
            };
            let prompt = prompt(len, len as usize);
            let mut simulator = Simulator::new(sizes.clone());
            // Somebody is in the way before it and after it.
            let lone = SamplingParams {
                ignore_eos: true,
                ..greedy(max_tokens)
            };
            let before = simulator.submit(&prompt[..1], &lone);
            simulator.step();
            let id = simulator.submit(&prompt, &params);
            simulator.step();
            let after = simulator.submit(&prompt[..1], &lone);
            simulator.run(1000);
            assert_answers(&simulator, id, &prompt, &params);
            for other in [before, after] {
                simulator.assert_complete((other, 0), &prompt[..1], &lone);
            }
            simulator.assert_empty();
            if sizes.num_blocks == 1 {
                continue;
            }
            let smaller = Simulator::new(CoreConfig {
                num_blocks: sizes.num_blocks - 1,
                ..sizes
            });
            let refused = smaller.scheduler.edge().submit(prompt, params, Vec::new());
            let message = refused.unwrap_err().to_string();
            let expected = if num_branches > 1 && blocks > shared {
                "need up to"
            } else {
                "blocks"
            };
            assert!(message.contains(expected), "{message}");
        }
    }
}

#[test]
fn a_preempted_group_comes_back_as_a_whole() {
    for prefix_caching in [true, false] {
        let mut simulator = Simulator::new(CoreConfig {
            prefix_caching,
            max_num_seqs: 12,
            ..config(64, 4)
        });
        let first = SamplingParams {
            ignore_eos: true,
            ..greedy(150)
        };
        let oldest: Vec<RequestId> = (0..3)
            .map(|seed| simulator.submit(&prompt(seed, 10), &first))
            .collect();
        let (prompt_of_beams, params) = (
            prompt(7, 13),
            SamplingParams {
                ignore_eos: true,
                ..beams(4, 60)
            },
        );
        let id = simulator.submit(&prompt_of_beams, &params);
        while simulator.step().is_some() {
            let beams: Vec<_> = simulator
                .scheduler
                .sequences()
                .into_iter()
                .filter(|one| one.request == id)
                .collect();
            let num_running = beams.iter().filter(|one| one.running).count();
            assert!(
                num_running == 0 || num_running == 1 || num_running == 4,
                "a group runs as a whole"
            );
        }
        let stats = simulator.scheduler.edge().stats();
        assert!(stats.preemptions > 0 && stats.recomputed_tokens > 0, "{stats:?}");
        assert_answers(&simulator, id, &prompt_of_beams, &params);
        for (seed, id) in (0..).zip(oldest) {
            simulator.assert_complete((id, 0), &prompt(seed, 10), &first);
        }
        simulator.assert_empty();
    }
}

#[test]
fn an_abort_or_a_failed_step_ends_all_beams() {
    for num_steps in 0..9 {
        for fails in [false, true] {
            let mut simulator = Simulator::new(CoreConfig {
                max_num_batched_tokens: 9,
                ..config(60, 4)
            });
            let params = SamplingParams {
                ignore_eos: true,
                ..beams(6, 30)
            };
            let id = simulator.submit(&prompt(1, 22), &params);
            for _ in 0..num_steps {
                simulator.step();
            }
            if fails {
                simulator.fail();
            } else {
                assert!(simulator.scheduler.edge().abort(id));
            }
            simulator.run(3);
            let reason = if fails { 4 } else { 3 };
            let ended: Vec<i32> = (0..6).map(|index| simulator.ended[&(id, index)]).collect();
            assert_eq!((ended, simulator.ended.len()), (vec![reason; 6], 6));
            simulator.assert_empty();
        }
    }
}

#[test]
fn a_search_that_never_fits_is_refused_with_the_numbers() {
    let simulator = Simulator::new(config(40, 4));
    let message = |params: SamplingParams| {
        let refused = simulator.scheduler.edge().submit(prompt(0, 20), params, vec![]);
        let Err(SubmitError::Invalid(message)) = refused else {
            panic!("{refused:?}");
        };
        message
    };
    assert!(message(beams(9, 4)).contains("beam_width is 9, allowed: 1 to 8"));
    assert!(message(beams(0, 4)).contains("beam_width is 0"));
    assert!(message(SamplingParams { n: 2, ..beams(2, 4) }).contains("n is 2"));
    // Five blocks of the prompt are shared, six more are private to each of six beams.
    assert!(message(beams(6, 24)).contains("need up to 41 blocks of 4, the cache has 40"));
    let mut params = beams(2, 4);
    params.beam.as_mut().unwrap().length_penalty = f64::NAN;
    assert!(message(params).contains("length_penalty is NaN"));
}

#[test]
fn candidates_that_do_not_fit_the_step_are_refused() {
    let mut simulator = Simulator::new(config(40, 4));
    simulator.submit(&prompt(0, 5), &beams(3, 4));
    let header = simulator
        .scheduler
        .schedule(&mut simulator.arena)
        .unwrap()
        .unwrap();
    simulator.forward(&header);
    let (per_row, ids, logprobs) = simulator.candidates();
    assert_eq!((per_row, ids.len()), (6, 6));
    let mut states = Vec::new();
    let mut commit = |tokens: &[i32], logprobs: &[f32], per_row| {
        let rows = BeamRows {
            tokens,
            logprobs,
            per_row,
        };
        simulator
            .scheduler
            .commit(header.step_id, &[0], &rows, &mut states)
    };
    let wanted = |given| {
        Err(StepError::CandidateCount {
            given,
            rows: 1,
            per_row: 6,
        })
    };
    assert_eq!(commit(&[], &[], 0), wanted(0));
    assert_eq!(commit(&ids[..5], &logprobs[..5], 5), wanted(5));
    assert_eq!(commit(&ids, &logprobs[..5], 6), wanted(5));
    assert_eq!(commit(&ids, &logprobs, 6), Ok(()));
}
