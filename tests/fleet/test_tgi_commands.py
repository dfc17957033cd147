"""TGI's commands as its users start them, with the real model."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support import brokers
from tests.support.fleet.fleet import READY_S, Fleet
from tests.support.machine.ports import free_port
from tests.support.waiting import PATIENCE_S, wait_until_sync

BODY: dict[str, Any] = {"inputs": "The sky is blue because", "parameters": {"max_new_tokens": 8}}
SMALL = {"KV_CACHE_BYTES": "64MiB", "THREADS": "1", "NUM_JOBS": "0", "PRELOAD": "false"}
SMALL |= {"HOSTNAME": "127.0.0.1"}


class CommandFleet(Fleet):
    """A fleet that one of TGI's commands starts, with variables as its settings."""

    def __init__(self, command: str, *words: str, **variables: str) -> None:
        super().__init__()
        self.words = [os.fspath(Path(sys.executable).with_name(command)), *words]
        self.variables = variables

    def start(self) -> "CommandFleet":
        with (self.directory / "stdout").open("w") as out, (self.directory / "stderr").open("w") as error:
            environ = {name: value for name, value in os.environ.items() if name != "PORT"}
            environ |= SMALL | self.variables | {"PARENT_PID": str(os.getpid())}
            self.launcher = subprocess.Popen(self.words, env=environ, stdout=out, stderr=error)
        self.known = {self.launcher.pid: psutil.Process(self.launcher.pid)}
        return self


def text(url: str, path: str = "/generate") -> str:
    answer = httpx.post(url + path, json=BODY, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return str((found[0] if isinstance(found, list) else found)["generated_text"])


@pytest.mark.slow
def test_the_launcher_serves_as_sagemaker_starts_it_and_a_server_beside_a_router_gives_the_same() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    bound = {"SAGEMAKER_BIND_TO_PORT": str(port), "HF_MODEL_ID": "smollm2"}
    with CommandFleet("text-generation-launcher", "serve", **bound):
        assert httpx.get(f"{url}/ping").status_code == 200
        alone = text(url, "/invocations")
    with brokers.running() as broker:
        shared = {"REDIS_URL": broker.url, "PORT": str(port), "MODEL_ID": "smollm2"}
        router = CommandFleet("text-generation-router", **shared).start()
        server = CommandFleet("text-generation-server", "serve", "smollm2", **shared).start()
        try:
            wait_until_sync(lambda: is_healthy(url), READY_S)
            assert BODY["inputs"] + text(url) == alone, "/invocations gives the prompt, too"
        finally:
            server.kill()
            router.kill()


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False
