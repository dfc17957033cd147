"""Quantised linear layers of a model: weights in blocks, and weights of 8-bit floats.

Both come from a checkpoint, or are made of plain weights (QUANTIZE). On CUDA both are multiplied as they are.
On CPU 8-bit floats are the same numbers in the model's dtype.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.settings.settings import SettingError, Settings
from gpu_worker.engine.cuda.linear import (
    FP8,
    FP8_CAPABILITY,
    BlockLinear,
    Fp8Linear,
    fits_block_kernel,
    fits_fp8_kernel,
    has_fp8,
    multiplies_blocks,
    multiplies_fp8,
    round_rows,
)
from gpu_worker.engine.model.config import FP8_AT_LOAD, quantization_of, quantizes
from gpu_worker.engine.parallel.shards import TensorShards, intervals_of
from gpu_worker.engine.parallel.tensor_parallel import parameter_finder
from gpu_worker.engine.quantization.at_load import ROUNDINGS
from gpu_worker.engine.quantization.blocks import LARGEST_BLOCK, SMALLEST_BLOCK, Blocks, ReadBlocks
from gpu_worker.engine.quantization.checkpoint import METHODS, StoredWeight, method_of, read_tensors
from gpu_worker.engine.quantization.gguf import converted_blocks
from gpu_worker.engine.quantization.weight import ScaledFloats, Weight, widen

ROUTERS = {"gate", "router"}
"""Names of modules that choose experts."""


def find_blocks(path: Path, config: Any, model: Any, device: torch.device) -> Mapping[str, Blocks]:
    """The blocks of a checkpoint, quantised or converted from a GGUF file, that the device can multiply: on
    CPU those in turn, for a bfloat16 or float32 model; on CUDA all that the card can.
    """
    on_cuda = multiplies_blocks(device, model.dtype)
    if not on_cuda and not expands_blocks(device, model.dtype):
        return {}
    if quantization_of(config) is None:
        return converted_blocks(path)
    weights, floats = find_weights(path, config, model), on_cuda and has_fp8(device)

    def read(layer: str) -> Blocks | None:
        blocks = blocks_of(weights[layer].read(), floats)
        return blocks if blocks and (on_cuda or blocks.are_in_turn) else None

    return ReadBlocks(list(weights), read)


def expands_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the CPU's kernels multiply rows of this dtype with weights in blocks."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)


def blocks_of(weight: Weight, floats: bool) -> Blocks | None:
    """A layer's weight as blocks; with `floats` also 8-bit floats that have scales for parts of the
    inputs.
    """
    if isinstance(weight, Blocks):
        return weight
    if not floats or not isinstance(weight, ScaledFloats) or weight.values.dtype != torch.float8_e4m3fn:
        return None
    size = math.gcd(weight.part[1], LARGEST_BLOCK)
    if weight.scales.shape[1] == 1 or weight.values.shape[1] % weight.part[1] or size < SMALLEST_BLOCK:
        return None
    scales = weight.output_scales().repeat_interleave(weight.part[1] // size, 1)
    return Blocks(weight.values, scales, None)


def replace_linears(model: Any, blocks: Mapping[str, Blocks]) -> None:
    """Make linear layers multiply their blocks on CUDA. The model may still be on the host."""
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and (own := blocks.get(name)) and fits_block_kernel(own):
            model.set_submodule(name, BlockLinear(own, linear.bias))


def find_weights(path: Path, config: Any, model: Any) -> dict[str, StoredWeight]:
    """The stored weights of linear layers quantised by one of METHODS, by their names in the model."""
    quantization, find = quantization_of(config), parameter_finder(model)
    if not quantization or method_of(quantization) not in METHODS:
        return {}
    found = {}
    for key, tensor in read_tensors(path, quantization).items():
        name, converter = find(key)
        if isinstance(tensor, StoredWeight) and not converter:
            found[name.removesuffix(".weight")] = tensor
    return found


def shard_floats(weight: ScaledFloats, shards: TensorShards | None, rank: int) -> ScaledFloats:
    """A rank's part of 8-bit floats [outputs, inputs] with float32 scales, one for each output or for all."""
    if shards is None:
        return weight
    intervals = intervals_of(shards, weight.values.shape[shards.dim], rank)
    places = torch.cat([torch.arange(*interval) for interval in intervals])
    if shards.dim == 1:
        values, scales = weight.values[:, places], weight.output_scales()
    else:
        values, scales = weight.values[places], weight.output_scales()[places]
    return ScaledFloats(values, scales, (1, values.shape[1]))


def shard_blocks(
    whole: Mapping[str, Blocks], shards: Mapping[str, TensorShards], rank: int
) -> Mapping[str, Blocks]:
    """A rank's part of each layer's blocks [outputs, inputs] of any dtype; none where the blocks would be too
    small.
    """

    def read(layer: str) -> Blocks | None:
        blocks, own = whole.get(layer), shards.get(f"{layer}.weight")
        if blocks is None or own is None:
            return blocks
        intervals = intervals_of(own, blocks.quants.shape[own.dim], rank)
        if own.dim == 0:
            return blocks.of_rows(torch.cat([torch.arange(*interval) for interval in intervals]))
        return blocks.of_columns(*intervals[0]) if len(intervals) == 1 else None

    return ReadBlocks(list(whole), read)


def check_fp8(config: Any, settings: Settings, device: torch.device, dtype: torch.dtype) -> None:
    """Raises SettingError if plain weights are to become 8-bit floats, and the card or the dtype cannot
    multiply them.
    """
    if settings.quantize != FP8_AT_LOAD or not quantizes(config, settings) or device.type == "cpu":
        return
    if (capability := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (capability, FP8_CAPABILITY))
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
    """Make linear layers multiply 8-bit floats; `shards`: how weights [...] of any dtype are split between
    ranks. The head and routers stay plain, and so do experts that are one parameter.
    """
    multiplied = multiplies_fp8(device, model.dtype)
    if quantizes(config, settings):
        if settings.quantize == FP8_AT_LOAD:
            quantize_linears(model, multiplied, device)
    elif multiplied:
        multiply_fp8(model, path, config, shards, rank)


def quantize_linears(model: Any, multiplied: bool, device: torch.device | None = None) -> None:
    """Round the plain linear layers of a model, with a scale for each output; if `multiplied`, they multiply
    8-bit floats on the `device`, where each goes by itself. Each rank takes the scales of its own part.
    Raises SettingError if no layer can be rounded.
    """
    for name, linear in rounded_linears(model, FP8_AT_LOAD):
        if not fits_fp8_kernel(linear.weight):
            continue
        values, scales = round_rows(linear.weight.detach().to(device or linear.weight.device))
        if multiplied:
            model.set_submodule(name, Fp8Linear(values, scales, linear.bias))
        else:
            linear.weight.copy_(values.float() * scales)


def quantize_blocks(model: Any, method: str, device: torch.device) -> Mapping[str, Blocks]:
    """Round the plain linear layers of a model by one of ROUNDINGS, each rank its own part. On CUDA they
    multiply their blocks from then on; on CPU the blocks are returned, each to be read once. Raises
    SettingError if there are no such layers.
    """
    on_cuda, made = multiplies_blocks(device, model.dtype), dict[str, Blocks]()
    for name, linear in rounded_linears(model, method):
        weight = ROUNDINGS[method](linear.weight.detach().to(device))
        if on_cuda and isinstance(weight, Blocks) and fits_block_kernel(weight):
            model.set_submodule(name, BlockLinear(weight, linear.bias))
            continue
        linear.weight.copy_(widen(weight))
        if isinstance(weight, Blocks) and expands_blocks(device, model.dtype):
            made[name] = weight
    return ReadBlocks(list(made), made.pop)


def rounded_linears(model: Any, method: str) -> list[tuple[str, nn.Linear]]:
    """The linear layers that are rounded at load, with their names: not the head, nor layers of routers.
    Raises SettingError if there are none.
    """
    head = model.get_output_embeddings()
    found = [
        (name, linear)
        for name, linear in plain_linears(model)
        if linear is not head and not {*name.split(".")} & ROUTERS
    ]
    if not found:
        raise SettingError(
            "quantize", f"{method}, but {type(model).__name__} has no linear layers that can be rounded"
        )
    return found


def multiply_fp8(model: Any, path: Path, config: Any, shards: Mapping[str, TensorShards], rank: int) -> None:
    """Make linear layers multiply the 8-bit floats of a checkpoint that have one scale, or one for each
    output; `shards`: how parameters [...] of any dtype are split between ranks.
    """
    if quantization_of(config) is None:
        return
    stored = find_weights(path, config, model)
    for name, linear in plain_linears(model):
        weight = stored[name].read() if name in stored else None
        if isinstance(weight, ScaledFloats) and weight.values.dtype == FP8 and weight.scales.shape[1] == 1:
            own = shard_floats(weight, shards.get(f"{name}.weight"), rank)
            if fits_fp8_kernel(own.values):
                device = linear.weight.device
                values, scales = own.values.to(device), own.output_scales().to(device)
                model.set_submodule(name, Fp8Linear(values, scales, linear.bias))


def plain_linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The plain linear layers of a model, with their names."""
    return [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
