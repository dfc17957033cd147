"""Admin routes of webhooks: GET /admin/webhooks, the events that wait or were given up, and POST
/admin/webhooks/{event_id}/retry. They do what `tokenfleet webhooks` does.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from api.errors import ApiError, asking_broker
from api.http.openapi import FLEET, TGI_ERRORS, ErrorResponse, Responses, error_responses, only
from api.json import fresh_json
from api.requests.on_pool import own_pool
from common.broker.pool_client import PoolClient
from common.ids import EVENT_ID
from common.webhooks import StoredEvent, retry_webhook, type_of

ERRORS: Responses = only(TGI_ERRORS, 401, 403, 422, 503)
ERRORS |= error_responses(ErrorResponse, {404: "No such event waits or was given up"})
router = APIRouter(responses=ERRORS, tags=[FLEET])
MAX_LISTED = 1000


class EventInfo(BaseModel):
    """An event without its secret.

    Attributes:
        type: as `response.completed`.
        object_id: what has ended.
        at: when it is sent next; of a dead one, since when it is given up (Unix time, s).
        said: what the receiver answered last, or why it did not.
    """

    id: str
    type: str
    object_id: str
    url: str
    state: Literal["waiting", "dead"]
    created_at: int
    at: int
    failures: int
    said: str


class EventList(BaseModel):
    """Events, the next one or the oldest first; `total`: of this state."""

    events: list[EventInfo]
    total: int


@router.get("/admin/webhooks", summary="List events of webhooks", response_model=EventList)
async def list_events(
    request: Request,
    state: Annotated[
        Literal["waiting", "dead"], Query(description="Not delivered yet, or given up.")
    ] = "waiting",
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Most events.")] = 100,
) -> Response:
    """Returns events that wait to be delivered, or that were given up."""
    client = own_pool(request).client
    async with asking_broker():
        content = await read_events(client, state, limit)
    return fresh_json(content.model_dump())


@router.post("/admin/webhooks/{event_id}/retry", summary="Send an event again")
async def retry(request: Request, event_id: Annotated[str, Path(description="Its `id`.")]) -> Response:
    """Sends an event at once that waits or was given up, and tries for as long as if it were new."""
    pool = own_pool(request)
    is_there = False
    if EVENT_ID.fullmatch(event_id):
        async with asking_broker():
            is_there = await pool.client.run(retry_webhook(pool.client.keys, event_id))
    if not is_there:
        raise ApiError(404, "not_found", "No event with this id waits or was given up")
    return fresh_json({"id": event_id, "state": "waiting"})


async def read_events(client: PoolClient, state: Literal["waiting", "dead"], limit: int) -> EventList:
    """Raises one of ERRORS of the broker."""
    key = client.keys.dead_webhooks if state == "dead" else client.keys.webhooks
    found = await client.redis.zrange(key, 0, limit - 1, withscores=True)
    async with client.redis.pipeline(transaction=False) as pipe:
        pipe.zcard(key)
        for event_id, _ in found:
            pipe.hgetall(client.keys.webhook_event(event_id.decode()))
        total, *hashes = await pipe.execute()
    events = [
        describe(StoredEvent(event_id.decode(), fields), state, at_ms)
        for (event_id, at_ms), fields in zip(found, hashes, strict=True)
        if fields
    ]
    return EventList(events=events, total=total)


def describe(event: StoredEvent, state: Literal["waiting", "dead"], at_ms: float) -> EventInfo:
    return EventInfo(
        id=event.id,
        state=state,
        created_at=event.number("made_ms") // 1000,
        at=int(at_ms // 1000),
        failures=event.number("failures"),
        said=event.text("said"),
        **target_of(event),
    )


def target_of(event: StoredEvent) -> Mapping[str, Any]:
    """Where an event goes, and what it says; empty texts for one that cannot be read."""
    try:
        webhook = event.webhook
        return {"type": type_of(event, webhook), "object_id": webhook.object_id, "url": webhook.url}
    except ValueError:
        return {"type": "", "object_id": "", "url": ""}
