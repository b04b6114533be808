"""The Rust core: every decision about memory and order.

Two objects make up the boundary. `Core` belongs to the engine thread, which calls `schedule` and `commit`
once a step. `Edge` may be used from any thread and never blocks: it hands requests, aborts and early ends
over through lock-free queues. What a step reads lies in one packed int32 array, the arena, whose layout
`rust/sched/step.rs` defines.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Conflict",
    "Core",
    "Decoder",
    "Edge",
    "EventReader",
    "Heartbeat",
    "InvalidRequest",
    "NotFound",
    "PackedLinear",
    "QueueFull",
    "StepHeader",
    "StepPlan",
    "copy_blocks",
    "cpu_ceilings",
    "cpu_features",
    "cpu_isa",
    "cuda_sources",
    "logprobs",
    "num_threads",
    "rms_norm",
    "rope_cache",
    "sample",
    "set_cpu_isa",
    "set_num_threads",
    "silu_mul",
    "swap_blocks",
]

class InvalidRequest(ValueError):
    """The request can never be served as it is: the message names field, value and what is allowed."""

class NotFound(LookupError):
    """There is no pin or session of this name, or it has expired."""

class Conflict(RuntimeError):
    """The session is being continued by another request, or the name is taken."""

class QueueFull(RuntimeError):
    """As many requests as the engine accepts are in flight. Try again later."""

@final
class StepHeader:
    """What a step holds, as counts; the arrays themselves are in the arena."""

    @property
    def step_id(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def num_decodes(self) -> int:
        """Leading sequences that decode: one scheduled token, which is sampled."""
    @property
    def num_rows(self) -> int:
        """Rows to sample. A prompt with n samples has n rows that read the same logits."""
    @property
    def num_copies(self) -> int: ...
    @property
    def num_swaps_out(self) -> int:
        """Blocks that move to host memory, of sequences that were preempted."""
    @property
    def num_swaps_in(self) -> int:
        """Blocks that come back from there."""
    @property
    def num_ended(self) -> int:
        """Sequences that ended outside a commit: aborted, or finished by the front at a stop string."""
    @property
    def num_beam_rows(self) -> int:
        """Of the rows, those that belong to beams: `commit` needs candidates of them."""
    @property
    def num_followers(self) -> int:
        """Tokens that the step in flight samples."""
    @property
    def num_logprobs(self) -> int:
        """The most log-probabilities that a row asks for; -1 if none does."""

@final
class Core:
    """The owner of the cache state. One thread at a time may call it; a second caller gets a RuntimeError."""

    def __new__(
        cls,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = ...,
        enable_prefix_caching: bool = True,
        partial_matching: bool = True,
        eviction: str = "turn",
        tenants: Sequence[tuple[bytes, bool, int, int]] = ...,
        max_pinned_blocks: int | None = None,
        max_pinned_blocks_per_tenant: int | None = None,
        max_queued_requests: int = 4096,
        num_host_blocks: int = 0,
    ) -> Core:
        """Builds a core. `eviction` is "lru", or "turn", which keeps longer what requests came back to.

        Without `partial_matching` only whole blocks are found again. Tenants are (salt, whether all salts
        that begin with it are meant, blocks up to which its idle ones are evicted last, how fast they age in
        parts of 1024).
        `max_pinned_blocks` is what pins and sessions may hold together. None: a quarter of the pool, less
        where the longest sequence would not fit beside it. `max_pinned_blocks_per_tenant` is what those of
        one tenant may hold, who is one of `tenants` or else a salt. None: as much.
        `num_host_blocks` is how many blocks of preempted sequences may be moved to host memory, to come back
        later.

        Raises ValueError naming a field that is out of bounds, its value and what is allowed.
        """
    @property
    def edge(self) -> Edge: ...
    @property
    def arena_len(self) -> int:
        """Number of int32 words that an arena must hold."""
    def schedule(self, arena: NDArray[np.int32]) -> StepHeader | None:
        """Writes the next step into `arena`.

        It may be called while one step is in flight. The next one goes on from what that one is going to
        compute: a token that it samples is unknown in `token_ids`, and `token_source` has its row.

        None means that nothing can be computed: before the step in flight is committed, or, if none is, at
        all, since nothing runs and nothing ended. A header with num_tokens == 0 carries only ended sequences
        and must not be committed. Raises RuntimeError while two steps are in flight.
        """
    def commit(
        self,
        step_id: int,
        tokens: NDArray[np.int32],
        candidates: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None,
    ) -> NDArray[np.int32]:
        """Takes the sampled token of every row of the oldest step in flight.

        Returns every row's state: 0 running, 1 stop, 2 length; -1 where the sequence had ended before, so
        that the row is void: its token is dropped, and no event tells of it. A negative token is a row that
        could not be sampled: it is void, and its request ends with an error, which `schedule` reports next.

        Tokens of rows that belong to beams are ignored. Of those `candidates` has token ids and
        log-probabilities, [B, K] each, the likeliest first, K as the arena's section asks. A search ends in
        all its rows at once.
        """
    def take_beams(self) -> list[tuple[int, list[tuple[list[int], float, float, int]]]]:
        """The answers of the searches that ended since the last call: request id, and the best first.

        Each: generated tokens, sum of their log-probabilities, score, 1 (stop) or 2 (length).
        """
    def open_events(self) -> EventReader:
        """Starts to report what steps bring about, to one reader. Raises RuntimeError if there is one."""

    def has_delivered(self, step_id: int) -> bool:
        """Whether the reader can take all events of the steps up to `step_id`.

        If not, it is slow and some wait for room. They move on with the next `schedule`, for which the reader
        ends `Edge.wait` when it has made room.
        """
    def fail_step(self) -> None:
        """Ends every request of the oldest step in flight; `schedule` reports them (reason 4, error).

        A later step that is in flight goes on; what it computes of them is void.
        """
    @property
    def num_in_flight(self) -> int:
        """Steps that were scheduled and neither committed nor failed: 0 to 2."""
    def snapshot(self) -> dict[str, Any]:
        """A consistent picture of the cache.

        Keys: block_size, num_blocks, free, idle, owned, fenced, pinned (of the owned ones, those that pins
        and sessions hold), ref_counts [num_blocks + 1], and sequences:
        dicts with request_id, sample_index, status, num_tokens, num_computed, num_preemptions, blocks, and
        host_blocks, which are those in host memory of a sequence that was preempted.
        """
    def check_invariants(self) -> None:
        """Raises RuntimeError naming the first invariant that does not hold."""
    def set_swap_costs(self, compute_token_ns: int, move_block_ns: int) -> None:
        """Says what it takes to compute a token, and to move a block to host memory or back.

        That decides whether a preempted sequence is moved or computed again. Until then fixed costs do.
        """
    def set_time(self, now_ms: int) -> None:
        """Tells the time, which the core does not know by itself. Pins and sessions that have expired go."""
    def explain(self, request_id: int, salt: bytes = ...) -> dict[str, Any] | None:
        """Why a request was found in the cache as far as it was, as of its first admission.

        None where it was not admitted yet, is forgotten, or has another salt. Keys: prompt_tokens,
        cached_tokens, verdict, token_index, the token ids `before` it, those that the cache `held` behind it
        and those that `came`, and evicted: None, or an age in milliseconds and "capacity" or "reset".
        """
    def tenants(self) -> list[dict[str, int]]:
        """All tenants that were not named together, then the named ones.

        Keys: requests, prefix_queries, prefix_hits (tokens), generation_tokens, blocks_cached, evictions.
        """
    def set_model_epoch(self, model_epoch: int) -> None:
        """Says which weights compute from now on; what others computed is not found any more."""
    def reset_prefix_cache(self) -> tuple[int, int, int]:
        """Forgets every published block; running sequences keep theirs. Pins go, sessions keep their tokens.

        Returns the number of blocks, of pins and of sessions.
        """
    def lookup(self, salt: bytes, prompt: NDArray[np.int32]) -> tuple[int, int, int, str | None]:
        """Looks a prompt up without changing anything.

        Returns the tokens that would be found, the blocks that the prompt would take, the blocks that it
        could take, and what keeps it from being admitted: "too_long", "too_many_sequences",
        "not_enough_blocks", "others_wait" or None. Raises InvalidRequest for an empty prompt.
        """
    def promise_hold(
        self,
        kind: str,
        salt: bytes,
        name: str,
        *,
        ttl_ms: int,
        tokens: NDArray[np.int32],
        max_tokens: int,
        append: bool = False,
    ) -> tuple[int, NDArray[np.int32]]:
        """Sets blocks aside for what a request will leave behind; kind is "pin" or "session".

        Returns the promise, for `Edge.submit`, and the whole prompt: with `append` the session's tokens come
        first, and nobody else can continue it until the request has ended or the promise is broken. Raises
        NotFound, Conflict, or InvalidRequest where the budget does not allow it.
        """
    def break_promise(self, promise: int) -> None:
        """Says that the request of a promise does not come. Nothing happens if it was kept."""
    def holds(self, kind: str, salt: bytes) -> list[tuple[str, int, int, int]]:
        """A tenant's pins or sessions, the oldest first: name, tokens, blocks, end in told milliseconds."""
    def hold(self, kind: str, salt: bytes, name: str) -> tuple[str, int, int, int]:
        """One of them. Raises NotFound."""
    def hold_tokens(self, kind: str, salt: bytes, name: str) -> NDArray[np.int32]:
        """Its tokens. Raises NotFound."""
    def delete_hold(self, kind: str, salt: bytes, name: str) -> None:
        """Deletes it, and breaks the promises of its name. Raises NotFound."""
    def fork_session(
        self, salt: bytes, name: str, new_name: str, ttl_ms: int | None = None
    ) -> tuple[str, int, int, int]:
        """Gives a session a second name, under which it goes on by itself. Raises NotFound or Conflict."""

@final
class EventReader:
    """What steps brought about, in the order in which it happened. For one thread at a time."""

    def take(self, step_id: int) -> list[tuple[int, int, int, int, int, int]]:
        """Takes the events of the steps up to `step_id`: `pagedkv.events.Event`."""

@final
class Edge:
    """The any-thread side of the core. No call but `wait` blocks."""

    def submit(
        self,
        prompt: NDArray[np.int32],
        *,
        max_tokens: int,
        n: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,
        stop_token_ids: Sequence[int] = ...,
        ignore_eos: bool = False,
        num_logprobs: int = ...,
        salt: bytes = ...,
        priority: int = 0,
        beam: tuple[int, float, bool | None] | None = None,
        promise: int | None = None,
        evict_first: bool = False,
    ) -> int:
        """Queues a request and returns its id. Raises InvalidRequest or QueueFull.

        num_logprobs: -1 (the default) none, 0 only the sampled token's, k the k most likely ones as well. By
        default there are no stop tokens of its own and the salt is empty. The least priority is served first;
        requests of equal priority share what there is fairly among salts. `beam` asks for a beam search: its
        width, length penalty, and whether it stops early (None: never); n is 1 then.
        `promise` is what `Core.promise_hold` gave; n must be 1 then.
        With `evict_first` the blocks that it computes are the first to be evicted once it has ended.
        """
    def abort(self, request_id: int) -> bool:
        """Asks for the end of a request; its blocks are free by the next step. False if it has ended."""
    def finish(self, request_id: int, sample_index: int, num_tokens: int) -> None:
        """Ends one sample at `num_tokens` generated tokens, because a stop string ended there."""
    def wait(self, timeout_s: float) -> bool:
        """Parks the engine thread until there is news or the time is over. True if there is news."""
    def wake(self) -> None:
        """Makes a present or the next `wait` return."""
    def stats(self) -> dict[str, int]:
        """Counters of the last step: see rust/sync/stats.rs for the names."""

@final
class Heartbeat:
    """Signs of life of a thread, which any thread may look at."""

    def __new__(cls) -> Heartbeat:
        """Beats for the first time, which is not counted."""
    def beat(self) -> None:
        """Shows that the thread goes on."""
    @property
    def age(self) -> float:
        """Seconds since the last beat."""
    @property
    def num_beats(self) -> int:
        """Beats so far."""

def cpu_ceilings() -> dict[str, float]:
    """Measures, on all threads of the kernels, what the processor could do at most; takes about a second.

    "read" is the bytes that it reads in a second, the other names are those of `PackedLinear.arithmetic`, as
    far as a loop for them exists, with the operations that it does in a second on registers alone.
    """

def cpu_features() -> list[str]:
    """Extensions of this processor that the kernels know, e.g. ["avx2", "avx512f", "avx512bf16"]."""

def cpu_isa() -> str:
    """What the kernels of this process use: "amx_bf16", "avx512_bf16", "avx512", "avx2" or "portable"."""

def set_cpu_isa(name: str) -> None:
    """Chooses what the kernels use, for the whole process; "auto" is the best that there is.

    For weights that are packed from now on, and all else that is computed. Raises ValueError for what this
    processor does not have, and for "portable".
    """

def cuda_sources() -> dict[str, str]:
    """The sources of the CUDA kernels (`cuda/`) by file name, as they were when the extension was built."""

def set_num_threads(num_threads: int) -> None:
    """Sets the number of threads of the kernels, for the whole process. Raises ValueError outside 1..1024."""

def num_threads() -> int:
    """The number of threads of the kernels; at first one for every processor that the process may use."""

# A tensor in ordinary memory whose rows are dense: address of the first element, shape, strides in elements.
# The callee follows the address: the caller answers for it, and for nobody changing the memory meanwhile.
_Tensor = tuple[int, Sequence[int], Sequence[int]]
# Address and number of dense int32.
_Indices = tuple[int, int]

@final
class PackedLinear:
    """Weights packed for the kernels: `pagedkv.ops.Ops.pack_linear`. Owns its memory; shared by threads."""

    def __new__(
        cls, parts: Sequence[tuple[int, int, int, int]], in_size: int, dtype: str, *, gated: bool = False
    ) -> PackedLinear:
        """Copies weights into panels, on all threads, without the GIL.

        parts are (address of the weight [rows, in_size], rows, elements from a row to the next, address of
        the dense bias [rows] or 0), all of `dtype` ("float32", "bfloat16" or "float16"). Raises ValueError if
        there is nothing to pack, or if a gated weight is not two parts of one size.
        """
    @property
    def in_size(self) -> int:
        """Width of x."""
    @property
    def out_size(self) -> int:
        """Width of the product."""
    @property
    def dtype(self) -> str:
        """Type of the weights, as in `dtype` above."""
    @property
    def num_bytes(self) -> int:
        """Bytes of the panels: 12 bits an element where matrix tiles multiply what bfloat16 holds."""
    @property
    def num_elements(self) -> int:
        """Elements of the panels, zeros that fill them up included."""
    @property
    def arithmetic(self) -> str:
        """How products are summed: "amx_bf16", "amx_bf16x3", "avx512_bf16", "avx512", "avx2" or "portable".

        "amx_bf16x3" multiplies float32, x as three rows of bfloat16, by weights that bfloat16 holds.
        """
    def multiply(self, x: tuple[int, int, int, int], x_type: str, out: int, out_type: str) -> None:
        """Writes the product [num_rows, out_size], dense, of `out_type`, to the address `out`.

        x is (address, num_rows, width, elements from a row to the next), of the weight's type. The bits of a
        row of the product depend on its row of x only, not on the others nor on the number of threads. Raises
        ValueError where shape or type do not fit. The GIL is released when the call is expected to take a
        millisecond or more.
        """
    def rows(self, row_ids: _Indices, out: int) -> None:
        """Copies rows of the weight, [ids, in_size] of its type, dense, to the address `out`.

        Raises ValueError for a row that is not there, and for a gated weight.
        """

@final
class StepPlan:
    """How the attention of one step is cut into pieces of work: made once, used by every layer.

    Tables are checked here once; sequences whose tables begin with the same blocks are found, so that these
    are read once for all of them.
    """

    def __new__(
        cls, query_start: _Indices, seq_lens: _Indices, table_start: _Indices, block_ids: _Indices
    ) -> StepPlan:
        """Copies the step's sections. They are checked by the first call, which knows the cache."""
    def phases(self) -> dict[str, tuple[int, float]]:
        """Calls of kernels, and their seconds, that `Decoder.forward` has made for this step, by phase.

        These are "plan" (of attention), "embedding", "norm", "qkv", "rope_cache", "attention", "out",
        "gate_up", "down", "final_norm" and "head".
        """

    def paged_attention(
        self,
        out: int,
        query: _Tensor,
        key_cache: _Tensor,
        value_cache: _Tensor,
        row_type: str,
        cache_type: str,
        scale: float,
    ) -> None:
        """Causal attention over the paged cache: `pagedkv.ops.Ops.paged_attention`.

        query is [T, H, D] of `row_type` and out the address of the same, dense; the caches are [NB, G,
        block_size, D] of `cache_type` (both "float32", "bfloat16" or "float16"). The bits of a token's result
        depend on its own query and context only: not on the number of threads, the rest of the batch, the
        blocks that are shared, or the chunk of the prompt that it came in. Raises ValueError where shapes,
        lengths or block ids do not fit. The GIL is released when the call is expected to take a millisecond
        or more.
        """

@final
class Decoder:
    """A model and its caches: `pagedkv.ops.Ops.forward`. Holds what is the same in every step."""

    def __new__(
        cls,
        layers: Sequence[
            tuple[
                tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear],
                Sequence[int],
                tuple[_Tensor, _Tensor],
            ]
        ],
        cache_type: str,
        embedding: int,
        norm: int,
        head: PackedLinear,
        eps: float,
        num_heads: int,
        scale: float,
        angles: tuple[_Tensor, _Tensor],
    ) -> Decoder:
        """Keeps addresses: their memory must outlive the object, the angles unchanged.

        A layer is the products of qkv, out, gate_up and down, the addresses of its norms (before attention,
        before the feed-forward layer, and if there are four, of each query head and each key head), and its
        key and value cache. embedding is the address of [V, hidden], 0 if that is the head's weight; norm
        that of the norm before the head. All are dense and of the type of the head.
        """
    def forward(
        self,
        plan: StepPlan,
        token_ids: _Indices,
        positions: _Indices,
        slot_mapping: _Indices,
        sample_rows: _Indices,
        logits: int,
        heartbeat: Heartbeat | None,
    ) -> None:
        """Computes a step and writes the dense float32 logits [R, V] of its sampled rows.

        What layers and kernels hand on lies in buffers of the calling thread, which are kept. The heart beats
        before each layer. Raises ValueError where shapes, ids, positions, slots or tables do not fit, before
        a layer writes anything. The same rule for the GIL as in `StepPlan.paged_attention`.
        """

def rope_cache(
    out: _Tensor,
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    angles: tuple[_Tensor, _Tensor],
    positions: _Indices,
    key_cache: _Tensor,
    value_cache: _Tensor,
    slot_mapping: _Indices,
    row_type: str,
    cache_type: str,
) -> None:
    """Rotates query into out and key into the cache, and copies value there: `pagedkv.ops.Ops.rope_cache`.

    angles are the float32 cosines and sines, [P, rot] each; elements from rot on are not rotated. Computed in
    float32, every product and sum rounded by itself, the result rounded to the type of the tensor. Slots must
    differ. Raises ValueError as `paged_attention` of `StepPlan` does, with the same rule for the GIL.
    """

def rms_norm(
    out: int,
    x: int,
    weight: int,
    num_rows: int,
    width: int,
    x_stride: int,
    row_type: str,
    eps: float,
) -> None:
    """Normalises rows: `pagedkv.ops.Ops.rms_norm`.

    out, x and weight are addresses of elements of `row_type`: num_rows rows of `width` elements, one of
    weight, the stride in elements; out is dense. The bits of a row depend on that row alone. Raises
    ValueError for an address that cannot be one. The same rule for the GIL as in `StepPlan.paged_attention`.
    """

def silu_mul(
    out: int,
    gate: int,
    up: int,
    num_rows: int,
    width: int,
    gate_stride: int,
    up_stride: int,
    row_type: str,
) -> None:
    """Computes `silu(gate) * up`: `pagedkv.ops.Ops.silu_mul`. Addresses and sizes as in `rms_norm`."""

def sample(
    tokens: int, logits_address: int, parameters: int, num_rows: int, vocab_size: int, row_stride: int
) -> None:
    """Draws a token a row: `pagedkv.ops.Ops.sample`. Addresses: i64 [R] written, f32 [R, V], i32 [R, 9].

    The parameters are the arena's words. The same rule for the GIL as in `StepPlan.paged_attention`.
    """

def logprobs(
    logits_address: int, chosen: int, num_rows: int, vocab_size: int, row_stride: int, k: int
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Log probabilities: `pagedkv.ops.Ops.logprobs`. Addresses: f32 [R, V] and i64 [R].

    Raises ValueError for a chosen token outside the vocabulary.
    """

def swap_blocks(
    sources: Sequence[tuple[int, int, int]],
    destinations: Sequence[tuple[int, int, int]],
    block_bytes: int,
    copies: _Indices,
) -> None:
    """Copies whole blocks of each source to the destination at the same place: `pagedkv.ops.Ops.swap_blocks`.

    Caches as in `copy_blocks`; none may overlap another. copies holds [source, destination] pairs. Raises
    ValueError as `copy_blocks` does. The same rule for the GIL.
    """

def copy_blocks(caches: Sequence[tuple[int, int, int]], block_bytes: int, copies: _Indices) -> None:
    """Copies whole blocks in each cache, given as (address, number of blocks, bytes from block to block).

    copies holds [source, destination] pairs; all sources are read as they were before the call. Raises
    ValueError for a block that a cache does not have, and for two copies into one block. The same rule for
    the GIL.
    """
