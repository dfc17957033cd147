"""A preloaded process becomes the successor of a killed worker, and its answer is whole."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.fleet.fleet import READY_S, Fleet, have_ended
from tests.support.waiting import wait_until_sync

BODY = {"inputs": "The sky is", "parameters": {"max_new_tokens": 60, "ignore_eos": True, "details": True}}
KILLED_AT = 20

pytestmark = pytest.mark.slow


@pytest.fixture(params=[1, 2])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A fleet of one worker, of one rank and of two."""
    settings = {"kv_cache_bytes": "64MiB", "preload_worker": True, "dtype": "float32"}
    with Fleet(num_shard=request.param, **settings) as fleet:
        yield fleet


def generate(fleet: Fleet) -> list[int]:
    answer = httpx.post(f"{fleet.base_url}/generate", json=BODY, timeout=90)
    return [token["id"] for token in answer.json()["details"]["tokens"]]


def generate_over_a_kill(fleet: Fleet) -> list[int]:
    """Return the ids of a stream during which the worker is killed."""
    frames: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{fleet.base_url}/generate_stream", json=BODY, timeout=90) as response:
        for line in response.iter_lines():
            if line.startswith("data:"):
                frames.append(json.loads(line.removeprefix("data:")))
                if len(frames) == KILLED_AT:
                    os.kill(fleet.pid("w0"), signal.SIGKILL)
    return [frame["token"]["id"] for frame in frames]


def workers(fleet: Fleet) -> list[dict[str, Any]]:
    processes = httpx.get(f"{fleet.base_url}/fleet").json()["processes"]
    return [process for process in processes if process["kind"] == "worker"]


def test_the_successor_was_preloaded_and_no_token_is_lost(fleet: Fleet) -> None:
    expected = generate(fleet)
    waiting = wait_until_sync(fleet.preloaded, READY_S)
    assert len(workers(fleet)) == 1, "it is no worker yet"
    assert generate_over_a_kill(fleet) == expected
    [worker] = workers(fleet)
    assert worker["pid"] == waiting

    second = wait_until_sync(fleet.preloaded, READY_S)
    assert second != waiting
    os.kill(second, signal.SIGKILL)
    assert generate(fleet) == expected
    assert workers(fleet)[0]["pid"] == waiting

    everybody = fleet.processes()
    fleet.launcher.terminate()
    assert fleet.launcher.wait(60) == 0
    wait_until_sync(lambda: have_ended(everybody))
