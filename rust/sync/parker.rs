//! The idle owner's bed: it sleeps until there is work, and no wake-up is lost.
//!
//! The state is a token. `unpark` leaves one; `park_timeout` takes it, or announces that it sleeps and then
//! waits on a condition variable. Since the token stays until it is taken, it does not matter whether the
//! wake-up comes before, during or after the owner's decision to sleep.

use super::primitive::{AtomicU32, Condvar, Mutex, Ordering};
use std::fmt;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// Awake, no wake-up pending.
const EMPTY: u32 = 0;
/// The owner sleeps or is about to; a wake-up must go through the condition variable.
const PARKED: u32 = 1;
/// A wake-up is pending.
const NOTIFIED: u32 = 2;

/// Parks one owner; any thread wakes it.
pub struct Parker {
    /// One of the constants above. Written by the owner (`EMPTY`, `PARKED`) and by every thread that wakes it
    /// (`NOTIFIED`); all writes are read-modify-writes, and each reads what it replaces.
    state: AtomicU32,
    /// Held by the owner from announcing `PARKED` until it waits, so that a wake-up cannot fall in between.
    asleep: Mutex<()>,
    wake: Condvar,
}

impl Parker {
    /// A parker without a pending wake-up.
    pub fn new() -> Self {
        Self {
            state: AtomicU32::new(EMPTY),
            asleep: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    /// Sleeps until somebody calls [`Self::unpark`], or `timeout` has passed. Returns at once if a wake-up is
    /// pending, and takes it. Any number of wake-ups before that count as one. What a waker did before
    /// `unpark` is visible after a return of `true`.
    ///
    /// Returns whether it was woken: `false` after the timeout.
    ///
    /// # Panics
    /// If two threads park at once: there is one owner.
    pub fn park_timeout(&self, timeout: Duration) -> bool {
        if self.take_token() {
            return true;
        }
        // A timeout beyond the clock's range means to sleep until woken.
        let deadline = Instant::now().checked_add(timeout);
        // The lock guards no data, so a panic while it was held has broken nothing.
        let mut guard = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        // Relaxed: failing means that a token came, which the acquire in `take_token` takes.
        match self
            .state
            .compare_exchange(EMPTY, PARKED, Ordering::Relaxed, Ordering::Relaxed)
        {
            Ok(_) => {}
            Err(NOTIFIED) => return self.take_token(),
            Err(state) => panic!("parker is in state {state}: two threads park at once"),
        }
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                // Acquire pairs with the release swap in `unpark`: a token that came at the last moment is
                // taken.
                return self.state.swap(EMPTY, Ordering::Acquire) == NOTIFIED;
            }
            guard = match left {
                Some(left) => {
                    self.wake
                        .wait_timeout(guard, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
                None => self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner),
            };
            if self.take_token() {
                return true;
            }
        }
    }

    /// Wakes the owner, or leaves a token that spares it its next sleep. Any thread; one atomic when the
    /// owner is awake. Call it after publishing what the owner shall find.
    #[inline]
    pub fn unpark(&self) {
        // Release pairs with the acquire operations in `park_timeout`. A swap even if a token is there
        // already: a mere look could see an old one that the owner is just taking, and what was published
        // would find it asleep.
        if self.state.swap(NOTIFIED, Ordering::Release) == PARKED {
            self.rouse();
        }
    }

    /// Takes a pending token. Acquire pairs with the release swap in `unpark`; that swap continues the
    /// release sequence of earlier ones, so one token stands for all wakers and what each had published.
    #[inline]
    fn take_token(&self) -> bool {
        self.state
            .compare_exchange(NOTIFIED, EMPTY, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    #[cold]
    fn rouse(&self) {
        // The owner said `PARKED` under the lock and gives it up only by waiting. Having had the lock, we
        // know that it waits (or has already woken and seen the token), so the notification cannot come too
        // early.
        drop(self.asleep.lock().unwrap_or_else(PoisonError::into_inner));
        self.wake.notify_one();
    }
}

impl Default for Parker {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Parker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parker").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(pagedkv_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_token_left_before_is_taken_once() {
        let parker = Parker::new();
        parker.unpark();
        parker.unpark();
        assert!(parker.park_timeout(Duration::MAX));
        assert!(!parker.park_timeout(Duration::ZERO));
    }

    #[test]
    fn the_timeout_passes() {
        let parker = Parker::new();
        let start = Instant::now();
        assert!(!parker.park_timeout(Duration::from_millis(20)));
        assert!(start.elapsed() >= Duration::from_millis(20));
        parker.unpark();
        assert!(parker.park_timeout(Duration::ZERO));
    }

    #[test]
    fn a_sleeping_owner_wakes() {
        let parker = Parker::new();
        std::thread::scope(|scope| {
            let owner = scope.spawn(|| parker.park_timeout(Duration::from_secs(60)));
            std::thread::sleep(Duration::from_millis(10));
            parker.unpark();
            assert!(owner.join().unwrap());
        });
    }
}
