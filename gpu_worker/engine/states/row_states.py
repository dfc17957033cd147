"""Row states: what one mixer keeps of rows beside the KV cache, as transformers' model code asks for it; and
spans, the tokens of a step that one call of a mixer computes.

A mixer is a module that carries states from token to token: a short convolution, a state-space scan, a delta
rule. A convolution keeps its last inputs, a recurrence one state. All rows that decode are one span; chunks
of prompts of like lengths are one, padded at their ends, if the model's mixers heed padding.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from gpu_worker.engine.batch.inputs import offsets_of, to_device
from gpu_worker.engine.batch.row import RowSlice

MAX_PADDING = 32
"""Chunks of a span are padded to the longest of it: by at most a quarter of their length, or by this number
of tokens.
"""
SCAN_TOKENS = 256
"""Scans pad the tokens of a row themselves, to a multiple of about this number."""
SPAN_TOKENS = 2048
"""Of a span of several chunks, at most, as scans pad them: they need memory for each token."""


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Tokens of a step that one call of a mixer computes.

    Attributes:
        slots: int64 [rows]; where the rows' states lie.
        begin, end: of its tokens in the step, if these are one row's, or one of each row.
        decodes: it has one token of each row.
        begins: no row has states yet.
        is_trial: the rows belong to no request, and their states are not kept.
        places: int64 [rows, longest]; of tokens in the step, if rows have several; a row's last is repeated.
        tokens: int64 [tokens of the span]; those of `places` that are no padding.
        kept: int64 [tokens of the span]; where these are among all `places`.
        counts: int64 [rows]; tokens of each row, if some rows are padded.
        padded: bool [rows, longest]; which places are padding, if some are.
        fresh: bool [rows]; which rows have no states yet, if others have.
    """

    slots: torch.Tensor
    begin: int = 0
    end: int = 0
    decodes: bool = False
    begins: bool = False
    is_trial: bool = False
    places: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    padded: torch.Tensor | None = None
    fresh: torch.Tensor | None = None

    def take(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, tokens of the step, hidden] of any dtype → [rows, tokens, hidden]"""
        if self.places is not None:
            return hidden[0, self.places]
        own = hidden[:, self.begin : self.end]
        return own.transpose(0, 1) if self.decodes else own

    def own(self, output: torch.Tensor) -> torch.Tensor:
        """output [rows, tokens, hidden] of any dtype → [1, tokens of the span, hidden], without padding"""
        if self.decodes:
            return output.transpose(0, 1)
        flat = output.flatten(0, 1)
        return (flat if self.kept is None else flat[self.kept])[None]

    def put(self, mixed: torch.Tensor, output: torch.Tensor) -> None:
        """Write the outputs [1, tokens of the span, hidden] of a span to those of the step."""
        if self.tokens is None:
            mixed[:, self.begin : self.end] = output
        else:
            mixed[0, self.tokens] = output[0]


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """A chunk of a prompt, and where its tokens begin in the step."""

    begin: int
    chunk: RowSlice


def split_states(slices: Sequence[RowSlice], packs: bool, device: torch.device) -> list[StateSpan]:
    """The spans of a step of arranged slices. Without `packs` each chunk is one of its own."""
    num_decoding = sum(row_slice.decodes for row_slice in slices)
    begins = offsets_of(row_slice.count for row_slice in slices).tolist()
    chunks = [PlacedChunk(begins[place], slices[place]) for place in range(num_decoding, len(slices))]
    groups = group_chunks(chunks) if packs else ([chunk] for chunk in chunks)
    spans = [make_span(group, device) for group in groups]
    if num_decoding:
        rows = [row_slice.row.slot for row_slice in slices[:num_decoding]]
        slots = to_device(rows, device, torch.int64)
        spans.insert(0, StateSpan(slots, end=num_decoding, decodes=True, is_trial=not any(rows)))
    return spans


def group_chunks(chunks: Iterable[PlacedChunk]) -> Iterator[list[PlacedChunk]]:
    """Yield chunks that are computed together, the longest first."""
    group: list[PlacedChunk] = []
    for chunk in sorted(chunks, key=lambda one: -one.chunk.count):
        if group and not fits(group, chunk):
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def fits(group: Sequence[PlacedChunk], chunk: PlacedChunk) -> bool:
    longest, count = group[0].chunk.count, chunk.chunk.count
    scanned = -(-longest // SCAN_TOKENS) * SCAN_TOKENS
    return longest - count <= max(count // 4, MAX_PADDING) and (len(group) + 1) * scanned <= SPAN_TOKENS


def make_span(group: Sequence[PlacedChunk], device: torch.device) -> StateSpan:
    """A span of chunks, the first of which is the longest."""
    rows = [one.chunk.row.slot for one in group]
    slots = to_device(rows, device, torch.int64)
    is_fresh = [not one.chunk.begin for one in group]
    first, is_trial = group[0], not any(rows)
    if len(group) == 1:
        end = first.begin + first.chunk.count
        return StateSpan(slots, first.begin, end, begins=is_fresh[0], is_trial=is_trial)
    counts = np.array([one.chunk.count for one in group])
    within = np.arange(counts[0])
    is_padding = within >= counts[:, None]
    places = np.minimum(within, counts[:, None] - 1) + np.array([one.begin for one in group])[:, None]
    is_padded = bool(is_padding.any())
    return StateSpan(
        slots,
        begins=all(is_fresh),
        is_trial=is_trial,
        places=to_device(places, device),
        tokens=to_device(places[~is_padding], device),
        kept=to_device(np.flatnonzero(~is_padding), device) if is_padded else None,
        counts=to_device(counts, device) if is_padded else None,
        padded=to_device(is_padding, device) if is_padded else None,
        fresh=to_device(is_fresh, device) if any(is_fresh) and not all(is_fresh) else None,
    )


class StateName(NamedTuple):
    """Which state of a mixer: `conv` or `recurrent`, and which one of several."""

    kind: str
    number: int


CONV, RECURRENT = "conv", "recurrent"


class RowStates:
    """The states of rows in one call of a mixer: has the methods of transformers' `Cache` that mixers call.

    Attributes:
        states: [rows, ...] of the dtypes that the mixer keeps; none of rows that begin.
        counts: int64 [rows]; tokens of each row, where rows are padded at their ends.
    """

    def __init__(
        self, states: dict[StateName, torch.Tensor] | None = None, counts: torch.Tensor | None = None
    ) -> None:
        self.states = states or {}
        self.counts = counts

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """→ [rows, channels, width] of the model's dtype, which mixers may change in place"""
        return self.states.get(StateName(CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """→ [rows, ...] of the dtype that the mixer keeps, which it may change in place"""
        return self.states.get(StateName(RECURRENT, state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **rest: object,
    ) -> torch.Tensor:
        """Take new inputs [rows, channels, tokens] → those before them and them, [rows, channels, tokens and
        at least `conv_kernel_size`], of the model's dtype.
        """
        name = StateName(CONV, state_idx)
        before = self.states.get(name)
        width = before.shape[-1] if before is not None else conv_kernel_size or conv_states.shape[-1]
        if before is not None:
            seen = torch.cat((before, conv_states), -1)
        else:
            missing = max(0, width - conv_states.shape[-1]) if self.counts is None else width
            seen = torch.nn.functional.pad(conv_states, (missing, 0))
        if self.counts is None:
            self.states[name] = seen[..., -width:].contiguous()
        else:
            ends = self.counts + seen.shape[-1] - conv_states.shape[-1]
            self.states[name] = last_inputs(seen, ends, width)
        return seen

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **rest: object
    ) -> torch.Tensor:
        """Take the new state [rows, ...] of the dtype that the mixer keeps."""
        self.states[StateName(RECURRENT, state_idx)] = recurrent_states
        return recurrent_states

    @property
    def layers(self) -> "StateLayers":
        """What model code of transformers before 5.20 asks for."""
        return StateLayers(self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Mixers keep no more than the next token needs."""
        return False


class StateLayers:
    """The states of a call, [rows, ...] of the dtypes that the mixer keeps, by layer as in transformers'
    `Cache.layers`: all numbers name the mixer's own.
    """

    record_past = False

    def __init__(self, states: RowStates) -> None:
        self.states = states

    def __getitem__(self, layer_idx: int) -> "StateLayers":
        return self

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        """→ [rows, channels, width] of the model's dtype, by their numbers"""
        return self.of_kind(CONV)

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        """→ [rows, ...] of the dtype that the mixer keeps, by their numbers"""
        return self.of_kind(RECURRENT)

    def of_kind(self, kind: str) -> dict[int, torch.Tensor]:
        """→ [rows, ...] of any dtype, by their numbers"""
        return {name.number: state for name, state in self.states.states.items() if name.kind == kind}


def last_inputs(seen: torch.Tensor, ends: torch.Tensor, width: int) -> torch.Tensor:
    """seen [rows, channels, tokens] of any dtype → [rows, channels, width], the inputs before `ends` int64
    [rows].
    """
    places = ends[:, None] + torch.arange(-width, 0, device=seen.device)
    return seen.gather(-1, places[:, None].expand(-1, seen.shape[1], -1))
