"""The interface of attention backends, registered with transformers as `tokenfleet`; and the cache over which
they attend.

transformers calls `attend` from every attention module. The module carries its layer's K and V cache as plain
tensors, and the backend, which knows the step that runs: so no layer's signature changes, and a compiler sees
the same code in every layer.

The paged KV cache has for each layer one tensor of K and one of V, `[blocks, kv_heads, block_size,
dim]`, in the model's dtype or in 8-bit floats. Block 0 is scratch.

8-bit floats hold a number divided by its layer's scale, at most the largest number of their dtype from zero.

Multi-head latent attention (MLA, arXiv:2405.04434) keeps latents of a token in place of K and V. K and V of
all heads are products of one latent with a weight, but for a rotary part of K, which all heads share.
Attention over these is attention over the latents themselves, with queries multiplied by the part of the
weight that makes K, and outputs by the part that makes V: one K head for all, and one latent and one rotary
part in the cache.
"""

import functools
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from common.settings.settings import SettingError
from gpu_worker.engine.batch.inputs import Inputs, to_device
from gpu_worker.engine.batch.step_result import Int32

FLOATS8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""By KV_CACHE_DTYPE."""


def to_kv(numbers: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """numbers [...] of a model's dtype → the same shape in the cache's dtype"""
    if dtype not in FLOATS8.values():
        return numbers
    largest = torch.finfo(dtype).max
    return (numbers.float() / scale).clamp(-largest, largest).to(dtype)


def from_kv(pages: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """pages [...] of the cache's dtype → the same shape in the model's dtype"""
    return pages if pages.dtype == dtype else pages.to(dtype) * scale


def raw(pages: torch.Tensor) -> torch.Tensor:
    """pages [...] of the cache's dtype → a view that torch can index: 8-bit floats as uint8"""
    return pages.view(torch.uint8) if pages.dtype in FLOATS8.values() else pages


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Write in place. keys, values [blocks, kv_heads, block_size, dim] of the cache's dtype, contiguous; key,
    value [kv_heads, tokens, dim] of the model's dtype, with any strides of heads and tokens; slots int
    [tokens]: block * block_size + offset. `scales`: what 8-bit floats of K and of V are multiplied with.
    """
    if key.is_cuda:
        from gpu_worker.engine.cuda.kernels.kv_write import (
            write_keys_and_values,  # Triton: in CUDA builds only
        )

        write_keys_and_values(keys, values, key, value, slots, scales)
    else:
        blocks, offsets = slots // keys.shape[2], slots % keys.shape[2]
        for pages, new, scale in zip((keys, values), (key, value), scales, strict=True):
            raw(pages)[blocks, :, offsets] = raw(to_kv(new.transpose(0, 1), pages.dtype, scale))


def fill_kv(store: torch.Tensor, blocks: torch.Tensor, value: float) -> None:
    """Fill in place. store [tensors, blocks, kv_heads, block_size, dim], contiguous; blocks int64 [n]. On
    CUDA torch would need one launch for every 2 GiB of a store, however few blocks are filled.
    """
    number = raw(torch.tensor(value).to(store.dtype)).item()
    if store.is_cuda:
        from gpu_worker.engine.cuda.kernels.kv_write import fill_blocks

        fill_blocks(raw(store), blocks, number)
    else:
        raw(store).index_fill_(1, blocks, number)


def copy_kv(store: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy blocks in place. store [tensors, blocks, kv_heads, block_size, dim], contiguous; sources and
    targets int64 [n], no block of which is both.
    """
    if store.is_cuda:
        from gpu_worker.engine.cuda.kernels.kv_write import copy_blocks

        copy_blocks(raw(store), sources, targets)
    else:
        raw(store)[:, targets] = raw(store)[:, sources]


PAST, WHOLE, ENCODED = "past", "whole", "encoded"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What the attention of one layer keeps of each token, and how queries meet it. Without scales it is a
    view: what its kernels must know. Layers with the same view share what a step prepares.

    Attributes:
        group: query heads that share one K head.
        window: keys that a query sees, its own included; None is all that it `sees`.
        scaling: what scores are multiplied with.
        softcap: bounds scores as in Gemma 2 (arXiv:2408.00118).
        alibi_slopes: how much scores fall for each token between key and query, by head (arXiv:2108.12409).
        latent: the cache has latents in place of V, and the rotary part of K in place of K: a K head is the
            latent, then the rotary part.
        sees: PAST: the tokens up to a query's own. WHOLE: all of its sequence, which one step computes, so
            that nothing is kept in the cache; those fewer than `window` places away. ENCODED: a prompt of
            which an encoder made K and V.
        biases: float32 [heads, distances]; what is added to scores by the distance from key to query, as in
            T5 (arXiv:1910.10683). Those beyond the last count as it.
        key_scale, value_scale: what 8-bit floats are multiplied with to give K and V.
    """

    kv_heads: int
    group: int
    window: int | None
    scaling: float
    key_dim: int
    value_dim: int
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    latent: bool = False
    sees: str = PAST
    biases: torch.Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def view(self) -> "LayerSpec":
        return replace(self, key_scale=1.0, value_scale=1.0)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a model keeps of each token.

    Attributes:
        dtype: what it computes in.
        kv_dtype: what the cache holds K and V in.
        draft_bytes: of a block in the cache of a draft model, which has as many blocks.
    """

    layers: list[LayerSpec]
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    draft_bytes: int = 0

    @property
    def unrounded(self) -> "Geometry":
        """The same geometry with a cache of the model's dtype."""
        return replace(self, layers=[layer.view for layer in self.layers], kv_dtype=self.dtype)

    @property
    def views(self) -> list[LayerSpec]:
        """Each once, in the order of their first layers."""
        return list(dict.fromkeys(layer.view for layer in self.layers))

    @property
    def block_bytes(self) -> int:
        numbers = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return numbers * self.block_size * self.kv_dtype.itemsize + self.draft_bytes

    def num_blocks(self, kv_cache_bytes: int, available_bytes: int) -> int:
        """Blocks that may be granted; the scratch block comes on top. Without attention blocks take no room,
        and any number fits. Raises SettingError.
        """
        if kv_cache_bytes > available_bytes:
            raise SettingError(
                "kv_cache_bytes",
                f"{kv_cache_bytes >> 20} MiB, but only {available_bytes >> 20} MiB of memory are available",
            )
        if not self.layers:
            return sys.maxsize
        if kv_cache_bytes < self.block_bytes:
            block = f"one block of {self.block_size} tokens of this model takes {self.block_bytes} bytes"
            raise SettingError("kv_cache_bytes", f"{kv_cache_bytes} bytes are too few: {block}")
        return kv_cache_bytes // self.block_bytes


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor [*shape] of `dtype`. On CPU the system hands out zeroed pages as they are first touched;
    `torch.zeros` would write a gigabyte at every start.
    """
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class KVCache:
    """The K and V of all layers. Those of one shape, in most models all, lie in one tensor: so one call fills
    a block of all layers.

    Attributes:
        keys: by layer, [blocks, kv_heads, block_size, key_dim] of the cache's dtype.
        values: by layer, [blocks, kv_heads, block_size, value_dim] of the cache's dtype.
    """

    def __init__(self, geometry: Geometry, num_blocks: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.device = device
        pages = [
            (layer.kv_heads, geometry.block_size, dim)
            for layer in geometry.layers
            for dim in (layer.key_dim, layer.value_dim)
        ]
        self.stores = {
            page: zeros((num, num_blocks + 1, *page), geometry.kv_dtype, device)
            for page, num in Counter(pages).items()
        }
        parts = {page: iter(store) for page, store in self.stores.items()}
        tensors = [next(parts[page]) for page in pages]
        self.keys = tensors[::2]
        self.values = tensors[1::2]

    def fill(self, blocks: Sequence[int], value: float) -> None:
        index = to_device(list(blocks), self.device)
        for store in filter(torch.numel, self.stores.values()):
            fill_kv(store, index, value)

    @torch.inference_mode()
    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of all layers: (source, target), no block of which is both."""
        sources, targets = to_device(list(zip(*copies, strict=True)), self.device)
        for store in self.stores.values():
            copy_kv(store, sources, targets)


log = logging.getLogger(__name__)

Attend = Callable[..., tuple[torch.Tensor, None]]
"""What transformers calls, with an attention module and its query, K and V first."""


class LatentProjection(nn.Module):
    """Stands for the linear layer that makes K and V of latents.

    Attributes:
        key_weight: [heads, key_dim, rank] of the model's dtype; K without its rotary part.
        value_weight: [heads, rank, value_dim] of the model's dtype.
    """

    key_weight: torch.Tensor
    value_weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, key_dim: int, value_dim: int) -> None:
        """weight [heads * (key_dim + value_dim), rank] of the model's dtype"""
        super().__init__()
        heads = weight.detach().view(-1, key_dim + value_dim, weight.shape[1])
        self.register_buffer("key_weight", heads[:, :key_dim].contiguous())
        self.register_buffer("value_weight", heads[:, key_dim:].transpose(1, 2).contiguous())

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """query [1, heads, tokens, key_dim + rotary_dim] of the model's dtype → [1, heads, tokens, rank +
        rotary_dim]: what meets a latent and its rotary part
        """
        key_dim = self.key_weight.shape[1]
        return torch.cat((query[..., :key_dim] @ self.key_weight, query[..., key_dim:]), -1)

    def expand(self, output: torch.Tensor) -> torch.Tensor:
        """output [1, tokens, heads, rank] of the model's dtype → [1, tokens, heads, value_dim]"""
        return (output.transpose(1, 2) @ self.value_weight).transpose(1, 2)


def over_latents(attend: Attend) -> Attend:
    """An attention function for all modules of one for K and V: those that keep latents give it the rotary
    part for K and the latent for V, and `LayerSpec.latent` says so.
    """

    def attend_all(module: Any, query: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, None]:
        """query [1, heads, tokens, dim] of the model's dtype → [1, tokens, heads, value_dim]"""
        if not keeps_latents(module):
            return attend(module, query, *rest, **options)
        output, _ = attend(module, module.kv_b_proj.absorb(query), *rest, **options)
        return module.kv_b_proj.expand(output), None

    return attend_all


def keeps_latents(module: Any) -> bool:
    return getattr(type(module), "keeps_latents", False)


def keep_latents(model: Any) -> None:
    """Make the latent attention of a model keep latents, before its linear layers are replaced by faster
    ones.
    """
    for name, module in list(model.named_modules()):
        if not hasattr(type(module), "expand_kv"):
            continue
        linear = module.kv_b_proj
        if type(linear) is not nn.Linear or linear.bias is not None:
            log.warning("%s keeps K and V, not latents: its kv_b_proj is %s", name, type(linear).__name__)
            continue
        module.kv_b_proj = LatentProjection(linear.weight, module.qk_nope_head_dim, module.v_head_dim)
        module.__class__ = latent_class(type(module))


@functools.cache
def latent_class(own: type[Any]) -> type[Any]:
    """A class of attention modules that expand no latents. One for all layers: a function of each instance
    would be compiled for each.
    """
    changes = {
        "expand_kv": lambda module, latent, rotary: (rotary, latent),  # they stand for K and V
        "keeps_latents": True,
        "__module__": own.__module__,
    }
    return type(own.__name__, (own,), changes)


NAME = "tokenfleet"


class AttentionBackend:
    """The attention of all layers on one device.

    Attributes:
        geometry: what the cache keeps of each token for this backend.
        capturable: the backend has `plan_decode` and `prepare_decode`, so steps in which all rows decode can
            be captured as CUDA graphs.
        plan_free: captured steps need no `plan_decode`: sums are split by the shape of a step, and by whether
            rows are split for the sake of a long one.
        compilable: compilers see one operation in `attend`. They would look into other backends, and compile
            anew for most steps.
        modules: the attention modules, in the order of layers.
    """

    capturable = False
    plan_free = False
    compilable = False

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.block_size = geometry.block_size
        self.modules: list[Any] = []

    def take_pages(self) -> None:
        """Follow the modules to a new cache."""

    def prepare_forward(self, inputs: Inputs) -> None:
        """Prepare a forward: compute what its layers share."""

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write K and V of the step's tokens and attend over the cache.

        All of one dtype, float32, float16 or bfloat16: query [1, heads, tokens, key_dim], key [1, kv_heads,
        tokens, key_dim], value [1, kv_heads, tokens, value_dim]; `sinks` [heads] are scores that take their
        share of each softmax and add nothing, as in gpt-oss → [1, tokens, heads, value_dim]. Of latents
        (LayerSpec.latent) query is [1, heads, tokens, value_dim + key_dim]. `module`
        carries `keys`, `values`, `spec`, `key_scale` and `value_scale` of its layer.
        """
        raise NotImplementedError

    def plan_decode(self, positions: Int32, table: Int32) -> None:
        """Prepare a `prepare_decode`: positions int32 [rows], table int32 [rows, blocks]."""

    def prepare_decode(self, positions: torch.Tensor, table: torch.Tensor, is_split: bool = False) -> None:
        """Prepare a forward of rows that all decode and are planned, from tensors on the device: positions
        int32 [rows], table int32 [rows, blocks]. `is_split`: rows are split.
        """

    def splits_rows(self, lengths: Int32) -> bool:
        """Whether rows that decode are split for the sake of a long one: lengths int [rows] in the cache."""
        return False

    def agree(self, exchange: Callable[[Any], list[Any]]) -> None:
        """Split the rows of the same steps on all ranks; `exchange` gives what all of them give."""


@over_latents
def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    s_aux: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query [1, heads, tokens, key_dim] of the model's dtype and the rest with
    shapes as in AttentionBackend.attend; `s_aux` are its sinks.
    """
    return module.backend.attend(module, query, key, value, s_aux), None


def attach(modules: Iterable[Any], geometry: Geometry, cache: KVCache, backend: AttentionBackend) -> None:
    """Set cache and backend on the attention modules, which are in the order of layers."""
    backend.modules = list(modules)
    for number, (module, layer) in enumerate(zip(backend.modules, geometry.layers, strict=True)):
        module.keys = cache.keys[number]
        module.values = cache.values[number]
        module.backend = backend
        module.layer = torch.tensor(number)
        module.spec = layer.view
        module.key_scale = layer.key_scale
        module.value_scale = layer.value_scale
        module.view_number = geometry.views.index(layer.view)
        module.kept_dim = layer.value_dim
    backend.take_pages()


def register() -> None:
    """Register `attend`, and no mask: the backend knows which token sees which. Without a mask function
    transformers does not look for sequences packed into its input, for which the host would wait for the
    device.
    """
    AttentionInterface.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(NAME, None)


register()
