"""Quantised weights of linear layers by the names of these in a model, each read when it is asked for; on
CUDA, layers that multiply them as they are.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpu_worker.engine.blocks import LARGEST_BLOCK, SMALLEST_BLOCK, Blocks, ReadBlocks
from gpu_worker.engine.cuda.block_linear import BlockLinear, converts_floats, fits, multiplies_blocks
from gpu_worker.engine.model.config import quantization_of
from gpu_worker.engine.model.gguf_blocks import converted_blocks
from gpu_worker.engine.model.tp_weights import intervals_of, parameter_finder
from gpu_worker.engine.parallel.tp_plan import TensorShards
from gpu_worker.engine.quantization.checkpoint import StoredWeight, read_tensors
from gpu_worker.engine.quantization.methods import METHODS, method_of
from gpu_worker.engine.quantization.weight import ScaledFloats, Weight


def find_blocks(path: Path, config: Any, model: Any, device: torch.device) -> Mapping[str, Blocks]:
    """What the device multiplies as it is in the checkpoint of a directory, quantised or converted from a
    GGUF file: on CPU in bfloat16 integers in turn, on CUDA all that the card can.
    """
    on_cuda = multiplies_blocks(device, model.dtype)
    if not on_cuda and (device.type, model.dtype) != ("cpu", torch.bfloat16):
        return {}
    if quantization_of(config) is None:
        return converted_blocks(path)
    weights, floats = find_weights(path, config, model), on_cuda and converts_floats(device)

    def read(layer: str) -> Blocks | None:
        blocks = blocks_of(weights[layer].read(), floats)
        return blocks if blocks and (on_cuda or blocks.are_integers_in_turn) else None

    return ReadBlocks(list(weights), read)


def blocks_of(weight: Weight, floats: bool) -> Blocks | None:
    """A layer's weight as blocks, with `floats` also 8-bit ones whose scales are of parts of its inputs."""
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
    """Make linear layers multiply their blocks on CUDA. The model need not be there yet."""
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and (own := blocks.get(name)) and fits(own):
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
    """A rank's part of each layer's [outputs, inputs] of any dtype; none where blocks would be too small."""

    def read(layer: str) -> Blocks | None:
        blocks, own = whole.get(layer), shards.get(f"{layer}.weight")
        if blocks is None or own is None:
            return blocks
        intervals = intervals_of(own, blocks.quants.shape[own.dim], rank)
        if own.dim == 0:
            return blocks.of_rows(torch.cat([torch.arange(*interval) for interval in intervals]))
        return blocks.of_columns(*intervals[0]) if len(intervals) == 1 else None

    return ReadBlocks(list(whole), read)
