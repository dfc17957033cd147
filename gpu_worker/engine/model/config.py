"""The config of a model: reads it, stretches its rotary positions if the settings say so, and refuses models
that cannot be served.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from common.pooling import PoolingConfig
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.quantization.at_load import ROUNDINGS
from gpu_worker.protocol import first_cause

TEXT_ONLY = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Model types of text parts → those of the models for text that are equal without images."""
LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "moe", "mlp"}
"""Types of layers that may be served; the probe looks what they need."""
LEFT = {"codegen": "StarCoder2", "gptj": "GPT-NeoX", "xglm": "Qwen3 or Gemma 3"}
"""Model types that were served → models for the same that are."""


@dataclass(slots=True)
class ModelSource:
    """Where a model is read, and for what.

    Attributes:
        config: of its text part; None before it is read.
        dtype: in which it is computed.
        pooling: how it makes vectors; None if it generates.
    """

    path: Path
    config: Any
    dtype: torch.dtype
    device: torch.device
    settings: Settings
    communicator: Communicator
    pooling: PoolingConfig | None = None

    @property
    def is_encoder(self) -> bool:
        """Whether its tokens see each other in both directions."""
        return self.pooling is not None and self.pooling.is_encoder


def read_config(path: Path, settings: Settings) -> Any:
    """Return the model's text config. Values outside the text part of a model for images and text are added.
    Raises SettingError.
    """
    model_id = settings.model_id
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
        text = config.get_text_config()
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise cannot_serve(model_id, error) from error
    if cause := refusal_of(config, text):
        raise SettingError("model_id", f"{model_id} ({config.model_type}) {cause}")
    text = plain_text_config(text)
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    check_quantize(quantization_of(text), settings)
    if settings.rope_factor is not None:
        stretch_rope(text, settings.rope_scaling or "linear", settings.rope_factor)
    return text


def plain_text_config(text: Any) -> Any:
    """The config of the model for text if the text part differs from it only by positions for each axis of an
    image: in text these are all the same.
    """
    if text.model_type not in TEXT_ONLY:
        return text
    values = {name: value for name, value in text.to_dict().items() if name != "model_type"}
    of_images = ("mrope_section", "mrope_interleaved")
    rope = values.get("rope_parameters") or {}
    values["rope_parameters"] = {name: value for name, value in rope.items() if name not in of_images}
    return AutoConfig.for_model(TEXT_ONLY[text.model_type], **values)


def quantization_of(config: Any) -> dict[str, Any] | None:
    """How a checkpoint is quantised; None if it is not."""
    values = getattr(config, "quantization_config", None)
    return values if isinstance(values, dict) or values is None else dict(values.to_dict())


def quantizes(config: Any, settings: Settings) -> bool:
    """Whether plain weights are quantised at load."""
    return quantization_of(config) is None and settings.quantize in ROUNDINGS


def check_quantize(quantization: dict[str, Any] | None, settings: Settings) -> None:
    """Raises SettingError if QUANTIZE names another method than the checkpoint, or for plain weights one that
    is not made at load.
    """
    asked = settings.quantize
    if quantization is None and asked in (None, *ROUNDINGS):
        return  # see `quantizes`
    if quantization is None:
        made = f"{', '.join(ROUNDINGS)} are made of such at load"
        if asked == "gptq":
            made = "`tokenfleet quantize MODEL OUT` makes such a checkpoint"
        cause = f"this checkpoint's weights are plain; {made}"
        raise SettingError("quantize", f"{asked} is not served: {cause}")
    own = methods_of(quantization)
    if asked not in (None, *own):
        cause = f"weights are loaded as the checkpoint has them ({own[-1]})"
        raise SettingError("quantize", f"{asked} is not served: {cause}")


def methods_of(quantization: dict[str, Any]) -> list[str]:
    """The names in QUANTIZE of a checkpoint's method; TGI's of bitsandbytes with 4 bits has their type."""
    method = str(quantization.get("quant_method")).replace("_", "-")
    four_bits = method == "bitsandbytes" and quantization.get("load_in_4bit")
    return [method, *([f"{method}-{quantization.get('bnb_4bit_quant_type', 'fp4')}"] if four_bits else [])]


def refusal_of(config: Any, text: Any) -> str:
    """Return why a model cannot be served, from its config and the text part of it; empty if it can."""
    others = sorted({*(getattr(text, "layer_types", None) or ())} - LAYER_TYPES)
    served = ", ".join(sorted(LAYER_TYPES))
    return first_cause(
        (
            text.model_type in LEFT,
            f"is not served any more; {LEFT.get(text.model_type)} is for the same, see docs/models.md",
        ),
        (
            not has_attention(text) and not has_states(text),
            "has no attention heads, and no states that transformers' cache holds; only decoders with either "
            "are served",
        ),
        (
            getattr(text, "alibi", False),
            "uses ALiBi position biases, which are served for Bloom and MPT only",
        ),
        (
            getattr(getattr(text, "attn_config", None), "alibi", True) is False,
            "has no ALiBi position biases; transformers' code of it always adds them",
        ),
        (others, f"has layers of type {', '.join(others)}; only {served} are served"),
    )


def has_attention(config: Any) -> bool:
    try:
        return bool(
            getattr(config, "num_attention_heads", None) and getattr(config, "num_hidden_layers", None)
        )
    except RuntimeError:  # transformers', where the number differs between layers
        return True


def has_states(config: Any) -> bool:
    """Whether some layers carry states that transformers' cache holds."""
    return bool({*(getattr(config, "layer_types", None) or ())} & {"linear_attention", "conv", "hybrid"})


def stretch_rope(config: Any, kind: str, factor: float) -> None:
    """Stretch the rotary positions of a config to sequences `factor` times as long: `linear`
    (arXiv:2306.15595) or `dynamic` NTK. Raises SettingError.
    """
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") != "default":
        raise SettingError("rope_factor", f"{config.model_type} has no plain rotary positions to stretch")
    config.rope_parameters = rope | {"rope_type": kind, "factor": factor}


def cannot_serve(model_id: str, error: Exception) -> SettingError:
    lines = (line.strip() for line in str(error).splitlines())
    cause = next(filter(None, lines), "") or type(error).__name__
    if "trust_remote_code" in str(error):
        cause = "it brings Python code along, which is run with TRUST_REMOTE_CODE only"
    return SettingError("model_id", f"{model_id} cannot be served: {cause}")
