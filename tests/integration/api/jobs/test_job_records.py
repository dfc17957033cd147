"""What people see and change of jobs: `tokenfleet jobs list|show|cancel|retry|dead`, at a gateway."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from common.messages.request import Generate
from deploy.cli.command_line import run as run_command
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.jobs import IDS, KEYS, TEXT, Service
from tests.support.waiting import wait_until

Run = Callable[..., Awaitable[str]]
TIMES = (3, 1, 1, 1)


class BrokenEngine:
    """Answers of a worker whose engine fails until it is mended."""

    def __init__(self) -> None:
        self.is_broken = True

    def __call__(self, _: Generate) -> Answer:
        return Answer(IDS[:3], error="the engine broke") if self.is_broken else Answer(IDS)


@pytest.fixture
def engine() -> BrokenEngine:
    return BrokenEngine()


@pytest.fixture
async def run(
    broker: Broker, engine: BrokenEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Run]:
    """Runs `tokenfleet jobs` at a gateway → what it prints."""
    monkeypatch.setenv("COLUMNS", "300")
    async with answering(broker.url, engine, heartbeat_s=0.05) as (_, _, client):

        async def run(*words: str, code: int = 0) -> str:
            assert (
                await asyncio.to_thread(run_command, ["jobs", *words, "--url", str(client.base_url)]) == code
            )
            captured = capsys.readouterr()
            return captured.err if code else captured.out

        yield run


async def test_a_dead_job_is_kept_with_its_reason_and_tried_again(
    service: Service, run: Run, engine: BrokenEngine
) -> None:
    job = {"id": "team/a", "inputs": "Count.", "tenant": "acme", "reply": "stream"}
    await service.submit(**job)
    assert (await service.result("team/a"))["error_type"] == "generation"
    await service.settled()
    line = (await run("dead")).splitlines()[1]
    assert line.split()[:4] == ["team/a", "dead", "generate", "acme"]
    assert "generation: Request failed during generation: the engine broke" in line
    shown = json.loads(await run("show", "team/a"))
    assert (shown["state"], shown["status"], shown["job"]) == ("dead", 424, job)
    engine.is_broken = False
    assert await run("retry", "team/a") == "team/a is tried again\n"

    async def is_mended() -> bool:
        return bool(await service.result("team/a") == {"generated_text": TEXT})

    await wait_until(is_mended)
    await service.settled()
    assert [frame["generated_text"] for frame in await service.stream("team/a")][-1] == TEXT
    assert json.loads(await run("show", "team/a"))["retries"] == 1
    assert await run("dead") == "there are no such jobs\n"
    assert (await run("list", "--status", "done")).splitlines()[1].split()[:2] == ["team/a", "done"]
    assert "is not dead" in await run("retry", "team/a", code=1)


async def test_jobs_are_listed_by_state_tenant_and_a_part_of_their_ids(
    service: Service, run: Run, engine: BrokenEngine
) -> None:
    engine.is_broken = False
    await service.submit(id="done-1", inputs="Count.", tenant="acme")
    await service.submit(id="done-2", inputs="Count.")
    await service.submit(id="faulty", inputs="a", parameters={"top_p": 7})
    for i in range(3):
        await service.submit(id=f"later-{i}", inputs="Count.", not_before=time.time() + 3600 - i)
    await wait_until(lambda: service.redis.zscore(KEYS.job_set("scheduled"), "later-2"))
    await service.settled()

    async def listed(*words: str) -> list[str]:
        return [line.split()[0] for line in (await run("list", *words)).splitlines()[1:]]

    assert {*await listed()} == {"later-2", "later-1", "later-0", "faulty", "done-1", "done-2"}
    assert await listed("--status", "scheduled") == ["later-2", "later-1", "later-0"]
    assert await listed("--status", "failed") == ["faulty"]
    assert await listed("--tenant", "acme") == ["done-1"]
    assert {*await listed("--search", "done")} == {"done-1", "done-2"}
    first = (await run("list", "--limit", "2")).splitlines()
    assert [line.split()[0] for line in first[1:]] == ["later-2", "later-1", "more"]
    cursor = first[-1].split("'")[1]
    assert (await listed("--cursor", cursor))[0] == "later-0"
    assert await run("cancel", "later-0") == "later-0 is cancelled\n"
    assert (await service.result("later-0"))["error_type"] == "cancelled"
    await service.settled()
    assert await listed("--status", "cancelled") == ["later-0"]
    assert "The job has ended" in await run("cancel", "later-0", code=1)
    assert "There is no job 'nobody'" in await run("cancel", "nobody", code=1)
    assert "`cursor` must be" in await run("list", "--cursor", "x", code=1)


async def test_a_job_that_misses_its_deadline_is_dead(service: Service, run: Run) -> None:
    await service.submit(id="late", inputs="Count.", deadline_ms=1)
    assert (await service.result("late"))["error_type"] == "timeout"
    await service.settled()
    assert "timeout: Request failed" in await run("dead")
