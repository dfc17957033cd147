"""MPT's attention, which transformers writes out in the model's code, through the interface that all others
use, with ALiBi (arXiv:2108.12409) as a slope for each head.
"""

import functools
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.mpt import modeling_mpt

from gpu_worker.engine.model.families.register import attend

modeling: Any = modeling_mpt


class PagedMptAttention(modeling_mpt.MptAttention):
    """hidden_states [1, tokens, hidden] of the model's dtype → the same shape."""

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: Any = None, **rest: Any
    ) -> tuple[torch.Tensor, None]:
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
        query, key, value = mixed.unflatten(2, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        slopes = slopes_of(self.n_heads)
        output = attend(
            self, query, key, value, attention_mask, scaling=self.softmax_scale, alibi_slopes=slopes
        )
        return self.out_proj(output.flatten(2)), None


class PagedMptModel(modeling_mpt.MptModel):  # type: ignore[no-untyped-call]
    """Blocks without the biases of all positions, which the model's own code computes in every forward.
    input_ids int64 [1, tokens] → hidden states [1, tokens, hidden] of the model's dtype.
    """

    def forward(
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **rest: Any
    ) -> BaseModelOutputWithPast:
        hidden = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        mask = create_causal_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=None, past_key_values=None
        )
        for block in self.blocks:
            hidden, _ = block(hidden, position_bias=None, attention_mask=mask)
        return BaseModelOutputWithPast(last_hidden_state=self.norm_f(hidden))


@functools.cache
def slopes_of(num_heads: int) -> tuple[float, ...]:
    """How much a score falls for each token between key and query, by head."""
    bias = modeling.build_mpt_alibi_tensor(num_heads, 2)
    return tuple((bias[:, 0, 1] - bias[:, 0, 0]).tolist())


PAGED: dict[type, type] = {
    modeling_mpt.MptAttention: PagedMptAttention,
    modeling_mpt.MptModel: PagedMptModel,
}
