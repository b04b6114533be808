//! Words that one thread publishes together and any thread reads together.
//!
//! A seqlock with two copies. Version `v` lies in copy `v % 2`, and its publication writes the other copy
//! than the one that readers are sent to; so a reader is disturbed only when two publications pass it during
//! one read, and never waits for a writer that was stopped in the middle.

use super::primitive::{AtomicU64, CachePadded, Ordering, fence};
use std::fmt;

/// `N` words, written by one owner and read by any thread, never torn.
pub struct SnapshotCell<const N: usize> {
    /// How many publications are complete. Written by the owner, read by every reader, before and after the
    /// words.
    version: CachePadded<AtomicU64>,
    /// The words of the last two versions. Written by the owner, read by every reader; each word is an
    /// atomic, so that a read that loses the race is void instead of undefined.
    copies: [[AtomicU64; N]; 2],
}

impl<const N: usize> SnapshotCell<N> {
    /// A cell that reads as zeros until the first publication.
    pub fn new() -> Self {
        let zeros = || std::array::from_fn(|_| AtomicU64::new(0));
        Self {
            version: CachePadded(AtomicU64::new(0)),
            copies: [zeros(), zeros()],
        }
    }

    /// Replaces the words. Owner only; wait-free.
    pub fn publish(&self, words: &[u64; N]) {
        // Relaxed: only the owner writes it.
        let version = self.version.0.load(Ordering::Relaxed) + 1;
        // Pairs with the acquire fence in `read`: whoever sees one of the words written below also sees the
        // version before this one complete, and so knows that the version it started from is outdated.
        fence(Ordering::Release);
        for (word, &value) in self.copy(version).iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        // Release pairs with the acquire load in `read`: who sees the version sees its words.
        self.version.0.store(version, Ordering::Release);
    }

    /// The words of one publication. Any thread; lock-free: a retry means that the owner published meanwhile.
    pub fn read(&self) -> [u64; N] {
        // Acquire pairs with the release store in `publish`.
        let mut version = self.version.0.load(Ordering::Acquire);
        loop {
            let copy = self.copy(version);
            let words = std::array::from_fn(|idx| copy[idx].load(Ordering::Relaxed));
            // Pairs with the release fence in `publish`.
            fence(Ordering::Acquire);
            // Acquire, because a changed version is where the next try begins.
            let current = self.version.0.load(Ordering::Acquire);
            if current == version {
                return words;
            }
            version = current;
        }
    }

    #[inline]
    fn copy(&self, version: u64) -> &[AtomicU64; N] {
        &self.copies[usize::from(version % 2 == 1)]
    }
}

impl<const N: usize> Default for SnapshotCell<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> fmt::Debug for SnapshotCell<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnapshotCell").finish_non_exhaustive()
    }
}
