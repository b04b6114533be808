//! The board of the thread pool: every piece is done once, and nobody reads a job that is being replaced.

use crate::check;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use pagedkv::sync::{Board, Parker};
use std::time::Duration;

/// What the pieces of a job write to: a cell each, which loom watches for accesses that meet.
struct Cells([UnsafeCell<u32>; 2]);

// SAFETY: loom checks that accesses do not meet.
unsafe impl Sync for Cells {}
// SAFETY: as above.
unsafe impl Send for Cells {}

/// Takes and does pieces until there is none; returns whether one of them was the last of its job.
fn work(board: &Board<u32>, cells: &Cells) -> bool {
    let mut was_last = false;
    while let Some((job, idx)) = board.take() {
        // SAFETY: loom checks it.
        cells.0[idx as usize].with_mut(|cell| unsafe { *cell += job });
        was_last = board.finish();
    }
    was_last
}

fn sums(cells: &Cells) -> [u32; 2] {
    // SAFETY: loom checks it.
    [0, 1].map(|idx: usize| cells.0[idx].with(|cell| unsafe { *cell }))
}

/// The race "late worker": a worker that looked at the first job takes a piece of the second, or nothing. The owner
/// reads the results and posts again while the worker may be anywhere.
#[test]
fn every_piece_of_two_jobs_is_done_once() {
    check(|| {
        let board = Arc::new(Board::new());
        let parker = Arc::new(Parker::new());
        let cells = Arc::new(Cells([UnsafeCell::new(0), UnsafeCell::new(0)]));
        board.post(1, 2);
        let worker = {
            let (board, parker, cells) = (Arc::clone(&board), Arc::clone(&parker), Arc::clone(&cells));
            thread::spawn(move || {
                if work(&board, &cells) {
                    parker.unpark();
                }
            })
        };
        for total in [1, 11] {
            work(&board, &cells);
            while !board.is_finished() {
                parker.park_timeout(Duration::MAX);
            }
            assert_eq!(sums(&cells), [total; 2]);
            if total == 1 {
                board.post(10, 2);
            }
        }
        worker.join().unwrap();
    });
}

/// Two workers and the owner share one job.
#[test]
fn three_threads_share_a_job() {
    check(|| {
        let board = Arc::new(Board::new());
        let cells = Arc::new(Cells([UnsafeCell::new(0), UnsafeCell::new(0)]));
        board.post(1, 2);
        let workers = [0, 1].map(|_: usize| {
            let (board, cells) = (Arc::clone(&board), Arc::clone(&cells));
            thread::spawn(move || work(&board, &cells))
        });
        work(&board, &cells);
        for worker in workers {
            worker.join().unwrap();
        }
        assert!(board.is_finished());
        assert_eq!(sums(&cells), [1; 2]);
    });
}
