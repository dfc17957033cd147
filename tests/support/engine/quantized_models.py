"""Tiny models in the formats of quantised checkpoints, written as the packages write them, beside plain ones
with the numbers that these mean.
"""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from gpu_worker.engine.cpu import native, packed_linear
from gpu_worker.engine.cpu.packed_linear import multiplies_correctly
from gpu_worker.engine.cuda.linear import fp8_linear, round_rows
from gpu_worker.engine.quantization.checkpoint import ROUNDINGS, widen
from tests.support.engine import tiny_models

GROUP = 32
FP8_MAX = 448
NF4 = torch.tensor(
    [-1.0, -0.69, -0.52, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0]
)
Written = tuple[dict[str, torch.Tensor], torch.Tensor]
"""A layer's tensors by their names in it, and the weights that they mean."""
Write = Callable[[torch.Tensor], Written]


def save(folder: Path, write: Write, config: dict[str, Any], family: str = "Llama") -> Any:
    """Writes a model whose layers' matrices are in a format; returns transformers' own of the same numbers,
    in float32.
    """
    tiny_models.save(folder, *tiny_models.FAMILIES[family])
    plain = folder / "plain"
    shutil.copytree(folder, plain)
    tensors = load_file(folder / "model.safetensors")
    means = dict(tensors)
    for name in list(tensors):
        if name.endswith("_proj.weight") or ".experts." in name:
            fields, means[name] = write(tensors.pop(name).float())
            layer = name.removesuffix("weight")
            tensors |= {layer + field: tensor.clone().contiguous() for field, tensor in fields.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({name: tensor.contiguous() for name, tensor in means.items()}, plain / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")


def pack(quants: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers [rows, n] → int32 [rows, n * bits / 32], as one row of bits, the lowest first."""
    places = quants.numpy().astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    octets = np.packbits(places.reshape(len(quants), -1).astype(np.uint8), 1, bitorder="little")
    return torch.from_numpy(octets.view(np.int32).copy())


def round_groups(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """→ quants [outputs, inputs], float16 scales and zeros [outputs, groups]"""
    parts = weight.view(len(weight), -1, GROUP)
    low, high = parts.amin(-1), parts.amax(-1)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1)
    quants = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return quants.flatten(1).int(), scales, zeros.int()


def mean(quants: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    size = quants.shape[1] // scales.shape[1]
    wide = (table.float().repeat_interleave(size, 1) for table in (scales, zeros))
    factors, centres = wide
    return (quants.float() - centres) * factors


def gptq(bits: int, version: int = 1) -> Write:
    def write(weight: torch.Tensor) -> Written:
        quants, scales, zeros = round_groups(weight, bits)
        stored = zeros.T - (1 if version == 1 else 0)
        groups = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
        fields = {"qweight": pack(quants, bits).T, "qzeros": pack(stored, bits), "scales": scales.T}
        return fields | {"g_idx": groups}, mean(quants, scales, zeros)

    return write


def gptq_in_any_order(weight: torch.Tensor) -> Written:
    """Inputs of a group lie anywhere (desc_act)."""
    order = torch.randperm(weight.shape[1])
    fields, meant = gptq(4)(weight[:, order])
    back = order.argsort()
    quants, _, _ = round_groups(weight[:, order], 4)
    fields |= {"qweight": pack(quants[:, back], 4).T, "g_idx": fields["g_idx"][back]}
    return fields, meant[:, back]


def awq(weight: torch.Tensor) -> Written:
    """Eight outputs in a word of 32 bits, as AutoAWQ's GEMM version orders them."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    quants, scales, zeros = round_groups(weight, 4)

    def packed(table: torch.Tensor) -> torch.Tensor:
        return pack(table.view(len(table), -1, 8)[..., order].flatten(1), 4)

    return {"qweight": packed(quants.T), "qzeros": packed(zeros.T), "scales": scales.T}, mean(
        quants, scales, zeros
    )


def packed_symmetric(bits: int) -> Write:
    """pack-quantized of compressed-tensors, with bfloat16 scales."""

    def write(weight: torch.Tensor) -> Written:
        half = 2 ** (bits - 1)
        parts = weight.view(len(weight), -1, GROUP)
        scales = (parts.abs().amax(-1) / (half - 1)).bfloat16()
        quants = (parts / scales.float()[..., None]).round().clamp(-half, half - 1).flatten(1) + half
        shape = torch.tensor(weight.shape)
        fields = {"weight_packed": pack(quants, bits), "weight_scale": scales, "weight_shape": shape}
        return fields, mean(quants, scales, torch.full_like(scales, half))

    return write


def packed_asymmetric(weight: torch.Tensor) -> Written:
    quants, scales, zeros = round_groups(weight, 4)
    shape = torch.tensor(weight.shape)
    fields = {"weight_packed": pack(quants, 4), "weight_scale": scales, "weight_shape": shape}
    return fields | {"weight_zero_point": pack(zeros.T, 4).T}, mean(quants, scales, zeros)


def int8(weight: torch.Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 127
    quants = (weight / scales).round().to(torch.int8)
    return {"weight": quants, "weight_scale": scales}, quants.float() * scales


def fp8(rows: int, columns: int, name: str = "weight_scale", flat: bool = False) -> Write:
    """With a scale for parts of so many rows and columns, the last ones smaller; 0: of all."""

    def write(weight: torch.Tensor) -> Written:
        outputs, inputs = weight.shape
        height, width = rows or outputs, columns or inputs
        padded = torch.nn.functional.pad(weight, (0, -inputs % width, 0, -outputs % height))
        scales = padded.view(-(-outputs // height), height, -1, width).abs().amax((1, 3)) / FP8_MAX
        wide = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[:outputs, :inputs]
        values = (weight / wide).to(torch.float8_e4m3fn)
        return {"weight": values, name: scales.flatten() if flat else scales}, values.float() * wide

    return write


def bnb8(weight: torch.Tensor) -> Written:
    largest = weight.abs().amax(1)
    quants = (weight * 127 / largest[:, None]).round().to(torch.int8)
    fields = {"weight": quants, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return fields, quants.float() * (largest[:, None] / 127)


def bnb4(nested: bool, size: int = 64) -> Write:
    """The first of two quants in the upper half of a byte; absmax of `size` weights; of 8 bits if nested."""

    def write(weight: torch.Tensor) -> Written:
        parts = weight.view(-1, size)
        factors = parts.abs().amax(1)
        fields = {"weight.quant_map": NF4, "weight.absmax": factors}
        state = {"quant_type": "nf4", "blocksize": size, "dtype": "float16", "shape": list(weight.shape)}
        if nested:
            table, offset = torch.linspace(-1, 1, 256), factors.mean().item()
            scale = (factors - offset).abs().amax()
            places = ((factors - offset) / scale)[:, None].sub(table).abs().argmin(1)
            factors = table[places] * scale + offset
            fields |= {"weight.absmax": places.to(torch.uint8), "weight.nested_absmax": scale[None]}
            fields |= {"weight.nested_quant_map": table}
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        quants = (parts / factors[:, None])[..., None].sub(NF4).abs().argmin(-1)
        packed = (quants.flatten()[::2] << 4 | quants.flatten()[1::2]).to(torch.uint8)[:, None]
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        fields |= {"weight": packed, "weight.quant_state.bitsandbytes__nf4": text}
        return fields, (NF4[quants] * factors[:, None]).view(weight.shape)

    return write


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
UNEVEN = {"group_0": {"weights": {"strategy": "block", "block_structure": [48, 48]}}}
"""Blocks whose size divides no matrix."""
FORMATS: dict[str, tuple[Write, dict[str, Any]]] = {
    "gptq": (gptq(4), GPTQ),
    "gptq-v2": (gptq(4, 2), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq-8": (gptq(8), GPTQ | {"bits": 8}),
    "gptq-3": (gptq(3), GPTQ | {"bits": 3}),
    "gptq-2": (gptq(2), GPTQ | {"bits": 2}),
    "gptq-desc_act": (gptq_in_any_order, GPTQ | {"desc_act": True}),
    "awq": (awq, AWQ),
    "fp8-blocks": (fp8(32, 32, "weight_scale_inv"), FP8 | {"weight_block_size": [32, 32]}),
    "fp8-tensor": (fp8(0, 0, flat=True), FP8 | {"activation_scheme": "static"}),
    "fbgemm_fp8": (fp8(1, 0), {"quant_method": "fbgemm_fp8"}),
    "w4a16": (packed_symmetric(4), PACKED),
    "w8a16": (packed_symmetric(8), PACKED),
    "w4a16-asymmetric": (packed_asymmetric, PACKED),
    "w8a8-int8": (int8, PACKED | {"format": "int-quantized"}),
    "w8a8-fp8": (fp8(1, 0), PACKED | {"format": "float-quantized"}),
    "w8a8-fp8-blocks": (fp8(48, 48), PACKED | {"format": "float-quantized", "config_groups": UNEVEN}),
    "bitsandbytes-8": (bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bitsandbytes-4": (bnb4(False), BNB4),
    "bitsandbytes-4-nested": (bnb4(True), BNB4),
}


def rounded(model: Any, method: str) -> Any:
    """A copy of a model with the numbers that its linear layers have after loading."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, child in model.named_modules():
            if type(child) is nn.Linear and name != "lm_head":
                child.weight.copy_(widen(ROUNDINGS[method](child.weight)))
    return model


def multiplies_blocks() -> bool:
    """Whether blocks are served as such on this processor; else they are widened at load."""
    library = native.library()
    dtypes = torch.bfloat16, torch.float32
    return bool(library) and all(multiplies_correctly(library, dtype) for dtype in dtypes)


def keep_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load no plain weights beside blocks, as where memory is short."""
    pack = packed_linear.pack_linear
    monkeypatch.setattr(
        packed_linear,
        "pack_linear",
        lambda linear, whole, pages, blocks, plain: pack(linear, whole, pages, blocks, plain=False),
    )


def keeps_blocks() -> bool:
    """Whether blocks are kept where memory has room for plain weights."""
    library = native.library()
    return bool(library and library.tf_block_rows(native.TYPE_CODES[torch.bfloat16])) and multiplies_blocks()


def multiplies_floats() -> bool:
    """Whether torch multiplies 8-bit floats with a scale for each row on CPU; older versions do on CUDA
    only.
    """
    values, scales = round_rows(torch.ones(16, 16))
    try:
        fp8_linear(torch.ones(2, 16, dtype=torch.bfloat16), values, scales, None)
    except RuntimeError:
        return False
    return True
