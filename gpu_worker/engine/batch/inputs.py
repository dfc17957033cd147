"""The parts of a step as tensors: one flat line of tokens, rows that decode first, then the chunks of
prompts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.batch.outcome import Int32
from gpu_worker.engine.batch.rows import RowSlice
from gpu_worker.engine.batch.to_device import to_device

# tokens; rows that decode are padded to the longest of their span, at most twice their own length or this
# much more
MAX_PADDING = 512


@dataclass(frozen=True, slots=True)
class Span:
    """Rows next to each other on the line with the same number of tokens.

    Attributes:
        begin, count: first token on the line, tokens of each row.
        lengths: int64 [rows]; tokens a row has in the cache after this step.
        blocks: int64 [rows, blocks]; padded with scratch block 0.
    """

    begin: int
    count: int
    lengths: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Inputs:
    """
    Attributes:
        ids, positions: int64 [1, tokens].
        slots: int64 [tokens]; where a token's K and V go: block * block_size + offset.
        sampled: int64 [wanted]; tokens on the line whose logits are wanted: to sample from them, or to tell
            of the prompt.
        lengths: int64 [tokens]; of a token's sequence when its K is first computed: the prompt's, or up to
            the token where it is generated.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: npt.NDArray[np.int64]
    sampled: torch.Tensor
    lengths: torch.Tensor
    spans: list[Span]


def build_inputs(
    slices: Sequence[RowSlice], block_size: int, device: torch.device, previous: torch.Tensor | None = None
) -> Inputs:
    """Tensors of arranged parts. `previous`: int64, what the step before sampled, where it is not read yet."""
    ids, positions, counts = (
        token_ids(slices).astype(np.int64),
        positions_of(slices),
        [row_slice.count for row_slice in slices],
    )
    tables = [row_slice.row.blocks for row_slice in slices]
    begins = np.repeat(offsets_of(map(len, tables))[:-1], counts)
    prompt_lengths = np.repeat([row_slice.row.first_length for row_slice in slices], counts)
    return Inputs(
        ids=fill_pending_ids(to_device(ids, device), previous)[None],
        positions=to_device(positions[None], device),
        slots=np.concatenate(tables).astype(np.int64)[begins + positions // block_size] * block_size
        + positions % block_size,
        sampled=to_device(logit_positions(slices), device),
        lengths=to_device(np.maximum(positions + 1, prompt_lengths), device),
        spans=split_spans(slices, block_size),
    )


def logit_positions(slices: Sequence[RowSlice]) -> npt.NDArray[np.int64]:
    """Of each part its last tokens."""
    ends = np.cumsum([row_slice.count for row_slice in slices])
    if not any(row_slice.num_scored for row_slice in slices):
        return np.asarray(ends[[row_slice.samples for row_slice in slices]] - 1)
    return np.concatenate(
        [np.arange(end - row_slice.num_logits, end) for end, row_slice in zip(ends, slices, strict=True)]
    )


def token_ids(slices: Sequence[RowSlice]) -> Int32:
    """Of arranged parts, int32 [tokens]."""
    num_decoding = sum(row_slice.decodes for row_slice in slices)
    prompts = (row_slice.row.ids[row_slice.begin : row_slice.kv_len] for row_slice in slices[num_decoding:])
    return np.concatenate([np.array(last_ids(slices[:num_decoding]), np.int32), *prompts])


def positions_of(slices: Sequence[RowSlice]) -> npt.NDArray[np.int64]:
    """int64 [tokens]"""
    ends = np.cumsum([row_slice.count for row_slice in slices])
    return np.arange(ends[-1]) + np.repeat(
        [row_slice.kv_len for row_slice in slices] - ends, [row_slice.count for row_slice in slices]
    )


def offsets_of(counts: Iterable[int]) -> npt.NDArray[np.int64]:
    """Where each of so many begins, and the last one ends, when they stand next to each other."""
    return np.cumsum([0, *counts])


def last_ids(slices: Sequence[RowSlice]) -> list[int]:
    """Of rows that decode. A token that the host does not know yet is -1 less its place among the samples of
    the step before.
    """
    return [
        row_slice.row.last_id if row_slice.source_place is None else -1 - row_slice.source_place
        for row_slice in slices
    ]


def fill_pending_ids(ids: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    """int64 [tokens], with what the step before sampled where the host does not know it."""
    return (
        ids
        if previous is None or not len(previous)
        else torch.where(ids < 0, previous[(-1 - ids).clamp_(min=0)], ids)
    )


def split_spans(slices: Sequence[RowSlice], block_size: int) -> list[Span]:
    result: list[Span] = []
    group: list[RowSlice] = []
    begin = 0
    for row_slice in slices:
        if group and not fits_span(group[0], row_slice):
            result.append(make_span(group, begin, block_size))
            begin, group = begin + sum(member.count for member in group), []
        group.append(row_slice)
    return [*result, make_span(group, begin, block_size)]


def fits_span(longest: RowSlice, row_slice: RowSlice) -> bool:
    return (
        longest.decodes
        and row_slice.decodes
        and longest.kv_len <= max(2 * row_slice.kv_len, row_slice.kv_len + MAX_PADDING)
    )


def make_span(slices: Sequence[RowSlice], begin: int, block_size: int) -> Span:
    lengths = np.array([row_slice.kv_len for row_slice in slices])
    held = -(-lengths // block_size)
    blocks = np.zeros((len(slices), int(held.max())), np.int64)
    tables = [row_slice.row.blocks[:count] for row_slice, count in zip(slices, held.tolist(), strict=True)]
    blocks[np.arange(blocks.shape[1]) < held[:, None]] = np.concatenate(tables)
    return Span(begin, slices[0].count, lengths, blocks)
