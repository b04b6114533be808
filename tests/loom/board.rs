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

/// Takes and does pieces as a thread of the board until there is none; returns whether one of them was the last of its job.
fn work(board: &Board<u32>, thread: usize, cells: &Cells) -> bool {
    let mut was_last = false;
    while let Some((job, idx)) = board.take(thread) {
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
        let board = Arc::new(Board::new(2));
        let parker = Arc::new(Parker::new());
        let cells = Arc::new(Cells([UnsafeCell::new(0), UnsafeCell::new(0)]));
        board.post(1, 2);
        let worker = {
            let (board, parker, cells) = (Arc::clone(&board), Arc::clone(&parker), Arc::clone(&cells));
            thread::spawn(move || {
                if work(&board, 1, &cells) {
                    parker.unpark();
                }
            })
        };
        for total in [1, 11] {
            work(&board, 0, &cells);
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
        let board = Arc::new(Board::new(3));
        let cells = Arc::new(Cells([UnsafeCell::new(0), UnsafeCell::new(0)]));
        board.post(1, 2);
        let workers = [1, 2].map(|idx: usize| {
            let (board, cells) = (Arc::clone(&board), Arc::clone(&cells));
            thread::spawn(move || work(&board, idx, &cells))
        });
        work(&board, 0, &cells);
        for worker in workers {
            worker.join().unwrap();
        }
        assert!(board.is_finished());
        assert_eq!(sums(&cells), [1; 2]);
    });
}

/// A worker that has seen a job's number, and its own pieces taken, sees those of the owner too: nobody who waits for
/// another number waits while there is a piece.
#[test]
fn who_sees_the_number_sees_the_pieces() {
    check(|| {
        let board = Arc::new(Board::new(2));
        let worker = {
            let board = Arc::clone(&board);
            thread::spawn(move || {
                let number = board.number();
                let taken = board.take(1);
                assert!(number == 0 || taken.is_some());
                if taken.is_some() {
                    board.finish();
                }
            })
        };
        board.post(7_u32, 1);
        worker.join().unwrap();
    });
}
