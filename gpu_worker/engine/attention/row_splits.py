"""Row splits: into how many parts XQA splits the keys of each row of a step that decodes.

XQA splits the rows of a step only as far as processors are idle: a long row beside many short ones is one
program for each K head, for which all others wait.
"""

import numpy as np
import numpy.typing as npt

PARTS = 8
TILE = 256
"""Keys that a program reads at once."""
EMPTY_PART = 0.5
"""What a part costs by itself, in tiles: most are empty, and their results are merged."""
WORTH = 0.75
"""Rows are split where that is expected to take this share of the time at most."""


def splits_rows(lengths: npt.NDArray[np.integer], kv_heads: int, processors: int) -> bool:
    """Whether a step takes less time with rows split into PARTS than as XQA splits them: lengths int [rows]
    in the cache, of each rank's K heads.
    """
    parts = own_parts(len(lengths), kv_heads, processors)
    if parts >= PARTS:
        return False
    tiles = -(-lengths // TILE)
    own, split = (expected_tiles(tiles, number, kv_heads, processors) for number in (parts, PARTS))
    return split <= WORTH * own


def own_parts(rows: int, kv_heads: int, processors: int) -> int:
    """Into how many parts XQA splits each row of a long table."""
    return max(1, processors // (rows * kv_heads))


def expected_tiles(tiles: npt.NDArray[np.integer], parts: int, kv_heads: int, processors: int) -> float:
    """How many tiles' time a step takes: that of its longest program, or of all on all processors. tiles int
    [rows]
    """
    costs = 0.0 if parts == 1 else EMPTY_PART * parts * len(tiles)
    longest = -(-int(tiles.max()) // parts)
    return max(longest, (int(tiles.sum()) + costs) * kv_heads / processors)


def told_processors(rows: int, kv_heads: int, processors: int, is_split: bool) -> int:
    """How many processors XQA is told of, by which it splits rows."""
    return max(processors, PARTS * rows * kv_heads) if is_split else processors


def scratch_bytes(rows: int, kv_heads: int, group: int, dim: int, processors: int) -> int:
    """What programs that share a row hand to each other: of each query 16-bit outputs, and of up to 32
    queries the largest score and the sum of the softmax in float32.
    """
    programs = max(processors, PARTS * rows * kv_heads)
    return programs * (group * dim * 2 + 2 * 32 * 4 * -(-group // 32))
