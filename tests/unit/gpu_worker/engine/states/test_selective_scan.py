"""Selective scans that go on from a first state give what one scan gives."""

import pytest
import torch
from transformers.models.mamba import modeling_mamba

from gpu_worker.engine.states.scans import FirstStates, continuing


@pytest.mark.parametrize("gated", [False, True])
def test_two_scans_are_one(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after 5 of 300 tokens, more than are carried at a time."""
    torch.manual_seed(1)
    rows, channels, size, tokens = 2, 6, 4, 300
    hidden, dt, gate = (torch.randn(rows, channels, tokens) for _ in range(3))
    decays = -torch.rand(channels, size)
    inputs, outputs = (torch.randn(rows, size, tokens) for _ in range(2))
    modeling: object = modeling_mamba
    scan = continuing(getattr(modeling, "mamba_selective_scan"))  # noqa: B009

    def part(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        moving = (tensor[..., begin:end] for tensor in (hidden, dt))
        around = (decays, inputs[..., begin:end], outputs[..., begin:end])
        result: tuple[torch.Tensor, torch.Tensor] = scan(
            *moving,
            *around,
            D=torch.ones(channels),
            z=gate[..., begin:end] if gated else None,
            delta_bias=torch.full((channels,), 0.5),
            delta_softplus=True,
            return_last_state=True,
        )
        return result

    whole, last = part(0, tokens)
    first, state = part(0, 5)
    monkeypatch.setattr(FirstStates, "left", iter([state]))
    rest, end = part(5, tokens)
    torch.testing.assert_close(torch.cat((first, rest), -1), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end, last, rtol=1e-4, atol=1e-4)
