"""Attention on any device: gathers pages, then two batched products with a softmax between them.

Sequences that see each other as a whole (an encoder's, WHOLE) have no pages. Neighbours of one length are one
call of torch's attention: nothing is padded, and what a sequence gets does not depend on those beside it.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_worker.engine.attention.backend import (
    ENCODED,
    PAST,
    WHOLE,
    AttentionBackend,
    AttentionSpec,
    Geometry,
    from_kv,
    raw,
    to_kv,
)
from gpu_worker.engine.batch.inputs import Inputs, Span, to_device

TILE_QUERIES = 128
"""Queries of a prompt that attend at once: their scores stay within the processor's caches."""
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Queries `begin` to `end` of the step, the gathered keys `first` to `last`, and the bias that hides all
    but what each query sees: [rows * kv_heads or 1, queries, keys], the same for all heads of a group; with
    ALiBi one after the other.

    `first` and `last` are whole numbers of blocks: a product over part of a gathered page would copy all of
    them first.
    """

    begin: int
    end: int
    first: int
    last: int
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class GatheredSpan:
    """A span, ready for every layer of a view. `pages` picks [rows, kv_heads, blocks] of the cache seen as
    [blocks * kv_heads] pages.
    """

    rows: int
    pages: torch.Tensor
    tiles: list[QueryTile]


PreparedStep = tuple[torch.Tensor, list[GatheredSpan]]
"""What the layers of one view share in a step: lines of the cache seen as [blocks * kv_heads * block_size]
lines, int64 [kv_heads * tokens], and spans.
"""


class SdpaBackend(AttentionBackend):
    """Attention by torch's products. The queries that share a K head stand in one matrix, so products are
    batched over rows and K heads. (The fused `scaled_dot_product_attention` of torch 2.13 was measured on
    CPU: 4 to 6 times slower for rows that decode.)

    Tensors of `attend`, all of the model's dtype: query [1, heads, tokens, key_dim], key [1, kv_heads,
    tokens, key_dim], value [1, kv_heads, tokens, value_dim], sinks [heads] → [1, tokens, heads, value_dim].

    Attributes:
        groups: of WHOLE sequences: how many neighbours have one length, and that length.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        super().__init__(geometry)
        self.dtype = geometry.dtype
        self.device = device
        self.specs = {layer.spec for layer in geometry.layers if layer.spec.sees != WHOLE}
        self.groups: list[tuple[int, int]] = []
        self.prepared: dict[AttentionSpec, PreparedStep] = {}

    def prepare_forward(self, inputs: Inputs) -> None:
        self.groups = [(len([*same]), length) for length, same in groupby(one.count for one in inputs.slices)]
        self.prepared = {spec: self.prepare(spec, inputs) for spec in self.specs}

    def prepare(self, spec: AttentionSpec, inputs: Inputs) -> PreparedStep:
        blocks, offsets = np.divmod(inputs.slots, self.block_size)
        slots = (blocks * spec.kv_heads + np.arange(spec.kv_heads)[:, None]) * self.block_size + offsets
        return self.tensor(slots.reshape(-1)), [self.gather(spec, span) for span in inputs.spans]

    def gather(self, spec: AttentionSpec, span: Span) -> GatheredSpan:
        blocks, tiles = (
            self.decode_tile(spec, span) if span.count == 1 else (span.blocks, self.prompt_tiles(spec, span))
        )
        pages = blocks[:, None, :] * spec.kv_heads + np.arange(spec.kv_heads)[None, :, None]
        return GatheredSpan(len(span.lengths), self.tensor(pages.reshape(-1)), tiles)

    def decode_tile(self, spec: AttentionSpec, span: Span) -> tuple[Int64, list[QueryTile]]:
        """One query a row, over the blocks that it sees."""
        begins, ends = seen_keys(spec, span)
        blocks, first = span.blocks, begins // self.block_size
        if spec.window is not None or span.encoded is not None:
            blocks = shifted(blocks, first, int((-(-ends // self.block_size) - first).max()))
        length = blocks.shape[1] * self.block_size
        positions = np.arange(length) + first[:, None] * self.block_size
        hidden = (positions >= ends[:, None]) | (positions < begins[:, None])
        distances = (span.lengths[:, None] - 1 - positions)[:, None]
        bias = self.bias(hidden.repeat(spec.kv_heads, axis=0)[:, None], spec, distances)
        return blocks, [QueryTile(span.begin, span.begin + len(span.lengths), 0, length, bias)]

    def prompt_tiles(self, spec: AttentionSpec, span: Span) -> list[QueryTile]:
        start, tiles = int(span.lengths[0]) - span.count, []
        begins, ends = seen_keys(spec, span)
        limits = last_seen(start, span) if spec.sees == PAST else np.full(span.count, ends[0] - 1)
        for begin in range(0, span.count, TILE_QUERIES):
            end = min(begin + TILE_QUERIES, span.count)
            queries = np.arange(start + begin, start + end)[:, None]
            seen_from = np.maximum(queries - (spec.window or queries[-1, 0] + 1), begins[0] - 1)
            first = max(0, int(seen_from[0, 0]) + 1) // self.block_size * self.block_size
            own = limits[begin:end, None]
            last = -(-(int(own.max()) + 1) // self.block_size) * self.block_size
            positions = np.arange(first, last)
            hidden = (positions > own) | (positions <= seen_from)
            tiles.append(
                QueryTile(
                    span.begin + begin,
                    span.begin + end,
                    first,
                    last,
                    self.bias(hidden[None], spec, (queries - positions)[None]),
                )
            )
        return tiles

    def bias(self, hidden: Any, spec: AttentionSpec, distances: Int64) -> torch.Tensor:
        """hidden bool [rows * kv_heads or 1, queries, keys], distances [rows, queries, keys] from key to
        query → what is added to scores, of the model's dtype; with ALiBi, and with biases, of each head.
        """
        bias = np.where(hidden, np.float32("-inf"), np.float32(0))
        if spec.alibi_slopes:
            bias = np.tile(bias, (1, spec.group, 1)) - falls_of(spec, distances)
        if spec.biases is not None:
            bias = bias + biases_of(spec.biases.numpy(), distances)
        return self.tensor(bias).to(self.dtype)

    def tensor(self, array: Any) -> torch.Tensor:
        return to_device(array, self.device)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if module.spec.sees == WHOLE:
            return self.attend_whole(module.spec, query, key, value)
        (slots, spans), spec = self.prepared[module.spec], module.spec
        stores = (module.keys, key, module.key_scale), (module.values, value, module.value_scale)
        for cache, new, scale in stores if spec.sees == PAST else ():
            lines = to_kv(new.reshape(-1, new.shape[-1]), cache.dtype, scale)
            raw(cache).view(-1, new.shape[-1]).index_copy_(0, slots, raw(lines))
        outputs = []
        for span in spans:
            keys = self.pages(module.keys, span, spec.kv_heads, module.key_scale)
            values = self.pages(module.values, span, spec.kv_heads, module.value_scale)
            keys = torch.cat((values, keys), -1) if spec.latent else keys
            for tile in span.tiles:
                queries = queries_of(query, tile, span.rows, spec.kv_heads)
                bias = of_heads(tile.bias, queries.shape[1])
                scores = self.scores(queries, keys[:, tile.first : tile.last], bias, spec)
                weights = (
                    torch.softmax(scores, -1)
                    if sinks is None
                    else softmax_with_sinks(scores, sinks, span.rows, spec)
                )
                output = torch.bmm(weights, values[:, tile.first : tile.last])
                outputs.append(
                    output.view(span.rows, query.shape[1], -1, value.shape[-1]).transpose(1, 2).flatten(0, 1)
                )
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)

    def attend_whole(
        self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """As `attend`, of whole sequences."""
        begin, parts = 0, []
        for count, length in self.groups:
            end = begin + count * length
            queries, keys, values = (rows_of(states, begin, end, length) for states in (query, key, value))
            mask = window_mask(length, spec.window, query.device)
            output = scaled_dot_product_attention(queries, keys, values, mask, scale=spec.scaling)
            parts.append(output.transpose(1, 2).reshape(end - begin, *output.shape[1::2]))
            begin = end
        return torch.cat(parts)[None]

    def pages(self, cache: torch.Tensor, span: GatheredSpan, kv_heads: int, scale: float) -> torch.Tensor:
        """→ [rows * kv_heads, tokens, dim] of the model's dtype"""
        dim = cache.shape[-1]
        gathered = raw(cache).view(-1, self.block_size * dim).index_select(0, span.pages)
        return from_kv(gathered.view(cache.dtype), self.dtype, scale).view(span.rows * kv_heads, -1, dim)

    def scores(
        self, queries: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """→ [rows * kv_heads, queries, keys]"""
        if spec.softcap is None:
            return torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=spec.scaling)
        return (
            torch.bmm(queries, keys.transpose(1, 2))
            .mul_(spec.scaling / spec.softcap)
            .tanh_()
            .mul_(spec.softcap)
            .add_(bias)
        )


def rows_of(states: torch.Tensor, begin: int, end: int, length: int) -> torch.Tensor:
    """states [1, heads, tokens, head_dim] → those of the sequences of one length, [sequences, heads, length,
    head_dim] of the same dtype
    """
    line = states[0].transpose(0, 1)[begin:end]
    return line.reshape(-1, length, *line.shape[1:]).transpose(1, 2)


def window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which places see each other, bool [length, length]; None if all do."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() < window


def last_seen(start: int, span: Span) -> Int64:
    """int64 [tokens]: the last position that each token of a prompt sees: its own, or its picture's last."""
    limits = np.arange(start, start + span.count)
    for first, end in span.pictures:
        limits[max(0, first - start) : end - start] = end - 1
    return limits


def of_heads(bias: torch.Tensor, num_queries: int) -> torch.Tensor:
    """bias [any, queries, keys] of any dtype → the same for all heads of a group, whose queries stand one
    after the other: [any, num_queries, keys], or any one that is added alike. Made for one layer at a time:
    of a long prompt, and many heads for one of K, all biases of a step would take gigabytes.
    """
    return bias if bias.shape[1] in (1, num_queries) else bias.repeat(1, num_queries // bias.shape[1], 1)


def falls_of(spec: AttentionSpec, distances: Int64) -> npt.NDArray[np.float32]:
    """distances int64 [rows, queries, keys] → float32 [rows * kv_heads, group * queries, keys]: how much
    ALiBi lowers scores.
    """
    slopes = np.array(spec.alibi_slopes, np.float32).reshape(1, spec.kv_heads, spec.group, 1, 1)
    falls = slopes * distances[:, None, None].astype(np.float32)
    return falls.reshape(len(distances) * spec.kv_heads, -1, distances.shape[-1])


def seen_keys(spec: AttentionSpec, span: Span) -> tuple[Int64, Int64]:
    """Where the keys of each row begin and end that the last token of the row sees, int64 [rows]. A row of
    which nothing is encoded sees one key: a sum needs one.
    """
    nothing = np.zeros_like(span.lengths)
    encoded = nothing if span.encoded is None else span.encoded
    if spec.sees == ENCODED:
        return nothing, np.maximum(1, encoded)
    if spec.window is None or span.count > 1:
        return encoded, span.lengths
    return np.maximum(encoded, span.lengths - spec.window), span.lengths


def biases_of(table: npt.NDArray[np.float32], distances: Int64) -> npt.NDArray[np.float32]:
    """table float32 [heads, distances], distances int64 [rows, queries, keys] → float32 [rows * heads,
    queries, keys]
    """
    found = table[:, distances.clip(0, table.shape[1] - 1)]
    return found.swapaxes(0, 1).reshape(-1, *distances.shape[1:])


def shifted(blocks: Int64, first: Int64, width: int) -> Int64:
    """Block numbers of each line, `width` from `first` on; scratch block 0 beyond its end."""
    index = first[:, None] + np.arange(width)
    found = np.take_along_axis(blocks, np.minimum(index, blocks.shape[1] - 1), axis=1)
    return np.where(index < blocks.shape[1], found, 0)


def queries_of(query: torch.Tensor, tile: QueryTile, rows: int, kv_heads: int) -> torch.Tensor:
    """query [1, heads, tokens, key_dim] → [rows * kv_heads, group * queries of a row, key_dim], the same
    dtype
    """
    heads, dim = query.shape[1], query.shape[3]
    queries = query[0, :, tile.begin : tile.end].view(heads, rows, -1, dim).transpose(0, 1)
    return queries.reshape(rows * kv_heads, -1, dim)


def softmax_with_sinks(
    scores: torch.Tensor, sinks: torch.Tensor, rows: int, spec: AttentionSpec
) -> torch.Tensor:
    """The softmax with one more score for each head, whose weight is then left out.

    scores [rows * kv_heads, group * queries, keys], sinks [heads] of any dtype → as scores
    """
    per_query = (
        sinks.to(scores.dtype)
        .repeat_interleave(scores.shape[1] // spec.group)
        .view(spec.kv_heads, -1, 1)
        .repeat(rows, 1, 1)
    )
    return torch.softmax(torch.cat((scores, per_query), -1), -1)[..., :-1]
