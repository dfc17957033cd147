"""`tokenfleet serve` as a person sees it, with the real processes and the real model."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from common.settings.settings import Settings
from deploy.launcher import prepare
from tests.support.fleet.fleet import READY_S, Fleet, have_ended, title
from tests.support.waiting import PATIENCE_S, wait_until_sync

PROMPT = "The sky is blue because"
NUM_TOKENS = 100
QUESTION = "What is the capital of France?"


@pytest.mark.slow
def test_processes_have_names_restart_and_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream outlives its gateway and its worker, which copies of templates succeed. A fleet that is told
    to end finishes it, and leaves no process. They are started by the interpreter, as a user's are.
    """
    monkeypatch.setattr(Fleet, "start_process", subprocess.Popen)
    settings = {"dtype": "bfloat16", "kv_cache_bytes": "64MiB", "threads": 1, "preload": True}
    # the stream may take longer than a fleet waits by default
    with Fleet(num_workers=1, graceful_termination_timeout=READY_S, **settings) as fleet:
        titles = {" ".join(title(process)) for process in fleet.processes()}
        assert {
            "tokenfleet serve",
            "tokenfleet api g0",
            "tokenfleet batcher b0",
            "tokenfleet worker w0",
        } <= titles
        [model] = get(fleet, "/v1/models").json()["data"]
        assert (model["id"], model["root"]) == ("smollm2", "smollm2"), "no folder of this machine"
        chat = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
        answer = httpx.post(f"{fleet.base_url}/v1/chat/completions", json=chat, timeout=PATIENCE_S)
        assert "Paris" in answer.text, "rounding to bfloat16 may change a word, not the meaning"

        wait_until_sync(lambda: fleet.preloaded("gateway") and fleet.preloaded("worker"), READY_S)
        old_gateway, old_worker = fleet.pid("g0"), fleet.pid("w0")
        assert workers(fleet) == [old_worker]
        body = {
            "inputs": PROMPT,
            "parameters": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "details": True},
        }
        with httpx.stream(
            "POST", f"{fleet.base_url}/generate_stream", json=body, timeout=PATIENCE_S
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(old_gateway, signal.SIGKILL)
            os.kill(old_worker, signal.SIGKILL)
            fleet.restarted("g0", old_gateway)
            worker = fleet.restarted("w0", old_worker)
            wait_until_sync(lambda: workers(fleet) == [worker])
            fleet.launcher.terminate()
            wait_until_sync(lambda: "shutting down" in get(fleet, "/health").text)
            assert "shutting down" in get(fleet, "/").text, "it is TGI's health, too"
            refused = httpx.post(f"{fleet.base_url}/generate", json=body, timeout=PATIENCE_S)
            assert refused.status_code == 503 and "shutting down" in refused.text
            assert last_frame(lines)["details"]["generated_tokens"] == NUM_TOKENS
        everybody = fleet.processes()
        assert fleet.launcher.wait(PATIENCE_S) == 0
        wait_until_sync(lambda: have_ended(everybody))
        prepare.check_port(
            Settings(hostname="127.0.0.1", port=fleet.settings["port"])
        )  # a next fleet may start at once


def last_frame(lines: Iterator[str]) -> dict[str, Any]:
    """Return the last frame of a stream, once it has ended."""
    *_, last = (line for line in lines if line.startswith("data:"))
    found: dict[str, Any] = json.loads(last.removeprefix("data:"))
    return found


def get(fleet: Fleet, path: str) -> httpx.Response:
    return httpx.get(f"{fleet.base_url}{path}", timeout=PATIENCE_S)


def workers(fleet: Fleet) -> list[int]:
    """Process ids of the workers that serve; none while no gateway does."""
    with contextlib.suppress(httpx.TransportError):
        processes = get(fleet, "/fleet").json()["processes"]
        return [process["pid"] for process in processes if process["kind"] == "worker"]
    return []
