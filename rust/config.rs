//! The sizes that the core is built with. They never change while it runs.

use crate::block::{Eviction, MAX_SHARES, Share, WEIGHT_ONE};
use crate::error::InvalidConfig;

/// Samples that one request may ask for.
pub const MAX_SAMPLES: u32 = 128;
/// Ended sequences that one step reports at most; more wait for the next step.
pub const MAX_ENDED_PER_STEP: usize = 1024;
/// Blocks of host memory at most. Far more than has been built, and every one of them may be named by a step.
const MAX_HOST_BLOCKS: u32 = 1 << 24;
/// Positions and slots travel as int32.
const MAX_SLOTS: u64 = i32::MAX as u64;

/// Host memory for the blocks of preempted sequences, and what decides between moving and computing again.
///
/// The costs are those of the machine, measured once at start (`Scheduler::set_swap_costs`); the defaults serve whoever
/// wants the same decisions everywhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostTier {
    /// Blocks of host memory, each the size of one of the pool. With none every preempted sequence is computed again.
    pub num_blocks: u32,
    /// Nanoseconds to compute one token in a batch of many.
    pub compute_token_ns: u32,
    /// Nanoseconds to move one block, one way.
    pub move_block_ns: u32,
}

impl Default for HostTier {
    /// No host memory. A token costs as much as five moves of a block.
    fn default() -> Self {
        Self {
            num_blocks: 0,
            compute_token_ns: 50_000,
            move_block_ns: 10_000,
        }
    }
}

/// Sizes and switches of one core.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// Usable blocks. The null block is one more.
    pub num_blocks: u32,
    /// Token slots per block, a power of two.
    pub block_size: u32,
    /// Sequences that may run at once.
    pub max_num_seqs: u32,
    /// Tokens that one step may compute.
    pub max_num_batched_tokens: u32,
    /// Prompt and generated tokens of one sequence.
    pub max_model_len: u32,
    /// Tokens that end every sequence which does not ignore them.
    pub eos_token_ids: Vec<u32>,
    /// Whether computed blocks can be found again by their prefix.
    pub prefix_caching: bool,
    /// Whether the beginning of a cached block can be found as well.
    pub partial_matching: bool,
    /// Which cached block is given up when none is free.
    pub eviction: Eviction,
    /// Tenants that have a share of the cache of their own.
    pub tenants: Vec<Share>,
    /// Blocks that pins and sessions may hold together. The longest sequence must fit beside them.
    pub max_pinned_blocks: u32,
    /// Blocks that those of one tenant may hold; None: as many. A tenant is one that is named, or else a salt.
    pub max_pinned_blocks_per_tenant: Option<u32>,
    /// Requests that may be in flight, waiting or running.
    pub max_queued_requests: u32,
    /// Where preempted sequences are parked.
    pub host: HostTier,
}

impl CoreConfig {
    /// Refuses sizes that the core cannot work with.
    ///
    /// # Errors
    /// `InvalidConfig` names the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        let refuse = |field: &'static str, value: u64, allowed: &str| {
            Err(InvalidConfig {
                field,
                value,
                allowed: allowed.to_owned(),
            })
        };
        if !self.block_size.is_power_of_two() || self.block_size > 1024 {
            return refuse(
                "block_size",
                self.block_size.into(),
                "a power of two from 1 to 1024",
            );
        }
        if self.num_blocks == 0 || (u64::from(self.num_blocks) + 1) * u64::from(self.block_size) > MAX_SLOTS {
            let allowed = format!("1 to {}", MAX_SLOTS / u64::from(self.block_size) - 1);
            return refuse("num_blocks", self.num_blocks.into(), &allowed);
        }
        if self.host.num_blocks > MAX_HOST_BLOCKS {
            let allowed = format!("0 to {MAX_HOST_BLOCKS}");
            return refuse("num_host_blocks", self.host.num_blocks.into(), &allowed);
        }
        self.validate_tenants()?;
        for (field, value) in [
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_model_len", self.max_model_len),
            ("max_queued_requests", self.max_queued_requests),
        ] {
            if value == 0 || value > 1 << 24 {
                return refuse(field, value.into(), "1 to 16777216");
            }
        }
        let most = self
            .num_blocks
            .saturating_sub(self.blocks_for(self.max_model_len));
        if self.max_pinned_blocks > most {
            let allowed =
                format!("0 to {most}, so that a sequence of max_model_len tokens fits beside what is pinned");
            return refuse("max_pinned_blocks", self.max_pinned_blocks.into(), &allowed);
        }
        if let Some(share) = self.max_pinned_blocks_per_tenant
            && share > self.max_pinned_blocks
        {
            let allowed = format!("0 to {}, which is max_pinned_blocks", self.max_pinned_blocks);
            return refuse("max_pinned_blocks_per_tenant", share.into(), &allowed);
        }
        Ok(())
    }

    /// Few enough tenants, whose floors fit the pool together, with weights from 1/100 to 100.
    fn validate_tenants(&self) -> Result<(), InvalidConfig> {
        let refuse = |field, value, allowed| {
            Err(InvalidConfig {
                field,
                value,
                allowed,
            })
        };
        if self.tenants.len() > MAX_SHARES {
            return refuse(
                "tenants",
                self.tenants.len() as u64,
                format!("up to {MAX_SHARES}"),
            );
        }
        let floors = self.tenants.iter().map(|tenant| u64::from(tenant.floor)).sum();
        if floors > u64::from(self.num_blocks) {
            let allowed = format!("up to {} for all tenants together", self.num_blocks);
            return refuse("min_blocks", floors, allowed);
        }
        let weights = WEIGHT_ONE / 100..=WEIGHT_ONE * 100;
        if let Some(tenant) = self
            .tenants
            .iter()
            .find(|tenant| !weights.contains(&tenant.weight))
        {
            let allowed = format!(
                "{} to {}, in parts of {WEIGHT_ONE}",
                weights.start(),
                weights.end()
            );
            return refuse("eviction_weight", tenant.weight.into(), allowed);
        }
        Ok(())
    }

    /// What pins and sessions may hold unless told otherwise: a quarter of the pool, less where the longest sequence
    /// would not fit beside it, and nothing where nothing can be found again.
    #[must_use]
    pub fn with_default_pin_budget(self) -> Self {
        let most = self
            .num_blocks
            .saturating_sub(self.blocks_for(self.max_model_len));
        let max_pinned_blocks = if self.prefix_caching {
            most.min(self.num_blocks / 4)
        } else {
            0
        };
        Self {
            max_pinned_blocks,
            ..self
        }
    }

    /// Blocks that hold `num_tokens` tokens.
    pub const fn blocks_for(&self, num_tokens: u32) -> u32 {
        // A shift, because the compiler does not know of the power of two, and every step asks for every sequence.
        let shift = self.block_size.trailing_zeros();
        (num_tokens >> shift) + (num_tokens & (self.block_size - 1) != 0) as u32
    }

    /// Rows that one step may sample. Every running sequence can have one, and one prompt its samples besides.
    pub const fn max_rows(&self) -> u32 {
        self.max_num_seqs + MAX_SAMPLES
    }
}
