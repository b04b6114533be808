//! More submitting threads than cores against a running scheduler: nothing is lost, nothing ends twice, and no
//! request's tokens depend on the others.

use std::thread;

use pagedkv::config::CoreConfig;
use pagedkv::error::SubmitError;
use pagedkv::ids::RequestId;
use pagedkv::sched::{Edge, SamplingParams};

use crate::simulator::{Simulator, config, greedy};

const NUM_THREADS: u32 = 8;
const REQUESTS_PER_THREAD: u32 = 60;

struct Client {
    id: RequestId,
    prompt: Vec<u32>,
    params: SamplingParams,
    left: bool,
}

/// Submits until the queue takes it: a full queue is an answer, not a fault.
fn submit(edge: &Edge, prompt: &[u32], params: &SamplingParams) -> RequestId {
    loop {
        match edge.submit(prompt.to_vec(), params.clone(), vec![]) {
            Ok(id) => return id,
            Err(SubmitError::QueueFull { .. }) => thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

fn client_thread(edge: &Edge, thread_index: u32) -> Vec<Client> {
    (0..REQUESTS_PER_THREAD)
        .map(|number| {
            let prompt: Vec<u32> = (0..=(number * 5 + thread_index) % 37)
                .map(|at| 1 + (at * 3 + number % 4) % 30)
                .collect();
            let params = SamplingParams {
                n: 1 + u32::from(number % 7 == 0),
                seed: u64::from(number % 3),
                ..greedy(1 + number % 19)
            };
            let id = submit(edge, &prompt, &params);
            let leaves = number % 4 == 3;
            if number % 8 == 3 {
                thread::yield_now();
            }
            // False when it has ended in the meantime: then its output must be complete after all.
            let left = leaves && edge.abort(id);
            Client {
                id,
                prompt,
                params,
                left,
            }
        })
        .collect()
}

#[test]
fn many_threads_submit_and_leave_while_steps_run() {
    let sizes = CoreConfig {
        tenants: Vec::new(),
        max_queued_requests: 24,
        max_num_batched_tokens: 24,
        ..config(30, 4)
    };
    let mut simulator = Simulator::new(sizes);
    let edge = simulator.scheduler.edge().clone();
    let clients: Vec<Client> = thread::scope(|scope| {
        let threads: Vec<_> = (0..NUM_THREADS)
            .map(|index| {
                let edge = edge.clone();
                scope.spawn(move || client_thread(&edge, index))
            })
            .collect();
        while threads.iter().any(|client| !client.is_finished()) {
            if simulator.step().is_none() {
                edge.wait(std::time::Duration::from_millis(1));
            }
        }
        threads
            .into_iter()
            .flat_map(|client| client.join().unwrap())
            .collect()
    });
    simulator.run(20_000);
    simulator.assert_empty();
    let num_samples: u32 = clients.iter().map(|client| client.params.n).sum();
    assert_eq!(simulator.ended.len(), num_samples as usize);
    for client in &clients {
        for sample_index in 0..client.params.n {
            // An abort may come too late for a sample that had ended before the request did.
            if !client.left || simulator.ended[&(client.id, sample_index)] != 3 {
                simulator.assert_complete((client.id, sample_index), &client.prompt, &client.params);
            }
        }
    }
}
