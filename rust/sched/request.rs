//! What a client asked for, as plain data: it crosses from the client's thread to the engine's.

use crate::config::{CoreConfig, MAX_SAMPLES};
use crate::error::SubmitError;

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
    /// The least number is served first.
    pub priority: i32,
    /// -1: none; k: the sampled token's and the k most likely ones' log-probabilities. The core only carries it.
    pub num_logprobs: i32,
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
            priority: 0,
            num_logprobs: -1,
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
    Ok(())
}
