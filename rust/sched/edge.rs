//! The side of the core that any thread may hold: requests, aborts and early ends go in, counters come out.
//!
//! Nothing here waits for the engine thread, and no lock is held over a step.

use std::sync::Arc;
use std::time::Duration;

use crate::config::CoreConfig;
use crate::error::SubmitError;
use crate::ids::RequestId;
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
    pub(super) finishes: PushChain<Finish>,
    pub(super) flags: RequestFlags,
    pub(super) parker: Parker,
    pub(super) stats: StatsCell,
}

/// Handle for every thread that is not the engine's. Clones share one core.
#[derive(Clone)]
pub struct Edge {
    pub(super) shared: Arc<Shared>,
    pub(super) inbox: Sender<Box<Request>>,
}

impl Edge {
    /// Queues a request.
    ///
    /// # Errors
    /// `Invalid` when it can never be served, `QueueFull` when too many are in flight. Nothing has changed then.
    ///
    /// # Panics
    /// If the inbox had fewer places than there are flag slots, which the scheduler's constructor rules out.
    pub fn submit(
        &self,
        prompt: Vec<u32>,
        params: SamplingParams,
        salt: Vec<u8>,
    ) -> Result<RequestId, SubmitError> {
        let shared = &self.shared;
        validate(&shared.config, &prompt, &params)?;
        let capacity = shared.config.max_queued_requests;
        let id = shared
            .flags
            .acquire()
            .ok_or(SubmitError::QueueFull { capacity })?;
        let request = Box::new(Request {
            id,
            prompt,
            params,
            salt,
        });
        // The ring has a place for every flag slot, and a slot is retired only after its request was taken out.
        assert!(
            self.inbox.push(request).is_ok(),
            "who holds a flag slot has a place in the ring"
        );
        shared.parker.unpark();
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
