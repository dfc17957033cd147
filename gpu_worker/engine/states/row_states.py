"""Row states: what one mixer keeps of rows beside the KV cache, as transformers' model code asks for it.

A mixer is a module that carries states from token to token: a short convolution, a state-space scan, a delta
rule. A convolution keeps its last inputs, a recurrence one state.
"""

from typing import NamedTuple

import torch


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
