"""The runbook, done on a compose stack by its own commands: rolling, draining, another model, backup.
Alerts of the compose stack: Prometheus evaluates each, and one that fires is sent on.
"""

import asyncio
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.compose.clients import SETTLED_S, Clients
from tests.support.compose.stack import ROOT, SERVICES, Stack, run
from tests.support.engine import tiny_models
from tests.support.waiting import wait_until, wait_until_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


class Runbook:
    """One section of the runbook, whose commands are typed in a folder for a stack with a CPU worker."""

    def __init__(self, heading: str, stack: Stack, folder: Path) -> None:
        section = (ROOT / "docs/runbook.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
        self.commands = re.findall(r"`((?:MODEL_ID=NAME )?docker [^`]+)`", section)
        self.stack, self.folder = stack, folder

    def type(self, number: int, **names: str) -> str:
        """Run the section's command of this number, with names in place of its words. Returns its output."""
        known = {"PROFILE": "cpu", "tokenfleet_": f"{self.stack.project}_", "N+1": "2", "=N ": "=1 "}
        command = self.commands[number] + " "
        for word, name in (known | names).items():
            command = command.replace(word, name)
        if "--wait" in command:
            command += " ".join(SERVICES)
        return self.stack.shell(command, self.folder)


def workers_of(stack: Stack) -> list[str]:
    return stack.redis("ZRANGE", "tf:{default}:workers", "0", "-1").split()


async def test_workers_are_rolled_while_streams_go_on(serving: Stack, tmp_path: Path) -> None:
    """First a new container replaces the old one, then its process restarts: every answer has the same
    tokens.
    """
    clients, runbook = Clients(serving), Runbook("Roll workers", serving, tmp_path)
    want = await clients.run()
    more, stop, remove, fewer, drain = range(5)

    def wait_for_two() -> None:
        wait_until_sync(lambda: len(workers_of(serving)) == 2, SETTLED_S)

    def roll() -> None:
        [old] = serving.containers("cpu_worker")
        runbook.type(more)
        wait_for_two()
        runbook.type(stop, CONTAINER=old)
        runbook.type(remove, CONTAINER=old)
        runbook.type(fewer)

    answers = await clients.run_throughout(roll)
    assert [{*map(tuple, given)} for given in answers] == [{tuple(one)} for one in want]
    print(f"a worker's container rolled under {sum(map(len, answers))} streams, no token lost", flush=True)
    runbook.type(more)
    await asyncio.to_thread(wait_for_two)
    [first, second] = workers_of(serving)

    def drain_both() -> None:
        for worker in (first, second):
            assert f"{worker} is gone" in runbook.type(drain, WORKER=worker)
            wait_for_two()

    answers = await clients.run_throughout(drain_both)
    assert [{*map(tuple, given)} for given in answers] == [{tuple(one)} for one in want]
    assert not {first, second} & {*workers_of(serving)}
    print(f"two workers drained in turn under {sum(map(len, answers))} streams, no token lost", flush=True)


async def test_another_model_takes_over_when_no_request_of_the_first_is_left(
    serving: Stack, tmp_path: Path
) -> None:
    clients, runbook = Clients(serving), Runbook("Change a model", serving, tmp_path)
    stop, requests, jobs, up = range(4)
    want = await clients.run()
    serving.must("cp", str(tiny_model(tmp_path)), "cpu_worker:/models/")
    assert await clients.run(lambda: runbook.type(stop)) == want
    await wait_until(lambda: runbook.type(requests).strip() == runbook.type(jobs).strip() == "0", SETTLED_S)
    await asyncio.to_thread(runbook.type, up, NAME="/models/tiny")
    async with httpx.AsyncClient(base_url=clients.url, timeout=180) as client:
        assert (await client.get("/info")).json()["model_id"] == "/models/tiny"
    other = await clients.run()
    assert all(
        len(answer) == len(first) and answer != first for answer, first in zip(other, want, strict=True)
    )
    assert not serving.odd_log_lines("api", "batcher", "cpu_worker")


def tiny_model(folder: Path) -> Path:
    """Make a random model with the first model's tokenizer, which other users may read."""
    tiny = folder / "tiny"
    tiny_models.save_with_tokenizer(
        tiny, "Llama", tiny_models.LLAMA | {"vocab_size": 49_152, "max_position_embeddings": 512}
    )
    tiny.chmod(0o755)
    for path in tiny.iterdir():
        path.chmod(0o644)
    return tiny


async def test_redis_is_backed_up_and_restored(serving: Stack, tmp_path: Path) -> None:
    runbook = Runbook("Back up and restore Redis", serving, tmp_path)
    keep, look, copy, again, down, restore, up = range(7)
    serving.redis("SET", "marker", "before")
    runbook.type(keep)
    await wait_until(lambda: "aof_rewrite_in_progress:0" in runbook.type(look))
    runbook.type(copy)
    runbook.type(again)
    serving.redis("SET", "marker", "after")
    for command in (down, restore, up):
        await asyncio.to_thread(runbook.type, command)
    assert serving.redis("GET", "marker") == "before"
    assert await Clients(serving).run(), "it serves"


# --- alerts -------------------------------------------------------------------------------------------------


@contextmanager
def webhook() -> Iterator[tuple[int, list[str]]]:
    """A server that is told of alerts: its port, and the names of those that fire."""
    told: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            alerts = json.loads(self.rfile.read(int(self.headers["content-length"])))["alerts"]
            told.extend(alert["labels"]["alertname"] for alert in alerts if alert["status"] == "firing")
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, told
        server.shutdown()


async def test_every_alert_is_evaluated_and_one_that_fires_is_sent_to_the_url_of_the_variable(
    serving: Stack,
) -> None:
    wanted = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    async with httpx.AsyncClient() as client:
        found = (await client.get("http://127.0.0.1:9090/api/v1/rules")).json()["data"]["groups"][0]["rules"]
    assert [(one["name"], one["health"]) for one in found] == [(one["alert"], "ok") for one in wanted]
    [name] = list(json.loads(serving.inspect("alertmanager", "{{json .NetworkSettings.Networks}}")))
    host = run(
        ["docker", "network", "inspect", "-f", "{{(index .IPAM.Config 0).Gateway}}", name]
    ).stdout.strip()
    with webhook() as (port, told):
        serving.variables["ALERT_WEBHOOK"] = f"http://{host}:{port}/alerts"
        try:
            await asyncio.to_thread(serving.must, "up", "-d", "--no-build", "--no-deps", "alertmanager")
            assert not told
            await asyncio.to_thread(serving.must, "stop", "batcher")
            await wait_until(lambda: "NoActiveBatcher" in told, SETTLED_S)
        finally:
            del serving.variables["ALERT_WEBHOOK"]
