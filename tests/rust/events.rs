//! What the reader of events hears: everything that steps bring about, once, in order, however slow it is.

use std::collections::HashMap;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use pagedkv::config::CoreConfig;
use pagedkv::sched::{Event, EventReader, SamplingParams};

use crate::simulator::{SampleId, Simulator, config, greedy, prompt};

/// No wake-up takes this long; a test that waits for it has lost one.
const LOST: Duration = Duration::from_secs(30);

/// What events say, sample by sample.
#[derive(Default)]
struct Heard {
    generated: HashMap<SampleId, Vec<u32>>,
    ended: HashMap<SampleId, i32>,
    last_step: u64,
    num_events: usize,
}

impl Heard {
    fn add_all(&mut self, events: &[Event]) {
        for event in events {
            self.add(event);
        }
    }

    fn add(&mut self, event: &Event) {
        assert!(event.step_id >= self.last_step, "{event:?} is late");
        self.last_step = event.step_id;
        self.num_events += 1;
        let sample = (event.request, event.sample_index);
        assert!(!self.ended.contains_key(&sample), "{event:?} is beyond the end");
        assert_eq!(event.token < 0, event.row < 0);
        if event.token >= 0 {
            let tokens = self.generated.entry(sample).or_default();
            tokens.push(event.token.cast_unsigned());
        }
        if event.state != 0 {
            self.ended.insert(sample, event.state);
        }
    }

    fn assert_same(&self, simulator: &Simulator) {
        assert_eq!(self.generated, simulator.generated);
        assert_eq!(self.ended, simulator.ended);
    }
}

fn take(reader: &mut EventReader, step_id: u64) -> Vec<Event> {
    let mut events = Vec::new();
    reader.take(step_id, &mut events);
    events
}

#[test]
fn events_say_what_steps_did() {
    let mut simulator = Simulator::new(config(40, 4));
    let mut reader = simulator.scheduler.open_events().unwrap();
    assert!(simulator.scheduler.open_events().is_none());
    let mut heard = Heard::default();
    let mut ids = Vec::new();
    for round in 0..60 {
        if round < 30 {
            let params = SamplingParams {
                n: 1 + round % 3,
                ..greedy(3 + round % 9)
            };
            ids.push(simulator.submit(&prompt(round, 5 + round as usize), &params));
        }
        match round % 7 {
            3 => assert!(simulator.scheduler.edge().abort(*ids.last().unwrap()) || round >= 30),
            5 => simulator.scheduler.edge().finish(*ids.last().unwrap(), 0, 1),
            _ => {}
        }
        let fails = round == 20;
        let header = if fails { simulator.fail() } else { simulator.step() };
        let Some(header) = header else { continue };
        assert!(simulator.scheduler.has_delivered(header.step_id));
        let events = take(&mut reader, header.step_id);
        let num_rows = if fails { 0 } else { header.num_rows };
        assert_eq!(events.len(), (header.num_ended + num_rows) as usize);
        let (ended, rows) = events.split_at(header.num_ended as usize);
        assert!(ended.iter().all(|event| (event.row, event.token) == (-1, -1)));
        for (row, event) in (0..).zip(rows) {
            assert_eq!((event.row, event.step_id), (row, header.step_id));
            assert_eq!(
                event.num_cached_tokens.cast_unsigned(),
                simulator.cached[&event.request]
            );
        }
        heard.add_all(&events);
    }
    assert!(!simulator.scheduler.has_work());
    assert!((1..=4).all(|reason| heard.ended.values().any(|&other| other == reason)));
    heard.assert_same(&simulator);
}

#[test]
fn steps_that_only_report_ends_have_numbers_of_their_own() {
    let mut simulator = Simulator::new(config(40, 4));
    let mut reader = simulator.scheduler.open_events().unwrap();
    let id = simulator.submit(&prompt(1, 5), &greedy(50));
    simulator.step();
    simulator.scheduler.edge().abort(id);
    let ended = simulator.step().unwrap();
    assert_eq!((ended.num_tokens, ended.num_ended), (0, 1));
    simulator.submit(&prompt(2, 5), &greedy(1));
    let next = simulator.step().unwrap();
    assert!(next.step_id > ended.step_id);
    // The reader is late: it still hears of each step by itself.
    take(&mut reader, ended.step_id - 1);
    assert_eq!(take(&mut reader, ended.step_id).len(), 1);
    assert_eq!(take(&mut reader, next.step_id).len(), 1);
}

/// Sizes under which the requests of [`submit_many`] bring more than 10^4 events, several times what the ring holds.
fn sizes() -> CoreConfig {
    config(200, 16)
}

fn submit_many(simulator: &Simulator) {
    for seed in 0..56 {
        let params = SamplingParams {
            ignore_eos: true,
            ..greedy(200)
        };
        simulator.submit(&prompt(seed, 20), &params);
    }
}

#[test]
fn a_reader_that_sleeps_through_everything_loses_nothing() {
    let mut simulator = Simulator::new(sizes());
    let mut reader = simulator.scheduler.open_events().unwrap();
    submit_many(&simulator);
    let mut steps = Vec::new();
    while let Some(header) = simulator.step() {
        steps.push(header.step_id);
    }
    let edge = simulator.scheduler.edge().clone();
    while edge.wait(Duration::ZERO) {}
    let mut heard = Heard::default();
    let mut num_waits = 0;
    for step_id in steps {
        while !simulator.scheduler.has_delivered(step_id) {
            // The work is done: only the reader can have woken the owner, and only because it was refused.
            assert!(edge.wait(Duration::ZERO), "nobody says that there is room");
            assert!(
                simulator
                    .scheduler
                    .schedule(&mut simulator.arena)
                    .unwrap()
                    .is_none()
            );
            num_waits += 1;
        }
        heard.add_all(&take(&mut reader, step_id));
    }
    assert!(heard.num_events > 10_000 && num_waits > 1);
    assert!(take(&mut reader, u64::MAX).is_empty());
    heard.assert_same(&simulator);
}

#[test]
fn a_slow_reader_in_a_thread_hears_everything_without_further_steps() {
    let mut simulator = Simulator::new(sizes());
    let mut reader = simulator.scheduler.open_events().unwrap();
    submit_many(&simulator);
    let edge = simulator.scheduler.edge().clone();
    let (announce, announced) = mpsc::channel::<u64>();
    let reading = thread::spawn(move || {
        let mut heard = Heard::default();
        // Starts late, and dozes off again and again.
        thread::sleep(Duration::from_millis(300));
        for step_id in announced {
            heard.add_all(&take(&mut reader, step_id));
            assert_eq!(heard.last_step, step_id, "announced but not there");
            if step_id % 100 == 0 {
                thread::sleep(Duration::from_millis(3));
            }
        }
        heard
    });
    let mut waiting = std::collections::VecDeque::new();
    loop {
        let header = simulator.step();
        waiting.extend(header.map(|header| header.step_id));
        while let Some(&step_id) = waiting.front()
            && simulator.scheduler.has_delivered(step_id)
        {
            announce.send(step_id).unwrap();
            waiting.pop_front();
        }
        if header.is_none() && waiting.is_empty() {
            break;
        }
        if header.is_none() {
            assert!(edge.wait(LOST), "a wake-up was lost");
        }
    }
    drop(announce);
    let heard = reading.join().unwrap();
    assert!(heard.num_events > 10_000);
    heard.assert_same(&simulator);
}
