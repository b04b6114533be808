//! Steps that are scheduled before the one before them is committed: what they take from it, what of them is void, and
//! whose blocks are whose meanwhile.

use pagedkv::block::BlockState;
use pagedkv::config::CoreConfig;
use pagedkv::error::StepError;
use pagedkv::ids::{BlockId, RequestId};
use pagedkv::sched::{BeamRows, CachePriority, HoldKind, SamplingParams, Section, VOID};

use crate::beams::beams;
use crate::holds::{key, sizes as sizes_with_holds, submit_keeping};
use crate::simulator::{EOS, Simulator, config, expected, greedy, prompt, section};

/// Greedy, and never ended by the model's end token.
fn steadily(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        ignore_eos: true,
        ..greedy(max_tokens)
    }
}

fn schedule(simulator: &mut Simulator) -> Option<pagedkv::sched::StepHeader> {
    simulator.scheduler.schedule(&mut simulator.arena).unwrap()
}

#[test]
fn the_next_step_takes_its_tokens_from_the_one_in_flight() {
    let mut simulator = Simulator::new(config(40, 4));
    let prompts = [prompt(0, 5), prompt(1, 9)];
    for prompt in &prompts {
        simulator.submit(prompt, &steadily(9));
    }
    let first = schedule(&mut simulator).unwrap();
    assert_eq!((first.num_rows, first.num_decodes), (2, 0));
    let sampled = simulator.forward(&first);
    let second = schedule(&mut simulator).unwrap();
    assert_eq!(
        (second.num_tokens, second.num_decodes, second.num_rows),
        (2, 2, 2)
    );
    let view = |wanted| section(&simulator.arena, wanted).to_vec();
    assert_eq!(view(Section::TokenSource), [0, 1]);
    assert_eq!(view(Section::Positions), [5, 9]);
    assert_eq!(simulator.scheduler.num_in_flight(), 2);
    let third = simulator.scheduler.schedule(&mut simulator.arena);
    assert_eq!(
        third.unwrap_err(),
        StepError::InFlight {
            step_id: first.step_id
        }
    );
    // They are committed in their order.
    let mut states = Vec::new();
    let mut commit = |step_id, tokens: &[i32]| {
        let rows = BeamRows::default();
        simulator.scheduler.commit(step_id, tokens, &rows, &mut states)
    };
    assert!(commit(second.step_id, &[1, 1]).is_err());
    assert_eq!(commit(first.step_id, &sampled), Ok(()));
    assert!(commit(first.step_id, &sampled).is_err());
    assert_eq!(commit(second.step_id, &[1, 1]), Ok(()));
    simulator.check();
}

/// Whatever token an answer ends with, it costs one void row, and its blocks come back when that is committed.
#[test]
fn an_end_at_every_place_voids_one_row() {
    let (prompt, num_tokens) = (prompt(3, 6), 18);
    let (whole, _) = expected(&prompt, &steadily(num_tokens), 0);
    for at in 0..whole.len() - 1 {
        if whole[..at].contains(&whole[at]) {
            continue;
        }
        let params = SamplingParams {
            stop_token_ids: vec![whole[at]],
            ..steadily(num_tokens)
        };
        let mut simulator = Simulator::overlapped(config(20, 4));
        let id = simulator.submit(&prompt, &params);
        while !simulator.ended.contains_key(&(id, 0)) {
            simulator.step().unwrap();
        }
        let (pool, stats) = (simulator.scheduler.pool(), simulator.scheduler.edge().stats());
        let num_blocks = (prompt.len() + at + 1).div_ceil(4);
        assert_eq!(simulator.scheduler.num_in_flight(), 1);
        assert_eq!((stats.blocks_fenced, stats.blocks_owned), (num_blocks as u64, 0));
        assert_eq!(pool.num_available(), 20 - num_blocks as u32);
        // Only fenced, they can be found.
        let mut again = prompt.clone();
        again.extend_from_slice(&whole[..=at]);
        assert_eq!(
            simulator.scheduler.lookup(b"", &again).num_cached_tokens as usize,
            prompt.len() + at
        );
        simulator.run(10);
        assert_eq!((simulator.num_void, simulator.num_ahead), (1, at + 1));
        simulator.assert_complete((id, 0), &prompt, &params);
        simulator.assert_empty();
    }
}

#[test]
fn who_ends_by_length_is_not_scheduled_again() {
    let mut simulator = Simulator::overlapped(config(40, 4));
    let requests: Vec<_> = (1..9)
        .map(|max_tokens| (prompt(max_tokens, 7), steadily(max_tokens)))
        .collect();
    let ids: Vec<RequestId> = requests
        .iter()
        .map(|(prompt, params)| simulator.submit(prompt, params))
        .collect();
    simulator.run(60);
    let stats = simulator.scheduler.edge().stats();
    assert_eq!((simulator.num_void, stats.generation_tokens), (0, 36));
    assert_eq!(stats.scheduled_tokens, 8 * 7 + (0..8).sum::<u64>());
    for (id, (prompt, params)) in ids.into_iter().zip(&requests) {
        simulator.assert_complete((id, 0), prompt, params);
    }
    simulator.assert_empty();
}

#[test]
fn nothing_to_schedule_does_not_mean_that_nothing_runs() {
    let mut simulator = Simulator::new(config(20, 4));
    let id = simulator.submit(&prompt(0, 5), &steadily(1));
    let header = schedule(&mut simulator).unwrap();
    let tokens = simulator.forward(&header);
    assert!(schedule(&mut simulator).is_none());
    assert!(simulator.scheduler.has_work());
    assert_eq!(simulator.scheduler.num_in_flight(), 1);
    let mut states = Vec::new();
    let rows = BeamRows::default();
    simulator
        .scheduler
        .commit(header.step_id, &tokens, &rows, &mut states)
        .unwrap();
    assert_eq!((states, id.slot()), (vec![2], 0));
    assert!(schedule(&mut simulator).is_none() && !simulator.scheduler.has_work());
    simulator.assert_empty();
}

/// An abort is seen by the schedule that comes next, at whatever point of two steps it is raised.
#[test]
fn an_abort_at_every_point_frees_everything() {
    for at in 0..12 {
        let mut simulator = Simulator::overlapped(config(40, 4));
        let (prompts, params) = ([prompt(0, 30), prompt(1, 6)], steadily(9));
        let ids = prompts.each_ref().map(|prompt| simulator.submit(prompt, &params));
        for _ in 0..at {
            simulator.step().unwrap();
        }
        simulator.scheduler.edge().abort(ids[0]);
        simulator.run(60);
        assert_eq!(simulator.ended[&(ids[0], 0)], 3);
        assert!(simulator.num_void <= 2);
        simulator.assert_complete((ids[1], 0), &prompts[1], &params);
        simulator.assert_empty();
    }
}

/// Nobody is given what a step in flight may still write, however short of blocks others are.
#[test]
fn fenced_blocks_are_waited_for_and_nobody_is_preempted() {
    let prompt_of_first = prompt(3, 6);
    let (whole, _) = expected(&prompt_of_first, &steadily(9), 0);
    let mut simulator = Simulator::overlapped(CoreConfig {
        partial_matching: false,
        ..config(5, 4)
    });
    let first = SamplingParams {
        stop_token_ids: vec![whole[3]],
        ..steadily(9)
    };
    let ended = simulator.submit(&prompt_of_first, &first);
    while !simulator.ended.contains_key(&(ended, 0)) {
        simulator.step().unwrap();
    }
    // All of the pool; three blocks of it are fenced.
    let prompt = prompt(4, 16);
    let id = simulator.submit(&prompt, &steadily(5));
    assert_eq!(simulator.scheduler.pool().num_available(), 2);
    simulator.run(40);
    assert_eq!(simulator.scheduler.edge().stats().preemptions, 0);
    simulator.assert_complete((id, 0), &prompt, &steadily(5));
    simulator.assert_empty();
}

/// With too small a pool, overlap costs few steps and few preemptions more, and everything ends.
#[test]
fn a_pool_that_is_too_small_is_not_thrashed() {
    let run = |overlap: bool, num_blocks: u32| {
        let mut simulator = Simulator::with_overlap(config(num_blocks, 4), overlap);
        let requests: Vec<_> = (0..40u32)
            .map(|number| (prompt(number, 9), steadily(20 + number % 7)))
            .collect();
        let ids: Vec<RequestId> = requests
            .iter()
            .map(|(prompt, params)| simulator.submit(prompt, params))
            .collect();
        simulator.run(20_000);
        for (id, (prompt, params)) in ids.into_iter().zip(&requests) {
            simulator.assert_complete((id, 0), prompt, params);
        }
        simulator.assert_empty();
        simulator.scheduler.edge().stats()
    };
    for num_blocks in [10, 14, 20, 30] {
        let (one, two) = (run(false, num_blocks), run(true, num_blocks));
        let message = format!(
            "{num_blocks} blocks: {} and {} steps, {} and {} preemptions",
            one.steps, two.steps, one.preemptions, two.preemptions
        );
        assert!(two.steps <= one.steps * 5 / 4 + 10, "{message}");
        assert!(two.preemptions <= one.preemptions * 5 / 4 + 5, "{message}");
    }
}

/// Samples that fork and beams wait for the commit; a chunked prompt beside them does not.
#[test]
fn forks_and_beams_sit_a_step_out() {
    for params in [SamplingParams { n: 3, ..steadily(6) }, beams(3, 6)] {
        let mut simulator = Simulator::new(CoreConfig {
            max_num_batched_tokens: 10,
            ..config(60, 4)
        });
        simulator.submit(&prompt(0, 5), &params);
        simulator.submit(&prompt(1, 30), &steadily(4));
        let first = schedule(&mut simulator).unwrap();
        assert_eq!((first.num_sequences, first.num_tokens), (2, 10));
        let second = schedule(&mut simulator).unwrap();
        let sources = section(&simulator.arena, Section::TokenSource);
        assert_eq!((second.num_sequences, sources), (1, [-1; 10].as_slice()));
        assert_eq!(section(&simulator.arena, Section::Positions)[0], 5);
        simulator.check();
    }
}

#[test]
fn a_failed_step_voids_what_depends_on_it_and_nothing_else() {
    let mut simulator = Simulator::overlapped(config(60, 4));
    let prompts = [prompt(0, 9), prompt(1, 9)];
    let first = simulator.submit(&prompts[0], &steadily(6));
    // The second one comes while the step of the first one is in flight.
    simulator.step().unwrap();
    let second = simulator.submit(&prompts[1], &steadily(6));
    let failed = simulator.fail().unwrap();
    assert_eq!(
        (failed.num_sequences, simulator.scheduler.num_in_flight()),
        (1, 1)
    );
    simulator.run(40);
    assert_eq!((simulator.ended[&(first, 0)], simulator.num_void), (4, 1));
    simulator.assert_complete((second, 0), &prompts[1], &steadily(6));
    simulator.assert_empty();
}

#[test]
fn a_row_that_cannot_be_sampled_ends_its_request_and_no_other() {
    for (overlap, num_steps) in (0..6).flat_map(|steps| [(false, steps), (true, steps)]) {
        let mut simulator = Simulator::with_overlap(config(80, 4), overlap);
        let samples = SamplingParams { n: 3, ..steadily(8) };
        let all = [steadily(8), samples, beams(3, 8), steadily(8)];
        let ids: Vec<RequestId> = (0..)
            .zip(&all)
            .map(|(seed, params)| simulator.submit(&prompt(seed, 9), params))
            .collect();
        for _ in 0..num_steps {
            simulator.step();
        }
        simulator.broken.extend(&ids[..3]);
        simulator.run(40);
        let ended: Vec<i32> = [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
            .map(|(request, index): (usize, u32)| simulator.ended[&(ids[request], index)])
            .to_vec();
        assert_eq!(ended, [4; 7]);
        simulator.assert_complete((ids[3], 0), &prompt(3, 9), &all[3]);
        simulator.assert_empty();
        let stats = simulator.scheduler.edge().stats();
        assert_eq!((stats.finished_error, stats.finished_length), (7, 1));
    }
}

/// What made logits that cannot be sampled may stand in the cache as well; where the prompt came in chunks, earlier ones
/// could be found before there were logits.
#[test]
fn nobody_finds_what_was_computed_of_a_row_that_could_not_be_sampled() {
    for (overlap, chunk) in [(false, 64), (true, 64), (false, 8), (true, 8)] {
        let mut config = config(60, 4);
        config.max_num_batched_tokens = chunk;
        let mut simulator = Simulator::with_overlap(config, overlap);
        let broken = simulator.submit(&prompt(0, 21), &steadily(8));
        simulator.broken.insert(broken);
        simulator.run(20);
        assert_eq!(simulator.ended[&(broken, 0)], 4);
        simulator.assert_empty();
        let again = simulator.submit(&prompt(0, 21), &steadily(8));
        simulator.run(40);
        assert_eq!(simulator.cached[&again], 0);
        simulator.assert_complete((again, 0), &prompt(0, 21), &steadily(8));
    }
}

/// As long as another request holds them, whoever comes would find them, and fail: without an end if they keep coming.
#[test]
fn nobody_finds_bad_chunks_although_others_hold_them() {
    for overlap in [false, true] {
        let mut config = config(60, 4);
        config.max_num_batched_tokens = 18;
        let mut simulator = Simulator::with_overlap(config, overlap);
        let long = |last: u32| [prompt(0, 40), vec![last]].concat();
        let broken = simulator.submit(&long(1), &steadily(8));
        simulator.broken.insert(broken);
        simulator.step();
        // Another one finds what was computed so far, and is at its own prompt when the first one fails.
        let longer = [prompt(0, 32), prompt(2, 60)].concat();
        let late = simulator.submit(&longer, &steadily(8));
        while !simulator.ended.contains_key(&(broken, 0)) {
            simulator.step().expect("somebody runs");
        }
        let next = simulator.submit(&long(4), &steadily(8));
        simulator.run(400);
        assert_eq!(simulator.ended[&(broken, 0)], 4);
        assert!(simulator.cached[&late] > 0);
        assert_eq!(
            simulator.cached[&next], 0,
            "another one held what the broken one left"
        );
        simulator.assert_complete((late, 0), &longer, &steadily(8));
        simulator.assert_complete((next, 0), &long(4), &steadily(8));
        // What was computed since is found again.
        let again = simulator.submit(&long(5), &steadily(8));
        simulator.run(400);
        assert_eq!(simulator.cached[&again], 40);
        simulator.assert_empty();
    }
}

/// What somebody was sampled from is good: it stays for others, whoever fails beyond it.
#[test]
fn what_others_were_sampled_from_is_found_although_somebody_fails_beyond_it() {
    for overlap in [false, true] {
        let mut simulator = Simulator::with_overlap(config(60, 4), overlap);
        let alike = |last: u32| [prompt(0, 20), vec![last; 5]].concat();
        let good = simulator.submit(&alike(1), &steadily(30));
        simulator.step();
        simulator.step();
        let broken = simulator.submit(&alike(2), &steadily(8));
        simulator.broken.insert(broken);
        simulator.step();
        simulator.step();
        let next = simulator.submit(&alike(3), &steadily(8));
        simulator.run(200);
        assert_eq!(simulator.ended[&(broken, 0)], 4);
        assert_eq!(simulator.cached[&next], 20);
        simulator.assert_complete((good, 0), &alike(1), &steadily(30));
    }
}

/// A session that ends in a step while the next one is in flight keeps what is computed, not what is void.
#[test]
fn a_session_keeps_what_was_computed_when_it_ended() {
    let prompt = prompt(2, 9);
    let (whole, _) = expected(&prompt, &steadily(20), 0);
    for &end in &whole[..8] {
        let params = SamplingParams {
            stop_token_ids: vec![end],
            ..steadily(20)
        };
        let mut simulator = Simulator::overlapped(sizes_with_holds(40, 4, 20));
        let session = key(HoldKind::Session, b"", "s");
        let (id, _) = submit_keeping(&mut simulator, session.clone(), &prompt, &params, false).unwrap();
        while !simulator.ended.contains_key(&(id, 0)) {
            simulator.step().unwrap();
        }
        let num_tokens = prompt.len() + simulator.generated[&(id, 0)].len();
        let held = simulator.scheduler.hold(&session).unwrap();
        assert_eq!(held.num_tokens as usize, num_tokens);
        assert_eq!(held.num_blocks as usize, (num_tokens - 1).div_ceil(4));
        // Deleted while its blocks are still in flight.
        simulator.scheduler.delete_hold(&session).unwrap();
        simulator.check();
        simulator.run(10);
        simulator.assert_empty();
    }
}

/// What a step in flight fills is found only once that is committed, by nobody twice.
#[test]
fn equal_prompts_wait_for_a_step_in_flight() {
    let mut simulator = Simulator::overlapped(config(60, 4));
    let (prompt, params) = (prompt(0, 33), steadily(4));
    let first = simulator.submit(&prompt, &params);
    simulator.step().unwrap();
    let second = simulator.submit(&prompt, &params);
    simulator.run(40);
    for id in [first, second] {
        simulator.assert_complete((id, 0), &prompt, &params);
    }
    assert_eq!(simulator.cached[&second], 32);
    assert_eq!(simulator.scheduler.edge().stats().prompt_tokens, 34);
}

/// Blocks that were exchanged for equal ones stay with the step that reads them.
#[test]
fn a_merged_block_is_fenced_until_the_step_that_reads_it() {
    let mut simulator = Simulator::overlapped(config(60, 4));
    let (prompt, params, mut num_fenced) = (prompt(0, 7), steadily(12), 0);
    let ids = [(); 2].map(|()| simulator.submit(&prompt, &params));
    while simulator.step().is_some() {
        num_fenced += simulator.scheduler.pool().num_fenced_by_steps();
    }
    for id in ids {
        simulator.assert_complete((id, 0), &prompt, &params);
    }
    assert!(num_fenced > 0, "their generated blocks are equal");
    simulator.assert_empty();
}

/// The hint that blocks are worth little outlives the step that fences them.
#[test]
fn blocks_of_low_priority_go_first_also_after_a_fence() {
    let whole = expected(&prompt(7, 9), &steadily(9), 0).0;
    for cache_priority in [CachePriority::Normal, CachePriority::Low] {
        let mut simulator = Simulator::overlapped(config(20, 4));
        let kept = simulator.submit(&prompt(5, 9), &steadily(1));
        simulator.run(10);
        let params = SamplingParams {
            cache_priority,
            stop_token_ids: vec![whole[2]],
            ..steadily(9)
        };
        let hinted = simulator.submit(&prompt(7, 9), &params);
        simulator.run(20);
        assert_eq!((simulator.num_void, simulator.ended[&(kept, 0)]), (1, 2));
        assert!(simulator.ended.contains_key(&(hinted, 0)));
        // Room for a stranger: 16 free blocks, and some that were published.
        let stranger = simulator.submit(&prompt(9, 64), &steadily(1));
        simulator.run(20);
        assert!(simulator.ended.contains_key(&(stranger, 0)));
        let found = [prompt(5, 9), prompt(7, 9)]
            .map(|prompt| simulator.scheduler.lookup(b"", &prompt).num_cached_tokens);
        assert!(
            (found[0] > found[1]) == (cache_priority == CachePriority::Low),
            "{found:?} are left"
        );
    }
}

#[test]
fn only_full_blocks_are_lent_while_a_step_is_in_flight() {
    let mut simulator = Simulator::overlapped(config(20, 4));
    simulator.submit(&prompt(0, 10), &steadily(9));
    for _ in 0..4 {
        simulator.step().unwrap();
    }
    assert!(simulator.scheduler.num_in_flight() > 0);
    let full = simulator.scheduler.sequences()[0].blocks[0];
    let lease = simulator.scheduler.lease_for_copy(vec![full]);
    simulator.run(40);
    assert_eq!(simulator.scheduler.pool().state(full), BlockState::Fenced);
    drop(lease);
    assert!(simulator.step().is_none());
    simulator.assert_empty();
}

#[test]
#[should_panic(expected = "blocks were lent while a step writes")]
fn a_block_that_is_written_is_not_lent() {
    let mut simulator = Simulator::overlapped(config(20, 4));
    simulator.submit(&prompt(0, 10), &steadily(9));
    simulator.step().unwrap();
    let tail: Vec<BlockId> = simulator.scheduler.sequences()[0].blocks[2..].to_vec();
    drop(simulator.scheduler.lease_for_copy(tail));
}

/// The same commands give the same arenas, word for word.
#[test]
fn the_schedule_follows_from_the_commands() {
    let run = || {
        let mut simulator = Simulator::overlapped(config(24, 4));
        let mut words = Vec::new();
        for number in 0..200u32 {
            if number % 3 == 0 {
                let params = SamplingParams {
                    n: 1 + number % 2,
                    ..greedy(1 + number % 13)
                };
                simulator.submit(&prompt(number % 7, 1 + number as usize % 20), &params);
            }
            simulator.step();
            words.extend_from_slice(&simulator.arena);
        }
        assert!(simulator.num_void > 0 && words.contains(&(EOS.cast_signed())));
        words
    };
    assert!(run() == run());
}

/// A row of a search that was aborted is void, and its candidates are passed over.
#[test]
fn an_aborted_search_leaves_the_other_one_alone() {
    let mut simulator = Simulator::new(config(60, 4));
    let ids = [0, 1].map(|seed| simulator.submit(&prompt(seed, 5), &beams(2, 5)));
    let header = schedule(&mut simulator).unwrap();
    simulator.forward(&header);
    let (per_row, tokens, logprobs) = simulator.candidates();
    simulator.scheduler.edge().abort(ids[0]);
    // Heard by a command, before the commit.
    assert!(
        simulator
            .scheduler
            .hold(&key(HoldKind::Session, b"", "s"))
            .is_err()
    );
    let rows = BeamRows {
        tokens: &tokens,
        logprobs: &logprobs,
        per_row,
    };
    let mut states = Vec::new();
    simulator
        .scheduler
        .commit(header.step_id, &[0, 0], &rows, &mut states)
        .unwrap();
    assert_eq!(states, [VOID, 0]);
    let left = simulator.scheduler.sequences();
    assert!(left.len() == 2 && left.iter().all(|beam| beam.request == ids[1]));
}

/// A copy that a step in flight is to make is found by nobody: the step may fail before.
#[test]
fn a_tail_that_a_step_in_flight_copies_is_not_published() {
    let mut simulator = Simulator::new(config(20, 4));
    let params = SamplingParams { n: 2, ..steadily(9) };
    let id = simulator.submit(&prompt(0, 6), &params);
    simulator.step().unwrap();
    assert_eq!(schedule(&mut simulator).unwrap().num_copies, 1);
    simulator.scheduler.edge().abort(id);
    // Heard by a command, before the step has failed.
    let session = key(HoldKind::Session, b"", "s");
    assert!(simulator.scheduler.hold(&session).is_err());
    simulator.scheduler.fail_step().unwrap();
    let longer = prompt(0, 7);
    let again = simulator.submit(&longer, &steadily(4));
    simulator.run(20);
    simulator.assert_complete((again, 0), &longer, &steadily(4));
    // The other sample's tail, which was computed before, is as good as ever.
    assert_eq!(simulator.cached[&again], 6);
    simulator.assert_empty();
}
