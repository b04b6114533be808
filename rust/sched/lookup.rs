//! What would become of a prompt if it came now: how much of it is found, and whether it would be admitted. Looking
//! changes nothing, not even the order of eviction.

use crate::block::BlockTable;

use super::holding::namespace;
use super::scheduler::Scheduler;

/// Why a prompt would not be admitted at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Obstacle {
    /// It and one token are longer than a sequence may be.
    TooLong,
    /// As many sequences run, or will when running searches fork, as may.
    TooManySequences,
    /// Too few blocks are free or idle, besides those that running sequences are about to need.
    NotEnoughBlocks,
    /// Others wait before it.
    OthersWait,
}

impl Obstacle {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TooLong => "too_long",
            Self::TooManySequences => "too_many_sequences",
            Self::NotEnoughBlocks => "not_enough_blocks",
            Self::OthersWait => "others_wait",
        }
    }
}

/// What became of looking a prompt up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lookup {
    /// Leading tokens that would not be computed.
    pub num_cached_tokens: u32,
    /// Blocks that its known tokens would take, idle ones among the found ones counted.
    pub blocks_needed: u32,
    /// Blocks that it could take.
    pub blocks_available: u32,
    /// None if it would be admitted at once.
    pub obstacle: Option<Obstacle>,
}

impl Scheduler {
    /// Looks a prompt up in the namespace of a salt.
    ///
    /// # Panics
    /// If the prompt is empty.
    pub fn lookup(&mut self, salt: &[u8], prompt: &[u32]) -> Lookup {
        assert!(!prompt.is_empty(), "a prompt has tokens");
        let prompt_len = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let due = self.num_due_blocks().saturating_add(self.growth_margin());
        let blocks_available = self.pool.num_available().saturating_sub(due);
        let (num_cached_tokens, blocks_needed) =
            self.hit_and_cost(salt, prompt, prompt_len, blocks_available);
        let obstacle = if prompt_len >= self.config.max_model_len {
            Some(Obstacle::TooLong)
        } else if self.queues.num_waiting() > 0 {
            Some(Obstacle::OthersWait)
        } else if self.num_places() >= self.config.max_num_seqs as usize {
            Some(Obstacle::TooManySequences)
        } else {
            (blocks_needed > blocks_available).then_some(Obstacle::NotEnoughBlocks)
        };
        Lookup {
            num_cached_tokens,
            blocks_needed,
            blocks_available,
            obstacle,
        }
    }

    /// Tokens that would be found, and the blocks that the prompt would then take.
    fn hit_and_cost(&mut self, salt: &[u8], prompt: &[u32], prompt_len: u32, available: u32) -> (u32, u32) {
        let hit = self.find_prefix(salt, prompt);
        let Some(root) = self.pool.find_namespace(&namespace(salt, self.model_epoch)) else {
            return (0, self.config.blocks_for(prompt_len));
        };
        // The root stays, whoever holds it, so that the table leaves no trace.
        let mut table = BlockTable::new(root, &mut self.pool);
        let choices = self.hit_choices(&hit, prompt_len);
        let costs = choices.map(|num_computed| {
            let cost = table.admission_cost(&self.pool, &hit, num_computed, prompt_len);
            (num_computed, cost)
        });
        table.release(&mut self.pool);
        let fits = costs.iter().find(|(_, cost)| *cost <= available);
        *fits.unwrap_or(&costs[0])
    }
}
