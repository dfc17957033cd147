"""Weights in blocks: read from quantised integers and GGUF's types, made of plain weights at load; the same
numbers in blocks, in parts and plain.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.packed_linear import LargePages, NativeLinear
from gpu_worker.engine.quantization import gguf as convert
from gpu_worker.engine.quantization.blocks import Blocks
from gpu_worker.engine.quantization.checkpoint import (
    BLOCKS_FOLDER,
    CONVERTED,
    ROUNDINGS,
    read_tensors,
    scale_integers,
    widen,
)
from gpu_worker.engine.quantization.gguf import UNPACKED, unpack
from tests.support.engine import quantized_models, tiny_models
from tests.support.engine.quantized_models import FORMATS, keep_blocks_only, mean, multiplies_blocks, rounded
from tests.support.engine.tiny_engine import engine_of, play, prompts
from tests.support.gguf.tiny_gguf import LAYERS, MATRICES, TYPES, write
from tests.support.parameters.slow_but import slow_but

INPUTS = 384
GGUF_TYPES = (TYPES.Q4_1, TYPES.Q8_0, TYPES.Q4_0, TYPES.Q5_1)


def make(bits: int, size: int) -> tuple[Blocks | torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    quants = torch.randint(0, 2**bits, (40, INPUTS), generator=random).to(torch.uint8)
    groups = INPUTS // size
    zeros = torch.randint(0, 2**bits, (40, groups), generator=random)
    scales = torch.rand(40, groups, generator=random).half()
    return scale_integers(quants, scales, zeros, size), mean(quants, scales, zeros)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [32, 48, 64, 128, 192, INPUTS])
def test_blocks_of_every_size_are_multiplied_like_plain_weights(bits: int, size: int) -> None:
    blocks, expected = make(bits, size)
    assert isinstance(blocks, Blocks) and torch.equal(widen(blocks), expected) and blocks.bits == bits
    if not multiplies_blocks():
        pytest.skip("weights are widened on this processor")
    library, linear = native.library(), nn.Linear(INPUTS, 40, bias=False)
    assert library
    linear.weight = nn.Parameter(expected.bfloat16(), requires_grad=False)
    plain = NativeLinear(linear, library, True, LargePages())
    own = NativeLinear(linear, library, True, LargePages(), blocks, plain=False)
    rows = torch.randn(40, INPUTS, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert all(torch.equal(plain(rows[:count]), own(rows[:count])) for count in (1, 3, 40))


def test_weights_without_blocks_are_plain() -> None:
    """Where groups have several sizes, one that fits no kernel, or sums would be rounded."""
    quants, zeros = torch.arange(16, dtype=torch.uint8).repeat(2, 2), torch.full((2, 2), 3)
    scales = torch.tensor([[0.5, 2.0]] * 2)
    mixed = (torch.arange(32) % 3).clamp(max=1)
    found = scale_integers(quants, scales, zeros, 16, mixed)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, (quants.float() - 3) * scales[:, mixed])
    mixed = torch.arange(32) % 2
    found = scale_integers(quants, scales, zeros, 16, mixed)
    assert isinstance(found, Blocks) and found.of_columns(0, 16) is None
    assert torch.equal(widen(found), (quants.float() - 3) * scales[:, mixed])
    assert isinstance(scale_integers(quants[:, :24], scales, zeros, 12), torch.Tensor)
    assert isinstance(scale_integers(quants, scales / 3, zeros, 16), torch.Tensor)
    assert isinstance(scale_integers(quants, scales, zeros, 16), Blocks)


pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of types of 4 and 8 bits, with and without offsets."""
    folder = tmp_path_factory.mktemp("gguf")
    source = write(folder / "tiny.gguf", *GGUF_TYPES)
    converted: Path = folder / request.param
    convert.convert(source, converted, request.param)
    return converted


def test_every_layer_has_the_blocks_of_its_weights(converted: Path) -> None:
    """Also where transformers has reordered the rows of the file's matrices."""
    plain, bits = load_file(converted / "model.safetensors"), []
    for name, stored in read_tensors(converted / BLOCKS_FOLDER, CONVERTED).items():
        blocks = stored.read()
        assert torch.equal(blocks.widen(plain[name].dtype), plain[name]), name
        assert stored.get_shape() == [*plain[name].shape]
        bits.append(blocks.bits)
    assert len(bits) == LAYERS * len(MATRICES) + 1 and {*bits} == {4, 8}


FILE_ROWS, FILE_INPUTS = 6, 768
FLOAT16_AT = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
"""Bytes of a block where its float16 numbers are; all other bytes may be anything."""


@pytest.mark.parametrize("name", UNPACKED)
def test_a_type_is_unpacked_to_the_weights_that_it_means(name: str) -> None:
    kind, random = gguf.GGMLQuantizationType[name], np.random.default_rng(0)
    weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (FILE_ROWS, FILE_INPUTS // weights * num_bytes), dtype=np.uint8)
    blocks = data.reshape(-1, num_bytes)
    for at in FLOAT16_AT[name]:
        blocks[:, at : at + 2] = random.normal(0, 1, (len(blocks), 1)).astype("<f2").view(np.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert torch.equal(Blocks(*unpack(name, data)).widen(), expected.bfloat16())


# --- whole models -------------------------------------------------------------------------------------------

Folders = tuple[Path, Path]
"""Of a model in blocks, and of one with plain weights of the same numbers."""


def of_checkpoint(form: str) -> Callable[[Path], Folders]:
    def save(folder: Path) -> Folders:
        quantized_models.save(folder, *FORMATS[form])
        return folder, folder / "plain"

    return save


def at_load(method: str) -> Callable[[Path], Folders]:
    def save(folder: Path) -> Folders:
        plain, other = folder / "plain", folder / "rounded"
        tiny_models.save(plain, *tiny_models.FAMILIES["Llama"])
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        rounded(model, method).save_pretrained(other)
        shutil.copy(plain / "tokenizer.json", other)
        return plain, other

    return save


def of_gguf(dtype: str) -> Callable[[Path], Folders]:
    def save(folder: Path) -> Folders:
        source = write(folder / "tiny.gguf", *GGUF_TYPES)
        convert.convert(source, folder / "own", dtype)
        shutil.copytree(folder / "own", folder / "widened", ignore=shutil.ignore_patterns(BLOCKS_FOLDER))
        return folder / "own", folder / "widened"

    return save


SAVED: dict[str, tuple[Callable[[Path], Folders], dict[str, Any]]] = {
    **{form: (of_checkpoint(form), {}) for form in ("gptq", "awq", "w8a8-int8")},
    **{method: (at_load(method), {"quantize": method}) for method in ROUNDINGS},
    **{f"gguf {dtype}": (of_gguf(dtype), {}) for dtype in ("bfloat16", "float32")},
}


@pytest.mark.parametrize(
    "name", slow_but(["awq", "bitsandbytes-nf4", "gguf bfloat16", "gguf float32"], SAVED)
)
def test_blocks_have_the_bits_of_plain_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no plain weights beside the blocks."""
    keep_blocks_only(monkeypatch)
    (save, settings), dtype = SAVED[name], "float32" if "float32" in name else "bfloat16"
    own, plain = save(tmp_path)
    engines = engine_of(own, dtype=dtype, **settings), engine_of(plain, dtype=dtype)
    ids, expected = (play(engine, dict(enumerate(prompts()))) for engine in engines)
    assert ids == expected
    if not multiplies_blocks():
        pytest.skip("weights are widened on this processor")
    found = [
        sum(isinstance(one, NativeLinear) and one.blocks is not None for one in engine.loaded.model.modules())
        for engine in engines
    ]
    num_layers = LAYERS * len(MATRICES) + 1 if "gguf" in name else 21
    assert found == [0 if name == "fp8" else num_layers, 0], "8-bit floats are multiplied on CUDA alone"
