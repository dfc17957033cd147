"""Linear layers whose weights lie as the processor's matrix product wants them.

Packed once at load; without it oneDNN packs them again for every product. Measured on two cores: 1.7 times faster at one row in bfloat16,
3 times at eight rows in float32.
"""

from typing import Any

import torch
from torch import nn

ROWS = 32  # the number of rows that the layout is chosen for; any number works
TYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, rows: torch.Tensor) -> Any:
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")


def pack(model: nn.Module) -> None:
    """Replaces the plain linear layers of a model on CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child.weight.dtype in TYPES:
                setattr(module, name, PackedLinear(child))
