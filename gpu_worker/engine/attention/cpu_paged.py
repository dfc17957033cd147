"""Attention on CPU through the native kernels: over pages where they lie, without gathering them."""

import ctypes
from ctypes import byref
from typing import Any

import numpy as np
import torch

from gpu_worker.engine.attention.kv_cache import Geometry
from gpu_worker.engine.batch.inputs import Inputs, Span, offsets_of
from gpu_worker.engine.cpu import native

TILE = 16  # tokens of a prompt whose queries go over a chunk of keys together


def supports(geometry: Geometry) -> bool:
    """K dimensions are multiplied in pairs."""
    return all(layer.key_dim % 2 == 0 for layer in geometry.layers)


class CpuPagedBackend:
    """Its K pages are transposed, `[key_dim / 2, block_size, 2]` or `[key_dim, block_size]`: one load takes
    numbers of many keys.
    """

    plan_free = opaque = False

    def __init__(self, geometry: Geometry, library: ctypes.CDLL) -> None:
        self.block_size, self.dtype, self.library = (
            geometry.block_size,
            native.TYPE_CODES[geometry.dtype],
            library,
        )
        self.caches: dict[Any, native.CacheStruct] = {}
        self.kept: list[torch.Tensor] = []
        self.step = byref(native.StepStruct())
        self.arrays: tuple[Any, ...] = ()
        self.modules: list[Any] = []

    def begin(self, inputs: Inputs) -> None:
        widths = [span.blocks.shape[1] for span in inputs.spans]
        starts = offsets_of(span.blocks.size for span in inputs.spans)
        tiles = np.concatenate(
            [
                tiles_of(span, start, width)
                for span, start, width in zip(inputs.spans, starts, widths, strict=False)
            ]
        )
        tables = np.concatenate([span.blocks.ravel() for span in inputs.spans])
        self.arrays = slots, tiles, tables = inputs.slots, tiles.astype(np.int32), tables.astype(np.int32)
        pointers = (array.ctypes.data for array in (slots, tiles, tables))
        step = native.StepStruct(torch.get_num_threads(), len(slots), len(tiles), self.block_size, *pointers)
        self.step = byref(step)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        cache = self.caches.get(module)
        if cache is None:
            cache = self.caches[module] = self.cache(module, sinks)
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        query, key, value = dense(query), dense(key), dense(value)
        self.library.tf_attend(
            self.dtype,
            self.step,
            byref(cache),
            byref(heads(query)),
            byref(heads(key)),
            byref(heads(value)),
            output.data_ptr(),
        )
        return output

    def cache(self, module: Any, sinks: torch.Tensor | None) -> native.CacheStruct:
        """What stays the same for a module in every step."""
        keys, values, spec = module.keys, module.values, module.spec
        if sinks is not None:
            self.kept.append(sinks := sinks.detach().float().contiguous())
        return native.CacheStruct(
            keys.data_ptr(),
            values.data_ptr(),
            spec.kv_heads,
            spec.group,
            keys.shape[3],
            values.shape[3],
            spec.window or 0,
            spec.scaling,
            spec.softcap or 0.0,
            None if sinks is None else sinks.data_ptr(),
        )


def tiles_of(span: Span, start: int, width: int) -> Any:
    """→ [tiles, 4] as in cpu/kernels/shapes.h; a row's blocks begin at a multiple of `width` after `start` in
    the tables.
    """
    if span.count == 1:
        rows = np.arange(len(span.lengths))
        return np.stack((span.begin + rows, np.ones_like(rows), span.lengths - 1, start + rows * width), 1)
    offsets = np.arange(0, span.count, TILE)
    counts = np.minimum(TILE, span.count - offsets)
    return np.stack(
        (span.begin + offsets, counts, span.lengths[0] - span.count + offsets, np.full_like(offsets, start)),
        1,
    )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def heads(tensor: torch.Tensor) -> native.HeadsStruct:
    """Of [1, heads, tokens, dim]."""
    return native.HeadsStruct(tensor.data_ptr(), tensor.stride(2), tensor.stride(1))
