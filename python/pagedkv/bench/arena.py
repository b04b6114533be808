"""The one section of the step's arena that the benchmarks read. `rust/sched/step.rs` defines the layout."""

import numpy as np
from numpy.typing import NDArray

# Place of `rows` among the sections; the directory of offsets and lengths begins at word 2.
_ROWS = 12
_ROW_WORDS = 4


def rows(arena: NDArray[np.int32]) -> NDArray[np.int32]:
    """The rows that sample, [R, 4]: request id (low, high), sample index, prompt tokens that were found."""
    offset, length = arena[2 + 2 * _ROWS : 4 + 2 * _ROWS].tolist()
    return arena[offset : offset + length].reshape(-1, _ROW_WORDS)
