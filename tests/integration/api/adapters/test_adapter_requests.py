"""Requests with LoRA adapters, on every API: what workers get, and what clients read."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from redis.asyncio import Redis

from common.adapter_registry import change_registry
from common.adapters import adapter_name, find_adapter
from common.broker.pool_client import PoolClient
from common.messages.request import extend_hashes, prompt_hashes, root_hash
from common.settings.lora import AdapterSource
from deploy.launcher.embedded_broker import Broker
from tests.support.adapters.files import write_adapter
from tests.support.adapters.fleet import adapter_fleet, following, load
from tests.support.broker.announced import announced
from tests.support.keys.issued import add_key, bearer
from tests.support.waiting import wait_until

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
        assert (await client.post("/v1/chat/completions", json=CHAT)).json()["model"] == "smollm2"
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


async def test_an_unknown_adapter_is_refused_in_the_shape_of_each_api(broker: Broker) -> None:
    async with adapter_fleet(broker.url) as (worker, _, client):
        tgi = await client.post("/generate", json=TGI)
        assert tgi.status_code == 422
        assert tgi.json() == {
            "error": "Input validation error: `adapter_id`: there is no adapter 'legal'",
            "error_type": "validation",
        }
        openai = await client.post("/v1/chat/completions", json=CHAT | {"model": "legal"})
        assert (openai.status_code, openai.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.post("/v2/models/legal/generate", json={"text_input": "a"})).status_code == 404
        assert not worker.seen


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


@pytest.mark.parametrize(
    "job",
    [
        {"inputs": "Hi", "parameters": {"adapter_id": "legal"}},
        {"inputs": "Hi", "model": "legal"},
        {"messages": CHAT["messages"], "model": "legal"},
    ],
)
async def test_a_job_names_its_adapter(
    broker: Broker, redis: Redis, tmp_path: Path, job: dict[str, Any]
) -> None:
    folder = write_adapter(tmp_path / "legal")
    async with adapter_fleet(broker.url, lora_adapters=(f"legal={folder}",)) as (worker, _, _):
        await redis.xadd(worker.keys.submit, {"job": orjson.dumps(job | {"id": "j1"})})
        await wait_until(lambda: len(worker.seen) == 1)
        assert adapter_name(worker.seen[0].adapter) == "legal"

        async def answered() -> bool:
            return bool(await redis.exists(worker.keys.result("j1")))

        await wait_until(answered)
        result = orjson.loads(await redis.get(worker.keys.result("j1")))
        assert result.get("model", "legal") == "legal"


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
