//! Preempted sequences in host memory: when what a victim has computed is moved there instead of being computed again,
//! and how it comes back.
//!
//! A step makes its moves in this order: to the host, copies within the device, from the host, and then the forward pass
//! writes. So blocks that a victim gave up can be handed out in the step that moves them, for whatever purpose. A host
//! block that is read comes free only when the step is over ([`HostPool::give_back_after`]), so none is overwritten before.
//!
//! What is swapped counts as there once its step is committed. If that step fails, or the cache is reset, or the weights
//! are exchanged, the sequence is computed again: nothing is lost but time, as when host memory is full.
//!
//! [`HostPool::give_back_after`]: crate::block::HostPool::give_back_after

use crate::block::{BlockTable, HostLease, PrefixHit};
use crate::ids::{BlockId, HostBlockId};

use super::policy;
use super::scheduler::Scheduler;
use super::sequence::Sequence;
use super::slab::SeqIdx;

/// Which way a block moves, as the arena says it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(i32)]
pub(super) enum Direction {
    ToHost = 0,
    FromHost = 1,
}

/// A block that moves between device and host in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Swap {
    pub(super) direction: Direction,
    pub(super) device: BlockId,
    pub(super) host: HostBlockId,
}

/// What of a preempted sequence is in host memory: its computed tokens but for the leading blocks that other tables held.
#[derive(Debug)]
pub(super) struct Swapped {
    pub(super) lease: HostLease,
    /// Blocks before the first one that was moved. They must be found by prefix.
    pub(super) num_skipped: u32,
    /// Tokens that were computed.
    pub(super) num_tokens: u32,
    /// The step that moves them.
    step_id: u64,
}

/// Where a waiting sequence can start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Start {
    /// Tokens that are found by prefix and used.
    pub(super) num_found: u32,
    /// Tokens that are in the cache once what is swapped is back: as many, if nothing is or it is of no use.
    pub(super) num_computed: u32,
}

impl Start {
    /// A start with what was found alone.
    pub(super) const fn found(num_tokens: u32) -> Self {
        Self {
            num_found: num_tokens,
            num_computed: num_tokens,
        }
    }
}

impl Scheduler {
    /// Sets what moving and computing cost on this machine, see [`crate::config::HostTier`].
    pub const fn set_swap_costs(&mut self, compute_token_ns: u32, move_block_ns: u32) {
        self.config.host.compute_token_ns = compute_token_ns;
        self.config.host.move_block_ns = move_block_ns;
    }

    /// Has the step that is being built move what a running sequence has computed to host memory, if that is cheaper than
    /// to compute it again and there is room. The sequence is about to be preempted.
    pub(super) fn swap_out(&mut self, idx: SeqIdx) -> Option<Swapped> {
        let sequence = self.sequences.get(idx);
        let (table, num_tokens) = (sequence.table(), sequence.num_computed);
        // What was computed before a reset must be published by nobody, and the beams of a group come back by their prefix.
        let is_current = table.is_findable(&self.pool) && sequence.model_epoch == self.model_epoch;
        if self.host.num_blocks() == 0 || sequence.is_beam || !is_current {
            return None;
        }
        let num_skipped = table.num_kept_by_others(&self.pool);
        let moved = &table.blocks()[num_skipped as usize..];
        let num_blocks = table.len() - num_skipped;
        let num_lost = num_tokens.saturating_sub(num_skipped * self.config.block_size);
        if !policy::is_moving_cheaper(&self.config.host, num_lost, num_blocks) {
            return None;
        }
        let lease = self.host.lease(num_blocks)?;
        let pairs = moved.iter().zip(lease.blocks());
        self.swaps.extend(pairs.map(|(&device, &host)| Swap {
            direction: Direction::ToHost,
            device,
            host,
        }));
        self.stats.num_swapped += 1;
        Some(Swapped {
            lease,
            num_skipped,
            num_tokens,
            step_id: self.step_id,
        })
    }

    /// Whether a step in flight moves the sequence to host memory: if that step fails, it is not there.
    pub(super) fn is_leaving(&self, sequence: &Sequence) -> bool {
        let swapped = sequence.swapped.as_ref();
        swapped.is_some_and(|swapped| swapped.step_id >= self.oldest_step())
    }

    /// How a swapped sequence can start: with the blocks that are found and, behind them, those in host memory. None where
    /// blocks between the two are missing, or where the cache has all of them.
    pub(super) fn start_from_host(sequence: &Sequence, hit: &PrefixHit, block_size: u32) -> Option<Start> {
        let swapped = sequence.swapped.as_ref()?;
        let is_useful = hit.num_full >= swapped.num_skipped && hit.num_tokens < swapped.num_tokens;
        is_useful.then_some(Start {
            num_found: hit.num_full * block_size,
            num_computed: swapped.num_tokens,
        })
    }

    /// Has the step that is being built bring back what its start counts on, into the blocks of its table. In any case
    /// the sequence is swapped no more.
    pub(super) fn swap_in(&mut self, idx: SeqIdx, start: Start) {
        let sequence = self.sequences.get_mut(idx);
        let Some(swapped) = sequence.swapped.take() else {
            return;
        };
        self.stats.num_swapped -= 1;
        if start.num_computed == start.num_found {
            self.host.give_back(swapped.lease);
            return;
        }
        let table = sequence.table.as_ref().map_or(&[][..], BlockTable::blocks);
        let first = start.num_found / self.config.block_size;
        let end = self.config.blocks_for(start.num_computed);
        let devices = &table[first as usize..end as usize];
        let hosts = &swapped.lease.blocks()[(first - swapped.num_skipped) as usize..];
        self.swaps
            .extend(devices.iter().zip(hosts).map(|(&device, &host)| Swap {
                direction: Direction::FromHost,
                device,
                host,
            }));
        self.building.moves.swapped_in_tokens += start.num_computed - start.num_found;
        self.host.give_back_after(swapped.lease, self.step_id);
    }

    /// Gives back what a sequence has in host memory.
    pub(super) fn drop_swapped(&mut self, sequence: &mut Sequence) {
        if let Some(swapped) = sequence.swapped.take() {
            self.stats.num_swapped -= 1;
            self.host.give_back(swapped.lease);
        }
    }

    /// Puts the moves to the host first, as the arena has them, and returns how many these are. (No step has moves both
    /// ways, as long as nobody is admitted to a step that preempts.)
    pub(super) fn order_swaps(&mut self) -> usize {
        self.swaps.sort_by_key(|swap| swap.direction);
        self.swaps
            .partition_point(|swap| swap.direction == Direction::ToHost)
    }

    /// Takes the moves of a step that did not come to an end as not made.
    pub(super) fn forget_swaps(&mut self, step_id: u64) {
        self.drop_swapped_where(|swapped| swapped.step_id == step_id);
    }

    /// Forgets all that is swapped: it was computed by other weights, or shall not be found any more.
    pub(super) fn drop_all_swapped(&mut self) {
        self.drop_swapped_where(|_| true);
    }

    fn drop_swapped_where(&mut self, is_meant: impl Fn(&Swapped) -> bool) {
        if self.stats.num_swapped == 0 {
            return;
        }
        let swapped = self.sequences.iter();
        let swapped = swapped.filter(|(_, sequence)| sequence.swapped.as_ref().is_some_and(&is_meant));
        let meant: Vec<SeqIdx> = swapped.map(|(idx, _)| idx).collect();
        for idx in meant {
            if let Some(swapped) = self.sequences.get_mut(idx).swapped.take() {
                self.stats.num_swapped -= 1;
                self.host.give_back(swapped.lease);
            }
        }
    }

    /// Every host block is free or held once; who is swapped waits, and has a block for every token that it lost.
    pub(super) fn check_swapped(&self) -> Result<(), String> {
        let all = self.sequences.iter();
        let all: Vec<(&Sequence, &Swapped)> = all
            .filter_map(|(_, sequence)| Some((sequence, sequence.swapped.as_ref()?)))
            .collect();
        self.host.check(all.iter().map(|(_, swapped)| &swapped.lease))?;
        let num_swapped = all.len() as u64;
        for (sequence, swapped) in all {
            let num_blocks = swapped.num_skipped as usize + swapped.lease.blocks().len();
            if sequence.table.is_some()
                || num_blocks != self.config.blocks_for(swapped.num_tokens) as usize
                || swapped.num_tokens >= sequence.num_tokens()
            {
                return Err(format!(
                    "{:?} runs: {}, and has {num_blocks} blocks swapped or skipped for {} of {} tokens",
                    sequence.key,
                    sequence.table.is_some(),
                    swapped.num_tokens,
                    sequence.num_tokens()
                ));
            }
        }
        if num_swapped != self.stats.num_swapped {
            return Err(format!(
                "{num_swapped} sequences are swapped, {} are counted",
                self.stats.num_swapped
            ));
        }
        Ok(())
    }
}
