//! Which blocks pins and sessions hold, and how many of them each: a block that several hold counts once against
//! their budget.

use crate::ids::BlockId;

/// The holders of every block, and how many blocks have any.
#[derive(Debug)]
pub(super) struct HeldBlocks {
    num_holders: Vec<u32>,
    len: u32,
}

impl HeldBlocks {
    pub(super) fn new(num_blocks: u32) -> Self {
        Self {
            num_holders: vec![0; num_blocks as usize + 1],
            len: 0,
        }
    }

    /// Blocks that are held.
    pub(super) const fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.num_holders[block.index()] > 0
    }

    /// Whether one hold alone has the block, so that it would be nobody's without it.
    pub(super) fn is_held_once(&self, block: BlockId) -> bool {
        self.num_holders[block.index()] == 1
    }

    /// A hold takes these blocks. Returns how many of them nobody held.
    pub(super) fn add(&mut self, blocks: &[BlockId]) -> u32 {
        let before = self.len;
        for block in blocks {
            let num_holders = &mut self.num_holders[block.index()];
            self.len += u32::from(*num_holders == 0);
            *num_holders += 1;
        }
        self.len - before
    }

    /// A hold gives these blocks up. Returns how many of them nobody holds any more.
    pub(super) fn remove(&mut self, blocks: &[BlockId]) -> u32 {
        let before = self.len;
        for block in blocks {
            let num_holders = &mut self.num_holders[block.index()];
            *num_holders -= 1;
            self.len -= u32::from(*num_holders == 0);
        }
        before - self.len
    }

    /// Checks the counts against the blocks of every hold.
    pub(super) fn check<'a>(&self, holds: impl Iterator<Item = &'a [BlockId]>) -> Result<(), String> {
        let mut counted = Self {
            num_holders: vec![0; self.num_holders.len()],
            len: 0,
        };
        for blocks in holds {
            counted.add(blocks);
        }
        if counted.num_holders != self.num_holders || counted.len != self.len {
            return Err(format!(
                "{} blocks are held, counted as {}",
                counted.len, self.len
            ));
        }
        Ok(())
    }
}
