"""Model states: the states of all rows in all mixers of a model, one slot a row. Slot 0 is scratch.

A mixer is called once for each span of a step (row_states.py), with the states of its rows. New states are
written when the whole step is computed: a step that fails can be computed again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_worker.engine.attention.kv_cache import zeros
from gpu_worker.engine.batch.inputs import Inputs, to_device
from gpu_worker.engine.states.row_states import RowStates, StateName, StateSpan, split_states
from gpu_worker.engine.states.scans import padding


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of one row in one mixer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True, eq=False)
class ModelStates:
    """The states of a model; of one without mixers there are none.

    Attributes:
        mixers: in the order of layers, and what each keeps of a row.
        num_slots: slots that rows may have, numbered from 1, in all stages; 0 before they are counted, and in
            a model without states.
        num_snapshots: slots after those, for states at the ends of blocks.
        pool: by mixer and state [slots, ...].
        spans: of the step that is computed.
        packs: rows of different lengths can be computed in one call of each mixer.
        writes_at_once: new states are written by each mixer. Else they wait in `written` until `commit`.
    """

    device: torch.device
    mixers: dict[Any, dict[StateName, StateSpec]] = field(default_factory=dict)
    num_slots: int = 0
    num_snapshots: int = 0
    pool: dict[Any, dict[StateName, torch.Tensor]] = field(default_factory=dict)
    spans: Sequence[StateSpan] = ()
    packs: bool = False
    writes_at_once: bool = False
    written: list[tuple[Any, StateSpan, RowStates]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether rows have states, in this stage of the model or in another one."""
        return self.num_slots > 0

    @property
    def num_kept(self) -> int:
        """Slots of rows and snapshots."""
        return self.num_slots + self.num_snapshots

    @property
    def slot_bytes(self) -> int:
        """What the states of one row take."""
        return sum(spec.num_bytes for specs in self.mixers.values() for spec in specs.values())

    def attach(self) -> None:
        """Set itself on the mixers."""
        for mixer in self.mixers:
            mixer.states = self

    def allocate(self, num_slots: int) -> None:
        """Make the pool anew, with `num_slots` slots beside the scratch slot."""
        self.pool = {}  # the old one is freed first
        for mixer, specs in self.mixers.items():
            self.pool[mixer] = {
                name: zeros((num_slots + 1, *spec.shape), spec.dtype, self.device)
                for name, spec in specs.items()
            }

    @torch.inference_mode()
    def fill(self, slots: Sequence[int], value: float) -> None:
        index = to_device(list(slots), self.device, torch.int64)
        for states in self.pool.values():
            for state in states.values():
                state.index_fill_(0, index, value)

    @torch.inference_mode()
    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the states of slots: (source, target), no slot of which is both."""
        sources, targets = to_device(list(zip(*copies, strict=True)), self.device)
        for states in self.pool.values():
            for state in states.values():
                state[targets] = state[sources]

    def prepare_forward(self, inputs: Inputs) -> None:
        """Take the rows of a step: those that decode come first."""
        self.written = []
        self.writes_at_once = False
        self.spans = split_states(inputs.slices, self.packs, self.device) if self.mixers else []

    def prepare_decode(self, slots: torch.Tensor | None) -> None:
        """Take the rows of a step in which all decode: slots int32 [rows]. A captured step does not fail
        half-way.
        """
        if self.mixers and slots is not None:
            self.written = []
            self.writes_at_once = True
            self.spans = [StateSpan(slots.long(), end=len(slots), decodes=True)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mix(self, mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, tokens, hidden] of the model's dtype → the same shape"""
        if len(self.spans) == 1 and self.spans[0].tokens is None:
            return self.mix_span(mixer, self.spans[0], hidden)
        mixed = torch.empty_like(hidden)
        for span in self.spans:
            span.put(mixed, self.mix_span(mixer, span, hidden))
        return mixed

    def mix_span(self, mixer: Any, span: StateSpan, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, tokens of the step, hidden] of the model's dtype → [1, tokens of the span, hidden]"""
        states = RowStates(self.read(mixer, span), span.counts)
        with padding(span.padded):
            output = mixer.mix_rows(span.take(hidden), states)
        if self.writes_at_once:
            self.write(mixer, span, states)
        elif not span.is_trial:
            self.written.append((mixer, span, states))
        return span.own(output)

    def read(self, mixer: Any, span: StateSpan) -> dict[StateName, torch.Tensor]:
        """→ copies [rows, ...] of any dtype of the states of the rows in a span"""
        if span.begins:
            return {}
        states = {name: state.index_select(0, span.slots) for name, state in self.pool[mixer].items()}
        if span.fresh is not None:
            for state in states.values():
                state.masked_fill_(span.fresh.view(-1, *(1,) * (state.dim() - 1)), 0)
        return states

    def write(self, mixer: Any, span: StateSpan, states: RowStates) -> None:
        for name, state in self.pool[mixer].items():
            state.index_copy_(0, span.slots, states.states[name].to(state.dtype))

    def commit(self) -> None:
        """Write the states of a step that is computed."""
        for mixer, span, states in self.written:
            self.write(mixer, span, states)
        self.written = []
