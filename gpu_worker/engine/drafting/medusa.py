"""Medusa heads (arXiv:2401.10774): each proposes the token at one place after the next, from the last hidden
state alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gpu_worker.protocol import UnservableModel


class MedusaHeads(nn.Module):
    """The heads of one checkpoint.

    Attributes:
        num_heads: tokens proposed at a time.
    """

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))
            for _ in range(num_heads)
        )
        self.heads = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(num_heads))

    @classmethod
    def of(cls, config: Mapping[str, Any], hidden_size: int, vocab_size: int) -> "MedusaHeads":
        """Raises UnservableModel."""
        num_heads, num_layers = (
            config.get("medusa_num_heads") or config.get("num_heads"),
            config.get("medusa_num_layers", config.get("num_hidden_layers", 1)),
        )
        if not isinstance(num_heads, int) or not isinstance(num_layers, int):
            raise UnservableModel("its config.json has no medusa_num_heads")
        if config.get("truncated_vocab_size") not in (None, vocab_size):
            raise UnservableModel("its heads know a part of the vocabulary only")
        return cls(num_heads, num_layers, hidden_size, vocab_size)

    def names(self) -> Mapping[str, Sequence[str]]:
        """Names of parameters → those in checkpoints: of Medusa itself and TGI, and of vLLM."""
        last = self.num_layers
        found: dict[str, Sequence[str]] = {}
        for head in range(self.num_heads):
            for layer in range(last):
                for part in ("weight", "bias"):
                    own = f"{head}.{layer}.linear.{part}"
                    names = (own, f"medusa_head.{own}", f"blocks.{head}.layers.{layer}.{part}")
                    found[f"blocks.{head}.{layer}.{part}"] = names
            own = f"{head}.{last}.weight"
            found[f"heads.{head}.weight"] = (own, f"medusa_head.{own}", f"lm_heads.{head}.weight")
        return found

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] of the model's dtype → what `logits` takes."""
        return states

    def logits(
        self, place: int, states: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """states [rows, hidden], tokens int64 [rows] before this place → logits [rows, vocabulary], and the
        states for the next place.
        """
        hidden = states
        for block in self.blocks[place]:  # type: ignore[attr-defined]
            hidden = hidden + nn.functional.silu(block(hidden))
        return self.heads[place](hidden), states
