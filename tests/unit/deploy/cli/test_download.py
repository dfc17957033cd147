import json
import os
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common import model_files
from deploy.cli import admin
from tests.integration.deploy.test_cli import tokenfleet
from tests.support.machine.ports import free_port
from tests.support.other_servers import in_thread
from tests.unit.deploy.cli.test_doctor import model


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
    flags = "--revision main --extension .safetensors --auto-convert true --trust-remote-code --json-output"
    assert admin.main(["download-weights", str(folder), *flags.split()]) == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == (f"{folder}\n", f"{folder} is here already\n")


FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}
COMMIT = "0" * 40


async def hub(request: Request) -> Response:
    """A hub of one model, `organisation/model`."""
    match request.url.path.split("/")[-3:]:
        case ["resolve", _, name]:
            body = FILES[name]
        case ["model", "tree", _]:
            listed = [{"type": "file", "path": one, "size": len(FILES[one]), "oid": one} for one in FILES]
            body = json.dumps(listed).encode()
        case _:
            body = json.dumps({"id": "organisation/model", "sha": COMMIT}).encode()
    return Response(body, headers={"x-repo-commit": COMMIT, "etag": f'"{len(body)}"'})


def test_a_download_writes_its_steps_and_the_directory_alone_and_is_made_once(cache: Path) -> None:
    """The hub's client draws bars, even where there is no terminal."""
    words = ("download-weights", "organisation/model", "--revision", "v2")
    port = free_port()
    with in_thread(Starlette(routes=[Route("/{path:path}", hub)]), port):
        variables = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_OFFLINE": "", "NO_PROXY": "127.0.0.1"}
        variables["HF_HUB_CACHE"] = str(cache / "hub")
        done = tokenfleet(*words, **variables)
    assert (done.returncode, done.stderr) == (0, "looking up organisation/model\n")
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(cache) and (folder / "model.safetensors").read_bytes() == b"weights"
    assert tokenfleet(*words, **variables).stdout == done.stdout, "the hub is not there any more"
    other = tokenfleet(*words[:-1], "v3", **variables)
    assert other.returncode == os.EX_CONFIG and "the model hub" in other.stderr


def test_a_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    (model(tmp_path) / "pytorch_model.bin").write_bytes(b"")
    done = tokenfleet("download-weights", str(tmp_path))
    assert done.returncode == os.EX_CONFIG and "has no whole set of .safetensors files" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["organisation/model", "--extension", ".bin"], "--extension: .bin is not served: only .safetensors"),
        (["organisation/model", "--merge-lora"], "--merge-lora: an adapter is not merged"),
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
