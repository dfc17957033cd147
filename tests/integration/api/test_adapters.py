"""LoRA adapters: requests of every API get the one they name, and they are loaded, replaced and unloaded
while a fleet serves.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api.admin import routes_fleet
from api.app import Gateway
from batcher.housekeeping import count_adapters
from batcher.scheduling.sequence import PlacedRow
from common.adapter_registry import AdapterRegistry, change_registry, read_registry
from common.adapters import LOADING, AdapterLoad, HeldAdapters, adapter_name, find_adapter
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.request import extend_hashes, prompt_hashes, root_hash
from common.settings.fields import AdapterSource
from common.settings.settings import SettingError
from deploy.launcher.embedded_broker import Broker
from tests.support.adapters.files import write_adapter
from tests.support.answers import post
from tests.support.broker.listening import announced
from tests.support.broker_state import KEYS
from tests.support.fleet.gateways import answering, ready, serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker
from tests.support.fleet.simulated_pool import request
from tests.support.keys.issued import add_key, bearer
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import in_background, wait_for, wait_until

LOOK_S = 0.01


class AdapterWorker(FakeWorker):
    """Loads what the registry has.

    Attributes:
        refuses: name of an adapter → why it is refused.
        may_load: it loads nothing before this is set.
    """

    held = HeldAdapters()

    def __init__(self, url: str, pool: str = "default") -> None:
        super().__init__(url, TOKENIZER, lambda _: Answer(ids(" one")), pool=pool)
        self.refuses: dict[str, str] = {}
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def follow(self) -> None:
        client = PoolClient(self.redis, self.keys)
        while True:
            registry = await read_registry(client)
            await self.may_load.wait()
            wanted = registry.adapters.values()
            held = HeldAdapters(
                [one.key for one in wanted if one.name not in self.refuses],
                [
                    (one.key, one.added_ms, self.refuses[one.name])
                    for one in wanted
                    if one.name in self.refuses
                ],
            )
            if held != self.held:
                self.held = held
                await self.announce()
            await asyncio.sleep(LOOK_S)


@contextlib.asynccontextmanager
async def following(url: str, answers: bool = True, pool: str = "default") -> AsyncIterator[AdapterWorker]:
    """A worker that is ready and loads adapters while the context is open. One that `answers` takes all
    requests, so there can be only one such worker.
    """
    worker = AdapterWorker(url, pool)
    await worker.open()
    try:
        async with in_background(worker.follow(), *([worker.run()] if answers else [])):
            yield worker
    finally:
        await worker.close()


@contextlib.asynccontextmanager
async def adapter_fleet(
    url: str, **settings: Any
) -> AsyncIterator[tuple[AdapterWorker, Gateway, httpx.AsyncClient]]:
    """Such a worker, a gateway at which everybody may load adapters, and a client."""
    allowed = {"allow_runtime_lora_updating": True} | settings
    async with following(url) as worker, serving(url, **allowed) as (gateway, client):
        await ready(gateway)
        yield worker, gateway, client


async def load(client: httpx.AsyncClient, name: str, path: object, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return await client.post("/v1/load_lora_adapter", json=body)


# --- adapters -----------------------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TGI: dict[str, Any] = {"inputs": "Hi", "parameters": {"max_new_tokens": 4, "adapter_id": "legal"}}
ROUTES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT | {"model": "legal"}, "model"),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 4, "model": "legal"}, "model"),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 16, "model": "legal"}, "model"),
    ("/v2/models/legal/generate", {"text_input": "Hi", "parameters": {"max_tokens": 4}}, "model_name"),
    ("/v2/models/smollm2/generate", {"text_input": "Hi", "parameters": {"adapter_id": "legal"}}, ""),
    ("/generate", TGI, ""),
    ("/generate_stream", TGI, ""),
    ("/", TGI, ""),
    ("/invocations", TGI, ""),
    ("/vertex", {"instances": [TGI, {"inputs": "Hi"}, CHAT | {"model": "legal"}]}, ""),
]


async def test_requests_of_every_api_get_the_adapter_that_they_name(broker: Broker, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "legal")
    async with adapter_fleet(broker.url, lora_adapters=(f"legal={folder}",)) as (worker, gateway, client):
        adapter = gateway.pool.adapters.find("legal")
        assert adapter is not None
        await wait_until(lambda: worker.held.loaded == [adapter.key])
        for path, body, shown in ROUTES:
            worker.seen.clear()
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            expected = [adapter.key, "", adapter.key] if path == "/vertex" else [adapter.key]
            assert [request.adapter for request in worker.seen] == expected, path
            if shown:
                assert response.json()[shown] == "legal"
        assert (await post(client, "/v1/chat/completions", CHAT))["model"] == "smollm2"
        assert worker.seen[-1].adapter == ""


async def test_an_adapter_shares_no_blocks_with_another_nor_with_the_model(
    broker: Broker, tmp_path: Path
) -> None:
    names = [f"{name}={write_adapter(tmp_path / name, seed=i)}" for i, name in enumerate("ab")]
    async with adapter_fleet(broker.url, lora_adapters=tuple(names)) as (worker, _, client):
        for model in ("a", "b", "smollm2"):
            await client.post("/v1/completions", json={"prompt": "Hi " * 40, "max_tokens": 4, "model": model})
        reply = await load(client, "a", write_adapter(tmp_path / "a", seed=7), load_inplace=True)
        assert reply.status_code == 200, reply.text
        await client.post("/v1/completions", json={"prompt": "Hi " * 40, "max_tokens": 4, "model": "a"})
        first, other, plain, replaced = worker.seen
        assert len({request.block_hashes for request in worker.seen}) == 4
        assert [adapter_name(one.adapter) for one in worker.seen] == ["a", "b", "", "a"]
        assert first.adapter != replaced.adapter
        assert plain.block_hashes == extend_hashes(root_hash(""), plain.prompt_ids)
        assert other.block_hashes == prompt_hashes(other)


async def test_models_lists_adapters_as_vllm_does(broker: Broker, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "legal")
    async with adapter_fleet(broker.url, lora_adapters=(f"legal={folder}",)) as (_, gateway, client):
        own, adapter = (await client.get("/v1/models")).json()["data"]
        known = gateway.pool.adapters.find("legal")
        assert own["id"] == "smollm2"
        assert known is not None
        assert adapter == {
            "id": "legal",
            "object": "model",
            "created": known.added_ms // 1000,
            "owned_by": "smollm2",
            "root": str(folder),
            "parent": "smollm2",
        }
        assert (await client.get("/v1/models/legal")).json() == adapter
        assert (await client.get("/info")).json()["adapters"] == ["legal"]


async def test_a_key_may_use_its_adapters_and_tokens_count_by_their_names(
    broker: Broker, redis: Redis, tmp_path: Path
) -> None:
    names = tuple(f"{name}={write_adapter(tmp_path / name)}" for name in ("legal", "sql"))
    key, admin = await add_key(redis, adapters=["legal"]), await add_key(redis, admin=True)
    async with adapter_fleet(broker.url, lora_adapters=names) as (_, _, client):
        for name, status in (("legal", 200), ("smollm2", 200), ("sql", 403)):
            response = await client.post(
                "/v1/chat/completions", json=CHAT | {"model": name}, headers=bearer(key)
            )
            assert response.status_code == status, response.text
        assert response.json()["error"] == {
            "message": f"The API key {key.record.key_id} may not use the adapter `sql`",
            "type": "permission_error",
            "param": "model",
            "code": None,
        }
        used = (await client.get("/usage?group_by=model", headers=bearer(admin))).json()
        assert {row["model"] for row in used["data"]} == {"legal", "smollm2"}


async def test_an_adapter_of_another_pool_is_found_by_the_directory(broker: Broker, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "legal")
    adapter = find_adapter(AdapterSource("legal", str(folder)))
    async with (
        following(broker.url, pool="b") as worker,
        announced(broker.url, "b", adapters=["legal"]),
        adapter_fleet(broker.url) as (own, _, client),
    ):
        pool = PoolClient(worker.redis, worker.keys)
        await change_registry(pool, lambda found: found.seeded_with([adapter]))
        await wait_until(lambda: worker.held.loaded == [adapter.key])
        answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "legal"})
        assert (answer.status_code, answer.json()["model"]) == (200, "legal"), answer.text
        assert [request.adapter for request in worker.seen] == [adapter.key]
        tgi = await client.post("/generate", json=TGI)
        assert tgi.status_code == 200, tgi.text
        assert len(worker.seen) == 2
        assert not own.seen
        listed = (await client.get("/v1/models")).json()["data"]
        assert "legal" in [one["id"] for one in listed]


async def test_an_adapter_of_two_pools_is_that_of_the_own_model_and_is_listed_once(
    broker: Broker, tmp_path: Path
) -> None:
    words = tuple(f"{name}={write_adapter(tmp_path / name)}" for name in ("legal", "sql"))
    their_own = ["legal", "theirs"]
    async with (
        announced(broker.url, "b", models=["another"], adapters=their_own),
        announced(broker.url, "c", models=["third"], adapters=their_own, model_id="third"),
        announced(broker.url, "d", models=["smollm2"], adapters=["legal"]),
        adapter_fleet(broker.url, lora_adapters=words) as (_, gateway, client),
    ):
        pools = gateway.pools
        await wait_until(lambda: len(pools.directory.pools) == 3)
        assert pools.resolve("legal").pools == ["default", "d"]
        assert pools.resolve("theirs").pools == ["b"]
        await wait_until(lambda: "d" in pools.foreign)
        listed = await names(client)
        assert len(listed) == len({*listed}), listed
        assert {*their_own, "sql", "smollm2", "another", "third"} <= {*listed}
        assert (await client.get("/v1/models")).json()["data"][-2]["parent"] == "smollm2"


async def unload(client: httpx.AsyncClient, name: str) -> httpx.Response:
    return await client.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def complete(client: httpx.AsyncClient, model: str) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 4, "model": model})


async def serves(client: httpx.AsyncClient, model: str) -> bool:
    return (await complete(client, model)).status_code == 200


async def names(client: httpx.AsyncClient) -> list[str]:
    return [one["id"] for one in (await client.get("/v1/models")).json()["data"]]


async def is_listed(client: httpx.AsyncClient, name: str, state: str) -> bool:
    """Whether this adapter alone is listed, in this state: a gateway asks for the list again soon."""
    listed = (await client.get("/admin/adapters")).json()["adapters"]
    return [(one["name"], one["state"]) for one in listed] == [(name, state)]


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
        await wait_until(lambda: is_listed(client, "sql", "loading"))
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


async def test_an_adapter_that_a_worker_lacks_is_loaded_again_while_requests_get_it(
    broker: Broker, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "sql")
    async with (
        adapter_fleet(broker.url, lora_adapters=(f"sql={folder}",)) as (worker, gateway, client),
        following(broker.url, answers=False) as other,
    ):

        async def again(status: int) -> None:
            await gateway.pool.workers.refresh()
            asked = asyncio.create_task(load(client, "sql", folder, load_inplace=True))
            while not asked.done():
                assert await serves(client, "sql"), "the other worker has it"
            assert (await asked).status_code == status

        await wait_until(lambda: worker.held.loaded == other.held.loaded != [])
        before = gateway.pool.adapters.find("sql")
        await again(200)
        assert gateway.pool.adapters.find("sql") == before, "all have it"
        other.refuses["sql"] = "its files are away"
        await wait_until(lambda: bool(other.held.refused))
        await again(400)
        assert await serves(client, "sql")
        other.may_load.clear()
        del other.refuses["sql"]
        asked = asyncio.create_task(again(200))
        await wait_until(lambda: gateway.pool.adapters.find("sql") != before)
        assert not asked.done()
        other.may_load.set()
        await asked
        assert worker.held.loaded == other.held.loaded


async def test_an_adapter_whose_load_ended_an_engine_is_refused_and_may_be_loaded_again(
    broker: Broker, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "sql")
    async with adapter_fleet(broker.url) as (worker, gateway, client):
        worker.may_load.clear()
        asked = asyncio.create_task(load(client, "sql", folder))
        registry = await wait_until(lambda: loading(gateway))
        [adapter] = registry.adapters.values()
        for _ in range(2):
            await change_registry(
                gateway.pool.client, lambda found: found.with_failure(adapter, "it ended w0")
            )
        refused = await asked
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "`lora_path`: it ended w0")
        worker.may_load.set()
        assert (await load(client, "sql", folder)).status_code == 200


async def test_an_adapter_that_is_being_loaded_can_be_unloaded(broker: Broker, tmp_path: Path) -> None:
    """Also where its gateway died: its name would be taken for long."""
    one, two = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "two", seed=5)
    async with adapter_fleet(broker.url, lora_adapters=(f"old={one}",)) as (worker, gateway, client):
        await wait_until(lambda: worker.held.loaded != [])
        for name in ("new", "old"):
            worker.may_load.clear()
            asked = asyncio.create_task(load(client, name, two, load_inplace=True))
            await wait_until(lambda name=name: is_loading(gateway, name))  # type: ignore[misc]
            assert (await unload(client, name)).status_code == 200
            refused = await asked
            assert refused.status_code == 400
            assert "the adapter was unloaded while workers loaded it" in refused.text
            assert (await complete(client, name)).status_code == 404
            worker.may_load.set()
            assert (await load(client, name, two)).status_code == 200


async def is_loading(gateway: Gateway, name: str) -> bool:
    found = (await read_registry(gateway.pool.client)).adapters.values()
    return (name, LOADING) in [(one.name, one.state) for one in found]


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

    await wait_for(lambda: worker.redis.xlen(worker.keys.requests), 1)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"lora_name": "a b"}, {}, "`lora_name`: String should match"),
    ({"lora_name": "smollm2"}, {}, "`lora_name`: 'smollm2' is the name of a model"),
    ({"lora_name": "tgi"}, {}, "'tgi' is the name of a model"),
    ({"lora_path": "/nowhere"}, {}, "`lora_path`: there is no folder /nowhere"),
    (
        {"lora_path": "~no-such-user/x"},
        {},
        "`lora_path`: ~no-such-user/x cannot be read: Could not determine",
    ),
    ({"lora_path": f"/{'x' * 300}"}, {}, "x cannot be read: File name too long"),
    ({"lora_path": "org/sql@../../../x"}, {}, "`lora_path`: '../../../x' is no revision"),
    ({"lora_path": "/tmp"}, {}, "/tmp has no adapter_config.json"),
    ({}, {"peft_type": "IA3"}, "`lora_path`: its peft_type is IA3; LORA is served"),
    ({}, {"use_dora": True}, "`lora_path`: it has DoRA"),
    (
        {},
        {"alpha_pattern": {"q_proj": 10**400}},
        "`lora_path`: its adapter_config.json cannot be read: `alpha_pattern.q_proj`: ",
    ),
    ({}, {"rank": 65}, "`lora_path`: its rank is 65; MAX_LORA_RANK is 64"),
    ({"lora_name": None}, {}, "lora_name"),
]


async def test_what_is_no_adapter_is_refused(broker: Broker, tmp_path: Path) -> None:
    async with adapter_fleet(broker.url) as (_, gateway, client):
        for i, (fields, config, words) in enumerate(REFUSED):
            folder = write_adapter(tmp_path / f"sql{i}", **config)
            body = {"lora_name": "sql", "lora_path": str(folder)} | fields
            response = await client.post("/v1/load_lora_adapter", json=body)
            assert response.status_code == 400
            assert words in response.json()["error"]["message"]
        assert not (await read_registry(gateway.pool.client)).adapters


@pytest.mark.parametrize("name", ["smollm2", "other", "tgi"])
async def test_a_name_of_a_model_is_no_adapter_of_the_settings(
    broker: Broker, tmp_path: Path, name: str
) -> None:
    words: dict[str, Any] = {"lora_adapters": (f"{name}={write_adapter(tmp_path)}",)}
    with pytest.raises(SettingError, match=f"'{name}' is the name of a model"):
        async with serving(broker.url, models=("other=smollm2",), **words):
            pass


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

        await wait_for(lambda: status(client, {}), 401)
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


async def lines(client: httpx.AsyncClient, word: str) -> list[str]:
    text = (await client.get("/metrics")).text
    return [line for line in text.splitlines() if word in line and not line.startswith("#")]


async def test_live_requests_are_counted_by_the_adapters_names(
    broker: Broker, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_fleet, "MAX_ADAPTERS_SHOWN", 2)
    load = AdapterLoad([("idle", 0, 1), ("legal", 2, 0), ("sql", 3, 4)])
    await redis.hset(KEYS.state, mapping={"blocks": 0, "adapters": encode(load)})  # type: ignore[misc]
    async with adapter_fleet(broker.url) as (_, _, client):
        assert sorted(await lines(client, "tokenfleet_adapter_")) == [
            'tokenfleet_adapter_running_requests{adapter="legal",pool="default"} 2.0',
            'tokenfleet_adapter_running_requests{adapter="sql",pool="default"} 3.0',
            'tokenfleet_adapter_waiting_requests{adapter="legal",pool="default"} 0.0',
            'tokenfleet_adapter_waiting_requests{adapter="sql",pool="default"} 4.0',
        ]
        assert await lines(client, "tokenfleet_max_loras") == ['tokenfleet_max_loras{pool="default"} 4.0']


def test_the_batcher_counts_requests_of_all_versions_of_an_adapter_together() -> None:
    sequences = [request(f"r{i}", 20, 4, i) for i in range(4)]
    for sequence, adapter in zip(sequences, ("sql@1", "sql@2", "", "legal@3"), strict=True):
        object.__setattr__(sequence.request, "adapter", adapter)
    sequences[0].row = PlacedRow(1, sequences[0])
    assert count_adapters(sequences) == [("legal", 0, 1), ("sql", 1, 1)]
