import json
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from common.broker import acl
from common.settings.settings import Settings
from deploy.cli import doctor
from deploy.launcher import prepare
from deploy.launcher.control_socket import RunningFleet
from deploy.launcher.embedded_broker import Broker
from deploy.launcher.prepare import Finding
from tests.integration.deploy.test_cli import tokenfleet
from tests.support import brokers
from tests.support.machine.ports import free_port

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
