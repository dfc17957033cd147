"""Paged attention under transformers' model code.

transformers calls `attend` from every attention module. The module carries its layer's K and V cache as plain tensors, and the backend,
which knows the step that runs: so no layer's signature changes, and a compiler sees the same code in every layer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from gpu_worker.engine.cache import Cache, Geometry, Layer, View
from gpu_worker.engine.inputs import Inputs

NAME = "tokenfleet"
LONG = 4096
"""A mask that says of no window is compared with a causal one up to twice this many tokens."""


class Unservable(Exception):
    """The model needs something that this attention does not have."""


class Backend(Protocol):
    """
    Attributes:
        plan_free: whether it has `begin_decode`, so that steps in which all rows decode can be captured.
        opaque: whether compilers see one operation in `attend`. Into others they would look, and compile anew for most steps.
        modules: the attention modules, in the order of layers.
    """

    plan_free: bool
    opaque: bool
    modules: list[Any]

    def begin(self, inputs: Inputs) -> None:
        """Called before each forward: what layers share is computed here."""

    def attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Writes K and V of the step's tokens and attends over the cache.

        query [1, heads, tokens, key_dim], key [1, kv_heads, tokens, key_dim], value [1, kv_heads, tokens, value_dim]; `module` carries
        `keys`, `values` and `view` of its layer; `sinks` [heads] are scores that take their share of each softmax and give nothing, as
        in gpt-oss → [1, tokens, heads, value_dim].
        """


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    s_aux: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    return module.backend.attend(module, query, key, value, s_aux), None


# --- what a model needs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mask:
    """Stands for a mask while a model is watched; `window` as in View."""

    window: int | None


def mask_of(mask_function: Callable[..., Any], local_size: int | None = None, **rest: Any) -> Mask:
    """The mask that transformers would build, by what it lets through. Raises Unservable for all but causal ones and sliding windows."""
    size = local_size or LONG
    queries = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size + 1])[:, None]
    keys = torch.arange(2 * size + 3)[None]
    for window in (local_size, None):
        expected = (keys <= queries) & (keys > queries - (window or len(keys[0])))
        zero = torch.tensor(0)
        if torch.equal(torch.as_tensor(mask_function(zero, zero, queries, keys)).expand_as(expected), expected):
            return Mask(window)
    raise Unservable("its attention mask is neither causal nor a sliding window")


def watch(model: Any, forward: Callable[[], object]) -> dict[Any, Layer]:
    """The attention modules of a model, in the order in which `forward` of one token calls them, and what each keeps.

    Raises:
        Unservable: the model attends in a way that the paged cache does not have.
    """
    found: dict[Any, Layer] = {}

    def note(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        position_bias: torch.Tensor | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        if module in found:
            raise Unservable("one of its attention modules is used twice")
        if not isinstance(mask, Mask) or position_bias is not None or not getattr(module, "is_causal", True):
            raise Unservable("its attention needs more than a causal mask")
        if sliding_window not in (None, mask.window):
            raise Unservable(f"its attention has a window of {sliding_window} and a mask of {mask.window}")
        kv_heads, scaling = key.shape[1], query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        view = View(kv_heads, query.shape[1] // kv_heads, mask.window, scaling, softcap)
        found[module] = Layer(view, key.shape[-1], value.shape[-1])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(NAME, note)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_of)
    try:
        forward()
    except (TypeError, AttributeError) as error:  # model code that computes with the mask itself
        raise Unservable(f"the attention of {type(model).__name__} cannot be replaced: {error}") from error
    finally:
        register()
    if len(found) != (wanted := model.config.get_text_config().num_hidden_layers):
        raise Unservable(f"{len(found)} of its {wanted} layers have attention that can be paged")
    return found


def attach(modules: Iterable[Any], geometry: Geometry, cache: Cache, backend: Backend) -> None:
    """Hangs cache and backend on the attention modules, which are in the order of layers."""
    backend.modules = list(modules)
    for number, (module, layer) in enumerate(zip(backend.modules, geometry.layers, strict=True)):
        module.keys, module.values = cache.keys[number], cache.values[number]
        module.backend, module.layer = backend, torch.tensor(number)
        module.view, module.view_number = layer.view, geometry.views.index(layer.view)


def register() -> None:
    """Without masks: the backend knows who sees what. Where a way of attending has none, transformers does not look for sequences packed
    into its input, for which the host would wait for the device."""
    AttentionInterface.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(NAME, None)


register()
