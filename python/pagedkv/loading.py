"""From options to a running engine's parts: the tokenizer, the core, the model's weights and the cache.

Called once by `LLM` and `AsyncLLM`. What options, the model's config and the machine say is judged before the
weights are read, which may take minutes: only memory that cannot be had although it seemed free, and on a GPU
what its trial finds, is refused later. What was chosen, and what had to be cut, is said through the logger
"pagedkv".
"""

import logging
import secrets
import sys
from typing import Final

import torch

from pagedkv import __version__, _core, gpu
from pagedkv.config import EngineConfig, poison_requested
from pagedkv.engine import Engine
from pagedkv.front import Front
from pagedkv.kv_cache import HostCache, KVCache
from pagedkv.models import LoadedModel, OpenedModel, open_model, resolve
from pagedkv.models.rope import table_bytes
from pagedkv.ops import CUPY_INSTALL, Ops
from pagedkv.ops.cuda import CudaOps
from pagedkv.plan import (
    PoolPlan,
    block_bytes,
    check_memory,
    cpu_budget,
    format_bytes,
    free_memory,
    host_blocks,
    plan_pool,
)
from pagedkv.request import Limits
from pagedkv.runner import ModelRunner
from pagedkv.sampling_params import MAX_SAMPLES
from pagedkv.swap import HostSwap
from pagedkv.swap_costs import measure
from pagedkv.text.tokenizer import Tokenizer

logger = logging.getLogger("pagedkv")

# A plan fits what is free, but limits that it cannot see (ulimit -v) or another process may be in the way.
# numpy, which gives the memory on a CPU, says so by a MemoryError; torch by a RuntimeError of several lines.
_NO_MEMORY: Final = (MemoryError, RuntimeError)


def load(config: EngineConfig) -> tuple[Engine, Front]:
    """Loads a model and builds an engine and its front.

    Raises ModelError for a model that cannot be found, read or run, BackendUnavailable for a device that is
    not there, and ValueError for options that do not fit the processor, the model or the memory.
    """
    if config.cpu_isa != "auto":
        _core.set_cpu_isa(config.cpu_isa)
    set_num_threads(config.num_threads)
    device = choose_device(config.device)
    ops = gpu.choose_ops(config, device)
    poison = poison_requested()
    source = resolve(config.model)
    logger.info(
        "pagedkv %s, %d threads, kernels for %s, prefix caching %s",
        __version__,
        config.num_threads,
        _core.cpu_isa() if device.type == "cpu" else device,
        "on" if config.enable_prefix_caching else "off",
    )
    logger.info("loading %s from %s onto %s", source.name, source.path, device)
    opened = open_model(source, config.dtype, device)
    tokenizer = Tokenizer.load(source)
    model_config = opened.config
    eos_token_ids = sorted({*model_config.eos_token_ids, *tokenizer.eos_token_ids})
    if isinstance(ops, CudaOps):
        gpu.prepare(config, opened, ops)
    plan = plan_memory(config, opened, ops)
    num_host_blocks = plan_host(config, opened, plan)
    core = _make_core(config, plan, eos_token_ids, num_host_blocks)
    packs = device.type == "cpu" and _core.cpu_isa() != "portable"
    loaded = opened.read(borrow=packs, progress=sys.stderr.isatty())
    logger.info("the weights take %s as %s, unpacked", format_bytes(loaded.num_bytes), loaded.dtype)
    loaded.model.pack(ops, release=True, progress=sys.stderr.isatty())
    if isinstance(ops, CudaOps) and not _size_option(config):
        # Until now the plan was the most that there could be.
        budget = gpu.memory_for_cache(config, loaded, ops)
        plan = _plan_pool(config, opened, budget)
        _check_memory(config, opened, plan, ops.device.memory()[0])
        core = _make_core(config, plan, eos_token_ids, num_host_blocks)
    _log_plan(config, opened, plan)
    if config.enable_prefix_caching and config.max_pinned_blocks is None:
        _say_pin_budget(core.edge.stats()["blocks_pin_budget"])
    kv_cache = _allocate(config, loaded, plan, poison=poison)
    swap = _make_swap(kv_cache, num_host_blocks, poison=poison)
    seed = secrets.randbits(64) if config.seed is None else config.seed
    limits = Limits(plan.max_model_len, model_config.vocab_size, len(eos_token_ids))
    front = Front(core.edge, tokenizer, config, model_config, limits, seed)
    runner = _make_runner(config, loaded, kv_cache, ops, swap, arena_len=core.arena_len)
    if isinstance(ops, CudaOps):
        gpu.capture_graphs(config, loaded, ops, runner, plan.max_model_len)
    if swap is not None:
        longest = min(config.num_batched_tokens, plan.max_model_len - 1)
        core.set_swap_costs(*measure(runner, swap, max_num_tokens=max(1, longest)))
    overlap = device.type == "cuda" if config.overlap is None else config.overlap
    return Engine(core, runner, overlap=overlap), front


def choose_device(device: str) -> torch.device:
    """The device that the option names: "auto" is the CPU, until the CUDA kernels have run on a GPU."""
    if device == "auto":
        if torch.cuda.is_available():
            logger.warning(
                "there is a GPU, but the CUDA kernels have never run on one, so the CPU computes; to try "
                f'them: {CUPY_INSTALL} and device="cuda" (on the command line: --device cuda)'
            )
        return torch.device("cpu")
    return torch.device("cuda:0" if device == "cuda" else device)


def set_num_threads(num_threads: int) -> None:
    """Sets the threads of the kernels in Rust.

    Where these do all that takes long, torch gets one thread: idle threads of two pools would take the cores
    from each other.
    """
    torch.set_num_threads(num_threads if _core.cpu_isa() == "portable" else 1)
    _core.set_num_threads(num_threads)


def plan_memory(config: EngineConfig, model: OpenedModel, ops: Ops) -> PoolPlan:
    """Chooses the size of the pool, or where a trial will do that the most that it can be.

    Raises ValueError if the weights do not fit into the memory, or the cache not beside them.
    """
    free = ops.device.memory()[0] if isinstance(ops, CudaOps) else free_memory()
    if model.num_bytes > free:
        raise ValueError(
            f"the weights take {format_bytes(model.num_bytes)} as {model.dtype}, but {format_bytes(free)} "
            "are free"
        )
    free -= model.num_bytes
    budget = config.kv_bytes
    if budget is None and config.num_blocks is None and isinstance(ops, CudaOps):
        # The most that there could be: beside it nothing would be left for positions and steps.
        return _plan_pool(config, model, free)
    if budget is None:
        budget = cpu_budget(free)
    plan = _plan_pool(config, model, budget)
    _check_memory(config, model, plan, free)
    return plan


def _plan_pool(config: EngineConfig, model: OpenedModel, budget_bytes: int) -> PoolPlan:
    return plan_pool(
        bytes_per_token=_bytes_per_token(config, model),
        block_size=config.block_size,
        budget_bytes=budget_bytes,
        num_blocks=config.num_blocks,
        model_len=model.config.max_len,
        model_reason=model.config.max_len_reason,
        max_model_len=config.max_model_len,
    )


def _check_memory(config: EngineConfig, model: OpenedModel, plan: PoolPlan, free_bytes: int) -> None:
    check_memory(
        plan,
        bytes_per_token=_bytes_per_token(config, model),
        table_bytes_per_token=table_bytes(model.config.head_dim, 1),
        block_size=config.block_size,
        free_bytes=free_bytes,
        option=_size_option(config),
    )


def plan_host(config: EngineConfig, model: OpenedModel, plan: PoolPlan) -> int:
    """Blocks of host memory for preempted sequences. Raises ValueError if there cannot be as many."""
    per_block = block_bytes(_bytes_per_token(config, model), config.block_size)
    computes_on_gpu = model.device.type == "cuda"
    free = free_memory()
    if not computes_on_gpu:
        free = max(0, free - model.num_bytes - (plan.num_blocks + 1) * per_block)
    return host_blocks(
        config.swap_bytes, bytes_per_block=per_block, free_bytes=free, computes_on_gpu=computes_on_gpu
    )


def _bytes_per_token(config: EngineConfig, model: OpenedModel) -> int:
    return model.config.kv_bytes_per_token(gpu.cache_dtype(config, model))


def _log_plan(config: EngineConfig, model: OpenedModel, plan: PoolPlan) -> None:
    """Says what was chosen."""
    bytes_per_token = _bytes_per_token(config, model)
    pool_bytes = (plan.num_blocks + 1) * block_bytes(bytes_per_token, config.block_size)
    logger.info(
        "the cache holds %d tokens in %d blocks of %d: %s, %s a token",
        plan.num_blocks * config.block_size,
        plan.num_blocks,
        config.block_size,
        format_bytes(pool_bytes),
        format_bytes(bytes_per_token),
    )
    if plan.cap_reason is not None:
        logger.warning(
            "max_model_len is %d of the %d tokens that the model was trained for: %s",
            plan.max_model_len,
            model.config.max_position_embeddings,
            plan.cap_reason,
        )
    else:
        logger.info("max_model_len is %d tokens", plan.max_model_len)


def _make_core(
    config: EngineConfig, plan: PoolPlan, eos_token_ids: list[int], num_host_blocks: int
) -> _core.Core:
    """Builds the core. Raises ValueError for sizes that do not fit each other."""
    return _core.Core(
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.num_batched_tokens,
        max_model_len=plan.max_model_len,
        eos_token_ids=eos_token_ids,
        enable_prefix_caching=config.enable_prefix_caching,
        tenants=[tenant.core_option for tenant in config.named_tenants],
        max_pinned_blocks=config.max_pinned_blocks,
        max_pinned_blocks_per_tenant=config.max_pinned_blocks_per_tenant,
        num_host_blocks=num_host_blocks,
    )


def _say_pin_budget(num_blocks: int) -> None:
    """Says what pins and sessions may have. Where that is nothing, refusals would come as a surprise."""
    if num_blocks:
        logger.info("pins and sessions may have %d blocks together", num_blocks)
    else:
        logger.warning(
            "there will be no pins and no sessions, because a sequence of max_model_len tokens takes all of "
            "the cache: give it more memory, or choose a smaller max_model_len"
        )


def _size_option(config: EngineConfig) -> str:
    """The option that the size of the pool was chosen by; empty where none was."""
    if config.num_blocks is not None:
        return "num_blocks"
    return "kv_memory" if config.kv_memory is not None else ""


def _allocate(config: EngineConfig, model: LoadedModel, plan: PoolPlan, *, poison: bool) -> KVCache:
    """Gives the model its positions, and makes the cache. Raises ValueError if the memory cannot be had."""
    try:
        model.model.set_max_len(plan.max_model_len, model.device)
        return KVCache(
            model.config.num_layers,
            plan.num_blocks,
            model.config.num_kv_heads,
            config.block_size,
            model.config.head_dim,
            gpu.cache_dtype(config, model),
            model.device,
            poison=poison,
        )
    except _NO_MEMORY as error:
        raise ValueError(
            f"{plan.num_blocks} blocks of {config.block_size} tokens cannot be allocated, choose fewer with "
            f"num_blocks or kv_memory: {_first_line(error)}"
        ) from error


def _make_swap(kv_cache: KVCache, num_blocks: int, *, poison: bool) -> HostSwap | None:
    """Makes room in host memory for preempted sequences, and says so. None where there is to be none."""
    if num_blocks == 0:
        return None
    num_bytes = num_blocks * kv_cache.block_bytes
    try:
        host_cache = HostCache(kv_cache, num_blocks, poison=poison)
    except _NO_MEMORY as error:
        raise ValueError(
            f"{format_bytes(num_bytes)} of host memory cannot be had for preempted sequences, "
            f"choose less with swap_space: {_first_line(error)}"
        ) from error
    logger.info(
        "%s of host memory hold %d blocks of preempted sequences", format_bytes(num_bytes), num_blocks
    )
    return HostSwap(kv_cache, host_cache)


def _make_runner(
    config: EngineConfig,
    model: LoadedModel,
    kv_cache: KVCache,
    ops: Ops,
    swap: HostSwap | None,
    *,
    arena_len: int,
) -> ModelRunner:
    stage = gpu.make_stage(ops, model, kv_cache, arena_len) if isinstance(ops, CudaOps) else None
    max_num_rows = config.max_num_seqs + MAX_SAMPLES
    return ModelRunner(model, kv_cache, ops, max_num_rows=max_num_rows, stage=stage, swap=swap)


def _first_line(error: BaseException) -> str:
    """What an error says, without the stack that torch adds."""
    return str(error).partition("\n")[0]
