//! What steps bring about, on its way to the one thread that wants to know.
//!
//! The owner pushes an event for every sampled row and every sequence that ended outside a commit, into a ring with
//! room for two steps. What does not fit, because the reader is slow, waits here in order and goes first, whenever the
//! owner comes by: at the next step, or when the reader has made room and wakes it. So nothing is lost, a slow reader
//! costs the owner memory and nothing else, and a step can be announced once all its events are within reach.

use std::collections::VecDeque;

use crate::config::{CoreConfig, MAX_ENDED_PER_STEP};
use crate::ids::RequestId;
use crate::sync::{Consumer, Producer, ring};

use super::edge::Edge;
use super::in_flight::StepInFlight;
use super::scheduler::{Scheduler, VOID};
use super::step::{Ended, ROW_WORDS, row_request};

/// One thing that happened to a sample.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// The step that brought it about, or with whose commit it is announced.
    pub step_id: u64,
    /// Whose sample it is.
    pub request: RequestId,
    /// Which of the request's samples.
    pub sample_index: u32,
    /// Row of the step; -1 where the sequence ended outside a commit.
    pub row: i32,
    /// What was sampled; -1 where nothing was.
    pub token: i32,
    /// 0 while the sample goes on, or why it ended: [`super::FinishReason`].
    pub state: i32,
    /// Prompt tokens that were found in the cache; -1 where the sequence ended outside a commit.
    pub num_cached_tokens: i32,
}

/// The owner's end.
pub(super) struct EventQueue {
    ring: Producer<Event>,
    /// What did not fit, the oldest first. While there is any, nothing else enters the ring.
    kept: VecDeque<Event>,
}

impl EventQueue {
    fn push(&mut self, event: Event) {
        if !self.kept.is_empty() || self.ring.push(event).is_err() {
            self.kept.push_back(event);
        }
    }

    /// Moves on what was kept, as far as there is room by now.
    pub(super) fn flush(&mut self) {
        while let Some(&event) = self.kept.front()
            && self.ring.push(event).is_ok()
        {
            self.kept.pop_front();
        }
    }
}

/// The reader's end: for one thread, which may be any.
pub struct EventReader {
    ring: Consumer<Event>,
    edge: Edge,
}

impl EventReader {
    /// Takes the events of all steps up to `step_id` that are in the ring, in the order in which they happened.
    pub fn take(&mut self, step_id: u64, into: &mut Vec<Event>) {
        while let Some(event) = self.ring.pop_if(|event| event.step_id <= step_id) {
            into.push(event);
        }
        if self.ring.take_wish() {
            self.edge.wake();
        }
    }
}

impl Scheduler {
    /// Starts to report events, and gives out the one reader. None if there is one already.
    pub fn open_events(&mut self) -> Option<EventReader> {
        if self.events.is_some() {
            return None;
        }
        let (producer, consumer) = ring(capacity(&self.config));
        self.events = Some(EventQueue {
            ring: producer,
            kept: VecDeque::new(),
        });
        Some(EventReader {
            ring: consumer,
            edge: self.edge.clone(),
        })
    }

    /// Whether the reader can take all events of the steps up to `step_id`. If not, some are kept for want of room.
    pub fn has_delivered(&self, step_id: u64) -> bool {
        let kept = self.events.as_ref().and_then(|events| events.kept.front());
        kept.is_none_or(|event| event.step_id > step_id)
    }

    /// Reports the first sequences that ended outside a commit: with the oldest step in flight, whose events are the
    /// next to be taken.
    pub(super) fn report_ended(&mut self, num_ended: usize) {
        let step_id = self.oldest_step();
        let Some(events) = &mut self.events else { return };
        for ended in self.ended.range(..num_ended) {
            let &Ended {
                request,
                sample_index,
                reason,
            } = ended;
            events.push(Event {
                step_id,
                request,
                sample_index,
                row: -1,
                token: -1,
                state: reason as i32,
                num_cached_tokens: -1,
            });
        }
    }

    /// Reports the rows of a step with what a commit made of them; nothing of those that were void.
    pub(super) fn report_rows(&mut self, step: &StepInFlight, tokens: &[i32], states: &[i32]) {
        let Some(events) = &mut self.events else { return };
        events.flush();
        let rows = (0..).zip(&step.rows).zip(tokens.iter().zip(states));
        for ((row, words), (&token, &state)) in rows.filter(|(_, (_, state))| **state != VOID) {
            let [_, _, sample_index, num_cached_tokens]: [i32; ROW_WORDS] = *words;
            events.push(Event {
                step_id: step.id,
                request: row_request(words),
                sample_index: sample_index.cast_unsigned(),
                row,
                token,
                state,
                num_cached_tokens,
            });
        }
    }
}

/// Room for the events of two steps: one that is read while the next one is written.
fn capacity(config: &CoreConfig) -> usize {
    2 * (config.max_rows() as usize + MAX_ENDED_PER_STEP)
}
