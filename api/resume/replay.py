"""Replay: a request with the `Idempotency-Key` of an earlier one gets the answer of that one, from its start,
whether it still runs or has ended, at any gateway.
"""

import asyncio
import time
from collections.abc import Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from api.answers.answer import HttpAnswer
from api.errors import ApiError, asking_broker, unavailable
from api.event_loop import offload
from api.http.body import REPLAYED, Repeated, check_same, idempotency_key, noted_digest, read_bytes
from api.http.middleware import CountError, handle_api_error, handle_disconnect
from api.json import json_response
from api.protocols.responses import read_response, render_response
from api.protocols.table import protocol_of
from api.protocols.typed_events import fields_of
from api.requests.metrics import total_headers
from api.requests.pool import Pool
from api.requests.request_scripts import delete_ended
from api.requests.service_terms import answer_id, own_pool
from api.resume import attach, rest
from api.resume.attach import Admitted, find_own
from api.streams.http_response import client_gone
from common.broker.client import CONNECT_TIMEOUT_S
from common.messages.events import FINISHED
from common.process.event_loop import run_until_one_ends

POLL_S = 0.1
"""How often an answer that is not streamed is asked for its end."""


async def check_repeated(request: Request) -> None:
    """Dependency of routes that make answers. Raises Repeated if an earlier request with this key has one,
    in whatever pool; ApiError: 400, 503. An answer that failed, or was cancelled, is forgotten: the request
    is served anew. So it is if the earlier gateway died while it admitted some of several choices.
    """
    if request.method != "POST" or not idempotency_key(request):
        return
    if (admitted := await find_own(request, answer_id(request))) is None:
        return
    states = await read_states(admitted.pool, admitted.answer)
    if None in states:
        return
    if all(state in ("", *FINISHED) for state in states):
        raise Repeated(admitted.answer.request_id)
    async with asking_broker():
        for choice in admitted.answer.choices():
            await delete_ended(admitted.pool.client, choice.request_id)


async def read_states(pool: Pool, answer: HttpAnswer) -> Sequence[str | None]:
    """How each choice ended; empty if it has not, None if it is not known. Raises ApiError (503)."""
    found = await attach.read_fields(pool, answer, ["digest", "terminal"])
    return [(terminal or b"").decode() if digest else None for digest, terminal in found]


async def replay(count: CountError, request: Request, repeated: Repeated) -> Response:
    """Exception handler: respond with the answer of the earlier request."""
    try:
        response = await respond(request, repeated.request_id)
    except ApiError as error:
        return await handle_api_error(count, request, error)
    except ClientDisconnect as error:
        return await handle_disconnect(request, error)
    response.headers[REPLAYED] = "true"
    return response


async def respond(request: Request, request_id: str) -> Response:
    """The answer from its start. Raises ApiError: 409, 410, 413, 424, 503; ClientDisconnect."""
    if not noted_digest(request):  # the route has not read it
        await read_bytes(request, own_pool(request).max_body_bytes)
    admitted = await find_admitted(request, request_id)
    check_same(request, admitted.answer.terms.body)
    pool, answer, _ = admitted
    if answer.streamed:
        found = await rest.read_rest(*admitted, 0)
        assert found is not None, "every stream has a frame"
        return await found.respond()
    if answer.response is not None and fields_of(answer)["background"]:
        return await respond_with_state(admitted)
    await run_until_one_ends(wait_for_end(pool, answer), raise_when_gone(request))
    return await respond_with_ended(admitted)


async def find_admitted(request: Request, request_id: str) -> Admitted:
    """The answer of the earlier request, which may be on its way to the broker. Raises ApiError (503) if it
    does not arrive.
    """
    end_s = time.monotonic() + CONNECT_TIMEOUT_S
    while (admitted := await find_own(request, request_id)) is None:
        if time.monotonic() > end_s:
            raise unavailable("the earlier request with this key was not admitted: ask again")
        await asyncio.sleep(POLL_S)
    return admitted


def lost() -> ApiError:
    return unavailable("the answer to the earlier request with this key has just expired: ask again")


async def respond_with_state(admitted: Admitted) -> Response:
    """A response that is made in the background, with what is committed so far. Raises ApiError (503)."""
    return json_response(await render_response(admitted, await read_response(admitted)))


async def wait_for_end(pool: Pool, answer: HttpAnswer) -> None:
    """Wait until all choices have ended, without becoming their reader: the earlier request may have one.
    Raises ApiError (503) if the answer is gone meanwhile, or failed: the next repetition is served anew.
    """
    while True:
        states = await read_states(pool, answer)
        if not all(state in ("", *FINISHED) for state in states):
            raise lost() if None in states else unavailable("the earlier request has just failed: ask again")
        if all(states):
            return
        await asyncio.sleep(POLL_S)


async def raise_when_gone(request: Request) -> None:
    """Raises ClientDisconnect when the client has gone."""
    await client_gone(request)
    raise ClientDisconnect


async def respond_with_ended(admitted: Admitted) -> Response:
    """The whole of an answer that has ended. Raises ApiError (503)."""
    pool, answer, channel = admitted
    streams = await attach.read_committed(pool, answer, channel)
    if not all(stream.finished for stream in streams):
        raise lost()
    arrived_s = time.monotonic() - attach.age_s(pool, answer)
    renderer = protocol_of(answer.route).renderer(answer, streams)
    num_records = sum(stream.num_records for stream in streams)
    body, num_tokens = await offload(num_records, renderer.whole)
    headers = total_headers(answer, streams, num_tokens, arrived_s)
    return Response(body, 200, headers, "application/json")
