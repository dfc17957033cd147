"""Inputs of FlashInfer's kernels, from the spans of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.attention.kv_cache import AttentionSpec, Geometry
from gpu_worker.engine.batch.inputs import Span, offsets_of

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class FlashInferStep:
    """A step's inputs that all layers share.

    Attributes:
        slots: int [tokens]
        table: int32 [rows, blocks]; of the rows at the front of the line that decode without a plan.
        lengths: int32 [rows]
    """

    slots: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


class PlanArrays(NamedTuple):
    """What a plan needs of its rows, on the host.

    Attributes:
        query_ends: where each row's tokens begin, and the last one's end.
        block_ends: where each row's blocks begin, and the last one's end.
        last_lengths: tokens in each row's last block.
        lengths: tokens of each row in the cache.
        blocks: of all rows, one after the other.
        longest: the most tokens of a row in this step.
    """

    query_ends: Int32
    block_ends: Int32
    last_lengths: Int32
    lengths: Int32
    blocks: Int32
    longest: int


def plan_arrays(spans: Sequence[Span], block_size: int) -> PlanArrays:
    """What a plan for the rows of these spans needs."""
    counts = np.concatenate([np.full(len(span.lengths), span.count) for span in spans])
    lengths = np.concatenate([span.lengths for span in spans])
    held = -(-lengths // block_size)
    lines = (line for span in spans for line in span.blocks)
    blocks = np.concatenate([line[:count] for line, count in zip(lines, held, strict=True)])
    return arrays_of(counts, lengths, held, blocks, block_size)


def decode_arrays(positions: Int32, table: Int32, block_size: int) -> PlanArrays:
    """The same for rows that decode: positions int32 [rows], table of blocks int32 [rows, blocks]."""
    lengths = positions + 1
    held = -(-lengths // block_size)
    blocks = table[np.arange(table.shape[1]) < held[:, None]]
    return arrays_of(np.ones_like(lengths), lengths, held, blocks, block_size)


def arrays_of(counts: Any, lengths: Any, held: Any, blocks: Any, block_size: int) -> PlanArrays:
    """Of rows: their tokens in this step and in the cache, how many blocks they hold, and which, all int
    [rows] but the last.
    """
    return PlanArrays(
        query_ends=offsets_of(counts).astype(np.int32),
        block_ends=offsets_of(held).astype(np.int32),
        last_lengths=(lengths - (held - 1) * block_size).astype(np.int32),
        lengths=lengths.astype(np.int32),
        blocks=blocks.astype(np.int32),
        longest=int(counts.max()),
    )


def plan_options(geometry: Geometry, spec: AttentionSpec) -> dict[str, Any]:
    """What each plan for a view says, by FlashInfer's names."""
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
