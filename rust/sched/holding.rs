//! Commands about pins and sessions, which the owner answers between steps, and what becomes of a request's blocks
//! when it leaves a hold behind.

use crate::block::{BlockTable, Namespace, PrefixHit};
use crate::error::HoldError;

use super::hold::{Hold, Promise};
use super::hold_key::{HoldKey, HoldKind, HoldView};
use super::request::FinishReason;
use super::scheduler::Scheduler;
use super::sequence::Sequence;

/// What a request that shall leave a hold behind is going to be.
#[derive(Clone, Debug)]
pub struct HoldRequest<'a> {
    /// The hold's name to be.
    pub key: HoldKey,
    /// How long it lives without being used.
    pub ttl_ms: u64,
    /// The prompt, or what a session is continued with.
    pub tokens: &'a [u32],
    /// Tokens to generate at most.
    pub max_tokens: u32,
    /// Whether the session is continued, and the prompt begins with its tokens.
    pub append: bool,
}

/// What a reset gave up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResetCounts {
    /// Blocks that lookups could find.
    pub blocks: u32,
    /// Pins that are gone.
    pub pins: u32,
    /// Sessions of which only the tokens are left.
    pub sessions: u32,
}

impl Scheduler {
    /// Tells the time, in milliseconds since whenever the caller likes: ages are taken from it, and what has expired
    /// goes.
    pub fn set_time(&mut self, now_ms: u64) {
        self.pool.set_time(now_ms);
        if self.holds.set_time(&mut self.pool, now_ms) {
            self.publish_stats();
        }
    }

    /// Promises that a request will leave a hold behind, and sets blocks aside for it. Returns the promise, which the
    /// request has to bring in `SamplingParams::promise`, and the whole prompt.
    ///
    /// # Errors
    /// `NotFound` and `Busy` of a session that is to be continued; `OverBudget`, `TooMany`, `TooManyTokens`, `Invalid`.
    pub fn promise_hold(&mut self, request: HoldRequest<'_>) -> Result<(u64, Vec<u32>), HoldError> {
        self.take_news();
        let HoldRequest {
            key,
            ttl_ms,
            tokens,
            max_tokens,
            append,
        } = request;
        if key.kind == HoldKind::Pin && !self.pool.prefix_caching() {
            return Err(HoldError::Invalid(
                "a pin was asked for while enable_prefix_caching is off, allowed: pins while it is on".into(),
            ));
        }
        let mut prompt = Vec::new();
        if append {
            let session = self.holds.get(&key).ok_or_else(|| not_found(&key))?;
            if session.appending.is_some() {
                return Err(HoldError::Busy { name: key.name });
            }
            prompt.extend_from_slice(&session.tokens);
        }
        prompt.extend_from_slice(tokens);
        let num_blocks = self.num_blocks_to_promise(&key, &prompt, max_tokens);
        let promise = self
            .holds
            .promise(key.clone(), ttl_ms, num_blocks, self.config.block_size)?;
        if append {
            self.holds.append(&key, promise);
        }
        if key.kind == HoldKind::Session {
            self.holds.refresh(&key);
        }
        self.publish_stats();
        Ok((promise, prompt))
    }

    /// Breaks a promise whose request does not come. Nothing happens if it was kept or broken before.
    pub fn break_promise(&mut self, promise: u64) {
        self.take_news();
        self.holds.end_promise(promise);
        self.publish_stats();
    }

    /// What a tenant holds of one kind, the oldest first.
    pub fn holds(&mut self, salt: &[u8], kind: HoldKind) -> Vec<HoldView> {
        self.take_news();
        self.holds.views(salt, kind)
    }

    /// One hold.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn hold(&mut self, key: &HoldKey) -> Result<HoldView, HoldError> {
        self.take_news();
        self.holds.view(key).ok_or_else(|| not_found(key))
    }

    /// The tokens of a session, or of a pinned prompt.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn hold_tokens(&mut self, key: &HoldKey) -> Result<Vec<u32>, HoldError> {
        self.take_news();
        let hold = self.holds.get(key).ok_or_else(|| not_found(key))?;
        Ok(hold.tokens.to_vec())
    }

    /// Deletes a hold. Its blocks stay findable as long as nobody needs the room. What a request under the same name
    /// is still computing will not be kept.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn delete_hold(&mut self, key: &HoldKey) -> Result<(), HoldError> {
        self.take_news();
        if !self.holds.delete(&mut self.pool, key) {
            return Err(not_found(key));
        }
        self.publish_stats();
        Ok(())
    }

    /// Gives a session a second name, under which it goes on by itself. Both share the blocks. `ttl_ms`: None for
    /// that of the session.
    ///
    /// # Errors
    /// `NotFound`, `Exists`, `TooMany`.
    pub fn fork_session(
        &mut self,
        key: &HoldKey,
        name: &str,
        ttl_ms: Option<u64>,
    ) -> Result<HoldView, HoldError> {
        self.take_news();
        let fork = HoldKey {
            name: name.to_owned(),
            ..key.clone()
        };
        let session = self.holds.get(key).ok_or_else(|| not_found(key))?;
        if self.holds.get(&fork).is_some() {
            return Err(HoldError::Exists { name: fork.name });
        }
        self.holds.require_place()?;
        let hold = Hold {
            key: fork.clone(),
            tokens: session.tokens.clone(),
            table: session.table.as_ref().map(|table| table.fork(&mut self.pool)),
            num_computed: session.num_computed,
            answer_to: session.answer_to,
            ttl_ms: ttl_ms.unwrap_or(session.ttl_ms),
            expires_at_ms: 0,
            appending: None,
        };
        self.holds.insert(hold);
        self.publish_stats();
        self.hold(&fork)
    }

    /// Forgets every published block. Running sequences keep theirs and publish nothing any more; pins are gone;
    /// sessions keep their tokens, which the next request of theirs computes anew.
    pub fn reset_prefix_cache(&mut self) -> ResetCounts {
        let blocks = self.pool.clear_prefix();
        let (pins, sessions) = self.holds.reset(&mut self.pool);
        self.drop_all_swapped();
        self.publish_stats();
        ResetCounts {
            blocks,
            pins,
            sessions,
        }
    }

    /// Says which weights compute from now on. What others computed is not found any more while they do: its blocks
    /// stay until the room is needed, pins are gone, and sessions keep their tokens alone.
    pub fn set_model_epoch(&mut self, model_epoch: u64) {
        if model_epoch != self.model_epoch {
            self.model_epoch = model_epoch;
            self.holds.reset(&mut self.pool);
            self.drop_all_swapped();
            self.publish_stats();
        }
    }

    /// Blocks that a hold may need beyond those that are counted already: what it finds held, and what its name holds
    /// alone, which it will take the place of.
    fn num_blocks_to_promise(&mut self, key: &HoldKey, prompt: &[u32], max_tokens: u32) -> u32 {
        if !self.pool.prefix_caching() {
            return 0;
        }
        let prompt_len = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let most = prompt_len
            .saturating_add(max_tokens)
            .min(self.config.max_model_len);
        // The last sampled token is never computed.
        let worst = self.config.blocks_for(most - 1);
        let mut hit = self.find_prefix(&key.salt, prompt);
        // A block of which only the beginning matches is copied, not shared.
        hit.blocks.truncate(hit.num_full as usize);
        let mut counted: Vec<_> = hit.blocks;
        counted.retain(|&block| self.holds.blocks().contains(block));
        if let Some(table) = self.holds.get(key).and_then(|hold| hold.table.as_ref()) {
            let own = |&block: &_| self.holds.blocks().is_held_once(block) && !counted.contains(&block);
            let own: Vec<_> = table.blocks().iter().copied().filter(own).collect();
            counted.extend(own);
        }
        worst.saturating_sub(u32::try_from(counted.len()).expect("tables are short"))
    }

    /// What of a prompt is found, without a trace of the search.
    pub(super) fn find_prefix(&self, salt: &[u8], tokens: &[u32]) -> PrefixHit {
        let mut hit = PrefixHit::default();
        if let Some(root) = self.pool.find_namespace(&namespace(salt, self.model_epoch)) {
            self.pool.lookup(root, tokens, &mut hit);
        }
        hit
    }

    /// Settles the promise of a sequence that has ended: the hold is made, or the name stays as it was.
    pub(super) fn settle_promise(&mut self, promise: u64, sequence: &mut Sequence, reason: FinishReason) {
        let Some(promise) = self.holds.end_promise(promise) else {
            return;
        };
        // A client that left does not know of an end that came in the same moment.
        let is_aborted = self.edge.shared.flags.is_aborted(sequence.request);
        if matches!(reason, FinishReason::Stop | FinishReason::Length) && !is_aborted {
            self.keep(promise, sequence);
        }
    }

    /// Makes a sequence's tokens and blocks a hold.
    fn keep(&mut self, promise: Promise, sequence: &mut Sequence) {
        let is_pin = promise.key.kind == HoldKind::Pin;
        if is_pin {
            // Its one generated token was not asked for.
            let prompt_len = sequence.prompt_len;
            sequence.tokens.truncate(prompt_len as usize);
            if let Some(table) = sequence.table.as_mut()
                && sequence.num_computed > prompt_len
            {
                table.truncate(&mut self.pool, prompt_len);
                table.publish_tail(&mut self.pool, &sequence.tokens, prompt_len);
                sequence.num_computed = prompt_len;
            }
        }
        let before = self.holds.remove(&mut self.pool, &promise.key);
        let table = self.table_to_keep(&promise.key.salt, sequence);
        if is_pin && table.is_none() {
            // The cache was reset while the prompt was computed: nothing of it can be found.
            return;
        }
        let num_computed = table.as_ref().map_or(0, |_| sequence.num_computed);
        self.holds.insert(Hold {
            key: promise.key,
            tokens: sequence.tokens[..].into(),
            table,
            num_computed,
            answer_to: Some((sequence.request, sequence.prompt_len)),
            ttl_ms: promise.ttl_ms,
            expires_at_ms: 0,
            appending: before.and_then(|hold| hold.appending),
        });
    }

    /// The table of a sequence that has ended, if what it holds can be found and fits into the budget. It does not fit
    /// only if what the promise counted on was deleted meanwhile.
    fn table_to_keep(&mut self, salt: &[u8], sequence: &mut Sequence) -> Option<BlockTable> {
        let can_keep = |table: &BlockTable| {
            table.is_findable(&self.pool)
                && self.pool.prefix_caching()
                && sequence.model_epoch == self.model_epoch
                && self.holds.has_room_for(salt, table)
        };
        if sequence.table.as_ref().is_some_and(can_keep) {
            sequence.table.take()
        } else {
            None
        }
    }

    /// Hears what other threads said before the command at hand, such as where the answer of a session ends.
    fn take_news(&mut self) {
        let num_changes = self.queues.num_changes();
        self.drain();
        if self.queues.num_changes() != num_changes {
            self.count_wasted_slots();
            self.publish_stats();
        }
    }
}

/// The namespace in which requests with this salt find what these weights computed.
pub(super) const fn namespace(salt: &[u8], model_epoch: u64) -> Namespace<'_> {
    Namespace {
        salt,
        adapter: b"",
        model_epoch,
    }
}

fn not_found(key: &HoldKey) -> HoldError {
    HoldError::NotFound {
        noun: key.kind.noun(),
        name: key.name.clone(),
    }
}
