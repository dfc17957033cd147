"""Paged attention under transformers' model code.

transformers calls `attend` from every attention module. The module carries its layer's K and V cache as plain tensors, and the backend,
which knows the step that runs: so no layer's signature changes, and a compiler sees the same code in every layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from gpu_worker.engine.cache import Cache, Geometry
from gpu_worker.engine.inputs import Inputs, Span

NAME = "tokenfleet"
TILE = 128  # queries of a prompt that are attended at once: their scores stay within the processor's caches


class Unservable(Exception):
    """The model needs something that this attention does not have."""


class Backend(Protocol):
    def begin(self, inputs: Inputs) -> None:
        """Called before each forward: what all layers share is computed here."""

    def attend(self, query: Any, key: Any, value: Any, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """Writes K and V of the step's tokens and attends over the cache.

        query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim], keys and values one layer's cache
        → [1, tokens, heads, head_dim].
        """


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, scaling: float | None = None, **rest: Any
) -> tuple[torch.Tensor, None]:
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return module.backend.attend(query, key, value, module.keys, module.values, scaling), None


def attach(model: Any, forward: Callable[[], object], geometry: Geometry, cache: Cache, backend: Backend) -> None:
    """Hangs cache and backend on the attention modules, found by watching who calls during `forward` of one token.

    Raises:
        Unservable: the model attends in a way, or keeps K and V of a shape, that the paged cache does not have.
    """
    if not model.is_backend_compatible():
        raise Unservable(f"the attention of {type(model).__name__} cannot be replaced")
    modules: list[Any] = []

    def watch(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **rest: Any
    ) -> tuple[torch.Tensor, None]:
        needs = [name for name in ("sliding_window", "softcap", "s_aux") if rest.get(name) is not None]
        if needs:
            raise Unservable(f"its attention needs {' and '.join(needs)}, which is not served")
        shape = (geometry.kv_heads, 1, geometry.head_dim)
        if key.shape[1:] != shape or value.shape[1:] != shape:
            raise Unservable(f"its K {list(key.shape[1:])} and V {list(value.shape[1:])} are not of the shape {list(shape)} of its config")
        modules.append(module)
        return query.transpose(1, 2), None

    AttentionInterface.register(NAME, watch)
    try:
        forward()
    finally:
        AttentionInterface.register(NAME, attend)
    if len(modules) != geometry.num_layers:
        raise Unservable(f"{len(modules)} of its {geometry.num_layers} layers have attention that can be paged")
    for module, keys, values in zip(modules, cache.keys, cache.values, strict=True):
        module.keys, module.values, module.backend = keys, values, backend


AttentionInterface.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)


# --- sdpa: anywhere ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `begin` to `end` on the line, and the bias that hides all but their own past: [rows * kv_heads or 1, queries, length].

    `length` is a whole number of blocks: a product over part of a gathered page would copy all of them first.
    """

    begin: int
    end: int
    length: int
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class Gathered:
    """A span, ready for every layer. `pages` picks [rows, kv_heads, blocks] out of the cache seen as [blocks * kv_heads] pages."""

    rows: int
    pages: torch.Tensor
    tiles: list[Tile]


class Sdpa:
    """Gathers the pages of a span's rows, then two batched products with a softmax between them.

    The queries that share a K head stand in one matrix, so the product is batched over rows and K heads. (The fused
    `scaled_dot_product_attention` of torch 2.13 was measured on CPU: 4 to 6 times slower for rows that decode.)
    """

    def __init__(self, geometry: Geometry, num_heads: int, device: torch.device) -> None:
        self.geometry, self.device = geometry, device
        self.group = num_heads // geometry.kv_heads
        self.heads = np.arange(geometry.kv_heads)
        self.slots = torch.zeros(0, dtype=torch.int64)
        self.spans: list[Gathered] = []

    def begin(self, inputs: Inputs) -> None:
        blocks, offsets = np.divmod(inputs.slots, self.geometry.block_size)
        slots = (blocks * self.geometry.kv_heads + self.heads[:, None]) * self.geometry.block_size + offsets
        self.slots = self.tensor(slots.reshape(-1))
        self.spans = [self.gather(span) for span in inputs.spans]

    def gather(self, span: Span) -> Gathered:
        pages = span.blocks[:, None, :] * self.geometry.kv_heads + self.heads[None, :, None]
        tiles = [self.decode_tile(span)] if span.count == 1 else self.prompt_tiles(span)
        return Gathered(len(span.lengths), self.tensor(pages.reshape(-1)), tiles)

    def decode_tile(self, span: Span) -> Tile:
        length = span.blocks.shape[1] * self.geometry.block_size
        hidden = np.arange(length) >= span.lengths[:, None]
        bias = self.bias(hidden.repeat(self.geometry.kv_heads, axis=0)[:, None])
        return Tile(span.begin, span.begin + len(span.lengths), length, bias)

    def prompt_tiles(self, span: Span) -> list[Tile]:
        first, tiles = int(span.lengths[0]) - span.count, []
        for begin in range(0, span.count, TILE):
            end = min(begin + TILE, span.count)
            length = -(-(first + end) // self.geometry.block_size) * self.geometry.block_size
            hidden = np.arange(length) > np.arange(first + begin, first + end)[:, None]
            tiles.append(Tile(span.begin + begin, span.begin + end, length, self.bias(np.tile(hidden, (self.group, 1))[None])))
        return tiles

    def bias(self, hidden: Any) -> torch.Tensor:
        bias = np.where(hidden, np.float32("-inf"), np.float32(0))
        return self.tensor(bias).to(self.geometry.dtype)

    def tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        head_dim = self.geometry.head_dim
        keys.view(-1, head_dim).index_copy_(0, self.slots, key.reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, self.slots, value.reshape(-1, head_dim))
        outputs = [
            self.tile(tile, span.rows, query, key_pages, value_pages, scaling)
            for span in self.spans
            for key_pages, value_pages in [(self.pages(keys, span), self.pages(values, span))]
            for tile in span.tiles
        ]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)

    def pages(self, cache: torch.Tensor, span: Gathered) -> torch.Tensor:
        """→ [rows * kv_heads, tokens, head_dim]"""
        pages = cache.view(-1, self.geometry.block_size * self.geometry.head_dim).index_select(0, span.pages)
        return pages.view(span.rows * self.geometry.kv_heads, -1, self.geometry.head_dim)

    def tile(self, tile: Tile, rows: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """→ [queries, heads, head_dim]"""
        heads, head_dim = query.shape[1], query.shape[3]
        queries = query[0, :, tile.begin : tile.end].view(heads, rows, -1, head_dim).transpose(0, 1)
        queries = queries.reshape(rows * self.geometry.kv_heads, -1, head_dim)
        scores = torch.baddbmm(tile.bias, queries, keys[:, : tile.length].transpose(1, 2), alpha=scaling)
        output = torch.bmm(torch.softmax(scores, -1), values[:, : tile.length])
        return output.view(rows, heads, -1, head_dim).transpose(1, 2).reshape(-1, heads, head_dim)
