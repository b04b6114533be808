"""The machine code of the hot loops: tensor cores, 128-bit copies, no local memory, few instructions."""

import importlib.util
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from host_device import checkout_sources
from pagedkv.ops import nvrtc
from pagedkv.ops.cuda_kernels import narrow_shape, wide_shape

# An H200 brings a multiprocessor 32 KiB, the keys and values of a tile, every 1,765 cycles: 4.3 TB/s over 132
# of them at 1.755 GHz. In that time each of its four schedulers issues so many instructions at most, of one
# warp of a decode. See cuda/README.md.
ISSUE_SLOTS_A_TILE = 1765
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)([^;]*);")


def tools() -> Path:
    """Where the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm put their programs."""
    places = importlib.util.find_spec("nvidia").submodule_search_locations
    folders = [Path(place) / "cu13" / "bin" for place in places]
    return next(folder for folder in folders if (folder / "cuobjdump").exists())


def disassemble(kernel, arch, tmp_path):
    """The instructions of a kernel as (address, opcode, operands)."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.compile(nvrtc.load(), checkout_sources(), arch).cubin)
    path = f"{tools()}{os.pathsep}{os.environ['PATH']}"
    command = [str(tools() / "cuobjdump"), "--dump-sass", str(cubin)]
    text = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}
    ).stdout
    return [(int(address, 16), opcode, rest) for address, opcode, rest in _INSTRUCTION.findall(text)]


def hot_loop(instructions):
    """The smallest loop that multiplies matrices."""
    loops = []
    for address, opcode, rest in instructions:
        target = re.search(r"0x([0-9a-f]+)", rest)
        if opcode.startswith("BRA") and target and int(target[1], 16) < address:
            body = [entry for entry in instructions if int(target[1], 16) <= entry[0] <= address]
            if any(opcode.startswith("HMMA") for _, opcode, _ in body):
                loops.append(body)
    return min(loops, key=len)


@pytest.mark.parametrize(
    ("name", "stored_bytes", "share"), [("attention", 2, 0.30), ("attention_fp8", 1, 0.55)]
)
def test_a_decode_leaves_the_schedulers_time(name, stored_bytes, share, tmp_path):
    kernel = narrow_shape(128, stored_bytes).kernel(name, "bf16", 128, stored_bytes)
    instructions = disassemble(kernel, "sm_90", tmp_path)
    loop = hot_loop(instructions)
    opcodes = Counter(opcode.split(".")[0] for _, opcode, _ in loop)
    tokens_a_warp = narrow_shape(128, stored_bytes).tile // 4
    # For each 8 keys and 16 dimensions a product with the keys and one with the values.
    assert opcodes["HMMA"] == 2 * (tokens_a_warp // 8) * (128 // 16)
    assert len(loop) <= share * ISSUE_SLOTS_A_TILE, f"{len(loop)} instructions: {opcodes.most_common(12)}"
    copies = [opcode for _, opcode, _ in loop if opcode.startswith("LDGSTS")]
    assert copies
    assert all(".128" in opcode for opcode in copies)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
def test_prompts_stay_in_registers(arch, tmp_path):
    kernel = wide_shape(256).kernel("attention", "half", 256, 2)
    opcodes = Counter(opcode.split(".")[0] for _, opcode, _ in disassemble(kernel, arch, tmp_path))
    assert opcodes["HMMA"] > 0
    assert opcodes["LDL"] == opcodes["STL"] == 0
