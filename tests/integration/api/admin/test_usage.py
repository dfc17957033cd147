"""GET /usage, and budgets, over HTTP: what is counted is what answers say that was used."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from common.api_keys import IssuedKey
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import ready, serving
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.keys.issued import add_key, bearer, known
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_until

FIELDS: dict[str, dict[str, Any]] = {
    "full": {"tenant": "acme"},
    "poor": {"tenant": "guest", "budget_tokens": 12},
    "admin": {"tenant": "acme", "admin": True},
}
"""API keys by the names that the tests give them."""


@dataclass(frozen=True)
class Clients:
    """A client of a gateway, and its keys."""

    http: httpx.AsyncClient
    keys: dict[str, IssuedKey]

    def key_id(self, name: str) -> str:
        return self.keys[name].record.key_id

    async def ask(self, name: str = "admin", **fields: Any) -> httpx.Response:
        body = {"prompt": "one two three four five", "max_tokens": 3} | fields
        return await self.http.post("/v1/completions", json=body, headers=bearer(self.keys[name]))

    async def get(self, path: str, name: str = "admin", **headers: str) -> httpx.Response:
        return await self.http.get(path, headers=bearer(self.keys[name]) | headers)

    async def report(self, name: str = "admin", **params: Any) -> dict[str, Any]:
        response = await self.get(f"/usage?{httpx.QueryParams(params)}", name)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


@pytest.fixture
async def clients(broker: Broker, redis: Redis) -> AsyncIterator[Clients]:
    keys = {name: await add_key(redis, name=name, **fields) for name, fields in FIELDS.items()}
    answer = Answer(ids(" one two three"), num_cached=2)
    async with (
        working(broker.url, TOKENIZER, lambda _: answer),
        serving(broker.url, served_model_name=("m",)) as (gateway, client),
    ):
        await ready(gateway)
        for key in keys.values():
            await known([gateway], key)
        yield Clients(client, keys)


async def test_what_is_counted_is_what_answers_say(clients: Clients) -> None:
    """A prompt of several choices counts once, two prompts of one request twice."""
    used = [
        (await clients.ask(**fields)).json()["usage"]
        for fields in ({}, {"n": 3}, {"prompt": ["one two", "three four"], "n": 2}, {"stream": False})
    ]
    total = (await clients.report())["total"]
    assert total["requests"] == 5, "prompts"
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert total[name] == sum(one[name] for one in used)
    assert total["cached_tokens"] == sum(one["prompt_tokens_details"]["cached_tokens"] for one in used)


async def test_a_client_that_hangs_up_or_asks_for_no_usage_is_counted(clients: Clients) -> None:
    body, headers = {"prompt": "one", "stream": True}, bearer(clients.keys["full"])
    async with clients.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        await anext(response.aiter_lines())

    async def is_counted() -> bool:
        return bool((await clients.report())["total"]["requests"] == 1)

    await wait_until(is_counted)


async def test_prometheus_has_tokens_by_tenant_and_model(clients: Clients) -> None:
    used = (await clients.ask("full")).json()["usage"]
    lines = (await clients.get("/metrics")).text.splitlines()
    labels = 'model="m",pool="default",tenant="acme"'
    for kind in ("prompt", "completion"):
        number = used[f"{kind}_tokens"]
        assert f'tokenfleet_used_tokens_total{{kind="{kind}",{labels}}} {number}.0' in lines


async def test_usage_is_grouped_and_filtered(clients: Clients) -> None:
    await clients.ask("full")
    await clients.ask("full")
    await clients.ask("admin")
    groups = (await clients.report(group_by="key,month"))["data"]
    requests = {clients.key_id("full"): 2, clients.key_id("admin"): 1}
    assert [(one["key"], one["requests"]) for one in groups] == sorted(requests.items())
    assert list(groups[0])[:3] == ["month", "key", "requests"]
    [hour] = (await clients.report(group_by="hour", tenant="acme"))["data"]
    assert hour["requests"] == 3 and hour["hour"].endswith(":00:00Z")
    assert (await clients.report(model="other"))["data"] == []
    assert (await clients.report(key=clients.key_id("admin")))["total"]["requests"] == 1


async def test_a_tenant_sees_its_own_usage(clients: Clients) -> None:
    await clients.ask("full")
    await clients.ask("poor")
    assert [one["tenant"] for one in (await clients.report("poor"))["data"]] == ["guest"]
    assert {one["tenant"] for one in (await clients.report("admin"))["data"]} == {"acme", "guest"}
    refused = await clients.get("/usage?tenant=acme", "poor")
    assert refused.status_code == 422 and "`tenant` must be 'guest'" in refused.text


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"from": "yesterday"}, "`from` must be a time"),
        ({"from": "2026-02-01", "to": "2026-01-01"}, "`to` must not be before `from`"),
        ({"from": "2020-01-02"}, "`from` must be within 90 days"),
        ({"group_by": "key,owner"}, "`group_by` must be some of"),
        ({"format": "csv"}, "`format` must be json"),
    ],
)
async def test_what_cannot_be_reported_is_refused(
    clients: Clients, params: dict[str, str], words: str
) -> None:
    response = await clients.get(f"/usage?{httpx.QueryParams(params)}")
    assert response.status_code == 422 and words in response.text


async def test_a_key_at_its_budget_is_refused_until_the_next_month(clients: Clients) -> None:
    """A budget of 12 tokens has room for one prompt of 5 with an answer of 3, and for no second one."""
    assert (await clients.ask("poor")).status_code == 200
    refused = await clients.ask("poor")
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (429, *["insufficient_quota"] * 2)
    assert 0 < int(refused.headers["retry-after"]) <= 31 * 86400
    long = await clients.ask("poor", prompt="one " * 20)
    assert (long.status_code, "retry-after" in long.headers) == (429, False)
    assert "12 tokens are fewer than a prompt of 21 needs" in long.json()["error"]["message"]
    assert (await clients.ask("full")).status_code == 200
