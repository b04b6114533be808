"""Every kernel once under the address sanitizer; `test_address_sanitizer` runs this with it loaded.

Tensors come from malloc, so an access beyond one is found. `--beyond` makes one on purpose.
"""

import sys

import torch

import mutants
from host_device import HostDevice, checkout_sources
from paged_steps import exact_attention, make_step, relative_error, swizzle
from pagedkv.ops import reference
from pagedkv.ops.cuda import CudaOps
from test_sample import rows, varied


def attend(*, fp8: bool = False, swizzled: bool = False) -> None:
    """A decode in parts, a short one and a chunk. The last block of each sequence is not full."""
    step = make_step([(1, 300), (1, 3), (20, 45)], fp8=fp8, heads=(7, 1))
    caches = [swizzle(cache) if swizzled else cache for cache in (step.key_cache, step.value_cache)]
    ops = CudaOps(HostDevice(), swizzled=swizzled, key_scale=step.key_scale, value_scale=step.value_scale)
    given = ops.paged_attention(step.q, *caches, step.batch, step.scale)
    assert relative_error(given, exact_attention(step)) < 4e-3


def copy_beyond() -> None:
    """Copies a block that the cache does not have."""
    cache = torch.zeros(4, 1, 8, 64)
    copies = torch.tensor([[4, 1]], dtype=torch.int32)
    CudaOps(HostDevice()).copy_blocks([(cache, cache.clone())], copies)


def main() -> None:
    HostDevice.sanitize = True
    mutants.SEEDS = (0,)
    torch.set_num_threads(1)
    if "--beyond" in sys.argv:
        return copy_beyond()
    attend()
    attend(fp8=True)
    attend(swizzled=True)
    for probe in (mutants.rope_cache, mutants.copy_blocks, mutants.silu_mul, mutants.add_rms_norm):
        probe(checkout_sources())
    logits, drawn = torch.randn(2, 301), rows(varied(2, top_p=0.9))
    assert torch.equal(CudaOps(HostDevice()).sample(logits, drawn), reference.sample(logits, drawn))
    print("no error was found")
    return None


if __name__ == "__main__":
    main()
