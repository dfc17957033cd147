"""FP8: linear layers of 8-bit floats, from a checkpoint, or made of plain weights at load (QUANTIZE=fp8).

On CUDA they are multiplied so; on CPU they are the same numbers in the model's dtype. The head and what
chooses experts stay plain, and so do experts that are one parameter.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.settings.settings import SettingError, Settings
from gpu_worker.engine.cuda.fp8_linear import COMPUTE_CAPABILITY, DTYPE, Fp8Linear, fits, round_rows
from gpu_worker.engine.model.config import ON_THE_FLY, quantization_of
from gpu_worker.engine.model.layer_blocks import find_weights, shard_floats
from gpu_worker.engine.parallel.tp_plan import TensorShards
from gpu_worker.engine.quantization.weight import ScaledFloats

ROUTERS = ("gate", "router")


def check_fp8(settings: Settings, device: torch.device, dtype: torch.dtype) -> None:
    """Raises SettingError where the card or the dtype has no products of 8-bit floats."""
    if settings.quantize != ON_THE_FLY or device.type == "cpu":
        return
    if (capability := torch.cuda.get_device_capability(device)) < COMPUTE_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (capability, COMPUTE_CAPABILITY))
        raise SettingError("quantize", f"fp8 needs a card of compute capability {need}, and this has {have}")
    if dtype != torch.bfloat16:
        raise SettingError("quantize", f"fp8 gives bfloat16, and DTYPE is {settings.dtype}")


def multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device) >= COMPUTE_CAPABILITY
    )


def quantize_linears(model: Any, multiplied: bool) -> None:
    """Rounds the plain linear layers of a model, with a scale for each output; `multiplied`: as 8-bit floats.
    On several ranks, each takes the scales from its own part.
    """
    head = model.get_output_embeddings()
    for module, name, child in list(plain_linears(model)):
        if child is not head and name not in ROUTERS and fits(child.weight):
            values, scales = round_rows(child.weight.detach())
            if multiplied:
                setattr(module, name, Fp8Linear(values, scales, child.bias))
            else:
                child.weight.copy_(values.float() * scales)


def replace_linears(
    model: Any, path: Path, config: Any, shards: Mapping[str, TensorShards], rank: int
) -> None:
    """Makes those linear layers multiply 8-bit floats that a checkpoint has so, with one scale, or one for
    each output; `shards`: how parameters [...] of any dtype are split between ranks.
    """
    if quantization_of(config) is None:
        return
    stored = find_weights(path, config, model)
    names = {module: name for name, module in model.named_modules()}
    for module, name, child in list(plain_linears(model)):
        weight = stored[names[child]].read() if names[child] in stored else None
        if isinstance(weight, ScaledFloats) and weight.values.dtype == DTYPE and weight.scales.shape[1] == 1:
            own = shard_floats(weight, shards.get(f"{names[child]}.weight"), rank)
            if fits(own.values):
                device = child.weight.device
                values, scales = own.values.to(device), own.output_scales().to(device)
                setattr(module, name, Fp8Linear(values, scales, child.bias))


def plain_linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Each with the module that it is in, and its name there."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                yield module, name, child
