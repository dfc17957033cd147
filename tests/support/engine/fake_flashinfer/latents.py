"""FlashInfer's attention over latents, computed by torch: as its docstrings say, with what it demands of its
arguments.
"""

import torch

from tests.support.engine.fake_flashinfer.plain import attention, gathered


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
