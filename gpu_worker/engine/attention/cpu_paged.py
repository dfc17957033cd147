"""Attention on CPU by the native kernels: K and V are read where they lie in their pages, not gathered."""

import ctypes
from ctypes import byref
from typing import Any

import torch

from gpu_worker.engine.attention.kv_cache import Geometry
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.kernel_arguments import KernelArguments


def supports(geometry: Geometry) -> bool:
    """K dimensions are multiplied in pairs; scores have no biases and a scaling above 0; K and V are no
    latents.
    """
    return all(
        layer.key_dim % 2 == 0
        and layer.spec.scaling > 0
        and not layer.spec.alibi_slopes
        and not layer.spec.latent
        for layer in geometry.layers
    )


class CpuPagedBackend(KernelArguments):
    """Attention with these arguments. K pages are transposed, `[key_dim / 2, block_size, 2]` or `[key_dim,
    block_size]`: one load takes numbers of many keys.
    """

    capturable = False
    plan_free = False
    compilable = False

    def __init__(self, geometry: Geometry, library: ctypes.CDLL) -> None:
        super().__init__(library, geometry.block_size, geometry.dtype)
        self.geometry = geometry
        self.modules: list[Any] = []

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
        heads = (byref(heads_of(tensor)) for tensor in (query, key, value))
        self.library.tf_attend(self.dtype, self.step, byref(cache), *heads, output.data_ptr())
        return output


def with_dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, dim] of any dtype → the same, the numbers of a head next to each other"""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def heads_of(tensor: torch.Tensor) -> native.HeadsStruct:
    """[1, heads, tokens, dim] of any dtype, dense heads"""
    return native.HeadsStruct(tensor.data_ptr(), tensor.stride(2), tensor.stride(1))
