"""MLP speculator (arXiv:2404.19124; checkpoints of ibm-fms and ibm-ai-platform): a recurrent state of the
last hidden state and of the tokens proposed so far.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gpu_worker.protocol import UnservableModel

EPSILON = 1e-6
PARTS = ("emb", "proj", "head", "ln")


class ShiftedNorm(nn.Module):
    """An L2 norm with weights and biases: [..., size] of any dtype → the same shape"""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.weight * normalized(states) + self.bias


def normalized(states: torch.Tensor) -> torch.Tensor:
    """[..., size] of any dtype → the same with a mean square of 1"""
    scale = torch.rsqrt(states.float().pow(2).mean(-1, keepdim=True) + EPSILON)
    return (states.float() * scale).type_as(states)


class MlpSpeculatorHeads(nn.Module):
    """The heads of one checkpoint.

    Attributes:
        num_heads: tokens proposed at a time.
        tied: all places have the same weights, but for the first projection.
    """

    def __init__(
        self,
        num_heads: int,
        hidden_size: int,
        inner: int,
        vocab_size: int,
        tied: bool = False,
        scales_input: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.tied = tied
        self.scales_input = scales_input
        number = 1 if tied else num_heads
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(number))
        self.head = nn.ModuleList(nn.Linear(inner, vocab_size, bias=False) for _ in range(number))
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(number))
        sizes = [hidden_size, *[inner] * ((min(2, num_heads) if tied else num_heads) - 1)]
        self.proj = nn.ModuleList(nn.Linear(size, inner, bias=False) for size in sizes)
        self.state_weight = 0.5 ** (0.5 / num_heads)
        self.token_weight = math.sqrt(1 - self.state_weight**2) * math.sqrt(inner / 2)

    @classmethod
    def of(cls, config: Mapping[str, Any], hidden_size: int, vocab_size: int) -> "MlpSpeculatorHeads":
        """Raises UnservableModel."""
        num_heads, inner = config.get("n_predict"), config.get("inner_dim") or config.get("emb_dim")
        if not isinstance(num_heads, int) or not isinstance(inner, int):
            raise UnservableModel("its config.json has no n_predict and inner_dim")
        for name, size in (("emb_dim", hidden_size), ("vocab_size", vocab_size)):
            if config.get(name, size) != size:
                raise UnservableModel(f"its {name} is {config[name]}, and the model's {size}")
        tied, scales = bool(config.get("tie_weights")), bool(config.get("scale_input"))
        return cls(num_heads, hidden_size, inner, vocab_size, tied, scales)

    def names(self) -> Mapping[str, Sequence[str]]:
        """Names of parameters → those in checkpoints."""
        return {name: (f"speculator.{name}", name) for name, _ in self.named_parameters()}

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] of the model's dtype → what `logits` takes."""
        return normalized(states) * 2**-0.5 if self.scales_input else states

    def logits(
        self, place: int, states: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """states [rows, hidden or inner], tokens int64 [rows] before this place → logits [rows, vocabulary],
        and the states for the next place.
        """
        part = 0 if self.tied else place
        projected = self.proj[min(place, len(self.proj) - 1)](states) * self.state_weight
        states = self.ln[part](projected + self.emb[part](tokens) * self.token_weight)
        states = nn.functional.gelu(states)
        return self.head[part](states), states
