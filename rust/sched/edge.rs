//! The side of the core that any thread may hold: requests, aborts and early ends go in, counters come out.
//!
//! Nothing here waits for the engine thread, and no lock is held over a step.

use std::sync::Arc;
use std::time::Duration;

use crate::block::{BlockHasher, Namespace};
use crate::config::CoreConfig;
use crate::error::SubmitError;
use crate::ids::{BlockId, RequestId};
use crate::sync::{Parker, PushChain, RequestFlags, Sender, Stats, StatsCell};

use super::request::{Request, SamplingParams, validate};

/// A sample that ended outside, at a stop string.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finish {
    pub(super) request: RequestId,
    pub(super) sample_index: u32,
    pub(super) num_tokens: u32,
}

/// What the engine thread and the others share.
pub(super) struct Shared {
    pub(super) config: CoreConfig,
    pub(super) hasher: BlockHasher,
    pub(super) finishes: PushChain<Finish>,
    /// Blocks that copies of other threads are done with.
    pub(super) returned: PushChain<Vec<BlockId>>,
    pub(super) flags: RequestFlags,
    pub(super) parker: Parker,
    pub(super) stats: StatsCell,
}

/// Handle for every thread that is not the engine's. Clones share one core.
#[derive(Clone)]
pub struct Edge {
    pub(super) shared: Arc<Shared>,
    pub(super) inbox: Sender<Submission>,
}

/// What goes through the inbox.
pub(super) type Submission = (RequestId, Box<Request>);

/// A request that was checked and hashed, for the core that prepared it: all that is left is to queue it.
#[must_use = "a request is served only once it is pushed"]
#[derive(Debug)]
pub struct Prepared(Box<Request>);

impl Edge {
    /// Queues a request: [`Self::prepare`] and [`Self::push`] in one.
    ///
    /// # Errors
    /// `Invalid` when it can never be served, `QueueFull` when too many are in flight. Nothing has changed then.
    pub fn submit(
        &self,
        prompt: Vec<u32>,
        params: SamplingParams,
        salt: Vec<u8>,
    ) -> Result<RequestId, SubmitError> {
        let prepared = self.prepare(prompt, params, salt)?;
        self.push(prepared).map_err(|_| SubmitError::QueueFull {
            capacity: self.shared.config.max_queued_requests,
        })
    }

    /// Checks a request and hashes its prompt: everything that takes the longer, the longer the prompt is. The
    /// engine's thread only looks the hashes up, as often as it has to.
    ///
    /// # Errors
    /// `Invalid` when it can never be served.
    pub fn prepare(
        &self,
        prompt: Vec<u32>,
        params: SamplingParams,
        salt: Vec<u8>,
    ) -> Result<Prepared, SubmitError> {
        let config = &self.shared.config;
        validate(config, &prompt, &params)?;
        let namespace = Namespace {
            salt: &salt,
            ..Namespace::default()
        };
        let hashes = if config.prefix_caching {
            self.shared.hasher.prompt(&namespace, &prompt, config.block_size)
        } else {
            Vec::new()
        };
        Ok(Prepared(Box::new(Request {
            prompt,
            hashes,
            params,
            salt,
        })))
    }

    /// Queues a prepared request, with a few atomic operations.
    ///
    /// # Errors
    /// Gives the request back when too many are in flight. Nothing has changed then.
    ///
    /// # Panics
    /// If the inbox had fewer places than there are flag slots, which the scheduler's constructor rules out.
    pub fn push(&self, prepared: Prepared) -> Result<RequestId, Prepared> {
        let Some(id) = self.shared.flags.acquire() else {
            return Err(prepared);
        };
        // The ring has a place for every flag slot, and a slot is retired only after its request was taken out.
        assert!(
            self.inbox.push((id, prepared.0)).is_ok(),
            "who holds a flag slot has a place in the ring"
        );
        self.shared.parker.unpark();
        Ok(id)
    }

    /// Asks for the end of a request. False if it has ended, or was aborted before.
    pub fn abort(&self, id: RequestId) -> bool {
        let raised = self.shared.flags.abort(id);
        if raised {
            self.shared.parker.unpark();
        }
        raised
    }

    /// Ends one sample at `num_tokens` generated tokens. What was generated beyond is neither counted nor kept.
    pub fn finish(&self, request: RequestId, sample_index: u32, num_tokens: u32) {
        self.shared.finishes.push(Finish {
            request,
            sample_index,
            num_tokens,
        });
        self.shared.parker.unpark();
    }

    /// Parks the engine thread until there is news. True if there is.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.shared.parker.park_timeout(timeout)
    }

    /// Makes a present or the next `wait` return.
    pub fn wake(&self) {
        self.shared.parker.unpark();
    }

    /// Counters as of the last step.
    pub fn stats(&self) -> Stats {
        self.shared.stats.read()
    }
}
