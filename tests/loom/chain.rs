//! The push chain: nothing lost, nothing twice, order per thread, nothing leaked.

use crate::check;
use loom::sync::Arc;
use loom::thread;
use pagedkv::sync::PushChain;

#[test]
fn two_threads_push_while_the_owner_takes() {
    check(|| {
        let chain = Arc::new(PushChain::new());
        let (pusher, owner) = (Arc::clone(&chain), Arc::clone(&chain));
        let second = thread::spawn(move || pusher.push(20));
        let owner = thread::spawn(move || {
            let mut taken: Vec<i32> = owner.take_all().collect();
            taken.extend(owner.take_all());
            taken
        });
        chain.push(10);
        chain.push(11);
        second.join().unwrap();
        let mut taken = owner.join().unwrap();
        taken.extend(chain.take_all());
        assert!(chain.is_empty());
        assert_eq!(
            taken
                .iter()
                .filter(|&&value| value < 20)
                .copied()
                .collect::<Vec<_>>(),
            [10, 11]
        );
        assert_eq!(taken.iter().filter(|&&value| value == 20).count(), 1);
        assert_eq!(taken.len(), 3);
    });
}

/// Loom reports every `Arc` that is leaked.
#[test]
fn what_nobody_takes_is_dropped() {
    check(|| {
        let value = Arc::new(());
        let chain = Arc::new(PushChain::new());
        let owner = Arc::clone(&chain);
        let thread = thread::spawn(move || {
            let mut taken = owner.take_all();
            drop(taken.next());
            drop(taken);
        });
        chain.push(Arc::clone(&value));
        chain.push(Arc::clone(&value));
        drop(chain);
        thread.join().unwrap();
        assert_eq!(Arc::strong_count(&value), 1);
    });
}
