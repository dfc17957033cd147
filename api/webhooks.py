"""Webhooks: where a client wants the event of its request's end, and the outbox that delivers the events of a
pool, signed as Standard Webhooks says.

Any gateway claims an event that is due; if it dies, the event is due again. So an event arrives at least
once, and a receiver knows by its id whether it has it. The event leaves the queue with the answer.
"""

import asyncio
import contextlib
import logging
import ssl
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from weakref import WeakValueDictionary

import httpcore
from pydantic import BaseModel, ConfigDict, Field
from standardwebhooks import Webhook as Signer

from api.errors import ApiError, asking_broker, invalid, overloaded
from api.event_loop import attempt, repeat_forever, retry_forever
from api.jobs.scripts import DEAD_TTL_S, MAX_DEAD
from api.json import to_json
from api.outbound import PublicHosts, TargetUrl, UrlError, check_literal, is_allowed, read_url
from api.requests.fields import optional
from common.api_keys import ApiKey
from common.broker.pool_client import PoolClient
from common.messages.request import Generate
from common.metrics.catalogue import WEBHOOKS
from common.process.event_loop import until_beat
from common.settings.settings import Settings
from common.webhook_secret import key_of_secret
from common.webhooks import (
    DEAD,
    DELIVERED,
    FAILED,
    RESPONSE,
    StoredEvent,
    Webhook,
    claim_webhooks,
    settle_webhook,
    type_of,
)

log = logging.getLogger(__name__)

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
        raise invalid(f"`webhook.secret` {error}", "webhook.secret") from error
    return Webhook(field.url, secret, kind, object_id)


def check_url(url: str, settings: Settings, field: str = "webhook.url") -> None:
    """Raises ApiError (422) for a URL to which nothing will be sent."""
    if len(url) > MAX_URL:
        raise invalid(f"`{field}` is longer than {MAX_URL} characters", field)
    try:
        check_target(read_url(url), settings.webhook_allowed_hosts)
    except UrlError as error:
        raise invalid(f"`{field}` {error}", field) from error


def check_target(target: TargetUrl, allowed_hosts: Iterable[str]) -> bool:
    """Whether WEBHOOK_ALLOWED_HOSTS names the host. Raises UrlError for http: and for an address that is not
    public, unless it does.
    """
    if any(is_allowed(target, host) for host in allowed_hosts):
        return True
    if target.scheme != "https":
        raise UrlError("must begin with https:, as its host is not in WEBHOOK_ALLOWED_HOSTS")
    check_literal(target.host)
    return False


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
    """The requests of an answer; the event of its end comes when all of them have ended. Raises ApiError
    (422).
    """
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
TIMEOUT_S = 10.0
"""Of one attempt."""
LEASE_S = 30.0
"""While it lasts no other gateway sends the event."""
MAX_PLACE_WAIT_S = 15.0
"""An event that got no place within this time is not sent: it is due again when its lease is over."""
MAX_CLAIMED = 512
"""Events that are claimed at once."""
MAX_SENDING = 32
"""Events that one gateway sends at once."""
MAX_PER_RECEIVER = 4
"""Of these, to one host and port: a receiver that is slow to answer holds up no other."""
MAX_HELD = 1000
"""Events for one receiver that a gateway sends, or that wait for a place; more wait in the broker."""
DELIVERED_TTL_S = 3600.0
"""How long a delivered event is known: its end is not noted twice."""
CLOSE_TIMEOUT_S = 2.0
GONE = 410
"""The status of a receiver that wants no more of these events."""


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
        keys, lease_ms = self.client.keys, round(1000 * LEASE_S)
        claimed = await self.client.run(claim_webhooks(keys, max_events=MAX_CLAIMED, lease_ms=lease_ms))
        until_s, counts = asyncio.get_running_loop().time() + MAX_PLACE_WAIT_S, Counter(self.held.values())
        for event in claimed:
            try:
                webhook = event.webhook
                type_of(event, webhook)
            except ValueError as error:
                log.error("webhook event %s cannot be read: %s", event.id, error)
                await self.settle(event, "", DEAD, "the event cannot be read")
                continue
            receiver = ""  # host and port; empty for a URL that is none
            with contextlib.suppress(UrlError):
                receiver = read_url(webhook.url).host_header
            if counts[receiver] < MAX_HELD:
                counts[receiver] += 1
                task = asyncio.create_task(self.deliver_in_turn(event, webhook, receiver, until_s))
                self.held[task] = receiver
                task.add_done_callback(self.held.pop)
        if len(claimed) < MAX_CLAIMED:
            await asyncio.sleep(until_beat(POLL_S))

    async def deliver_in_turn(
        self, event: StoredEvent, webhook: Webhook, receiver: str, until_s: float
    ) -> None:
        """Deliver an event once there is a place. One that cannot be sent, whatever it is, counts as one that
        nobody takes, so that its attempts end.
        """
        places = self.places.setdefault(receiver, asyncio.Semaphore(MAX_PER_RECEIVER))
        async with places, self.all_places:
            if asyncio.get_running_loop().time() > until_s:
                return
            try:
                await self.deliver(event, webhook)
            except Exception as error:
                log.exception("webhook event %s", event.id)
                said = f"the event cannot be sent: {type(error).__name__}"
                await self.settle(event, event.text("type"), FAILED, said)

    async def deliver(self, event: StoredEvent, webhook: Webhook) -> None:
        """Send an event once, and write what became of it."""
        try:
            kept = event.text("type") or webhook.kind != RESPONSE
            status = "" if kept else await self.read_status(webhook.object_id)
            event_type = f"{RESPONSE}.{status}" if status else type_of(event, webhook)
        except ApiError as error:  # the event is due again when its lease is over
            log.warning("webhook event %s waits: %s", event.id, error)
            return
        # ids alone, in OpenAI's form: a receiver fetches the text with its own key
        content = {"id": event.id, "object": "event", "created_at": event.number("made_ms") // 1000}
        payload = to_json(content | {"type": event_type, "data": {"id": webhook.object_id}})
        now = datetime.fromtimestamp(int(self.client.clock.now_s()), UTC)
        headers = {
            "content-type": "application/json",
            "webhook-id": event.id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": Signer(webhook.secret).sign(event.id, now, payload.decode()),
        }
        outcome, said = await self.post(webhook.url, headers, payload)
        await self.settle(event, event_type, outcome, said)

    async def post(self, url: str, headers: Mapping[str, str], payload: bytes) -> tuple[str, str]:
        """Send an event once; return its outcome, and what the receiver answered or why it did not. No
        redirect is followed: a receiver cannot send the gateway to a service of its own network.
        """
        try:
            target = read_url(url)
            named = [target.host] if check_target(target, self.settings.webhook_allowed_hosts) else []
            own = {"host": target.host_header, "user-agent": "tokenfleet", "connection": "close"}
            whole = [*{**own, **headers, "content-length": str(len(payload))}.items()]
            connections = httpcore.AsyncConnectionPool(
                ssl_context=tls_context(), network_backend=PublicHosts(named), max_connections=1
            )
            async with (
                asyncio.timeout(TIMEOUT_S),
                connections,
                connections.stream("POST", target.url, headers=whole, content=payload) as response,
            ):
                status = response.status  # the body is not read
        except UrlError as error:
            return FAILED, f"the URL {error}"
        except TimeoutError:
            return FAILED, f"no answer within {TIMEOUT_S:g} s"
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            return FAILED, f"no answer: {type(error).__name__}"
        return DELIVERED if 200 <= status < 300 else DEAD if status == GONE else FAILED, f"status {status}"

    async def settle(self, event: StoredEvent, event_type: str, outcome: str, said: str) -> None:
        """Write what became of an attempt, however long the broker is away."""
        failures = event.number("failures")
        if outcome == FAILED and failures >= len(WAITS_S):
            outcome = DEAD
        call = settle_webhook(
            self.client.keys,
            event,
            outcome,
            event_type=event_type,
            said=said,
            wait_ms=1000 * WAITS_S[failures] if outcome == FAILED else 0,
            ttl_ms=round(1000 * (DEAD_TTL_S if outcome == DEAD else DELIVERED_TTL_S)),
            max_dead=MAX_DEAD,
        )
        if await attempt(partial(self.client.run, call), retry_forever):
            WEBHOOKS.add(1, outcome)
            log.info("webhook event %s: %s %s", event.id, outcome, said)


@cache
def tls_context() -> ssl.SSLContext:
    """Reading the certificates takes some 20 ms."""
    return httpcore.default_ssl_context()
