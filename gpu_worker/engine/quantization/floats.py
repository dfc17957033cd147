"""Checkpoints of few-bit floats: 8-bit ones with scales, and those of bitsandbytes.

Functions named `shape` return [outputs, inputs] of a layer, whose tensors are `stored` in the file.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch

from gpu_worker.engine.quantization.blocks import SMALLEST_BLOCK, Blocks
from gpu_worker.engine.quantization.weight import (
    Config,
    Fields,
    Stored,
    Weight,
    scale_floats,
    scale_integers,
)

STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


# --- 8-bit floats: weight [outputs, inputs], and weight_scale or weight_scale_inv, which both multiply


def weight_shape(stored: Stored, config: Config) -> list[int]:
    return list(stored["weight"].get_shape())


def read_fp8(fields: Fields, config: Config) -> Weight:
    """Raises ValueError where the layer has no scales, or others than these mean."""
    scales = fields.get("weight_scale_inv", fields.get("weight_scale"))
    if scales is None:
        raise ValueError("8-bit floats without weight_scale or weight_scale_inv")
    zeros = fields.get("weight_zero_point")
    if zeros is not None and zeros.float().any():
        raise ValueError("8-bit floats with zero points")
    return scale_floats(fields["weight"], scales, next(iter(block_sizes(config)), None))


def block_sizes(config: Config) -> list[tuple[int, int]]:
    """Outputs and inputs of blocks that have a scale each, in order. compressed-tensors has them in each of
    its groups of layers, older versions as `128x128`.
    """
    groups = (config.get("config_groups") or {}).values()
    sizes = [(group.get("weights") or {}).get("block_structure") for group in groups]
    named = filter(None, (config.get("weight_block_size"), *sizes))
    return sorted({block_size(size) for size in named})


def block_size(named: str | Sequence[int]) -> tuple[int, int]:
    outputs, inputs = named.split("x") if isinstance(named, str) else named
    return int(outputs), int(inputs)


# --- bitsandbytes, 8 bits: weight int8 [outputs, inputs], SCB [outputs]; 127 stands for SCB


def read_bnb8(fields: Fields, config: Config) -> Weight:
    return scale_integers(
        fields["weight"], fields["SCB"].float()[:, None] / 127, None, fields["weight"].shape[1]
    )


# --- bitsandbytes, 4 bits: weight uint8 [quants / 2, 1], the first quant of a byte in its upper half;
# quant_map [16]; absmax [blocks], or of 8 bits with nested_quant_map [256] and nested_absmax;
# quant_state, JSON


def bnb4_shape(stored: Stored, config: Config) -> list[int]:
    states = {name: tensor[...] for name, tensor in stored.items() if name in STATES}
    return list(quant_state(states)["shape"])


def quant_state(fields: Fields) -> dict[str, Any]:
    """Raises ValueError where the layer has none."""
    text = next((bytes(fields[name].tolist()) for name in STATES if name in fields), None)
    if text is None:
        raise ValueError(f"4-bit floats without {' or '.join(STATES)}")
    state: dict[str, Any] = json.loads(text)
    return state


def read_bnb4(fields: Fields, config: Config) -> Weight:
    state, packed = quant_state(fields), fields["weight"].flatten()
    quants = torch.stack([packed >> 4, packed & 15], 1).flatten()
    factors = fields["weight.absmax"]
    if factors.dtype == torch.uint8:
        factors = fields["weight.nested_quant_map"].float()[factors.long()]
        factors = scaled(factors, fields["weight.nested_absmax"].float(), state["nested_blocksize"])
        factors = factors + state["nested_offset"]
    codes, shape, size = fields["weight.quant_map"].float(), state["shape"], state["blocksize"]
    quants = quants[: torch.Size(shape).numel()]
    if len(shape) == 2 and shape[1] % size == 0 and size % SMALLEST_BLOCK == 0:
        return Blocks(quants.view(shape), factors.float().view(shape[0], -1), None, codes)
    return scaled(codes[quants.long()], factors.float(), size).view(shape)


def scaled(numbers: torch.Tensor, factors: torch.Tensor, size: int) -> torch.Tensor:
    """float32 [numbers], each times the factor of its block of `size` numbers; factors float32 [blocks]"""
    return numbers * factors.repeat_interleave(size)[: len(numbers)]
