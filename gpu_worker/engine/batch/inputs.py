"""Inputs of a step as tensors: the tokens of all slices in one flat sequence, rows that decode first, then
chunks of prompts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.batch.adapters import AdaptedStep
from gpu_worker.engine.batch.row import RowSlice, step_of
from gpu_worker.engine.batch.step_result import Int32

MAX_PADDING = 512
"""Rows that decode are padded to the longest of their span: at most to twice their own length, or by this
number of tokens.
"""


def pinned(
    array: npt.NDArray[Any] | list[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy an array [...] of any dtype to a host tensor [...] of `dtype`, pinned for CUDA.

    A copy from pinned memory is only queued, and torch keeps the memory until it is done. A copy of other
    memory may wait until the device's stream is empty.
    """
    tensor = torch.as_tensor(
        np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array, dtype=dtype
    )
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(
    array: npt.NDArray[Any] | list[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy an array [...] of any dtype to the device, without waiting for it → tensor [...] of `dtype`."""
    return pinned(array, device, dtype).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring rows with the same number of tokens.

    Attributes:
        begin: place of the first token in the step.
        count: tokens of each row.
        lengths: int64 [rows]; tokens that a row has in the cache after this step. A proposal counts as a row
            here, which sees the tokens before it.
        blocks: int64 [rows, blocks]; padded with scratch block 0.
        shares: int64 [slices]; how many neighbouring rows a slice is: one, and its proposals.
        pictures: (position of the first token, end) of those whose tokens all see each other.
        encoded: int64 [rows]; first tokens of each row that an encoder computes, in place of the decoder;
            None without one.
    """

    begin: int
    count: int
    lengths: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    shares: npt.NDArray[np.int64]
    pictures: Sequence[tuple[int, int]] = ()
    encoded: npt.NDArray[np.int64] | None = None


PlacedEmbeddings = tuple[torch.Tensor, torch.Tensor]
"""The tokens int64 [count] of a step that get embeddings of a picture, and these [count, hidden]."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one step.

    Attributes:
        ids, positions: int64 [1, tokens].
        slots: int64 [tokens]; where a token's K and V are written: block * block_size + offset.
        sampled: int64 [num_logits]; places of the tokens whose logits are needed, for samples or prompt
            log-probabilities.
        slices: what the step computes of its rows, in the order of its tokens.
        adapters: the tokens that have a LoRA adapter; None if none has.
        pictures: what takes the place of the embeddings of placeholders.
        axes: int64 [3, tokens]; positions in time, height and width, where rows have pictures and the model
            such positions.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: npt.NDArray[np.int64]
    sampled: torch.Tensor
    spans: list[Span]
    slices: Sequence[RowSlice] = ()
    adapters: AdaptedStep | None = None
    pictures: Sequence[PlacedEmbeddings] = ()
    axes: torch.Tensor | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [tokens]; the length of a token's sequence when the token's K is first computed: of the
        prompt, or up to the token if it is generated.
        """
        counts = [one.count for one in self.slices]
        prompts = np.repeat([one.row.first_length for one in self.slices], counts)
        return torch.maximum(self.positions[0] + 1, to_device(prompts, self.positions.device))


def build_inputs(
    slices: Sequence[RowSlice], block_size: int, device: torch.device, previous: torch.Tensor | None = None
) -> Inputs:
    """Build the inputs of arranged slices. `previous` int64 [rows]: ids that the step in flight samples."""
    ids, positions = token_ids(slices).astype(np.int64), positions_of(slices)
    counts = [row_slice.count for row_slice in slices]
    tables = [row_slice.row.blocks for row_slice in slices]
    begins = np.repeat(offsets_of(map(len, tables))[:-1], counts)
    axes = axes_of(slices, positions) if have_axes(slices) else None
    return Inputs(
        ids=fill_pending_ids(to_device(ids, device), previous)[None],
        positions=to_device(positions[None], device),
        slots=np.concatenate(tables).astype(np.int64)[begins + positions // block_size] * block_size
        + positions % block_size,
        sampled=to_device(logit_positions(slices), device),
        spans=split_spans(slices, block_size),
        slices=slices,
        adapters=adapted_step(slices),
        pictures=[*placed_embeddings(slices, device)] if step_of(slices).has_prompts else (),
        axes=None if axes is None else to_device(axes, device),
    )


def adapted_step(slices: Sequence[RowSlice]) -> AdaptedStep | None:
    """Which tokens of arranged slices have an adapter; None if none has."""
    if all(row_slice.row.adapter is None for row_slice in step_of(slices).others):
        return None
    slots = [row_slice.row.adapter.slot if row_slice.row.adapter else -1 for row_slice in slices]
    counts = [row_slice.count for row_slice in slices]
    return AdaptedStep.of(np.repeat(np.array(slots, np.int32), counts), logit_positions(slices))


def have_axes(slices: Sequence[RowSlice]) -> bool:
    """Whether tokens of some rows have positions in time, height and width."""
    return any(one.row.pictures and one.row.pictures.has_axes for one in step_of(slices).others)


def axes_of(slices: Sequence[RowSlice], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return positions in time, height and width, int64 [3, tokens]. positions int64 [tokens]"""
    axes = np.tile(positions, (3, 1))
    ends = offsets_of(one.count for one in slices)
    for row_slice, begin, end in zip(slices, ends, ends[1:], strict=False):
        if pictures := row_slice.row.pictures:
            own = slice(int(begin), int(end))
            axes[:, own] = (
                positions[own] + pictures.shift if row_slice.decodes else pictures.positions(positions[own])
            )
    return axes


def rotary_positions(slices: Sequence[RowSlice], positions: Int32) -> Int32:
    """Return what turns queries and keys of rows that decode, int32 [tokens]. positions int32 [tokens]"""
    if not have_axes(slices):
        return positions
    shifts = [one.row.pictures.shift if one.row.pictures else 0 for one in slices]
    return positions + np.repeat(np.array(shifts, np.int32), [one.count for one in slices])


def placed_embeddings(slices: Sequence[RowSlice], device: torch.device) -> Iterator[PlacedEmbeddings]:
    """Yield the embeddings of pictures in chunks of prompts. A stage that has no embedding needs none."""
    for row_slice, begin in zip(slices, offsets_of(one.count for one in slices), strict=False):
        if not row_slice.row.pictures or row_slice.decodes:
            continue
        for places, picture, first in row_slice.row.pictures.embedded_in(row_slice.begin, row_slice.kv_len):
            if picture.embeddings is not None:
                values = picture.embeddings[first : first + len(places)]
                yield to_device(places + begin, device), values


def logit_positions(slices: Sequence[RowSlice]) -> npt.NDArray[np.int64]:
    """Return the places int64 [num_logits] of the tokens whose logits are needed, the last ones of each
    slice.
    """
    step = step_of(slices)
    ends = len(step.rows) + np.cumsum([one.count for one in step.others], dtype=np.int64)
    places = (np.arange(end - one.num_logits, end) for end, one in zip(ends, step.others, strict=True))
    return np.concatenate((np.arange(len(step.rows)), *places))


def token_ids(slices: Sequence[RowSlice]) -> Int32:
    """Return the ids of arranged slices, int32 [tokens]: of rows that decode the last id of each, then its
    proposals. An id that the host does not know yet is -1 minus its place among the samples of the step in
    flight.
    """
    step, known = step_of(slices), list[Int32 | list[int]]()
    for one in step.others:
        source = one.row.last_id if one.source_place is None else -1 - one.source_place
        known.append([source, *one.proposed] if one.decodes else one.row.ids[one.begin : one.kv_len])
    return np.concatenate([step.ids, *known], dtype=np.int32, casting="unsafe")


def positions_of(slices: Sequence[RowSlice]) -> npt.NDArray[np.int64]:
    """Return the positions of tokens in their sequences, int64 [tokens]."""
    step = step_of(slices)
    return np.concatenate([step.begins, *(np.arange(one.begin, one.kv_len) for one in step.others)])


def offsets_of(counts: Iterable[int]) -> npt.NDArray[np.int64]:
    """Return where each of `counts` neighbours begins, and where the last ends, int64 [len(counts) + 1]."""
    return np.cumsum([0, *counts])


def fill_pending_ids(ids: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    """Replace the ids int64 [tokens] below 0 by those of `previous` int64 [rows] → int64 [tokens]."""
    return (
        ids
        if previous is None or not len(previous)
        else torch.where(ids < 0, previous[(-1 - ids).clamp_(min=0)], ids)
    )


def split_spans(slices: Sequence[RowSlice], block_size: int) -> list[Span]:
    """The rows that decode, the longest first, in groups of about one length; then each chunk of a prompt."""
    begins = offsets_of(one.count for one in slices).tolist()
    num_decoding = sum(one.decodes for one in slices)
    kv_lens = np.array([one.kv_len for one in slices])
    result, first = list[Span](), 0
    while first < len(slices):
        longest, end = kv_lens[first], first + 1
        if first < num_decoding:
            own = kv_lens[first:num_decoding]
            differs = (own > longest) | (own < min(-(-longest // 2), longest - MAX_PADDING))
            end = first + int(differs.argmax()) if differs.any() else num_decoding
        result.append(make_span(slices[first:end], begins[first], block_size))
        first = end
    return result


def make_span(slices: Sequence[RowSlice], begin: int, block_size: int) -> Span:
    shares = np.array([1 + len(row_slice.proposed) for row_slice in slices], np.int64)
    kv_lens = np.array([row_slice.kv_len for row_slice in slices], np.int64)
    lengths = np.repeat(kv_lens - np.cumsum(shares), shares) + np.arange(1, shares.sum() + 1)
    held = -(-lengths // block_size)
    blocks = np.zeros((len(lengths), int(held.max())), np.int64)
    rows = np.repeat(np.arange(len(slices)), shares).tolist()
    tables = [slices[row].row.blocks[:count] for row, count in zip(rows, held.tolist(), strict=True)]
    blocks[np.arange(blocks.shape[1]) < held[:, None]] = np.concatenate(tables)
    first = slices[0]
    own = None if first.decodes else first.row.pictures
    pictures = own.seen_as_one(first.begin, first.kv_len) if own else ()
    return Span(begin, first.count - len(first.proposed), lengths, blocks, shares, pictures)
