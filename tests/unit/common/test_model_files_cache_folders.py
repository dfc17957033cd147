import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from common import model_files
from common.model_files import make_cache_folder
from common.settings.settings import SettingError

GIB = 2**30
CONVERT = """
import sys
from common import model_files
from common.settings.settings import SettingError
try:
    model_files.resolve("smollm2")
except SettingError as error:
    print(error)
"""
MOUNT = "mount -t tmpfs -o size=1m tmpfs {folder} && mount -o remount,{mode} {folder}"
ON_DISK = MOUNT + " && exec {python} -c '{code}'"
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
        (
            "rw",
            "/tokenfleet/models has 1 MiB free, and SmolLM2-135M-Instruct.Q4_1.gguf takes 320 MiB when it is",
        ),
    ],
)
def test_a_read_only_and_a_full_disk_are_told_from_a_bad_model(tmp_path: Path, mode: str, said: str) -> None:
    words = ON_DISK.format(folder=tmp_path, mode=mode, python=sys.executable, code=CONVERT)
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(["unshare", "-rm", "sh", "-c", words], env=environ, capture_output=True, text=True)
    assert done.stdout.startswith(f"XDG_CACHE_HOME: {tmp_path}{said}"), done.stderr


def test_a_disk_that_fills_up_during_the_conversion_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two first starts that write at once may find it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = "safetensors: I/O error: No space left on device (os error 28)\n"
    failed = subprocess.CompletedProcess([], 1, stdout=said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SettingError) as refused:
        model_files.resolve("smollm2", dtype="auto")
    folder = tmp_path / "tokenfleet" / "models"
    why = f"{folder} cannot be written to (No space left on device): free some space there"
    assert str(refused.value) == f"XDG_CACHE_HOME: {why}"
    assert not [path for path in folder.iterdir() if path.is_dir()], "no draft is left"


def test_the_room_that_a_conversion_takes_is_known_before_and_0_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    half, whole = (model_files.bytes_to_convert("smollm2", dtype) for dtype in ("auto", "float32"))
    assert 0.25 * GIB < half < 0.35 * GIB and 1.7 * half < whole < 2 * half
    model_files.conversion_path(model_files.bundled_gguf(), "auto").mkdir(parents=True)
    assert model_files.bytes_to_convert("smollm2", "auto") == 0
    assert model_files.bytes_to_convert("some/model", "auto") == 0


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
