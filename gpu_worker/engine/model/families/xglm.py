"""XGLM's attention, which transformers writes out in the model's code, through the interface that all others
use.
"""

from typing import Any

import torch
from transformers.models.xglm import modeling_xglm

from gpu_worker.engine.model.families.register import attend


class PagedXGLMAttention(modeling_xglm.XGLMAttention):
    """XGLM's attention, of a decoder alone. hidden_states [1, tokens, hidden] of the model's dtype → the same
    shape.
    """

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: Any = None, **rest: Any
    ) -> tuple[torch.Tensor, None]:
        query, key, value = (
            part(hidden_states).unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        output = attend(self, query, key, value, attention_mask, scaling=self.scaling)
        return self.out_proj(output.flatten(2)), None


PAGED: dict[type, type] = {modeling_xglm.XGLMAttention: PagedXGLMAttention}
