"""Key records: the API keys in Redis, which `tokenfleet keys` and the admin routes change and gateways watch.

All are in one hash, key id → record, beside the field `version`, which changes with each of them.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from common.api_keys import ApiKey, digest_of, new_key, new_key_id
from common.broker.keys import Keys
from common.broker.lua import Args, ScriptCall, call_script
from common.broker.pool_client import PoolClient
from common.ids import KEY_ID
from common.key_fields import KeyFields
from common.messages.codec import WireError, decode, encode

log = logging.getLogger(__name__)

VERSION = b"version"
MAX_KEYS = 10_000
FORGOTTEN_S = 90 * 86_400
"""A key that was revoked, or has expired, is listed for this time, and then until another is added."""


class KeyChangeError(Exception):
    """A change that is refused. `str()` is the one line that a person sees. `is_unknown`: there is no such
    key.
    """

    def __init__(self, text: str, is_unknown: bool = False) -> None:
        super().__init__(text)
        self.is_unknown = is_unknown


class IssuedKey(NamedTuple):
    """A key and its record. The text is nowhere else."""

    text: str
    record: ApiKey


async def read_version(client: PoolClient) -> bytes | None:
    """The version of all keys; None while there is none."""
    version: bytes | None = await client.redis.hget(client.keys.api_keys, VERSION.decode())  # type: ignore[misc]
    return version


async def read_keys(client: PoolClient) -> dict[str, ApiKey]:
    """All keys, by id, the oldest first. A record that cannot be read is no key."""
    found = await client.redis.hgetall(client.keys.api_keys)  # type: ignore[misc]
    records = []
    for name, data in found.items():
        try:
            records += [decode(ApiKey, data)] if name != VERSION else []
        except WireError as error:  # another program wrote to the field
            log.error("the API key %r cannot be read: %s", name, error)
    return {one.key_id: one for one in sorted(records, key=lambda one: (one.created_at, one.key_id))}


async def add_key(client: PoolClient, fields: KeyFields) -> IssuedKey:
    """Raises KeyChangeError."""
    text, now_s = new_key(), int(await client.read_time())
    record = fields.to_key(new_key_id(), digest_of(text), created_at=now_s)
    known = await read_keys(client)
    old = [one.key_id for one in known.values() if is_forgotten(one, now_s)]
    changed = await client.run(change_key(client.keys, record.key_id, b"", record, old))
    if changed < 0:
        raise KeyChangeError(f"there are {MAX_KEYS} keys, which is the most")
    if not changed:
        raise KeyChangeError(f"there is a key {record.key_id} already: try again")
    return IssuedKey(text, record)


def is_forgotten(key: ApiKey, now_s: float) -> bool:
    ended_s = key.revoked or key.expires_at
    return key.state(now_s) != "active" and ended_s + FORGOTTEN_S < now_s


async def revoke_key(client: PoolClient, key_id: str) -> ApiKey:
    """Revoke a key for ever; one that was revoked stays as it is. Raises KeyChangeError."""
    data, key = await read_key(client, key_id)
    if key.revoked:
        return key
    revoked = replace(key, revoked=int(await client.read_time()))
    await write_key(client, data, revoked)
    return revoked


async def rotate_key(client: PoolClient, key_id: str) -> IssuedKey:
    """Give a key another text; the old one counts no more. Raises KeyChangeError."""
    data, key = await read_key(client, key_id)
    if (state := key.state(await client.read_time())) != "active":
        raise KeyChangeError(f"the key {key_id} is {state}: add another one")
    text = new_key()
    rotated = replace(key, digest=digest_of(text))
    await write_key(client, data, rotated)
    return IssuedKey(text, rotated)


async def read_key(client: PoolClient, key_id: str) -> tuple[bytes, ApiKey]:
    """A record as it stands, and decoded. Raises KeyChangeError."""
    data = await client.redis.hget(client.keys.api_keys, key_id)  # type: ignore[misc]
    if data is None or key_id.encode() == VERSION or not KEY_ID.fullmatch(key_id):
        raise KeyChangeError(f"there is no key {key_id[:64]!r}; `tokenfleet keys list` shows all", True)
    return data, decode(ApiKey, data)


async def write_key(client: PoolClient, old: bytes, record: ApiKey) -> None:
    """Raises KeyChangeError."""
    if not await client.run(change_key(client.keys, record.key_id, old, record)):
        raise KeyChangeError(f"somebody else has just changed the key {record.key_id}: try again")


def change_key(
    keys: Keys, key_id: str, old: bytes, record: ApiKey, removed: Iterable[str] = ()
) -> ScriptCall[int]:
    """Write a record if the one in Redis is still `old`, b"" for none."""
    args: Args = {"key_id": key_id, "old": old, "new": encode(record), "max_keys": MAX_KEYS}
    return call_script("change_key", int, keys, args=args, more_args=[*removed])
