"""Bugs planted in the kernels, each of which the checks must notice: `make mutants` plants them all.

A mutant is a replacement in one source. Its probe, a small check of the kernel, runs in a process of its own,
since a bug may as well crash or never end. `--quick` plants one in each kernel; every test run does that.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from host_device import HostDevice, checkout_sources
from paged_steps import exact_attention, make_step, relative_error, swizzle
from pagedkv.ops import reference
from pagedkv.ops.cuda import CudaOps
from pagedkv.ops.nvrtc import CompileError
from test_sample import is_exact, rows, varied

TIMEOUT_S = 120
SEEDS = (0, 3, 9)


class Noticed(Exception):
    """A check failed, as it should."""


def expect(condition: bool) -> None:
    if not condition:
        raise Noticed


def attention(sources: dict[str, str], *, fp8: bool = False) -> None:
    """Decodes, one in parts, and a prompt, in three orders of execution."""
    name = "attention_fp8" if fp8 else "attention"
    for seed in SEEDS:
        device = HostDevice("sm_80" if seed == 3 else "sm_90", sources=sources, seed=seed)
        for lengths in ([(1, 1), (1, 37), (1, 500)], [(33, 33), (20, 90)]):
            step = make_step(lengths, fp8=fp8)
            ops = CudaOps(device, key_scale=step.key_scale, value_scale=step.value_scale)
            given = ops.paged_attention(step.q, step.key_cache, step.value_cache, step.batch, step.scale)
            expect(relative_error(given, exact_attention(step)) < 4e-3)
        expect(device.counters(name)["bank_conflicts"] == 0)


def shared_prefix(sources: dict[str, str]) -> None:
    """Shared keys that end within a tile."""
    step = make_step([(1, 272 + own) for own in (3, 40, 17, 90)], num_shared=272)
    ops = CudaOps(HostDevice(sources=sources))
    given = ops.paged_attention(step.q, step.key_cache, step.value_cache, step.batch, step.scale)
    expect(relative_error(given, exact_attention(step)) < 4e-3)


def attention_fp8(sources: dict[str, str]) -> None:
    attention(sources, fp8=True)


def attention_bulk(sources: dict[str, str]) -> None:
    """Decodes, in three orders of execution and of the copies' arrival."""
    for seed in SEEDS:
        device = HostDevice(sources=sources, seed=seed)
        step = make_step([(1, 1), (1, 37), (1, 1100)])
        caches = (swizzle(step.key_cache), swizzle(step.value_cache))
        ops = CudaOps(device, swizzled=True)
        given = ops.paged_attention(step.q, *caches, step.batch, step.scale)
        expect(relative_error(given, exact_attention(step)) < 4e-3)
        expect(device.counters("attention_bulk")["bank_conflicts"] == 0)


def rope_cache(sources: dict[str, str]) -> None:
    """Both architectures, and so both ways to make fp8; the cache is compared as a whole."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(4, heads, 64).bfloat16() for heads in (4, 2, 2))
    angles = torch.rand(20, 32).repeat(1, 2) * 6
    positions = torch.tensor([3, 0, 19, 7], dtype=torch.int32)
    slots = torch.tensor([9, 40, 22, 17], dtype=torch.int32)
    for arch in ("sm_80", "sm_90"):
        ops = CudaOps(HostDevice(arch, sources=sources))
        for stored in (torch.bfloat16, torch.float8_e4m3fn):
            given = [torch.zeros(6, 2, 8, 64).to(stored) for _ in range(2)]
            expected = [torch.zeros(6, 2, 8, 64) for _ in range(2)]
            arguments = (angles.cos(), angles.sin(), positions)
            rotated = ops.rope_cache(q, k, v, *arguments, *given, slots)
            wide = reference.rope_cache(q.float(), k.float(), v.float(), *arguments, *expected, slots)
            expect(relative_error(rotated, wide.double()) < 3e-3)
            for cache, wanted in zip(given, expected, strict=True):
                # A product may be rounded once or twice, which moves a few elements by a unit.
                expect(relative_error(cache.float(), wanted.to(stored).double()) < 1e-2)


def copy_blocks(sources: dict[str, str]) -> None:
    given = [(torch.randn(5, 2, 8, 64), torch.randn(5, 2, 8, 64))]
    expected = [tuple(cache.clone() for cache in given[0])]
    copies = torch.tensor([[1, 4], [3, 2]], dtype=torch.int32)
    CudaOps(HostDevice(sources=sources)).copy_blocks(given, copies)
    reference.copy_blocks(expected, copies)
    expect(all(torch.equal(a, b) for a, b in zip(given[0], expected[0], strict=True)))


def add_rms_norm(sources: dict[str, str]) -> None:
    torch.manual_seed(2)
    for seed in SEEDS:
        ops = CudaOps(HostDevice(sources=sources, seed=seed))
        x, residual, weight = (0.01 * torch.randn(shape).bfloat16() for shape in ((3, 576), (3, 576), (576,)))
        total = x + residual
        out = ops.add_rms_norm(x, residual, weight, 1e-4)
        expect(torch.equal(residual, total))
        expect(relative_error(out, reference.rms_norm(total, weight, 1e-4).double()) < 5e-4)


def silu_mul(sources: dict[str, str]) -> None:
    gate, up = torch.randn(3, 2 * 528).half().split(528, dim=1)
    given = CudaOps(HostDevice(sources=sources)).silu_mul(gate, up)
    expected = torch.nn.functional.silu(gate.float()).half() * up
    expect(relative_error(given, expected.double()) < 1e-4)


def sample(sources: dict[str, str]) -> None:
    """Many equal logits, every small top_k, flat rows where each token may win, NaN and infinity."""
    ops = CudaOps(HostDevice(sources=sources, seed=3))
    logits = torch.randn(24, 1500, generator=torch.Generator().manual_seed(4)).mul(4).round()
    flat = torch.randn(12, 9000, generator=torch.Generator().manual_seed(5))
    every_k = [entry | {"top_k": k + 1, "temperature": 5.0} for k, entry in enumerate(varied(24))]
    cases = [(logits, every_k), (flat, varied(12, temperature=20.0))]
    cases += [(logits[:8], varied(8, **changes)) for changes in ({}, {"top_p": 0.7}, {"min_p": 0.05})]
    cases += [(logits[:2], varied(2, temperature=0.0))]
    for given, entries in cases:
        expect(torch.equal(ops.sample(given, rows(entries)), reference.sample(given, rows(entries))))
    for bad, temperature in ((float("nan"), 0.0), (float("nan"), 1.0), (float("inf"), 1.0)):
        logits[1, 70] = bad
        expect(int(ops.sample(logits[:2], rows(varied(2, temperature=temperature)))[1]) < 0)


def noise(sources: dict[str, str]) -> None:
    """Bits that few draws depend on."""
    expect(is_exact("sm_90", sources))


@dataclass(frozen=True)
class Mutant:
    """A bug: what is replaced by what in a file, and the probe that must notice."""

    name: str
    file: str
    before: str
    after: str
    probe: Callable[[dict[str, str]], None]
    quick: bool = False

    def sources(self) -> dict[str, str]:
        sources = checkout_sources()
        assert sources[self.file].count(self.before) >= 1, f"{self.name}: {self.file} has changed"
        return sources | {self.file: sources[self.file].replace(self.before, self.after, 1)}


_WAIT = "copy_async_wait<STAGES - 2>();"
_LANE_MAX = "max[r] = fmaxf(max[r], __shfl_xor_sync(ALL_LANES, max[r], 1));"
MUTANTS = [
    Mutant("a wait one copy short", "attention.cu", _WAIT, "copy_async_wait<STAGES - 1>();", attention, True),
    Mutant(
        "no barrier in the ring",
        "attention.cu",
        "    __syncthreads();\n    int next",
        "    int next",
        attention,
    ),
    Mutant(
        "swapped operands", "attention.cu", "left, right[0], right[1]", "left, right[1], right[0]", attention
    ),
    Mutant("values not transposed", "attention.cu", "load_matrices<true>", "load_matrices<false>", attention),
    Mutant("the wrong stage", "attention.cu", "next_stage = stage;", "next_stage = stage + 1;", attention),
    Mutant(
        "a barrier for some",
        "attention.cu",
        "    __syncthreads();\n    int next",
        "    if (threadIdx.x % 32) __syncthreads();\n    int next",
        attention,
    ),
    Mutant(
        "results over a live ring",
        "attention.cu",
        "copy_async_wait<0>();\n  __syncthreads();",
        "copy_async_wait<0>();",
        attention,
    ),
    Mutant(
        "results read too early",
        "attention.cu",
        "put_sums(acc, warp);\n  __syncthreads();",
        "put_sums(acc, warp);",
        attention,
    ),
    Mutant("no padding of rows", "attention.cuh", "(STORED_CHUNKS | 1)", "STORED_CHUNKS", attention),
    Mutant("a key too few", "attention.cuh", "> limits.last_kv", ">= limits.last_kv", attention),
    Mutant("a key too many", "attention.cuh", "+ j % 2 > limits", "+ j % 2 > 1 + limits", attention),
    Mutant("half rescaled", "attention.cuh", "acc.out[i][2 * r + 1] *= correction;", "", attention),
    Mutant("sums not rescaled", "attention.cuh", "acc.sum[r] *= correction;", "", attention),
    Mutant("half a block", "attention.cuh", "(kv & slot_mask)", "(kv & slot_mask / 2)", attention),
    Mutant("no zeros past the end", "attention.cuh", "kv < kv_end;", "kv < (kv_end + 7) / 8 * 8;", attention),
    Mutant(
        "the wrong logarithm",
        "attention.cuh",
        "max + log2_fast(sum)",
        "max + 0.7f * log2_fast(sum)",
        attention,
    ),
    Mutant("a shuffle of some", "attention.cuh", _LANE_MAX, f"if (threadIdx.x % 4) {_LANE_MAX}", attention),
    Mutant(
        "sums of one lane", "attention.cuh", "total += __shfl_xor_sync(ALL_LANES, total, 2);", "", attention
    ),
    Mutant("parts of one row", "attention.cuh", "item.part_row + row", "item.part_row", attention),
    Mutant(
        "a misaligned copy", "attention.cuh", "keys + offset, valid", "keys + offset + 2, valid", attention
    ),
    Mutant("one warp's sum", "attention.cuh", "results.sum[result_row]", "results.sum[first]", attention),
    Mutant("the next head", "attention.cuh", "row % group_size;", "(row + 1) % group_size;", attention),
    Mutant("swapped rows", "ptx.cuh", '"r"(a[1]), "r"(a[2])', '"r"(a[2]), "r"(a[1])', attention),
    Mutant("half for bf16", "ptx.cuh", "f32.bf16.bf16.f32", "f32.f16.f16.f32", attention),
    Mutant("a lost .trans", "ptx.cuh", "x4.trans.shared", "x4.shared", attention),
    Mutant("a group less", "ptx.cuh", '"n"(PENDING)', '"n"(PENDING + 1)', attention),
    Mutant("no groups", "ptx.cuh", 'asm volatile("cp.async.commit_group;" ::: "memory");', "", attention),
    Mutant("weights that do not add up", "merge_parts.cu", "- max) / sum;", "- max);", attention, True),
    Mutant(
        "the last part left out",
        "merge_parts.cu",
        "= begin; i < end; i++) {",
        "= begin; i < end - 1; i++) {",
        attention,
    ),
    Mutant(
        "odd and even dimensions",
        "attention_fp8.cu",
        "make_float4(even[2 * r], odd[2 * r]",
        "make_float4(odd[2 * r], even[2 * r]",
        attention_fp8,
        True,
    ),
    Mutant("bytes in order", "attention_fp8.cu", "bytes[0], 0x3120", "bytes[0], 0x3210", attention_fp8),
    Mutant(
        "query as it is", "attention_fp8.cu", "fragment[1] = lower.x", "fragment[1] = upper.y", attention_fp8
    ),
    Mutant("no scale of values", "attention.cuh", "p.out_scale / sum", "1.0f / sum", attention_fp8),
    Mutant(
        "keys not waited for",
        "attention_bulk.cu",
        "    mbarrier_wait(pipeline.full + stage, parity);\n",
        "",
        attention_bulk,
        True,
    ),
    Mutant(
        "the wrong parity",
        "attention_bulk.cu",
        "uint32_t parity = 0;",
        "uint32_t parity = 1;",
        attention_bulk,
    ),
    Mutant(
        "stages never given back",
        "attention_bulk.cu",
        "if (lane == 0) mbarrier_arrive(pipeline.empty + stage);",
        "",
        attention_bulk,
    ),
    Mutant(
        "stages not waited for",
        "attention_bulk.cu",
        "    mbarrier_wait(pipeline.empty + stage, parity);\n",
        "",
        attention_bulk,
    ),
    Mutant(
        "half of the bytes",
        "attention_bulk.cu",
        "2 * num_tokens * HEAD_DIM * 2",
        "num_tokens * HEAD_DIM * 2",
        attention_bulk,
    ),
    Mutant(
        "values in order",
        "attention_bulk.cu",
        "chunk_at(values, i * 16 + lane % 16, step * 2 + lane / 16)",
        "values + (i * 16 + lane % 16) * HEAD_DIM + (step * 2 + lane / 16) * 8",
        attention_bulk,
    ),
    Mutant(
        "NaN behind the end",
        "attention_bulk.cu",
        "if (first_kv + WARP_TILE > item.kv_end) clear",
        "if (false) clear",
        attention_bulk,
    ),
    Mutant(
        "keys of another item", "attention.cuh", "min(position, item.kv_end - 1)", "position", shared_prefix
    ),
    Mutant("a wrong bias", "fp8.cuh", "0x5c005c00", "0x58005800", attention_fp8),
    Mutant("rounded down", "fp8.cuh", "bits += 0x7ffff + (bits >> 20 & 1);", "", rope_cache),
    Mutant(
        "the wrong sign",
        "rope_cache.cu",
        "x.x * cos.x - y.x * sin.x",
        "x.x * cos.x + y.x * sin.x",
        rope_cache,
        True,
    ),
    Mutant("rotated values", "rope_cache.cu", "if (!is_value) {", "if (true) {", rope_cache),
    Mutant(
        "the wrong half",
        "rope_cache.cu",
        "half_dim + dim, slot), y",
        "half_dim + dim, slot), x",
        rope_cache,
    ),
    Mutant(
        "the wrong slot",
        "rope_cache.cu",
        "(1 << p.block_size_log2) - 1",
        "(1 << p.block_size_log2) - 2",
        rope_cache,
    ),
    Mutant(
        "there and back",
        "copy_blocks.cu",
        "destination + i, read_chunk(source",
        "const_cast<uint8_t*>(source) + i, read_chunk(destination",
        copy_blocks,
        True,
    ),
    Mutant("part of a block", "copy_blocks.cu", "i < p.block_bytes;", "i < p.block_bytes - 16;", copy_blocks),
    Mutant("no epsilon", "add_rms_norm.cu", " + p.eps", "", add_rms_norm, True),
    Mutant("sums read too early", "add_rms_norm.cu", "  __syncthreads();\n", "", add_rms_norm),
    Mutant(
        "the sum not kept",
        "add_rms_norm.cu",
        "write_chunk(place, chunk);",
        "",
        add_rms_norm,
    ),
    Mutant(
        "not rounded",
        "silu_mul.cu",
        "Numbers::widen(Numbers::narrow(silu(x.x), silu(x.y)))",
        "make_float2(silu(x.x), silu(x.y))",
        silu_mul,
    ),
    Mutant("the wrong row", "silu_mul.cu", "p.up + row * p.up_stride", "p.up + row * p.size", silu_mul, True),
    Mutant("nine rounds", "noise.cuh", "round < 10", "round < 9", sample),
    Mutant("ties to the last", "sample.cu", "| uint32_t(~token)", "| uint32_t(token)", sample, True),
    Mutant("one more of k", "sample.cu", "0, row.top_k, scratch", "0, row.top_k + 1, scratch", sample),
    Mutant("an unsound bound", "noise.cuh", "(23.0f - log2_fast(rest))", "(13.0f - log2_fast(rest))", sample),
    Mutant("no min_p", "sample.cu", "row.min_p > 0.0f ?", "row.min_p > 1.0f ?", sample),
    Mutant("an infinite best", "sample.cu", "!drawable ? INFINITE", "false ? INFINITE", sample),
    Mutant("a word's last bits", "noise.cuh", "(float(word >> 9) + 0.5f)", "float(word >> 9)", noise),
    Mutant("a power too small", "noise.cuh", "sum, f, 1.0f)", "sum, f, 0.999f)", noise),
    Mutant(
        "a bin too low",
        "sample.cu",
        "if (before >= target || through < target) return;",
        "if (before > target || through <= target) return;",
        sample,
    ),
    Mutant("NaN unseen", "sample.cu", "num_nan += logit != logit;", "", sample),
    Mutant("a histogram kept", "sample.cu", "scratch->histogram[i] = 0;", ";", sample),
]


def is_noticed(mutant: Mutant) -> bool:
    """Runs the probe on the mutant in a child, which may end in any way but by succeeding."""
    sources = mutant.sources()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(TIMEOUT_S)
        try:
            mutant.probe(sources)
        except (CompileError, AssertionError):  # A mutant that cannot be built shows nothing.
            os._exit(2)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status != 2, f"{mutant.name}: the probe could not run"
    return status != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one in each kernel")
    parser.add_argument("--file", help="only those in this source")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [mutant for mutant in MUTANTS if mutant.quick or not arguments.quick]
    chosen = [mutant for mutant in chosen if arguments.file in (None, mutant.file)]
    for probe in dict.fromkeys(mutant.probe for mutant in chosen):
        probe(checkout_sources())
    missed = 0
    for mutant in chosen:
        noticed = is_noticed(mutant)
        missed += not noticed
        print(f"{'noticed' if noticed else 'MISSED':8} {mutant.file:18} {mutant.name}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} planted bugs were noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
