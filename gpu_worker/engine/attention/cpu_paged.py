"""Attention on CPU by the native kernels: K and V are read where they lie in their pages, not gathered."""

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import byref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.attention.backend import AttentionBackend, Geometry
from gpu_worker.engine.batch.inputs import Inputs, RowTable
from gpu_worker.engine.batch.step_result import Int64
from gpu_worker.engine.cpu import native

TILE_TOKENS = 32
"""Tokens of a prompt whose queries go over a chunk of keys together."""
SEGMENT = 1024
"""Keys that are summed by themselves, as in kernels/pages.h."""
UNITS_A_THREAD = 4
"""A tile with more than the work of a thread by this number is split."""


def supports(geometry: Geometry) -> bool:
    """K dimensions are multiplied in pairs; scores have no biases and a scaling above 0; K and V are no
    latents.
    """
    return all(
        layer.key_dim % 2 == 0 and layer.scaling > 0 and not layer.alibi_slopes and not layer.latent
        for layer in geometry.layers
    )


class CpuPagedBackend(AttentionBackend):
    """Arguments of `tf_attend` and `tf_layers`, as pointers that stay valid for a step. K pages are
    transposed, `[key_dim / 2, block_size, 2]` or `[key_dim, block_size]`: one load takes numbers of many
    keys.

    Attributes:
        step: what the layers of the step that runs share.
        caches: by attention module, from its first use on.
        adapters: those of the layers; None where there can be none.
    """

    adapters: Any = None

    def __init__(self, geometry: Geometry, library: ctypes.CDLL) -> None:
        super().__init__(geometry)
        self.library = library
        self.dtype = native.TYPE_CODES[geometry.dtype]
        self.step = byref(native.structs["Step"]())
        self.caches: dict[Any, ctypes.Structure] = {}
        self.step_arrays: tuple[npt.NDArray[Any], ...] = ()  # `step` points into these
        self.sinks: list[torch.Tensor] = []  # `caches` point into these

    def prepare_forward(self, inputs: Inputs) -> None:
        """Set the step that runs."""
        rows, threads = inputs.rows, torch.get_num_threads()
        parts = split_tiles(tiles_of(rows), threads).astype(np.int32)
        self.step_arrays = (rows.slots, parts, rows.blocks)
        pointers = (array.ctypes.data for array in self.step_arrays)
        num_parts = int((parts[:, 6] > 1).sum())
        counts = (threads, len(rows.slots), len(parts), self.block_size, num_parts)
        adapters = self.adapters.address if self.adapters else None
        self.step = byref(native.structs["Step"](*counts, *pointers, adapters))

    def cache_of(self, module: Any, sinks: torch.Tensor | None) -> ctypes.Structure:
        """What stays the same for an attention module in every step. sinks [heads] of any float dtype"""
        if cache := self.caches.get(module):
            return cache
        keys, values, spec = module.keys, module.values, module.spec
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()
            self.sinks.append(sinks)
        cache = self.caches[module] = native.structs["Cache"](
            pages_of(module),
            spec.kv_heads,
            spec.group,
            keys.shape[3],
            values.shape[3],
            spec.window or 0,
            spec.scaling,
            spec.softcap or 0.0,
            None if sinks is None else sinks.data_ptr(),
        )
        return cache

    def take_pages(self) -> None:
        """Point to the pages that the modules have got since `caches` were made."""
        for module, cache in self.caches.items():
            cache.pages = pages_of(module)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [1, heads, tokens, key_dim], key and value [1, kv_heads, tokens, dim], sinks [heads], all of
        the model's dtype → [1, tokens, heads, value_dim]
        """
        cache = self.cache_of(module, sinks)
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        # variables: a contiguous copy must outlive the call
        query = with_dense_heads(query)
        key = with_dense_heads(key)
        value = with_dense_heads(value)
        heads = (
            byref(native.structs["Heads"](one.data_ptr(), one.stride(2), one.stride(1)))
            for one in (query, key, value)
        )
        self.library.tf_attend(self.dtype, self.step, byref(cache), *heads, output.data_ptr())
        return output


def with_dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, dim] of any dtype → the same, the numbers of a head next to each other"""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def pages_of(module: Any) -> ctypes.Structure:
    keys, values = module.keys, module.values
    return native.structs["Pages"](
        keys.data_ptr(),
        values.data_ptr(),
        native.STORED_CODES.get(keys.dtype, 0),
        module.key_scale,
        module.value_scale,
    )


def tiles_of(rows: RowTable) -> Int64:
    """→ int64 [tiles, 5], the first fields of a Tile in kernels/structs.h. A row that decodes and its
    proposals are one tile: tokens that see each other's K are never in tiles of one token only.
    """
    whole = np.stack(
        (rows.begins[:-1], rows.counts, rows.lengths - rows.counts, rows.starts[:-1], 0 * rows.counts), 1
    )
    tiles = [whole[: rows.num_decoding]]
    for row, (token, count, position, table, _) in enumerate(
        whole[rows.num_decoding :].tolist(), len(tiles[0])
    ):
        for begin, end, seen in pieces_of(position, position + count, rows.pictures.get(row, ())):
            places = np.arange(begin, end, TILE_TOKENS)
            same = np.full((2, len(places)), [[table], [seen]])
            tiles.append(
                np.stack((token + places - position, np.minimum(TILE_TOKENS, end - places), places, *same), 1)
            )
    return np.concatenate(tiles)


def pieces_of(begin: int, end: int, pictures: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, keys that all tokens see) of what lies between and within pictures that are seen as
    one.
    """
    for first, last in pictures:
        if begin < first:
            yield begin, first, 0
        begin = max(begin, first)
        yield begin, min(end, last), last
        begin = min(end, last)
    if begin < end:
        yield begin, end, 0


def split_tiles(tiles: Int64, threads: int) -> Int64:
    """Order tiles [tiles, 5] by their work, most first, and split large ones, so that threads end together
    → int64 [tiles and parts, 7] as in kernels/structs.h.
    """
    keys = np.maximum(tiles[:, 1] + tiles[:, 2], tiles[:, 4])
    work = tiles[:, 1] * keys
    parts = np.where(work * threads * UNITS_A_THREAD > work.sum(), -(-keys // SEGMENT), 1)
    order = np.argsort(-work, kind="stable")
    counts = parts[order]
    part = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.column_stack((np.repeat(tiles[order], counts, axis=0), part, np.repeat(counts, counts)))
