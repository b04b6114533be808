//! Blocks lent to copies of other threads: neither written nor given to anybody until they are back.

use std::collections::HashMap;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use pagedkv::block::{BlockState, BlockTable};
use pagedkv::ids::BlockId;
use pagedkv::sched::{CopyLease, SamplingParams};

use crate::block::{computed, found, idle, ids, pool, text};
use crate::simulator::{Simulator, config, greedy, prompt};

/// No wake-up takes this long; a test that waits for it has lost one.
const LOST: Duration = Duration::from_secs(30);

#[test]
fn a_lent_block_is_fenced_and_comes_back_to_its_place() {
    let mut pool = pool(4, 2);
    let root = pool.root(b"");
    let mut table = computed(&mut pool, root, &text(1, 4));
    let blocks = table.blocks().to_vec();
    table.release(&mut pool);
    assert_eq!((idle(&pool), pool.num_fenced()), (vec![2, 1], 0));
    // The child alone, and twice.
    pool.lease_for_copy(&blocks[1..]);
    pool.lease_for_copy(&blocks[1..]);
    assert_eq!(pool.state(blocks[1]), BlockState::Fenced);
    assert_eq!(
        (idle(&pool), pool.num_fenced(), pool.num_available()),
        (vec![1], 1, 3)
    );
    // Fenced, it can be found and held as before.
    assert_eq!(found(&pool, root, &text(1, 4)), [1, 2]);
    pool.end_step();
    pool.end_copy(&blocks[1..]);
    assert_eq!(
        pool.state(blocks[1]),
        BlockState::Fenced,
        "one copy still reads it"
    );
    pool.end_copy(&blocks[1..]);
    assert_eq!(
        (idle(&pool), pool.num_fenced()),
        (vec![2, 1], 0),
        "before its parent"
    );
    // Both leases of a block may come back at once.
    pool.lease_for_copy(&[blocks[0], blocks[1], blocks[0]]);
    assert_eq!((idle(&pool), pool.num_fenced()), (vec![], 2));
    pool.end_copy(&[blocks[0], blocks[1], blocks[0]]);
    assert_eq!((idle(&pool).len(), pool.num_fenced()), (2, 0));
}

#[test]
fn a_lent_block_is_never_allocated_also_when_it_is_forgotten() {
    let mut pool = pool(3, 2);
    let root = pool.root(b"");
    let mut table = computed(&mut pool, root, &text(1, 4));
    let blocks = table.blocks().to_vec();
    table.release(&mut pool);
    pool.lease_for_copy(&blocks[1..]);
    // All that is left is taken, the parent of the lent block with it.
    let taken = [pool.allocate(), pool.allocate()];
    assert_eq!(taken, [Some(BlockId(3)), Some(BlockId(1))]);
    assert_eq!(pool.allocate(), None);
    assert!(!pool.is_published(blocks[1]));
    pool.check().unwrap();
    pool.end_copy(&blocks[1..]);
    pool.check().unwrap();
    assert_eq!(pool.allocate(), Some(BlockId(2)));
}

/// A copy gives a child back while another one still reads its parent, which comes back after its own parent has
/// become idle.
#[test]
fn a_chain_that_comes_back_from_its_end_is_evicted_from_its_end() {
    let mut pool = pool(4, 2);
    let root = pool.root(b"");
    let mut table = computed(&mut pool, root, &text(1, 6));
    let blocks = table.blocks().to_vec();
    pool.lease_for_copy(&blocks[1..2]);
    pool.lease_for_copy(&blocks[2..]);
    table.release(&mut pool);
    assert_eq!((idle(&pool), pool.num_fenced()), (vec![1], 2));
    pool.end_copy(&blocks[2..]);
    assert_eq!((idle(&pool), pool.num_fenced()), (vec![3, 1], 1));
    pool.end_copy(&blocks[1..2]);
    assert_eq!((idle(&pool), pool.num_fenced()), (vec![3, 2, 1], 0));
}

#[test]
fn a_lent_block_is_copied_before_it_is_written() {
    let mut pool = pool(4, 4);
    let root = pool.root(b"");
    let mut table = BlockTable::new(root, &mut pool);
    let mut copies = Vec::new();
    table.reserve(&mut pool, 0, 2, &mut copies).unwrap();
    let tail = table.blocks().to_vec();
    pool.lease_for_copy(&tail);
    assert!(!pool.is_writable(tail[0]));
    table.reserve(&mut pool, 2, 3, &mut copies).unwrap();
    assert_eq!((ids(table.blocks()), copies.len()), (vec![2], 1));
    pool.end_step();
    pool.check().unwrap();
    assert_eq!(pool.state(tail[0]), BlockState::Fenced);
    pool.end_copy(&tail);
    assert_eq!(pool.state(tail[0]), BlockState::Free);
    table.release(&mut pool);
}

#[test]
#[should_panic(expected = "block 1 was lent but is free")]
fn a_free_block_is_not_lent() {
    pool(2, 2).lease_for_copy(&[BlockId(1)]);
}

#[test]
#[should_panic(expected = "block 1 came back but was not lent")]
fn a_block_does_not_come_back_twice() {
    let mut pool = pool(2, 2);
    let block = pool.allocate().unwrap();
    pool.lease_for_copy(&[block]);
    pool.end_copy(&[block, block]);
}

/// What is lent, and what it held then.
#[derive(Default)]
struct Ledger(HashMap<BlockId, Vec<u64>>);

impl Ledger {
    /// Lends up to three of the blocks that hold something, chosen by `number`.
    fn lend(&mut self, simulator: &mut Simulator, number: usize) -> Option<CopyLease> {
        let pool = simulator.scheduler.pool();
        let used: Vec<BlockId> = (1..=pool.num_blocks())
            .map(BlockId)
            .filter(|&block| pool.state(block) != BlockState::Free)
            .collect();
        if used.is_empty() {
            return None;
        }
        let blocks: Vec<BlockId> = (0..=number % 3)
            .map(|at| used[(number * 7 + at * 5) % used.len()])
            .collect();
        for &block in &blocks {
            self.0.insert(block, simulator.block_cells(block).to_vec());
        }
        Some(simulator.scheduler.lease_for_copy(blocks))
    }

    /// What was lent all the time since the last check still holds what it held.
    fn check(&mut self, simulator: &Simulator) {
        self.0.retain(|&block, cells| {
            let is_lent = simulator.scheduler.pool().num_lent(block) > 0;
            assert!(
                !is_lent || simulator.block_cells(block) == cells,
                "{block:?} was written while it was lent"
            );
            is_lent
        });
    }
}

/// More copy threads than cores hold leases of a pool that is always short of blocks, and the work gets done.
#[test]
fn many_threads_copy_while_steps_run() {
    const NUM_THREADS: usize = 12;
    const NUM_REQUESTS: u32 = 300;
    let mut simulator = Simulator::new(config(26, 4));
    let edge = simulator.scheduler.edge().clone();
    let mut ledger = Ledger::default();
    let (mut num_leases, mut num_waits) = (0, 0);
    thread::scope(|scope| {
        let lanes: Vec<mpsc::SyncSender<CopyLease>> = (0..NUM_THREADS)
            .map(|idx| {
                let (lane, leases) = mpsc::sync_channel::<CopyLease>(1);
                scope.spawn(move || {
                    for (number, lease) in leases.into_iter().enumerate() {
                        assert!(!lease.blocks().is_empty());
                        match (number + idx) % 4 {
                            0 => thread::sleep(Duration::from_micros(200)),
                            1 => thread::yield_now(),
                            _ => {}
                        }
                    }
                });
                lane
            })
            .collect();
        let mut num_submitted = 0;
        loop {
            while num_submitted < NUM_REQUESTS && simulator.scheduler.edge().stats().num_waiting < 4 {
                let params = SamplingParams {
                    n: 1 + u32::from(num_submitted % 5 == 0),
                    ..greedy(1 + num_submitted % 17)
                };
                simulator.submit(
                    &prompt(num_submitted % 9, 1 + (num_submitted * 11 % 40) as usize),
                    &params,
                );
                num_submitted += 1;
                if simulator.step().is_none() {
                    break;
                }
                ledger.check(&simulator);
            }
            let lane = &lanes[num_leases % NUM_THREADS];
            if let Some(lease) = ledger.lend(&mut simulator, num_leases) {
                // If its thread is busy the lease comes back at once.
                drop(lane.try_send(lease));
                num_leases += 1;
            }
            let idle = simulator.step().is_none();
            ledger.check(&simulator);
            if idle && !simulator.scheduler.has_work() && num_submitted == NUM_REQUESTS {
                break;
            }
            if idle && simulator.scheduler.has_work() {
                // Everything that could run waits for blocks that are lent.
                num_waits += 1;
                assert!(edge.wait(LOST), "a returned block woke nobody");
            }
        }
    });
    // All threads have given back what they held.
    assert!(simulator.step().is_none());
    ledger.check(&simulator);
    assert!(ledger.0.is_empty());
    simulator.assert_empty();
    assert!(num_leases > 500, "{num_leases} leases, {num_waits} waits");
}
