"""`tokenfleet supervise`: one process, kept alive, as in a container."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from redis.asyncio import Redis

from deploy.launcher.embedded_broker import Broker
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until


@dataclass
class Supervised:
    process: subprocess.Popen[bytes]
    metrics_port: int
    log: Path

    def lines(self) -> list[dict[str, str]]:
        """Return the lines of the log; each is JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def incarnations(self) -> set[str]:
        return {line["incarnation"] for line in self.lines() if line["process"] == "b7"}

    def child(self) -> psutil.Process | None:
        """Return the process that it keeps alive."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self.process.pid).children():
                if " ".join(one.cmdline()).startswith("tokenfleet batcher"):
                    return one
        return None

    async def is_healthy(self) -> bool:
        try:
            async with httpx.AsyncClient() as client:
                return (await client.get(f"http://127.0.0.1:{self.metrics_port}/readyz")).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def supervised(broker: Broker, tmp_path: Path) -> Iterator[Supervised]:
    port = free_port()
    variables = {
        "REDIS_URL": broker.url,
        "METRICS_PORT": str(port),
        "JSON_OUTPUT": "true",
        "HEARTBEAT_S": "0.1",
    }
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "deploy.cli", "supervise", "batcher", "--name", "b7"],
            env=os.environ | variables,
            stdout=log,
            stderr=log,
        )
    yield Supervised(process, port, tmp_path / "log")
    process.kill()
    process.wait()


async def test_a_killed_process_starts_again_and_sigterm_ends_both(
    supervised: Supervised, redis: Redis
) -> None:
    await wait_until(supervised.is_healthy)
    first = await wait_until(supervised.child)
    await wait_until(supervised.incarnations)
    killed = await wait_until(lambda: redis.get("tf:{default}:batcher"))
    first.kill()

    async def has_a_successor() -> bool:
        return await redis.get("tf:{default}:batcher") not in (None, killed)

    await wait_until(has_a_successor)
    await wait_until(lambda: len(supervised.incarnations()) == 2)
    supervised.process.send_signal(signal.SIGTERM)
    assert await wait_until(lambda: supervised.process.poll() is not None)
    assert supervised.process.returncode == 0 and supervised.child() is None
    lines = supervised.lines()
    assert any("killed by SIGKILL" in line["message"] for line in lines)
    assert all(line["host"] for line in lines)


def test_what_is_no_process_of_a_fleet_is_refused() -> None:
    words = [sys.executable, "-P", "-m", "deploy.cli", "supervise", "redis"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (
        done.returncode == os.EX_CONFIG
        and "KIND: 'redis' is not one of api, batcher, worker, jobs" in done.stderr
    )
