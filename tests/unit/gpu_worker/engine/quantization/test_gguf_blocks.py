"""The linear layers of a GGUF file are served from the file's own blocks."""

import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open

from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.packed_linear import NativeLinear
from gpu_worker.engine.quantization import gguf as convert
from gpu_worker.engine.quantization.blocks import Blocks
from gpu_worker.engine.quantization.gguf import BLOCKS_FILE, converted_blocks
from tests.support.engine.quantized_models import keep_blocks_only
from tests.support.engine.tiny_engine import engine_of, play, prompts
from tests.support.gguf.tiny_gguf import LAYERS, MATRICES, TYPES, write

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


def test_rows_of_several_kinds_are_not_joined() -> None:
    scales = torch.ones(2, 1)
    four, eight = (
        Blocks(torch.zeros(2, 32, dtype=torch.uint8), scales, None),
        Blocks(torch.zeros(2, 32, dtype=torch.int8), scales, None),
    )
    assert Blocks.joined([four, eight], torch.tensor([0, 2])) is None
    assert Blocks.joined([four, four], torch.tensor([0, 3])) is not None


def test_a_file_without_such_types_has_no_blocks(tmp_path: Path) -> None:
    source = write(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.BF16)
    convert.convert(source, tmp_path / "converted")
    assert converted_blocks(tmp_path / "converted") == {}
