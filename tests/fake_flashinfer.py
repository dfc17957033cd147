"""FlashInfer's two entrances that the engine uses, computed by torch: as their docstrings say, with what they demand of their arguments.

`install()` puts it where `import flashinfer` finds it, unless the real one is there.
"""

import importlib.util
import math
import sys
from types import ModuleType
from typing import Any

import torch

Cache = tuple[torch.Tensor, torch.Tensor]


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window_left: int, softcap: float | None, sinks: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one row. query [queries, heads, dim]; keys, values [tokens, kv_heads, dim] → outputs, logarithms to base 2 of the sums of each
    softmax [queries, heads]."""
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
    outputs = torch.einsum("hqk,khd->qhd", (scores - totals[..., None]).exp(), values)
    return outputs.to(query.dtype), (sums / math.log(2)).T.float()


def gathered(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """Pages [kv_heads, block_size, dim] → [tokens, kv_heads, dim]"""
    return cache[blocks.long()].transpose(1, 2).flatten(0, 1)[:length]


def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: Cache, workspace_buffer: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
    max_seq_len: int, *, bmm1_scale: float, window_left: int, out: torch.Tensor, sinks: torch.Tensor | None, kv_layout: str,
) -> None:  # fmt: skip
    assert kv_layout == "HND" and query.is_contiguous() and out.is_contiguous() and workspace_buffer.dtype == torch.uint8
    assert block_tables.dtype == seq_lens.dtype == torch.int32 and len(block_tables) == len(seq_lens) == len(query)
    assert kv_cache[0].shape[2] in (16, 32, 64, 128) and max_seq_len == block_tables.shape[1] * kv_cache[0].shape[2]
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (query.shape[1],))
    for row, (blocks, length) in enumerate(zip(block_tables, seq_lens.tolist(), strict=True)):
        keys, values = (gathered(cache, blocks, length) for cache in kv_cache)
        out[row] = attention(query[row : row + 1], keys, values, bmm1_scale, window_left, None, sinks)[0][0]


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "HND"

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        *, causal: bool, sm_scale: float, window_left: int, logits_soft_cap: float | None,
        q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        tensors = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert causal and all(tensor.dtype == torch.int32 for tensor in tensors) and qo_indptr.device.type == "cpu"
        assert paged_kv_last_page_len.min() >= 1 and paged_kv_last_page_len.max() <= page_size
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        self.queries, self.blocks = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.indices, self.lasts, self.page_size = paged_kv_indices, paged_kv_last_page_len.tolist(), page_size
        self.rest = (sm_scale, window_left, logits_soft_cap)

    def run(self, q: torch.Tensor, paged_kv_cache: Cache, *, out: torch.Tensor, return_lse: bool = False) -> Any:
        assert len(q) == self.queries[-1]
        sums = q.new_empty(q.shape[:2], dtype=torch.float32)
        for row, last in enumerate(self.lasts):
            mine, blocks = slice(*self.queries[row : row + 2]), self.indices[slice(*self.blocks[row : row + 2])]
            length = (len(blocks) - 1) * self.page_size + last
            keys, values = (gathered(cache, blocks, length) for cache in paged_kv_cache)
            out[mine], sums[mine] = attention(q[mine], keys, values, *self.rest, None)
        return (out, sums) if return_lse else out


def install() -> None:
    if importlib.util.find_spec("flashinfer") is None:
        fake, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
        fake.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
        decode.xqa_batch_decode_with_kv_cache = xqa_batch_decode_with_kv_cache  # type: ignore[attr-defined]
        sys.modules |= {"flashinfer": fake, "flashinfer.decode": decode}
