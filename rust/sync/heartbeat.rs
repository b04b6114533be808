//! Signs of life of a thread that may be busy for long: when the last one was, and how many there were.

use std::fmt;
use std::time::{Duration, Instant};

use super::primitive::{AtomicU64, CachePadded, Ordering};

/// Beaten by one thread at a time, read by any. Wait-free.
pub struct Heartbeat {
    created: Instant,
    /// Nanoseconds from then to the last beat, and the number of beats. Both written by the beating thread.
    words: CachePadded<[AtomicU64; 2]>,
}

impl Heartbeat {
    /// A heart that beats for the first time now.
    pub fn new() -> Self {
        Self {
            created: Instant::now(),
            words: CachePadded([AtomicU64::new(0), AtomicU64::new(0)]),
        }
    }

    /// Shows that the thread goes on.
    pub fn beat(&self) {
        let [last, count] = &self.words.0;
        let now = u64::try_from(self.created.elapsed().as_nanos()).unwrap_or(u64::MAX);
        // Relaxed: the numbers stand for themselves, nothing is published by them.
        last.store(now, Ordering::Relaxed);
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Time since the last beat.
    pub fn age(&self) -> Duration {
        // Relaxed: as above.
        let last = Duration::from_nanos(self.words.0[0].load(Ordering::Relaxed));
        self.created.elapsed().saturating_sub(last)
    }

    /// Beats so far.
    pub fn num_beats(&self) -> u64 {
        // Relaxed: as above.
        self.words.0[1].load(Ordering::Relaxed)
    }
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Heartbeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heartbeat").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(pagedkv_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_beat_makes_it_young_again() {
        let heart = Heartbeat::new();
        std::thread::sleep(Duration::from_millis(3));
        assert!(heart.age() >= Duration::from_millis(3));
        assert_eq!(heart.num_beats(), 0);
        let before = Instant::now();
        heart.beat();
        assert!(heart.age() <= before.elapsed());
        assert_eq!(heart.num_beats(), 1);
    }
}
