//! Why a prompt was found in the cache as far as it was, and no further. Decided at first admission, where the
//! lookup stopped, and kept for a while; whoever asks later gets what was true then.
//!
//! What it needs beside the index: prompts that were admitted lately, to say what the cache held and what is
//! being computed; a table of first blocks by a hash without the namespace, to say that another one has them; the
//! pool's ghosts. All of it is bounded: [`MAX_RECENT`] prompts with [`MAX_RECENT_TOKENS`] tokens together,
//! [`NUM_FIRST_BLOCKS`] first blocks, [`MAX_EXPLANATIONS`] explanations with [`NUM_SHOWN`] tokens of each kind:
//! about 2 MB. No decision of the scheduler depends on it.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};

use crate::block::{BlockPool, Evicted, Namespace, PrefixHit, Removal, RootId};
use crate::ids::RequestId;

/// Explanations that are kept; the oldest goes first.
pub(super) const MAX_EXPLANATIONS: usize = 1024;
/// Prompts that are remembered, and their tokens together. Of a longer prompt its beginning is kept.
const MAX_RECENT: usize = 256;
const MAX_RECENT_TOKENS: usize = 1 << 18;
/// First blocks that are remembered.
const NUM_FIRST_BLOCKS: usize = 4096;
/// Tokens of a first block that are hashed, at most.
const FIRST_LEN: usize = 16;
/// Tokens that an explanation shows before the place, and of each side behind it.
const NUM_SHOWN: usize = 32;
/// Common tokens from which on two prompts have something to do with each other: all prompts of a model may begin
/// with the same token.
const LEAST_COMMON: usize = 2;

/// Why the known part of a prompt ends where it does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// All but the last token was found, or all that was ever computed of it.
    Hit,
    /// Nothing like it was computed, as far as is remembered.
    NeverSeen,
    /// The cache holds, or held, something that goes on in another way.
    Diverged,
    /// It was computed and has been given up.
    Evicted,
    /// Another salt has it.
    OtherSalt,
    /// It was computed with another adapter.
    OtherAdapter,
    /// It was computed with other weights.
    OtherEpoch,
    /// Another request is computing it.
    NotComputedYet,
    /// The cache is switched off, or the prompt too short to be found.
    Bypassed,
}

impl Verdict {
    /// The name that users see.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::NeverSeen => "never_seen",
            Self::Diverged => "diverged",
            Self::Evicted => "evicted",
            Self::OtherSalt => "other_salt",
            Self::OtherAdapter => "other_adapter",
            Self::OtherEpoch => "other_epoch",
            Self::NotComputedYet => "not_computed_yet",
            Self::Bypassed => "bypassed",
        }
    }
}

/// What there is to say of one prompt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explanation {
    /// Tokens of the prompt.
    pub prompt_len: u32,
    /// Tokens that needed no computing.
    pub num_cached: u32,
    /// Why it is not more.
    pub verdict: Verdict,
    /// Index of the first token that the cache did not have.
    pub token_index: u32,
    /// Tokens of the prompt before that.
    pub before: Vec<u32>,
    /// What the cache has, or had, in its place; empty if nothing.
    pub held: Vec<u32>,
    /// What came instead.
    pub came: Vec<u32>,
    /// How long ago it was given up, in milliseconds, and why.
    pub evicted: Option<(u64, Removal)>,
}

/// A prompt as its first admission sees it.
pub(super) struct Admission<'a> {
    pub(super) request: RequestId,
    pub(super) namespace: Namespace<'a>,
    pub(super) root: RootId,
    pub(super) tokens: &'a [u32],
    pub(super) hit: &'a PrefixHit,
    pub(super) num_computed: u32,
}

/// A prompt that was admitted.
#[derive(Debug)]
struct Recent {
    request: RequestId,
    /// [`Namespace::key`].
    namespace: Box<[u8]>,
    tokens: Box<[u32]>,
    /// Tokens that had been computed when its last sample ended; None while it runs.
    num_computed: Option<u32>,
    ended_at_ms: u64,
}

/// The namespace that had a first block last, as hashes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct FirstBlock {
    /// 0: none.
    tokens: u64,
    salt: u64,
    adapter: u64,
    model_epoch: u64,
}

/// Explanations, and what they are made from.
#[derive(Debug)]
pub(super) struct Explanations {
    by_request: HashMap<RequestId, (Box<[u8]>, Explanation)>,
    in_order: VecDeque<RequestId>,
    recent: VecDeque<Recent>,
    num_recent_tokens: usize,
    first_blocks: Vec<FirstBlock>,
    hasher: RandomState,
}

/// Tokens that two lists have in common from their start.
fn num_common(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

fn shown(tokens: &[u32]) -> Vec<u32> {
    tokens[..tokens.len().min(NUM_SHOWN)].to_vec()
}

/// A length as the number that it is elsewhere.
fn narrow(len: usize) -> u32 {
    u32::try_from(len).expect("a prompt is no longer than max_model_len")
}

/// What was found out about the place where a prompt's known part ends.
struct Finding {
    verdict: Verdict,
    held: Vec<u32>,
    evicted: Option<(u64, Removal)>,
}

impl From<Verdict> for Finding {
    fn from(verdict: Verdict) -> Self {
        Self {
            verdict,
            held: Vec::new(),
            evicted: None,
        }
    }
}

impl Explanations {
    pub(super) fn new() -> Self {
        Self {
            by_request: HashMap::new(),
            in_order: VecDeque::new(),
            recent: VecDeque::new(),
            num_recent_tokens: 0,
            first_blocks: vec![FirstBlock::default(); NUM_FIRST_BLOCKS],
            hasher: RandomState::new(),
        }
    }

    /// What was found out about a request; None where it was not admitted yet, is forgotten, or has another salt.
    pub(super) fn get(&self, request: RequestId, salt: &[u8]) -> Option<&Explanation> {
        let (own, explanation) = self.by_request.get(&request)?;
        (**own == *salt).then_some(explanation)
    }

    /// Finds out about a prompt that is about to be admitted, and remembers both.
    pub(super) fn note(&mut self, pool: &BlockPool, admission: &Admission<'_>) {
        let explanation = self.explain(pool, admission);
        if self.in_order.len() == MAX_EXPLANATIONS
            && let Some(oldest) = self.in_order.pop_front()
        {
            self.by_request.remove(&oldest);
        }
        self.in_order.push_back(admission.request);
        let salt = admission.namespace.salt.into();
        self.by_request.insert(admission.request, (salt, explanation));
        if pool.prefix_caching() {
            let first_block = self.first_block(admission);
            *self.place(first_block.tokens) = first_block;
            self.remember(admission);
        }
    }

    /// A request's last sample ended with so many of its tokens computed.
    pub(super) fn ended(&mut self, pool: &BlockPool, request: RequestId, num_computed: u32) {
        if let Some(recent) = self
            .recent
            .iter_mut()
            .rev()
            .find(|recent| recent.request == request)
        {
            recent.num_computed = Some(num_computed);
            recent.ended_at_ms = pool.now_ms();
        }
    }

    fn remember(&mut self, admission: &Admission<'_>) {
        let tokens = admission.tokens;
        let tokens: Box<[u32]> = tokens[..tokens.len().min(MAX_RECENT_TOKENS / 4)].into();
        self.num_recent_tokens += tokens.len();
        self.recent.push_back(Recent {
            request: admission.request,
            namespace: admission.namespace.key().into(),
            tokens,
            num_computed: None,
            ended_at_ms: 0,
        });
        while (self.recent.len() > MAX_RECENT || self.num_recent_tokens > MAX_RECENT_TOKENS)
            && let Some(oldest) = self.recent.pop_front()
        {
            self.num_recent_tokens -= oldest.tokens.len();
        }
    }

    fn explain(&self, pool: &BlockPool, admission: &Admission<'_>) -> Explanation {
        let Admission { tokens, hit, .. } = *admission;
        let closest = pool.closest(admission.root, tokens, hit);
        let num_full = hit.num_full as usize * pool.block_size() as usize;
        let known = num_full + closest.map_or(0, |closest| closest.num_common);
        // The last token is always computed.
        let known = known.min(tokens.len() - 1).max(admission.num_computed as usize);
        let findable_from = if pool.partial_matching() {
            2
        } else {
            pool.block_size() as usize + 1
        };
        let Finding {
            verdict,
            held,
            evicted,
        } = if !pool.prefix_caching() || tokens.len() < findable_from {
            Verdict::Bypassed.into()
        } else if known + 1 == tokens.len() {
            Verdict::Hit.into()
        } else {
            let beyond = closest.map_or(&[][..], |closest| &closest.tokens[closest.num_common..]);
            self.judge(pool, admission, known, beyond)
        };
        Explanation {
            prompt_len: narrow(tokens.len()),
            num_cached: admission.num_computed,
            verdict,
            token_index: narrow(known),
            before: tokens[known.saturating_sub(NUM_SHOWN)..known].to_vec(),
            held,
            came: shown(&tokens[known..]),
            evicted,
        }
    }

    /// Why a prompt of which `known` tokens are in the index was not found any further. `beyond`: what the index
    /// has there instead.
    fn judge(&self, pool: &BlockPool, admission: &Admission<'_>, known: usize, beyond: &[u32]) -> Finding {
        let Admission { tokens, hit, .. } = *admission;
        let recent = self.most_common(admission, known);
        let ghost = hit
            .hashes
            .get(hit.num_full as usize)
            .and_then(|&hash| pool.evicted(hash));
        let given_up = |evicted: Evicted| Finding {
            evicted: Some((pool.now_ms().saturating_sub(evicted.at_ms), evicted.reason)),
            ..Verdict::Evicted.into()
        };
        if let Some((recent, common)) = recent
            && common > known.max(LEAST_COMMON - 1)
        {
            let Some(num_computed) = recent.num_computed else {
                return Verdict::NotComputedYet.into();
            };
            if num_computed as usize > known {
                return given_up(ghost.unwrap_or_else(|| gone(pool, recent.ended_at_ms)));
            }
        }
        if let Some(ghost) = ghost {
            return given_up(ghost);
        }
        if known >= LEAST_COMMON {
            let lost = recent.map_or(&[][..], |(recent, common)| &recent.tokens[common..]);
            let held = if beyond.is_empty() { lost } else { beyond };
            return Finding {
                held: shown(held),
                // What ends where the match does holds nothing else.
                ..if held.is_empty() {
                    Verdict::Hit
                } else {
                    Verdict::Diverged
                }
                .into()
            };
        }
        let own = self.first_block(admission);
        let last = self.first_blocks[self.place_of(own.tokens)];
        if last.tokens != own.tokens || last == own || tokens.is_empty() {
            Verdict::NeverSeen.into()
        } else if last.model_epoch != own.model_epoch {
            Verdict::OtherEpoch.into()
        } else if last.adapter != own.adapter {
            Verdict::OtherAdapter.into()
        } else {
            Verdict::OtherSalt.into()
        }
    }

    /// The recent prompt of the same namespace that has the most in common with this one, and how much; at least
    /// `known` tokens. The newest of those that have as much.
    fn most_common(&self, admission: &Admission<'_>, known: usize) -> Option<(&Recent, usize)> {
        let tokens = admission.tokens;
        let namespace = admission.namespace.key();
        let mut best: Option<(&Recent, usize)> = None;
        for recent in self.recent.iter().rev() {
            let least = best.map_or(known, |(_, common)| common + 1);
            // Most differ in the last of these tokens.
            if recent.tokens.len() < least
                || least > tokens.len()
                || (least > 0 && recent.tokens[least - 1] != tokens[least - 1])
                || *recent.namespace != *namespace
            {
                continue;
            }
            let common = num_common(&recent.tokens, tokens);
            if common >= least {
                best = Some((recent, common));
            }
        }
        best
    }

    fn first_block(&self, admission: &Admission<'_>) -> FirstBlock {
        let first = &admission.tokens[..admission.tokens.len().min(FIRST_LEN)];
        FirstBlock {
            tokens: self.hasher.hash_one(first).max(1),
            salt: self.hasher.hash_one(admission.namespace.salt),
            adapter: self.hasher.hash_one(admission.namespace.adapter),
            model_epoch: admission.namespace.model_epoch,
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "the table is much shorter")]
    fn place_of(&self, hash: u64) -> usize {
        hash as usize % self.first_blocks.len()
    }

    fn place(&mut self, hash: u64) -> &mut FirstBlock {
        let place = self.place_of(hash);
        &mut self.first_blocks[place]
    }
}

/// When and why something went that no ghost remembers, such as the tail of a sequence that ended then.
fn gone(pool: &BlockPool, ended_at_ms: u64) -> Evicted {
    if pool.epoch() > 0 && pool.last_reset_ms() >= ended_at_ms {
        return Evicted {
            at_ms: pool.last_reset_ms(),
            reason: Removal::Reset,
        };
    }
    Evicted {
        at_ms: ended_at_ms,
        reason: Removal::Capacity,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::{Eviction, PoolConfig};

    /// Requests carry no adapter yet, so no scheduler test can come here.
    #[test]
    fn what_another_adapter_computed_is_told_apart() {
        let mut pool = BlockPool::new(PoolConfig {
            num_blocks: 4,
            block_size: 4,
            prefix_caching: true,
            partial_matching: true,
            eviction: Eviction::Lru,
            hash_key: [1, 2, 3, 4],
        });
        let tokens = [5_u32; 9];
        let mut explanations = Explanations::new();
        let mut verdict = |number, adapter: &[u8]| {
            let namespace = Namespace {
                adapter,
                ..Namespace::default()
            };
            let request = RequestId(number);
            let root = pool.namespace(&namespace);
            let mut hit = PrefixHit::default();
            pool.lookup(root, &tokens, &mut hit);
            let admission = Admission {
                request,
                namespace,
                root,
                tokens: &tokens,
                hit: &hit,
                num_computed: 0,
            };
            explanations.note(&pool, &admission);
            explanations.get(request, b"").expect("just noted").verdict
        };
        assert_eq!(verdict(1, b"one"), Verdict::NeverSeen);
        assert_eq!(verdict(2, b"two"), Verdict::OtherAdapter);
    }
}
