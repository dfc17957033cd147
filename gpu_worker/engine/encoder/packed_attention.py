"""Packed attention: the attention of an encoder over one flat line of tokens, in which whole sequences follow
each other. Each token sees its own sequence in both directions, and no other.

Neighbours of one length are one call of torch's attention. Nothing is padded, and what a sequence gets does
not depend on those beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

NAME = "tokenfleet_packed"


@dataclass(slots=True)
class PackedAttention:
    """The attention of all layers in the forward that runs.

    Attributes:
        groups: (number of sequences, their length) of neighbours of one length, in the order of the line.
    """

    groups: list[tuple[int, int]] = field(default_factory=list)

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set the lengths of the sequences that follow each other in the next forward."""
        self.groups = [(len([*group]), length) for length, group in groupby(lengths)]

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """What transformers calls: query, key and value [1, heads, tokens, head_dim] of the model's dtype →
        [1, tokens, heads, head_dim]. A token sees those fewer than `sliding_window` places away.
        """
        begin, parts = 0, []
        for count, length in self.groups:
            end = begin + count * length
            mask = window_mask(length, sliding_window, query.device)
            queries, keys, values = (rows_of(states, begin, end, length) for states in (query, key, value))
            output = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
            parts.append(output.transpose(1, 2).reshape(end - begin, *output.shape[1::2]))
            begin = end
        return torch.cat(parts)[None], None


def rows_of(states: torch.Tensor, begin: int, end: int, length: int) -> torch.Tensor:
    """states [1, heads, tokens, head_dim] → those of the sequences of one length, [sequences, heads, length,
    head_dim] of the same dtype
    """
    line = states[0].transpose(0, 1)[begin:end]
    return line.reshape(-1, length, *line.shape[1:]).transpose(1, 2)


def window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which places see each other, bool [length, length]; None if all do."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() < window


def register(attention: PackedAttention) -> None:
    """Have models that are made for NAME call this attention, without a mask."""
    AttentionInterface.register(NAME, attention.attend)
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(NAME, None)
