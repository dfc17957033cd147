"""API keys of a test's fleet."""

from collections.abc import Sequence
from typing import Any

import httpx
from redis.asyncio import Redis

from api.app import Gateway
from api.http.auth import KeyRing
from common import api_keys
from common.api_keys import IssuedKey, read_fields
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from tests.support.waiting import wait_until


def client_of(redis: Redis) -> PoolClient:
    return PoolClient(redis, Keys("default"))


async def add_key(redis: Redis, **fields: Any) -> IssuedKey:
    return await api_keys.add_key(client_of(redis), read_fields(fields))


def bearer(key: IssuedKey | str) -> dict[str, str]:
    return {"authorization": f"Bearer {key if isinstance(key, str) else key.text}"}


async def known(gateways: Sequence[Gateway], key: IssuedKey) -> None:
    """Wait until the gateways know a key."""
    await wait_until(lambda: all(key.record.key_id in gateway.keys.by_id for gateway in gateways))


async def gone(keys: KeyRing, key_id: str) -> None:
    """Wait until a key counts no more."""
    await wait_until(lambda: key_id not in keys.active)


async def status(client: httpx.AsyncClient, key: IssuedKey | str) -> int:
    body: dict[str, Any] = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    return (await client.post("/generate", json=body, headers=bearer(key))).status_code
