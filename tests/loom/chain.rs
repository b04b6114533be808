//! The push chain: nothing lost, nothing twice, order per thread, nothing leaked.

use crate::check;
use loom::sync::Arc;
use loom::thread;
use pagedkv::sync::PushChain;

#[test]
fn two_threads_push_while_the_owner_takes() {
    check(|| {
        let chain = Arc::new(PushChain::new());
        let (first, second) = (Arc::clone(&chain), Arc::clone(&chain));
        let threads = [
            thread::spawn(move || {
                first.push(10);
                first.push(11);
            }),
            thread::spawn(move || second.push(20)),
        ];
        let mut taken: Vec<i32> = chain.take_all().collect();
        taken.extend(chain.take_all());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
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
        let (pushed, pusher) = (Arc::clone(&value), Arc::clone(&chain));
        let thread = thread::spawn(move || {
            pusher.push(Arc::clone(&pushed));
            pusher.push(pushed);
        });
        let mut taken = chain.take_all();
        drop(taken.next());
        drop(taken);
        drop(chain);
        thread.join().unwrap();
        assert_eq!(Arc::strong_count(&value), 1);
    });
}
