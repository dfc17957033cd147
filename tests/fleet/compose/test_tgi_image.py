"""TGI's image: `docker run IMAGE --model-id X` serves, and so do the lines of three clouds."""

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.support.compose.stack import Stack, run
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync

IMAGE = "tokenfleet-tgi-test"
START_S = 240.0
PROMPT = {"inputs": "The sky is blue because", "parameters": {"max_new_tokens": 5}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def image(stack: Stack) -> str:
    """The image, made of the one for processors, which the stack has built."""
    argument = "WORKER_IMAGE=tokenfleet-worker-cpu"
    built = run(["docker", "build", "-f", "deploy/Dockerfile.tgi", "--build-arg", argument, "-t", IMAGE, "."])
    assert built.returncode == 0, built.stderr[-3000:]
    return IMAGE


@contextlib.contextmanager
def running(image: str, data: Path, port: int, options: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """A container whose `port` is published; its name, and where it listens."""
    name, outer = f"tgi-{uuid.uuid4().hex[:8]}", free_port()
    command = ["docker", "run", "-d", "--name", name, "--shm-size", "1g", "-v", f"{data}:/data"]
    command += ["-p", f"127.0.0.1:{outer}:{port}", *options, image, *words]
    started = run(command)
    assert started.returncode == 0, started.stderr
    try:
        url = f"http://127.0.0.1:{outer}"
        wait_until_sync(lambda: is_healthy(url) or has_ended(name), START_S)
        assert is_healthy(url), run(["docker", "logs", name]).stderr[-3000:]
        yield name + " " + url
    finally:
        run(["docker", "rm", "-f", name])


def is_healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=3).status_code == 200
    return False


def has_ended(name: str) -> bool:
    return run(["docker", "inspect", "-f", "{{.State.Running}}", name]).stdout.strip() != "true"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is mounted at /data: the model is converted once."""
    return tmp_path_factory.mktemp("data")


def test_the_line_of_tgi_s_readme_serves(image: str, data: Path) -> None:
    with running(image, data, 80, [], ["--model-id", "smollm2", "--max-concurrent-requests", "7"]) as place:
        name, url = place.split()
        answer = httpx.post(f"{url}/generate", json=PROMPT, timeout=60).json()
        assert answer["generated_text"] == " of the way the human"
        assert httpx.get(f"{url}/info").json()["max_concurrent_requests"] == 7
        for command in ("launcher", "router", "server"):
            shown = run(["docker", "exec", name, f"text-generation-{command}", "--help"])
            assert (shown.returncode, shown.stdout[:6]) == (0, "usage:"), command
        stopped = run(["docker", "stop", "-t", "60", name])
        assert stopped.returncode == 0
        code = run(["docker", "inspect", "-f", "{{.State.ExitCode}}", name]).stdout.strip()
        assert code == "0", "SIGTERM drains"


def test_sagemaker_s_container_answers(image: str, data: Path) -> None:
    options = ["-e", "HF_MODEL_ID=smollm2", "-e", "SM_NUM_GPUS=1"]
    with running(image, data, 8080, options, ["serve"]) as place:
        url = place.split()[1]
        assert httpx.get(f"{url}/ping").status_code == 200
        answer = httpx.post(f"{url}/invocations", json=PROMPT, timeout=60)
        assert answer.json() == [{"generated_text": "The sky is blue because of the way the human"}]


def test_vertex_s_container_answers(image: str, data: Path) -> None:
    routes = ["-e", "AIP_PREDICT_ROUTE=/vertex", "-e", "AIP_HEALTH_ROUTE=/health"]
    options = ["-e", "AIP_HTTP_PORT=8088", *routes, "-e", "MODEL_ID=smollm2"]
    with running(image, data, 8088, options, []) as place:
        url = place.split()[1]
        answer = httpx.post(f"{url}/vertex", json={"instances": [PROMPT]}, timeout=60).json()
        [text] = answer["predictions"]  # drawn, as TGI does there
        assert text.startswith(" ")


def test_inference_endpoints_container_answers(image: str, data: Path, tmp_path: Path) -> None:
    """Their model lies in /repository."""
    [model] = (data / "tokenfleet").rglob("config.json")
    with running(image, data, 80, ["-v", f"{model.parent}:/repository"], []) as place:
        url = place.split()[1]
        answer = httpx.post(url, json=PROMPT, timeout=60)
        assert answer.json() == [{"generated_text": "The sky is blue because of the way the human"}]
