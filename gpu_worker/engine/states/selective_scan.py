"""Selective scans that go on: Mamba 1's scan in transformers begins with zeros, so a chunk of a prompt would
forget the chunks before it.

The scan is linear in its state: what a first state adds to each output is computed apart, with the decay up
to that token. So this holds for torch's scan and for mamba-ssm's kernel.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_worker.engine.states.row_states import RECURRENT, RowStates, StateName

SCAN = "mamba_selective_scan"
FIRST = StateName(RECURRENT, 0)
TOKENS = 128
"""How many are computed at a time: each needs memory as a whole state does."""


class FirstStates:
    """The states with which the next scans of the mixer that runs begin, [rows, channels, size] of any dtype.
    Zamba scans its heads one by one, the others have one scan. Without any left scans begin with zeros.
    """

    left: Iterator[torch.Tensor] = iter(())


def continue_scans(mixer: Any) -> None:
    """Give a mixer of Mamba 1 a scan that goes on from the states of its rows."""
    modeling = sys.modules[type(mixer).__module__]
    scan = getattr(modeling, SCAN, None)
    if scan is None:
        return
    if not hasattr(scan, "continues"):
        setattr(modeling, SCAN, continuing(scan))
    mixer.__class__ = continuing_class(type(mixer))  # type: ignore[arg-type]


@functools.cache
def continuing_class(own: type[Any]) -> type[Any]:
    """A mixer's class whose scans begin with the rows' states."""

    def mix_rows(self: Any, hidden: torch.Tensor, states: RowStates) -> torch.Tensor:
        """hidden [rows, tokens, hidden] of the model's dtype → the same shape"""
        first = states.states.get(FIRST)
        if first is not None:
            FirstStates.left = iter(first.unbind(1) if first.dim() == 4 else [first])
        try:
            return own.mix_rows(self, hidden, states)  # type: ignore[no-any-return]
        finally:
            FirstStates.left = iter(())

    return type(own.__name__, (own,), {"mix_rows": mix_rows, "__module__": own.__module__})


def continuing(scan: Callable[..., Any]) -> Callable[..., Any]:
    """A scan that begins with the next of `FirstStates`."""

    @functools.wraps(scan)
    def scan_on(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **options: Any,
    ) -> Any:
        """hidden_states, dt and z [rows, channels, tokens], A [channels, size], B and C [rows, size, tokens],
        D and delta_bias [channels] → outputs [rows, channels, tokens], with `return_last_state` the last
        state [rows, channels, size], too.
        """
        result = scan(
            hidden_states,
            dt,
            A,
            B,
            C,
            D=D,
            z=z,
            delta_bias=delta_bias,
            delta_softplus=delta_softplus,
            **options,
        )
        first = next(FirstStates.left, None)
        if first is None:
            return result
        steps = dt.float() if delta_bias is None else dt.float() + delta_bias.float()[:, None]
        steps = torch.nn.functional.softplus(steps) if delta_softplus else steps
        added, left = carried(first.float(), steps.cumsum(-1), A.float(), C.float())
        added = added if z is None else added * torch.nn.functional.silu(z.float())
        outputs, last = result if isinstance(result, tuple) else (result, None)
        outputs = outputs + added.to(outputs.dtype)
        return outputs if last is None else (outputs, last + left.to(last.dtype))

    scan_on.continues = True  # type: ignore[attr-defined]
    return scan_on


def carried(
    first: torch.Tensor, steps: torch.Tensor, A: torch.Tensor, C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a first state adds to each output, and what is left of it after the last token: [rows, channels,
    tokens] and [rows, channels, size]. All float32: first [rows, channels, size], steps [rows, channels,
    tokens] summed up to each token, A [channels, size], C [rows, size, tokens].
    """
    added = []
    for part, outputs in zip(torch.split(steps, TOKENS, -1), torch.split(C, TOKENS, -1), strict=True):
        left = torch.exp(part[..., None] * A[:, None]) * first[:, :, None]
        added.append(torch.einsum("bcts,bst->bct", left, outputs))
    return torch.cat(added, -1), left[:, :, -1]
