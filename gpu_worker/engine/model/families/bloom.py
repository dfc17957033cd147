"""Bloom's attention, which transformers writes out in the model's code, through the interface that all others
use, with ALiBi (arXiv:2108.12409) as a slope for each head.
"""

import functools
from typing import Any

import torch
from transformers.models.bloom import modeling_bloom

from gpu_worker.engine.model.families.register import attend

modeling: Any = modeling_bloom


class PagedBloomAttention(modeling_bloom.BloomAttention):
    """hidden_states and residual [1, tokens, hidden] of the model's dtype → the same shape."""

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, residual: torch.Tensor, attention_mask: Any, **rest: Any
    ) -> tuple[torch.Tensor, None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        slopes = slopes_of(self.num_heads)
        output = attend(
            self, query, key, value, attention_mask, scaling=self.inv_norm_factor, alibi_slopes=slopes
        )
        return self.dense(output.flatten(2)) + residual, None


@functools.cache
def slopes_of(num_heads: int) -> tuple[float, ...]:
    """How much a score falls for each token between key and query, by head."""
    bias = modeling.build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
    return tuple((bias[:, 0, 1] - bias[:, 0, 0]).tolist())


PAGED: dict[type, type] = {modeling_bloom.BloomAttention: PagedBloomAttention}
