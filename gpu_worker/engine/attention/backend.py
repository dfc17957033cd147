"""Paged attention under transformers' model code.

transformers calls `attend` from every attention module. The module carries its layer's K and V cache as plain
tensors, and the backend, which knows the step that runs: so no layer's signature changes, and a compiler sees
the same code in every layer.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from gpu_worker.engine.attention.kv_cache import AttentionSpec, Geometry, KVCache, LayerSpec
from gpu_worker.engine.batch.inputs import Inputs

NAME = "tokenfleet"
WATCHED = 8
"""Tokens of the forward that shows what a model needs."""
LONG = 4096
"""A mask that says of no window is compared with a causal one up to twice this many tokens."""


class UnservableModel(Exception):
    """The model needs something that this attention does not have."""


class AttentionBackend(Protocol):
    """
    Attributes:
        plan_free: whether it has `begin_decode`, so that steps in which all rows decode can be captured.
        opaque: whether compilers see one operation in `attend`. Into others they would look, and compile anew
            for most steps.
        modules: the attention modules, in the order of layers.
    """

    plan_free: bool
    opaque: bool
    modules: list[Any]

    def begin(self, inputs: Inputs) -> None:
        """Called before each forward: what layers share is computed here."""

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Writes K and V of the step's tokens and attends over the cache.

        query [1, heads, tokens, key_dim], key [1, kv_heads, tokens, key_dim], value [1, kv_heads, tokens,
        value_dim]; `module` carries `keys`, `values` and `view` of its layer; `sinks` [heads] are scores that
        take their share of each softmax and give nothing, as in gpt-oss → [1, tokens, heads, value_dim].
        """


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    s_aux: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    return module.backend.attend(module, query, key, value, s_aux), None


# --- what a model needs -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mask:
    """Stands for a mask while a model is watched; `window` as in View, `other`: it is neither causal nor a
    sliding window.
    """

    window: int | None = None
    other: bool = False


def mask_of(mask_function: Callable[..., Any], local_size: int | None = None, **rest: Any) -> Mask:
    """The mask that transformers would build, by what it lets through. Models make some that they do not use."""
    size = local_size or LONG
    queries = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size + 1])[:, None]
    keys = torch.arange(2 * size + 3)[None]
    for window in (local_size, None):
        expected = (keys <= queries) & (keys > queries - (window or len(keys[0])))
        zero = torch.tensor(0)
        if torch.equal(
            torch.as_tensor(mask_function(zero, zero, queries, keys)).expand_as(expected), expected
        ):
            return Mask(window)
    return Mask(other=True)


def watch(model: Any, forward: Callable[[], torch.Tensor]) -> dict[Any, LayerSpec]:
    """The attention modules of a model, in the order in which `forward` calls them, and what each keeps.
    `forward`: of WATCHED tokens of one sequence → logits [1, WATCHED, vocabulary].

    Raises:
        Unservable: the model attends in a way that the paged cache does not have, or its tokens see each
            other in other ways, too.
    """
    found: dict[Any, LayerSpec] = {}

    def note(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        position_bias: torch.Tensor | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        if module in found:
            raise UnservableModel("one of its attention modules is used twice")
        if (
            not isinstance(attention_mask, Mask)
            or position_bias is not None
            or not getattr(module, "is_causal", True)
        ):
            raise UnservableModel("its attention needs more than a causal mask")
        if attention_mask.other:
            raise UnservableModel("its attention mask is neither causal nor a sliding window")
        if sliding_window not in (None, window := attention_mask.window):
            raise UnservableModel(f"its attention has a window of {sliding_window} and a mask of {window}")
        kv_heads, scaling = key.shape[1], query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        spec = AttentionSpec(kv_heads, query.shape[1] // kv_heads, window, scaling, softcap)
        found[module] = LayerSpec(spec, key.shape[-1], value.shape[-1])
        return nothing(query, key, value), None

    AttentionInterface.register(NAME, note)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_of)
    spoiling = model.get_input_embeddings().register_forward_hook(spoil)
    try:
        logits = forward()
    except (TypeError, AttributeError) as error:  # model code that computes with the mask itself
        raise UnservableModel(
            f"the attention of {type(model).__name__} cannot be replaced: {error}"
        ) from error
    except RuntimeError as error:
        raise UnservableModel(f"the code of {type(model).__name__} fails: {error}") from error
    finally:
        spoiling.remove()
        register()
    check(model, found, logits)
    return found


def check(model: Any, found: Mapping[Any, LayerSpec], logits: torch.Tensor) -> None:
    """What a forward with its first token spoilt has shown. Raises Unservable."""
    if len(found) != (wanted := model.config.get_text_config().num_hidden_layers):
        raise UnservableModel(f"{len(found)} of its {wanted} layers have attention that can be paged")
    if any("get_seq_length" in inspect.unwrap(type(module).forward).__code__.co_names for module in found):
        raise UnservableModel("its attention counts tokens by a cache of its own")
    for layer, window in zip(found.values(), cached_windows(model.config), strict=False):
        if window not in (None, layer.spec.window):
            raise UnservableModel(
                f"its cache has a window of {window} tokens and its mask {layer.spec.window or 'none'}"
            )
    if logits[0].isnan().any(-1).tolist() != [True] + [False] * (WATCHED - 1):
        raise UnservableModel("its tokens see each other by other ways than attention")


def cached_windows(config: Any) -> list[int | None]:
    """Of each layer that has its own K and V: of how many tokens transformers keeps these while it generates,
    where it forgets some.
    """
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]


def spoil(embedding: Any, ids: Any, output: torch.Tensor) -> torch.Tensor:
    """The first token is not a number, and so is all that sees it, however little."""
    output = output.clone()
    output[:, 0] = torch.nan
    return output


def nothing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention through which no token sees another: zeros, where a token's own inputs are numbers → [1,
    tokens, heads, value_dim]
    """
    spoilt = query.isnan().any(3).any(1) | key.isnan().any(3).any(1) | value.isnan().any(3).any(1)
    output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    return output.masked_fill_(spoilt[..., None, None], torch.nan)


def attach(modules: Iterable[Any], geometry: Geometry, cache: KVCache, backend: AttentionBackend) -> None:
    """Hangs cache and backend on the attention modules, which are in the order of layers."""
    backend.modules = list(modules)
    for number, (module, layer) in enumerate(zip(backend.modules, geometry.layers, strict=True)):
        module.keys, module.values = cache.keys[number], cache.values[number]
        module.backend, module.layer = backend, torch.tensor(number)
        module.spec, module.spec_number = layer.spec, geometry.specs.index(layer.spec)


def register() -> None:
    """Without masks: the backend knows who sees what. Where a way of attending has none, transformers does
    not look for sequences packed into its input, for which the host would wait for the device.
    """
    AttentionInterface.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(NAME, None)


register()
