"""The attention of GPT-J, and of CodeGen, which is built like it, through the interface that others use."""

from typing import Any

import torch
from transformers.models.codegen import modeling_codegen
from transformers.models.gptj import modeling_gptj

from gpu_worker.engine.attention.backend import NAME
from gpu_worker.engine.model.families.register import attend

modeling: Any = modeling_gptj


def attend_scaled(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None
) -> tuple[torch.Tensor, None]:
    """query, key and value [1, heads, tokens, head_dim], rotated ones in float32 perhaps → [1, heads, tokens,
    head_dim] of the values' dtype.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    output = attend(module, query, key, value, attention_mask, scaling=1 / module.scale_attn)
    return output.transpose(1, 2), None


class PagedGPTJAttention(modeling_gptj.GPTJAttention):
    """GPT-J's own attention but for the products of queries, keys and values."""

    _attn = attend_scaled


class PagedCodeGenAttention(modeling_codegen.CodeGenAttention):
    """CodeGen's own attention but for the products of queries, keys and values."""

    _attn = attend_scaled


modeling.GPTJ_ATTENTION_CLASSES[NAME] = PagedGPTJAttention
PAGED: dict[type, type] = {modeling_codegen.CodeGenAttention: PagedCodeGenAttention}
