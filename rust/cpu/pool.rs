//! The threads of the kernels: one pool for the process, of a set size.
//!
//! A kernel hands over a list of independent pieces of work; the pool's threads take pieces until none is left, so a
//! thread that drew a long one does not hold up the others. No result may depend on who computed what.

use std::sync::{Arc, RwLock};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::InvalidArgument;

/// Work below this many nanoseconds stays on the calling thread: waking others costs about as much.
const SERIAL_NS: u64 = 40_000;

/// Threads that a pool may have. The limit only catches nonsense.
const MAX_THREADS: usize = 1024;

/// The pool, built at the first use or by `set_num_threads`.
static POOL: RwLock<Option<Arc<ThreadPool>>> = RwLock::new(None);

fn build(num_threads: usize) -> Arc<ThreadPool> {
    let pool = ThreadPoolBuilder::new()
        .num_threads(num_threads)
        .thread_name(|idx| format!("pagedkv-cpu-{idx}"))
        .build()
        .expect("the system starts threads");
    Arc::new(pool)
}

/// The pool in use; by default it has a thread for every processor that this process may use.
fn current() -> Arc<ThreadPool> {
    // A panic cannot happen while the lock is held for writing, except in `build`, which leaves the pool as it was.
    let built = POOL
        .read()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
        .clone();
    built.unwrap_or_else(|| {
        let mut slot = POOL.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        slot.get_or_insert_with(|| build(std::thread::available_parallelism().map_or(1, usize::from)))
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
    let mut slot = POOL.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    if slot
        .as_ref()
        .is_none_or(|pool| pool.current_num_threads() != num_threads)
    {
        *slot = Some(build(num_threads));
    }
    Ok(())
}

/// The number of threads of the pool.
pub fn num_threads() -> usize {
    current().current_num_threads()
}

/// Runs `work` once on every item, on as many threads as `estimated_ns` of work are worth.
pub(crate) fn for_each<T: Send>(items: &mut [T], estimated_ns: u64, work: impl Fn(&mut T) + Send + Sync) {
    let pool = current();
    if pool.current_num_threads() == 1 || items.len() < 2 || estimated_ns < SERIAL_NS {
        items.iter_mut().for_each(work);
    } else {
        pool.install(|| items.par_iter_mut().with_max_len(1).for_each(work));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_worked_on_once() {
        for estimated_ns in [0, u64::MAX] {
            let mut items = vec![0_u32; 1000];
            for_each(&mut items, estimated_ns, |item| *item += 1);
            assert!(items.iter().all(|&item| item == 1));
        }
    }

    #[test]
    fn a_pool_without_threads_is_refused() {
        let refusal = set_num_threads(0).unwrap_err().to_string();
        assert_eq!(refusal, "num_threads is 0, allowed: 1 to 1024");
    }
}
