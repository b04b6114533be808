//! Dense storage with stable indices: sequences are named by a `u32`, not by a pointer or a lock.

/// Index of a sequence while it lives.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub(super) struct SeqIdx(pub(super) u32);

/// Values at stable indices; a vacated index is used again first.
#[derive(Debug)]
pub(super) struct Slab<T> {
    entries: Vec<Option<T>>,
    vacant: Vec<u32>,
    num_live: usize,
}

impl<T> Slab<T> {
    pub(super) const fn new() -> Self {
        Self {
            entries: Vec::new(),
            vacant: Vec::new(),
            num_live: 0,
        }
    }

    pub(super) fn insert(&mut self, value: T) -> SeqIdx {
        self.num_live += 1;
        if let Some(idx) = self.vacant.pop() {
            self.entries[idx as usize] = Some(value);
            return SeqIdx(idx);
        }
        let idx = u32::try_from(self.entries.len()).expect("fewer than 2^32 sequences live at once");
        self.entries.push(Some(value));
        SeqIdx(idx)
    }

    /// Takes a value out. Its index names nobody until it is vacated.
    pub(super) fn remove(&mut self, idx: SeqIdx) -> T {
        self.num_live -= 1;
        self.entries[idx.0 as usize]
            .take()
            .expect("the index names a live sequence")
    }

    /// Lets the index of a value that was taken out be used again.
    pub(super) fn vacate(&mut self, idx: SeqIdx) {
        debug_assert!(self.find(idx).is_none(), "the index is in use");
        self.vacant.push(idx.0);
    }

    /// None where the value was taken out.
    #[inline]
    pub(super) fn find(&self, idx: SeqIdx) -> Option<&T> {
        self.entries[idx.0 as usize].as_ref()
    }

    #[inline]
    pub(super) fn get(&self, idx: SeqIdx) -> &T {
        self.entries[idx.0 as usize]
            .as_ref()
            .expect("the index names a live sequence")
    }

    #[inline]
    pub(super) fn get_mut(&mut self, idx: SeqIdx) -> &mut T {
        self.entries[idx.0 as usize]
            .as_mut()
            .expect("the index names a live sequence")
    }

    pub(super) fn len(&self) -> usize {
        self.num_live
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SeqIdx, &T)> {
        (0u32..)
            .zip(&self.entries)
            .filter_map(|(idx, entry)| entry.as_ref().map(|value| (SeqIdx(idx), value)))
    }
}
