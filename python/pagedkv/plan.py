"""Memory arithmetic: how large the cache is, how many blocks a budget holds and what a request takes of them.

Pure functions on plain numbers, without torch, so that every figure can be checked by hand. `loading` and
`gpu` size the pool by them. `wasted_slots` and `contiguous_bytes` say what paging saves: the tests compare
both with known figures, and no running code needs them.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CPU_SHARE: Final = 0.25
CPU_MOST_BYTES: Final = 4 * 2**30
# Host memory for preempted sequences unless told otherwise, where a GPU computes.
GPU_SWAP_BYTES: Final = 4 * 2**30
SWAP_SHARE: Final = 0.25
# As the core allows; far more than has been built.
MAX_HOST_BLOCKS: Final = 2**24
# Slots travel as int32; the null block has slots as well.
MAX_SLOTS: Final = 2**31 - 1


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of cache that one token takes: a key and a value of every layer and head."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype_bytes


def block_bytes(bytes_per_token: int, block_size: int) -> int:
    """Bytes of one block of `block_size` tokens, over all layers."""
    return bytes_per_token * block_size


def blocks_in(budget_bytes: int, bytes_per_block: int) -> int:
    """How many blocks fit into a budget."""
    return budget_bytes // bytes_per_block


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks a sequence of `num_tokens` takes."""
    return -(-num_tokens // block_size)


def wasted_slots(num_tokens: int, block_size: int) -> int:
    """Slots that a sequence owns and does not use: the rest of its last block."""
    return blocks_for(num_tokens, block_size) * block_size - num_tokens


def contiguous_bytes(num_seqs: int, max_len: int, bytes_per_token: int) -> int:
    """What a cache without pages reserves: the greatest length for every sequence, used or not."""
    return num_seqs * max_len * bytes_per_token


def usable_blocks(budget_bytes: int, bytes_per_block: int) -> int:
    """Blocks that requests can own within a budget: the null block takes the room of one more."""
    return blocks_in(budget_bytes, bytes_per_block) - 1


@dataclass(frozen=True)
class PoolPlan:
    """The size of the pool and the longest sequence that it is open to.

    Attributes:
        num_blocks: usable blocks; the tensors hold one more, the null block.
        max_model_len: tokens of prompt and answer together.
        cap_reason: why max_model_len is less than the trained length, or None where it is not.
    """

    num_blocks: int
    max_model_len: int
    cap_reason: str | None = None


def plan_pool(
    *,
    bytes_per_token: int,
    block_size: int,
    budget_bytes: int,
    num_blocks: int | None,
    model_len: int,
    model_reason: str = "",
    max_model_len: int | None = None,
) -> PoolPlan:
    """Chooses the number of blocks and the greatest length of a sequence.

    Args:
        bytes_per_token: cache that one token takes, over all layers.
        block_size: tokens per block.
        budget_bytes: memory for the cache; not looked at where `num_blocks` is given.
        num_blocks: usable blocks as the user gave them, or None.
        model_len: the longest sequence that the model can do: the length it was trained for, or less.
        model_reason: why it is less (a sliding window); empty where it is not.
        max_model_len: as the user gave it, or None.

    Raises:
        ValueError: the budget holds fewer than two blocks, or max_model_len is more than model or pool allow.

    The longest sequence always fits into the pool, so that a request without max_tokens is never refused for
    its size.
    """
    per_block = block_bytes(bytes_per_token, block_size)
    most_blocks = MAX_SLOTS // block_size - 1
    if num_blocks is None:
        num_blocks = min(usable_blocks(budget_bytes, per_block), most_blocks)
        if num_blocks < 2:
            needed = 3 * per_block
            raise ValueError(
                f"kv_memory is {format_bytes(budget_bytes)}, allowed: at least {format_bytes(needed)}, "
                f"which is two blocks of {block_size} tokens and the null block"
            )
    elif num_blocks > most_blocks:
        raise ValueError(
            f"num_blocks is {num_blocks}, allowed: 2..{most_blocks}; slots are numbered in 31 bits"
        )

    longest, reason = model_len, model_reason or None
    holds = num_blocks * block_size
    if holds < longest:
        longest = holds
        reason = f"the pool holds {num_blocks} blocks of {block_size} tokens"
    if max_model_len is None:
        return PoolPlan(num_blocks, longest, reason)
    if max_model_len > longest:
        why = f", because {reason}" if reason else ", the length that the model was trained for"
        raise ValueError(f"max_model_len is {max_model_len}, allowed: 2..{longest}{why}")
    return PoolPlan(num_blocks, max_model_len)


def check_memory(
    plan: PoolPlan,
    *,
    bytes_per_token: int,
    table_bytes_per_token: int,
    block_size: int,
    free_bytes: int,
    option: str,
) -> None:
    """Refuses a pool that is larger than the free memory, together with the table of positions.

    On a CPU the memory of an idle pool is hardly touched, so that an impossible one would often start, and
    end the process when it fills.

    Args:
        plan: what `plan_pool` chose.
        bytes_per_token: cache that one token takes, over all layers.
        table_bytes_per_token: what the model keeps for every position up to max_model_len.
        block_size: tokens per block.
        free_bytes: memory that there is.
        option: what the user chose the size by ("num_blocks", "kv_memory"), or empty where nothing was.

    Raises:
        ValueError: it does not fit; the message says what would.
    """
    per_block = block_bytes(bytes_per_token, block_size)
    pool_bytes = (plan.num_blocks + 1) * per_block
    table_bytes = plan.max_model_len * table_bytes_per_token
    if pool_bytes + table_bytes <= free_bytes:
        return
    # What fits beside the present table. The table of a smaller pool is never larger.
    fitting = max(0, usable_blocks(free_bytes - table_bytes, per_block))
    if not option or fitting < 2:
        raise ValueError(
            f"max_model_len is {plan.max_model_len}, whose positions take {format_bytes(table_bytes)} beside "
            f"a cache of {format_bytes(pool_bytes)}, but {format_bytes(free_bytes)} are free; choose less"
        )
    allowed = str(fitting) if option == "num_blocks" else format_bytes((fitting + 1) * per_block)
    raise ValueError(
        f"{option} asks for {plan.num_blocks} blocks, which take {format_bytes(pool_bytes)} and "
        f"{format_bytes(table_bytes)} for positions, but {format_bytes(free_bytes)} are free; "
        f"allowed: at most {allowed}"
    )


def host_blocks(
    space_bytes: int | None, *, bytes_per_block: int, free_bytes: int, computes_on_gpu: bool
) -> int:
    """Blocks of host memory for preempted sequences.

    Args:
        space_bytes: swap_space as the user gave it, or None.
        bytes_per_block: over all layers, as in the pool.
        free_bytes: host memory that there is, beside the pool if that lies there too.
        computes_on_gpu: whether the pool lies elsewhere, so that there is some space by default.

    Raises:
        ValueError: it is more than there is, or less than a block.
    """
    if space_bytes is None:
        default = min(GPU_SWAP_BYTES, int(free_bytes * SWAP_SHARE)) if computes_on_gpu else 0
        return min(blocks_in(default, bytes_per_block), MAX_HOST_BLOCKS)
    if space_bytes > free_bytes:
        raise ValueError(
            f"swap_space is {format_bytes(space_bytes)}, but {format_bytes(free_bytes)} of host memory are "
            f"free; allowed: at most {free_bytes * 100 // 2**30 / 100}"
        )
    num_blocks = blocks_in(space_bytes, bytes_per_block)
    if space_bytes > 0 and num_blocks == 0:
        raise ValueError(
            f"swap_space is {format_bytes(space_bytes)}, allowed: 0, or at least "
            f"{format_bytes(bytes_per_block)}, which is one block"
        )
    return min(num_blocks, MAX_HOST_BLOCKS)


def cpu_budget(free_bytes: int) -> int:
    """The share of a machine's free memory that the cache takes unless told otherwise."""
    return min(int(free_bytes * CPU_SHARE), CPU_MOST_BYTES)


def gpu_budget(
    *, free_bytes: int, total_bytes: int, step_bytes: int, kept_bytes: int, utilization: float
) -> int:
    """The bytes that a cache on a GPU may take by default.

    Args:
        free_bytes: free once the weights are loaded.
        total_bytes: all there are.
        step_bytes: what the largest step takes besides, at its height.
        kept_bytes: what graphs and the table of positions will keep.
        utilization: the share of all that may be used.

    Raises:
        ValueError: nothing is left.
    """
    used = total_bytes - free_bytes
    budget = int(total_bytes * utilization) - used - step_bytes - kept_bytes
    # Another process may have taken what this one may use.
    budget = min(budget, free_bytes - step_bytes - kept_bytes)
    if budget <= 0:
        raise ValueError(
            f"gpu_memory_utilization is {utilization:g} of {format_bytes(total_bytes)}, which leaves nothing "
            f"for the cache: {format_bytes(used)} are taken, a step needs {format_bytes(step_bytes)}, graphs "
            f"and positions {format_bytes(kept_bytes)}; choose more, or a smaller max_num_batched_tokens"
        )
    return budget


def format_bytes(num_bytes: int) -> str:
    """A number of bytes for people: "1.50 GiB"."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.2f} {unit}"
    return f"{num_bytes} bytes"


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may still take.

    That is what the system calls available, or what the limits of the control groups around the process
    leave, if that is less: a container sees the memory of the whole machine in /proc, and is killed at its
    own limit.
    """
    available = _meminfo_available(proc / "meminfo")
    for usage, limit, reclaimable in _memory_groups(proc / "self" / "cgroup", cgroups):
        available = min(available, max(0, limit - usage + reclaimable))
    return available


def usable_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, or the quota of its control group if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups(proc / "self" / "cgroup", cgroups, controller="cpu"):
        quota = _read(group / "cpu.max").split()
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
            cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
        old_quota, period = _read_int(group / "cpu.cfs_quota_us"), _read_int(group / "cpu.cfs_period_us")
        if old_quota is not None and period and old_quota > 0:
            cores = min(cores, max(1, old_quota // period))
    return cores


def _meminfo_available(meminfo: Path) -> int:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # Not Linux: half of what is built in is as good a guess as any.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _memory_groups(membership: Path, cgroups: Path) -> list[tuple[int, int, int]]:
    """(bytes used, limit, page cache that can be dropped) of every control group with a memory limit."""
    groups = []
    for group in _groups(membership, cgroups, controller="memory"):
        for usage_name, limit_name, stat in (
            ("memory.current", "memory.max", "inactive_file"),
            ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"),
        ):
            usage, limit = _read_int(group / usage_name), _read_int(group / limit_name)
            if usage is not None and limit is not None:
                groups.append((usage, limit, _stat_entry(group / "memory.stat", stat)))
    return groups


def _groups(membership: Path, cgroups: Path, *, controller: str) -> list[Path]:
    """The folders of the control groups around this process, innermost first, of both hierarchies."""
    folders: list[Path] = []
    for line in _read(membership).splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            root = cgroups
        elif controller in controllers.split(","):
            root = cgroups / controller
        else:
            continue
        group = root / path.lstrip("/")
        # Within a container the path may name a place outside of what is mounted; the mounted root holds
        # then.
        folders += [
            folder for folder in (group, *group.parents) if folder.is_relative_to(root) and folder.is_dir()
        ]
    return folders


def _stat_entry(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None
