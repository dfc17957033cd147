"""Inputs of a step as tensors: the tokens of all slices in one flat sequence, rows that decode first, then
chunks of prompts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.batch.row import StepSlices
from gpu_worker.engine.batch.step_result import Int32, Int64

Values = npt.NDArray[Any] | list[Any] | torch.Tensor


def pinned(array: Values, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy an array [...] of any dtype to a host tensor [...] of `dtype`, pinned for CUDA.

    A copy from pinned memory is only queued, and torch keeps the memory until it is done. A copy of other
    memory may wait until the device's stream is empty.
    """
    tensor = torch.as_tensor(
        np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array, dtype=dtype
    )
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(array: Values, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy an array [...] of any dtype to the device, without waiting for it → tensor [...] of `dtype`."""
    return pinned(array, device, dtype).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class RowTable:
    """The rows of a step in the order of its tokens, and their blocks, one row's after another's: what each
    backend of attention reads.

    Attributes:
        num_decoding: the first rows decode, the longest first; the others are chunks of prompts.
        counts: int64 [rows]; tokens of each in this step.
        lengths: int64 [rows]; tokens of each in the cache after it.
        positions: int64 [tokens]; in their sequences.
        slots: int64 [tokens]; where K and V are written: block * block_size + offset.
        begins: int64 [rows + 1]; where each row's tokens begin in the step.
        starts: int64 [rows + 1]; where each row's blocks begin in `blocks`.
        blocks: int32 [blocks]
        pictures: of a chunk, (position of the first token, end) of pictures whose tokens all see each other.
        encoded: int64 [rows]; first tokens of each that an encoder computes, in place of the decoder; None
            without one.
    """

    num_decoding: int
    counts: Int64
    lengths: Int64
    positions: Int64
    slots: Int64
    begins: Int64
    starts: Int64
    blocks: Int32
    pictures: Mapping[int, Sequence[tuple[int, int]]]
    encoded: Int64 | None = None

    @classmethod
    def of(cls, slices: StepSlices, block_size: int) -> "RowTable":
        """The rows of arranged slices."""
        counts = np.array([one.count for one in slices], np.int64)
        lengths = np.array([one.kv_len for one in slices], np.int64)
        held, positions = -(-lengths // block_size), positions_of(slices)
        begins, starts = offsets_of(counts), offsets_of(held)
        tables = (one.row.blocks[:count] for one, count in zip(slices, held.tolist(), strict=True))
        blocks = np.concatenate((np.zeros(0, np.int32), *tables))
        own = blocks[np.repeat(starts[:-1], counts) + positions // block_size].astype(np.int64)
        slots = own * block_size + positions % block_size
        pictures = {
            number: one.row.pictures.seen_as_one(one.begin, one.kv_len)
            for number, one in enumerate(slices)
            if one.row.pictures and not one.decodes
        }
        num_decoding = sum(one.decodes for one in slices)
        return cls(num_decoding, counts, lengths, positions, slots, begins, starts, blocks, pictures)

    def owners(self, first: int, end: int) -> Int64:
        """The rows int64 [tokens] of the tokens of rows `first` to `end`."""
        return np.repeat(np.arange(first, end), self.counts[first:end])

    def blocks_of(self, rows: Int64, first: Int64 | int, width: int) -> Int32:
        """Blocks of rows int64 [n], each `width` from its block `first` int64 [n] on → int32 [n, width];
        beyond a row's last one scratch block 0.
        """
        places = (self.starts[rows] + first)[:, None] + np.arange(width)
        found = self.blocks[np.minimum(places, len(self.blocks) - 1)]
        return np.where(places < self.starts[rows + 1][:, None], found, 0)


@dataclass(frozen=True, slots=True)
class AdaptedTokens:
    """Which tokens of a step have an adapter.

    Attributes:
        slots: int32 [tokens]; where the weights of a token's adapter lie; -1: it has none.
        order: int32 [tokens with an adapter]; their places, those of one slot next to each other.
        starts: int32 [slots up to the last one with tokens + 1]; where the tokens of each begin in `order`.
    """

    slots: Int32
    order: Int32
    starts: Int32

    @classmethod
    def of(cls, slots: Int32) -> "AdaptedTokens":
        """slots int32 [tokens]"""
        by_slot = np.argsort(slots, kind="stable")
        order: Int32 = by_slot[np.count_nonzero(slots < 0) :].astype(np.int32)
        starts = np.searchsorted(slots[order], np.arange(slots.max(initial=-1) + 2))
        return cls(slots, order, starts.astype(np.int32))


AdaptedStep = tuple[AdaptedTokens, AdaptedTokens]
"""A step in which some tokens have an adapter: all its tokens, and those whose logits are needed."""
NO_TOKENS: AdaptedStep = (AdaptedTokens.of(np.zeros(0, np.int32)),) * 2
"""Of a step that is captured or compiled as one with adapters."""
PlacedEmbeddings = tuple[torch.Tensor, torch.Tensor]
"""The tokens int64 [count] of a step that get embeddings of a picture, and these [count, hidden]."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one step.

    Attributes:
        ids, positions: int64 [1, tokens].
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
    sampled: torch.Tensor
    rows: RowTable
    slices: StepSlices
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
    slices: StepSlices, block_size: int, device: torch.device, previous: torch.Tensor | None = None
) -> Inputs:
    """Build the inputs of arranged slices. `previous` int64 [rows]: ids that the step in flight samples."""
    ids, rows = token_ids(slices).astype(np.int64), RowTable.of(slices, block_size)
    axes = axes_of(slices, rows.positions) if have_axes(slices) else None
    return Inputs(
        ids=fill_pending_ids(to_device(ids, device), previous)[None],
        positions=to_device(rows.positions[None], device),
        sampled=to_device(logit_positions(slices), device),
        rows=rows,
        slices=slices,
        adapters=adapted_step(slices),
        pictures=[*placed_embeddings(slices, device)] if slices.has_prompts else (),
        axes=None if axes is None else to_device(axes, device),
    )


def adapted_step(slices: StepSlices) -> AdaptedStep | None:
    """Which tokens of arranged slices have an adapter; None if none has."""
    if all(row_slice.row.adapter is None for row_slice in slices.others):
        return None
    of_rows = [row_slice.row.adapter.slot if row_slice.row.adapter else -1 for row_slice in slices]
    slots = np.repeat(np.array(of_rows, np.int32), [row_slice.count for row_slice in slices])
    return AdaptedTokens.of(slots), AdaptedTokens.of(slots[logit_positions(slices)])


def have_axes(slices: StepSlices) -> bool:
    """Whether tokens of some rows have positions in time, height and width."""
    return any(one.row.pictures and one.row.pictures.has_axes for one in slices.others)


def axes_of(slices: StepSlices, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
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


def rotary_positions(slices: StepSlices, positions: Int32) -> Int32:
    """Return what turns queries and keys of rows that decode, int32 [tokens]. positions int32 [tokens]"""
    if not have_axes(slices):
        return positions
    shifts = [one.row.pictures.shift if one.row.pictures else 0 for one in slices]
    return positions + np.repeat(np.array(shifts, np.int32), [one.count for one in slices])


def placed_embeddings(slices: StepSlices, device: torch.device) -> Iterator[PlacedEmbeddings]:
    """Yield the embeddings of pictures in chunks of prompts. A stage that has no embedding needs none."""
    for row_slice, begin in zip(slices, offsets_of(one.count for one in slices), strict=False):
        if not row_slice.row.pictures or row_slice.decodes:
            continue
        for places, picture, first in row_slice.row.pictures.embedded_in(row_slice.begin, row_slice.kv_len):
            if picture.embeddings is not None:
                values = picture.embeddings[first : first + len(places)]
                yield to_device(places + begin, device), values


def logit_positions(slices: StepSlices) -> npt.NDArray[np.int64]:
    """Return the places int64 [num_logits] of the tokens whose logits are needed, the last ones of each
    slice.
    """
    ends = len(slices.rows) + np.cumsum([one.count for one in slices.others], dtype=np.int64)
    places = (np.arange(end - one.num_logits, end) for end, one in zip(ends, slices.others, strict=True))
    return np.concatenate((np.arange(len(slices.rows)), *places))


def token_ids(slices: StepSlices) -> Int32:
    """Return the ids of arranged slices, int32 [tokens]: of rows that decode the last id of each, then its
    proposals. An id that the host does not know yet is -1 minus its place among the samples of the step in
    flight.
    """
    known = list[Int32 | list[int]]()
    for one in slices.others:
        source = one.row.last_id if one.source_place is None else -1 - one.source_place
        known.append([source, *one.proposed] if one.decodes else one.row.ids[one.begin : one.kv_len])
    return np.concatenate([slices.ids, *known], dtype=np.int32, casting="unsafe")


def positions_of(slices: StepSlices) -> npt.NDArray[np.int64]:
    """Return the positions of tokens in their sequences, int64 [tokens]."""
    return np.concatenate([slices.begins, *(np.arange(one.begin, one.kv_len) for one in slices.others)])


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
