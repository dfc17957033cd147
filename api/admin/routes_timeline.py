"""GET /fleet/requests/{id}: the timeline of one request, read from the stream that the batcher writes."""

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.errors import ApiError, asking_broker, cut
from api.http.openapi import FLEET, TGI_ERRORS, ErrorResponse, RequestId, error_responses, only
from api.json import to_json
from api.requests.on_pool import own_pool
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode
from common.messages.events import Timeline

CHUNK = 500
"""Entries in one read."""
SIBLINGS_MS = 5000
"""All choices of a request are queued within this time."""
CHOICE_MARKS = (".", "#")
"""Between the id of a request, or of a job, and the number of a choice."""
router = APIRouter(responses=only(TGI_ERRORS, 401, 403, 503), tags=[FLEET])


Entry = tuple[bytes, dict[bytes, bytes]]
Events = list[dict[str, Any]]


async def read_timelines(client: PoolClient, request_id: str) -> dict[str, Events]:
    """The events of a request or job and of its choices, oldest first, by id. The stream is read backwards
    from its newest entry.
    """
    timelines: dict[str, Events] = {}
    newest = "+"
    while entries := await client.redis.xrevrange(client.keys.timeline, newest, "-", count=CHUNK):
        for entry in entries:
            add_entry(timelines, entry, request_id)
        if is_complete(timelines, entries[-1]):
            break
        newest = f"({entries[-1][0].decode()}"
    return dict(sorted(timelines.items()))


def add_entry(timelines: dict[str, Events], entry: Entry, request_id: str) -> None:
    """Add the events of an entry, in front of those of later entries."""
    choices = tuple(request_id + mark for mark in CHOICE_MARKS)
    for name, data in entry[1].items():
        known_id = name.decode(errors="replace")
        if known_id != request_id and not known_id.startswith(choices):
            continue
        try:
            events = [dataclasses.asdict(event) for event in decode(Timeline, data).events]
        except WireError:
            continue
        timelines[known_id] = events + timelines.get(known_id, [])


def is_complete(timelines: dict[str, Events], oldest: Entry) -> bool:
    """Whether no entry before this one can belong to these timelines."""
    first_events = [events[0] for events in timelines.values()]
    entry_ms = int(oldest[0].split(b"-")[0])
    return bool(first_events) and all(
        event["what"] == "queued" and entry_ms < event["at_ms"] - SIBLINGS_MS for event in first_events
    )


@router.get(
    "/fleet/requests/{request_id:path}",
    summary="Show a request's timeline",
    responses=error_responses(ErrorResponse, {404: "No such request"}),
)
async def request_timeline(request: Request, request_id: RequestId) -> Response:
    """Returns the events of a request and of each of its choices: queued, placed on a worker, first token,
    resumed, ended. Timelines are kept for a day at most; then the response is 404.
    """
    pool = own_pool(request)
    async with asking_broker():
        timelines = await read_timelines(pool.client, request_id)
    if not timelines:
        raise ApiError(
            404,
            "not_found",
            f"There is no timeline of a request {cut(request_id)}: it was never queued, or it has expired",
        )
    return Response(
        to_json({"request_id": request_id, "timelines": timelines}),
        200,
        {"cache-control": "no-store"},
        "application/json",
    )
