"""Attach: find the answer to an admitted request by its id, read what is committed of it, and become its
reader. Any gateway can do so.
"""

import asyncio
import contextlib
import hmac
import logging
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from redis.asyncio import Redis
from starlette.requests import Request

from api.answers.answer import HttpAnswer
from api.errors import ApiError, asking_broker, cut
from api.http.auth import key_of
from api.requests import request_scripts
from api.requests.pool import Pool
from api.requests.registry import PoolRegistry, pool_url
from api.requests.request_scripts import address
from api.requests.service_terms import owner_of, pools_of
from api.streams.relay import Filler, Sources, supersede
from api.streams.stream import Stream, new_stream
from common.broker.client import broker_url, connect
from common.broker.committed import Committed, read_slice
from common.broker.keys import Keys
from common.ids import REQUEST_ID
from common.messages.codec import WireError, decode, encode
from common.settings.settings import SettingError

log = logging.getLogger(__name__)


class Admitted(NamedTuple):
    """The answer to an admitted request; it may have ended.

    Attributes:
        channel: of its events.
    """

    pool: Pool
    answer: HttpAnswer
    channel: str


async def find_own(request: Request, request_id: str) -> Admitted | None:
    """The answer with this id, if it belongs to this request's API key or to its tenant; an admin's key finds
    those of all tenants. Raises ApiError: 503, and as `owner_of`.
    """
    if not REQUEST_ID.fullmatch(request_id):
        return None
    key = key_of(request)
    owner = None if key is not None and key.admin else owner_of(request, request_id)
    return await find(pools_of(request), request_id, owner)


async def find(pools: PoolRegistry, request_id: str, owner: str | None = None) -> Admitted | None:
    """The answer with this id, if it is the owner's; None means any owner. Raises ApiError (503)."""
    if (found := await look_up(pools, request_id)) is None:
        return None
    name, answer, channel = found
    is_own = owner is None or hmac.compare_digest(answer.terms.owner, owner)
    return Admitted(await pools.named(name), answer, channel) if is_own else None


def unknown_answer(request_id: str) -> ApiError:
    why = "it is not yours, its id is wrong, or its time is over"
    return ApiError(404, "not_found", f"There is no streamed answer {cut(request_id)}: {why}")


def cancelled_answer(request_id: str) -> ApiError:
    return ApiError(
        410, "gone", f"The answer {cut(request_id)} was cancelled: nobody came back for it in time"
    )


def age_s(pool: Pool, answer: HttpAnswer) -> float:
    """Seconds since an answer's request was accepted, by the broker's clock."""
    return max(0.0, pool.client.clock.now_s() - answer.created_s)


def new_streams(admitted: Admitted) -> list[Stream]:
    """Streams of all choices, without tokens. Their digests are read when their reader is registered."""
    pool, answer, channel = admitted
    streams = []
    for number, choice in enumerate(answer.choices()):
        request = replace(address(pool.settings, pool.gateway, choice, answer), channel=channel, digest="")
        stream = new_stream(request, pool.tokenizer, b"" if number else encode(answer))
        stream.times.is_resumed = True
        streams.append(stream)
    return streams


async def read_committed(admitted: Admitted) -> list[Stream]:
    """Streams of all choices, with what is committed so far. Raises ApiError (503)."""
    streams = new_streams(admitted)
    by_id = {stream.request.request_id: stream for stream in streams}
    async with asking_broker():
        filler = Filler(admitted.pool.client, Sources(), by_id)
        await filler.fill({}, dict.fromkeys(by_id, math.inf))
        # a worker that has spilled between the two reads has trimmed its log
        await filler.fill({}, {name: math.inf for name, stream in by_id.items() if stream.has_gap})
    return streams


async def read_states(admitted: Admitted) -> list[Committed]:
    """The state of each choice, without its tokens. Raises ApiError (503)."""
    names = dict.fromkeys(choice.request_id for choice in admitted.answer.choices())
    async with asking_broker():
        return [*(await read_slice(admitted.pool.client, names, of_ended=False)).values()]


async def become_reader(pool: Pool, streams: Sequence[Stream], connection: int | None = None) -> int:
    """Become the reader of these streams, and relay their events to them. Returns the reader's number.

    Args:
        connection: number of the reader whose connection is inherited; None for a new connection.

    Raises ApiError: 404, 410, 503.
    """
    request_ids = [stream.request.request_id for stream in streams]
    async with asking_broker():
        reply = await pool.client.run(
            request_scripts.attach(pool.client.keys, request_ids, gateway=pool.gateway, inherited=connection)
        )
    if reply.outcome == "cancelled":
        raise cancelled_answer(request_ids[0])
    if reply.outcome != "attached":
        raise unknown_answer(request_ids[0])
    relay = pool.relay
    for stream, digest in zip(streams, reply.digests, strict=True):
        stream.request = replace(stream.request, digest=digest)
        stream.reader, stream.connection = reply.reader, reply.reader if connection is None else connection
        if (former := relay.streams.get(stream.request.request_id)) is not None:
            supersede(former)  # another connection at this gateway
        if stream.request.channel != relay.channel:
            relay.follow_channel(stream.request.channel)
        relay.add(stream)
        relay.note_admitted(stream)
        relay.filler.request_fill([stream])
    return reply.reader


# --- look-up ------------------------------------------------------------------------------------------------


Found = tuple[str, HttpAnswer, str]
"""The name of an answer's pool, the answer, and the channel of its events."""


async def look_up(pools: PoolRegistry, request_id: str) -> Found | None:
    """Ask all brokers at once. The first that knows the request ends the search, so one that is down is
    waited for only if no other does. Raises ApiError (503) if none knows it, and one cannot say so.
    """
    tasks = [
        asyncio.create_task(ask_broker(pools, url, names, request_id))
        for url, names in pools_by_broker(pools).items()
    ]
    failures = []
    try:
        for next_done in asyncio.as_completed(tasks):
            try:
                if (found := await next_done) is not None:
                    return found
            except ApiError as error:
                failures.append(error)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failures:
        raise failures[0]
    return None


def pools_by_broker(pools: PoolRegistry) -> dict[str, list[str]]:
    """URL of a broker → its pools; the own pool is the first."""
    own = pools.own.settings
    by_url = defaultdict(list, {broker_url(own): [own.pool]})
    for name, known in pools.directory.pools.items():
        if name != own.pool:
            try:
                by_url[pool_url(own, name, known.entry.address)].append(name)
            except SettingError as error:
                log.debug("requests of pool %s are not looked for: %s", name, error)
    return by_url


async def ask_broker(pools: PoolRegistry, url: str, names: Sequence[str], request_id: str) -> Found | None:
    """Look the request up in the pools of one broker. Raises ApiError (503)."""
    firsts = [(name, choice) for name in names for choice in (request_id, f"{request_id}.0")]
    async with asking_broker(), client_at(pools, url, names) as redis:
        pipe = redis.pipeline(transaction=False)
        for name, choice in firsts:
            pipe.hmget(Keys(name).request(choice), ["answer", "channel"])
        replies = await pipe.execute(raise_on_error=False)
    for (name, _), reply in zip(firsts, replies, strict=True):
        if isinstance(reply, list) and None not in reply:
            with contextlib.suppress(WireError):  # another program wrote to the key
                return name, decode(HttpAnswer, reply[0]), reply[1].decode()
    return None


@contextlib.asynccontextmanager
async def client_at(pools: PoolRegistry, url: str, names: Sequence[str]) -> AsyncIterator[Redis]:
    """The connection of a pool that is open on this broker, or else one for this moment."""
    for pool in pools.all():
        if pool.settings.pool in names and pool.settings.redis_url == url:
            yield pool.client.redis
            return
    async with connect(url) as redis:
        yield redis
