"""Inputs of FlashInfer's kernels, from the spans of a step; and whether its rows are split into parts.

By itself XQA splits the rows of a step as far as processors are idle, whatever the rows' lengths: a long row
beside many short ones is one program for each K head, and all other rows wait for it; and the parts of few
short rows are empty, but must be merged. It is told another number of processors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.attention.kv_cache import AttentionSpec, Geometry
from gpu_worker.engine.batch.inputs import Span, offsets_of, pinned, to_device
from gpu_worker.engine.batch.step_result import Int32

OWN_PARTS = 4
"""Most parts of a row in other steps: on an H200, 16 took a row of 500 tokens twice as long as 2."""
SPLIT_PARTS = 8
"""Least parts of a row in a step that is split."""
TILE_KEYS = 256
"""Keys that a program of XQA reads at once."""
EMPTY_PART = 0.5
"""The cost of each part, in tiles, even if it is empty: results of parts are merged."""
MERGED_PARTS = 3.0
"""The time of merging more than OWN_PARTS, in tiles."""
MAX_SPLIT_SHARE = 0.75
"""Rows are split if a step is expected to take at most this share of its time without."""


def splits_rows(lengths: npt.NDArray[np.integer], kv_heads: int, processors: int) -> bool:
    """Whether a step takes less time with its rows in more parts: lengths int [rows] in the cache, of each
    rank's K heads.
    """
    tiles = -(-lengths // TILE_KEYS)
    own, split = (
        expected_tiles(
            tiles, parts_of_rows(len(lengths), kv_heads, processors, is_split), kv_heads, processors
        )
        for is_split in (False, True)
    )
    return split <= MAX_SPLIT_SHARE * own


def parts_of_rows(rows: int, kv_heads: int, processors: int, is_split: bool) -> int:
    """Into how many parts each row is split, at most: XQA makes no more than a row's table has tiles."""
    idle = processors // (rows * kv_heads)
    return max(SPLIT_PARTS, idle) if is_split else max(1, min(OWN_PARTS, idle))


def expected_tiles(tiles: npt.NDArray[np.integer], parts: int, kv_heads: int, processors: int) -> float:
    """The time of a step in tiles: of its longest program, or of all programs on all processors. tiles int
    [rows]
    """
    costs = 0.0 if parts == 1 else EMPTY_PART * parts * len(tiles)
    merged = MERGED_PARTS if parts > OWN_PARTS else 0.0
    longest = -(-int(tiles.max()) // parts)
    return max(longest, (int(tiles.sum()) + costs) * kv_heads / processors) + merged


def told_processors(rows: int, kv_heads: int, processors: int, is_split: bool) -> int:
    """The number of processors that XQA is told: it splits rows by it."""
    return parts_of_rows(rows, kv_heads, processors, is_split) * rows * kv_heads


def scratch_bytes(rows: int, kv_heads: int, group: int, dim: int, processors: int) -> int:
    """What programs that share a row hand to each other: of each query 16-bit outputs, and of up to 32
    queries the largest score and the sum of the softmax in float32.
    """
    programs = max(processors, SPLIT_PARTS * rows * kv_heads)
    return programs * (group * dim * 2 + 2 * 32 * 4 * -(-group // 32))


@dataclass(frozen=True, slots=True)
class FlashInferStep:
    """A step's inputs that all layers share.

    Attributes:
        slots: int [tokens]
        table: int32 [rows, blocks]; of the first rows of the step, which decode without a plan.
        lengths: int32 [rows]
        is_split: rows are split into SPLIT_PARTS.
    """

    slots: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    is_split: bool = False


class PlanInputs(NamedTuple):
    """What a plan needs of its rows: int32 tensors, `blocks` on the device, the others pinned on the host,
    since FlashInfer would copy other tensors and wait for that.

    Attributes:
        query_ends: where each row's tokens begin, and the last one's end.
        block_ends: where each row's blocks begin, and the last one's end.
        last_lengths: tokens in each row's last block.
        lengths: tokens of each row in the cache.
        blocks: of all rows, one after the other.
        longest: the most tokens of a row in this step.
    """

    query_ends: torch.Tensor
    block_ends: torch.Tensor
    last_lengths: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor
    longest: int


def plan_inputs(spans: Sequence[Span], block_size: int, device: torch.device) -> PlanInputs:
    """What a plan for the rows of these spans needs."""
    counts = np.concatenate([np.full(len(span.lengths), span.count) for span in spans])
    lengths = np.concatenate([span.lengths for span in spans])
    held = -(-lengths // block_size)
    lines = (line for span in spans for line in span.blocks)
    blocks = np.concatenate([line[:count] for line, count in zip(lines, held, strict=True)])
    return inputs_of(counts, lengths, held, blocks, block_size, device)


def decode_inputs(positions: Int32, table: Int32, block_size: int, device: torch.device) -> PlanInputs:
    """What a plan for rows that decode needs: positions int32 [rows], blocks int32 [rows, blocks]."""
    lengths = positions + 1
    held = -(-lengths // block_size)
    blocks = table[np.arange(table.shape[1]) < held[:, None]]
    return inputs_of(np.ones_like(lengths), lengths, held, blocks, block_size, device)


def inputs_of(
    counts: Any, lengths: Any, held: Any, blocks: Any, block_size: int, device: torch.device
) -> PlanInputs:
    """What a plan needs, from the rows' tokens in this step and in the cache, how many blocks they hold, and
    which, all int [rows] but the last.
    """
    query_ends, block_ends, last_lengths, lengths = (
        pinned(values, device, torch.int32)
        for values in (offsets_of(counts), offsets_of(held), lengths - (held - 1) * block_size, lengths)
    )
    blocks = to_device(blocks, device, torch.int32)
    return PlanInputs(query_ends, block_ends, last_lengths, lengths, blocks, int(counts.max()))


def empty_inputs(rows: int, num_blocks: int, device: torch.device) -> PlanInputs:
    """Room on the device for the inputs of `rows` rows that decode and have `num_blocks` blocks together."""
    query_ends, block_ends, last_lengths, lengths, blocks = (
        torch.zeros(size, dtype=torch.int32, device=device)
        for size in (rows + 1, rows + 1, rows, rows, num_blocks)
    )
    return PlanInputs(query_ends, block_ends, last_lengths, lengths, blocks, 1)


def first_rows(inputs: PlanInputs, rows: int) -> PlanInputs:
    """Views of them, of fewer rows."""
    return inputs._replace(
        query_ends=inputs.query_ends[: rows + 1],
        block_ends=inputs.block_ends[: rows + 1],
        last_lengths=inputs.last_lengths[:rows],
        lengths=inputs.lengths[:rows],
    )


def plan_options(geometry: Geometry, spec: AttentionSpec) -> dict[str, Any]:
    """The options of each plan for a view, by FlashInfer's names."""
    return {
        "num_qo_heads": spec.kv_heads * spec.group,
        "num_kv_heads": spec.kv_heads,
        "page_size": geometry.block_size,
        "sm_scale": spec.scaling,
        "window_left": window_left(spec),
        "logits_soft_cap": spec.softcap,
        "q_data_type": geometry.dtype,
        "kv_data_type": geometry.kv_dtype,
    }


def window_left(spec: AttentionSpec) -> int:
    """Keys that a query sees before its own, as FlashInfer counts; -1 is all."""
    return -1 if spec.window is None else spec.window - 1


def table_of(spans: Sequence[Span]) -> tuple[Int32, Int32]:
    """→ blocks int32 [rows, blocks], lengths int32 [rows]"""
    width = max((span.blocks.shape[1] for span in spans), default=1)
    tables = [np.pad(span.blocks, ((0, 0), (0, width - span.blocks.shape[1]))) for span in spans]
    lengths = [span.lengths for span in spans]
    table = np.concatenate([np.zeros((0, width)), *tables])
    return table.astype(np.int32), np.concatenate([np.zeros(0), *lengths]).astype(np.int32)
