"""The worker follows the registry of adapters; the engine answers as a test says."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from common import model_files
from common.adapter_registry import change_registry
from common.adapters import READY, PoolAdapter, find_adapter
from common.broker.pool_client import PoolClient
from common.settings.fields import AdapterSource
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.engine_adapters import AdapterFollower, EngineAdapters
from gpu_worker.agent.engine_client import EngineDied, StepsHandler
from gpu_worker.protocol import AdapterAnswer, SetAdapter
from tests.support.adapters.files import write_adapter
from tests.support.agents import RecordingEngine, make_agent, start
from tests.support.broker_state import KEYS
from tests.support.waiting import wait_until


class AdapterEngine(RecordingEngine):
    """Refuses adapters with a cause, if there is one."""

    cause = ""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[SetAdapter] = []

    async def ask(self, command: SetAdapter) -> AdapterAnswer:
        self.commands.append(command)
        return AdapterAnswer(command.name, self.cause if command.path else "")


@pytest.fixture
def follower(redis: Redis) -> AdapterFollower:
    return follower_of(redis)


def follower_of(redis: Redis) -> AdapterFollower:
    pool, used = PoolClient(redis, KEYS), set[str]()
    return AdapterFollower(
        pool,
        AdapterEngine(),
        EngineAdapters(),
        interval_s=0.01,
        used=lambda: used,
        note_change=lambda: None,
    )


def commands(follower: AdapterFollower) -> list[SetAdapter]:
    assert isinstance(follower.engine, AdapterEngine)
    taken, follower.engine.commands = follower.engine.commands, []
    return taken


async def put(follower: AdapterFollower, path: Path) -> PoolAdapter:
    adapter = find_adapter(AdapterSource("sql", str(path)))
    await change_registry(follower.pool, lambda found: found.put(replace(adapter, state=READY)))
    return adapter


async def forget(follower: AdapterFollower) -> None:
    await change_registry(follower.pool, lambda found: replace(found, adapters={}))


async def follow(follower: AdapterFollower) -> None:
    await follower.read()
    await follower.follow()


async def test_the_engine_loads_what_the_registry_has_and_unloads_what_it_has_no_more(
    follower: AdapterFollower, tmp_path: Path
) -> None:
    adapter = await put(follower, write_adapter(tmp_path / "sql"))
    await follow(follower)
    await follow(follower)
    folder = str(tmp_path / "sql")
    assert commands(follower) == [SetAdapter(adapter.key, folder, folder, adapter.digest)]
    assert follower.adapters.message.loaded == [adapter.key]
    await forget(follower)
    await follow(follower)
    assert commands(follower) == [SetAdapter(adapter.key)]
    assert follower.adapters.message.loaded == []


async def test_an_adapter_stays_while_a_row_has_it(follower: AdapterFollower, tmp_path: Path) -> None:
    adapter = await put(follower, write_adapter(tmp_path / "sql"))
    await follow(follower)
    await forget(follower)
    follower.used = lambda: {adapter.key}
    await follow(follower)
    assert follower.adapters.message.loaded == [adapter.key]
    follower.used = set
    await follow(follower)
    assert follower.adapters.message.loaded == []


async def test_other_files_than_the_registry_says_are_refused(
    follower: AdapterFollower, tmp_path: Path
) -> None:
    adapter = await put(follower, write_adapter(tmp_path / "sql"))
    write_adapter(tmp_path / "sql", seed=2)
    await follow(follower)
    assert commands(follower) == []
    why = follower.adapters.message.why_not(adapter)
    assert "has other files than when it was loaded: load it again" in why
    write_adapter(tmp_path / "sql")
    await follow(follower)
    assert commands(follower) == [], "it is not tried all the time"
    await put(follower, tmp_path / "sql")
    await follow(follower)
    assert follower.adapters.message.loaded == [adapter.key]


async def test_an_adapter_of_the_hub_stays_at_its_commit(
    follower: AdapterFollower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = "1" * 40

    def download(hub_id: str, revision: str | None, *_: object) -> Path:
        commit = revision if revision and revision != "main" else newest
        return write_adapter(tmp_path / commit, seed=int(commit[0]))

    monkeypatch.setattr(model_files, "download", download)
    for named in ("org/sql", "org/sql@main"):
        adapter = find_adapter(AdapterSource("sql", named))
        assert adapter.path == f"org/sql@{newest}"
    newest = "2" * 40
    await change_registry(follower.pool, lambda found: found.put(adapter))
    await follow(follower)
    folder = str(tmp_path / ("1" * 40))
    assert commands(follower) == [SetAdapter(adapter.key, folder, adapter.path, adapter.digest)]


async def test_what_the_engine_refuses_is_told_with_the_cause(
    follower: AdapterFollower, tmp_path: Path
) -> None:
    assert isinstance(follower.engine, AdapterEngine)
    follower.engine.cause = "it has a module that the model has not"
    adapter = await put(follower, write_adapter(tmp_path / "sql"))
    await follow(follower)
    assert follower.adapters.message.why_not(adapter) == follower.engine.cause
    await forget(follower)
    await follow(follower)
    assert follower.adapters.message.refused == []


class DyingEngine(AdapterEngine):
    """Ends when it is told to load an adapter."""

    async def ask(self, command: SetAdapter) -> AdapterAnswer:
        asked: asyncio.Future[AdapterAnswer] = asyncio.get_running_loop().create_future()
        self.asked.append(asked)
        return await asked

    async def run_steps(self, handle: StepsHandler) -> None:
        await wait_until(lambda: self.asked)
        raise EngineDied("rank 0 ended with -9")


async def test_a_load_that_ended_two_engines_is_not_tried_again(
    redis: Redis, follower: AdapterFollower, tmp_path: Path
) -> None:
    adapter = await put(follower, write_adapter(tmp_path / "sql"))
    agent = await make_agent(redis)
    agent.worker = replace(agent.worker, max_loras=4)
    has_it = follower_of(redis)
    command = SetAdapter(adapter.key, adapter.path, adapter.path, adapter.digest)
    for next_one, loads in ((has_it, [command]), (follower, [])):
        agent.engine = agent.adapters.engine = agent.steps.engine = engine = DyingEngine()
        agent.adapters.loading = None
        assert not agent.is_busy()
        with pytest.raises(EngineDied):
            await agent.run()
        assert engine.asked and agent.is_busy(), "the watchdog would end an engine that does not answer"
        await follow(next_one)
        assert commands(next_one) == loads, "the first may have been killed by chance"
    assert follower.adapters.message.why_not(adapter).endswith("loaded sql: rank 0 ended with -9")
    await follow(has_it)
    assert has_it.adapters.message.loaded == [adapter.key]
    await put(follower, tmp_path / "sql")
    await follow(follower)
    assert follower.adapters.message.loaded == [adapter.key], "a new record is tried"


async def test_a_lost_registry_changes_nothing(follower: AdapterFollower, tmp_path: Path) -> None:
    adapter = await put(follower, write_adapter(tmp_path / "sql"))
    await follow(follower)
    await follower.pool.redis.delete(KEYS.adapters)
    await follow(follower)
    assert follower.adapters.message.loaded == [adapter.key]


async def test_a_row_starts_with_its_adapter_and_the_next_incarnation_knows_what_is_loaded(
    agent: Agent,
) -> None:
    await start(agent, adapter="sql@1")
    assert isinstance(agent.engine, RecordingEngine)
    [row] = agent.engine.grants[-1].starts
    assert row.request.adapter == "sql@1"
    assert agent.adapters.used() == {"sql@1"}
    agent.state.adapters.loaded.add("sql@1")
    assert agent.state.next_incarnation().adapters.loaded == {"sql@1"}
