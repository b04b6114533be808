//! A sequence: the scheduled unit. A request has one until its prompt is computed, then one per sample.

use crate::block::BlockTable;
use crate::ids::RequestId;

use super::fairness::TenantIdx;
use super::live::LiveRequests;
use super::queues::QueueKey;
use super::request::SamplingParams;
use super::step::RowWords;
use super::swap::Swapped;
use super::token_ids::TokenIds;

/// When a sample ends, as far as that has to be known for every token.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndRule {
    pub(super) max_tokens: u32,
    pub(super) ignore_eos: bool,
    /// Whether beams are searched for: what is sampled is not what comes next.
    pub(super) is_search: bool,
    /// Whether the request names stop tokens of its own; they stay with it.
    pub(super) has_stop_tokens: bool,
}

impl EndRule {
    pub(super) const fn new(params: &SamplingParams) -> Self {
        Self {
            max_tokens: params.max_tokens,
            ignore_eos: params.ignore_eos,
            is_search: params.beam.is_some(),
            has_stop_tokens: !params.stop_token_ids.is_empty(),
        }
    }
}

/// It runs while it has a block table, and waits otherwise.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) request: RequestId,
    pub(super) tenant: TenantIdx,
    pub(super) key: QueueKey,
    /// What its rows in the arena say of it and its request.
    pub(super) words: RowWords,
    pub(super) end_rule: EndRule,
    /// Prompt and generated tokens.
    pub(super) tokens: TokenIds,
    pub(super) prompt_len: u32,
    /// Leading tokens whose keys and values are in the cache.
    pub(super) num_computed: u32,
    /// Those and the tokens that steps in flight compute. Beyond `tokens` if one of these samples what another computes.
    pub(super) num_scheduled: u32,
    /// Its row in the last step that sampled it.
    pub(super) row: u32,
    /// None while the sequence waits: it holds no block then.
    pub(super) table: Option<BlockTable>,
    /// What of a preempted sequence is in host memory. None: nothing, it will be computed again.
    pub(super) swapped: Option<Swapped>,
    /// Samples that will be forked off when the prompt is computed.
    pub(super) pending_forks: u32,
    /// One of several beams of a search: its last token is computed in the same step as those of the others.
    pub(super) is_beam: bool,
    /// Tokens computed before the last preemption: computing them again is no new work.
    pub(super) num_computed_before: u32,
    pub(super) num_preemptions: u32,
    /// Chain hashes of its leading full blocks: those of the prompt from the start, those of generated tokens since the
    /// last attempt to admit it.
    pub(super) hashes: Vec<u64>,
    /// Steps in which it did not fit and another one was looked at instead.
    pub(super) num_passed: u32,
    /// Steps in which it waited for a block that another sequence was computing.
    pub(super) num_deferrals: u32,
    /// Admissions of any sequence before it began to wait.
    pub(super) num_admitted_before: u64,
    /// The weights that its hashes are of, and that computed what its table holds.
    pub(super) model_epoch: u64,
    /// The number of the last step that holds it: such a sequence is no victim of that step.
    pub(super) last_step: u64,
}

impl Sequence {
    pub(super) fn num_tokens(&self) -> u32 {
        u32::try_from(self.tokens.len()).expect("a sequence is no longer than max_model_len")
    }

    /// Tokens that are known and not computed.
    pub(super) fn num_remaining(&self) -> u32 {
        self.num_tokens() - self.num_computed
    }

    /// Tokens that it may compute whatever becomes of other sequences.
    pub(super) fn num_alone(&self) -> u32 {
        self.num_tokens() - u32::from(self.is_beam)
    }

    /// Whether a step in flight computes tokens of it.
    pub(super) const fn is_in_flight(&self) -> bool {
        self.num_scheduled > self.num_computed
    }

    /// Whether a step in flight samples its next token.
    pub(super) fn awaits_token(&self) -> bool {
        self.num_scheduled >= self.num_tokens()
    }

    /// Whether it ends, by its length at the latest, with the token that a step in flight samples.
    pub(super) fn ends_in_flight(&self) -> bool {
        self.awaits_token() && self.num_generated() + 1 >= self.end_rule.max_tokens
    }

    /// The row of the step in flight that samples its next token; -1 where that is known.
    pub(super) fn source(&self) -> i32 {
        if self.awaits_token() {
            self.row.cast_signed()
        } else {
            -1
        }
    }

    /// Tokens that the step being built may compute beyond those that are scheduled. One that is still being sampled is
    /// one of them if it goes on from there, unless an end token or somebody outside ends it.
    pub(super) fn num_schedulable(&self) -> u32 {
        if self.awaits_token() {
            let goes_on = self.pending_forks == 0 && !self.end_rule.is_search && !self.ends_in_flight();
            u32::from(goes_on)
        } else {
            self.num_alone() - self.num_scheduled
        }
    }

    pub(super) fn num_generated(&self) -> u32 {
        self.num_tokens() - self.prompt_len
    }

    /// Whether its newest token was sampled from all that its table holds computed.
    pub(super) fn has_proven(&self) -> bool {
        self.num_generated() > 0 && self.num_remaining() <= 1
    }

    pub(super) fn table(&self) -> &BlockTable {
        self.table.as_ref().expect("a running sequence has a block table")
    }

    /// Whether its next step computes one token and samples one.
    pub(super) fn decodes(&self) -> bool {
        self.num_scheduled + 1 >= self.num_tokens() && self.pending_forks == 0 && !self.is_beam
    }

    /// Whether it is the first of several beams.
    pub(super) const fn leads_beams(&self) -> bool {
        self.is_beam && self.key.sample_index == 0
    }

    /// Leading tokens whose computation is that of a prompt or a repetition.
    pub(super) fn num_counted(&self) -> u32 {
        self.prompt_len.max(self.num_computed_before)
    }

    /// Whether it may not go on after this token, whatever its length.
    pub(super) fn stops_at(&self, token: u32, eos_token_ids: &[u32], requests: &LiveRequests) -> bool {
        let is_stop_token = || {
            let params = &requests.of(self.request).request.params;
            params.stop_token_ids.contains(&token)
        };
        (!self.end_rule.ignore_eos && eos_token_ids.contains(&token))
            || (self.end_rule.has_stop_tokens && is_stop_token())
    }

    /// Rows to sample once all its tokens are computed.
    pub(super) const fn num_rows(&self) -> u32 {
        1 + self.pending_forks
    }

    /// Another sequence of the request that goes on from this one's prompt.
    pub(super) const fn sibling(
        &self,
        sample_index: u32,
        tokens: TokenIds,
        num_computed: u32,
        table: Option<BlockTable>,
    ) -> Self {
        Self {
            request: self.request,
            tenant: self.tenant,
            key: QueueKey {
                sample_index,
                ..self.key
            },
            words: self.words.of_sample(sample_index),
            end_rule: self.end_rule,
            tokens,
            prompt_len: self.prompt_len,
            num_computed,
            num_scheduled: num_computed,
            row: 0,
            table,
            swapped: None,
            pending_forks: 0,
            is_beam: false,
            num_computed_before: self.num_computed,
            num_preemptions: 0,
            hashes: Vec::new(),
            num_passed: 0,
            num_deferrals: 0,
            num_admitted_before: self.num_admitted_before,
            model_epoch: self.model_epoch,
            last_step: 0,
        }
    }
}
