"""Commands before a fleet's start: `doctor`, `download-weights` and `quantize`, whose wrong arguments are
refused before it starts, and of which a cut run leaves nothing.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common import model_files
from common.broker import acl
from common.settings.settings import SettingError, Settings
from deploy.cli import admin, doctor
from deploy.launcher import prepare
from deploy.launcher.control_socket import RunningFleet
from deploy.launcher.embedded_broker import Broker
from deploy.launcher.prepare import Finding
from tests.integration.deploy.test_cli import tokenfleet
from tests.support import brokers
from tests.support.engine import tiny_models
from tests.support.machine.ports import free_port
from tests.support.other_servers import in_thread
from tests.support.source_tree import ROOT

GIB = 2**30


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No GPU; an empty cache of models."""
    monkeypatch.setattr(prepare, "NVIDIA", tmp_path / "nvidiactl")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def found(name: str, **settings: Any) -> Finding:
    return dict(doctor.examine(Settings(hostname="127.0.0.1", port=free_port(), **settings)))[name]


def test_a_healthy_machine_passes(broker: Broker) -> None:
    """Other tests take memory meanwhile: a small cache fits."""
    flags = ["--hostname", "127.0.0.1", "--port", str(free_port()), "--kv-cache-bytes", "16MiB"]
    done = tokenfleet("doctor", *flags, "--redis-url", broker.url)
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line[0] != " "] == [
        name.split()[0] for name in prepare.CHECKS
    ]
    assert done.returncode == 0
    assert "answers, is new enough, and has an append-only file" in done.stdout


def test_a_failure_is_printed_with_its_fix() -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}"
    done = tokenfleet(
        "doctor", "/no/such/model", "--device", "cuda", "--kv-cache-bytes", "8192GiB", REDIS_URL=url
    )
    failed = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("fail")}
    assert done.returncode == 1
    assert (
        "no connection to the broker" in failed["broker"]
        and "→ start a Redis" in failed["broker"]
        and "secret" not in done.stdout
    )
    assert "/no/such/model does not exist" in failed["model"] and "→ set MODEL_ID to" in failed["model"]
    assert "cuda, but this machine has no driver" in failed["GPU"]


def test_a_model_without_all_of_its_weights(tmp_path: Path) -> None:
    folder = model(tmp_path)
    assert found("model", model_id=str(folder)).level == "fail"
    (folder / "one.safetensors").write_bytes(b"1")
    assert found("model", model_id=str(folder)) == Finding(
        "ok", f"{folder}: 0.0 GiB, up to 64 tokens, in {folder}"
    )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    )
    assert found("model", model_id=str(folder)).level == "fail"


def model(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_torch_for_cpu_beside_a_gpu_is_a_warning(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "version", lambda name: "2.13.0+cpu")
    assert found("torch").level == "ok"
    prepare.NVIDIA.touch()
    assert found("torch").level == "warn"
    assert "driver does not answer" in found("GPU").found


def test_a_gpu_needs_flashinfer_nvcc_and_compilers(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer compiles them, with nvcc and a C++ compiler; Triton needs Python's headers."""
    assert found("kernels").level == "ok"
    prepare.NVIDIA.touch()
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(nowhere / "bin"))
    monkeypatch.setattr(prepare, "CUDA", nowhere / "none")
    if find_spec("flashinfer") is None:
        assert found("kernels").fix == "pip install -e '.[cuda]'" and found("kernels").level == "warn"
    monkeypatch.setattr(prepare, "version", lambda name: "0.7.2")
    assert found("kernels").level == "fail" and "nvcc" in found("kernels").found
    program(nowhere / "toolkit/bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "toolkit"))
    assert found("kernels").level == "fail" and "g++" in found("kernels").fix
    program(nowhere / "bin/g++")
    monkeypatch.setattr(prepare, "HEADERS", nowhere / "include")
    assert found("kernels").level == "fail" and "include/Python.h" in found("kernels").found
    program(nowhere / "include/Python.h")
    assert found("kernels") == Finding("ok", f"FlashInfer 0.7.2, compiled by {nowhere}/toolkit/bin/nvcc")
    assert "native kernels" in found("kernels", device="cpu").found


def test_nvcc_is_found_as_flashinfer_finds_it(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is named comes first, and nothing else is looked at then; PATH comes before the usual place."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(nowhere / "bin"))
    monkeypatch.setattr(prepare, "CUDA", nowhere / "usual")
    assert prepare.find_nvcc() is None
    program(nowhere / "usual/bin/nvcc")
    assert prepare.find_nvcc() == str(nowhere / "usual/bin/nvcc")
    program(nowhere / "bin/nvcc")
    assert prepare.find_nvcc() == str(nowhere / "bin/nvcc")
    monkeypatch.setenv("CUDA_PATH", str(nowhere / "empty"))
    assert prepare.find_nvcc() is None
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "usual"))
    assert prepare.find_nvcc() == str(nowhere / "usual/bin/nvcc")


def program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    path.chmod(0o755)


def test_a_disk_without_room_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    for free, level in ((GIB // 4, "warn"), (0, "fail")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert found("disk").level == level


def test_the_port_of_a_fleet_that_runs_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings(hostname="127.0.0.1", port=taken.getsockname()[1])
        assert dict(doctor.examine(settings))["port"].level == "fail"
        fleet = RunningFleet(1, "/", "tokenfleet serve", prepare.base_url(settings), "", "", "default")
        monkeypatch.setattr(prepare, "running_fleets", lambda: [fleet])
        beside = dict(doctor.examine(settings))["port"]
    assert beside.level == "warn" and "taken by a fleet that runs already" in beside.found


def test_it_prints_the_users_that_a_pools_processes_need_as_an_acl_file() -> None:
    done = tokenfleet("doctor", "--acl", "--pool", "fast")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines] == [*acl.USERS]
    assert all(">" not in line and "nopass" not in line for line in lines), "no password is printed or spared"
    assert "~tf:{fast}:log:*" in lines[2].split()
    with brokers.running() as broker, Redis.from_url(broker.url) as client:
        for line in lines:
            client.execute_command("ACL", "SETUSER", *line.split()[1:])
        assert set(client.acl_users()) == {*acl.USERS, "default"}


# --- download-weights ---------------------------------------------------------------------------------------


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


# --- quantize -----------------------------------------------------------------------------------------------

INTERRUPTED = 130
WRONG = {
    "--method awq": "--method: 'awq' is not gptq; checkpoints of other methods that llm-compressor",
    "--bits 3": "--bits: 3 is neither 4 nor 8",
    "--method fp8": "--method: fp8 is not written: `tokenfleet serve MODEL --quantize fp8` rounds at load",
    "--scales tensor": "--scales: unknown flag",
    "--groupsize 100": "--group-size: 100 is neither -1 nor a power of two from 16 to 1024",
    "--percdamp 0": "--percdamp: 0.0 is not above 0 and at most 1",
    "--calibration-tokens 5": "--calibration-tokens: 5 is less than 128",
    "--calibration /nowhere": "--calibration: /nowhere is no file",
    "--act-order perhaps": "--act-order: 'perhaps' is not true or false",
    "--upload-to-model-id a/b": "--upload-to-model-id: is not served: `hf upload ID OUT` does it afterwards",
    "--bit 4": "--bit: unknown flag",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_argument_is_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as refusal:
        admin.main(["quantize", "smollm2", str(tmp_path / "out"), *words.split()])
    assert str(refusal.value).startswith(WRONG[words])


def test_what_is_there_already_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"^OUTPUT: .* exists already$"):
        admin.main(["quantize", "smollm2", str(tmp_path)])
    with pytest.raises(SettingError, match=r"^OUT: is missing"):
        admin.main(["quantize", "smollm2"])
    with pytest.raises(SettingError, match=r"^MODEL_ID: /nowhere does not exist$"):
        admin.main(["quantize", "/nowhere", str(tmp_path / "out")])


def start(*argv: str) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "deploy.cli", "quantize", *argv, "--threads", "1", "--device", "cpu"]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=dict(os.environ))


@pytest.mark.slow
def test_a_run_prints_its_directory_and_an_interrupted_one_leaves_nothing(tmp_path: Path) -> None:
    source = tiny_models.save_with_bytes(tmp_path / "plain", *tiny_models.FAMILIES["Llama"])
    whole, text = start(str(source), str(tmp_path / "deep" / "made")), tmp_path / "text"
    text.write_text("All work and no play makes Jack a dull boy. " * 5000)
    cut = start(str(source), str(tmp_path / "cut"), "--calibration", str(text))
    assert cut.stderr
    for line in cut.stderr:
        if line.startswith("quantising"):
            cut.send_signal(signal.SIGTERM)
            break
    assert cut.wait(120) == INTERRUPTED
    printed, said = whole.communicate(timeout=120)
    assert whole.returncode == 0 and printed == f"{tmp_path / 'deep' / 'made'}\n"
    assert said.splitlines()[-1].endswith(" MiB after")
    config = json.loads((tmp_path / "deep" / "made" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gptq"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "plain", "text"]
