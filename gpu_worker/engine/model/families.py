"""Families whose code in transformers computes attention itself: classes that use transformers' interface.

A family is a function, so that its model code is imported only for models of that family. It returns which
class takes the place of which; or it adds its class to a table of transformers.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from gpu_worker.engine.attention.backend import NAME

Replacements = dict[type, type]


def register_family(model_type: str) -> None:
    """Make a family's attention known to transformers, before a model of it is built."""
    if model_type in FAMILIES:
        FAMILIES[model_type]()


def page_attention(model: Any) -> None:
    """Give modules of a model the classes that use the interface."""
    family = FAMILIES.get(model.config.model_type)
    replacements = family() if family else {}
    for module in model.modules():
        module.__class__ = replacements.get(type(module), type(module))


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> torch.Tensor:
    """Attend by the function registered under our name: query [1, heads, tokens, head_dim], key and value [1,
    kv_heads, tokens, head_dim] of the model's dtype → [1, tokens, heads, head_dim].
    """
    registered = AttentionInterface()[NAME]  # type: ignore[no-untyped-call]
    output: torch.Tensor = registered(module, query, key, value, attention_mask, **options)[0]
    return output


@functools.cache
def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """By head, how much a score falls for each token between key and query (ALiBi, arXiv:2108.12409): powers
    of two for the next power of two of heads; with fewer heads every second one comes first.
    """
    whole = 1 << (num_heads - 1).bit_length()
    slopes = 2.0 ** (-8 / whole * torch.arange(1, whole + 1))
    ordered = slopes if whole == num_heads else torch.cat((slopes[1::2], slopes[::2]))
    return tuple(ordered[:num_heads].tolist())


@functools.cache
def bloom() -> Replacements:
    from transformers.models.bloom.modeling_bloom import BloomAttention

    class PagedBloomAttention(BloomAttention):
        """hidden_states and residual [1, tokens, hidden] of the model's dtype → the same shape"""

        def forward(  # type: ignore[override]
            self, hidden_states: torch.Tensor, residual: torch.Tensor, attention_mask: Any, **rest: Any
        ) -> tuple[torch.Tensor, None]:
            query, key, value = self._reshape(self.query_key_value(hidden_states))
            slopes = alibi_slopes(self.num_heads)
            output = attend(
                self, query, key, value, attention_mask, scaling=self.inv_norm_factor, alibi_slopes=slopes
            )
            return self.dense(output.flatten(2)) + residual, None

    return {BloomAttention: PagedBloomAttention}


@functools.cache
def falcon() -> Replacements:
    from transformers.models.falcon import modeling_falcon

    modeling: Any = modeling_falcon

    class PagedFalconAttention(modeling_falcon.FalconAttention):
        """Falcon's attention without ALiBi. K and V keep the heads that the checkpoint has. hidden_states [1,
        tokens, hidden] of the model's dtype → the same shape
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
            fused = self.query_key_value(hidden_states)
            query, key, value = (part.transpose(1, 2) for part in self.heads(fused))
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
    return {}


@functools.cache
def mpt() -> Replacements:
    from transformers.masking_utils import create_causal_mask
    from transformers.modeling_outputs import BaseModelOutputWithPast
    from transformers.models.mpt.modeling_mpt import MptAttention, MptModel

    class PagedMptAttention(MptAttention):
        """hidden_states [1, tokens, hidden] of the model's dtype → the same shape"""

        def forward(  # type: ignore[override]
            self, hidden_states: torch.Tensor, attention_mask: Any = None, **rest: Any
        ) -> tuple[torch.Tensor, None]:
            mixed = self.Wqkv(hidden_states)
            if self.clip_qkv:
                mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
            query, key, value = mixed.unflatten(2, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
            slopes = alibi_slopes(self.n_heads)
            output = attend(
                self, query, key, value, attention_mask, scaling=self.softmax_scale, alibi_slopes=slopes
            )
            return self.out_proj(output.flatten(2)), None

    class PagedMptModel(MptModel):  # type: ignore[no-untyped-call]
        """Blocks without the biases of all positions, which the model's own code computes in every forward.
        input_ids int64 [1, tokens] → hidden states [1, tokens, hidden] of the model's dtype
        """

        def forward(
            self,
            input_ids: torch.Tensor | None = None,
            inputs_embeds: torch.Tensor | None = None,
            **rest: Any,
        ) -> BaseModelOutputWithPast:
            hidden = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
            mask = create_causal_mask(
                config=self.config, inputs_embeds=hidden, attention_mask=None, past_key_values=None
            )
            for block in self.blocks:
                hidden, _ = block(hidden, position_bias=None, attention_mask=mask)
            return BaseModelOutputWithPast(last_hidden_state=self.norm_f(hidden))

    return {MptAttention: PagedMptAttention, MptModel: PagedMptModel}


FAMILIES: dict[str, Callable[[], Replacements]] = {
    "bloom": bloom,
    "falcon": falcon,
    "mpt": mpt,
}
"""By model type."""
