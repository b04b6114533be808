//! Where sequences wait and where they run.

use std::collections::{BTreeMap, BTreeSet};

use super::fairness::TenantIdx;
use super::slab::SeqIdx;

/// Place in a queue: by priority, the least number first, then in the order of arrival, then by sample.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct QueueKey {
    pub(super) priority: i32,
    pub(super) arrival: u64,
    pub(super) sample_index: u32,
}

impl QueueKey {
    const FIRST: Self = Self {
        priority: i32::MIN,
        arrival: 0,
        sample_index: 0,
    };
    const LAST: Self = Self {
        priority: i32::MAX,
        arrival: u64::MAX,
        sample_index: u32::MAX,
    };
}

/// Every live sequence is in exactly one of the two: it waits, in the queue of its tenant, or it runs.
#[derive(Debug, Default)]
pub(super) struct Queues {
    waiting: BTreeMap<(TenantIdx, QueueKey), SeqIdx>,
    /// The waiting sequences by arrival and sample: the one that waits longest is first.
    by_age: BTreeSet<(u64, u32, SeqIdx)>,
    running: Vec<(QueueKey, SeqIdx)>,
    /// Running samples other than the first one of their request.
    num_forks: usize,
    /// Counts how often a sequence began or ceased to run.
    num_changes: u64,
}

impl Queues {
    pub(super) fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn num_running(&self) -> usize {
        self.running.len()
    }

    pub(super) fn wait(&mut self, tenant: TenantIdx, key: QueueKey, idx: SeqIdx) {
        let before = self.waiting.insert((tenant, key), idx);
        assert!(before.is_none(), "a key names one sequence");
        self.by_age.insert((key.arrival, key.sample_index, idx));
    }

    pub(super) fn run(&mut self, key: QueueKey, idx: SeqIdx) {
        let at = self.place(key).expect_err("a key names one sequence");
        self.running.insert(at, (key, idx));
        self.num_forks += usize::from(key.sample_index > 0);
        self.num_changes += 1;
    }

    /// Takes a sequence out of the queue that it is in.
    pub(super) fn remove(&mut self, tenant: TenantIdx, key: QueueKey) {
        if let Ok(at) = self.place(key) {
            self.running.remove(at);
            self.num_forks -= usize::from(key.sample_index > 0);
            self.num_changes += 1;
        } else {
            let idx = self
                .waiting
                .remove(&(tenant, key))
                .expect("a live sequence is in a queue");
            self.by_age.remove(&(key.arrival, key.sample_index, idx));
        }
    }

    /// Of every tenant that has a waiting sequence which is not passed over: the tenant, and the first such one.
    pub(super) fn first_of_tenants<'a>(
        &'a self,
        is_passed: impl Fn(SeqIdx) -> bool + 'a,
    ) -> impl Iterator<Item = (TenantIdx, QueueKey, SeqIdx)> + 'a {
        let mut from = TenantIdx::FIRST;
        std::iter::from_fn(move || {
            let ahead = (from, QueueKey::FIRST)..(TenantIdx::LAST, QueueKey::LAST);
            let mut ahead = self
                .waiting
                .range(ahead)
                .map(|(&(tenant, key), &idx)| (tenant, key, idx));
            let first = ahead.find(|&(_, _, idx)| !is_passed(idx))?;
            from = first.0.next();
            Some(first)
        })
    }

    /// The waiting sequence that arrived first.
    pub(super) fn longest_waiting(&self) -> Option<SeqIdx> {
        self.by_age.first().map(|&(_, _, idx)| idx)
    }

    /// The running sequence at a place, 0 being the first by key.
    pub(super) fn running_at(&self, at: usize) -> Option<SeqIdx> {
        self.running.get(at).map(|&(_, idx)| idx)
    }

    /// The running sequences from a place on.
    pub(super) fn running_from(&self, at: usize) -> &[(QueueKey, SeqIdx)] {
        &self.running[at..]
    }

    /// In the order of the keys.
    pub(super) fn running(&self) -> impl Iterator<Item = SeqIdx> + '_ {
        self.running.iter().map(|&(_, idx)| idx)
    }

    /// Whether a sample other than the first one of its request runs.
    pub(super) fn has_forks(&self) -> bool {
        self.num_forks > 0
    }

    /// Changes whenever a sequence begins or ceases to run.
    pub(super) fn num_changes(&self) -> u64 {
        self.num_changes
    }

    /// Running sequences behind `key`.
    pub(super) fn running_after(&self, key: QueueKey) -> impl Iterator<Item = SeqIdx> + '_ {
        let from = self.running.partition_point(|&(other, _)| other <= key);
        self.running[from..].iter().map(|&(_, idx)| idx)
    }

    /// Whether the sequence of this key waits, and whether it runs.
    pub(super) fn places_of(&self, tenant: TenantIdx, key: QueueKey) -> (bool, bool) {
        (self.waiting.contains_key(&(tenant, key)), self.place(key).is_ok())
    }

    /// Whether the orders that the lookups rely on hold.
    pub(super) fn is_ordered(&self) -> bool {
        let num_forks = self
            .running
            .iter()
            .filter(|(key, _)| key.sample_index > 0)
            .count();
        self.running.is_sorted_by_key(|&(key, _)| key)
            && self.by_age.len() == self.waiting.len()
            && self.num_forks == num_forks
    }

    fn place(&self, key: QueueKey) -> Result<usize, usize> {
        self.running.binary_search_by_key(&key, |&(key, _)| key)
    }
}
