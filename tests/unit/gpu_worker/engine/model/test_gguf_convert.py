"""A GGUF file is served with its own weights: those of plain types stay what they are."""

import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GgufConfig

from common import model_files
from common.gguf_check import check_gguf
from common.process import machine
from common.settings.settings import SettingError
from gpu_worker.engine.quantization import gguf as convert
from tests.support.engine import tiny_models
from tests.support.engine.tiny_engine import NEW_TOKENS, engine_of, play, prompts
from tests.support.gguf.tiny_gguf import TYPES, damage, write


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ([TYPES.F32], torch.float32),
        ([TYPES.F16], torch.float16),
        ([TYPES.BF16], torch.bfloat16),
        ([TYPES.F32, TYPES.F16], torch.float32),
        ([TYPES.F16, TYPES.BF16], torch.float32),
        ([TYPES.Q8_0], torch.bfloat16),
        ([TYPES.Q8_0, TYPES.F16], torch.bfloat16),
    ],
    ids=lambda value: str(value),
)
def test_the_written_dtype_is_that_of_the_matrices(
    types: list[TYPES], expected: torch.dtype, tmp_path: Path
) -> None:
    assert convert.dtype_of(write(tmp_path / "tiny.gguf", *types)) == expected


def load_with_transformers(source: Path) -> Any:
    """The file's own values in float32."""
    options: dict[str, Any] = {
        "gguf_file": source.name,
        "dtype": torch.float32,
        "quantization_config": GgufConfig(dequantize=True),
    }
    return AutoModelForCausalLM.from_pretrained(source.parent, **options).eval()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", [TYPES.F16, pytest.param(TYPES.F32, marks=pytest.mark.slow)])
def test_plain_weights_keep_their_type_and_give_the_ids_of_transformers(kind: TYPES, tmp_path: Path) -> None:
    """In float32: bfloat16 in between would change the ids."""
    source, folder = write(tmp_path / "tiny.gguf", kind), tmp_path / "converted"
    convert.convert(source, folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {f"torch.float{kind.name[1:]}"}  # noqa: SIM118
    model = load_with_transformers(source)
    expected = {row: tiny_models.generate(model, prompt, NEW_TOKENS) for row, prompt in enumerate(prompts())}
    assert play(engine_of(folder), dict(enumerate(prompts()))) == expected


@pytest.mark.slow
def test_quantised_weights_are_exact_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The served file: its weights and its ids are those of transformers from the same file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write(tmp_path / "tiny.gguf", TYPES.Q8_0, TYPES.F16, TYPES.Q4_0)
    model = load_with_transformers(source)
    expected = {row: tiny_models.generate(model, prompt, NEW_TOKENS) for row, prompt in enumerate(prompts())}
    assert play(engine_of(source), dict(enumerate(prompts()))) == expected
    monkeypatch.setattr(machine, "has_bfloat16", lambda: False)
    assert play(engine_of(source, dtype="auto"), dict(enumerate(prompts()))) == expected, "float32, too"
    folder = model_files.resolve(str(source), dtype="float32")
    with safe_open(folder / "model.safetensors", "pt") as file:
        written = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in model.state_dict().items():
        assert torch.equal(written[name], tensor), name


NUM_CONVERTED = 4
REFUSED = r"its keys describe a model of \d+ weights|it has (no|\[.*\]) weights for|transformers does not"


def test_a_damaged_file_that_is_possible_is_converted_or_refused_in_our_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused is seen before memory is taken for it: the process has a limit."""
    source, folder, draw = tmp_path / "tiny.gguf", tmp_path / "converted", Random(1)
    content = write(source, TYPES.F16).read_bytes()
    monkeypatch.setattr(convert, "die_with_parent", lambda: None)
    monkeypatch.setattr(convert, "cache_gguf_parsing", lambda: None)
    monkeypatch.setattr("sys.argv", ["gguf", str(source), str(folder)])
    num_converted = 0
    while num_converted < NUM_CONVERTED:
        source.write_bytes(damage(content, draw))
        try:
            check_gguf(source)
        except SettingError:
            continue
        num_converted += 1
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            convert.main()
        except SystemExit as refused:
            assert re.match(REFUSED, str(refused)), refused
        else:
            assert (folder / "config.json").exists()


@pytest.mark.parametrize(
    ("key", "changed", "words"),
    [
        (b"blk.0.attn_q.", b"blk.0.attn_z.", "it has no weights for model.layers.0.self_attn.q_proj.weight"),
        (
            b"feed_forward_length\4\0\0\0\x80",
            b"feed_forward_length\4\0\0\0\x81",
            "weights for model.layers.0.mlp.down_proj.weight, and its keys ask for [64, 129]",
        ),
        (
            b"feed_forward_length\4\0\0\0\x80\0\0\0",
            b"feed_forward_length\4\0\0\0\x80\0\0\1",
            "its keys describe a model of ",
        ),
    ],
)
def test_a_file_whose_weights_are_not_those_of_its_keys_is_refused(
    key: bytes, changed: bytes, words: str, tmp_path: Path
) -> None:
    """transformers makes up what is missing."""
    source = write(tmp_path / "tiny.gguf", TYPES.F16)
    content = source.read_bytes()
    assert key in content
    source.write_bytes(content.replace(key, changed))
    with pytest.raises(convert.NotConvertible, match=re.escape(words)):
        convert.convert(source, tmp_path / "converted")
