//! How long a client's thread is held by a request while another thread takes steps all the time: `prepare`, which
//! checks and hashes a prompt and allocates, `push` of what was prepared, `abort`, and `submit`, which is `prepare` and
//! `push` in one.
//!
//! No call waits for the step; `push` and `abort` are a few atomic operations. The quantiles are of single calls, timer
//! included (about 20 ns); on fewer free cores than threads the far tail is the operating system's.
//!
//! `cargo bench --bench edge`

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a benchmark prints its figures, and stops at the first surprise"
)]

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use pagedkv::block::Eviction;
use pagedkv::config::{CoreConfig, HostTier};
use pagedkv::sched::{BeamRows, Edge, SamplingParams, Scheduler};

const NUM_CALLS: usize = 200_000;
const NUM_DECODING: u32 = 256;
const PROMPT_LEN: usize = 1024;

fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        max_tokens,
        ignore_eos: true,
        ..SamplingParams::default()
    }
}

/// Takes steps until told to stop; returns how many.
fn take_steps(mut scheduler: Scheduler, stop: &mpsc::Receiver<()>) -> u64 {
    let mut arena = vec![0; scheduler.arena_len()];
    let (mut tokens, mut states) = (Vec::new(), Vec::new());
    let mut num_steps = 0;
    while stop.try_recv().is_err() {
        let Some(header) = scheduler.schedule(&mut arena).unwrap() else {
            continue;
        };
        if header.num_tokens > 0 {
            tokens.resize(header.num_rows as usize, 7);
            scheduler
                .commit(header.step_id, &tokens, &BeamRows::default(), &mut states)
                .unwrap();
        }
        num_steps += 1;
    }
    num_steps
}

/// The result of a call and its time in nanoseconds.
fn timed<T>(call: impl FnOnce() -> T) -> (T, u64) {
    let start = Instant::now();
    let result = call();
    (result, start.elapsed().as_nanos() as u64)
}

/// Times the calls, one request after another, every other one by `submit`.
fn time_calls(edge: &Edge) -> [(&'static str, Vec<u64>); 4] {
    let [mut prepares, mut pushes, mut aborts, mut submits] =
        std::array::from_fn(|_| Vec::with_capacity(NUM_CALLS));
    while aborts.len() < 2 * NUM_CALLS {
        let (prompt, params) = (vec![3; PROMPT_LEN], params(8));
        let id = if aborts.len().is_multiple_of(2) {
            let (prepared, prepare_ns) = timed(|| edge.prepare(prompt, params, Vec::new()).unwrap());
            let (pushed, push_ns) = timed(|| edge.push(prepared));
            pushed.ok().inspect(|_| {
                prepares.push(prepare_ns);
                pushes.push(push_ns);
            })
        } else {
            let (submitted, submit_ns) = timed(|| edge.submit(prompt, params, Vec::new()));
            submitted.ok().inspect(|_| submits.push(submit_ns))
        };
        if let Some(id) = id {
            aborts.push(timed(|| edge.abort(id)).1);
        } else {
            // A refusal is quick as well, but it is not what is measured.
            thread::sleep(Duration::from_micros(50));
        }
    }
    [
        ("prepare", prepares),
        ("push", pushes),
        ("abort", aborts),
        ("submit", submits),
    ]
}

fn report(name: &str, mut times_ns: Vec<u64>) {
    times_ns.sort_unstable();
    let quantile = |share: f64| times_ns[((times_ns.len() as f64 * share) as usize).min(times_ns.len() - 1)];
    let shown: Vec<String> = [0.5, 0.99, 0.999, 0.9999]
        .iter()
        .map(|&share| format!("p{}: {} ns", share * 100.0, quantile(share)))
        .collect();
    println!("{name:<8}{}", shown.join("  "));
}

fn main() {
    let config = CoreConfig {
        num_blocks: 80_000,
        block_size: 16,
        max_num_seqs: 2 * NUM_DECODING,
        max_num_batched_tokens: 2048,
        max_model_len: 4096,
        eos_token_ids: Vec::new(),
        prefix_caching: true,
        partial_matching: true,
        eviction: Eviction::default(),
        tenants: Vec::new(),
        max_pinned_blocks: 0,
        max_pinned_blocks_per_tenant: None,
        max_queued_requests: 4096,
        host: HostTier::default(),
    };
    let scheduler = Scheduler::new(config, [1, 2, 3, 4]).unwrap();
    let edge = scheduler.edge().clone();
    for _ in 0..NUM_DECODING {
        edge.submit(vec![5; 512], params(3500), Vec::new()).unwrap();
    }
    let (stop, stopped) = mpsc::channel();
    let engine = thread::spawn(move || take_steps(scheduler, &stopped));
    let start = Instant::now();
    let times = time_calls(&edge);
    let elapsed = start.elapsed();
    stop.send(()).unwrap();
    let num_steps = engine.join().unwrap();
    println!(
        "{NUM_CALLS} calls of each kind beside {num_steps} steps in {:.1} s",
        elapsed.as_secs_f64()
    );
    for (name, times_ns) in times {
        report(name, times_ns);
    }
}
