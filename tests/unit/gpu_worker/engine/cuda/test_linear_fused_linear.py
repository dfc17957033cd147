"""Linear layers with the same input, merged into one product."""

import torch
from torch import nn

from gpu_worker.engine.cuda.linear import FusedLinearSlice, fuse_linears


class Odd(nn.Module):
    """Calls q after k, and v with another input."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, size) for size in (6, 4, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.k_proj(rows), self.q_proj(rows), self.v_proj(2 * rows), self.k_proj(rows)), -1)


def test_merged_products_equal_those_of_the_parts() -> None:
    model, inputs = Odd(), torch.randn(3, 8)
    expected = model(inputs)
    fuse_linears(model)
    assert isinstance(model.q_proj, FusedLinearSlice)
    for _ in range(2):
        torch.testing.assert_close(model(inputs), expected)


def test_changed_or_different_layers_are_not_merged() -> None:
    model = Odd()
    model.v_proj = nn.Linear(8, 4, bias=False)
    fuse_linears(model)
    assert type(model.q_proj) is nn.Linear
    model = Odd()
    model.v_proj.forward = model.v_proj.forward  # type: ignore[method-assign]
    fuse_linears(model)
    assert type(model.q_proj) is nn.Linear
