"""What an engine on a GPU needs besides: its operations by the options, its memory by a trial, its graphs.

Called by `loading`, in that order. Sizes come from plain numbers (`plan`); what a step takes is found by
taking the largest ones that the options allow.
"""

import logging
import sys
from typing import Final, cast

import torch

from pagedkv.config import EngineConfig
from pagedkv.decode_graphs import DecodeGraphs, decode_layout, graph_sizes
from pagedkv.kv_cache import KVCache
from pagedkv.models import LoadedModel, OpenedModel
from pagedkv.models.rope import table_bytes
from pagedkv.ops import Ops, choose
from pagedkv.ops.cuda import CudaOps
from pagedkv.ops.cuda_kernels import BLOCK_SIZES, BULK_HEAD_DIMS, MIN_BULK_ARCH
from pagedkv.ops.cuda_launch import FP8
from pagedkv.plan import blocks_for, format_bytes, gpu_budget
from pagedkv.runner import ModelRunner
from pagedkv.sampling_params import MAX_SAMPLES
from pagedkv.stage import DeviceStage
from pagedkv.trial import TrialStep

logger = logging.getLogger("pagedkv")

# What the driver keeps for a graph of some hundred kernels. It has not been measured.
BYTES_PER_GRAPH: Final = 4 * 2**20


def choose_ops(config: EngineConfig, device: torch.device) -> Ops:
    """The operations for a device.

    Raises BackendUnavailable where they cannot run, and ValueError for options of a GPU on a CPU.
    """
    if device.type != "cuda":
        for option, value in (("kv_cache_dtype", "fp8"), ("bulk_attention", True)):
            if getattr(config, option) == value:
                raise ValueError(
                    f"{option} is {value!r}, which needs a GPU, and the device is {device}; "
                    'give device="cuda" too'
                )
    return choose(device.type, device, swizzled=config.bulk_attention)


def cache_dtype(config: EngineConfig, model: OpenedModel | LoadedModel) -> torch.dtype:
    """The type of the elements of the cache."""
    return FP8 if config.kv_cache_dtype == "fp8" else model.dtype


def prepare(config: EngineConfig, model: OpenedModel, ops: CudaOps) -> None:
    """Compiles and loads the kernels that a model needs. Raises ValueError where they cannot compute it."""
    head_dim = model.config.head_dim
    if config.block_size not in BLOCK_SIZES:
        allowed = ", ".join(map(str, BLOCK_SIZES))
        raise ValueError(f"block_size is {config.block_size}, allowed on a GPU: {allowed}")
    for field in ("hidden_size", "intermediate_size"):
        # As `cuda_launch.row_size` would find in the first step.
        if (width := getattr(model.config, field)) % 8:
            raise ValueError(f"{field} of the model is {width}, allowed on a GPU: multiples of 8")
    if config.bulk_attention:
        if int(ops.device.arch.removeprefix("sm_")) < MIN_BULK_ARCH:
            raise ValueError(
                f"bulk_attention is True on {ops.device.arch}, allowed: sm_{MIN_BULK_ARCH} and newer"
            )
        if head_dim not in BULK_HEAD_DIMS or config.kv_cache_dtype != "auto":
            allowed = ", ".join(map(str, BULK_HEAD_DIMS))
            raise ValueError(
                f"bulk_attention is True with heads of {head_dim} elements and kv_cache_dtype "
                f"{config.kv_cache_dtype!r}, allowed: heads of {allowed} and 'auto'"
            )
    with ops.device.active():
        ops.prepare(model.dtype, head_dim, cache_dtype(config, model))


def make_stage(ops: CudaOps, model: LoadedModel, kv_cache: KVCache, num_words: int) -> DeviceStage:
    """Where the steps of a model are computed; an arena has `num_words` words."""
    heads = (model.config.num_heads, model.config.head_dim)
    return DeviceStage(ops.device, ops.attention.options(heads, kv_cache.layers[0][0]), num_words)


def capture_graphs(
    config: EngineConfig, model: LoadedModel, ops: CudaOps, runner: ModelRunner, max_model_len: int
) -> None:
    """Captures the graphs of a runner on a GPU, if they are wanted."""
    if not config.cuda_graphs:
        return
    blocks_per_seq = blocks_for(max_model_len, config.block_size)
    stage = runner.stage
    assert isinstance(stage, DeviceStage)
    with ops.device.active():
        graphs = DecodeGraphs(stage, ops.device, model.config.vocab_size, config.max_num_seqs, blocks_per_seq)
        runner.capture_graphs(graphs, progress=sys.stderr.isatty())


def memory_for_cache(config: EngineConfig, model: LoadedModel, ops: CudaOps) -> int:
    """Bytes that the cache may take, found by the largest steps. The weights must be in memory.

    Raises ValueError if nothing is left.
    """
    max_len = min(config.max_model_len or model.config.max_len, model.config.max_len)
    prompt_len = min(max_len, config.num_batched_tokens)
    with ops.device.active():
        model.model.set_max_len(prompt_len, ops.device.torch_device)
        runner = _trial_runner(config, model, ops)
        rows = config.max_num_seqs + MAX_SAMPLES
        step_bytes = _peak_bytes(
            config, ops, runner, TrialStep.of_prompts(config.num_batched_tokens, prompt_len, rows)
        )
        graph_bytes = _graph_bytes(config, model, ops, runner, max_len) if config.cuda_graphs else 0
        positions_bytes = table_bytes(model.config.head_dim, max_len)
        del runner
        free_bytes, total_bytes = ops.device.memory()
    logger.info("the largest step takes %s, graphs %s", format_bytes(step_bytes), format_bytes(graph_bytes))
    return gpu_budget(
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        step_bytes=step_bytes,
        kept_bytes=graph_bytes + positions_bytes,
        utilization=config.gpu_memory_utilization,
    )


def _trial_runner(config: EngineConfig, model: LoadedModel, ops: CudaOps) -> ModelRunner:
    """A runner whose cache is the null block alone."""
    kv_cache = KVCache(
        model.config.num_layers,
        0,
        model.config.num_kv_heads,
        config.block_size,
        model.config.head_dim,
        cache_dtype(config, model),
        ops.device.torch_device,
    )
    rows = config.max_num_seqs + MAX_SAMPLES
    return ModelRunner(
        model,
        kv_cache,
        cast(Ops, ops),
        max_num_rows=rows,
        stage=make_stage(ops, model, kv_cache, num_words=1),
    )


def _peak_bytes(config: EngineConfig, ops: CudaOps, runner: ModelRunner, step: TrialStep) -> int:
    arena = step.arena(config.block_size)
    return ops.device.peak_bytes(lambda: runner.launch(step, arena).result())


def _graph_bytes(
    config: EngineConfig, model: LoadedModel, ops: CudaOps, runner: ModelRunner, max_len: int
) -> int:
    """Bytes of all graphs: what the largest computes on the way, which all share, and what each keeps."""
    sizes = graph_sizes(config.max_num_seqs)
    shape, stage = model.config, runner.stage
    assert isinstance(stage, DeviceStage)
    layout = decode_layout(sizes[-1], stage.options, blocks_for(max_len, config.block_size))
    # Steps of one token have no parts, but a captured step has room for the most there may be.
    parts = layout.work.num_part_rows * shape.num_kv_heads * (shape.head_dim + 1)
    static = layout.num_words + sizes[-1] * shape.vocab_size + parts
    step_bytes = _peak_bytes(config, ops, runner, TrialStep.of_decodes(sizes[-1]))
    return step_bytes + 4 * static + BYTES_PER_GRAPH * len(sizes)
