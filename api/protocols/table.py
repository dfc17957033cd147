"""Table: the rows of all protocols, and how each is served over HTTP. A route that makes answers is here, or
it is none.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from api.answers.answer import HttpAnswer
from api.errors import ApiError
from api.http import body
from api.http.auth import key_of
from api.http.body import idempotency_key, noted_digest
from api.http.middleware import record_of, traced
from api.protocols.kserve import KSERVE_GENERATE, KSERVE_GENERATE_STREAM, KSERVE_INFER
from api.protocols.messages import MESSAGES
from api.protocols.openai import CHAT_COMPLETIONS, COMPLETIONS
from api.protocols.pooling import EMBEDDINGS, RERANK, SCORE
from api.protocols.protocol import Context, Protocol
from api.protocols.responses import RESPONSES, is_stored
from api.protocols.tgi import COMPAT_GENERATE, GENERATE, GENERATE_STREAM, INVOCATIONS, VERTEX
from api.requests.fields import Strict
from api.requests.metrics import ARRIVED_S
from api.requests.pool import Pool, Target
from api.requests.service_terms import answer_id, pools_of, read_service, read_terms
from api.streams.http_response import Reader, respond
from api.webhooks import check_room, with_webhook
from common.metrics.catalogue import POOL_REQUESTS


async def serve(protocol: Protocol, request: Request) -> Response:
    """Read the body, and answer it with a pool that serves its model, or the adapter that TGI's `adapter_id`
    names; if that one has no room, once with another one. Raises ApiError.
    """
    pools = pools_of(request)
    data = await body.read_json(request, pools.max_body_bytes)
    route = request.url.path
    if protocol.by_field:
        names, rows = (await body.parse(body.AnyBody, data)).model_fields_set, protocol.by_field
        protocol = next((row for name, row in rows.items() if name in names), next(iter(rows.values())))
        route = protocol.path
    parsed = await body.parse(protocol.body, data)
    model = request.path_params.get("model", getattr(parsed, "model", None))
    target = await pools.target(model, getattr(parsed, "adapter_id", None))
    first, *others = await pools.tried(target)
    if len(data) > first.max_body_bytes:
        raise body.too_large(first.max_body_bytes)
    try:
        return await serve_on(protocol, request, route, parsed, target, first)
    except ApiError as error:
        if error.error_type != "overloaded" or not others:
            raise
    return await serve_on(protocol, request, route, parsed, target, others[0])


async def serve_on(
    protocol: Protocol, request: Request, route: str, parsed: Strict, target: Target, pool: Pool
) -> Response:
    """Validate and submit what the body asks for, and respond; count the request if it is admitted. Raises
    ApiError before anything is sent, and Repeated as `Admission.submit_all`.
    """
    adapter = await pool.adapter_of(target, key_of(request))
    await pool.check_admission()
    in_frames = bool(getattr(parsed, "stream", None)) if protocol.streams is None else protocol.streams
    created_s = int(pool.client.clock.now_s())
    context = Context(
        pool, route, answer_id(request), in_frames, target.shown, created_s, adapter, request=request
    )
    answer = with_terms(protocol, request, parsed, context, await protocol.read(parsed, context))
    if answer.requests[0].webhook:
        await check_room(pool.client)
    reader = Reader(pool, answer, await pool.submit_all(answer, is_stored(answer)))
    POOL_REQUESTS.add(1, target.shown, pool.settings.pool)
    compute_type = pool.settings.compute_type
    headers = {"x-compute-type": compute_type} if compute_type else {}
    headers |= {"x-compute-characters": str(answer.num_chars), **reader.streams[-1].limit_headers}
    if getattr(parsed, "detached", None) and not answer.streamed:  # shown before its first token
        content, _ = protocol.renderer(answer, reader.streams).whole()
        reader.release()
        response = Response(content, 200, headers, "application/json")
    else:
        response = await respond(request, reader, protocol.renderer, headers, ARRIVED_S.get())
    return response


def with_terms(
    protocol: Protocol, request: Request, parsed: Strict, context: Context, answer: HttpAnswer
) -> HttpAnswer:
    """The answer on the terms that its client asks for. Raises ApiError (422)."""
    names = ("resume_s", "detached", "priority", "service_tier", "webhook")
    resume_s, detached, priority, tier, webhook = (getattr(parsed, name, None) for name in names)
    settings, own_id, key = context.pool.settings, context.answer_id, key_of(request)
    accepted = request.headers.get("accept", "")
    if "application/octet-stream" in accepted and any(one.logits for one in answer.requests):
        why = "`Accept: application/octet-stream` is not served: logits come as base64 in JSON"
        raise ApiError(406, "not_acceptable", why, "accept")
    may_leave = answer.streamed or (bool(detached) and answer.response is not None)
    terms = read_terms(request, own_id, may_leave, resume_s, detached)
    numbered = terms.goes_on_s is not None or answer.response is not None
    kept_s = max(terms.kept_s, settings.answer_ttl_s)
    if is_stored(answer):
        terms = replace(terms, kept_s=kept_s)
    if idempotency_key(request):  # repetitions of the request get the answer, too
        terms = replace(terms, goes_on_s=math.inf, kept_s=kept_s, body=noted_digest(request))
    requests = with_webhook(answer.requests, webhook, key, settings, protocol.event, own_id)
    requests = read_service(request, priority, tier).apply(requests, settings, context.adapter)
    answer = replace(answer, requests=requests, terms=terms, numbered=numbered)
    return traced(answer, record_of(request.scope).trace, protocol.operation)


PROTOCOLS = (
    *(GENERATE, GENERATE_STREAM, COMPAT_GENERATE, INVOCATIONS, VERTEX),
    *(KSERVE_GENERATE, KSERVE_GENERATE_STREAM, KSERVE_INFER),
    *(CHAT_COMPLETIONS, COMPLETIONS, RESPONSES, MESSAGES),
    *(EMBEDDINGS, RERANK, SCORE),
)


def paths() -> Iterator[tuple[str, Protocol]]:
    for row in PROTOCOLS:
        yield from ((path, row) for path in (*row.aliases, row.path))


BY_PATH = {path: row for path, row in paths() if "{" not in path}
BY_PATTERN = [(compile_path(path)[0], row) for path, row in paths() if "{" in path]
JOBS = {row.prompt[0]: row for row in PROTOCOLS if row.in_jobs}
"""The field of a job's prompt → the route of which it has the parameters, unless it names another one."""
BATCHES = tuple(row.path for row in PROTOCOLS if row.in_batches)


def protocol_at(path: str) -> Protocol | None:
    """The row of the route with this path."""
    if (row := BY_PATH.get(path)) is not None:
        return row
    return next((row for pattern, row in BY_PATTERN if pattern.match(path)), None)


def protocol_of(path: str) -> Protocol:
    """The row of a route that has made an answer."""
    row = protocol_at(path)
    assert row is not None, path
    return row


def hint(described: Iterable[str], path: str) -> str:
    """What a client may have meant by a path that no route has, as the end of a sentence.

    Args:
        described: paths of all routes that /docs shows.
    """
    of_openai = dict.fromkeys(one for one in described if one.startswith("/v1/") and "{" not in one)
    if instead := [row.path for row in PROTOCOLS if path in row.instead_of]:
        return f". In its place this server has {' and '.join(instead)}"
    if path.startswith("/v1/"):
        return f". Of OpenAI's API this server has {', '.join(of_openai)}"
    is_of_openai = any(path.endswith(one.removeprefix("/v1")) for one in of_openai)
    return ". The base URL of OpenAI's clients ends with /v1" if is_of_openai else ""


def make_router() -> APIRouter:
    """The routes of all rows, each path's own after its aliases: names of models may have slashes."""
    router = APIRouter()
    for path, row in paths():
        router.add_api_route(
            path,
            partial(serve, row),
            methods=["POST"],
            name=row.name,
            include_in_schema=path == row.path,
            **row.docs,
        )
    return router
