//! The invariants of pins and sessions, which tests check after every operation.

use std::collections::{HashMap, HashSet};

use super::super::hold_key::HoldKind;
use super::accounts::Accounts;
use super::{Hold, Holds};

impl Holds {
    /// Checks that the counts, the orders and the budget are right. Blocks and references are the scheduler's matter.
    pub(in crate::sched) fn check(&self, block_size: u32) -> Result<(), String> {
        for (number, hold) in &self.by_number {
            let name = (hold.key.kind, &hold.key.name);
            if self.by_key.get(&hold.key) != Some(number)
                || !self.by_expiry.contains(&(hold.expires_at_ms, *number))
            {
                return Err(format!("{name:?} is not found by its name or expiry"));
            }
            if hold.num_blocks() != hold.num_computed.div_ceil(block_size)
                || hold.num_computed as usize > hold.tokens.len()
            {
                let (blocks, computed) = (hold.num_blocks(), hold.num_computed);
                return Err(format!("{name:?} holds {blocks} blocks for {computed} tokens"));
            }
            let is_listed = |first| {
                let pins = self.pins_by_first.get(first);
                pins.is_some_and(|pins| pins.contains(number))
            };
            if hold.key.kind == HoldKind::Pin && !hold.blocks().first().is_some_and(is_listed) {
                return Err(format!("{name:?} is not listed under its first block"));
            }
            if hold
                .appending
                .is_some_and(|promise| !self.promises.contains_key(&promise))
            {
                return Err(format!("{name:?} is continued by nobody"));
            }
        }
        let kept: HashMap<_, _> = self
            .by_number
            .values()
            .map(|hold| (hold.tokens.as_ptr(), hold.tokens.len()))
            .filter(|&(_, len)| len > 0)
            .collect();
        let num_kept: usize = kept.values().sum();
        if num_kept != self.num_tokens {
            return Err(format!(
                "{num_kept} tokens are held, counted as {}",
                self.num_tokens
            ));
        }
        let num_listed: usize = self.pins_by_first.values().map(Vec::len).sum();
        let sizes = [self.by_key.len(), self.by_expiry.len()];
        if sizes != [self.by_number.len(); 2] || num_listed != self.num_pins {
            return Err(format!(
                "{} holds, by name and expiry {sizes:?}",
                self.by_number.len()
            ));
        }
        self.blocks.check(self.iter().map(Hold::blocks))?;
        self.accounts.check(&self.count_accounts())?;
        let num_promised: u32 = self.promises.values().map(|promise| promise.num_blocks).sum();
        let num_held = self.blocks.len();
        if num_promised != self.num_promised || num_held + num_promised > self.budget {
            return Err(format!(
                "{num_held} blocks are held and {num_promised} promised, counted as {}, of {}",
                self.num_promised, self.budget
            ));
        }
        Ok(())
    }

    /// The accounts of all tenants, from their holds and promises.
    fn count_accounts(&self) -> Accounts {
        let mut counted = self.accounts.emptied();
        let mut seen = HashSet::new();
        for hold in self.iter() {
            let new = hold.blocks().iter().filter(|&&block| seen.insert(block));
            let num_new = u32::try_from(new.count()).expect("tables are short");
            counted.change(&hold.key.salt, |account| account.held += num_new);
        }
        for promise in self.promises.values() {
            counted.change(&promise.key.salt, |account| {
                account.promised += promise.num_blocks;
            });
        }
        counted
    }
}
