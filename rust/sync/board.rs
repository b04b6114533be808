//! A job in pieces, handed out one by one to whoever comes: the meeting point of a thread pool.
//!
//! One word says which job it is and how many of its pieces are left; taking a piece is one exchange of that word. The
//! owner waits for pieces that were taken, not for threads: one that the system has stopped before it took a piece
//! holds up nobody, and finds nothing to do when it comes back.

use super::primitive::{AtomicU32, AtomicU64, CachePadded, Ordering, UnsafeCell};
use std::fmt;

/// The low half of the word: pieces left. The high half is the number of the job.
const LEFT_BITS: u32 = 32;

/// The board of one owner and any number of workers. `J` says what to do; each piece has an index.
pub struct Board<J> {
    /// The number of the job, and how many pieces nobody has taken. Written by the owner to post (all pieces were
    /// finished) and by everyone to take.
    word: CachePadded<AtomicU64>,
    /// Pieces that are not finished. Written by the owner before it posts, counted down by everyone.
    unfinished: CachePadded<AtomicU32>,
    /// The job and its number of pieces. Written by the owner while there is no unfinished piece, read by whoever has
    /// taken one.
    job: UnsafeCell<Option<(J, u32)>>,
}

// SAFETY: the cell is written only while no piece is unfinished, and read only by holders of unfinished pieces.
unsafe impl<J: Copy + Send> Sync for Board<J> {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl<J: Copy + Send> Send for Board<J> {}

impl<J: Copy> Board<J> {
    /// A board without a job.
    pub fn new() -> Self {
        Self {
            word: CachePadded(AtomicU64::new(0)),
            unfinished: CachePadded(AtomicU32::new(0)),
            job: UnsafeCell::new(None),
        }
    }

    /// Posts a job of `num_pieces`, at least one. Owner only, and only when the last job is finished.
    ///
    /// # Panics
    /// If pieces of the last job are unfinished.
    pub fn post(&self, job: J, num_pieces: u32) {
        assert!(self.is_finished(), "the last job is unfinished");
        // SAFETY: every piece of the last job is finished, and what its takers read happened before: see `finish`.
        self.job
            .with_mut(|cell| unsafe { *cell = Some((job, num_pieces)) });
        // Relaxed: the release below publishes it.
        self.unfinished.0.store(num_pieces, Ordering::Relaxed);
        // Relaxed: nobody else changes the number of the job, and no piece is left to take.
        let number = (self.word.0.load(Ordering::Relaxed) >> LEFT_BITS).wrapping_add(1);
        // Release pairs with the acquire exchange in `take`: who takes a piece sees the job and the count. Exchanges
        // of other takers in between continue the release sequence.
        self.word
            .0
            .store(number << LEFT_BITS | u64::from(num_pieces), Ordering::Release);
    }

    /// Takes a piece: the job and the index of the piece, counted up from zero. Any thread. Whoever took one must call
    /// `finish`.
    #[inline]
    pub fn take(&self) -> Option<(J, u32)> {
        // Relaxed: the exchange decides. A word that is out of date has another number or count, and the exchange
        // fails; so a piece that was taken is one of the job in the cell.
        let mut word = self.word.0.load(Ordering::Relaxed);
        loop {
            #[expect(clippy::cast_possible_truncation, reason = "the count is the low half")]
            let left = word as u32;
            if left == 0 {
                return None;
            }
            match self
                .word
                .0
                .compare_exchange_weak(word, word - 1, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => {
                    // SAFETY: the owner writes the cell again only when this piece is finished.
                    let posted = self.job.with(|cell| unsafe { *cell });
                    return posted.map(|(job, num_pieces)| (job, num_pieces - left));
                }
                Err(current) => word = current,
            }
        }
    }

    /// Says that a piece which was taken is done, and whether it was the last one; then the owner may be asleep and
    /// must be woken.
    #[inline]
    pub fn finish(&self) -> bool {
        // Release pairs with the acquire load in `is_finished`, by way of the release sequence of the others'
        // decrements: the owner sees what all pieces did, and writes the job after they read it.
        self.unfinished.0.fetch_sub(1, Ordering::Release) == 1
    }

    /// Whether all pieces are done. What they wrote is then visible to the caller.
    #[inline]
    pub fn is_finished(&self) -> bool {
        // Acquire pairs with the release decrements in `finish`.
        self.unfinished.0.load(Ordering::Acquire) == 0
    }

    /// Whether there seems to be a piece to take: a look that costs other threads nothing.
    #[inline]
    pub fn has_pieces(&self) -> bool {
        // Relaxed: only a hint; `take` looks again.
        self.word.0.load(Ordering::Relaxed) & u64::from(u32::MAX) != 0
    }
}

impl<J: Copy> Default for Board<J> {
    fn default() -> Self {
        Self::new()
    }
}

impl<J> fmt::Debug for Board<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Board").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(pagedkv_loom)))]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_handed_out_once_and_in_order() {
        let board = Board::new();
        assert!(board.is_finished() && board.take().is_none());
        for job in ["first", "second"] {
            board.post(job, 3);
            for idx in 0..3 {
                assert!(board.has_pieces() && !board.is_finished());
                assert_eq!(board.take(), Some((job, idx)));
                assert_eq!(board.finish(), idx == 2);
            }
            assert!(board.is_finished() && board.take().is_none() && !board.has_pieces());
        }
    }

    #[test]
    #[should_panic(expected = "the last job is unfinished")]
    fn a_job_is_not_posted_over_another() {
        let board = Board::new();
        board.post(1, 1);
        board.take();
        board.post(2, 1);
    }
}
