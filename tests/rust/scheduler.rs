//! The scheduler against the simulator: whatever it does, the generated tokens are those of lone runs.

use pagedkv::error::{StepError, SubmitError};
use pagedkv::ids::RequestId;
use pagedkv::sched::{BeamRows, SamplingParams, Section};

use crate::simulator::{Simulator, config, expected, greedy, prompt, section};

#[test]
fn a_lone_request_generates_what_it_should() {
    for len in [1, 3, 4, 5, 8, 63, 64, 65, 130] {
        let mut simulator = Simulator::new(config(64, 4));
        let (prompt, params) = (prompt(1, len), greedy(20));
        let id = simulator.submit(&prompt, &params);
        simulator.run(40);
        simulator.assert_complete((id, 0), &prompt, &params);
        simulator.assert_empty();
    }
}

#[test]
fn a_full_hit_computes_one_token() {
    let mut simulator = Simulator::new(config(16, 4));
    let (prompt, params) = (prompt(1, 16), greedy(1));
    let first = simulator.submit(&prompt, &params);
    simulator.run(10);
    let second = simulator.submit(&prompt, &params);
    let header = simulator.step().unwrap();
    assert_eq!((header.num_tokens, header.num_copies), (1, 1));
    simulator.run(10);
    assert_eq!((simulator.cached[&first], simulator.cached[&second]), (0, 15));
    simulator.assert_complete((second, 0), &prompt, &params);
}

#[test]
fn a_full_hit_without_room_for_the_copy_computes_the_last_block() {
    let mut simulator = Simulator::new(config(4, 4));
    let (prompt, params) = (prompt(1, 16), greedy(1));
    simulator.submit(&prompt, &params);
    simulator.run(10);
    let second = simulator.submit(&prompt, &params);
    let header = simulator.step().unwrap();
    assert_eq!((header.num_tokens, header.num_copies), (4, 0));
    assert_eq!(simulator.cached[&second], 12);
    simulator.assert_complete((second, 0), &prompt, &params);
}

#[test]
fn without_prefix_caching_nothing_is_found() {
    let mut simulator = Simulator::new(pagedkv::config::CoreConfig {
        prefix_caching: false,
        ..config(32, 4)
    });
    let (prompt, params) = (prompt(1, 17), greedy(9));
    for _ in 0..3 {
        let id = simulator.submit(&prompt, &params);
        simulator.run(40);
        assert_eq!(simulator.cached[&id], 0);
        simulator.assert_complete((id, 0), &prompt, &params);
    }
    assert_eq!(simulator.scheduler.pool().num_free(), 32);
}

#[test]
fn samples_share_one_prefill() {
    let mut simulator = Simulator::new(config(64, 4));
    let prompt = prompt(3, 14);
    let params = SamplingParams {
        n: 5,
        seed: 77,
        ..greedy(12)
    };
    let id = simulator.submit(&prompt, &params);
    let header = simulator.step().unwrap();
    assert_eq!((header.num_tokens, header.num_rows), (14, 5));
    assert_eq!(
        simulator.scheduler.pool().num_owned(),
        4,
        "all samples hold the same blocks"
    );
    let header = simulator.step().unwrap();
    assert!(
        header.num_copies < header.num_sequences,
        "the last owner of the tail writes in place"
    );
    simulator.run(40);
    for sample_index in 0..5 {
        simulator.assert_complete((id, sample_index), &prompt, &params);
    }
    assert_eq!(simulator.scheduler.edge().stats().prompt_tokens, 14);
    simulator.assert_empty();
}

#[test]
fn more_samples_than_may_run_all_finish() {
    let mut simulator = Simulator::new(pagedkv::config::CoreConfig {
        max_num_seqs: 2,
        ..config(64, 4)
    });
    let prompt = prompt(3, 14);
    let params = SamplingParams {
        n: 9,
        seed: 5,
        ..greedy(12)
    };
    let id = simulator.submit(&prompt, &params);
    simulator.run(200);
    for sample_index in 0..9 {
        simulator.assert_complete((id, sample_index), &prompt, &params);
    }
    simulator.assert_empty();
}

#[test]
fn a_small_pool_preempts_and_changes_no_token() {
    let mut simulator = Simulator::new(config(12, 4));
    let params = SamplingParams {
        ignore_eos: true,
        ..greedy(24)
    };
    let prompts: Vec<Vec<u32>> = (0..6).map(|seed| prompt(seed, 12)).collect();
    let ids: Vec<RequestId> = prompts
        .iter()
        .map(|prompt| simulator.submit(prompt, &params))
        .collect();
    simulator.step().unwrap();
    while simulator.scheduler.has_work() {
        simulator.step();
        if let Some(oldest) = simulator.scheduler.sequences().first() {
            assert!(
                oldest.request != ids[0] || oldest.num_preemptions == 0,
                "the oldest is never preempted"
            );
        }
    }
    for (id, prompt) in ids.iter().zip(&prompts) {
        simulator.assert_complete((*id, 0), prompt, &params);
    }
    let stats = simulator.scheduler.edge().stats();
    assert!(stats.preemptions > 0);
    assert_eq!(stats.prefix_hits, 0, "tokens computed again are no prefix hits");
    assert_eq!(stats.prompt_tokens, 72, "nor are they new prompt tokens");
    simulator.assert_empty();
}

#[test]
fn a_prompt_is_admitted_only_with_all_its_blocks() {
    let mut simulator = Simulator::new(pagedkv::config::CoreConfig {
        max_num_batched_tokens: 8,
        ..config(16, 4)
    });
    for seed in 0..5 {
        simulator.submit(&prompt(seed, 16), &greedy(1));
    }
    for _ in 0..40 {
        simulator.step();
    }
    let stats = simulator.scheduler.edge().stats();
    assert_eq!(
        (stats.preemptions, stats.finished_length + stats.finished_stop),
        (0, 5)
    );
}

#[test]
fn what_never_fits_is_refused_with_the_numbers() {
    let simulator = Simulator::new(config(10, 4));
    let submit = |len, max_tokens| {
        simulator
            .scheduler
            .edge()
            .submit(prompt(0, len), greedy(max_tokens), vec![])
    };
    let message = |result: Result<_, SubmitError>| result.unwrap_err().to_string();
    assert!(
        message(submit(40, 2)).contains("need 11 blocks"),
        "{}",
        message(submit(40, 2))
    );
    assert!(message(submit(250, 7)).contains("maximum context length is 256 tokens"));
    assert!(message(submit(0, 1)).contains("prompt is empty"));
    assert!(message(submit(1, 0)).contains("max_tokens is 0"));
    assert!(submit(40, 1).is_ok(), "the last token needs no slot");
}

#[test]
fn a_full_queue_refuses_and_accepts_again() {
    let mut simulator = Simulator::new(pagedkv::config::CoreConfig {
        tenants: Vec::new(),
        max_queued_requests: 3,
        ..config(10, 4)
    });
    for seed in 0..3 {
        simulator.submit(&prompt(seed, 3), &greedy(1));
    }
    let fourth = simulator.scheduler.edge().submit(prompt(9, 3), greedy(1), vec![]);
    assert_eq!(fourth, Err(SubmitError::QueueFull { capacity: 3 }));
    simulator.run(10);
    simulator.submit(&prompt(9, 3), &greedy(1));
    simulator.run(10);
    assert_eq!(simulator.ended.len(), 4);
}

#[test]
fn an_abort_frees_in_every_state() {
    let params = SamplingParams {
        n: 3,
        ignore_eos: true,
        ..greedy(30)
    };
    for num_steps in 0..12 {
        let sizes = pagedkv::config::CoreConfig {
            max_num_batched_tokens: 9,
            max_num_seqs: 4,
            ..config(20, 4)
        };
        let mut simulator = Simulator::new(sizes);
        let ids: Vec<RequestId> = (0..3)
            .map(|seed| simulator.submit(&prompt(seed, 30), &params))
            .collect();
        for _ in 0..num_steps {
            simulator.step();
        }
        for &id in &ids {
            assert!(simulator.scheduler.edge().abort(id));
            assert!(!simulator.scheduler.edge().abort(id), "once is enough");
        }
        simulator.run(3);
        assert_eq!(simulator.ended.len(), 9);
        assert!(simulator.ended.values().all(|&reason| reason == 3));
        simulator.assert_empty();
        assert!(!simulator.scheduler.edge().abort(ids[0]), "it has ended");
    }
}

#[test]
fn an_early_end_keeps_nothing_beyond_it() {
    let mut simulator = Simulator::new(config(20, 4));
    let params = SamplingParams {
        ignore_eos: true,
        ..greedy(40)
    };
    let prompt = prompt(2, 6);
    let id = simulator.submit(&prompt, &params);
    for _ in 0..12 {
        simulator.step();
    }
    simulator.scheduler.edge().finish(id, 0, 3);
    simulator.run(3);
    assert_eq!(simulator.ended[&(id, 0)], 1);
    let stats = simulator.scheduler.edge().stats();
    assert_eq!(stats.generation_tokens - stats.discarded_tokens, 3);
    assert!(
        simulator.scheduler.pool().num_idle() <= 3,
        "9 tokens are in three blocks"
    );
    simulator.scheduler.edge().finish(id, 0, 3);
    simulator.run(3);
    simulator.assert_empty();
}

#[test]
fn a_failed_step_ends_its_requests_only() {
    let sizes = pagedkv::config::CoreConfig {
        max_num_seqs: 2,
        ..config(20, 4)
    };
    let mut simulator = Simulator::new(sizes);
    let params = greedy(4);
    let prompts: Vec<Vec<u32>> = (0..3).map(|seed| prompt(seed, 6)).collect();
    let ids: Vec<RequestId> = prompts
        .iter()
        .map(|prompt| simulator.submit(prompt, &params))
        .collect();
    let header = simulator
        .scheduler
        .schedule(&mut simulator.arena)
        .unwrap()
        .unwrap();
    assert_eq!(header.num_sequences, 2);
    simulator.scheduler.fail_step().unwrap();
    simulator.check();
    assert!(simulator.scheduler.fail_step().is_err());
    simulator.run(20);
    assert_eq!(
        (simulator.ended[&(ids[0], 0)], simulator.ended[&(ids[1], 0)]),
        (4, 4)
    );
    simulator.assert_complete((ids[2], 0), &prompts[2], &params);
    simulator.assert_empty();
}

#[test]
fn calls_out_of_turn_change_nothing() {
    let mut simulator = Simulator::new(config(20, 4));
    let mut states = Vec::new();
    assert!(
        simulator
            .scheduler
            .commit(1, &[], &BeamRows::default(), &mut states)
            .is_err()
    );
    let (prompt, params) = (prompt(0, 5), greedy(3));
    let id = simulator.submit(&prompt, &params);
    assert!(simulator.scheduler.schedule(&mut [0; 4]).is_err());
    let header = simulator
        .scheduler
        .schedule(&mut simulator.arena)
        .unwrap()
        .unwrap();
    assert!(
        simulator
            .scheduler
            .commit(header.step_id + 1, &[1], &BeamRows::default(), &mut states)
            .is_err()
    );
    assert!(
        simulator
            .scheduler
            .commit(header.step_id, &[1, 2], &BeamRows::default(), &mut states)
            .is_err()
    );
    simulator.check();
    let tokens = simulator.forward(&header);
    simulator
        .scheduler
        .commit(header.step_id, &tokens, &BeamRows::default(), &mut states)
        .unwrap();
    assert_eq!(tokens[0].cast_unsigned(), expected(&prompt, &params, 0).0[0]);
    simulator.run(10);
    assert!(simulator.ended.contains_key(&(id, 0)));
}

/// The arena of one mixed step, word for word: the Python tests read the same file.
#[test]
fn the_arena_equals_the_golden_file() {
    let sizes = pagedkv::config::CoreConfig {
        max_num_batched_tokens: 12,
        ..config(20, 4)
    };
    let mut simulator = Simulator::new(sizes);
    let decode = SamplingParams {
        temperature: 0.5,
        top_p: 0.9,
        min_p: 0.1,
        top_k: 7,
        seed: 1 << 40 | 5,
        ignore_eos: true,
        ..greedy(9)
    };
    simulator.submit(&prompt(1, 5), &decode);
    simulator.step().unwrap();
    simulator.submit(
        &prompt(2, 6),
        &SamplingParams {
            n: 2,
            num_logprobs: 3,
            ..greedy(9)
        },
    );
    let left = simulator.submit(&prompt(4, 6), &greedy(9));
    simulator.submit(&prompt(3, 20), &greedy(9));
    simulator.scheduler.edge().abort(left);
    let header = simulator
        .scheduler
        .schedule(&mut simulator.arena)
        .unwrap()
        .unwrap();
    assert_eq!(
        (
            header.num_decodes,
            header.num_sequences,
            header.num_rows,
            header.num_ended
        ),
        (1, 3, 3, 1)
    );
    let last = section(&simulator.arena, Section::Ended).as_ptr_range().end;
    let len = (last as usize - simulator.arena.as_ptr() as usize) / size_of::<i32>();
    let words: Vec<String> = simulator.arena[..len].iter().map(i32::to_string).collect();
    let golden = include_str!("../data/arena_v1.txt");
    let golden: Vec<&str> = golden.split_whitespace().collect();
    assert_eq!(words, golden, "{}", words.join(" "));
}
