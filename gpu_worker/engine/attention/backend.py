"""The attention backend's interface, and its registration with transformers under the name `tokenfleet`.

transformers calls `attend` from every attention module. The module carries its layer's K and V cache as plain
tensors, and the backend, which knows the step that runs: so no layer's signature changes, and a compiler sees
the same code in every layer.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from gpu_worker.engine.attention.kv_cache import Geometry, KVCache, over_latents
from gpu_worker.engine.batch.inputs import Inputs
from gpu_worker.engine.batch.step_result import Int32

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
        (AttentionSpec.latent) query is [1, heads, tokens, value_dim + key_dim]. `module`
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

    def agree(self, smallest: Callable[[int], int]) -> None:
        """Split the rows of the same steps on all ranks; `smallest`: the least number of all ranks."""


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
        module.spec = layer.spec
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
