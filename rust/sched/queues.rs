//! Where sequences wait and where they run. Both queues are in the order of the keys: the oldest first.

use std::collections::BTreeMap;

use super::slab::SeqIdx;

/// Place in a queue: requests in the order in which they arrived, then their samples.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct QueueKey {
    pub(super) arrival: u64,
    pub(super) sample_index: u32,
}

/// Every live sequence is in exactly one of the two.
#[derive(Debug, Default)]
pub(super) struct Queues {
    waiting: BTreeMap<QueueKey, SeqIdx>,
    running: Vec<(QueueKey, SeqIdx)>,
}

impl Queues {
    pub(super) fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn num_running(&self) -> usize {
        self.running.len()
    }

    pub(super) fn wait(&mut self, key: QueueKey, idx: SeqIdx) {
        let before = self.waiting.insert(key, idx);
        assert!(before.is_none(), "a key names one sequence");
    }

    pub(super) fn run(&mut self, key: QueueKey, idx: SeqIdx) {
        let at = self.place(key).expect_err("a key names one sequence");
        self.running.insert(at, (key, idx));
    }

    /// Takes a sequence out of the queue that it is in.
    pub(super) fn remove(&mut self, key: QueueKey) {
        if let Ok(at) = self.place(key) {
            self.running.remove(at);
        } else {
            self.waiting.remove(&key).expect("a live sequence is in a queue");
        }
    }

    pub(super) fn first_waiting(&self) -> Option<SeqIdx> {
        self.waiting.first_key_value().map(|(_, &idx)| idx)
    }

    /// The running sequence at a place, 0 being the oldest.
    pub(super) fn running_at(&self, at: usize) -> Option<SeqIdx> {
        self.running.get(at).map(|&(_, idx)| idx)
    }

    /// From the oldest to the newest.
    pub(super) fn running(&self) -> impl DoubleEndedIterator<Item = SeqIdx> + '_ {
        self.running.iter().map(|&(_, idx)| idx)
    }

    /// Running sequences newer than `key`, the newest first.
    pub(super) fn running_after(&self, key: QueueKey) -> impl Iterator<Item = SeqIdx> + '_ {
        self.running
            .iter()
            .rev()
            .take_while(move |&&(other, _)| other > key)
            .map(|&(_, idx)| idx)
    }

    /// Whether the sequence of this key waits, and whether it runs.
    pub(super) fn places_of(&self, key: QueueKey) -> (bool, bool) {
        (self.waiting.contains_key(&key), self.place(key).is_ok())
    }

    /// Whether the order that `place` relies on holds.
    pub(super) fn is_ordered(&self) -> bool {
        self.running.is_sorted_by_key(|&(key, _)| key)
    }

    fn place(&self, key: QueueKey) -> Result<usize, usize> {
        self.running.binary_search_by_key(&key, |&(key, _)| key)
    }
}
