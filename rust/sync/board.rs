//! A job in pieces, handed out to whoever comes: the meeting point of a thread pool.
//!
//! The pieces are dealt to the threads in turn, and a thread takes those of another only when its own are taken: in job
//! after job it works on the same part of the data, which its cache holds. For each thread one word says which job it is
//! and how many of its pieces are left; taking a piece is one exchange of that word. The owner waits for pieces that
//! were taken, not for threads: one that the system has stopped before it took a piece holds up nobody, and finds
//! nothing to do when it comes back.

use super::primitive::{AtomicU32, AtomicU64, CachePadded, Ordering, UnsafeCell};
use std::fmt;

/// The low half of a word: pieces left. The high half is the number of the job.
const LEFT_BITS: u32 = 32;

/// The board of one owner and any number of workers. `J` says what to do; each piece has an index.
pub struct Board<J> {
    /// The number of the job. Written by the owner to post, when everything else is written.
    number: CachePadded<AtomicU32>,
    /// By thread: the number of the job, and how many of the pieces dealt to it nobody has taken. Written by the owner
    /// to post (all pieces were finished) and by everyone to take.
    hands: Box<[CachePadded<AtomicU64>]>,
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
    /// A board without a job, for so many threads, the owner among them.
    ///
    /// # Panics
    /// If there are more than 2^32.
    pub fn new(num_threads: usize) -> Self {
        assert!(u32::try_from(num_threads).is_ok(), "{num_threads} threads");
        Self {
            number: CachePadded(AtomicU32::new(0)),
            hands: (0..num_threads).map(|_| CachePadded(AtomicU64::new(0))).collect(),
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
        // Relaxed: the releases below publish it.
        self.unfinished.0.store(num_pieces, Ordering::Relaxed);
        // Relaxed: nobody else writes it.
        let number = self.number.0.load(Ordering::Relaxed).wrapping_add(1);
        let num_threads = self.num_threads();
        for (thread, hand) in (0..num_threads).zip(&self.hands) {
            let left = num_pieces.saturating_sub(thread).div_ceil(num_threads);
            // Nobody changes a word with nothing left. Release pairs with the acquire exchange in `take_of`: who takes
            // a piece sees the job and the count. Exchanges of other takers in between continue the release sequence.
            hand.0.store(
                u64::from(number) << LEFT_BITS | u64::from(left),
                Ordering::Release,
            );
        }
        // Release pairs with the acquire load in `number`: who sees the number sees the words.
        self.number.0.store(number, Ordering::Release);
    }

    /// Takes a piece, one dealt to the thread if there is one: the job and the index of the piece. Thread i is dealt i,
    /// then every n-th, n being the number of threads. Any thread. Whoever took one must call `finish`.
    #[inline]
    pub fn take(&self, thread: usize) -> Option<(J, u32)> {
        let others = (thread + 1..self.hands.len()).chain(0..thread);
        std::iter::once(thread)
            .chain(others)
            .find_map(|thread| self.take_of(thread))
    }

    #[inline]
    fn take_of(&self, thread: usize) -> Option<(J, u32)> {
        let hand = &self.hands[thread].0;
        // Relaxed: the exchange decides. A word that is out of date has another number or count, and the exchange
        // fails; so a piece that was taken is one of the job in the cell.
        let mut word = hand.load(Ordering::Relaxed);
        loop {
            #[expect(clippy::cast_possible_truncation, reason = "the count is the low half")]
            let left = word as u32;
            if left == 0 {
                return None;
            }
            match hand.compare_exchange_weak(word, word - 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => {
                    // SAFETY: the owner writes the cell again only when this piece is finished.
                    let posted = self.job.with(|cell| unsafe { *cell });
                    return posted.map(|(job, num_pieces)| (job, self.index(thread, left, num_pieces)));
                }
                Err(current) => word = current,
            }
        }
    }

    /// The first of the pieces that a thread has left.
    #[inline]
    fn index(&self, thread: usize, left: u32, num_pieces: u32) -> u32 {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "`new` has seen the number of threads"
        )]
        let thread = thread as u32;
        let num_threads = self.num_threads();
        let dealt = (num_pieces - thread).div_ceil(num_threads);
        thread + (dealt - left) * num_threads
    }

    #[inline]
    fn num_threads(&self) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "`new` has seen it")]
        let num_threads = self.hands.len() as u32;
        num_threads
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

    /// The number of the job: it has changed since a thread last took nothing if there may be a piece to take. A look
    /// that costs other threads nothing.
    #[inline]
    pub fn number(&self) -> u32 {
        // Acquire pairs with the release store in `post`.
        self.number.0.load(Ordering::Acquire)
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
    fn pieces_are_dealt_in_turn_and_handed_out_once() {
        let board = Board::new(3);
        assert!(board.is_finished() && board.take(0).is_none());
        for (job, number) in [("first", 1), ("second", 2)] {
            board.post(job, 5);
            assert_eq!(board.number(), number);
            // Thread 1 is dealt 1 and 4, and then takes those of the threads behind it.
            for (count, idx) in [1, 4, 2, 0, 3].into_iter().enumerate() {
                assert!(!board.is_finished());
                assert_eq!(board.take(1), Some((job, idx)));
                assert_eq!(board.finish(), count == 4);
            }
            assert!(board.is_finished() && (0..3).all(|thread| board.take(thread).is_none()));
        }
    }

    #[test]
    fn threads_may_be_dealt_nothing() {
        let board = Board::new(4);
        board.post((), 2);
        assert_eq!(
            [3, 2, 1].map(|thread| board.take(thread)),
            [Some(((), 0)), Some(((), 1)), None]
        );
    }

    #[test]
    #[should_panic(expected = "the last job is unfinished")]
    fn a_job_is_not_posted_over_another() {
        let board = Board::new(1);
        board.post(1, 1);
        board.take(0);
        board.post(2, 1);
    }
}
