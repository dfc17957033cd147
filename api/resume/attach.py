"""Attach: find the answer to an admitted request by its id, read what is committed of it, and become its
reader. Any gateway can do so.
"""

import asyncio
import hmac
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from starlette.requests import Request

from api.answers.answer import HttpAnswer
from api.errors import (
    ApiError,
    Family,
    anthropic,
    asking_broker,
    cut,
    failed,
    family_of,
    invalid,
    kserve,
    openai,
    quoted,
    tgi,
)
from api.http.auth import key_of
from api.http.sse import Feed, RestOfFeed
from api.pooling import render as pooling_render
from api.protocols import kserve as kserve_render
from api.protocols import messages as anthropic_render
from api.protocols import openai as respond
from api.protocols import response_object as responses_object
from api.protocols import tgi as tgi_render
from api.requests.on_pool import pools_of
from api.requests.pool import Pool
from api.requests.pool_registry import PoolRegistry
from api.requests.respond import AnswerRenderer, owner_of
from api.resume.look_up import look_up
from api.streams.beams import new_stream
from api.streams.describe_answer import address, keep_as_asked
from api.streams.fill import Filler, Sources
from api.streams.http_response import TokenStream
from api.streams.offers import supersede
from api.streams.stream import Stream
from common.broker import request_scripts
from common.ids import REQUEST_ID
from common.messages.codec import encode

LAST_EVENT_ID = "Last-Event-ID"
RENDERERS: dict[Family, AnswerRenderer] = {
    tgi: tgi_render.RENDERER,
    kserve: kserve_render.RENDERER,
    openai: respond.RENDERER,
    anthropic: anthropic_render.RENDERER,
}
"""By the API family of the route that an answer was requested from."""
READ_AGAIN_S, READ_PAUSE_S = 2.0, 0.1
"""How long and how often an answer is read again that has fewer frames than its client says."""


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


def renderer_of(answer: HttpAnswer) -> AnswerRenderer:
    """The renderer of the route that an answer was requested from."""
    if answer.response is not None:
        return responses_object.RENDERER
    if answer.vectors is not None:
        return pooling_render.RENDERER
    return RENDERERS[family_of(answer.route)]


def new_streams(pool: Pool, answer: HttpAnswer, channel: str) -> list[Stream]:
    """Streams of all choices, without tokens. Their digests are read when their reader is registered."""
    streams = []
    for number, choice in enumerate(answer.choices()):
        addressed = address(pool.settings, pool.gateway, choice, choice.request_id)
        request = replace(keep_as_asked(addressed, answer), channel=channel, digest="")
        streams.append(new_stream(request, pool.tokenizer, b"" if number else encode(answer)))
    return streams


async def read_committed(pool: Pool, answer: HttpAnswer, channel: str) -> list[Stream]:
    """Streams of all choices, with what is committed so far. Raises ApiError (503)."""
    streams = new_streams(pool, answer, channel)
    by_id = {stream.request.request_id: stream for stream in streams}
    async with asking_broker():
        await Filler(pool.client, Sources(), by_id).fill({}, dict.fromkeys(by_id, math.inf))
    return streams


async def read_rest(
    pool: Pool, answer: HttpAnswer, channel: str, num_seen: int
) -> tuple[list[Stream], Feed[bytes] | None]:
    """Streams of all choices, and the frames that the client does not have yet; None if it has all.

    A read may miss tokens that are being moved, from a log to a string or to another worker. So an answer is
    read again before a client's number of frames is refused.

    Raises ApiError: 410, 422, 424, 503.
    """
    end_s = time.monotonic() + READ_AGAIN_S
    while True:
        streams = await read_committed(pool, answer, channel)
        if any(stream.terminal and stream.terminal.reason == "cancelled" for stream in streams):
            raise cancelled_answer(answer.request_id)
        try:
            return streams, await rest_of_frames(answer, streams, num_seen)
        except ApiError as error:
            if error.status != 422 or time.monotonic() > end_s:
                raise
        await asyncio.sleep(READ_PAUSE_S)


async def rest_of_frames(answer: HttpAnswer, streams: Sequence[Stream], num_seen: int) -> Feed[bytes] | None:
    """The frames after the `num_seen` that the client has; None if it has all. Raises ApiError: 424, and 422
    if fewer frames than that are committed.
    """
    frames = RestOfFeed(renderer_of(answer).frames(answer, streams), num_seen)
    await frames.prepare()
    failure = next((one.terminal for one in streams if one.terminal and not one.finished), None)
    if frames.num_seen and failure:  # a failed request keeps no tokens
        raise failed(failure)
    if frames.num_seen:
        raise invalid(
            f"`{LAST_EVENT_ID}` must be the id of a frame that was sent: this answer has "
            f"{num_seen - frames.num_seen} so far. Given: {quoted(num_seen)}",
            LAST_EVENT_ID,
        )
    if not frames.first and all(stream.terminal for stream in streams):
        frames.first = await anext(frames.source, [])
        if not frames.first:
            return None
    return frames


async def respond_with_rest(
    pool: Pool, answer: HttpAnswer, streams: Sequence[Stream], frames: Feed[bytes], num_seen: int
) -> TokenStream:
    """Become the reader, and send the frames after the `num_seen` that the client has. Raises ApiError."""
    reader = await become_reader(pool, streams)
    return TokenStream(
        answer,
        frames=frames,
        streams=streams,
        headers={},
        release=pool.admission.release,
        reader=reader,
        num_seen=num_seen,
    )


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
