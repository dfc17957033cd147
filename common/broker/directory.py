"""Directory: which pools there are, and on which brokers.

It is at the broker that DIRECTORY_URL names, by default the pool's own. Batchers write it, gateways read it.
It has addresses: a broker's URL without what only its clients may know. Who opens a pool on another broker
uses the user, password and options of its own REDIS_URL, or the URL that POOL_URLS gives for the pool.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode

from redis.asyncio import Redis

from common.broker.client import connect_setting
from common.broker.keys import LEASE_S, Keys
from common.broker.lua import Args, call_script, run_script
from common.messages.codec import decode_fields, encode, wire_field
from common.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """A pool, as its active batcher describes it at an interval.

    Attributes:
        address: URL of its broker, without user, password and options.
        models: names by which clients may ask for its model.
        model_id, tokenizer_name: where its workers have model and tokenizer from; gateways load the latter.
        num_ready, num_loading: workers that are ready; those that load, counted while none is ready.
        num_sleepers: workers that serve the pool in its turn, counted while none is ready.
        waiting, rows: live requests that wait, and that run.
        capacity: rows that its workers run together.
        adapters: names of its LoRA adapters, by which clients may ask for them.
    """

    address: str = wire_field("a")
    models: list[str] = wire_field("m", default_factory=list)
    model_id: str = wire_field("mi", default="")
    tokenizer_name: str = wire_field("tn", default="")
    num_ready: int = wire_field("r", default=0)
    num_loading: int = wire_field("l", default=0)
    waiting: int = wire_field("w", default=0)
    rows: int = wire_field("rw", default=0)
    capacity: int = wire_field("c", default=0)
    num_sleepers: int = wire_field("s", default=0)
    adapters: list[str] = wire_field("ad", default_factory=list)

    @property
    def depth(self) -> float:
        """Live requests for each row that its workers can run: above 1, some wait."""
        return (self.waiting + self.rows) / max(1, self.capacity)


URL = re.compile(r"(?P<scheme>[^:]+)://(?:(?P<user>[^/?]*)@)?(?P<place>[^?]*)(?:\?(?P<options>.*))?")
DATABASE = "db"
"""The option that says where keys are, not how to reach the broker."""


def address_of(url: str) -> str:
    """The URL without user, password and options."""
    scheme, _, place, options = split(url)
    return join(scheme, "", place, {name: text for name, text in options.items() if name == DATABASE})


def split(url: str) -> tuple[str, str, str, dict[str, str]]:
    """Scheme, user (with its password), place and options of a URL. Raises ValueError."""
    if (found := URL.fullmatch(url)) is None:
        raise ValueError("no URL")
    return found["scheme"], found["user"] or "", found["place"], dict(parse_qsl(found["options"] or ""))


def join(scheme: str, user: str, place: str, options: dict[str, str]) -> str:
    return f"{scheme}://{f'{user}@' if user else ''}{place}{f'?{urlencode(options)}' if options else ''}"


SILENT_S = 2 * LEASE_S
"""A pool that has written nothing for this time has no batcher that works, or no broker, and no right to its
name any more.
"""
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
        args: Args = {"pool": pool, "entry": encode(entry), "address": entry.address}
        args |= {"silent_s": SILENT_S, "ttl_s": TTL_S}
        return await run_script(self.redis, call_script("publish_pool", bytes.decode, Keys(pool), args=args))

    async def read(self) -> dict[str, KnownPool]:
        """The pools by name, but those whose entry is missing, or of another version."""
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.zrange(Keys.pools, 0, -1, withscores=True)
            pipe.hgetall(Keys.pool_entries)
            pipe.time()
            seen_s, entries, (seconds, microseconds) = await pipe.execute()
        now_s, known = seconds + microseconds / 1e6, decode_fields(PoolEntry, entries)
        ages_s = {name.decode(): max(0.0, now_s - at_s) for name, at_s in seen_s}
        return {name: KnownPool(known[name], age_s) for name, age_s in ages_s.items() if name in known}
