"""Products with packed weights through the backend: values, bits that must not move, and refusals."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from arena_writer import PagedRun, TestSequence
from pagedkv import _core
from pagedkv.models import load_model
from pagedkv.ops import choose, cpu, reference
from tiny_models import make_tiny

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}

pytestmark = pytest.mark.skipif(_core.cpu_isa() == "portable", reason="there torch multiplies")


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = _core.num_threads(), torch.get_num_threads()
    _core.set_num_threads(2)
    torch.set_num_threads(1)
    yield
    _core.set_num_threads(before[0])
    torch.set_num_threads(before[1])


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_products_agree_with_the_reference(dtype: torch.dtype, gated: bool, bias: bool) -> None:
    sizes = [70, 70] if gated else [70, 3, 33]
    weights = [numbers(size, 100, seed=size, dtype=dtype) / 10 for size in sizes]
    biases = [numbers(size, seed=size + 1, dtype=dtype) if bias and size > 3 else None for size in sizes]
    packed = cpu.pack_linear(weights, biases, gated=gated)
    wide = reference.pack_linear(
        [weight.double() for weight in weights],
        [None if shift is None else shift.double() for shift in biases],
        gated=gated,
    )
    for num_rows in (0, 1, 5, 70):
        # Rows with a gap, as in a slice of a larger tensor.
        x = numbers(num_rows, 130, seed=9, dtype=dtype)[:, 20:120]
        expected = reference.linear(x.double(), wide)
        for out_dtype in (None, torch.float32):
            out = cpu.linear(x, packed, out_dtype)
            assert out.dtype == (out_dtype or dtype)
            torch.testing.assert_close(
                out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[torch.float32]
            )


def test_rows_of_a_packed_weight_are_the_embedding() -> None:
    for dtype in TOLERANCE:
        weight = numbers(50, 37, seed=1, dtype=dtype)
        packed = cpu.pack_linear([weight], [None])
        ids = torch.tensor([49, 0, 17, 17, 31])
        assert torch.equal(cpu.embedding(ids, packed), weight[ids])
        assert torch.equal(cpu.embedding(ids.int(), packed), weight[ids])
        assert packed.num_bytes >= weight.nbytes
    with pytest.raises(ValueError, match=r"row_ids\[1\] is 50, allowed: 0 to 49"):
        cpu.embedding(torch.tensor([1, 50]), packed)


def test_what_does_not_fit_is_refused() -> None:
    packed = cpu.pack_linear([numbers(4, 8, seed=1)], [None])
    with pytest.raises(ValueError, match="width of x is 9, allowed: 8"):
        cpu.linear(numbers(2, 9, seed=1), packed)
    with pytest.raises(ValueError, match="dtype of x is bfloat16, allowed: that of the weight, float32"):
        cpu.linear(numbers(2, 8, seed=1, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match=r"weights\[1\] is \[4, 9\] of torch.float32, allowed: \[out, 8\]"):
        cpu.pack_linear([numbers(4, 8, seed=1), numbers(4, 9, seed=1)], [None, None])
    with pytest.raises(ValueError, match=r"rows of gated weights is \[4, 5\], allowed: two of a size"):
        cpu.pack_linear([numbers(4, 8, seed=1), numbers(5, 8, seed=1)], [None, None], gated=True)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("float32", torch.float32), ("float32", torch.bfloat16), ("bfloat16", torch.bfloat16)],
)
@pytest.mark.parametrize("family", ["smollm", "qwen3"])
def test_logits_of_a_sequence_depend_on_it_alone(
    dtype: str, stored: torch.dtype, family: str, tmp_path: Path
) -> None:
    """Alone, token by token, in chunks and among others, on one to three threads: the same bits."""
    make_tiny(family, tmp_path, numbers=stored)
    run = PagedRun(load_model(tmp_path, dtype), choose("cpu"), block_size=8, num_blocks=200)
    ids: list[int] = torch.randint(0, 200, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    alone = run.logits(ids, 90)
    for num_threads, chunk in ((1, 1), (2, 7), (3, 33), (2, 64)):
        _core.set_num_threads(num_threads)
        assert torch.equal(run.logits(ids, chunk), alone), f"{num_threads} threads, chunks of {chunk}"
    crowd = [TestSequence(ids[start:]) for start in range(1, 30, 3)] + [TestSequence(ids)]
    chunks = [(sequence, len(sequence.token_ids)) for sequence in crowd]
    assert torch.equal(run.step(chunks)[-len(ids) :], alone)


@pytest.mark.parametrize("family", ["smollm", "qwen2"])
def test_float32_of_bfloat16_weights_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    """The panels take 12 bits an element where tiles multiply them, and no digit is lost."""
    twin = make_tiny(family, tmp_path, numbers=torch.bfloat16)
    model = load_model(tmp_path, "float32")
    run = PagedRun(model, choose("cpu"), block_size=8, num_blocks=200)
    ids = torch.randint(0, 200, (90,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = twin(ids[None]).logits[0]
    torch.testing.assert_close(run.logits(ids.tolist(), 40), expected, rtol=1e-4, atol=5e-5)
    head = model.model.packed.head
    assert isinstance(head, _core.PackedLinear)
    is_narrow = _core.cpu_isa() == "amx_bf16"
    assert head.arithmetic == "amx_bf16x3" if is_narrow else head.arithmetic != "amx_bf16x3"
    element_bits = head.num_bytes * 8 / head.num_elements
    assert 12 <= element_bits < 13 if is_narrow else element_bits == 32


def test_released_weights_cannot_be_packed_again(tmp_path: Path) -> None:
    make_tiny("smollm", tmp_path)
    model = load_model(tmp_path).model
    model.pack(choose("cpu"), release=True)
    assert {name for name, _ in model.named_parameters() if "norm" not in name} == set()
    with pytest.raises(ValueError, match="released"):
        model.pack(choose("cpu"))
