"""Two whole fleets with embedded brokers and one directory serve a model together; its requests are shifted
from one to the other under load, and go on when one fleet dies.
"""

import asyncio
import itertools

import httpx
import pytest

from deploy.cli import admin
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until

SETTINGS = {"dtype": "float32", "kv_cache_bytes": "64MiB", "threads": 1, "served_model_name": "mine"}
BODY = {"model": "mine", "prompt": "The sky is", "max_tokens": 2}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Load:
    """Requests that are sent one after the other until `end`.

    Attributes:
        failed: answers that are not 200.
    """

    def __init__(self, client: httpx.AsyncClient, num_clients: int) -> None:
        self.client = client
        self.failed: list[str] = []
        self.num_answered = 0
        self.is_over = False
        self.tasks = [asyncio.create_task(self.send()) for _ in range(num_clients)]

    async def send(self) -> None:
        for _ in itertools.takewhile(lambda _: not self.is_over, itertools.count()):
            response = await self.client.post("/v1/completions", json=BODY)
            self.num_answered += 1
            if response.status_code != 200 or response.json()["model"] != "mine":
                self.failed.append(response.text)

    async def end(self) -> list[str]:
        self.is_over = True
        await asyncio.gather(*self.tasks)
        return self.failed


async def counts(client: httpx.AsyncClient) -> dict[str, float]:
    """Pool → requests that the gateways have sent to it."""
    text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("tokenfleet_pool_requests_total{")]
    return {line.split('to="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


async def grows(client: httpx.AsyncClient, pool: str) -> None:
    before = (await counts(client)).get(pool, 0)

    async def has_grown() -> bool:
        return (await counts(client)).get(pool, 0) > before

    await wait_until(has_grown)


async def share(url: str, *words: str) -> None:
    assert await asyncio.to_thread(admin.main, ["models", "set", "mine", *words, "--directory-url", url]) == 0


async def test_requests_shift_between_two_fleets_and_outlive_one(capsys: pytest.CaptureFixture[str]) -> None:
    async with (
        Fleet(pool="a", **SETTINGS) as first,
        Fleet(pool="b", directory_url=first.redis_url, **SETTINGS) as second,
        httpx.AsyncClient(base_url=first.base_url, timeout=60) as client,
    ):
        load = Load(client, 4)
        for pool in ("a", "b"):
            await grows(client, pool)
        await share(first.redis_url, "a=1")
        assert "100%" in capsys.readouterr().out
        for words, pool in ((("a=90", "b=10"), "b"), (("b=1",), "b"), (("a=1", "b=0"), "a")):
            await share(first.redis_url, *words)
            await grows(client, pool)
        assert await load.end() == []
        second.kill()
        await share(first.redis_url, "a=1", "b=1")
        load = Load(client, 4)
        await wait_until(lambda: load.num_answered > 20)
        await load.end()
        assert (await client.get("/health")).status_code == 200
        up = 'tokenfleet_pool_up{pool="a",to="b"} 0.0'

        async def is_down() -> bool:
            return up in (await client.get("/metrics")).text

        await wait_until(is_down)
        assert load.failed == []
