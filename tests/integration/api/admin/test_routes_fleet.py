"""GET /fleet, and the kill button of a demonstration; processes of the test play those of a fleet."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from common.broker.heartbeat import Heartbeat, process_fields
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.events import Timeline, TimelineEvent
from common.settings.settings import SettingError, Settings
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.batchers import batcher
from tests.support.fleet.gateways import answering, serving
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer
from tests.support.waiting import PATIENCE_S, wait_until

KEYS = Keys("default")
DEMO: dict[str, Any] = {"demo": True, "hostname": "127.0.0.1"}


@contextlib.contextmanager
def bystander(title: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process, as the gateway of `serving` calls it a sibling, that looks like one of the
    fleet.
    """
    code = (
        f"import setproctitle, time; setproctitle.setproctitle({title!r}); print(flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process the launcher of the gateway that it serves itself."""
    own = os.getpid()
    monkeypatch.setattr("api.admin.routes_fleet.os.getppid", lambda: own)


async def show(redis: Any, name: str, **figures: Any) -> None:
    await Heartbeat(PoolClient(redis, KEYS), "batcher", name, 60.0).send(**figures)


async def test_live_processes_are_listed(broker: Broker, redis: Any) -> None:
    async with answering(broker.url, Answer([])) as (worker, _, client):
        await show(redis, "b0-1", waiting=4, rows=2)
        await show(redis, "b1-1", waiting=0, rows=0)
        await redis.set(KEYS.batcher, "b0-1")
        fleet = (await client.get("/fleet")).json()
        by_id = {one["id"]: one for one in fleet["processes"]}
        assert set(by_id) == {worker.incarnation, "g0-test", "b0-1", "b1-1", "broker"}
        assert {name: fleet[name] for name in ("pool", "model", "demo")} == {
            "pool": "default",
            "model": "smollm2",
            "demo": False,
        }
        assert fleet["requests"] == {"live": 0, "waiting": 4, "running": 2, "limit": 1024}
        one = by_id[worker.incarnation]
        assert (one["kind"], one["state"], one["num_blocks"], one["dtype"], one["rows"]) == (
            "worker",
            "ready",
            64,
            "float32",
            0,
        )
        assert (by_id["b0-1"]["state"], by_id["b1-1"]["state"], by_id["b1-1"]["active"]) == (
            "active",
            "standby",
            False,
        )
        own = process_fields()
        assert {name: by_id["g0-test"][name] for name in ("pid", "host")} == {
            name: own[name] for name in ("pid", "host")
        }
        assert all(0 <= one["age_s"] < PATIENCE_S for one in fleet["processes"])


async def test_a_process_without_heartbeats_is_not_listed(broker: Broker, redis: Any) -> None:
    async with serving(broker.url) as (_, client):

        async def names() -> set[str]:
            return {one["id"] for one in (await client.get("/fleet")).json()["processes"]}

        async def shows_itself() -> bool:
            return "g0-test" in await names()

        await wait_until(shows_itself)
        await show(redis, "b0-1", rows=1)
        assert await names() == {"broker", "g0-test", "b0-1"}
        await redis.pexpire(KEYS.process("batcher", "b0-1"), 1)
        await wait_until(lambda: gone(redis))
        assert await names() == {"broker", "g0-test"}
    assert not await redis.exists(KEYS.gateway("g0-test")), "a gateway that leaves removes its heartbeat"
    assert await redis.zrange(KEYS.processes, 0, -1) in ([], [b"batcher:b0-1"])


async def gone(redis: Any) -> bool:
    return not await redis.exists(KEYS.process("batcher", "b0-1"))


async def test_a_worker_that_loads_its_model_is_listed(broker: Broker, redis: Any) -> None:
    async with serving(broker.url) as (_, client):

        async def workers() -> list[str]:
            return [
                one["state"]
                for one in (await client.get("/fleet")).json()["processes"]
                if one["kind"] == "worker"
            ]

        async with Heartbeat(PoolClient(redis, KEYS), "starting", "w0-1", 5.0).sending(0.05):
            await wait_until(workers)
            assert await workers() == ["starting"]
        assert await workers() == []


async def test_of_two_batchers_the_one_with_the_lease_is_active(broker: Broker, redis: Any) -> None:
    with batcher(broker.url, "b0") as first, batcher(broker.url, "b1") as second:
        async with serving(broker.url) as (_, client):

            async def both() -> list[dict[str, Any]]:
                found = [
                    one
                    for one in (await client.get("/fleet")).json()["processes"]
                    if one["kind"] == "batcher"
                ]
                return found if {one["state"] for one in found} == {"active", "standby"} else []

            found = await wait_until(both)
            holder = (await redis.get(KEYS.batcher)).decode()
            assert {one["id"] for one in found if one["active"]} == {holder}
            assert {one["pid"] for one in found} == {first.pid, second.pid}


async def test_without_a_batcher_all_requests_are_waiting(broker: Broker, redis: Any) -> None:
    await redis.xadd(KEYS.requests, {"generate": b"?"})
    async with serving(broker.url) as (_, client):
        assert (await client.get("/fleet")).json()["requests"] == {
            "live": 1,
            "waiting": 1,
            "running": 0,
            "limit": 1024,
        }


async def test_the_kill_button_kills_a_process_of_the_same_launcher(
    broker: Broker, redis: Any, sibling: Any
) -> None:
    with bystander("tokenfleet batcher b0") as process:
        async with serving(broker.url, **DEMO) as (_, client):
            await show(redis, "b0-1", pid=process.pid)
            assert (await client.get("/fleet")).json()["demo"] is True
            answer = await client.post(
                "/fleet/processes/b0-1/kill", headers={"origin": str(client.base_url).rstrip("/")}
            )
            assert (answer.status_code, answer.json()) == (202, {"killed": "b0-1"})
            assert await asyncio.to_thread(process.wait, 10) == -9


async def refused(client: Any, name: str = "b0-1", **headers: str) -> tuple[int, str]:
    answer = await client.post(f"/fleet/processes/{name}/kill", headers=headers)
    return answer.status_code, answer.json()["error"]


async def test_the_kill_button_kills_no_other_process(
    broker: Broker, redis: Any, sibling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bystander("tokenfleet batcher b0") as process, bystander("somebody's editor") as other:
        async with serving(broker.url) as (_, client):
            await show(redis, "b0-1", pid=process.pid)
            assert await refused(client) == (403, "Not killed: DEMO is not on")
        async with serving(broker.url, **DEMO) as (_, client):
            assert (await refused(client, "b7-1"))[0] == 404
            assert (await refused(client, origin="http://evil.example"))[0] == 403
        async with serving(broker.url, **DEMO, cors_allow_origin=("*",)) as (_, client):
            assert (
                "origin 'http://evil.example' is not ours"
                in (await refused(client, origin="http://evil.example"))[1]
            )
            assert (await refused(client, origin="null"))[0] == 403
            assert (
                "'evil.example:80' is not a loopback"
                in (await refused(client, host="evil.example:80", origin="http://evil.example:80"))[1]
            )
            await show(redis, "b0-1", pid=process.pid, host="elsewhere")
            assert await refused(client) == (403, "Not killed: it runs on elsewhere")
            await show(redis, "b0-1", pid=other.pid)
            assert await refused(client) == (403, f"Not killed: process {other.pid} is not one of this fleet")
            await show(redis, "b0-1", pid=2**22 + 1)
            assert (await refused(client))[0] == 404
            monkeypatch.setattr("api.admin.routes_fleet.os.getppid", lambda: 1)
            await show(redis, "b0-1", pid=process.pid)
            assert await refused(client) == (
                403,
                f"Not killed: process {process.pid} is not one of this fleet",
            )
        assert process.poll() is None and other.poll() is None


@pytest.mark.parametrize("hostname", ["0.0.0.0", "192.0.2.1", "some-machine"])
def test_demo_needs_a_local_hostname(hostname: Any) -> None:
    with pytest.raises(SettingError, match=r"DEMO: .*HOSTNAME=127\.0\.0\.1"):
        Settings.read(["--demo"], {"HOSTNAME": hostname})
    assert Settings.read(["--demo", "--hostname", "127.0.0.1"], {}).demo


async def test_browsers_get_the_page_and_other_clients_the_health(broker: Broker) -> None:
    async with batching(broker.url), answering(broker.url, Answer([])) as (_, _, client):
        page = await client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert (
            page.headers["content-type"] == "text/html; charset=utf-8"
            and "<title>Tokenfleet</title>" in page.text
        )
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert (await client.get("/")).content == b"", "TGI's health has no body"
        for name, kind in {
            "page.js": "text/javascript",
            "styles/base.css": "text/css",
            "icon.svg": "image/svg+xml",
        }.items():
            assert (await client.get(f"/page/{name}")).headers["content-type"].startswith(kind)
        for name in ("nothing.js", "..%2froll.py", "%2e%2e/roll.py"):
            assert (await client.get(f"/page/{name}")).status_code == 404


# --- lives of requests --------------------------------------------------------------------------------------


async def test_the_timeline_of_a_job_with_any_id(broker: Broker) -> None:
    async with serving(broker.url) as (gateway, client):
        life = encode(Timeline([TimelineEvent(5, "queued", num_tokens=3)]))
        await gateway.pool.client.redis.xadd(KEYS.timeline, {"team/a=1+2#0": life, "team/b": life})
        found = await client.get(f"/fleet/requests/{quote('team/a=1+2', safe='')}")
        assert found.status_code == 200 and list(found.json()["timelines"]) == ["team/a=1+2#0"]
        assert (await client.get("/fleet/requests/team")).status_code == 404
