//! Who is served when not everybody can be: look past, reservation, priority, fair shares, sharing within a batch.

use pagedkv::config::CoreConfig;
use pagedkv::ids::RequestId;
use pagedkv::sched::{SamplingParams, Section};

use crate::simulator::{Simulator, config, greedy, prompt, section};

fn running(simulator: &Simulator) -> Vec<RequestId> {
    let views = simulator.scheduler.sequences().into_iter();
    views
        .filter(|view| view.running)
        .map(|view| view.request)
        .collect()
}

fn steadily(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        ignore_eos: true,
        ..greedy(max_tokens)
    }
}

#[test]
fn a_prompt_that_does_not_fit_is_passed_over() {
    let mut simulator = Simulator::new(config(20, 4));
    let first = simulator.submit(&prompt(0, 40), &steadily(30));
    simulator.step();
    let large = simulator.submit(&prompt(1, 60), &steadily(4));
    let small = simulator.submit(&prompt(2, 4), &steadily(4));
    simulator.step();
    assert_eq!(running(&simulator), [first, small]);
    simulator.run(200);
    assert_eq!(simulator.ended[&(large, 0)], 2);
}

#[test]
fn blocks_are_kept_for_whoever_was_passed_over_too_often() {
    let mut simulator = Simulator::new(CoreConfig {
        tenants: Vec::new(),
        max_queued_requests: 4000,
        ..config(24, 4)
    });
    let large = prompt(1, 80);
    let mut large_id = None;
    // Small requests keep coming; each of them would fit beside the others.
    for number in 0..600u32 {
        let small = simulator.submit(&prompt(number % 7, 4), &steadily(10));
        if number == 10 {
            large_id = Some(simulator.submit(&large, &steadily(2)));
        }
        simulator.step();
        if large_id.is_some_and(|id| simulator.ended.contains_key(&(id, 0))) {
            assert!(number < 200, "it came late: at {number}");
            assert!(!simulator.ended.contains_key(&(small, 0)));
            return;
        }
    }
    panic!("the large request starved");
}

#[test]
fn the_least_priority_number_is_served_first() {
    let mut simulator = Simulator::new(CoreConfig {
        max_num_seqs: 1,
        ..config(20, 4)
    });
    let with_priority = |priority| SamplingParams {
        priority,
        ..steadily(2)
    };
    let ids: Vec<RequestId> = [5, 0, -3, 5]
        .map(|priority| simulator.submit(&prompt(1, 5), &with_priority(priority)))
        .to_vec();
    let mut order = Vec::new();
    while simulator.step().is_some() {
        for (number, id) in ids.iter().enumerate() {
            if simulator.ended.contains_key(&(*id, 0)) && !order.contains(&number) {
                order.push(number);
            }
        }
    }
    assert_eq!(order, [2, 1, 0, 3]);
}

#[test]
fn a_higher_priority_takes_blocks_from_a_lower_one() {
    let mut simulator = Simulator::new(config(17, 4));
    let low = simulator.submit(
        &prompt(0, 16),
        &SamplingParams {
            priority: 1,
            ..steadily(30)
        },
    );
    simulator.step();
    let high = simulator.submit(&prompt(1, 16), &steadily(30));
    while !simulator.ended.contains_key(&(high, 0)) {
        simulator.step().unwrap();
    }
    assert!(!simulator.ended.contains_key(&(low, 0)));
    assert_eq!(simulator.scheduler.sequences()[0].num_preemptions, 1);
    simulator.run(100);
    simulator.assert_complete(
        (low, 0),
        &prompt(0, 16),
        &SamplingParams {
            priority: 1,
            ..steadily(30)
        },
    );
}

#[test]
fn tenants_share_fairly_whatever_they_submit() {
    let mut simulator = Simulator::new(CoreConfig {
        max_num_seqs: 2,
        tenants: Vec::new(),
        max_queued_requests: 400,
        ..config(64, 4)
    });
    let submit = |simulator: &Simulator, salt: &[u8], seed, len| {
        simulator
            .scheduler
            .edge()
            .submit(prompt(seed, len), steadily(8), salt.to_vec())
            .unwrap()
    };
    // One tenant floods the queue before the other one comes.
    let flood: Vec<RequestId> = (0..100)
        .map(|seed| submit(&simulator, b"flood", seed, 24))
        .collect();
    simulator.step();
    let modest: Vec<RequestId> = (0..10)
        .map(|seed| submit(&simulator, b"modest", seed, 24))
        .collect();
    while !modest.iter().all(|id| simulator.ended.contains_key(&(*id, 0))) {
        simulator.step().unwrap();
    }
    let num_flood = flood
        .iter()
        .filter(|id| simulator.ended.contains_key(&(**id, 0)))
        .count();
    assert!(
        (8..=14).contains(&num_flood),
        "{num_flood} of the flood's beside 10"
    );
    simulator.run(2000);
}

#[test]
fn a_burst_of_equal_prompts_is_computed_once() {
    let mut simulator = Simulator::new(CoreConfig {
        max_num_seqs: 16,
        ..config(64, 4)
    });
    let ids: Vec<RequestId> = (0..16)
        .map(|_| simulator.submit(&prompt(1, 18), &steadily(4)))
        .collect();
    let header = simulator.step().unwrap();
    assert_eq!(
        (header.num_sequences, header.num_tokens),
        (1, 18),
        "the others wait for its blocks"
    );
    let header = simulator.step().unwrap();
    assert_eq!((header.num_sequences, header.num_tokens), (16, 1 + 15 * 2));
    // Four full blocks of the prompt for all, and a tail for each.
    assert_eq!(simulator.scheduler.pool().num_owned(), 4 + 16);
    simulator.run(40);
    for id in &ids {
        simulator.assert_complete((*id, 0), &prompt(1, 18), &steadily(4));
    }
    assert_eq!(simulator.scheduler.edge().stats().prefix_hits, 15 * 16);
}

#[test]
fn waiting_for_a_block_that_never_comes_ends() {
    let mut simulator = Simulator::new(config(64, 4));
    let first = simulator.submit(&prompt(1, 18), &steadily(4));
    let second = simulator.submit(&prompt(1, 18), &steadily(4));
    // Steps that fail publish nothing, and the one who computes is aborted at last.
    simulator.fail();
    assert_eq!(simulator.ended.get(&(first, 0)), None);
    simulator.scheduler.edge().abort(first);
    simulator.run(40);
    simulator.assert_complete((second, 0), &prompt(1, 18), &steadily(4));
}

#[test]
fn decodes_go_on_beside_a_long_prompt() {
    let sizes = CoreConfig {
        max_num_batched_tokens: 8,
        ..config(64, 4)
    };
    let mut simulator = Simulator::new(sizes);
    let params = steadily(40);
    let decoding = simulator.submit(&prompt(1, 5), &params);
    simulator.step();
    simulator.submit(&prompt(2, 120), &steadily(2));
    for num_generated in 2..15 {
        let header = simulator.step().unwrap();
        assert_eq!((header.num_decodes, header.num_tokens), (1, 8));
        assert_eq!(simulator.generated[&(decoding, 0)].len(), num_generated);
    }
}

/// The same commands at the same steps give the same arenas, word for word.
#[test]
fn the_schedule_follows_from_the_commands() {
    let run = || {
        let mut simulator = Simulator::new(CoreConfig {
            max_num_batched_tokens: 20,
            ..config(18, 4)
        });
        let mut ids = Vec::new();
        let mut log = Vec::new();
        for step in 0..300u32 {
            if step < 120 && step % 3 != 1 {
                let n = 1 + u32::from(step % 10 == 0) * 2;
                let params = SamplingParams {
                    n,
                    priority: step.cast_signed() % 2,
                    ..greedy(1 + step % 13)
                };
                let salt = vec![u8::try_from(step % 2).unwrap()];
                let prompt = prompt(step % 5, 1 + (step * 7 % 33) as usize);
                ids.extend(simulator.scheduler.edge().submit(prompt, params, salt));
            }
            if step % 11 == 5 && !ids.is_empty() {
                simulator
                    .scheduler
                    .edge()
                    .abort(ids[(step * 5) as usize % ids.len()]);
            }
            let header = simulator.step();
            let ended = section(&simulator.arena, Section::Ended).as_ptr_range().end;
            let len = (ended as usize - simulator.arena.as_ptr() as usize) / size_of::<i32>();
            log.push((header, simulator.arena[..len].to_vec()));
        }
        (log, simulator.scheduler.edge().stats())
    };
    let (first, second) = (run(), run());
    assert!(first.1.preemptions > 0 && first.1.finished_abort > 0 && first.1.prefix_hits > 0);
    assert_eq!(first.1, second.1);
    assert!(first.0 == second.0, "two runs of the same commands differ");
}

#[test]
fn a_flood_of_arrivals_is_taken_in_over_several_steps() {
    let mut simulator = Simulator::new(CoreConfig {
        tenants: Vec::new(),
        max_queued_requests: 2000,
        max_num_seqs: 1,
        ..config(64, 4)
    });
    let running = simulator.submit(&prompt(0, 4), &steadily(40));
    simulator.step();
    for seed in 0..600 {
        simulator.submit(&prompt(seed, 4), &steadily(1));
    }
    let num_waiting = |simulator: &mut Simulator| {
        simulator.step();
        simulator.scheduler.edge().stats().num_waiting
    };
    assert_eq!(
        [256, 512, 600],
        [
            num_waiting(&mut simulator),
            num_waiting(&mut simulator),
            num_waiting(&mut simulator)
        ]
    );
    assert_eq!(
        simulator.generated[&(running, 0)].len(),
        4,
        "every step went on with what ran"
    );
    assert!(
        simulator.scheduler.edge().wait(std::time::Duration::ZERO),
        "whoever is left rings again"
    );
    simulator.run(700);
}
