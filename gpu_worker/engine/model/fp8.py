"""FP8: linear layers of 8-bit floats, from a checkpoint, or made of plain weights at load (QUANTIZE=fp8).

On CUDA they are multiplied so; on CPU they are the same numbers in the model's dtype. The head and what
chooses experts stay plain, and so do experts that are one parameter.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.settings.settings import SettingError, Settings
from gpu_worker.engine.cuda.fp8_linear import COMPUTE_CAPABILITY, DTYPE, Fp8Linear, fits, round_rows
from gpu_worker.engine.model.config import quantization_of, quantizes
from gpu_worker.engine.model.layer_blocks import find_weights, shard_floats
from gpu_worker.engine.parallel.tp_plan import TensorShards
from gpu_worker.engine.quantization.weight import ScaledFloats

ROUTERS = {"gate", "router"}


def check_fp8(config: Any, settings: Settings, device: torch.device, dtype: torch.dtype) -> None:
    """Raises SettingError where plain weights would become 8-bit floats, and the card or the dtype has no
    products of these.
    """
    if not quantizes(config, settings) or device.type == "cpu":
        return
    if (capability := torch.cuda.get_device_capability(device)) < COMPUTE_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (capability, COMPUTE_CAPABILITY))
        raise SettingError("quantize", f"fp8 needs a card of compute capability {need}, and this has {have}")
    if dtype != torch.bfloat16:
        raise SettingError("quantize", f"fp8 gives bfloat16, and DTYPE is {settings.dtype}")


def use_fp8(
    model: Any,
    path: Path,
    config: Any,
    device: torch.device,
    settings: Settings,
    shards: Mapping[str, TensorShards],
    rank: int,
) -> None:
    """`shards`: how weights [...] of any dtype are split, where there are several ranks."""
    multiplied = multiplies_fp8(device, model.dtype)
    if quantizes(config, settings):
        quantize_linears(model, multiplied)
    elif multiplied:
        multiply_fp8(model, path, config, shards, rank)


def multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device) >= COMPUTE_CAPABILITY
    )


def quantize_linears(model: Any, multiplied: bool) -> None:
    """Round the plain linear layers of a model, with a scale for each output; `multiplied`: as 8-bit floats.
    On several ranks, each takes the scales from its own part. Raises SettingError where there are none.
    """
    head = model.get_output_embeddings()
    rounded = [
        (name, linear) for name, linear in plain_linears(model) if linear is not head and rounds(name, linear)
    ]
    if not rounded:
        raise SettingError(
            "quantize", f"fp8, but {type(model).__name__} has no linear layers that can be rounded"
        )
    for name, linear in rounded:
        values, scales = round_rows(linear.weight.detach())
        if multiplied:
            model.set_submodule(name, Fp8Linear(values, scales, linear.bias))
        else:
            linear.weight.copy_(values.float() * scales)


def rounds(name: str, linear: nn.Linear) -> bool:
    """Whether a layer is rounded: a router, or a layer within one, is not."""
    return fits(linear.weight) and not {*name.split(".")} & ROUTERS


def multiply_fp8(model: Any, path: Path, config: Any, shards: Mapping[str, TensorShards], rank: int) -> None:
    """Make those linear layers multiply 8-bit floats that a checkpoint has so, with one scale, or one for
    each output; `shards`: how parameters [...] of any dtype are split between ranks.
    """
    if quantization_of(config) is None:
        return
    stored = find_weights(path, config, model)
    for name, linear in plain_linears(model):
        weight = stored[name].read() if name in stored else None
        if isinstance(weight, ScaledFloats) and weight.values.dtype == DTYPE and weight.scales.shape[1] == 1:
            own = shard_floats(weight, shards.get(f"{name}.weight"), rank)
            if fits(own.values):
                device = linear.weight.device
                values, scales = own.values.to(device), own.output_scales().to(device)
                model.set_submodule(name, Fp8Linear(values, scales, linear.bias))


def plain_linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The plain linear layers of a model, with their names."""
    return [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
