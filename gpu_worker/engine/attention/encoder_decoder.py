"""Attention of the decoder of an encoder-decoder model. Pages of a row hold what its decoder sees of the
encoded tokens, and behind it the decoder's own K and V.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_worker.engine.attention.kv_cache import from_kv, write_kv
from gpu_worker.engine.batch.encoder_decoder import DecodedTokens, Int64
from gpu_worker.engine.batch.inputs import to_device

MAX_GATHERED = 2**15
"""Keys that are gathered at once: those of all tokens would take the memory of a whole cache."""


@dataclass(slots=True)
class SeenTokens:
    """What some decoded tokens see, on the device.

    Attributes:
        begin, end: places among the decoded tokens.
        pages: int64 [heads, tokens, blocks]; of each head its part of each block.
        seen: of each key in the blocks: bool [1, tokens, keys], or places in the table of biases, int64
            [tokens, keys].
    """

    begin: int
    end: int
    pages: torch.Tensor
    seen: torch.Tensor


class DecoderAttention:
    """Attention of the decoder to its own tokens and to the encoded ones.

    Attributes:
        relative: module with the relative position bias of T5 (arXiv:1910.10683); None without one. The
            encoded tokens have no bias.
        encoded: attention modules that see the encoded tokens.
        biases: [heads or 1, distances + 1]; of each distance to an earlier token, and of what is not seen.
    """

    def __init__(
        self, block_size: int, num_heads: int, device: torch.device, dtype: torch.dtype, relative: Any = None
    ) -> None:
        self.block_size = block_size
        self.num_heads = num_heads
        self.device = device
        self.relative = relative
        self.encoded: set[Any] = set()
        self.slots = torch.zeros(0, dtype=torch.int64, device=device)
        self.seen_own: list[SeenTokens] = []
        self.seen_encoded: list[SeenTokens] = []
        self.biases = table_of_biases(relative, device, dtype)

    def prepare(self, tokens: DecodedTokens) -> None:
        """Prepare a forward of these tokens: what all layers share."""
        self.slots = to_device(tokens.slots, self.device)
        positions = to_device(tokens.positions[:, None], self.device)
        num_encoded = to_device(tokens.num_encoded[:, None], self.device)
        self.seen_own = [
            SeenTokens(
                begin, end, pages, self.places_of_biases(positions[begin:end], num_encoded[begin:end], keys)
            )
            for begin, end, pages, keys in self.parts(tokens.own_blocks)
        ]
        self.seen_encoded = [  # of no encoded token, the first: a sum needs a key
            SeenTokens(begin, end, pages, (keys < num_encoded[begin:end].clamp(min=1))[None])
            for begin, end, pages, keys in self.parts(tokens.encoded_blocks)
        ]

    def parts(self, tables: Int64) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Parts of the tokens whose keys fit in memory: begin, end, `pages` of SeenTokens, places of keys in
        their blocks int64 [keys].
        """
        num_keys = tables.shape[1] * self.block_size
        keys, at_once = torch.arange(num_keys, device=self.device), max(1, MAX_GATHERED // num_keys)
        heads = torch.arange(self.num_heads, device=self.device)[:, None, None]
        for begin in range(0, len(tables), at_once):
            end = min(begin + at_once, len(tables))
            yield begin, end, to_device(tables[begin:end], self.device) * self.num_heads + heads, keys

    def places_of_biases(
        self, positions: torch.Tensor, num_encoded: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """positions and num_encoded int64 [tokens, 1], keys int64 [keys] from the row's first own block on →
        int64 [tokens, keys]
        """
        hidden = self.biases.shape[1] - 1
        keys = keys + num_encoded // self.block_size * self.block_size
        distances = (positions - keys).clamp(max=hidden - 1)
        return distances.masked_fill((keys < num_encoded) | (keys > positions), hidden)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [1, heads, tokens, head_dim]; key and value, of the decoder's own tokens, likewise, all of
        one dtype → [1, tokens, heads, head_dim]
        """
        if module in self.encoded:
            outputs = [attend_seen(module, query, one, one.seen) for one in self.seen_encoded]
        else:
            write_kv(module.keys, module.values, key[0], value[0], self.slots)
            outputs = [attend_seen(module, query, one, self.biases[:, one.seen]) for one in self.seen_own]
        return torch.cat(outputs, 1).transpose(0, 1)[None]


def attend_seen(module: Any, query: torch.Tensor, seen: SeenTokens, mask: torch.Tensor) -> torch.Tensor:
    """query [1, heads, all tokens, head_dim], mask bool or of its dtype [heads or 1, tokens, keys] → [heads,
    tokens, head_dim] of the query's dtype
    """
    keys, values = (gather(store, seen.pages, query.dtype) for store in (module.keys, module.values))
    queries = query[0, :, seen.begin : seen.end, None]
    output = scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask[:, :, None], scale=module.scaling
    )
    return output[:, :, 0]


def gather(store: torch.Tensor, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pages [blocks, heads, block_size, head_dim] of any dtype → [heads, tokens, keys, head_dim] of `dtype`.
    One copy of whole pages: torch's other ways to index take twice the time.
    """
    found = store.flatten(0, 1).flatten(1, 2).index_select(0, pages.flatten())
    return from_kv(found, dtype, 1.0).view(*pages.shape[:2], -1, store.shape[3])


@torch.inference_mode()
def table_of_biases(relative: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """`biases` of DecoderAttention: [heads or 1, distances + 1] of `dtype`. Distances beyond the largest one
    count as it.
    """
    if relative is None:
        seen = torch.zeros(1, 1, dtype=dtype, device=device)
    else:
        buckets = relative._relative_position_bucket(
            -torch.arange(relative.relative_attention_max_distance + 1, device=device),
            bidirectional=False,
            num_buckets=relative.relative_attention_num_buckets,
            max_distance=relative.relative_attention_max_distance,
        )
        seen = relative.relative_attention_bias(buckets).to(dtype).T
    return torch.cat((seen, torch.full_like(seen[:, :1], torch.finfo(dtype).min)), 1)
