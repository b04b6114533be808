//! Requests whose samples have not all ended, by the flag slot of their ids.

use crate::ids::RequestId;

use super::request::Request;
use super::slab::SeqIdx;

#[derive(Debug)]
pub(super) struct LiveRequest {
    pub(super) id: RequestId,
    pub(super) request: Box<Request>,
    /// Its sequences: one until the prompt is computed, then one per sample that has not ended.
    pub(super) sequences: Vec<SeqIdx>,
}

#[derive(Debug)]
pub(super) struct LiveRequests {
    slots: Vec<Option<LiveRequest>>,
}

impl LiveRequests {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            slots: (0..capacity).map(|_| None).collect(),
        }
    }

    pub(super) fn insert(&mut self, live: LiveRequest) {
        let slot = live.id.slot() as usize;
        let before = self.slots[slot].replace(live);
        assert!(before.is_none(), "a flag slot belongs to one live request");
    }

    pub(super) fn remove(&mut self, id: RequestId) {
        let ended = self.slots[id.slot() as usize].take();
        assert!(
            ended.is_some_and(|live| live.id == id),
            "only a live request ends"
        );
    }

    /// None when the request has ended.
    pub(super) fn find(&self, id: RequestId) -> Option<&LiveRequest> {
        self.slots[id.slot() as usize]
            .as_ref()
            .filter(|live| live.id == id)
    }

    /// The request of a live sequence.
    pub(super) fn of(&self, id: RequestId) -> &LiveRequest {
        self.find(id).expect("a live sequence has a live request")
    }

    /// The request of a live sequence.
    pub(super) fn of_mut(&mut self, id: RequestId) -> &mut LiveRequest {
        let live = self.slots[id.slot() as usize].as_mut();
        live.filter(|live| live.id == id)
            .expect("a live sequence has a live request")
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &LiveRequest> {
        self.slots.iter().flatten()
    }
}
