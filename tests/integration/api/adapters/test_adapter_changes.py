"""Adapters that are loaded and unloaded while a fleet serves."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api.lifecycle import Gateway
from common.adapter_registry import AdapterRegistry, change_registry, read_registry
from common.adapters import AdapterFault, find_adapter
from common.broker.heartbeat import ADAPTERS_SINCE, Heartbeat
from common.settings.lora import AdapterSource
from deploy.launcher.embedded_broker import Broker
from tests.support.adapters.files import write_adapter
from tests.support.adapters.fleet import AdapterWorker, adapter_fleet, following, load
from tests.support.fleet.gateways import answering, serving
from tests.support.fleet.scripted_worker import Answer
from tests.support.keys.issued import add_key, bearer
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until


async def unload(client: httpx.AsyncClient, name: str) -> httpx.Response:
    return await client.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def complete(client: httpx.AsyncClient, model: str) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 4, "model": model})


async def serves(client: httpx.AsyncClient, model: str) -> bool:
    return (await complete(client, model)).status_code == 200


async def names(client: httpx.AsyncClient) -> list[str]:
    return [one["id"] for one in (await client.get("/v1/models")).json()["data"]]


async def test_an_adapter_is_loaded_on_every_worker_before_requests_get_it(
    broker: Broker, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "sql")
    async with (
        adapter_fleet(broker.url) as (worker, _, client),
        following(broker.url, answers=False) as slow,
        serving(broker.url, name="g1-test", allow_runtime_lora_updating=True) as (_, other),
    ):
        slow.may_load.clear()
        loading = asyncio.create_task(load(client, "sql", folder))
        await wait_until(lambda: len(worker.held.loaded) == 1)
        assert (await complete(other, "sql")).status_code == 404
        listed = (await client.get("/admin/adapters")).json()
        assert [(one["name"], one["state"]) for one in listed["adapters"]] == [("sql", "loading")]
        slow.may_load.set()
        response = await loading
        assert (response.status_code, response.text) == (
            200,
            "Success: LoRA adapter 'sql' added successfully.",
        )
        assert (await complete(client, "sql")).json()["model"] == "sql"
        await wait_until(lambda: serves(other, "sql"))  # a gateway that was just asked asks again soon
        for each in (client, other):
            assert (await complete(each, "sql")).json()["model"] == "sql"
            assert await names(each) == ["smollm2", "sql"]
        [listed] = (await client.get("/admin/adapters")).json()["adapters"]
        assert (listed["num_workers"], listed["rank"], listed["refused"]) == (2, 8, {})


async def test_an_adapter_that_a_worker_refuses_is_taken_back(broker: Broker, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "sql")
    async with (
        adapter_fleet(broker.url) as (worker, _, client),
        following(broker.url, answers=False) as other,
    ):
        other.refuses["sql"] = "it has a module of another shape"
        response = await load(client, "sql", folder)
        assert response.status_code == 400
        assert f"{other.incarnation} refuses it: it has a module of another shape" in response.text
        assert await names(client) == ["smollm2"]
        del other.refuses["sql"]
        assert (await load(client, "sql", folder)).status_code == 200, "it may be tried again"
        assert (await complete(client, "sql")).status_code == 200
        assert worker.seen


async def test_an_adapter_whose_load_ended_an_engine_is_refused_and_may_be_loaded_again(
    broker: Broker, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "sql")
    async with adapter_fleet(broker.url) as (worker, gateway, client):
        worker.may_load.clear()
        asked = asyncio.create_task(load(client, "sql", folder))
        registry = await wait_until(lambda: loading(gateway))
        [adapter] = registry.adapters.values()
        await change_registry(gateway.pool.client, lambda found: found.with_failure(adapter, "it ended w0"))
        refused = await asked
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "`lora_path`: it ended w0")
        worker.may_load.set()
        assert (await load(client, "sql", folder)).status_code == 200


async def loading(gateway: Gateway) -> AdapterRegistry | None:
    registry = await read_registry(gateway.pool.client)
    return registry if registry.adapters else None


async def test_live_requests_keep_an_adapter_that_is_unloaded(broker: Broker, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "sql")
    async with adapter_fleet(broker.url) as (worker, _, client):
        await load(client, "sql", folder)
        await worker.pause()
        running = asyncio.create_task(complete(client, "sql"))
        await wait_until_queued(worker)
        assert (await unload(client, "sql")).text == "Success: LoRA adapter 'sql' removed successfully."
        assert (await complete(client, "sql")).status_code == 404
        assert worker.held.loaded, "the batcher says when it may go"
        worker.going.set()
        assert (await running).json()["model"] == "sql"
        missing = await unload(client, "sql")
        assert (missing.status_code, missing.json()["error"]["message"]) == (404, "There is no adapter 'sql'")


async def wait_until_queued(worker: AdapterWorker) -> None:
    async def is_queued() -> bool:
        return bool(await worker.redis.xlen(worker.keys.requests) == 1)

    await wait_until(is_queued)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"lora_name": "a b"}, {}, "`lora_name` must be 1 to 128 letters"),
    ({"lora_name": "smollm2"}, {}, "`lora_name`: 'smollm2' is the name of a model"),
    ({"lora_name": "tgi"}, {}, "'tgi' is the name of a model"),
    ({"lora_path": "/nowhere"}, {}, "`lora_path`: there is no folder /nowhere"),
    ({"lora_path": "org/sql@../../../x"}, {}, "`lora_path`: '../../../x' is no revision"),
    ({"lora_path": "/tmp"}, {}, "/tmp has no adapter_config.json"),
    ({}, {"peft_type": "IA3"}, "`lora_path`: its peft_type is IA3; LORA is served"),
    ({}, {"use_dora": True}, "`lora_path`: it has DoRA"),
    (
        {},
        {"alpha_pattern": {"q_proj": 10**400}},
        "`lora_path`: its adapter_config.json has values of a wrong",
    ),
    ({}, {"rank": 65}, "`lora_path`: its rank is 65; MAX_LORA_RANK is 64"),
    ({"lora_name": None}, {}, "lora_name"),
]


@pytest.mark.parametrize(("fields", "config", "words"), REFUSED)
async def test_what_is_no_adapter_is_refused(
    broker: Broker, tmp_path: Path, fields: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    async with adapter_fleet(broker.url) as (_, gateway, client):
        body = {"lora_name": "sql", "lora_path": str(write_adapter(tmp_path / "sql", **config))} | fields
        response = await client.post("/v1/load_lora_adapter", json=body)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
        assert not (await read_registry(gateway.pool.client)).adapters


async def test_an_adapter_is_replaced_only_in_place(broker: Broker, tmp_path: Path) -> None:
    async with adapter_fleet(broker.url) as (worker, gateway, client):
        await load(client, "sql", write_adapter(tmp_path / "one"))
        again = await load(client, "sql", write_adapter(tmp_path / "two", seed=2))
        assert again.status_code == 400
        assert "'sql' is loaded already: `load_inplace` replaces it" in again.text
        before = gateway.pool.adapters.find("sql")
        assert (await load(client, "sql", tmp_path / "two", load_inplace=True)).status_code == 200
        after = gateway.pool.adapters.find("sql")
        assert before is not None
        assert after is not None
        assert before.key != after.key
        assert {before.key, after.key} == {*worker.held.loaded}, "requests may still run with the old one"


async def test_who_may_change_adapters(broker: Broker, redis: Redis, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "sql")
    async with (
        following(broker.url),
        serving(broker.url) as (_, client),
        serving(broker.url, name="g1-test", allow_runtime_lora_updating=False) as (_, never),
    ):
        open_to_all = await load(client, "sql", folder)
        assert (open_to_all.status_code, "ALLOW_RUNTIME_LORA_UPDATING" in open_to_all.text) == (403, True)
        admin, user = await add_key(redis, admin=True), await add_key(redis)
        body = {"lora_name": "sql", "lora_path": str(folder)}

        async def status(at: httpx.AsyncClient, headers: dict[str, str]) -> int:
            return (await at.post("/v1/load_lora_adapter", json=body, headers=headers)).status_code

        async def knows_keys() -> bool:
            return await status(client, {}) == 401

        await wait_until(knows_keys)
        assert await status(client, bearer(user)) == 403
        assert await status(client, bearer(admin)) == 200
        assert await status(never, bearer(admin)) == 403


async def test_an_adapter_of_the_settings_that_was_unloaded_does_not_come_back_with_a_gateway(
    broker: Broker, tmp_path: Path
) -> None:
    words = (f"sql={write_adapter(tmp_path / 'sql')}",)
    async with following(broker.url):
        options: dict[str, Any] = {"lora_adapters": words, "allow_runtime_lora_updating": True}
        async with serving(broker.url, **options) as (_, client):
            assert await names(client) == ["smollm2", "sql"]
            await unload(client, "sql")
        async with serving(broker.url, name="g1-test", **options) as (_, client):
            assert await names(client) == ["smollm2"]
        write_adapter(tmp_path / "sql", seed=2)
        async with serving(broker.url, name="g2-test", **options) as (_, client):
            assert await names(client) == ["smollm2", "sql"], "other files are another adapter"


async def test_a_broker_that_has_lost_the_registry_gets_it_back(broker: Broker, tmp_path: Path) -> None:
    async with adapter_fleet(broker.url) as (worker, gateway, client):
        await load(client, "sql", write_adapter(tmp_path / "sql"))
        await worker.redis.delete(worker.keys.adapters)

        async def is_back() -> bool:
            return (await read_registry(gateway.pool.client)).named("sql") is not None

        await wait_until(is_back)
        assert (await complete(client, "sql")).status_code == 200


async def test_an_adapter_that_all_workers_refuse_is_refused_with_the_cause(
    broker: Broker, tmp_path: Path
) -> None:
    words = (f"sql={write_adapter(tmp_path / 'sql')}",)
    async with adapter_fleet(broker.url, lora_adapters=words) as (worker, gateway, client):
        worker.refuses["sql"] = "its files are gone"
        await wait_until(lambda: bool(worker.held.refused))
        await gateway.pool.workers.refresh()
        response = await complete(client, "sql")
        assert response.status_code == 400
        assert "The adapter `sql` is not served: its files are gone" in response.text


async def test_requests_with_adapters_wait_for_the_end_of_an_earlier_release(
    broker: Broker, tmp_path: Path
) -> None:
    words = (f"sql={write_adapter(tmp_path / 'sql')}",)
    async with adapter_fleet(broker.url, lora_adapters=words) as (worker, gateway, client):
        older = Heartbeat(gateway.pool.client, "batcher", "b0-older", ttl_s=60)
        await older.send(wire=ADAPTERS_SINCE - 1)
        await gateway.pool.adapters.refresh()
        response = await complete(client, "sql")
        assert (response.status_code, "an earlier release" in response.text) == (503, True)
        assert (await complete(client, "smollm2")).status_code == 200
        await older.remove()
        await gateway.pool.adapters.refresh()
        assert (await complete(client, "sql")).status_code == 200
        assert len(worker.seen) == 2


async def test_without_a_ready_worker_requests_wait_and_nothing_is_loaded(
    broker: Broker, tmp_path: Path
) -> None:
    words = (f"sql={write_adapter(tmp_path / 'sql')}",)
    async with adapter_fleet(broker.url, lora_adapters=words) as (worker, gateway, client):
        await wait_until(lambda: bool(worker.held.loaded))  # it says once more that it is ready
        await worker.announce("draining")
        await gateway.pool.workers.refresh()
        response = await load(client, "other", tmp_path / "sql")
        assert (response.status_code, "no worker is ready" in response.text) == (503, True)
        assert (await complete(client, "sql")).status_code == 200, "one may come"


async def test_a_pool_whose_workers_take_no_adapters_says_so(broker: Broker, tmp_path: Path) -> None:
    words = (f"sql={write_adapter(tmp_path / 'sql')}",)
    settings: dict[str, Any] = {"lora_adapters": words, "allow_runtime_lora_updating": True}
    async with answering(broker.url, Answer(ids("a")), **settings) as (worker, _, client):
        for response in (await complete(client, "sql"), await load(client, "other", tmp_path / "sql")):
            assert response.status_code == 400
            assert "workers of this pool serve no adapters" in response.text
        assert not worker.seen


def test_damaged_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "sql")
    weights = folder / "adapter_model.safetensors"
    header = b'{"a.lora_A.weight": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}'
    for content, words in (
        (b"", "is no file of safetensors, or damaged"),
        (b"\xff" * 64, "is no file of safetensors, or damaged"),
        (len(header).to_bytes(8, "little") + header, "has no matrices of a LoRA adapter"),
    ):
        weights.write_bytes(content)
        with pytest.raises(AdapterFault, match=words):
            find_adapter(AdapterSource("sql", str(folder)))
    weights.unlink()
    (folder / "adapter_model.bin").touch()
    with pytest.raises(AdapterFault, match=r"adapter_model\.bin is not read: save it with safetensors"):
        find_adapter(AdapterSource("sql", str(folder)))
