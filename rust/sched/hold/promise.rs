//! Promises: what is set aside for a hold that a request will leave behind. They are opened before the request is
//! submitted, taken up when it is, and end with it.

use super::super::hold_key::HoldKey;
use super::Holds;
use crate::error::HoldError;

/// A promise that no request has taken up by then is broken: whoever opened it is gone.
const PROMISE_TTL_MS: u64 = 600_000;

/// A request that runs, or is about to, will leave a hold behind.
#[derive(Debug)]
pub(in crate::sched) struct Promise {
    pub(in crate::sched) key: HoldKey,
    pub(in crate::sched) ttl_ms: u64,
    /// Blocks set aside.
    pub(in crate::sched) num_blocks: u32,
    /// Whether a request has taken it up.
    pub(in crate::sched) is_taken: bool,
    pub(in crate::sched) opened_at_ms: u64,
}

impl Holds {
    /// Sets blocks aside for a hold to come. Returns the promise's number.
    ///
    /// # Errors
    /// `OverBudget`, `TooMany` and `TooManyTokens`; nothing has changed then.
    pub(in crate::sched) fn promise(
        &mut self,
        key: HoldKey,
        ttl_ms: u64,
        num_blocks: u32,
        block_size: u32,
    ) -> Result<u64, HoldError> {
        self.require_place()?;
        if self.num_tokens >= self.max_tokens {
            return Err(HoldError::TooManyTokens {
                most: self.max_tokens,
            });
        }
        self.require_room(&key, num_blocks, block_size)?;
        let number = self.next_number();
        self.num_promised += num_blocks;
        self.accounts
            .change(&key.salt, |account| account.promised += num_blocks);
        let promise = Promise {
            key,
            ttl_ms,
            num_blocks,
            is_taken: false,
            opened_at_ms: self.now_ms,
        };
        self.promises.insert(number, promise);
        Ok(number)
    }

    /// Whether so many more blocks may be held: what a tenant may have is looked at first, since there others cannot help.
    fn require_room(&self, key: &HoldKey, needed: u32, block_size: u32) -> Result<(), HoldError> {
        let of_tenant = needed > self.accounts.num_left(&key.salt);
        if !of_tenant && needed <= self.num_left() {
            return Ok(());
        }
        let (budget, held, promised) = match self.accounts.most() {
            Some(most) if of_tenant => {
                let account = self.accounts.of(&key.salt);
                (most, account.held, account.promised)
            }
            _ => (self.budget, self.blocks.len(), self.num_promised),
        };
        Err(HoldError::OverBudget {
            noun: key.kind.noun(),
            needed,
            block_size,
            of_tenant,
            budget,
            held,
            promised,
        })
    }

    /// A request of this tenant takes a promise up. Returns whether it may: the promise is there and its tenant's own.
    pub(in crate::sched) fn take_up(&mut self, number: u64, salt: &[u8]) -> bool {
        let promise = self.promises.get_mut(&number);
        let Some(promise) = promise.filter(|promise| promise.key.salt == salt && !promise.is_taken) else {
            return false;
        };
        promise.is_taken = true;
        true
    }

    /// Ends a promise, kept or not, and gives its blocks back to the budget. None if it was broken before.
    pub(in crate::sched) fn end_promise(&mut self, number: u64) -> Option<Promise> {
        let promise = self.promises.remove(&number)?;
        self.num_promised -= promise.num_blocks;
        self.accounts.change(&promise.key.salt, |account| {
            account.promised -= promise.num_blocks;
        });
        if let Some(id) = self.by_key.get(&promise.key) {
            let hold = self.by_number.get_mut(id).expect("a key names a hold");
            hold.appending.take_if(|appending| *appending == number);
        }
        Some(promise)
    }

    /// Breaks every promise of this name: what is deleted does not come back with a request that still runs.
    pub(super) fn break_promises(&mut self, key: &HoldKey) {
        let same = self.promises.iter().filter(|(_, promise)| promise.key == *key);
        for number in same.map(|(&number, _)| number).collect::<Vec<_>>() {
            self.end_promise(number);
        }
    }

    /// Breaks those that nobody has taken up in time.
    pub(super) fn break_stale_promises(&mut self) {
        // They are in the order in which they were opened.
        let old = self
            .promises
            .iter()
            .take_while(|(_, promise)| promise.opened_at_ms + PROMISE_TTL_MS <= self.now_ms);
        let stale = old.filter(|(_, promise)| !promise.is_taken);
        for number in stale.map(|(&number, _)| number).collect::<Vec<_>>() {
            self.end_promise(number);
        }
    }
}
