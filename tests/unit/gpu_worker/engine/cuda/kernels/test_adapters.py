"""The Triton kernels of LoRA adapters in Triton's interpreter, against torch."""

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

from gpu_worker.engine.batch.adapters import AdaptedTokens
from gpu_worker.engine.cuda.adapters import DeviceTokens
from tests.support.adapters import fake_kernels
from tests.support.engine.triton_interpreter import forget_kernels, interpret_kernels, kernels

SLOTS, MAX_RANK = 4, 24
RANKS = torch.tensor([4, 24, 0, 17], dtype=torch.int32)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    interpret_kernels(monkeypatch)
    yield kernels("adapters")
    forget_kernels()


@pytest.mark.parametrize("num_tokens", [1, 7, 45])
def test_what_adapters_add_equals_what_torch_computes(num_tokens: int, module: ModuleType) -> None:
    """Rows and outputs that lie apart, as parts of a merged product do; slots without rows, and of rank 0."""
    torch.manual_seed(num_tokens)
    slots = np.random.default_rng(0).integers(-1, SLOTS, num_tokens).astype(np.int32)
    tokens = DeviceTokens(64, SLOTS, torch.device("cpu"))
    tokens.set(AdaptedTokens.of(slots), by_kernels=True)
    inputs, outputs = 150, 70
    rows = torch.randn(num_tokens, inputs)
    down, up = torch.randn(SLOTS, MAX_RANK, inputs), torch.randn(SLOTS, outputs, MAX_RANK)
    merged = torch.randn(num_tokens, 2 * outputs)
    found, expected = merged.clone(), merged.clone()
    for output, functions in ((found, module), (expected, fake_kernels)):
        shrunk = functions.shrink(rows, down, RANKS, tokens.order, tokens.starts)
        functions.expand(output[:, outputs:], shrunk, up, RANKS, tokens.order, tokens.starts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)
    plain = [place for place, slot in enumerate(slots) if slot in (-1, 2)]
    assert torch.equal(found[plain], merged[plain]) and torch.equal(found[:, :outputs], merged[:, :outputs])
