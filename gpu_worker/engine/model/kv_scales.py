"""KV scales: what a checkpoint says that K and V of each layer are divided by, in a cache of 8-bit floats."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_worker.engine.attention.kv_cache import LayerSpec
from gpu_worker.engine.errors import UnservableModel
from gpu_worker.engine.model.weights import TEXT_KEY_MAPPING
from gpu_worker.engine.quantization.checkpoint import file_slices

KEY_SCALES = (
    "k_scale",
    "k_proj.k_scale",
    "qkv_proj.k_scale",
    "attn.k_scale",
    "k_proj.output_scale",
    "kv_scale",
)
VALUE_SCALES = tuple(name.replace("k_", "v_") for name in KEY_SCALES)
"""Names behind that of an attention module: of compressed-tensors, ModelOpt, vLLM, and of older versions."""


def scale_layers(model: Any, path: Path, layers: Mapping[Any, LayerSpec]) -> dict[Any, LayerSpec]:
    """What each attention module keeps of a token, with the checkpoint's scales; 1 where it has none. Latents
    and their rotary parts have one together. Raises UnservableModel.
    """
    names = {module: name for name, module in model.named_modules()}
    scales = {text_name(name): tensor for name, tensor in file_slices(path) if name.endswith("_scale")}
    scaled = {
        module: replace(
            layer,
            key_scale=find_scale(scales, names[module], KEY_SCALES),
            value_scale=find_scale(scales, names[module], KEY_SCALES if layer.spec.latent else VALUE_SCALES),
        )
        for module, layer in layers.items()
    }
    for module, layer in layers.items():
        if hasattr(module, "kv_lora_rank") and not layer.spec.latent and scaled[module] != layer:
            raise UnservableModel("its KV scales are those of latents, and its cache keeps K and V")
    return scaled


def text_name(name: str) -> str:
    """The name that the model for text has for a tensor of the checkpoint."""
    for pattern, replacement in TEXT_KEY_MAPPING.items():
        name = re.sub(pattern, replacement, name)
    return name


def find_scale(scales: Mapping[str, Any], module: str, names: tuple[str, ...]) -> float:
    """Raises UnservableModel for several scales in one layer, and for one that is no positive number."""
    name = next((name for last in names if (name := f"{module}.{last}") in scales), None)
    if name is None:
        return 1.0
    scale = scales[name][...].float().flatten()
    if len(scale) != 1:
        raise UnservableModel(f"{name} has {len(scale)} numbers; a cache of 8-bit floats has one for a layer")
    if not (0 < scale.item() < math.inf):
        raise UnservableModel(f"{name} is {scale.item()}, and must be more than 0")
    return float(scale.item())
