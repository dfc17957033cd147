"""Model files: hub ids, folders and GGUF files are found, downloaded, converted; configs are read."""

import errno
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from common import model_files
from common.gguf_check import check_gguf
from common.process.machine import make_cache_folder
from common.settings.settings import SettingError
from tests.support.gguf import tiny_gguf
from tests.support.gguf.tiny_gguf import HIDDEN, LAYERS, TYPES, VOCAB

# --- model files --------------------------------------------------------------------------------------------

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
    stub = tmp_path / "gpu_worker" / "engine" / "quantization"
    stub.mkdir(parents=True)
    for name, text in (
        ("gguf.py", STUB),
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


# --- model files cache folders ------------------------------------------------------------------------------

CONVERT = """
import sys
from common import model_files
from common.settings.settings import SettingError
try:
    model_files.resolve(sys.argv[1])
except SettingError as error:
    print(error)
"""
MOUNT = "mount -t tmpfs -o size=64k tmpfs {folder} && mount -o remount,{mode} {folder}"
ON_DISK = MOUNT + " && exec {python} -c '{code}' {gguf}"
HAS_NAMESPACES = shutil.which("unshare") and not subprocess.run(["unshare", "-rm", "true"]).returncode


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_may_write_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    """Neither to one that is made, nor to one that an earlier version has made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(umask)
    try:
        (tmp_path / "cache" / "tokenfleet").mkdir(parents=True)
        folder = make_cache_folder("native")
    finally:
        os.umask(before)
    assert folder == tmp_path / "cache" / "tokenfleet" / "native"
    for path in (folder, folder.parent):
        assert not stat.S_IMODE(path.stat().st_mode) & (stat.S_IWGRP | stat.S_IWOTH)


@pytest.mark.skipif(not HAS_NAMESPACES, reason="no user namespaces to mount a disk in")
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("ro", "/tokenfleet cannot be written to (Read-only file system): set it to a folder that can be"),
        ("rw", "/tokenfleet/models cannot be written to (No space left on device): free some space there"),
    ],
)
def test_a_read_only_and_a_full_disk_are_told_from_a_bad_model(tmp_path: Path, mode: str, said: str) -> None:
    gguf = tiny_gguf.write(tmp_path / "tiny.gguf", TYPES.F16)
    cache = tmp_path / "cache"
    cache.mkdir()
    words = ON_DISK.format(folder=cache, mode=mode, python=sys.executable, code=CONVERT, gguf=gguf)
    environ = os.environ | {"XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(["unshare", "-rm", "sh", "-c", words], env=environ, capture_output=True, text=True)
    assert done.stdout.startswith(f"XDG_CACHE_HOME: {cache}{said}"), done.stderr


@pytest.mark.parametrize(
    ("number", "cure"),
    [(errno.ENOSPC, "free some space there"), (errno.EROFS, "set it to a folder that can be")],
)
def test_a_disk_that_takes_no_download_is_not_the_hub_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cure: str
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(SettingError) as refused:
        model_files.resolve("some/model")
    said = f"HUGGINGFACE_HUB_CACHE: {tmp_path} cannot be written to ({os.strerror(number)}): {cure}"
    assert str(refused.value).startswith(said)


# --- model config -------------------------------------------------------------------------------------------


def test_eos_ids_come_from_the_first_file_that_knows(tmp_path: Path) -> None:
    added = [{"id": 5, "content": "</s>", "special": True}, {"id": 6, "content": "<tool>", "special": False}]
    path = write(
        tmp_path,
        config={"max_position_embeddings": 99},
        tokenizer={"added_tokens": added},
        tokenizer_config={"eos_token": "</s>"},
    )
    assert model_files.eos_ids(path) == [5]
    write(path, config={"max_position_embeddings": 99, "eos_token_id": 7})
    assert model_files.eos_ids(path) == [7]
    write(path, generation_config={"eos_token_id": [8, 9]})
    assert model_files.eos_ids(path) == [8, 9]
    other = write(
        tmp_path / "other", tokenizer={"added_tokens": added}, tokenizer_config={"eos_token": "</s>"}
    )
    assert model_files.eos_ids(path, other) == [8, 9, 5]
    write(path, generation_config={"eos_token_id": 5})
    assert model_files.eos_ids(path, other) == [5]
    assert model_files.special_ids(path) == {5}
    assert model_files.context_length(path) == 99


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"decoder_start_token_id": 0}, {}, [0]),
        ({"decoder_start_token_id": 2, "forced_bos_token_id": 5}, {}, [2, 5]),
        ({"bos_token_id": 3}, {}, [3]),
        ({"decoder_start_token_id": 2}, {"decoder_start_token_id": 4, "forced_bos_token_id": 0}, [4, 0]),
    ],
)
def test_ids_that_start_the_decoder(
    config: dict[str, Any], generation: dict[str, Any], ids: list[int], tmp_path: Path
) -> None:
    write(tmp_path, config=config | {"is_encoder_decoder": True}, generation_config=generation)
    assert model_files.starting_ids(tmp_path) == ids
    assert model_files.starting_ids(write(tmp_path, config=config)) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"model": {"vocab": ', b"\xff\xfe", b"\0" * 9])
def test_a_damaged_file_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(SettingError, match=r"^MODEL_ID: .*tokenizer\.json is no tokenizer, or damaged: "):
        model_files.read_tokenizer(tmp_path)
    if content != b"{}":
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(SettingError, match=r"^MODEL_ID: .*config\.json is (not JSON|no JSON object)"):
            model_files.eos_ids(tmp_path)


# --- gguf check ---------------------------------------------------------------------------------------------

Change = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", TYPES.F16)


def refusal(path: Path) -> str:
    with pytest.raises(SettingError) as refused:
        check_gguf(path)
    text = str(refused.value)
    assert text.startswith(f"MODEL_ID: {path} is damaged, or no GGUF file: ")
    assert len(text) < 600 and "\n" not in text
    return text


def put(key: str, kind: str, value: object, header: bytes) -> bytes:
    """A header whose key has another value, of the same size."""
    at = header.index(key.encode()) + len(key) + 4
    return header[:at] + struct.pack(f"<{kind}", value) + header[at + struct.calcsize(f"<{kind}") :]


def replace(old: bytes, new: bytes, header: bytes) -> bytes:
    assert old in header
    return header.replace(old, new, 1)


def cut(length: int, header: bytes) -> bytes:
    return header[:length]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (partial(cut, 0), "it cannot be read ("),
        (partial(cut, 1000), "it cannot be read ("),
        (partial(cut, -1), "it cannot be read ("),
        (partial(replace, b"GGUF", b"GGML"), "it cannot be read (GGUF magic invalid)"),
        (partial(replace, b"GGUF\3", b"GGUF\7"), "it cannot be read (Sorry, file appears to be version 7"),
        (partial(put, "GGUF", "Q", 2**60), "it cannot be read ("),
        (
            partial(put, "llama.block_count", "I", 10**6),
            f"`llama.block_count` is 1000000, but it has tensors of {LAYERS} blocks",
        ),
        (
            partial(put, "llama.embedding_length", "I", 65),
            f"`llama.embedding_length` is 65 and `llama.vocab_size` {VOCAB}, with {VOCAB} "
            f"`tokenizer.ggml.tokens`: `token_embd.weight` is [{HIDDEN}, {VOCAB}]",
        ),
        (partial(replace, b"gpt2", b"gp\xff2"), "it cannot be read ('utf-8' codec can't decode byte 0xff"),
        (partial(replace, b"blk.1.attn_q", b"blk.0.attn_q"), "it cannot be read (Found duplicated tensor"),
    ],
)
def test_what_cannot_be_is_refused_by_name(whole: Path, tmp_path: Path, change: Change, words: str) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(change(whole.read_bytes()))
    assert words in refusal(damaged)
