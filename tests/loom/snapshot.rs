//! The snapshot: never torn, never older than what the reader knows.

use crate::check;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use pagedkv::sync::SnapshotCell;

/// The race "overtaken reader": two publications pass while one read is under way, and the second writes the
/// very copy that is being read.
#[test]
fn a_snapshot_is_never_torn_and_never_goes_back() {
    check(|| {
        let cell = Arc::new(SnapshotCell::<2>::new());
        let other = Arc::clone(&cell);
        let reader = thread::spawn(move || {
            let [first, copy] = other.read();
            assert_eq!(first, copy);
            let [second, copy] = other.read();
            assert_eq!(second, copy);
            assert!(first <= second);
        });
        for value in 1..=3 {
            cell.publish(&[value, value]);
        }
        reader.join().unwrap();
        assert_eq!(cell.read(), [3, 3]);
    });
}

#[test]
fn a_publication_that_happened_before_is_seen() {
    check(|| {
        let cell = Arc::new(SnapshotCell::<2>::new());
        let told = Arc::new(AtomicU64::new(0));
        let (other, telling) = (Arc::clone(&cell), Arc::clone(&told));
        let owner = thread::spawn(move || {
            for value in 1..=2 {
                other.publish(&[value, value]);
                telling.store(value, Ordering::Release);
            }
        });
        let known = told.load(Ordering::Acquire);
        let [value, copy] = cell.read();
        assert_eq!(value, copy);
        assert!(value >= known);
        owner.join().unwrap();
    });
}
