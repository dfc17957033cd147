"""Attention on any device: gathers pages, then two batched products with a softmax between them.

Sequences that see each other as a whole (an encoder's, WHOLE) have no pages. Neighbours of one length are one
call of torch's attention: nothing is padded, and what a sequence gets does not depend on those beside it.
"""

from collections.abc import Iterator
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
    Geometry,
    LayerSpec,
    from_kv,
    raw,
    to_kv,
)
from gpu_worker.engine.batch.inputs import Inputs, RowTable, to_device
from gpu_worker.engine.batch.step_result import Int64

TILE_QUERIES = 128
"""Queries of a prompt that attend at once: their scores stay within the processor's caches."""
MAX_PADDING = 512
"""Rows that decode are padded to the longest of their tile: at most to twice their own length, or by this
number of tokens.
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `begin` to `end` of the step, equally many of each of `rows` rows; the pages that they see, and
    the bias that hides all but what each query sees. Ready for every layer of a view.

    Attributes:
        pages: picks [rows, kv_heads, blocks] of the cache seen as [blocks * kv_heads] pages.
        bias: [rows * kv_heads or 1, queries of a row, keys], the same for all heads of a group; with ALiBi
            one after the other.
    """

    begin: int
    end: int
    rows: int
    pages: torch.Tensor
    bias: torch.Tensor


PreparedStep = tuple[torch.Tensor, list[Tile]]
"""What the layers of one view share in a step: lines of the cache seen as [blocks * kv_heads * block_size]
lines, int64 [kv_heads * tokens], and tiles.
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
        self.specs = {view for view in geometry.views if view.sees != WHOLE}
        self.groups: list[tuple[int, int]] = []
        self.prepared: dict[LayerSpec, PreparedStep] = {}

    def prepare_forward(self, inputs: Inputs) -> None:
        self.groups = [(len([*same]), length) for length, same in groupby(one.count for one in inputs.slices)]
        self.prepared = {spec: self.prepare(spec, inputs.rows) for spec in self.specs}

    def prepare(self, spec: LayerSpec, rows: RowTable) -> PreparedStep:
        blocks, offsets = np.divmod(rows.slots, self.block_size)
        slots = (blocks * spec.kv_heads + np.arange(spec.kv_heads)[:, None]) * self.block_size + offsets
        return self.tensor(slots.reshape(-1)), [self.tile(spec, rows, *part) for part in parts_of(rows)]

    def tile(self, spec: LayerSpec, table: RowTable, begin: int, owners: Int64, queries: Int64) -> Tile:
        """queries int64 [rows, queries]: positions, the first of which is that of the step's token `begin`;
        owners int64 [rows]: their rows in the table.
        """
        size, rows = self.block_size, len(queries)
        hidden, last = seen_keys(spec, table, owners, queries)
        first = (hidden.min(1) + 1) // size
        blocks = table.blocks_of(owners, first, int((last.max(1) // size - first).max()) + 1)
        positions = (np.arange(blocks.shape[1] * size) + first[:, None] * size)[:, None]
        is_hidden = (positions > last[..., None]) | (positions <= hidden[..., None])
        is_hidden = is_hidden.repeat(spec.kv_heads if rows > 1 else 1, axis=0)
        bias = self.bias(is_hidden, spec, queries[..., None] - positions)
        pages = blocks[:, None] * spec.kv_heads + np.arange(spec.kv_heads)[:, None]
        return Tile(begin, begin + queries.size, rows, self.tensor(pages.reshape(-1)), bias)

    def bias(self, hidden: Any, spec: LayerSpec, distances: Int64) -> torch.Tensor:
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
        (slots, tiles), spec = self.prepared[module.spec], module.spec
        stores = (module.keys, key, module.key_scale), (module.values, value, module.value_scale)
        for cache, new, scale in stores if spec.sees == PAST else ():
            lines = to_kv(new.reshape(-1, new.shape[-1]), cache.dtype, scale)
            raw(cache).view(-1, new.shape[-1]).index_copy_(0, slots, raw(lines))
        outputs = []
        for tile in tiles:
            keys = self.pages(module.keys, tile, spec.kv_heads, module.key_scale)
            values = self.pages(module.values, tile, spec.kv_heads, module.value_scale)
            keys = torch.cat((values, keys), -1) if spec.latent else keys
            queries = queries_of(query, tile, spec.kv_heads)
            scores = self.scores(queries, keys, of_heads(tile.bias, queries.shape[1]), spec)
            weights = (
                torch.softmax(scores, -1)
                if sinks is None
                else softmax_with_sinks(scores, sinks, tile.rows, spec)
            )
            output = torch.bmm(weights, values).view(tile.rows, query.shape[1], -1, value.shape[-1])
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return (outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)

    def attend_whole(
        self, spec: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
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

    def pages(self, cache: torch.Tensor, tile: Tile, kv_heads: int, scale: float) -> torch.Tensor:
        """→ [rows * kv_heads, tokens, dim] of the model's dtype"""
        dim = cache.shape[-1]
        gathered = raw(cache).view(-1, self.block_size * dim).index_select(0, tile.pages)
        return from_kv(gathered.view(cache.dtype), self.dtype, scale).view(tile.rows * kv_heads, -1, dim)

    def scores(
        self, queries: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor, spec: LayerSpec
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


def of_heads(bias: torch.Tensor, num_queries: int) -> torch.Tensor:
    """bias [any, queries, keys] of any dtype → the same for all heads of a group, whose queries stand one
    after the other: [any, num_queries, keys], or any one that is added alike. Made for one layer at a time:
    of a long prompt, and many heads for one of K, all biases of a step would take gigabytes.
    """
    return bias if bias.shape[1] in (1, num_queries) else bias.repeat(1, num_queries // bias.shape[1], 1)


def falls_of(spec: LayerSpec, distances: Int64) -> npt.NDArray[np.float32]:
    """distances int64 [rows, queries, keys] → float32 [rows * kv_heads, group * queries, keys]: how much
    ALiBi lowers scores.
    """
    slopes = np.array(spec.alibi_slopes, np.float32).reshape(1, spec.kv_heads, spec.group, 1, 1)
    falls = slopes * distances[:, None, None].astype(np.float32)
    return falls.reshape(len(distances) * spec.kv_heads, -1, distances.shape[-1])


def parts_of(rows: RowTable) -> Iterator[tuple[int, Int64, Int64]]:
    """Yield what each tile has: where its tokens begin in the step, their rows int64 [n] and positions int64
    [n, queries]. Rows that decode are together if they are of about one length; a proposal is a row of its
    own.
    """
    first, num = 0, rows.num_decoding
    while first < num:
        longest, own = rows.lengths[first], rows.lengths[first:num]
        differs = (own > longest) | (own < min(-(-longest // 2), longest - MAX_PADDING))
        last = first + int(differs.argmax()) if differs.any() else num
        begin, end = rows.begins[[first, last]].tolist()
        yield begin, rows.owners(first, last), rows.positions[begin:end, None]
        first = last
    for row in range(num, len(rows.lengths)):
        start, end = rows.begins[row : row + 2].tolist()
        for begin in range(start, end, TILE_QUERIES):
            yield begin, np.array([row]), rows.positions[None, begin : min(end, begin + TILE_QUERIES)]


def seen_keys(spec: LayerSpec, rows: RowTable, owners: Int64, queries: Int64) -> tuple[Int64, Int64]:
    """The last key before those that each query sees, and the last that it sees, its own or its picture's:
    int64 [rows, queries], as the queries' positions. A row of which nothing is encoded sees one key: a sum
    needs one.
    """
    encoded = np.zeros_like(queries) if rows.encoded is None else rows.encoded[owners, None] + 0 * queries
    if spec.sees == ENCODED:
        return np.full_like(queries, -1), np.maximum(0, encoded - 1)
    last = queries.copy()
    for first, end in rows.pictures.get(int(owners[0]), ()):
        last[(first <= queries) & (queries < end)] = end - 1
    return np.maximum(encoded - 1, queries - spec.window if spec.window else -1), last


def biases_of(table: npt.NDArray[np.float32], distances: Int64) -> npt.NDArray[np.float32]:
    """table float32 [heads, distances], distances int64 [rows, queries, keys] → float32 [rows * heads,
    queries, keys]
    """
    found = table[:, distances.clip(0, table.shape[1] - 1)]
    return found.swapaxes(0, 1).reshape(-1, *distances.shape[1:])


def queries_of(query: torch.Tensor, tile: Tile, kv_heads: int) -> torch.Tensor:
    """query [1, heads, tokens, key_dim] → [rows * kv_heads, group * queries of a row, key_dim], the same
    dtype
    """
    heads, dim = query.shape[1], query.shape[3]
    queries = query[0, :, tile.begin : tile.end].view(heads, tile.rows, -1, dim).transpose(0, 1)
    return queries.reshape(tile.rows * kv_heads, -1, dim)


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor, rows: int, spec: LayerSpec) -> torch.Tensor:
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
