"""Latents: what multi-head latent attention (MLA, arXiv:2405.04434) keeps of a token in place of K and V.

K and V of all heads are products of one latent with a weight, but for a rotary part of K, which all heads
share. Attention over these is attention over the latents themselves, with queries multiplied by the part of
the weight that makes K, and outputs by the part that makes V: one K head for all, and one latent and one
rotary part in the cache.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)

Attend = Callable[..., tuple[torch.Tensor, None]]
"""What transformers calls, with an attention module and its query, K and V first."""


class LatentProjection(nn.Module):
    """Stands for the linear layer that makes K and V of latents.

    Attributes:
        key_weight: [heads, key_dim, rank] of the model's dtype; K without its rotary part.
        value_weight: [heads, rank, value_dim] of the model's dtype.
    """

    key_weight: torch.Tensor
    value_weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, key_dim: int, value_dim: int) -> None:
        """weight [heads * (key_dim + value_dim), rank] of the model's dtype"""
        super().__init__()
        heads = weight.detach().view(-1, key_dim + value_dim, weight.shape[1])
        self.register_buffer("key_weight", heads[:, :key_dim].contiguous())
        self.register_buffer("value_weight", heads[:, key_dim:].transpose(1, 2).contiguous())

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """query [1, heads, tokens, key_dim + rotary_dim] of the model's dtype → [1, heads, tokens, rank +
        rotary_dim]: what meets a latent and its rotary part
        """
        key_dim = self.key_weight.shape[1]
        return torch.cat((query[..., :key_dim] @ self.key_weight, query[..., key_dim:]), -1)

    def expand(self, output: torch.Tensor) -> torch.Tensor:
        """output [1, tokens, heads, rank] of the model's dtype → [1, tokens, heads, value_dim]"""
        return (output.transpose(1, 2) @ self.value_weight).transpose(1, 2)


def over_latents(attend: Attend) -> Attend:
    """An attention function for all modules of one for K and V: those that keep latents give it the rotary
    part for K and the latent for V, and `AttentionSpec.latent` says so.
    """

    def attend_all(module: Any, query: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, None]:
        """query [1, heads, tokens, dim] of the model's dtype → [1, tokens, heads, value_dim]"""
        if not keeps_latents(module):
            return attend(module, query, *rest, **options)
        output, _ = attend(module, module.kv_b_proj.absorb(query), *rest, **options)
        return module.kv_b_proj.expand(output), None

    return attend_all


def keeps_latents(module: Any) -> bool:
    return getattr(type(module), "keeps_latents", False)


def keep_latents(model: Any) -> None:
    """Make the latent attention of a model keep latents, before its linear layers are replaced by faster
    ones.
    """
    for name, module in list(model.named_modules()):
        if not hasattr(type(module), "expand_kv"):
            continue
        linear = module.kv_b_proj
        if type(linear) is not nn.Linear or linear.bias is not None:
            log.warning("%s keeps K and V, not latents: its kv_b_proj is %s", name, type(linear).__name__)
            continue
        module.kv_b_proj = LatentProjection(linear.weight, module.qk_nope_head_dim, module.v_head_dim)
        module.__class__ = latent_class(type(module))


@functools.cache
def latent_class(own: type[Any]) -> type[Any]:
    """A class of attention modules that expand no latents. One for all layers: a function of each instance
    would be compiled for each.
    """
    changes = {"expand_kv": keep_latent, "keeps_latents": True, "__module__": own.__module__}
    return type(own.__name__, (own,), changes)


def keep_latent(module: Any, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """latent [1, 1, tokens, rank], rotary [1, 1, tokens, rotary_dim] of the model's dtype → what stands for K
    and for V.
    """
    return rotary, latent
