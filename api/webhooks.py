"""Webhooks: where a client wants the event of its request's end, and the outbox that delivers the events of a
pool, signed as Standard Webhooks says.

Any gateway claims an event that is due; if it dies, the event is due again. So an event arrives at least
once, and a receiver knows by its id whether it has it. The event leaves the queue with the answer.
"""

import asyncio
import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import NamedTuple
from weakref import WeakValueDictionary

import httpcore
from pydantic import BaseModel, ConfigDict, Field
from standardwebhooks import Webhook as Signer

from api.errors import ApiError, asking_broker, invalid, overloaded
from api.event_loop import attempt, repeat_forever, retry_forever
from api.json import to_json
from api.outbound import PublicHosts, UrlError, check_target, read_url
from api.requests.fields import optional
from common.api_keys import ApiKey
from common.broker.lua import Args, call_script
from common.broker.pool_client import PoolClient
from common.messages.codec import decode, encode, wire_field
from common.messages.events import FINISHED
from common.messages.request import Generate
from common.metrics.catalogue import WEBHOOKS
from common.process.event_loop import until_beat
from common.settings.fields import key_of_secret
from common.settings.settings import Settings

log = logging.getLogger(__name__)

REQUEST, RESPONSE, JOB, BATCH = "request", "response", "job", "batch"
"""What ends: the first word of an event's type."""
DELIVERED, FAILED, DEAD = "delivered", "failed", "dead"
"""What becomes of an attempt; a dead event is sent no more."""
DEAD_TTL_S, MAX_DEAD = 7 * 86_400, 1000
"""How long jobs and events that failed for good are kept, and how many; they can be retried."""
DELIVERED_TTL_S = 3600
"""How long a delivered event is known: its end is not noted twice."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where an event goes.

    Attributes:
        kind: what ends: REQUEST, RESPONSE, JOB or BATCH.
        object_id: its id.
    """

    url: str = wire_field("u")
    secret: str = wire_field("s")
    kind: str = wire_field("k")
    object_id: str = wire_field("i")

    def text(self, made: str, place: int = 0, number: int = 1) -> bytes:
        """The webhook as scripts read it (`note_end` in webhooks.lua). An object has one end: one event.

        Args:
            made: tells the object from another of its id; the same for all who make this text.
            place, number: of the request among those of its answer, and how many these are.
        """
        name = f"{self.kind} {self.object_id} {made}".encode()
        event_id = "evt_" + hashlib.blake2b(name, digest_size=16).hexdigest()
        return f"{place} {number} {event_id}\n".encode() + encode(self)


class StoredEvent(NamedTuple):
    """What Redis has of an event."""

    id: str
    fields: Mapping[bytes, bytes]

    def number(self, name: str) -> int:
        return int(self.fields.get(name.encode(), b"0"))

    def text(self, name: str) -> str:
        return self.fields.get(name.encode(), b"").decode()

    @property
    def webhook(self) -> Webhook:
        """Where it goes. Raises WireError, a ValueError, if that cannot be read."""
        return decode(Webhook, self.fields.get(b"webhook", b""))


def type_of(event: StoredEvent, webhook: Webhook) -> str:
    """The type of an event: the one that an attempt has sent, or else by how its requests have ended. A
    response that ended within a call, or as a whole JSON at its last token, says otherwise of itself: see
    `WebhookSender.deliver`. Raises ValueError for an event of no end.
    """
    if known := event.text("type"):
        return known
    ends = [value.decode() for name, value in event.fields.items() if name.startswith(b"end:")]
    if webhook.kind in (JOB, BATCH):
        [end] = ends
    elif all(reason in FINISHED for reason in ends):
        was_cut = any(reason not in ("eos_token", "stop_sequence") for reason in ends)
        end = "incomplete" if was_cut and webhook.kind == RESPONSE else "completed"
    else:
        was_cancelled = all(reason in FINISHED or reason == "cancelled" for reason in ends)
        end = "cancelled" if was_cancelled else "failed"
    return f"{webhook.kind}.{end}"


# --- what a client names ------------------------------------------------------------------------------------


MAX_URL = 2048
MAX_WEBHOOKS = 100_000
"""Events that wait to be delivered; requests with a webhook are refused beyond it."""


class WebhookField(BaseModel):
    """Where the event of the end is sent: it is signed, and sent again until the receiver has it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    url: str = Field(
        description="An https: URL of the public internet, or a host of WEBHOOK_ALLOWED_HOSTS.",
        json_schema_extra={"maxLength": MAX_URL},
    )
    secret: str | None = optional(
        "Signs the events: `whsec_` and the base64 of 24 to 64 bytes. Default: WEBHOOK_SECRET.",
        {"pattern": "^whsec_"},
    )


def find_webhook(
    field: WebhookField | None, key: ApiKey | None, settings: Settings, kind: str, object_id: str
) -> Webhook | None:
    """The webhook of an object that ends: that of its body, or else that of its client's API key. Raises
    ApiError (422) that names the part at fault.
    """
    if field is None:
        return Webhook(key.webhook, key.webhook_secret, kind, object_id) if key and key.webhook else None
    check_url(field.url, settings)
    secret = field.secret or settings.webhook_secret
    if not secret:
        text = "`webhook.secret` must be given: this server has none of its own (WEBHOOK_SECRET)"
        raise invalid(text, "webhook.secret")
    try:
        key_of_secret(secret)
    except ValueError as error:
        raise invalid(f"`webhook.secret` {error}") from error
    return Webhook(field.url, secret, kind, object_id)


def check_url(url: str, settings: Settings, field: str = "webhook.url") -> None:
    """Raises ApiError (422) for a URL to which nothing will be sent."""
    if len(url) > MAX_URL:
        raise invalid(f"`{field}` is longer than {MAX_URL} characters")
    try:
        check_target(read_url(url), settings.webhook_allowed_hosts)
    except UrlError as error:
        raise invalid(f"`{field}` {error}") from error


async def check_room(client: PoolClient) -> None:
    """Raises ApiError: 429 while too many events wait to be delivered, 503."""
    async with asking_broker():
        num_waiting = await client.redis.zcard(client.keys.webhooks)
    if num_waiting >= MAX_WEBHOOKS:
        raise overloaded(f": {num_waiting} events of webhooks are not delivered", 60)


def with_webhook(
    requests: list[Generate],
    field: WebhookField | None,
    key: ApiKey | None,
    settings: Settings,
    kind: str,
    answer_id: str,
) -> list[Generate]:
    """The requests of an answer; the event of its end comes when all have ended. Raises ApiError (422)."""
    object_id = f"resp_{answer_id}" if kind == RESPONSE else answer_id
    webhook = find_webhook(field, key, settings, kind, object_id)
    if webhook is None:
        return requests
    made, number = uuid.uuid4().hex, len(requests)
    return [replace(one, webhook=webhook.text(made, i, number)) for i, one in enumerate(requests)]


# --- outbox -------------------------------------------------------------------------------------------------


WAITS_S = (5, 300, 1800, 7200, 18_000, 36_000, 21_600)
"""After each failure, about a day in all; an event that fails once more is dead."""
POLL_S = 0.5
TIMEOUT_S = 10.0  # of one attempt
LEASE_MS = 30_000  # while it lasts no other gateway sends the event
MAX_PLACE_WAIT_S = 15.0
"""An event that got no place within this time is not sent: it is due again when its lease is over."""
MAX_CLAIMED = 512  # events that are claimed at once
MAX_SENDING = 32  # events that one gateway sends at once
MAX_PER_RECEIVER = 4
"""Of these, to one host and port: a receiver that is slow to answer holds up no other."""
MAX_HELD = 1000
"""Events for one receiver that a gateway sends, or that wait for a place; more wait in the broker."""
CLOSE_TIMEOUT_S = 2.0


class WebhookSender:
    """Sends events of one pool.

    Attributes:
        read_status: how a response ended, by its id, as long as it is kept; may raise ApiError (503).
        held: attempts that run or wait for a place, and their receivers.
        places: of each receiver that has events here.
    """

    def __init__(
        self, client: PoolClient, settings: Settings, read_status: Callable[[str], Awaitable[str]]
    ) -> None:
        self.client = client
        self.settings = settings
        self.read_status = read_status
        self.held: dict[asyncio.Task[None], str] = {}
        self.all_places = asyncio.Semaphore(MAX_SENDING)
        self.places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self) -> None:
        """Never returns. At the end, attempts that run have a moment to finish."""
        try:
            await repeat_forever(self.look, "looking for webhooks")
        finally:
            if self.held:
                _, unfinished = await asyncio.wait(self.held, timeout=CLOSE_TIMEOUT_S)
                for task in unfinished:
                    task.cancel()

    async def look(self) -> None:
        """Claim what is due, and begin to send it; wait a while if that is not much."""
        args: Args = {"max_events": MAX_CLAIMED, "lease_ms": LEASE_MS}
        claimed = await self.client.run(call_script("claim_webhooks", list, self.client.keys, args=args))
        until_s, counts = asyncio.get_running_loop().time() + MAX_PLACE_WAIT_S, Counter(self.held.values())
        for name, fields in claimed:
            event = StoredEvent(name.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))
            try:
                webhook = event.webhook
                type_of(event, webhook)
                receiver = read_url(webhook.url).host_header
            except ValueError as error:
                await self.settle(event, "", DEAD, f"the event cannot be read: {error}")
                continue
            if counts[receiver] < MAX_HELD:
                counts[receiver] += 1
                task = asyncio.create_task(self.deliver(event, webhook, receiver, until_s))
                self.held[task] = receiver
                task.add_done_callback(self.held.pop)
        if len(claimed) < MAX_CLAIMED:
            await asyncio.sleep(until_beat(POLL_S))

    async def deliver(self, event: StoredEvent, webhook: Webhook, receiver: str, until_s: float) -> None:
        """Send an event once there is a place, and write what became of it. One that cannot be sent, whatever
        it is, counts as one that nobody takes, so that its attempts end.
        """
        places = self.places.setdefault(receiver, asyncio.Semaphore(MAX_PER_RECEIVER))
        async with places, self.all_places:
            if asyncio.get_running_loop().time() > until_s:
                return
            event_type = event.text("type")
            try:
                if not event_type:
                    status = await self.read_status(webhook.object_id) if webhook.kind == RESPONSE else ""
                    event_type = f"{RESPONSE}.{status}" if status else type_of(event, webhook)
                outcome, said = await self.post(event, event_type, webhook)
            except ApiError as error:  # the event is due again when its lease is over
                log.warning("webhook event %s waits: %s", event.id, error)
                return
            except Exception as error:
                log.exception("webhook event %s", event.id)
                outcome, said = FAILED, f"the event cannot be sent: {type(error).__name__}"
            await self.settle(event, event_type, outcome, said)

    async def post(self, event: StoredEvent, event_type: str, webhook: Webhook) -> tuple[str, str]:
        """Send an event once; return its outcome, and what the receiver answered or why it did not. No
        redirect is followed: a receiver cannot send the gateway to a service of its own network.
        """
        # ids alone, in OpenAI's form: a receiver fetches the text with its own key
        content = {"id": event.id, "object": "event", "created_at": event.number("made_ms") // 1000}
        payload = to_json(content | {"type": event_type, "data": {"id": webhook.object_id}})
        now = datetime.fromtimestamp(int(self.client.clock.now_s()), UTC)
        target = read_url(webhook.url)
        headers = {
            "host": target.host_header,
            "user-agent": "tokenfleet",
            "connection": "close",
            "content-type": "application/json",
            "content-length": str(len(payload)),
            "webhook-id": event.id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": Signer(webhook.secret).sign(event.id, now, payload.decode()),
        }
        try:
            named = [target.host] if check_target(target, self.settings.webhook_allowed_hosts) else []
            async with (
                asyncio.timeout(TIMEOUT_S),
                PublicHosts(named).connections() as pool,
                pool.stream("POST", target.url, headers=list(headers.items()), content=payload) as response,
            ):
                status = response.status
        except UrlError as error:
            return FAILED, f"the URL {error}"
        except TimeoutError:
            return FAILED, f"no answer within {TIMEOUT_S:g} s"
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            return FAILED, f"no answer: {type(error).__name__}"
        is_gone = status == HTTPStatus.GONE  # the receiver wants no more of these events
        return DELIVERED if 200 <= status < 300 else DEAD if is_gone else FAILED, f"status {status}"

    async def settle(self, event: StoredEvent, event_type: str, outcome: str, said: str) -> None:
        """Write what became of an attempt, however long the broker is away, unless a later one has begun.

        Args:
            event_type: that the receiver was sent; empty if it is not known.
            said: what the receiver answered.
        """
        failures = event.number("failures")
        if outcome == FAILED and failures >= len(WAITS_S):
            outcome = DEAD
        args: Args = {
            "event_id": event.id,
            "attempt": event.text("attempt"),
            "type": event_type,
            "outcome": outcome,
            "said": said,
            "wait_ms": 1000 * WAITS_S[failures] if outcome == FAILED else 0,
            "ttl_ms": 1000 * (DEAD_TTL_S if outcome == DEAD else DELIVERED_TTL_S),
            "max_dead": MAX_DEAD,
        }
        call = call_script("settle_webhook", bool, self.client.keys, args=args)
        if await attempt(partial(self.client.run, call), retry_forever):
            WEBHOOKS.add(1, outcome)
            level = logging.WARNING if outcome == DEAD else logging.INFO
            log.log(level, "webhook event %s %s: %s %s", event.id, event_type, outcome, said)
