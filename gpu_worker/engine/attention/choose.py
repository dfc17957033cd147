"""The choice of the attention backend for a model and a device; and the probe, one short forward that shows
what a model's attention needs, before the model is served.

For the probe each attention module is replaced by a recorder, and each mask by a description of it. The first
token is NaN, and what sees it becomes NaN, too: this shows whether tokens see each other by other ways than
attention.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from gpu_worker.engine.attention import cpu_paged
from gpu_worker.engine.attention.backend import (
    NAME,
    PAST,
    WHOLE,
    AttentionBackend,
    Geometry,
    LayerSpec,
    keeps_latents,
    over_latents,
    register,
)
from gpu_worker.engine.attention.cpu_paged import CpuPagedBackend
from gpu_worker.engine.attention.flashinfer_support import unsupported_because
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.cpu import native
from gpu_worker.protocol import UnservableModel, refuse

log = logging.getLogger(__name__)

PROBE_TOKENS = 8
WITHOUT_ATTENTION = {"linear_attention", "conv", "moe", "mlp"}
"""Layers that have no attention over keys, as configs call them."""
ACROSS_STAGES = "from those before them, which may be in another stage (PIPELINE_PARALLEL_SIZE)"
DEFAULT_WINDOW = 4096
"""A mask without a window is compared with a causal one up to twice this many tokens."""


@dataclass(frozen=True, slots=True)
class ProbedMask:
    """Describes the mask that transformers would build.

    Attributes:
        window, sees: as in LayerSpec.
        unsupported: the mask has no such form.
    """

    window: int | None = None
    sees: str = PAST
    unsupported: bool = False


def describe_mask(
    mask_function: Callable[..., Any], local_size: int | None = None, **rest: Any
) -> ProbedMask:
    """Compare a mask of transformers with causal ones and with those of encoders, without and with a sliding
    window. It does not raise, since models make masks that they do not use.
    """
    size = local_size or DEFAULT_WINDOW
    queries = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size + 1])[:, None]
    keys = torch.arange(2 * size + 3)[None]
    zero, away = torch.tensor(0), queries - keys
    mask = torch.as_tensor(mask_function(zero, zero, queries, keys)).expand_as(away)
    for window in (local_size, None):
        if torch.equal(mask, (away >= 0) & (away < (window or keys.numel()))):
            return ProbedMask(window)
        if torch.equal(mask, away.abs() <= (window or keys.numel())):
            return ProbedMask(window and window + 1, WHOLE)
    return ProbedMask(unsupported=True)


class AttentionRecorder:
    """Stands in for the attention of all modules, and records what each keeps of a token.

    Attributes:
        sees: as in LayerSpec, of all modules.
        layers: by attention module, in the order of their calls.
    """

    def __init__(self, sees: str = PAST) -> None:
        self.sees = sees
        self.layers: dict[Any, LayerSpec] = {}

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        position_bias: torch.Tensor | None = None,
        alibi_slopes: tuple[float, ...] | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """Take the place of `backend.attend`: query [1, heads, tokens, key_dim], key [1, kv_heads, tokens,
        key_dim], value [1, kv_heads, tokens, value_dim], all of one dtype. Raises UnservableModel.
        """
        if module in self.layers:
            raise UnservableModel("one of its attention modules is used twice")
        if (
            not isinstance(attention_mask, ProbedMask)
            or position_bias is not None
            or getattr(module, "is_causal", self.sees == PAST) != (self.sees == PAST)
            or (attention_mask.sees != self.sees and not attention_mask.unsupported)
        ):
            raise UnservableModel("its attention needs more than a causal mask")
        if attention_mask.unsupported:
            raise UnservableModel("its attention mask is neither causal nor a sliding window")
        window = attention_mask.window
        if sliding_window not in (None, window):
            raise UnservableModel(f"its attention has a window of {sliding_window} and a mask of {window}")
        kv_heads = key.shape[1]
        scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        group, latent = query.shape[1] // kv_heads, keeps_latents(module)
        kept = (key.shape[-1], value.shape[-1]) if self.sees == PAST else (0, 0)
        own = (kv_heads, group, window, scaling, *kept)
        self.layers[module] = LayerSpec(*own, softcap, alibi_slopes, latent, self.sees)
        return attend_to_nothing(query, key, value), None


def probe_attention(
    model: Any, forward: Callable[[], torch.Tensor], part: slice = slice(None), sees: str = PAST
) -> dict[Any, LayerSpec]:
    """Run `forward`, PROBE_TOKENS of one sequence → logits [1, PROBE_TOKENS, vocabulary] of any dtype, or
    hidden states where the model is a `part` of the layers of its config; return the attention modules in the
    order of their calls, and what each keeps of a token.

    Raises:
        UnservableModel: the paged cache does not allow the model's attention, or its tokens see each other by
            other ways, too.
    """
    recorder = AttentionRecorder(sees)
    AttentionInterface.register(NAME, over_latents(recorder.attend))
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, describe_mask)
    poison = model.get_input_embeddings().register_forward_hook(poison_first_token)
    try:
        logits = forward()
    except (TypeError, AttributeError) as error:  # model code that computes with the mask itself
        raise UnservableModel(
            f"the attention of {type(model).__name__} cannot be replaced: {error}"
        ) from error
    except RuntimeError as error:
        raise UnservableModel(f"the code of {type(model).__name__} fails: {error}") from error
    finally:
        poison.remove()
        register()
    check_probe(model, recorder.layers, logits, part)
    return recorder.layers


def check_probe(
    model: Any, layers: Mapping[Any, LayerSpec], logits: torch.Tensor, part: slice = slice(None)
) -> None:
    """Judge a probe. `logits` [1, PROBE_TOKENS, vocabulary] or hidden states, any dtype, of a forward whose
    first token was poisoned. Raises UnservableModel.
    """
    attending = attending_layers(model.config.get_text_config(), part)
    counts = ["get_seq_length" in inspect.unwrap(type(one).forward).__code__.co_names for one in layers]
    cached = DynamicCache(config=model.config).layers  # those with K and V of their own
    windows = [getattr(layer, "sliding_window", None) for layer in cached]
    others = [
        f"its cache has a window of {window} tokens and its mask {layer.window or 'none'}"
        for layer, window in zip(
            layers.values(), [windows[i] for i in attending if i < len(windows)], strict=False
        )
        if layer.sees == PAST and window not in (None, layer.window)
    ]
    poisoned = logits[0].isnan().any(-1).tolist()
    alone = [True] + [False] * (PROBE_TOKENS - 1)
    paged = f"{len(layers)} of its {len(attending)} layers have attention that can be paged"
    refuse(
        UnservableModel,
        (len(layers) != len(attending), paged),
        (any(counts), "its attention counts tokens by a cache of its own"),
        (others, "".join(others[:1])),
        (part.start and all(poisoned), f"its layers take more than hidden states {ACROSS_STAGES}"),
        (poisoned != alone, "its tokens see each other by other ways than attention"),
    )


def attending_layers(config: Any, part: slice) -> list[int]:
    """Numbers of the layers that have attention, by a text config: others have states or experts alone."""
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    numbers = range(config.num_hidden_layers)[part]
    return [number for number in numbers if types[number] not in WITHOUT_ATTENTION]


def poison_first_token(embedding: Any, ids: Any, output: torch.Tensor) -> torch.Tensor:
    """output [1, tokens, hidden] of any dtype → a copy whose first token is NaN, and so all that sees it"""
    output = output.clone()
    output[:, 0] = torch.nan
    return output


def attend_to_nothing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention through which no token sees another: zeros, but NaN where a token's own inputs are.

    query [1, heads, tokens, key_dim], key [1, kv_heads, tokens, key_dim], value [1, kv_heads, tokens,
    value_dim], all of one dtype → [1, tokens, heads, value_dim]
    """
    poisoned = query.isnan().any(3).any(1) | key.isnan().any(3).any(1) | value.isnan().any(3).any(1)
    output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    return output.masked_fill_(poisoned[..., None, None], torch.nan)


def choose_backend(
    geometry: Geometry, device: torch.device, max_rows: int, max_blocks: int
) -> AttentionBackend:
    """The fastest backend that has kernels for the model: on CUDA FlashInfer's, where it is installed. Steps
    have at most `max_rows` rows of `max_blocks`.
    """
    if any(layer.sees != PAST for layer in geometry.layers):
        return SdpaBackend(geometry, device)
    if device.type != "cuda":
        library = native.library() if cpu_paged.supports(geometry) else None
        return CpuPagedBackend(geometry, library) if library else SdpaBackend(geometry, device)
    is_there = find_spec("flashinfer") is not None
    if reason := unsupported_because(geometry) if is_there else "flashinfer-python is not installed":
        log.warning("torch's attention is used instead of FlashInfer's, and is slower: %s", reason)
        return SdpaBackend(geometry, device)
    from gpu_worker.engine.attention.flashinfer import FlashInferBackend

    generation = torch.cuda.get_device_capability(device)[0]
    return FlashInferBackend(geometry, device, generation, max_rows, max_blocks)
