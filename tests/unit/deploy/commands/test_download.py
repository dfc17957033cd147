import os
from pathlib import Path
from typing import Any

import pytest

from common import model_files
from deploy.commands import download
from deploy.serve import progress
from tests.integration.deploy.test_cli import tokenfleet
from tests.unit.deploy.doctor.test_command import model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_a_local_model_is_not_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(model_files, "download", None)
    flags = [
        "--revision",
        "main",
        "--extension",
        ".safetensors",
        "--auto-convert",
        "true",
        "--trust-remote-code",
        "--json-output",
    ]
    assert download.main([str(folder), *flags]) == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == (f"{folder}\n", f"{folder} is here already\n")


def test_a_hub_model_is_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []  # type: ignore[var-annotated]

    def snapshot_download(
        model_id: str, revision: str | None = None, local_files_only: bool = False, **_: Any
    ) -> str:
        if local_files_only and not calls:
            from huggingface_hub.errors import LocalEntryNotFoundError

            raise LocalEntryNotFoundError("not here")
        if not local_files_only:
            calls.append((model_id, revision))
            (model(tmp_path) / "model.safetensors").write_bytes(b"")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert download.main(["organisation/model", "--revision", "v2"]) == 0
    assert download.main(["organisation/model", "--revision", "v2"]) == 0
    assert calls == [("organisation/model", "v2")]
    assert capsys.readouterr().out == f"{tmp_path}\n" * 2


def test_a_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    (model(tmp_path) / "pytorch_model.bin").write_bytes(b"")
    done = tokenfleet("download-weights", str(tmp_path))
    assert done.returncode == os.EX_CONFIG and "has no whole set of .safetensors files" in done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["organisation/model", "--extension", ".bin"], "--extension: .bin is not served: only .safetensors"),
        (["organisation/model", "--merge-lora"], "--merge-lora: adapters are not built yet"),
        (["organisation/model", "--merge-lora=perhaps"], "--merge-lora: 'perhaps' is not true or false"),
        (["/no/such/model"], "MODEL_ID: /no/such/model does not exist"),
        (
            ["organisation/model", "--huggingface-hub-cache", "/nowhere"],
            "organisation/model is no directory here, and the model hub",
        ),
    ],
)
def test_an_unavailable_model_is_one_error_line(argv: list[str], words: str) -> None:
    done = tokenfleet("download-weights", *argv, HF_ENDPOINT="http://127.0.0.1:1", HF_HUB_OFFLINE="")
    assert done.returncode == os.EX_CONFIG
    assert words in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_progress_outside_a_terminal_is_one_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress() as show:
        show("looking up this")
        show("[converting] that")
    assert capsys.readouterr().err == "looking up this\n[converting] that\n"


def test_progress_is_one_live_line_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress.progress() as show:
        show("[converting] that")
    error = capsys.readouterr().err
    assert "[converting] that" in error and "0:00:00" in error and "\x1b[2K" in error
