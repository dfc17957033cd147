"""The arguments of the native attention kernels: what the layers of a step share, and each module's cache."""

import ctypes
from ctypes import byref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.batch.inputs import Inputs, Span, offsets_of
from gpu_worker.engine.cpu import native

TILE_TOKENS = 32
"""Tokens of a prompt whose queries go over a chunk of keys together."""
SEGMENT = 1024
"""Keys that are summed by themselves, as in kernels/pages.h."""
UNITS_A_THREAD = 4
"""A tile with more than the work of a thread by this number is split."""


class KernelArguments:
    """Arguments of `tf_attend` and `tf_layers`, as pointers that stay valid for a step.

    Attributes:
        step: of the step that runs.
        caches: by attention module, from its first use on.
    """

    def __init__(self, library: ctypes.CDLL, block_size: int, dtype: torch.dtype) -> None:
        self.library = library
        self.block_size = block_size
        self.dtype = native.TYPE_CODES[dtype]
        self.step = byref(native.StepStruct())
        self.caches: dict[Any, native.CacheStruct] = {}
        self.step_arrays: tuple[npt.NDArray[Any], ...] = ()  # `step` points into these
        self.sinks: list[torch.Tensor] = []  # `caches` point into these

    def prepare_forward(self, inputs: Inputs) -> None:
        """Set the step that runs."""
        widths = [span.blocks.shape[1] for span in inputs.spans]
        starts = offsets_of(span.blocks.size for span in inputs.spans)
        tiles = np.concatenate(
            [
                tiles_of(span, start, width)
                for span, start, width in zip(inputs.spans, starts, widths, strict=False)
            ]
        )
        threads = torch.get_num_threads()
        parts = split_tiles(tiles, threads).astype(np.int32)
        tables = np.concatenate([span.blocks.ravel() for span in inputs.spans]).astype(np.int32)
        self.step_arrays = (inputs.slots, parts, tables)
        pointers = (array.ctypes.data for array in self.step_arrays)
        num_parts = int((parts[:, 5] > 1).sum())
        counts = (threads, len(inputs.slots), len(parts), self.block_size, num_parts)
        self.step = byref(native.StepStruct(*counts, *pointers))

    def cache_of(self, module: Any, sinks: torch.Tensor | None) -> native.CacheStruct:
        """What stays the same for an attention module in every step. sinks [heads] of any float dtype"""
        cache = self.caches.get(module)
        if cache is None:
            cache = self.caches[module] = self.make_cache(module, sinks)
        return cache

    def make_cache(self, module: Any, sinks: torch.Tensor | None) -> native.CacheStruct:
        """Make what `cache_of` returns. sinks [heads] of any float dtype"""
        keys, values, spec = module.keys, module.values, module.spec
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()
            self.sinks.append(sinks)
        return native.CacheStruct(
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

    def take_pages(self) -> None:
        """Point to the pages that the modules have got since `caches` were made."""
        for module, cache in self.caches.items():
            cache.pages = pages_of(module)


def pages_of(module: Any) -> native.PagesStruct:
    keys, values = module.keys, module.values
    return native.PagesStruct(
        keys.data_ptr(),
        values.data_ptr(),
        native.STORED_CODES.get(keys.dtype, 0),
        module.key_scale,
        module.value_scale,
    )


def tiles_of(span: Span, start: int, width: int) -> npt.NDArray[np.int64]:
    """→ int64 [tiles, 4], the first fields of a Tile in kernels/structs.h; a row's blocks begin at a multiple
    of `width` after `start` in the tables. A row and its proposals are one tile, which reads its blocks as
    the last of them has them: tokens that see each other's K are never in tiles of one token only.
    """
    if span.count == 1:
        last = np.cumsum(span.shares) - 1
        first = last - span.shares + 1
        return np.stack((span.begin + first, span.shares, span.lengths[first] - 1, start + last * width), 1)
    offsets = np.arange(0, span.count, TILE_TOKENS)
    counts = np.minimum(TILE_TOKENS, span.count - offsets)
    positions = span.lengths[0] - span.count + offsets
    return np.stack((span.begin + offsets, counts, positions, np.full_like(offsets, start)), 1)


def split_tiles(tiles: npt.NDArray[np.int64], threads: int) -> npt.NDArray[np.int64]:
    """Order tiles [tiles, 4] by their work, most first, and split large ones, so that threads end together
    → int64 [tiles and parts, 6] as in kernels/structs.h.
    """
    keys = tiles[:, 1] + tiles[:, 2]
    work = tiles[:, 1] * keys
    parts = np.where(work * threads * UNITS_A_THREAD > work.sum(), -(-keys // SEGMENT), 1)
    order = np.argsort(-work, kind="stable")
    counts = parts[order]
    part = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.column_stack((np.repeat(tiles[order], counts, axis=0), part, np.repeat(counts, counts)))
