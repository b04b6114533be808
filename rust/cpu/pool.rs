//! The threads of the kernels: one pool for the process, of a set size.
//!
//! A kernel hands over a list of independent pieces of work; they are dealt to the threads in turn, and a thread that is
//! done with its own takes those of others, so one that drew a long one, or that the system has stopped, does not hold
//! them up. No result may depend on who computed what.
//!
//! The pool is our own because a forward pass forks some hundred times, a few tens of microseconds apart. rayon's
//! threads soon sleep in between and are woken by the system; those of torch's `OpenMP` spin, for good or for a while,
//! and take the cores from whoever works. Here a thread that has run out of work spins for `SPIN`, lets others run
//! after `SPIN_ALONE` of that, and then sleeps. Measured on two cores, pairs in one run: a product that takes one
//! thread 75 us takes two of ours 41 to 52 us, with 0, 30 or 60 us of Python between calls; rayon's 49 to 58, 51, and
//! 55 to 76. A call while another thread of the process is using the pool computes alone: its cores are busy anyway.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError, RwLock, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::InvalidArgument;
use crate::sync::{Board, Parker};

/// Work below this many nanoseconds stays on the calling thread. Between two kernels of a step the others are looking for
/// work, and two that do nothing are handed out and waited for in 0.4 to 0.7 us; waking one that sleeps costs more.
const SERIAL_NS: u64 = 2_000;

/// Threads that a pool may have. The limit only catches nonsense.
const MAX_THREADS: usize = 1024;

/// How long a thread without work looks for some before it sleeps: longer than what lies between two kernels of a step.
const SPIN: Duration = Duration::from_micros(100);

/// How long it does so without offering its core to others.
const SPIN_ALONE: Duration = Duration::from_micros(20);

/// Looks between two readings of the clock.
const LOOKS: usize = 32;

/// The pool, built at the first use or by `set_num_threads`.
static POOL: RwLock<Option<Arc<Pool>>> = RwLock::new(None);

/// One call: a function, what it works on, and how to say that it failed.
#[derive(Clone, Copy)]
struct Job {
    /// Computes the piece of an index.
    run: unsafe fn(*const (), usize),
    /// What `run` takes; it lives in the frame of `for_each` until all pieces are finished.
    context: *const (),
}

// SAFETY: `for_each` lets the context be used from other threads, and asks for what that takes.
unsafe impl Send for Job {}

/// What the threads share.
struct Shared {
    /// None ends a worker.
    board: Board<Option<Job>>,
    /// Where the caller waits for the last pieces.
    caller: Parker,
    /// Where the workers wait for work.
    workers: Vec<Parker>,
    /// What a piece panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Held by the thread whose call the pool computes.
    caller: Mutex<()>,
}

impl Pool {
    fn new(num_threads: usize) -> Self {
        let shared = Arc::new(Shared {
            board: Board::new(num_threads),
            caller: Parker::new(),
            workers: (1..num_threads).map(|_| Parker::new()).collect(),
            panic: Mutex::new(None),
        });
        let start = |idx: usize| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name(format!("pagedkv-cpu-{idx}"))
                .spawn(move || shared.work(idx))
                .expect("the system starts threads")
        };
        let threads = (0..num_threads - 1).map(start).collect();
        Self {
            shared,
            threads,
            caller: Mutex::new(()),
        }
    }

    fn num_threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Runs `work` once on every item, together with the workers. False if another thread is being served.
    fn try_for_each<T: Send>(&self, items: &mut [T], work: &(impl Fn(&mut T) + Sync)) -> bool {
        // A panic while it was held has broken nothing: all pieces were finished.
        let _caller = match self.caller.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        let pieces = Pieces {
            first: items.as_mut_ptr(),
            work,
        };
        let job = Job {
            run: pieces.function(),
            context: (&raw const pieces).cast(),
        };
        self.run(job, items.len());
        true
    }

    /// Computes the pieces of a job, together with the workers.
    fn run(&self, job: Job, num_pieces: usize) {
        let shared = &*self.shared;
        shared.board.post(
            Some(job),
            u32::try_from(num_pieces).expect("fewer pieces than 2^32"),
        );
        for worker in shared.workers.iter().take(num_pieces - 1) {
            worker.unpark();
        }
        shared.take_pieces(0);
        while !spin_until(|| shared.board.is_finished()) {
            shared.caller.park_timeout(Duration::MAX);
        }
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.threads.is_empty() {
            return;
        }
        // Each thread takes one piece of this job, and ends.
        let num_threads = u32::try_from(self.threads.len()).expect("at most 1024");
        self.shared.board.post(None, num_threads);
        self.shared.workers.iter().for_each(Parker::unpark);
        for thread in self.threads.drain(..) {
            // A worker catches what its pieces panic with.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// The life of a worker, which is thread `idx + 1` of the board.
    fn work(&self, idx: usize) {
        loop {
            let number = self.board.number();
            if !self.take_pieces(idx + 1) {
                return;
            }
            if !spin_until(|| self.board.number() != number) {
                self.workers[idx].park_timeout(Duration::MAX);
            }
        }
    }

    /// Computes pieces as a thread of the board until none is left. False if the pool is being dropped.
    fn take_pieces(&self, thread: usize) -> bool {
        while let Some((job, idx)) = self.board.take(thread) {
            let Some(job) = job else {
                self.board.finish();
                return false;
            };
            // SAFETY: the context lives until the piece is finished, and nobody else has its index.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe {
                (job.run)(job.context, idx as usize);
            }));
            if let Err(panic) = result {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
            }
            if self.board.finish() {
                self.caller.unpark();
            }
        }
        true
    }
}

/// Looks until `is_so`, for `SPIN` at most; says whether it became so.
fn spin_until(is_so: impl Fn() -> bool) -> bool {
    let mut start = None;
    loop {
        for _ in 0..LOOKS {
            if is_so() {
                return true;
            }
            std::hint::spin_loop();
        }
        let elapsed = start.get_or_insert_with(Instant::now).elapsed();
        if elapsed > SPIN {
            return is_so();
        }
        if elapsed > SPIN_ALONE {
            std::thread::yield_now();
        }
    }
}

/// The pool in use; by default it has a thread for every processor that this process may use.
fn current() -> Arc<Pool> {
    // A panic cannot happen while the lock is held for writing, except in `Pool::new`, which leaves the pool as it was.
    let built = POOL.read().unwrap_or_else(PoisonError::into_inner).clone();
    built.unwrap_or_else(|| {
        let mut slot = POOL.write().unwrap_or_else(PoisonError::into_inner);
        slot.get_or_insert_with(|| {
            Arc::new(Pool::new(
                std::thread::available_parallelism().map_or(1, usize::from),
            ))
        })
        .clone()
    })
}

/// Sets the number of threads for every later call. Calls that are running finish on the threads they have.
///
/// # Errors
/// No thread, or more than anyone has.
pub fn set_num_threads(num_threads: usize) -> Result<(), InvalidArgument> {
    if num_threads == 0 || num_threads > MAX_THREADS {
        return Err(InvalidArgument::new(
            "num_threads",
            num_threads,
            format!("1 to {MAX_THREADS}"),
        ));
    }
    let mut slot = POOL.write().unwrap_or_else(PoisonError::into_inner);
    if slot.as_ref().is_none_or(|pool| pool.num_threads() != num_threads) {
        *slot = Some(Arc::new(Pool::new(num_threads)));
    }
    Ok(())
}

/// The number of threads of the pool.
pub fn num_threads() -> usize {
    current().num_threads()
}

/// Rows, cut into equal pieces of at most `max_rows`, in the order in which they are dealt: the pieces of a thread are
/// a share of the rows, the same one in every kernel that works row by row, and so in its cache.
pub(crate) fn deal_rows(num_rows: usize, max_rows: usize) -> Vec<Range<usize>> {
    let num_shares = num_threads().min(num_rows).max(1);
    let num_turns = num_rows.div_ceil(num_shares * max_rows);
    let num_pieces = num_shares * num_turns;
    let cut = |piece| num_rows * piece / num_pieces;
    (0..num_pieces)
        .map(|idx| idx % num_shares * num_turns + idx / num_shares)
        .map(|piece| cut(piece)..cut(piece + 1))
        .collect()
}

/// The items of a call and what is done to each.
struct Pieces<'f, T, F> {
    first: *mut T,
    work: &'f F,
}

impl<T, F: Fn(&mut T)> Pieces<'_, T, F> {
    /// What a job with these pieces runs.
    #[expect(clippy::unused_self, reason = "the value names the type of a closure")]
    fn function(&self) -> unsafe fn(*const (), usize) {
        /// # Safety
        /// `context` is of that type, and the index is below the number of items and nobody else's.
        unsafe fn run<T, F: Fn(&mut T)>(context: *const (), idx: usize) {
            // SAFETY: the caller vouches for both.
            unsafe {
                let pieces = &*context.cast::<Pieces<'_, T, F>>();
                (pieces.work)(&mut *pieces.first.add(idx));
            }
        }
        run::<T, F>
    }
}

/// Runs `work` once on every item, on as many threads as `estimated_ns` of work are worth.
pub(crate) fn for_each<T: Send>(items: &mut [T], estimated_ns: u64, work: impl Fn(&mut T) + Send + Sync) {
    if items.len() >= 2 && estimated_ns >= SERIAL_NS {
        let pool = current();
        if pool.num_threads() > 1 && pool.try_for_each(items, &work) {
            return;
        }
    }
    items.iter_mut().for_each(work);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_worked_on_once() {
        for num_threads in [1, 2, 5] {
            let pool = Pool::new(num_threads);
            for len in [2, 3, 1000] {
                let mut items = vec![0_u32; len];
                assert!(pool.try_for_each(&mut items, &|item: &mut u32| *item += 1));
                assert!(items.iter().all(|&item| item == 1));
            }
        }
    }

    #[test]
    fn rows_are_dealt_as_shares() {
        for num_rows in [0, 1, 2, 16, 33, 500, 2048] {
            let num_threads = num_threads();
            let pieces = deal_rows(num_rows, 16);
            assert!(
                pieces.iter().all(|rows| (1..=16).contains(&rows.len())),
                "{num_rows}"
            );
            let of_thread = |idx| pieces.iter().skip(idx).step_by(num_threads);
            let ordered: Vec<usize> = (0..num_threads).flat_map(of_thread).cloned().flatten().collect();
            assert!(ordered.into_iter().eq(0..num_rows));
        }
    }

    #[test]
    fn calls_from_several_threads_all_get_done() {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for estimated_ns in [0, u64::MAX] {
                        for _ in 0..200 {
                            let mut items = [0_u32; 17];
                            for_each(&mut items, estimated_ns, |item| *item += 1);
                            assert_eq!(items, [1; 17]);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_after_all_pieces() {
        let mut items: Vec<u32> = (0..50).collect();
        let result = catch_unwind(AssertUnwindSafe(|| {
            for_each(&mut items, u64::MAX, |item| {
                assert!(*item != 20, "piece 20");
                *item = 99;
            });
        }));
        assert!(result.is_err());
        for_each(&mut items, u64::MAX, |item| *item = 7);
        assert_eq!(items, [7; 50]);
    }

    #[test]
    fn a_pool_without_threads_is_refused() {
        let refusal = set_num_threads(0).unwrap_err().to_string();
        assert_eq!(refusal, "num_threads is 0, allowed: 1 to 1024");
    }
}
