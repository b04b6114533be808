"""From options to a running engine's parts: the model, the tokenizer, the pool and the core, in that order.

Called once by `LLM` and `AsyncLLM`. What was chosen, and what had to be cut, is said through the logger
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
from pagedkv.models import LoadedModel, load_model, resolve
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
    source = resolve(config.model)
    logger.info(
        "pagedkv %s, %d threads, kernels for %s, prefix caching %s",
        __version__,
        config.num_threads,
        _core.cpu_isa() if device.type == "cpu" else device,
        "on" if config.enable_prefix_caching else "off",
    )
    logger.info("loading %s from %s onto %s", source.name, source.path, device)
    loaded = load_model(source, config.dtype, device, progress=sys.stderr.isatty())
    logger.info("the weights take %s as %s", format_bytes(loaded.num_bytes), loaded.dtype)
    loaded.model.pack(ops, release=True, progress=sys.stderr.isatty())
    tokenizer = Tokenizer.load(source)
    model_config = loaded.config
    if isinstance(ops, CudaOps):
        gpu.prepare(config, loaded, ops)
    plan = plan_memory(config, loaded, ops)
    kv_cache = _allocate(config, loaded, plan, device)
    eos_token_ids = sorted({*model_config.eos_token_ids, *tokenizer.eos_token_ids})
    swap = _make_swap(config, kv_cache)
    core = _core.Core(
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        eos_token_ids=eos_token_ids,
        enable_prefix_caching=config.enable_prefix_caching,
        tenants=[tenant.core_option for tenant in config.named_tenants],
        max_pinned_blocks=config.max_pinned_blocks,
        num_host_blocks=0 if swap is None else swap.num_blocks,
    )
    if config.enable_prefix_caching and config.max_pinned_blocks is None:
        _say_pin_budget(core.edge.stats()["blocks_pin_budget"])
    seed = secrets.randbits(64) if config.seed is None else config.seed
    limits = Limits(plan.max_model_len, model_config.vocab_size, len(eos_token_ids))
    front = Front(core.edge, tokenizer, config, model_config, limits, seed)
    max_num_rows = config.max_num_seqs + MAX_SAMPLES
    if isinstance(ops, CudaOps):
        stage = gpu.make_stage(ops, loaded, kv_cache, core.arena_len)
        runner = ModelRunner(loaded, kv_cache, ops, max_num_rows=max_num_rows, stage=stage, swap=swap)
        gpu.capture_graphs(config, loaded, ops, runner, plan.max_model_len)
    else:
        runner = ModelRunner(loaded, kv_cache, ops, max_num_rows=max_num_rows, swap=swap)
    if swap is not None:
        longest = min(config.max_num_batched_tokens, plan.max_model_len - 1)
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


def plan_memory(config: EngineConfig, model: LoadedModel, ops: Ops) -> PoolPlan:
    """Chooses the size of the pool, with the weights already in memory, and says what was chosen."""
    bytes_per_token = model.config.kv_bytes_per_token(gpu.cache_dtype(config, model))
    free = ops.device.memory()[0] if isinstance(ops, CudaOps) else free_memory()
    budget = config.kv_bytes
    if budget is None and config.num_blocks is not None:
        budget = free
    elif budget is None:
        budget = gpu.memory_for_cache(config, model, ops) if isinstance(ops, CudaOps) else cpu_budget(free)
    plan = plan_pool(
        bytes_per_token=bytes_per_token,
        block_size=config.block_size,
        budget_bytes=budget,
        num_blocks=config.num_blocks,
        model_len=model.config.max_len,
        model_reason=model.config.max_len_reason,
        max_model_len=config.max_model_len,
    )
    check_memory(
        plan,
        bytes_per_token=bytes_per_token,
        table_bytes_per_token=table_bytes(model.config.head_dim, 1),
        block_size=config.block_size,
        free_bytes=free,
        option=_size_option(config),
    )
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
    return plan


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


def _allocate(config: EngineConfig, model: LoadedModel, plan: PoolPlan, device: torch.device) -> KVCache:
    """Gives the model its positions, and makes the cache. Raises ValueError if the memory cannot be had."""
    try:
        model.model.set_max_len(plan.max_model_len, device)
        return KVCache(
            model.config.num_layers,
            plan.num_blocks,
            model.config.num_kv_heads,
            config.block_size,
            model.config.head_dim,
            gpu.cache_dtype(config, model),
            device,
            poison=poison_requested(),
        )
    except _NO_MEMORY as error:
        raise ValueError(
            f"{plan.num_blocks} blocks of {config.block_size} tokens cannot be allocated, choose fewer with "
            f"num_blocks or kv_memory: {_first_line(error)}"
        ) from error


def _make_swap(config: EngineConfig, kv_cache: KVCache) -> HostSwap | None:
    """Makes room in host memory for preempted sequences, and says so. None where there is to be none."""
    per_block = kv_cache.block_bytes
    computes_on_gpu = kv_cache.layers[0][0].is_cuda
    free = free_memory()
    if not computes_on_gpu:
        # The pool's memory is not touched yet, and so looks free.
        free = max(0, free - (kv_cache.num_blocks + 1) * per_block)
    num_blocks = host_blocks(
        config.swap_bytes, bytes_per_block=per_block, free_bytes=free, computes_on_gpu=computes_on_gpu
    )
    if num_blocks == 0:
        return None
    try:
        host_cache = HostCache(kv_cache, num_blocks, poison=poison_requested())
    except _NO_MEMORY as error:
        raise ValueError(
            f"{format_bytes(num_blocks * per_block)} of host memory cannot be had for preempted sequences, "
            f"choose less with swap_space: {_first_line(error)}"
        ) from error
    logger.info(
        "%s of host memory hold %d blocks of preempted sequences",
        format_bytes(num_blocks * per_block),
        num_blocks,
    )
    return HostSwap(kv_cache, host_cache)


def _first_line(error: BaseException) -> str:
    """What an error says, without the stack that torch adds."""
    return str(error).partition("\n")[0]
