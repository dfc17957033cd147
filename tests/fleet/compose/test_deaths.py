"""The compose stack, started for real: a cold start, deaths of every kind, scaling, `down` under streams."""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tests.support.compose.clients import NUM_TOKENS, PARAMETERS, PROMPTS, SETTLED_S, Clients
from tests.support.compose.stack import SERVICES, Stack
from tests.support.waiting import wait_until, wait_until_sync

OURS = ["api", "batcher", "cpu_worker"]
JOB = {"id": "long", "inputs": "Count:", "parameters": {"max_new_tokens": 400, "ignore_eos": True}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


async def test_the_stack_starts_cold_survives_deaths_scales_and_drains(stack: Stack) -> None:
    stack.must("down", "-v")
    clients = Clients(stack)
    cold_s = await asyncio.to_thread(stack.must, "up", "-d", "--wait", "--wait-timeout", "900", *SERVICES)
    print(f"cold up --wait: {cold_s:.0f} s")
    assert await clients.is_healthy(), "healthy means that it serves"
    assert {stack.inspect(name, "{{.RestartCount}}").strip() for name in OURS} == {"0"}
    want = await clients.run()
    assert [index for index, _ in want[0]] == [*range(1, NUM_TOKENS + 1)]

    async def disturb(what: str, how: Callable[[], object], num_workers: int = 1) -> None:
        await clients.wait_for_workers(num_workers)
        same = await clients.run(how) == want
        print(f"{what}: longest pause {clients.longest_pause_s:.1f} s, the same tokens: {same}", flush=True)
        assert same, what

    async def kill_worker(what: str, how: Callable[[], object], num_workers: int = 1) -> None:
        await disturb(what, how, num_workers)
        missed_s = await clients.missed_after_s(stack.killed_at_s)
        print("  known to the batcher after", [round(one, 2) for one in missed_s], "s", flush=True)

    await kill_worker("worker process killed", lambda: stack.kill_process("cpu_worker", "tokenfleet worker"))
    await disturb("batcher process killed", lambda: stack.kill_process("batcher", "tokenfleet batcher"))
    await disturb("gateway process killed", lambda: stack.kill_process("api", "tokenfleet api"))
    await kill_worker("worker container killed", lambda: stack.kill_container("cpu_worker"))
    await kill_worker(
        "worker supervisor killed", lambda: stack.kill_process("cpu_worker", "tokenfleet supervise")
    )
    await disturb("Redis process killed", stack.kill_redis)
    await disturb("Redis container killed", lambda: stack.kill_container("redis"))
    await disturb("batcher container killed", lambda: stack.kill_container("batcher"))
    scale = [word for name in ("cpu_worker=3", "api=2", "batcher=2") for word in ("--scale", name)]
    await asyncio.to_thread(stack.must, "up", "-d", "--no-build", *scale, *SERVICES)
    await clients.wait_for_workers(3)
    print(f"both gateways rolled under load: {await roll_gateways(stack, clients)} requests, no error")
    await disturb("active one of two batchers: container killed", stack.kill_active_batcher, 3)
    await kill_worker(
        "one of three workers: process killed",
        lambda: stack.kill_process("cpu_worker", "tokenfleet worker"),
        3,
    )
    await kill_worker("one of three workers: container killed", lambda: stack.kill_container("cpu_worker"), 3)
    assert not stack.odd_log_lines(*OURS)
    await disturb("SIGTERM to all containers at once, as at a shutdown", stack.stop_all, 3)
    await asyncio.to_thread(stack.must, "up", "-d", "--no-build", "--wait", *SERVICES)
    await job_and_down(stack, disturb)
    again_s = await asyncio.to_thread(stack.must, "up", "-d", "--no-build", "--wait", *SERVICES)
    print(f"up --wait again: {again_s:.0f} s")
    await wait_until(lambda: stack.redis("GET", "tf:{default}:result:long"), SETTLED_S)
    await disturb("after down and up", lambda: None)


async def test_clients_come_back_when_the_container_of_their_gateway_or_proxy_dies(serving: Stack) -> None:
    """The death of either one cuts streams."""
    clients = Clients(serving)
    [want, *_] = await clients.run()
    for service in ("api", "proxy"):
        await clients.wait_for_workers()
        assert await clients.come_back(functools.partial(serving.kill_container, service)) == want, service
        print(f"{service}'s container killed: the rest of the stream was fetched", flush=True)


async def test_an_arq_job_outlives_the_process_and_the_container_of_its_gateway(serving: Stack) -> None:
    clients = Clients(serving)
    [want, *_] = await clients.run()
    kills: dict[str, Callable[[], None]] = {
        "process": lambda: serving.kill_process("api", "tokenfleet api"),
        "container": lambda: serving.kill_container("api"),
    }
    for name, kill in kills.items():
        await clients.wait_for_workers()
        text = await asyncio.to_thread(finish_under_kill, serving, name, kill)
        assert text.startswith("".join(part for _, part in want))
        print(f"gateway's {name} killed: its job was finished", flush=True)


def finish_under_kill(stack: Stack, job_id: str, kill: Callable[[], None]) -> str:
    """Return the text of a long arq job, of which the gateway is killed meanwhile."""
    stack.enqueue(job_id, PROMPTS[0], PARAMETERS | {"max_new_tokens": 4 * NUM_TOKENS})
    wait_until_sync(lambda: stack.redis("EXISTS", f"arq:in-progress:{job_id}") == "1", SETTLED_S)
    kill()
    assert stack.redis("EXISTS", f"arq:result:{job_id}") == "0"
    wait_until_sync(lambda: stack.redis("EXISTS", f"arq:result:{job_id}") == "1", SETTLED_S)
    answer = json.loads(stack.redis("GET", f"tf:{{default}}:result:{job_id}"))
    assert answer["details"]["generated_tokens"] == 4 * NUM_TOKENS
    return str(answer["generated_text"])


async def roll_gateways(stack: Stack, clients: Clients) -> int:
    """Stop and start each gateway in turn. Returns how many requests were answered meanwhile."""
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


async def job_and_down(stack: Stack, disturb: Callable[[str, Callable[[], object]], Awaitable[None]]) -> None:
    """Run `down` while streams and a job run: the streams are finished, the volumes kept."""
    took_s: list[float] = []

    def down() -> None:
        stack.redis("XADD", "tf:{default}:submit", "*", "job", json.dumps(JOB))
        took_s.append(stack.must("down"))

    await disturb("down while streams run", down)
    print(f"down with streams in flight: {took_s[0]:.0f} s")
    assert {"redis", "models", "prometheus"} <= stack.volumes()
