//! What a client asked for, as plain data: it crosses from the client's thread to the engine's.

use crate::config::{CoreConfig, MAX_SAMPLES};
use crate::error::SubmitError;

use super::beam_search::BeamParams;

/// Bound of the length penalty either way: the power of any length stays a number of the scores' type.
const MAX_LENGTH_PENALTY: f64 = 5.0;

/// A hint at what the blocks of a request are worth once it has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CachePriority {
    /// As much as those of others.
    #[default]
    Normal,
    /// Little: those that it did not find are evicted as if they were the oldest that nobody came back to.
    Low,
}

/// How tokens are drawn and when a sample ends.
#[derive(Clone, Debug)]
pub struct SamplingParams {
    /// Generated tokens at most.
    pub max_tokens: u32,
    /// Samples of the same prompt.
    pub n: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// Mass of the most likely tokens that stay, in (0, 1].
    pub top_p: f32,
    /// Probability relative to the most likely token under which tokens go.
    pub min_p: f32,
    /// Number of the most likely tokens that stay; 0 keeps all.
    pub top_k: u32,
    /// Key of the noise. Outputs depend on it and on the request alone.
    pub seed: u64,
    /// Tokens that end a sample, besides the model's own.
    pub stop_token_ids: Vec<u32>,
    /// Whether the model's end tokens are ordinary ones.
    pub ignore_eos: bool,
    /// Searches for the likeliest answers instead of drawing them; `n` is 1 then.
    pub beam: Option<BeamParams>,
    /// The least number is served first.
    pub priority: i32,
    /// -1: none; k: the sampled token's and the k most likely ones' log-probabilities. The core only carries it.
    pub num_logprobs: i32,
    /// A promise of `Scheduler::promise_hold`: what the only sample leaves behind is kept.
    pub promise: Option<u64>,
    /// What becomes of its blocks when it has ended. Of what a promise keeps, when the hold ends, nothing is said.
    pub cache_priority: CachePriority,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_tokens: 16,
            n: 1,
            temperature: 0.0,
            top_p: 1.0,
            min_p: 0.0,
            top_k: 0,
            seed: 0,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            beam: None,
            priority: 0,
            num_logprobs: -1,
            promise: None,
            cache_priority: CachePriority::Normal,
        }
    }
}

/// A prompt and what to do with it.
#[derive(Clone, Debug)]
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Chained hashes of the prompt's full blocks in the namespace of `salt`; none without prefix caching.
    pub hashes: Vec<u64>,
    /// How to continue the prompt.
    pub params: SamplingParams,
    /// Namespace of the prefix index.
    pub salt: Vec<u8>,
}

/// Why a sequence ended. The numbers travel in the arena and in the result of `commit`; 0 means that it goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum FinishReason {
    /// An end token, or a stop string found outside.
    Stop = 1,
    /// `max_tokens` or the longest length.
    Length = 2,
    /// The client left.
    Abort = 3,
    /// The step that computed it failed.
    Error = 4,
}

/// Refuses what the core could never serve.
///
/// # Errors
/// `SubmitError::Invalid` with the field, the value and what is allowed.
pub(super) fn validate(
    config: &CoreConfig,
    prompt: &[u32],
    params: &SamplingParams,
) -> Result<(), SubmitError> {
    let refuse = |message: String| Err(SubmitError::Invalid(message));
    if prompt.is_empty() {
        return refuse("prompt is empty, allowed: at least one token".into());
    }
    if params.n == 0 || params.n > MAX_SAMPLES {
        return refuse(format!("n is {}, allowed: 1 to {MAX_SAMPLES}", params.n));
    }
    if params.promise.is_some() && params.n != 1 {
        return refuse(format!("n is {} with a pin or a session, allowed: 1", params.n));
    }
    if params.max_tokens == 0 {
        return refuse("max_tokens is 0, allowed: at least 1".into());
    }
    if !(params.temperature.is_finite() && params.temperature >= 0.0) {
        return refuse(format!(
            "temperature is {}, allowed: finite and at least 0",
            params.temperature
        ));
    }
    if !(params.top_p > 0.0 && params.top_p <= 1.0) {
        return refuse(format!(
            "top_p is {}, allowed: above 0 and at most 1",
            params.top_p
        ));
    }
    if !(0.0..=1.0).contains(&params.min_p) {
        return refuse(format!("min_p is {}, allowed: 0 to 1", params.min_p));
    }
    if let Some(beam) = &params.beam {
        validate_beam(config, beam, params.n)?;
    }
    let (prompt_len, max_tokens) = (prompt.len() as u64, u64::from(params.max_tokens));
    let total = prompt_len + max_tokens;
    if total > u64::from(config.max_model_len) {
        return refuse(format!(
            "This model's maximum context length is {} tokens, but the prompt has {prompt_len} and max_tokens is {max_tokens}, {total} in all",
            config.max_model_len
        ));
    }
    // The last sampled token is never computed, so it needs no slot.
    let blocks = (total - 1).div_ceil(u64::from(config.block_size));
    if blocks > u64::from(config.num_blocks) {
        return refuse(format!(
            "prompt and max_tokens need {blocks} blocks of {} tokens ({prompt_len} + {max_tokens} tokens), the cache has {}",
            config.block_size, config.num_blocks
        ));
    }
    let Some(beam) = &params.beam else {
        return Ok(());
    };
    // In the worst case beams part at once: they share what the prompt fills and nothing else. One token makes no beam.
    let shared = prompt_len / u64::from(config.block_size);
    let width = if max_tokens == 1 { 1 } else { u64::from(beam.width) };
    let of_all = shared + width * (blocks - shared);
    if of_all > u64::from(config.num_blocks) {
        return refuse(format!(
            "{} beams of prompt and max_tokens ({prompt_len} + {max_tokens} tokens) need up to {of_all} blocks of {}, the cache has {}; a beam_width or max_tokens that is less needs fewer",
            beam.width, config.block_size, config.num_blocks
        ));
    }
    Ok(())
}

fn validate_beam(config: &CoreConfig, beam: &BeamParams, n: u32) -> Result<(), SubmitError> {
    let refuse = |message: String| Err(SubmitError::Invalid(message));
    let widest = MAX_SAMPLES
        .min(config.max_num_seqs)
        .min(config.max_num_batched_tokens);
    if beam.width == 0 || beam.width > widest {
        return refuse(format!(
            "beam_width is {}, allowed: 1 to {widest}, since all beams are computed in one step (max_num_seqs is {}, max_num_batched_tokens is {})",
            beam.width, config.max_num_seqs, config.max_num_batched_tokens
        ));
    }
    if n != 1 {
        return refuse(format!(
            "n is {n}, allowed: 1 with a beam search, which gives beam_width answers"
        ));
    }
    if !(-MAX_LENGTH_PENALTY..=MAX_LENGTH_PENALTY).contains(&beam.length_penalty) {
        return refuse(format!(
            "length_penalty is {}, allowed: -{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}",
            beam.length_penalty
        ));
    }
    Ok(())
}
