"""FlashInfer's entrances that the engine uses, computed by torch: as their docstrings say, with what they
demand of their arguments.
"""

import importlib
import importlib.util
import math
import sys
from collections.abc import Iterable
from itertools import pairwise, starmap
from typing import Any

import torch

Cache = tuple[torch.Tensor, torch.Tensor]
OwnPages = tuple[slice, torch.Tensor, int]
"""Of a row: which queries it has, its blocks, and how many tokens these hold."""


def install() -> bool:
    """Put this module where the engine's code finds FlashInfer, and nobody else. Not where the real one is
    installed, or a GPU on which to use it.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is not None:
        return False
    found = dict.fromkeys(("flashinfer", "flashinfer.mla"), sys.modules[__name__])
    sys.modules |= found
    importlib.import_module("gpu_worker.engine.attention.flashinfer")
    for name in found:
        del sys.modules[name]
    return True


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


def attend_rows(
    queries: torch.Tensor,
    cache: Cache,
    rows: Iterable[OwnPages],
    scale: float,
    window_left: int,
    softcap: float | None,
    sinks: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention`, of all rows."""
    outputs, sums = torch.empty_like(queries), queries.new_empty(queries.shape[:2], dtype=torch.float32)
    for mine, blocks, length in rows:
        keys, values = (gathered(pages, blocks, length, queries.dtype) for pages in cache)
        outputs[mine], sums[mine] = attention(queries[mine], keys, values, scale, window_left, softcap, sinks)
    return outputs, sums


def xqa(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    seq_lens: torch.Tensor, output: torch.Tensor, workspace_buffer: torch.Tensor, semaphores: torch.Tensor,
    num_kv_heads: int, page_size: int, *, sinks: torch.Tensor | None, q_scale: float, kv_scale: float,
    sliding_win_size: int, kv_layout: str, sm_count: int,
) -> None:  # fmt: skip
    """The kernel takes addresses and a few strides: everything else must be as it expects, and nothing checks
    it.
    """
    (rows, beams, heads, dim), keys, values = q.shape, k_cache, v_cache
    assert (
        kv_layout == "HND"
        and keys.shape == values.shape
        and keys.stride() == values.stride()
        and keys.stride(3) == 1
    )
    assert beams == 1 and keys.shape[1:3] == (num_kv_heads, page_size)
    assert page_size in (16, 32, 64, 128) and heads % num_kv_heads == 0 and dim % 16 == 0
    group = heads // num_kv_heads
    assert -(-group // 16) * 16 * dim * 2 <= 2**14, "queries of one program"
    assert keys.dtype == values.dtype and keys.dtype in (q.dtype, torch.float8_e4m3fn)
    assert q.dtype == output.dtype and output.shape == q.shape
    tensors = (q, output, page_table, seq_lens, workspace_buffer, semaphores)
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert page_table.dtype == seq_lens.dtype == torch.int32 and seq_lens.shape == (rows, 1)
    assert page_table.shape[0] == rows and workspace_buffer.dtype == semaphores.dtype == torch.uint8
    assert len(semaphores) >= 4 * rows * num_kv_heads
    parts = max(1, sm_count // (rows * num_kv_heads))
    if parts > 1:
        assert len(workspace_buffer) >= parts * rows * num_kv_heads * (group * dim * 2 + 256)
    assert type(q_scale) is type(kv_scale) is float and type(sliding_win_size) is type(sm_count) is int
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (num_kv_heads, group))
    scale, window_left = q_scale * kv_scale * dim**-0.5, sliding_win_size - 1
    flat = None if sinks is None else sinks.flatten()
    own = [
        (slice(row, row + 1), page_table[row, : -(-length // page_size)], length)
        for row, [length] in enumerate(seq_lens.tolist())
    ]
    found, _ = attend_rows(q[:, 0], (keys, values), own, scale, window_left, None, flat)
    output[:, 0] = found * kv_scale


def check_tables(
    ends: torch.Tensor,
    indices: torch.Tensor,
    last_lengths: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
) -> None:
    """Where the pages of each row end among `indices`, and how many tokens the last ones hold."""
    on_host = (ends, last_lengths, lengths)
    assert all(tensor.device.type == "cpu" for tensor in on_host), "it copies them to the host, and waits"
    tensors = (*on_host, indices)
    assert all(one.dtype == torch.int32 and one.dim() == 1 and one.is_contiguous() for one in tensors)
    assert len(ends) == len(last_lengths) + 1 == len(lengths) + 1 and len(indices) == ends[-1]
    assert ends[0] == 0 and (ends.diff() > 0).all()
    assert last_lengths.min() >= 1 and last_lengths.max() <= page_size
    assert torch.equal(lengths, (ends.diff() - 1) * page_size + last_lengths)


class PagedWrapper:
    """Attention of rows over pages.

    Attributes:
        shape: of the queries; `page`: of a page.
        dtypes: of queries and pages; `rest`: scale, window and softcap.
    """

    is_captured = False
    shape: tuple[int, ...]
    page: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    rest: tuple[float, int, float | None]

    def rows(self) -> list[OwnPages]:
        raise NotImplementedError

    def run(
        self, q: torch.Tensor, paged_kv_cache: Cache, *, k_scale: float, v_scale: float, out: torch.Tensor,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        keys, values = paged_kv_cache
        assert q.shape == out.shape == self.shape and q.stride(2) == out.stride(2) == 1
        assert out.dtype == q.dtype == self.dtypes[0] and keys.dtype == values.dtype == self.dtypes[1]
        assert keys.shape[1:] == values.shape[1:] == self.page and keys.stride() == values.stride()
        assert q.is_contiguous() or not self.is_captured
        scale, window_left, softcap = self.rest
        found, sums = attend_rows(q, paged_kv_cache, self.rows(), scale * k_scale, window_left, softcap)
        out.copy_(found * v_scale)
        return (out, sums) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "HND" and float_workspace_buffer.dtype == torch.uint8
        assert len(float_workspace_buffer) >= 2**27

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        *, causal: bool, sm_scale: float, window_left: int, logits_soft_cap: float | None,
        q_data_type: torch.dtype, kv_data_type: torch.dtype, seq_lens: torch.Tensor,
        max_token_per_sequence: int,
    ) -> None:  # fmt: skip
        check_tables(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens, page_size)
        assert qo_indptr.device.type == "cpu" and qo_indptr.dtype == torch.int32 and qo_indptr.is_contiguous()
        assert len(qo_indptr) == len(paged_kv_indptr) and qo_indptr[0] == 0 and (qo_indptr.diff() > 0).all()
        assert type(max_token_per_sequence) is int and max_token_per_sequence == qo_indptr.diff().max()
        assert causal and head_dim_qk % 16 == 0 and num_qo_heads % num_kv_heads == 0
        assert type(sm_scale) is float
        queries, pages = (starmap(slice, pairwise(ends.tolist())) for ends in (qo_indptr, paged_kv_indptr))
        blocks = [paged_kv_indices[own] for own in pages]
        self.own = [*zip(queries, blocks, seq_lens.tolist(), strict=True)]
        self.rest = (sm_scale, window_left, logits_soft_cap)
        self.shape = (int(qo_indptr[-1]), num_qo_heads, head_dim_qk)
        self.page = (num_kv_heads, page_size, head_dim_qk)
        self.dtypes = (q_data_type, kv_data_type)

    def rows(self) -> list[OwnPages]:
        return self.own


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """In a captured step `run` reads the buffers as they are when it is replayed: here, too."""

    is_captured = True

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, use_cuda_graph: bool,
        use_tensor_cores: bool, paged_kv_indptr_buffer: torch.Tensor, paged_kv_indices_buffer: torch.Tensor,
        paged_kv_last_page_len_buffer: torch.Tensor,
    ) -> None:  # fmt: skip
        self.ends, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.last_lengths = paged_kv_last_page_len_buffer
        assert kv_layout == "HND" and use_cuda_graph and use_tensor_cores
        assert float_workspace_buffer.dtype == torch.uint8 and len(float_workspace_buffer) >= 2**27
        assert len(self.ends) == len(self.last_lengths) + 1
        buffers = (self.ends, self.indices, self.last_lengths)
        assert all(one.dtype == torch.int32 and one.dim() == 1 and one.is_contiguous() for one in buffers)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        assert len(int_workspace_buffer) > 32 * len(self.ends)

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, *,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, sm_scale: float,
        window_left: int, logits_soft_cap: float | None, q_data_type: torch.dtype,
        kv_data_type: torch.dtype, seq_lens: torch.Tensor,
    ) -> None:  # fmt: skip
        check_tables(indptr, indices, last_page_len, seq_lens, page_size)
        assert len(indptr) == len(self.ends), "its number of rows is that of the graph"
        assert len(indices) <= len(self.indices)
        assert num_qo_heads % num_kv_heads == 0 and head_dim % 16 == 0 and type(sm_scale) is float
        self.ends.copy_(indptr)
        self.indices[: len(indices)].copy_(indices)
        self.last_lengths.copy_(last_page_len)
        fixed = (sm_scale, window_left, logits_soft_cap), (num_qo_heads, num_kv_heads, page_size, head_dim)
        assert getattr(self, "fixed", fixed) == fixed, "a graph keeps what it was captured with"
        self.fixed, self.rest, self.dtypes = fixed, fixed[0], (q_data_type, kv_data_type)
        self.shape = (len(self.last_lengths), num_qo_heads, head_dim)
        self.page = (num_kv_heads, page_size, head_dim)

    def rows(self) -> list[OwnPages]:
        lasts, pages = self.last_lengths.tolist(), pairwise(self.ends.tolist())
        return [
            (slice(row, row + 1), self.indices[begin:end], (end - begin - 1) * self.page[1] + last)
            for row, (last, (begin, end)) in enumerate(zip(lasts, pages, strict=True))
        ]


class MLAPlanMetadata:
    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
    ) -> "MLAPlanMetadata":  # fmt: skip
        return cls(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)


def refuse_cut_tokens(ends: torch.Tensor, lengths: torch.Tensor, heads: int) -> None:
    """As FlashInfer refuses plans whose tiles of pairs of token and head end within a token at the first key
    of a tile of keys.
    """
    tile = 128 if int(ends[-1]) * heads // len(lengths) > 64 else 64
    for count, length in zip(ends.diff().tolist(), lengths.tolist(), strict=True):
        for end in range(tile, count * heads, tile):
            token, within = divmod(end, heads)
            assert not (within and (length - count + token) % 16 == 0), "it would leave out a key"


class BatchMLAPagedAttentionWrapper:
    """In a captured step `run` reads the buffers as they are when it is replayed: here, too."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool, *, backend: str,
        qo_indptr: torch.Tensor | None = None, kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None, kv_len_arr: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert backend in ("fa2", "fa3"), "others that it would choose among do not plan anew"
        assert float_workspace_buffer.dtype == torch.uint8 and len(float_workspace_buffer) >= 2**27
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        given = zip(names, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True)
        self.buffers = {name: buffer for name, buffer in given if buffer is not None}
        assert len(self.buffers) == (len(names) if use_cuda_graph else 0)
        assert all(buffer.dtype == torch.int32 and buffer.is_contiguous() for buffer in self.buffers.values())
        places = {buffer.untyped_storage().data_ptr() for buffer in self.buffers.values()}
        assert len(places) == len(self.buffers), "they must not overlap"
        self.captured = use_cuda_graph

    def plan(
        self, *, metadata: MLAPlanMetadata, num_heads: int, head_dim_ckv: int, head_dim_kpe: int,
        page_size: int, causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
        query_layout: str, kv_cache_layout: str,
    ) -> None:  # fmt: skip
        assert query_layout == kv_cache_layout == "split"
        given = metadata.tensors
        ends, blocks, lengths = given["qo_indptr"], given["kv_indptr"], given["kv_len_arr"]
        on_host = (ends, blocks, lengths)
        assert all(tensor.device.type == "cpu" for tensor in on_host), "it copies them to the host, and waits"
        assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in given.values())
        assert len(ends) == len(blocks) == len(lengths) + 1 and ends[0] == blocks[0] == 0
        assert torch.equal(-(-lengths // page_size), blocks.diff()) and (ends.diff() > 0).all()
        assert len(given["kv_indices"]) == blocks[-1] and causal and type(sm_scale) is float
        assert type(num_heads) is type(head_dim_ckv) is type(head_dim_kpe) is type(page_size) is int
        refuse_cut_tokens(ends, lengths, num_heads)
        if self.captured:
            for name, buffer in self.buffers.items():
                new = given[name]
                assert len(new) == len(buffer) or (name == "kv_indices" and len(new) <= len(buffer))
                buffer[: len(new)].copy_(new)
        else:
            self.buffers = given
        dims = (num_heads, head_dim_ckv, head_dim_kpe)
        fixed = (dims, page_size, sm_scale, q_data_type, kv_data_type)
        assert not self.captured or getattr(self, "fixed", fixed) == fixed, "a graph keeps what it has"
        self.fixed = fixed

    def run(
        self, *, query: tuple[torch.Tensor, torch.Tensor], kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        (q_nope, q_pe), (ckv_cache, kpe_cache) = query, kv_cache
        (heads, rank, rotary_dim), page_size, scale, dtype, kv_dtype = self.fixed
        tokens = int(self.buffers["qo_indptr"][-1])
        assert q_nope.shape == out.shape == (tokens, heads, rank) and q_pe.shape == (
            tokens,
            heads,
            rotary_dim,
        )
        assert ckv_cache.shape[1:] == (page_size, rank) and kpe_cache.shape[1:] == (page_size, rotary_dim)
        assert all(tensor.is_contiguous() for tensor in (ckv_cache, kpe_cache, out))
        assert all(stride % 8 == 0 for tensor in (q_nope, q_pe) for stride in tensor.stride()[:2]), "loads"
        assert q_nope.stride(2) == q_pe.stride(2) == 1
        assert (
            q_nope.dtype == q_pe.dtype == out.dtype == dtype
            and ckv_cache.dtype == kpe_cache.dtype == kv_dtype
        )
        queries, ends = torch.cat((q_nope, q_pe), -1), self.buffers["qo_indptr"].tolist()
        begins = self.buffers["kv_indptr"].tolist()
        for row, length in enumerate(self.buffers["kv_len_arr"].tolist()):
            held = self.buffers["kv_indices"][slice(*begins[row : row + 2])]
            latents, rotary = (
                gathered(pages[:, None], held, length, dtype) for pages in (ckv_cache, kpe_cache)
            )
            mine, keys = slice(*ends[row : row + 2]), torch.cat((latents, rotary), -1)
            out[mine], _ = attention(queries[mine], keys, latents, scale, -1, None, None)
