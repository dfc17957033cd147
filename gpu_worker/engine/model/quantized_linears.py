"""Quantised linear layers of a model: weights in blocks, and weights of 8-bit floats.

Both come from a checkpoint, or are made of plain weights (QUANTIZE). On CUDA both are multiplied as they are.
On CPU 8-bit floats are the same numbers in the model's dtype.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from common.settings.settings import SettingError, Settings
from gpu_worker.engine.cuda.linear import (
    FP8,
    FP8_CAPABILITY,
    QuantisedLinear,
    fits_block_kernel,
    fits_fp8_kernel,
    has_fp8,
    multiplies_blocks,
    multiplies_fp8,
)
from gpu_worker.engine.model.weights import ModelSource, quantization_of, quantizes
from gpu_worker.engine.parallel.model_parallel import TensorShards, intervals_of, parameter_finder
from gpu_worker.engine.quantization.blocks import Blocks, FindBlocks, no_blocks
from gpu_worker.engine.quantization.checkpoint import (
    BLOCKS_FOLDER,
    CONVERTED,
    FP8_AT_LOAD,
    ROUNDINGS,
    StoredWeight,
    read_tensors,
    widen,
)

ROUTERS = {"gate", "router"}
"""Names of modules that choose experts."""


def quantised_weights(model: Any, source: ModelSource, shards: Mapping[str, TensorShards]) -> FindBlocks:
    """Find this rank's part of the blocks of linear layers: the checkpoint's, or those to which plain weights
    are rounded (QUANTIZE). `shards`: how weights [...] of any dtype are split between ranks. Raises
    SettingError.
    """
    if quantizes(source.config, source.settings):
        return rounded_blocks(model, str(source.settings.quantize), source.device)
    device, dtype = source.device, model.dtype
    if device.type == "cpu" or multiplies_blocks(device, dtype) or multiplies_fp8(device, dtype):
        return no_blocks if source.settings.makes_weights else stored_blocks(model, source, shards)
    return no_blocks


def rounded_blocks(model: Any, method: str, device: torch.device) -> FindBlocks:
    """Round a plain linear layer of a model by one of ROUNDINGS when it is asked for, by itself on the
    device, each rank its own part. The head and routers stay plain, and so do experts that are one parameter.
    Raises SettingError if there are no such layers.
    """
    linears, kind = rounded_linears(model), type(model).__name__
    if not linears:
        raise SettingError("quantize", f"{method}, but {kind} has no linear layers that can be rounded")

    def find(name: str) -> Blocks | None:
        if name not in linears:
            return None
        linear = linears.pop(name).to(device)
        weight = ROUNDINGS[method](linear.weight.detach())
        linear.weight.copy_(widen(weight))
        return weight if isinstance(weight, Blocks) else None

    return find


def quantise_linears(model: Any, find: FindBlocks, device: torch.device) -> None:
    """Make layers on CUDA multiply their blocks where the card can. The model may still be on the host."""
    for name, linear in plain_linears(model):
        if (blocks := find(name)) and multiplies(blocks, device, model.dtype):
            model.set_submodule(name, QuantisedLinear(blocks, linear.bias))


def multiplies(blocks: Blocks, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies rows of this dtype with the blocks: 8-bit floats with one scale for an
    output as such, all others as blocks.
    """
    are_floats = blocks.quants.dtype.is_floating_point
    if are_floats and (blocks.quants.dtype != FP8 or not has_fp8(device)):
        return False
    if are_floats and blocks.scales.shape[1] == 1:
        return multiplies_fp8(device, dtype) and fits_fp8_kernel(blocks.quants)
    return multiplies_blocks(device, dtype) and fits_block_kernel(blocks)


def stored_blocks(model: Any, source: ModelSource, shards: Mapping[str, TensorShards]) -> FindBlocks:
    """This rank's part of the blocks of a checkpoint, quantised or converted from a GGUF file, by the names
    of linear layers in the model. A layer whose blocks would be too small has none.
    """
    path, quantization, find = source.path, quantization_of(source.config), parameter_finder(model)
    files = (path, quantization) if quantization else (path / BLOCKS_FOLDER, CONVERTED)
    stored: dict[str, StoredWeight] = {}
    for key, tensor in read_tensors(*files).items():
        name, converter = find(key)
        if isinstance(tensor, StoredWeight) and not converter:
            stored[name.removesuffix(".weight")] = tensor

    def find_own(layer: str) -> Blocks | None:
        blocks = stored[layer].read() if layer in stored else None
        if not isinstance(blocks, Blocks) or (own := shards.get(f"{layer}.weight")) is None:
            return blocks if isinstance(blocks, Blocks) else None
        intervals = intervals_of(own, blocks.quants.shape[own.dim], source.communicator.tp_rank)
        if own.dim == 0:
            return blocks.of_rows(torch.cat([torch.arange(*interval) for interval in intervals]))
        return blocks.of_columns(*intervals[0]) if len(intervals) == 1 else None

    return find_own


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


def rounded_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a model, or of a part of it, that are rounded, by name: not those of routers, nor
    the head.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        name: linear
        for name, linear in plain_linears(model)
        if linear is not head and not {*name.split(".")} & ROUTERS
    }


def plain_linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The plain linear layers of a model, with their names."""
    return [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
