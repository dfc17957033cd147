"""Attach: find the answer to an admitted request by its id, read what is committed of it, and become its
reader. Any gateway can do so.
"""

import hmac
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.requests import Request

from api.answers.answer import HttpAnswer
from api.errors import (
    ApiError,
    asking_broker,
    cut,
)
from api.http.auth import key_of
from api.requests import request_scripts
from api.requests.pool import Pool, PoolRegistry
from api.requests.request_scripts import address
from api.requests.service_terms import owner_of, pools_of
from api.resume.look_up import look_up
from api.streams.relay import Filler, Sources, supersede
from api.streams.stream import Stream, new_stream
from common.ids import REQUEST_ID
from common.messages.codec import encode


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
    if owner is not None and not hmac.compare_digest(answer.terms.owner, owner):
        return None
    return Admitted(await pools.named(name), answer, channel)


def unknown_answer(request_id: str) -> ApiError:
    return ApiError(
        404,
        "not_found",
        f"There is no streamed answer {cut(request_id)}: "
        "it is not yours, its id is wrong, or its time is over",
    )


def cancelled_answer(request_id: str) -> ApiError:
    return ApiError(
        410, "gone", f"The answer {cut(request_id)} was cancelled: nobody came back for it in time"
    )


def age_s(pool: Pool, answer: HttpAnswer) -> float:
    """Seconds since an answer's request was accepted, by the broker's clock."""
    return max(0.0, pool.client.clock.now_s() - answer.created_s)


def new_streams(pool: Pool, answer: HttpAnswer, channel: str) -> list[Stream]:
    """Streams of all choices, without tokens. Their digests are read when their reader is registered."""
    streams = []
    for number, choice in enumerate(answer.choices()):
        request = address(pool.settings, pool.gateway, choice, choice.request_id, answer)
        request = replace(request, channel=channel, digest="")
        streams.append(new_stream(request, pool.tokenizer, b"" if number else encode(answer)))
    return streams


async def read_committed(pool: Pool, answer: HttpAnswer, channel: str) -> list[Stream]:
    """Streams of all choices, with what is committed so far. Raises ApiError (503)."""
    streams = new_streams(pool, answer, channel)
    by_id = {stream.request.request_id: stream for stream in streams}
    async with asking_broker():
        await Filler(pool.client, Sources(), by_id).fill({}, dict.fromkeys(by_id, math.inf))
    return streams


async def read_fields(pool: Pool, answer: HttpAnswer, names: list[str]) -> list[Any]:
    """These fields of each choice's hash; None for one that is missing. Raises ApiError (503)."""
    async with asking_broker():
        pipe = pool.client.redis.pipeline(transaction=False)
        for choice in answer.choices():
            pipe.hmget(pool.client.keys.request(choice.request_id), names)
        return await pipe.execute()


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
    for stream, digest in zip(streams, reply.digests, strict=True):
        stream.request = replace(stream.request, digest=digest)
        stream.reader, stream.connection = reply.reader, reply.reader if connection is None else connection
        relay_events(pool, stream)
    return reply.reader


def relay_events(pool: Pool, stream: Stream) -> None:
    """Relay events to a stream, in place of an earlier stream of its request at this gateway."""
    relay = pool.relay
    if (former := relay.streams.get(stream.request.request_id)) is not None:
        supersede(former)
    if stream.request.channel != relay.channel:
        relay.follow_channel(stream.request.channel)
    relay.add(stream)
    relay.note_admitted(stream)
    relay.filler.request_fill([stream])
