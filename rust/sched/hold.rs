//! Holds: what is kept after its request has ended, until it expires. A pin keeps the blocks of a prompt, a session
//! the tokens and blocks of a conversation.
//!
//! All holds together have a budget of blocks. A request that shall leave a hold behind opens a [`Promise`] first,
//! which sets aside what it may need at most; so the budget is never exceeded, and since the pool without the budget
//! holds the longest sequence, holds can keep nobody from being admitted for good. Blocks that several holds share
//! count once. A tenant may be kept to a part of the budget.

mod accounts;
mod check;
mod promise;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::block::{BlockPool, BlockTable};
use crate::config::CoreConfig;
use crate::error::HoldError;
use crate::ids::{BlockId, RequestId};

use super::held_blocks::HeldBlocks;
use super::hold_key::{HoldKey, HoldKind, HoldView};

use accounts::Accounts;
pub(super) use promise::Promise;

/// Pins and sessions, and those that are being made, at most. Forks of a session cost no blocks, but memory.
pub(super) const MAX_HOLDS: usize = 16_384;
/// Tokens of all pins and sessions, 256 MiB of them, from which on no other one is promised. The budget of blocks does not
/// bound them where prefix caching is off, or after a reset, which leaves sessions their tokens alone.
const MAX_TOKENS: usize = 1 << 26;

/// Something that is kept.
#[derive(Debug)]
pub(super) struct Hold {
    pub(super) key: HoldKey,
    /// Shared by forks.
    pub(super) tokens: Arc<[u32]>,
    /// None where the blocks were given up, so that only the tokens are left.
    pub(super) table: Option<BlockTable>,
    /// Leading tokens whose keys and values the blocks hold.
    pub(super) num_computed: u32,
    /// The request whose answer ends the tokens, and the length of its prompt.
    pub(super) answer_to: Option<(RequestId, u32)>,
    pub(super) ttl_ms: u64,
    pub(super) expires_at_ms: u64,
    /// The promise of the request that continues a session.
    pub(super) appending: Option<u64>,
}

impl Hold {
    pub(super) fn num_blocks(&self) -> u32 {
        self.table.as_ref().map_or(0, BlockTable::len)
    }

    fn blocks(&self) -> &[BlockId] {
        self.table.as_ref().map_or(&[], BlockTable::blocks)
    }

    fn view(&self) -> HoldView {
        HoldView {
            name: self.key.name.clone(),
            num_tokens: u32::try_from(self.tokens.len()).expect("a sequence is short"),
            num_blocks: self.num_blocks(),
            expires_at_ms: self.expires_at_ms,
        }
    }
}

/// All holds and promises.
#[derive(Debug)]
pub(super) struct Holds {
    /// Blocks that holds and promises may have together.
    budget: u32,
    now_ms: u64,
    /// By number, which is the order in which they were made.
    by_number: BTreeMap<u64, Hold>,
    by_key: BTreeMap<HoldKey, u64>,
    by_expiry: BTreeSet<(u64, u64)>,
    /// Pins by their first block: a hit on one of their blocks goes through it.
    pins_by_first: HashMap<BlockId, Vec<u64>>,
    num_pins: usize,
    promises: BTreeMap<u64, Promise>,
    blocks: HeldBlocks,
    accounts: Accounts,
    /// Blocks set aside by promises.
    num_promised: u32,
    /// Tokens that are kept; what forks share counts once.
    num_tokens: usize,
    max_tokens: usize,
    /// Numbers given to holds and promises so far.
    last_number: u64,
}

impl Holds {
    pub(super) fn new(config: &CoreConfig) -> Self {
        Self {
            budget: config.max_pinned_blocks,
            now_ms: 0,
            by_number: BTreeMap::new(),
            by_key: BTreeMap::new(),
            by_expiry: BTreeSet::new(),
            pins_by_first: HashMap::new(),
            num_pins: 0,
            promises: BTreeMap::new(),
            blocks: HeldBlocks::new(config.num_blocks),
            accounts: Accounts::new(config.tenants.clone(), config.max_pinned_blocks_per_tenant),
            num_promised: 0,
            num_tokens: 0,
            max_tokens: MAX_TOKENS,
            last_number: 0,
        }
    }

    pub(super) const fn budget(&self) -> u32 {
        self.budget
    }

    /// Which blocks are held.
    pub(super) const fn blocks(&self) -> &HeldBlocks {
        &self.blocks
    }

    pub(super) const fn num_promised(&self) -> u32 {
        self.num_promised
    }

    pub(super) const fn num_pins(&self) -> usize {
        self.num_pins
    }

    pub(super) fn num_sessions(&self) -> usize {
        self.by_number.len() - self.num_pins
    }

    pub(super) fn get(&self, key: &HoldKey) -> Option<&Hold> {
        self.by_key.get(key).map(|number| &self.by_number[number])
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Hold> {
        self.by_number.values()
    }

    /// Those of one tenant, the oldest first.
    pub(super) fn views(&self, salt: &[u8], kind: HoldKind) -> Vec<HoldView> {
        let first = HoldKey {
            salt: salt.to_vec(),
            kind,
            name: String::new(),
        };
        let own = self.by_key.range(first..);
        let own = own.take_while(|(key, _)| key.salt == salt && key.kind == kind);
        let mut numbers: Vec<u64> = own.map(|(_, &number)| number).collect();
        numbers.sort_unstable();
        numbers
            .iter()
            .map(|number| self.by_number[number].view())
            .collect()
    }

    pub(super) fn view(&self, key: &HoldKey) -> Option<HoldView> {
        self.get(key).map(Hold::view)
    }

    /// Whether another hold, or a promise of one, may be added.
    ///
    /// # Errors
    /// `TooMany`.
    pub(super) fn require_place(&self) -> Result<(), HoldError> {
        if self.by_number.len() + self.promises.len() < MAX_HOLDS {
            return Ok(());
        }
        Err(HoldError::TooMany { most: MAX_HOLDS })
    }

    /// Marks a session as being continued by the request of a promise.
    pub(super) fn append(&mut self, key: &HoldKey, number: u64) {
        let hold = self.of_key_mut(key).expect("the caller has just seen it");
        hold.appending = Some(number);
    }

    /// Whether the blocks of a tenant's table fit beside those that are held and promised.
    pub(super) fn has_room_for(&self, salt: &[u8], table: &BlockTable) -> bool {
        let new = table
            .blocks()
            .iter()
            .filter(|&&block| !self.blocks.contains(block));
        let num_left = self.num_left().min(self.accounts.num_left(salt));
        u32::try_from(new.count()).expect("tables are short") <= num_left
    }

    /// Blocks of the budget that are neither held nor promised.
    const fn num_left(&self) -> u32 {
        self.budget - self.blocks.len() - self.num_promised
    }

    /// Adds a hold under a name that is free, for its time to live from now on.
    pub(super) fn insert(&mut self, mut hold: Hold) {
        assert!(!self.by_key.contains_key(&hold.key), "the name is free");
        let number = self.next_number();
        hold.expires_at_ms = self.now_ms + hold.ttl_ms;
        // Those of a fork are in its session already.
        if Arc::strong_count(&hold.tokens) == 1 {
            self.num_tokens += hold.tokens.len();
        }
        self.by_expiry.insert((hold.expires_at_ms, number));
        self.by_key.insert(hold.key.clone(), number);
        let num_new = self.blocks.add(hold.blocks());
        self.accounts
            .change(&hold.key.salt, |account| account.held += num_new);
        self.num_pins += usize::from(hold.key.kind == HoldKind::Pin);
        if let (HoldKind::Pin, Some(&first)) = (hold.key.kind, hold.blocks().first()) {
            self.pins_by_first.entry(first).or_default().push(number);
        }
        self.by_number.insert(number, hold);
        assert!(
            self.blocks.len() + self.num_promised <= self.budget,
            "holds keep to their budget"
        );
    }

    /// Deletes a hold; its blocks go the way of all blocks that nobody holds. False if there is none.
    pub(super) fn delete(&mut self, pool: &mut BlockPool, key: &HoldKey) -> bool {
        let known = self.remove(pool, key).is_some();
        if known {
            self.break_promises(key);
        }
        known
    }

    /// Takes a hold out and gives its blocks back.
    pub(super) fn remove(&mut self, pool: &mut BlockPool, key: &HoldKey) -> Option<Hold> {
        let number = *self.by_key.get(key)?;
        self.release_blocks(pool, number);
        self.by_key.remove(key);
        let hold = self.by_number.remove(&number).expect("a key names a hold");
        if Arc::strong_count(&hold.tokens) == 1 {
            self.num_tokens -= hold.tokens.len();
        }
        self.by_expiry.remove(&(hold.expires_at_ms, number));
        self.num_pins -= usize::from(hold.key.kind == HoldKind::Pin);
        Some(hold)
    }

    /// Gives up the blocks of a hold; its tokens stay.
    fn release_blocks(&mut self, pool: &mut BlockPool, number: u64) {
        let hold = self.by_number.get_mut(&number).expect("a number names a hold");
        hold.num_computed = 0;
        let Some(mut table) = hold.table.take() else {
            return;
        };
        if let (HoldKind::Pin, Some(first)) = (hold.key.kind, table.blocks().first()) {
            let pins = self.pins_by_first.get_mut(first).expect("every pin is listed");
            pins.retain(|&pin| pin != number);
            if pins.is_empty() {
                self.pins_by_first.remove(first);
            }
        }
        let num_free = self.blocks.remove(table.blocks());
        self.accounts
            .change(&hold.key.salt, |account| account.held -= num_free);
        table.release(pool);
    }

    /// Ends an answer at `num_tokens` generated tokens in every session that ends with it: it was cut outside after it
    /// had ended here.
    pub(super) fn shorten_answer(&mut self, pool: &mut BlockPool, request: RequestId, num_tokens: u32) {
        for hold in self.by_number.values_mut() {
            let Some((_, prompt_len)) = hold.answer_to.filter(|&(answered, _)| answered == request) else {
                continue;
            };
            let num_kept = prompt_len + num_tokens;
            if num_kept as usize >= hold.tokens.len() {
                continue;
            }
            if Arc::strong_count(&hold.tokens) == 1 {
                self.num_tokens -= hold.tokens.len();
            }
            hold.tokens = hold.tokens[..num_kept as usize].into();
            self.num_tokens += hold.tokens.len();
            hold.num_computed = hold.num_computed.min(num_kept);
            let Some(table) = hold.table.as_mut() else {
                continue;
            };
            let before = table.blocks().to_vec();
            table.truncate(pool, hold.num_computed);
            table.publish_tail(pool, &hold.tokens, hold.num_computed);
            let num_free = self.blocks.remove(&before[table.blocks().len()..]);
            self.accounts
                .change(&hold.key.salt, |account| account.held -= num_free);
        }
    }

    // Time.

    /// Takes note of the time. What has expired goes; returns whether anything has.
    pub(super) fn set_time(&mut self, pool: &mut BlockPool, now_ms: u64) -> bool {
        // A clock that goes back stands still here.
        self.now_ms = self.now_ms.max(now_ms);
        let before = (self.by_number.len(), self.promises.len());
        while let Some(&(expires_at_ms, number)) = self.by_expiry.first()
            && expires_at_ms <= self.now_ms
        {
            let key = self.by_number[&number].key.clone();
            self.remove(pool, &key);
        }
        self.break_stale_promises();
        before != (self.by_number.len(), self.promises.len())
    }

    /// A hold was used: its time to live begins anew.
    pub(super) fn refresh(&mut self, key: &HoldKey) {
        if let Some(&number) = self.by_key.get(key) {
            self.refresh_number(number);
        }
    }

    /// Blocks were found again, beginning with `first`: the pins that begin with it were used.
    pub(super) fn note_hit(&mut self, first: BlockId) {
        for number in self.pins_by_first.get(&first).cloned().unwrap_or_default() {
            self.refresh_number(number);
        }
    }

    fn refresh_number(&mut self, number: u64) {
        let hold = self.by_number.get_mut(&number).expect("a number names a hold");
        self.by_expiry.remove(&(hold.expires_at_ms, number));
        hold.expires_at_ms = self.now_ms + hold.ttl_ms;
        self.by_expiry.insert((hold.expires_at_ms, number));
    }

    /// Forgets what was computed: pins go, and of sessions the tokens stay. Returns the number of both.
    pub(super) fn reset(&mut self, pool: &mut BlockPool) -> (u32, u32) {
        let (mut num_pins, mut num_sessions) = (0, 0);
        for (number, key) in self
            .by_key
            .iter()
            .map(|(key, &n)| (n, key.clone()))
            .collect::<Vec<_>>()
        {
            match key.kind {
                HoldKind::Pin => {
                    num_pins += 1;
                    self.remove(pool, &key);
                }
                HoldKind::Session => {
                    num_sessions += 1;
                    self.release_blocks(pool, number);
                }
            }
        }
        (num_pins, num_sessions)
    }

    const fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    fn of_key_mut(&mut self, key: &HoldKey) -> Option<&mut Hold> {
        let number = self.by_key.get(key)?;
        self.by_number.get_mut(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> HoldKey {
        HoldKey {
            salt: Vec::new(),
            kind: HoldKind::Session,
            name: name.to_owned(),
        }
    }

    #[test]
    fn tokens_without_blocks_are_bounded_and_forks_are_free() {
        let mut pool = BlockPool::new(crate::block::PoolConfig {
            num_blocks: 4,
            block_size: 4,
            prefix_caching: false,
            partial_matching: true,
            eviction: crate::block::Eviction::Lru,
            hash_key: [1, 2, 3, 4],
        });
        let mut holds = Holds::new(&CoreConfig {
            num_blocks: 4,
            block_size: 4,
            max_num_seqs: 1,
            max_num_batched_tokens: 1,
            max_model_len: 16,
            eos_token_ids: Vec::new(),
            prefix_caching: false,
            partial_matching: true,
            eviction: crate::block::Eviction::Lru,
            tenants: Vec::new(),
            max_pinned_blocks: 0,
            max_pinned_blocks_per_tenant: None,
            max_queued_requests: 1,
            host: crate::config::HostTier::default(),
        });
        holds.max_tokens = 20;
        let session = |name: &str, tokens: Arc<[u32]>| Hold {
            key: key(name),
            tokens,
            table: None,
            num_computed: 0,
            answer_to: Some((RequestId(7), 3)),
            ttl_ms: 1000,
            expires_at_ms: 0,
            appending: None,
        };
        for name in ["a", "b"] {
            assert!(holds.promise(key(name), 1000, 0, 4).is_ok());
            holds.insert(session(name, vec![5; 10].into()));
            let tokens = holds.get(&key(name)).unwrap().tokens.clone();
            holds.insert(session(&format!("fork of {name}"), tokens));
            holds.check(4).unwrap();
        }
        assert_eq!(holds.num_tokens, 20);
        let refused = holds.promise(key("c"), 1000, 0, 4);
        assert_eq!(refused, Err(HoldError::TooManyTokens { most: 20 }));
        holds.delete(&mut pool, &key("a"));
        assert_eq!(holds.num_tokens, 20, "the fork has them");
        holds.delete(&mut pool, &key("fork of a"));
        holds.check(4).unwrap();
        assert!(holds.promise(key("c"), 1000, 0, 4).is_ok());
        holds.shorten_answer(&mut pool, RequestId(7), 1);
        holds.check(4).unwrap();
        assert_eq!(holds.num_tokens, 8, "cut apart");
        holds.set_time(&mut pool, 1000);
        holds.check(4).unwrap();
        assert_eq!(holds.num_tokens, 0);
    }
}
