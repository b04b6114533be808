//! The tokens of a sequence, with the last one at hand: a step that decodes reads no other, and the list itself lies
//! in memory that nothing else of the step touches.

use std::ops::Deref;

/// Prompt and generated tokens, at least one.
#[derive(Clone, Default, Debug)]
pub(super) struct TokenIds {
    ids: Vec<u32>,
    last: u32,
}

impl TokenIds {
    #[inline]
    pub(super) fn push(&mut self, token: u32) {
        self.ids.push(token);
        self.last = token;
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.ids.truncate(len);
        self.last = *self.ids.last().expect("a prompt has tokens");
    }

    /// What `last` of the slice would give.
    #[inline]
    pub(super) const fn newest(&self) -> u32 {
        self.last
    }
}

impl From<Vec<u32>> for TokenIds {
    fn from(ids: Vec<u32>) -> Self {
        let last = *ids.last().expect("a prompt has tokens");
        Self { ids, last }
    }
}

impl Deref for TokenIds {
    type Target = [u32];

    #[inline]
    fn deref(&self) -> &[u32] {
        &self.ids
    }
}
