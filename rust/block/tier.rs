//! Host memory below the device's blocks: which of its blocks are free, and who holds the others.
//!
//! The scheduler parks what a preempted sequence has computed here instead of computing it again. Like the pool, this
//! is owned by one thread and knows ids alone; the copies are made by whoever runs the step.
//!
//! A block is free, in one lease, or *returning*: given back, but read by a copy of a step that may not have run yet. A
//! returning block is handed out again only when that step is over, so a step never names a host block twice.

use std::collections::VecDeque;

use super::pool::count;
use crate::ids::HostBlockId;

/// Host blocks that one parked sequence holds, in the order of the positions that they keep.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a lease that is dropped without being given back leaks its blocks"]
pub struct HostLease {
    blocks: Vec<HostBlockId>,
}

impl HostLease {
    /// The blocks.
    pub fn blocks(&self) -> &[HostBlockId] {
        &self.blocks
    }
}

/// All blocks of host memory. Owned by one thread.
#[derive(Debug)]
pub struct HostPool {
    num_blocks: u32,
    /// A stack: the block given back last is used first.
    free: Vec<HostBlockId>,
    /// With the step that reads them, in the order of the steps.
    returning: VecDeque<(u64, HostBlockId)>,
}

impl HostPool {
    /// A pool whose blocks are all free; they will be handed out in ascending order.
    pub fn new(num_blocks: u32) -> Self {
        Self {
            num_blocks,
            free: (0..num_blocks).rev().map(HostBlockId).collect(),
            returning: VecDeque::new(),
        }
    }

    /// Blocks, whatever their state.
    pub const fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// Blocks that a lease holds, or that a copy still reads.
    pub fn num_used(&self) -> u32 {
        self.num_blocks - count(self.free.len())
    }

    /// Takes so many blocks, or none where there are fewer.
    pub fn lease(&mut self, num_blocks: u32) -> Option<HostLease> {
        let rest = self.free.len().checked_sub(num_blocks as usize)?;
        let blocks = self.free.drain(rest..).rev().collect();
        Some(HostLease { blocks })
    }

    /// Takes blocks back that nobody reads any more.
    pub fn give_back(&mut self, lease: HostLease) {
        self.free.extend(lease.blocks.into_iter().rev());
    }

    /// Takes blocks back that a copy of step `step_id` reads.
    pub fn give_back_after(&mut self, lease: HostLease, step_id: u64) {
        self.returning
            .extend(lease.blocks.into_iter().map(|block| (step_id, block)));
    }

    /// Step `step_id` and those before it are over.
    pub fn end_step(&mut self, step_id: u64) {
        while let Some(&(step, block)) = self.returning.front()
            && step <= step_id
        {
            self.returning.pop_front();
            self.free.push(block);
        }
    }

    /// Checks that every block is in exactly one place. `leases`: all that were not given back.
    ///
    /// # Errors
    /// Names the block that is not.
    pub fn check<'a>(&'a self, leases: impl Iterator<Item = &'a HostLease>) -> Result<(), String> {
        let mut places = vec![0; self.num_blocks as usize];
        let held = leases.flat_map(HostLease::blocks);
        let returning = self.returning.iter().map(|(_, block)| block);
        for block in self.free.iter().chain(held).chain(returning) {
            places[block.index()] += 1;
        }
        match places.iter().position(|&num_places| num_places != 1) {
            None => Ok(()),
            Some(block) => Err(format!(
                "host block {block} is free, held or returning in {} places",
                places[block]
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_or_nothing_is_leased() {
        let mut pool = HostPool::new(3);
        let two = pool.lease(2).unwrap();
        assert_eq!(two.blocks(), [HostBlockId(0), HostBlockId(1)]);
        assert_eq!(pool.lease(2), None);
        let last = pool.lease(1).unwrap();
        assert_eq!(pool.num_used(), 3);
        pool.check([&two, &last].into_iter()).unwrap();
        assert!(pool.check([&two].into_iter()).is_err());
        pool.give_back(two);
        assert_eq!(pool.num_used(), 1);
        pool.give_back(last);
        pool.check(std::iter::empty()).unwrap();
    }

    #[test]
    fn what_a_step_reads_is_not_written_by_the_same_step() {
        let mut pool = HostPool::new(2);
        let read = pool.lease(2).unwrap();
        pool.give_back_after(read, 7);
        assert_eq!(
            pool.lease(1),
            None,
            "a swap out of step 7 would overwrite what its swap in reads"
        );
        pool.end_step(6);
        assert_eq!(pool.num_used(), 2);
        pool.check(std::iter::empty()).unwrap();
        pool.end_step(7);
        assert_eq!(pool.num_used(), 0);
        pool.check(std::iter::empty()).unwrap();
    }
}
