"""Weights in blocks: read from quantised integers and GGUF's types, made of plain weights at load; the same
numbers in blocks, in parts and plain.
"""

import copy
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.packed_linear import LargePages, NativeLinear
from gpu_worker.engine.quantization import gguf as convert
from gpu_worker.engine.quantization.at_load import FP4, NF4, ROUNDINGS
from gpu_worker.engine.quantization.blocks import Blocks
from gpu_worker.engine.quantization.gguf import BLOCKS_FILE, UNPACK, converted_blocks, unpack
from gpu_worker.engine.quantization.integers import read_int8
from gpu_worker.engine.quantization.weight import scale_floats, scale_integers, widen
from tests.support.engine import quantized_models, tiny_models
from tests.support.engine.quantized_models import keep_blocks_only, keeps_blocks, mean, multiplies_blocks
from tests.support.engine.tiny_engine import NEW_TOKENS, engine_of, play, prompts
from tests.support.gguf.tiny_gguf import LAYERS, MATRICES, TYPES, write
from tests.support.parameters.slow_but import slow_but

INPUTS = 384


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


def test_parts_of_blocks_begin_where_blocks_do_not() -> None:
    blocks, expected = make(4, 128)
    assert isinstance(blocks, Blocks)
    part = blocks.of_columns(64, 320)
    assert part and part.size == 64 and torch.equal(widen(part), expected[:, 64:320])
    assert blocks.of_columns(8, 128) is None
    rows = torch.arange(3, 17)
    assert torch.equal(widen(blocks.of_rows(rows)), expected[3:17])


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


def test_parts_of_floats_may_end_early() -> None:
    values = torch.ones(5, 7).to(torch.float8_e4m3fn)
    scales = torch.arange(6.0).view(2, 3)
    assert scale_floats(values, scales, (4, 3)).widen()[3:, 2:].tolist() == [[0, 1, 1, 1, 2], [3, 4, 4, 4, 5]]
    with pytest.raises(ValueError, match=r"scales \[2, 3\] do not fit weights \[5, 7\]"):
        scale_floats(values, scales, (2, 3))


def test_parts_of_a_size_that_no_config_names_are_equal() -> None:
    values = torch.ones(576, 128).to(torch.float8_e4m3fn)
    assert scale_floats(values, torch.ones(4, 2)).part == (144, 64)
    with pytest.raises(ValueError, match=r"scales \[5, 1\] of blocks .* do not divide weights \[576, 128\]"):
        scale_floats(values, torch.ones(5, 1))
    quants = {"weight": torch.ones(2, 576, dtype=torch.int8), "weight_scale": torch.ones(2, 5)}
    with pytest.raises(ValueError, match=r"5 groups do not divide 576 inputs"):
        read_int8(quants, {})


pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of types of 4 and 8 bits, with and without offsets."""
    folder = tmp_path_factory.mktemp("gguf")
    source = write(folder / "tiny.gguf", TYPES.Q4_1, TYPES.Q8_0, TYPES.Q4_0, TYPES.Q5_1)
    convert.convert(source, folder / "converted", "bfloat16")
    return folder / "converted"


def test_every_layer_has_the_blocks_of_its_weights(converted: Path) -> None:
    """Also where transformers has reordered the rows of the file's matrices."""
    blocks = converted_blocks(converted)
    assert len(blocks) == LAYERS * len(MATRICES) + 1
    with safe_open(converted / "model.safetensors", "pt") as file:
        for name, layer in blocks.items():
            assert torch.equal(layer.widen(), file.get_tensor(f"{name}.weight")), name
    assert {layer.bits for layer in blocks.values()} == {4, 8}


def test_the_ids_are_those_of_widened_weights(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_blocks_only(monkeypatch)
    if not (library := native.library()) or not library.tf_multiplies(native.TYPE_CODES[torch.bfloat16]):
        pytest.skip("torch's products are used on this processor")
    widened = tmp_path / "widened"
    shutil.copytree(converted, widened)
    (widened / BLOCKS_FILE).unlink()
    engines = [engine_of(folder, dtype="bfloat16") for folder in (converted, widened)]
    found = [
        sum(
            isinstance(child, NativeLinear) and child.blocks is not None
            for child in engine.loaded.model.modules()
        )
        for engine in engines
    ]
    assert found == [LAYERS * len(MATRICES) + 1, 0]
    ids, expected = (play(engine, dict(enumerate(prompts()))) for engine in engines)
    assert ids == expected


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


@pytest.mark.parametrize("name", UNPACK)
def test_a_type_is_unpacked_to_the_weights_that_it_means(name: str) -> None:
    kind, random = gguf.GGMLQuantizationType[name], np.random.default_rng(0)
    weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (FILE_ROWS, FILE_INPUTS // weights * num_bytes), dtype=np.uint8)
    blocks = data.reshape(-1, num_bytes)
    for at in FLOAT16_AT[name]:
        blocks[:, at : at + 2] = random.normal(0, 1, (len(blocks), 1)).astype("<f2").view(np.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert torch.equal(Blocks(*unpack(name, data)).widen(), expected.bfloat16())


ROWS = {0: [5, 6, 7], 1: list(range(3, 40))}


def float64_nearest(weight: torch.Tensor, codes: tuple[float, ...]) -> torch.Tensor:
    """Each weight of 64 in turn as the nearest code, times their largest."""
    parts = weight.flatten().double().view(-1, 64)
    largest = parts.abs().amax(1, keepdim=True)
    table = torch.tensor(codes).double()
    found = ((parts / largest)[..., None] - table).abs().argmin(-1)
    return (table[found] * largest).view(weight.shape)


@pytest.mark.parametrize("shape", [(16, 128), (48, 96)], ids=["blocks", "across rows"])
@pytest.mark.parametrize("method", ["nf4", "fp4"])
def test_four_bits_are_the_nearest_codes(method: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    codes = NF4 if method == "nf4" else (*FP4, *(-code for code in FP4))
    own = ROUNDINGS[f"bitsandbytes-{method}"](weight)
    assert isinstance(own, Blocks) is (shape[1] % 64 == 0)
    assert torch.allclose(widen(own).double(), float64_nearest(weight, codes), rtol=1e-6)


@pytest.mark.parametrize(("method", "whole"), [("bitsandbytes", 127), ("eetq", 128)])
def test_eight_bits_have_a_scale_for_each_output(method: str, whole: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 96).half()
    weight[3] = 0
    largest = weight.float().abs().amax(1, keepdim=True)
    scales = largest / whole if method == "bitsandbytes" else (largest / whole).half().float()
    quants = (weight.float() / (largest / whole).clamp(min=1e-9)).round().clamp(-128, 127)
    own = ROUNDINGS[method](weight)
    assert isinstance(own, Blocks) and own.quants.dtype == torch.int8
    assert torch.allclose(widen(own), quants * scales, rtol=1e-6)


def rounded(model: Any, method: str) -> Any:
    """A copy of a model with the numbers that its linear layers have after loading."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, child in model.named_modules():
            if type(child) is nn.Linear and name != "lm_head":
                child.weight.copy_(widen(ROUNDINGS[method](child.weight)))
    return model


@pytest.mark.parametrize("method", ["bitsandbytes-fp4", "eetq"])
def test_ids_are_those_of_the_rounded_numbers(method: str, tmp_path: Path) -> None:
    plain = tiny_models.save(tmp_path, *tiny_models.FAMILIES["Llama-tied"])
    expected = {
        row: tiny_models.generate(rounded(plain, method), ids, NEW_TOKENS) for row, ids in ROWS.items()
    }
    assert play(engine_of(tmp_path, quantize=method), ROWS) == expected
    assert expected != {row: tiny_models.generate(plain, ids, NEW_TOKENS) for row, ids in ROWS.items()}


@pytest.mark.parametrize("method", slow_but(["bitsandbytes-nf4"], ROUNDINGS))
def test_blocks_have_the_bits_of_the_rounded_numbers(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, with no plain weights beside the blocks."""
    quantized_models.keep_blocks_only(monkeypatch)
    tiny_models.save(tmp_path / "plain", *tiny_models.FAMILIES["Llama"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    rounded(model, method).save_pretrained(tmp_path / "rounded")
    (tmp_path / "rounded" / "tokenizer.json").write_bytes(
        (tmp_path / "plain" / "tokenizer.json").read_bytes()
    )
    found = []
    for folder, asked in (("plain", method), ("rounded", None)):
        engine = engine_of(tmp_path / folder, quantize=asked, dtype="bfloat16")
        found.append(play(engine, ROWS))
        layer = engine.loaded.model.model.layers[0]
        linears = (layer.self_attn.q_proj, layer.mlp.down_proj)
        assert not keeps_blocks() or all((it.blocks is not None) is (asked is not None) for it in linears)
    assert found[0] == found[1]
