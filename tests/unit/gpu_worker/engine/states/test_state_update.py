"""States after one more token: what transformers' own code gives, in place."""

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from gpu_worker.engine.states.scans import updating_delta_rule, updating_scan

ROWS, HEADS, WIDTH, SIZE = 3, 4, 6, 5


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("shared", [True, False], ids=["a decay for each head", "decays within a head"])
def test_an_update_is_that_of_transformers(gated: bool, groups: int, shared: bool) -> None:
    torch.manual_seed(1)
    modeling: object = modeling_mamba2
    own, called = getattr(modeling, "mamba2_selective_state_update"), list[int]()  # noqa: B009

    def noted(*arguments: object, **options: object) -> object:
        called.append(1)
        return own(*arguments, **options)

    state, hidden = torch.randn(ROWS, HEADS, WIDTH, SIZE), torch.randn(ROWS, HEADS, WIDTH)
    widths = (1,) if shared else (WIDTH,)
    dt = torch.randn(ROWS, HEADS, *widths).expand(-1, -1, WIDTH)
    decays = (-torch.rand(HEADS, *widths, 1)).expand(-1, WIDTH, SIZE)
    inputs, outputs = (torch.randn(ROWS, groups, SIZE) for _ in range(2))
    options = {
        "dt_bias": torch.rand(HEADS, 1).expand(-1, WIDTH),
        "dt_softplus": True,
        "z": torch.randn(ROWS, HEADS, WIDTH) if gated else None,
    }
    skip, expected = torch.rand(HEADS, 1).expand(-1, WIDTH), state.clone()
    output = own(expected, hidden, dt, decays, inputs, outputs, skip, **options)
    found = updating_scan(noted)(state, hidden, dt, decays, inputs, outputs, skip, **options)
    torch.testing.assert_close(found, output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)
    assert bool(called) is not shared


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_delta_rule_is_that_of_transformers(normed: bool, tokens: int) -> None:
    """Two heads of queries and keys for four of values. More tokens than one are left to transformers."""
    torch.manual_seed(1)
    modeling: object = modeling_qwen3_next
    own, called = getattr(modeling, "torch_recurrent_gated_delta_rule"), list[int]()  # noqa: B009

    def noted(*arguments: object, **options: object) -> object:
        called.append(1)
        return own(*arguments, **options)

    query, key = (torch.randn(ROWS, tokens, HEADS // 2, WIDTH) for _ in range(2))
    value, state = torch.randn(ROWS, tokens, HEADS, SIZE), torch.randn(ROWS, HEADS, WIDTH, SIZE)
    gates = {"g": -torch.rand(ROWS, tokens, HEADS), "beta": torch.rand(ROWS, tokens, HEADS)}
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": normed}
    expected = own(query, key, value, **gates, initial_state=state.clone(), **options)
    found = updating_delta_rule(noted)(query, key, value, **gates, initial_state=state, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert bool(called) is (tokens > 1) and (found[1] is state) is (tokens == 1)
