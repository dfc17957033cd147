"""Falcon's attention, which transformers writes out in the model's code, through the interface that all
others use.
"""

from typing import Any

import torch
from transformers.models.falcon import modeling_falcon

from gpu_worker.engine.attention.backend import NAME
from gpu_worker.engine.model.families.register import attend

modeling: Any = modeling_falcon


class PagedFalconAttention(modeling_falcon.FalconAttention):
    """Falcon's attention without ALiBi. K and V keep the heads that the checkpoint has. hidden_states [1,
    tokens, hidden] of the model's dtype → the same shape.
    """

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        alibi: None,
        attention_mask: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        batch, tokens, hidden = hidden_states.shape
        query, key, value = (part.transpose(1, 2) for part in self.heads(self.query_key_value(hidden_states)))
        query, key = modeling.apply_rotary_pos_emb(query, key, *position_embeddings)
        output = attend(self, query, key, value, attention_mask, scaling=self.inv_norm_factor)
        return self.dense(output.reshape(batch, tokens, hidden)), None

    def heads(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """→ query [1, tokens, heads, head_dim], key and value [1, tokens, kv_heads, head_dim]"""
        if not self.new_decoder_architecture:
            query, key, value = self._split_heads(fused)
            return query, key, value
        groups = fused.view(*fused.shape[:2], self.num_kv_heads or 1, -1, self.head_dim)
        return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]


modeling.FALCON_ATTENTION_CLASSES[NAME] = PagedFalconAttention
