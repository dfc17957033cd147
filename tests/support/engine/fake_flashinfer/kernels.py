"""FlashInfer's entrances that the engine uses, computed by torch: as their docstrings say, with what they
demand of their arguments.
"""

from typing import Any

import torch

from tests.support.engine.fake_flashinfer.plain import attention, gathered

Cache = tuple[torch.Tensor, torch.Tensor]


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
    for row, (blocks, [length]) in enumerate(zip(page_table, seq_lens.tolist(), strict=True)):
        held = blocks[: -(-length // page_size)]
        row_keys, row_values = (gathered(cache, held, length, q.dtype) for cache in (keys, values))
        found, _ = attention(q[row], row_keys, row_values, scale, window_left, None, flat)
        output[row, 0] = found[0] * kv_scale


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert (
            kv_layout == "HND"
            and float_workspace_buffer.dtype == torch.uint8
            and len(float_workspace_buffer) >= 2**27
        )

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        *, causal: bool, sm_scale: float, window_left: int, logits_soft_cap: float | None,
        q_data_type: torch.dtype, kv_data_type: torch.dtype, seq_lens: torch.Tensor,
        max_token_per_sequence: int,
    ) -> None:  # fmt: skip
        on_host = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens)
        assert all(tensor.device.type == "cpu" for tensor in on_host), "it copies them to the host, and waits"
        assert all(
            tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous()
            for tensor in (*on_host, paged_kv_indices)
        )
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1 == len(seq_lens) + 1
        assert (
            qo_indptr[0] == paged_kv_indptr[0] == 0
            and (qo_indptr.diff() > 0).all()
            and (paged_kv_indptr.diff() > 0).all()
        )
        assert type(max_token_per_sequence) is int and max_token_per_sequence == qo_indptr.diff().max()
        assert paged_kv_last_page_len.min() >= 1 and paged_kv_last_page_len.max() <= page_size
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert torch.equal(seq_lens, (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len)
        assert (
            causal and head_dim_qk % 16 == 0 and num_qo_heads % num_kv_heads == 0 and type(sm_scale) is float
        )
        self.queries, self.blocks, self.lengths = (
            qo_indptr.tolist(),
            paged_kv_indptr.tolist(),
            seq_lens.tolist(),
        )
        self.indices, self.rest = paged_kv_indices, (sm_scale, window_left, logits_soft_cap)
        self.shape, self.page = (num_qo_heads, head_dim_qk), (num_kv_heads, page_size, head_dim_qk)
        self.dtypes = (q_data_type, kv_data_type)

    def run(
        self, q: torch.Tensor, paged_kv_cache: Cache, *, k_scale: float, v_scale: float, out: torch.Tensor,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        keys, values = paged_kv_cache
        assert q.shape == (self.queries[-1], *self.shape) and q.stride(2) == out.stride(2) == 1
        assert (
            out.shape == q.shape
            and out.dtype == q.dtype == self.dtypes[0]
            and keys.dtype == values.dtype == self.dtypes[1]
        )
        assert keys.shape[1:] == values.shape[1:] == self.page and keys.stride() == values.stride()
        sums = q.new_empty(q.shape[:2], dtype=torch.float32)
        for row, length in enumerate(self.lengths):
            mine, blocks = (
                slice(*self.queries[row : row + 2]),
                self.indices[slice(*self.blocks[row : row + 2])],
            )
            row_keys, row_values = (gathered(cache, blocks, length, q.dtype) for cache in paged_kv_cache)
            sm_scale, window_left, softcap = self.rest
            scale = sm_scale * k_scale
            out[mine], sums[mine] = attention(
                q[mine], row_keys, row_values, scale, window_left, softcap, None
            )
        out *= v_scale
        return (out, sums) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper:
    """In a captured step `run` reads the buffers as they are when it is replayed: here, too."""

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
        assert all(
            buffer.dtype == torch.int32 and buffer.dim() == 1 and buffer.is_contiguous()
            for buffer in (self.ends, self.indices, self.last_lengths)
        )

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
        on_host = (indptr, last_page_len, seq_lens)
        assert all(tensor.device.type == "cpu" for tensor in on_host), "it copies them to the host, and waits"
        assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in (*on_host, indices))
        assert len(last_page_len) == len(self.last_lengths), "its number of rows is that of the graph"
        assert len(indptr) == len(self.ends) and len(indices) == indptr[-1] <= len(self.indices)
        assert indptr[0] == 0 and (indptr.diff() > 0).all()
        assert last_page_len.min() >= 1 and last_page_len.max() <= page_size
        assert torch.equal(seq_lens, (indptr.diff() - 1) * page_size + last_page_len)
        assert num_qo_heads % num_kv_heads == 0 and head_dim % 16 == 0 and type(sm_scale) is float
        self.ends.copy_(indptr)
        self.indices[: len(indices)].copy_(indices)
        self.last_lengths.copy_(last_page_len)
        fixed = (sm_scale, window_left, logits_soft_cap, num_qo_heads, num_kv_heads, page_size, head_dim)
        assert getattr(self, "fixed", fixed) == fixed, "a graph keeps what it was captured with"
        self.fixed, self.dtypes = fixed, (q_data_type, kv_data_type)

    def run(
        self, q: torch.Tensor, paged_kv_cache: Cache, *, k_scale: float, v_scale: float, out: torch.Tensor,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        keys, values = paged_kv_cache
        sm_scale, window_left, softcap, heads, *page = self.fixed
        assert q.shape == out.shape == (len(self.last_lengths), heads, page[-1]) and q.is_contiguous()
        assert out.dtype == q.dtype == self.dtypes[0] and keys.dtype == values.dtype == self.dtypes[1]
        assert list(keys.shape[1:]) == list(values.shape[1:]) == page and keys.stride() == values.stride()
        sums = q.new_empty(q.shape[:2], dtype=torch.float32)
        for row, last_length in enumerate(self.last_lengths.tolist()):
            begin, end = self.ends[row : row + 2].tolist()
            length = (end - begin - 1) * page[1] + last_length
            row_keys, row_values = (
                gathered(cache, self.indices[begin:end], length, q.dtype) for cache in paged_kv_cache
            )
            mine = slice(row, row + 1)
            out[mine], sums[mine] = attention(
                q[mine], row_keys, row_values, sm_scale * k_scale, window_left, softcap, None
            )
        out *= v_scale
        return (out, sums) if return_lse else out
