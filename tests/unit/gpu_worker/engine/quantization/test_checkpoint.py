"""A quantised checkpoint is served with the ids of plain weights of the same numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.engine.quantization.blocks import LARGEST_BLOCK, Blocks
from gpu_worker.engine.quantization.checkpoint import (
    find_packed,
    read_bnb4,
    read_fp8,
    read_tensors,
    refuse_compressed,
    widen,
)
from gpu_worker.protocol import UnservableModel
from tests.support.engine import quantized_models
from tests.support.engine.quantized_models import FORMATS, bnb4, fp8


def test_blocks_of_several_sizes_are_refused() -> None:
    groups = {str(size): {"weights": {"block_structure": f"{size}x{size}"}} for size in (64, 128)}
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    assert refuse_compressed(config) == "its blocks have several sizes: 64x64, 128x128"
    assert not refuse_compressed(config | {"config_groups": {"64": groups["64"], "same": groups["64"]}})


def test_tensors_of_few_bits_are_plain_only_as_masks() -> None:
    plain = {"a.weight": "BF16", "a.attn.bias": "U8", "a.causal_mask": "I8", "a.table": "I64", "b": "F64"}
    packed = {"a.weight": "I32", "a.down_proj": "F8_E5M2", "a.up": "I8", "a.bias": "U8", "a.gate_proj": "I32"}
    scales = {"a.bias_scale": "F32", "a.gate_proj_scale_inv": "F32"}
    assert list(find_packed(slices_of(plain))) == []
    named = [f"weights of type {kind} ({name})" for name, kind in packed.items()]
    assert list(find_packed(slices_of(packed | scales))) == named


def slices_of(types: dict[str, str]) -> dict[str, SimpleNamespace]:
    return {name: SimpleNamespace(get_dtype=lambda kind=kind: kind) for name, kind in types.items()}


def cut(rows: int, columns: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda table: table[: len(table) - rows, : table.shape[1] - columns].contiguous()


@pytest.mark.parametrize(
    ("form", "field", "damage"),
    [
        ("gptq", "scales", cut(1, 0)),
        ("gptq", "scales", cut(0, 8)),
        ("gptq-3", "qweight", cut(1, 0)),
        ("awq", "scales", cut(1, 0)),
        ("awq", "scales", lambda table: table.repeat(2, 1)),
        ("awq", "qzeros", cut(0, 1)),
        ("fp8-blocks", "weight_scale_inv", cut(1, 0)),
        ("w4a16", "weight_scale", cut(1, 0)),
        ("bitsandbytes-4", "weight.quant_state.bitsandbytes__nf4", None),
        ("bitsandbytes-4", "weight.absmax", lambda table: table[1:].clone()),
        ("bitsandbytes-8", "SCB", lambda table: table[1:].clone()),
        ("fp8-tensor", "weight_scale", None),
    ],
)
def test_a_damaged_layer_is_named(form: str, field: str, damage: Any, tmp_path: Path) -> None:
    """`damage` None: without this tensor."""
    quantized_models.save(tmp_path, *FORMATS[form])
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.1.mlp.up_proj"
    table = tensors.pop(f"{layer}.{field}")
    save_file(
        tensors if damage is None else tensors | {f"{layer}.{field}": damage(table)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    with pytest.raises(UnservableModel, match=rf"^{layer} cannot be read: \S"):
        stored = read_tensors(tmp_path, config)[f"{layer}.weight"]
        stored.get_shape()
        stored[...]


@pytest.mark.parametrize("size", [64, 256, 4096])
def test_blocks_of_bitsandbytes_are_as_large_as_kernels_take(size: int) -> None:
    """The same numbers, also of many rows and of blocks that hold several of the kernels'."""
    fields, weight = bnb4(nested=False, size=size)(torch.randn(16, 4096))
    blocks = read_bnb4(fields, {})
    assert isinstance(blocks, Blocks) and blocks.size == min(size, LARGEST_BLOCK)
    assert torch.equal(widen(blocks), weight)


@pytest.mark.parametrize("inputs", [24, 40, 128, 384])
def test_blocks_of_floats_may_be_wider_than_the_weights(inputs: int) -> None:
    fields, weight = fp8(128, 128)(torch.randn(256, inputs))
    blocks = read_fp8(fields, {"weight_block_size": [128, 128]})
    assert isinstance(blocks, Blocks) and blocks.size == min(inputs, LARGEST_BLOCK)
    assert torch.equal(widen(blocks), weight)
