"""Directory: which pools there are, on which brokers, and which of them get the requests of a model.

It is at the broker that DIRECTORY_URL names, by default the pool's own. Batchers write it, gateways read it.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from redis.asyncio import Redis

from common.broker.client import connect_setting
from common.broker.keys import LEASE_S, MODEL_SHARES, POOL_ENTRIES, POOLS, Keys
from common.broker.lua import Args, ScriptCall, call_script, run_script
from common.messages.codec import WireError, decode, encode
from common.messages.directory import ModelShares, PoolEntry
from common.settings.settings import Settings

SILENT_S = 2 * LEASE_S
"""A pool that has written nothing for this time has no batcher that works, or no broker."""
TTL_S = 3600
"""Time after which a silent pool leaves the directory."""


class KnownPool(NamedTuple):
    """A pool, and how long ago it wrote that."""

    entry: PoolEntry
    age_s: float

    @property
    def is_live(self) -> bool:
        """Whether its batcher works, and has a worker that is ready, or that will wake for it."""
        return self.age_s <= SILENT_S and self.entry.num_ready + self.entry.num_sleepers > 0


class DirectoryContent(NamedTuple):
    """What the directory says.

    Attributes:
        pools: by name.
        weights: model → pool → weight, of models whose requests are shared out by weight.
    """

    pools: dict[str, KnownPool]
    weights: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class DirectoryClient:
    """The connection to the directory's broker."""

    redis: Redis

    @classmethod
    def connect(cls, settings: Settings, own: Redis) -> "DirectoryClient":
        """`own`: the connection to the pool's broker, which is used if the directory is there."""
        is_own = settings.directory_url in (None, settings.redis_url)
        return cls(own if is_own else connect_setting("directory_url", settings.directory_url or ""))

    async def publish(self, pool: str, entry: PoolEntry) -> str:
        """Write a pool's entry. Returns the address of another broker that has a pool of this name, and then
        writes nothing; empty otherwise.
        """
        call = publish_pool(Keys(pool), entry, silent_s=SILENT_S, ttl_s=TTL_S)
        return await run_script(self.redis, call)

    async def read(self) -> DirectoryContent:
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.zrange(POOLS, 0, -1, withscores=True)
            pipe.hgetall(POOL_ENTRIES)
            pipe.hgetall(MODEL_SHARES)
            pipe.time()
            seen_s, entries, shares, (seconds, microseconds) = await pipe.execute()
        now_s = seconds + microseconds / 1e6
        return DirectoryContent(
            read_pools({name.decode(): max(0.0, now_s - at_s) for name, at_s in seen_s}, entries),
            read_weights(shares),
        )

    async def set_weights(self, model: str, weights: Mapping[str, float]) -> None:
        """Share the requests of a model out by weight; without weights, by queue depth again."""
        if weights:
            shares = encode(ModelShares([*weights.items()]))
            await self.redis.hset(MODEL_SHARES, mapping={model: shares})  # type: ignore[misc]
        else:
            await self.redis.hdel(MODEL_SHARES, model)  # type: ignore[misc]


def publish_pool(keys: Keys, entry: PoolEntry, *, silent_s: float, ttl_s: int) -> ScriptCall[str]:
    """Write a pool's entry to the directory. The reply is the address of another broker that has a pool of
    this name; empty if there is none.

    Args:
        silent_s: time after which a pool that says nothing has no right to its name any more.
        ttl_s: time after which it leaves the directory.
    """
    args: Args = {
        "pool": keys.pool,
        "entry": encode(entry),
        "address": entry.address,
        "silent_s": silent_s,
        "ttl_s": ttl_s,
    }
    return call_script("publish_pool", bytes.decode, keys, args=args)


def read_pools(ages_s: Mapping[str, float], entries: Mapping[bytes, bytes]) -> dict[str, KnownPool]:
    """The pools by name; those whose entry is missing, or of another version, are left out."""
    found = {}
    for name, age_s in ages_s.items():
        with contextlib.suppress(KeyError, WireError):
            found[name] = KnownPool(decode(PoolEntry, entries[name.encode()]), age_s)
    return found


def read_weights(shares: Mapping[bytes, bytes]) -> dict[str, dict[str, float]]:
    found = {}
    for model, packed in shares.items():
        with contextlib.suppress(WireError):
            found[model.decode()] = dict(decode(ModelShares, packed).weights)
    return found
