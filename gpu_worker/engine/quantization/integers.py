"""Checkpoints of integers in groups: GPTQ, AWQ and compressed-tensors.

Functions named `shape` return [outputs, inputs] of a layer, whose tensors are `stored` in the file.
"""

import torch

from gpu_worker.engine.quantization.weight import Config, Fields, Stored, Weight, scale_integers

AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Of eight outputs in turn, the place of each in its word."""


def unpack_bits(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words int32 [rows, n], each row a string of bits from the lowest of the first word on → quants of 2, 3,
    4 or 8 bits, uint8 [rows, n * 32 / bits]
    """
    octets = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        quants: torch.Tensor = octets[..., None] >> shifts & 2**bits - 1
        return quants.flatten(-2)
    threes = octets.view(len(octets), -1, 3).int()  # 24 bits are eight quants of 3
    joined = threes[..., 0] | threes[..., 1] << 8 | threes[..., 2] << 16
    shifts = torch.arange(0, 24, bits, dtype=torch.int32)
    return (joined[..., None] >> shifts).bitwise_and(2**bits - 1).to(torch.uint8).flatten(-2)


# --- GPTQ: qweight [inputs * bits / 32, outputs], scales [groups, outputs], g_idx [inputs],
# qzeros [groups, outputs * bits / 32]


def gptq_shape(stored: Stored, config: Config) -> list[int]:
    words, outputs = stored["qweight"].get_shape()
    inputs = stored["g_idx"].get_shape()[0] if "g_idx" in stored else words * 32 // config["bits"]
    return [outputs, inputs]


def read_gptq(fields: Fields, config: Config) -> Weight:
    """Version 1 stores zeros smaller by one. A layer may have another number of bits than the config."""
    qweight, groups = fields["qweight"], fields.get("g_idx")
    bits = config["bits"] if groups is None else len(qweight) * 32 // len(groups)
    quants = unpack_bits(qweight.T, bits)
    zeros = unpack_bits(fields["qzeros"], bits).T.short()
    if config.get("checkpoint_format") != "gptq_v2":
        zeros = zeros + 1
    return scale_integers(quants, fields["scales"].T, zeros, group_size(config, quants.shape[1]), groups)


def refuse_gptq(config: Config) -> str | None:
    form = config.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        return f"its weights are packed as {form if form != 'gptq' else 'marlin'}; gptq and gptq_v2 are read"
    if config.get("bits") not in (2, 3, 4, 8):
        return f"it has {config.get('bits')} bits; 2, 3, 4 and 8 are read"
    return None


# --- AWQ: qweight [inputs, outputs / 8], scales [groups, outputs], qzeros [groups, outputs / 8]


def awq_shape(stored: Stored, config: Config) -> list[int]:
    inputs, words = stored["qweight"].get_shape()
    return [words * 8, inputs]


def read_awq(fields: Fields, config: Config) -> Weight:
    quants, zeros = (in_order(unpack_bits(fields[name], 4)).T for name in ("qweight", "qzeros"))
    return scale_integers(quants.contiguous(), fields["scales"].T, zeros, group_size(config, quants.shape[1]))


def in_order(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, outputs], in the order of their words"""
    return packed.view(len(packed), -1, 8)[..., AWQ_PLACES].flatten(1)


def refuse_awq(config: Config) -> str | None:
    form = str(config.get("version") or config.get("format") or "gemm").lower()
    if form != "gemm":
        return f"its weights are packed as {form}; gemm is read"
    bits = config.get("bits", config.get("w_bit"))
    return None if bits == 4 else f"it has {bits} bits; 4 are read"


def group_size(config: Config, inputs: int) -> int:
    size = int(config.get("group_size", config.get("q_group_size", -1)))
    return size if size > 0 else inputs


# --- compressed-tensors: weight_packed [outputs, inputs * bits / 32], or weight [outputs, inputs] of int8;
# weight_scale [outputs or 1, groups], weight_zero_point as these or packed along the outputs


def packed_shape(stored: Stored, config: Config) -> list[int]:
    return list(stored["weight_shape"][...].tolist())


def read_packed(fields: Fields, config: Config) -> Weight:
    outputs, inputs = fields["weight_shape"].tolist()
    packed, zeros = fields["weight_packed"], fields.get("weight_zero_point")
    bits = next((bits for bits in (4, 8, 2) if packed.shape[1] == -(-inputs * bits // 32)), None)
    if bits is None:
        raise ValueError(f"weight_packed {list(packed.shape)} does not fit weight_shape {[outputs, inputs]}")
    quants, middle = unpack_bits(packed, bits)[:, :inputs].contiguous(), 2 ** (bits - 1)
    if zeros is None:
        zeros = torch.full_like(fields["weight_scale"], middle, dtype=torch.short)
    elif zeros.dtype == torch.int32:
        zeros = unpack_bits(zeros.T, bits).T[:outputs].short()
    else:
        zeros = zeros.short() + middle
    return scale_channels(quants, fields, zeros)


def read_int8(fields: Fields, config: Config) -> Weight:
    zeros = fields.get("weight_zero_point")
    return scale_channels(fields["weight"], fields, zeros if zeros is not None and zeros.any() else None)


def scale_channels(quants: torch.Tensor, fields: Fields, zeros: torch.Tensor | None) -> Weight:
    """quants uint8 or int8 [outputs, inputs], zeros, integers, as weight_scale. Raises ValueError."""
    outputs, inputs = quants.shape
    groups = fields.get("weight_g_idx")
    if groups is not None and (groups < 0).any():
        groups = None
    scales = for_each_output(fields["weight_scale"], outputs)
    if inputs % scales.shape[1]:
        raise ValueError(f"{scales.shape[1]} groups do not divide {inputs} inputs")
    zeros = None if zeros is None else for_each_output(zeros, outputs)
    return scale_integers(quants, scales, zeros, inputs // scales.shape[1], groups)


def for_each_output(table: torch.Tensor, outputs: int) -> torch.Tensor:
    """[outputs, groups] of any dtype, also from one number, or one for each output"""
    return (table if table.dim() == 2 else table.reshape(-1, 1)).expand(outputs, -1)
