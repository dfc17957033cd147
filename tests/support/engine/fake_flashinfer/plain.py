"""Attention of one row over pages, by torch, for what stands in for FlashInfer's kernels."""

import math
from typing import Any

import torch


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window_left: int,
    softcap: float | None,
    sinks: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one row. query [queries, heads, dim]; keys, values [tokens, kv_heads, dim] → outputs, logarithms to
    base 2 of the sums of each softmax [queries, heads].
    """
    (count, heads, _), (length, kv_heads, _) = query.shape, keys.shape
    keys, values = (tensor.repeat_interleave(heads // kv_heads, 1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at, seen = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
    hidden = (seen > at) | ((seen < at - window_left) if window_left >= 0 else torch.zeros_like(seen > at))
    scores = scores.masked_fill(hidden, -math.inf)
    sums = scores.logsumexp(-1)
    totals = sums if sinks is None else torch.logaddexp(sums, sinks[:, None])
    outputs = torch.einsum("hqk,khd->qhd", (scores - totals[..., None]).exp().to(values.dtype), values)
    return outputs.to(query.dtype), (sums / math.log(2)).T.float()


def gathered(cache: torch.Tensor, blocks: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Pages [kv_heads, block_size, dim] → [tokens, kv_heads, dim] of `dtype`"""
    return cache.to(dtype)[blocks.long()].transpose(1, 2).flatten(0, 1)[:length]
