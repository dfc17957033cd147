"""Model files: hub ids, directories and GGUF files are found, downloaded, converted."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from common import model_files
from common.model_files import cache_folder
from common.settings.settings import SettingError
from tests.support.engine.reference import prompt_ids
from tests.support.gguf import tiny_gguf

STUB = """import pathlib, sys, time
with open(pathlib.Path(__file__).parent / "conversions", "a") as log: log.write("x")
time.sleep(0.3)
for name in ("config.json", "tokenizer.json"): (pathlib.Path(sys.argv[2]) / name).write_text("{}")
(pathlib.Path(sys.argv[2]) / "model.safetensors").touch(0o600)
"""


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("model_id", "words"),
    [
        ("/no/such/dir", "/no/such/dir does not exist"),
        ("no such model", "does not exist"),
        ("../up/a/tree", "does not exist"),
        ("no/such-model", "no/such-model is no directory here, and the model hub"),
        ("no-such-model", "no-such-model is no directory here, and the model hub"),
    ],
)
def test_a_model_that_does_not_exist_is_refused(
    model_id: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(SettingError) as caught:
        model_files.resolve(model_id)
    assert caught.value.name == "model_id"
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert time.monotonic() - began < 30


def test_a_directory_needs_its_files(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"has no config\.json"):
        model_files.resolve(str(tmp_path))
    assert model_files.resolve(str(write(tmp_path, config={}))) == tmp_path
    with pytest.raises(SettingError, match=r"^MODEL_ID: .* has no tokenizer\.json"):
        model_files.find_tokenizer(None, tmp_path)
    assert model_files.find_tokenizer(None, write(tmp_path, tokenizer={})) == tmp_path


def test_another_tokenizer_is_a_directory_a_file_or_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own = tmp_path / "model", tmp_path / "own"
    model.mkdir()
    own.mkdir()
    write(own, tokenizer={})
    for path in (own, own / "tokenizer.json"):
        assert model_files.find_tokenizer(str(path), model) == own
    asked: list[Any] = []

    def download(*given: Any) -> Path:
        asked.append(given)
        return own

    monkeypatch.setattr(model_files, "download", download)
    assert model_files.find_tokenizer("org/tokenizer", model) == own
    assert asked == [("org/tokenizer", None, model_files.no_progress, model_files.TOKENIZER_FILES)]
    for name, cause in ((str(model), r"has no tokenizer\.json"), ("/nowhere", "does not exist")):
        with pytest.raises(SettingError, match=f"^TOKENIZER_NAME: .*{cause}"):
            model_files.find_tokenizer(name, model)


def test_a_file_must_be_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(SettingError, match=r"neither a directory nor a \.gguf file"):
        model_files.resolve(str(tmp_path / "model.bin"))


@pytest.mark.slow
def test_a_broken_gguf_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "model.gguf"
    source.write_text("not GGUF")
    with pytest.raises(SettingError, match="is damaged, or no GGUF file: it begins with b'not '"):
        model_files.resolve(str(source))
    assert not cache_folder(model_files.CONVERTED).exists()
    content = tiny_gguf.write(source, tiny_gguf.TYPES.F16).read_bytes()
    source.write_bytes(content.replace(b"blk.0.attn_q.", b"blk.0.attn_z."))
    with pytest.raises(SettingError, match="cannot be converted: it has no weights for") as caught:
        model_files.resolve(str(source))
    assert "\n" not in str(caught.value)
    assert [path.suffix for path in cache_folder(model_files.CONVERTED).iterdir()] == [".lock"]


def test_without_torch_any_conversion_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway alone reads the tokenizer, whatever dtype its workers converted the file for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_files.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    gguf = tmp_path / "model.gguf"
    gguf.write_text("weights")
    with pytest.raises(SettingError, match="here is no torch for it"):
        model_files.resolve(str(gguf))
    exact = model_files.conversion_path(gguf, "float32")
    exact.mkdir(parents=True)
    assert model_files.resolve(str(gguf)) == model_files.resolve(str(gguf), dtype="bfloat16") == exact
    rounded = model_files.conversion_path(gguf, "auto")
    rounded.mkdir()
    assert model_files.resolve(str(gguf)) == rounded


def test_processes_that_start_together_convert_once(tmp_path: Path) -> None:
    """The conversion is replaced by one that counts. A package in the user's directory is not imported."""
    users_folder = tmp_path / "home" / "gpu_worker"
    users_folder.mkdir(parents=True)
    (users_folder / "__init__.py").write_text("raise RuntimeError")
    stub = tmp_path / "gpu_worker" / "engine" / "model"
    stub.mkdir(parents=True)
    for name, text in (
        ("gguf_convert.py", STUB),
        ("__init__.py", ""),
        ("../__init__.py", ""),
        ("../../__init__.py", ""),
    ):
        (stub / name).write_text(text)
    tiny_gguf.write(tmp_path / "model.gguf", tiny_gguf.TYPES.F16)
    code = "import sys; from common import model_files; print(model_files.resolve(sys.argv[1]))"
    checkout = str(Path(model_files.__file__).parents[1])
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": f"{tmp_path}:{checkout}"}
    command = [sys.executable, "-c", code, str(tmp_path / "model.gguf")]
    processes = [
        subprocess.Popen(command, env=environ, cwd=users_folder.parent, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    folders = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert len(folders) == 1
    assert len({file.stat().st_mode for file in Path(folders.pop()).iterdir()}) == 1, "as the umask says"
    assert (stub / "conversions").read_text() == "x"


def test_the_bundled_model_says_its_context_and_end_of_sequence() -> None:
    path = model_files.resolve("smollm2")
    assert model_files.context_length(path) == 8192
    assert model_files.eos_ids(path) == [2]
    assert prompt_ids(["<|im_end|>"]) == [[2]]
    assert {0, 1, 2} <= model_files.special_ids(path)
