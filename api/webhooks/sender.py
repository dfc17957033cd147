"""Webhook sender: delivers the events of the pool that are due.

Any gateway claims an event for a while; if it dies, the event is due again. So an event arrives at least
once, and a receiver knows by its id whether it has it. The event leaves the queue with the receiver's answer.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

from api.errors import ApiError
from api.event_loop import attempt, repeat_forever, retry_forever
from api.outbound.addresses import UrlError, read_url
from api.webhooks.events import payload_of, signed_headers, type_of
from api.webhooks.places import BUSY_WAIT_MS, MAX_SENDING, choose
from api.webhooks.post import Attempt, post
from api.webhooks.schedule import next_wait_s
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode
from common.metrics.catalogue import WEBHOOKS
from common.process.event_loop import until_beat
from common.settings.settings import Settings
from common.webhooks.scripts import (
    DEAD,
    DELIVERED,
    FAILED,
    UNWANTED,
    StoredEvent,
    claim_webhooks,
    postpone_webhooks,
    settle_webhook,
)
from common.webhooks.webhook import RESPONSE, Webhook

log = logging.getLogger(__name__)

POLL_S = 0.5
LEASE_MS = 30_000
"""Longer than an attempt may take: while it runs, no other gateway sends the event."""
MAX_CLAIMED = 128
"""Events that are looked at, at once."""
DELIVERED_TTL_MS = 3_600_000
"""How long a delivered event is known: its end is not noted twice."""
CLOSE_TIMEOUT_S = 2.0


class ReadEvent(NamedTuple):
    """A claimed event, and to whom it goes."""

    stored: StoredEvent
    webhook: Webhook

    @property
    def receiver(self) -> str:
        """Host and port; empty for a URL that is none."""
        try:
            return read_url(self.webhook.url).host_header
        except UrlError:
            return ""


class WebhookSender:
    """Sends events of one pool.

    Attributes:
        read_status: how a response ended, by its id, as long as it is kept; may raise ApiError (503).
        sending: attempts that run, and their receivers.
    """

    def __init__(
        self, client: PoolClient, settings: Settings, read_status: Callable[[str], Awaitable[str]]
    ) -> None:
        self.client = client
        self.settings = settings
        self.read_status = read_status
        self.sending: dict[asyncio.Task[None], str] = {}

    async def run(self) -> None:
        """Never returns. At the end, attempts that run have a moment to finish."""
        try:
            await repeat_forever(self.look, "looking for webhooks")
        finally:
            if self.sending:
                _, unfinished = await asyncio.wait(self.sending, timeout=CLOSE_TIMEOUT_S)
                for task in unfinished:
                    task.cancel()

    async def look(self) -> None:
        """Begin to send what is due; wait a while if that is not much."""
        claimed = await self.claim()
        self.begin(await self.take_places(claimed))
        if len(self.sending) >= MAX_SENDING:
            await asyncio.wait(self.sending, return_when=asyncio.FIRST_COMPLETED)
        elif len(claimed) < MAX_CLAIMED:
            await asyncio.sleep(until_beat(BUSY_WAIT_MS / 1000 if self.sending else POLL_S))

    async def claim(self) -> list[StoredEvent]:
        call = claim_webhooks(self.client.keys, max_events=MAX_CLAIMED, lease_ms=LEASE_MS)
        return await self.client.run(call)

    async def take_places(self, claimed: Sequence[StoredEvent]) -> list[ReadEvent]:
        """The events for which there are places; the others are given back."""
        events = [event for stored in claimed if (event := await self.read(stored)) is not None]
        chosen = choose([event.receiver for event in events], Counter(self.sending.values()))
        if chosen.postponed:
            waits = [(events[i].stored.id, wait_ms) for i, wait_ms in chosen.postponed]
            await self.client.run(postpone_webhooks(self.client.keys, waits))
        return [events[i] for i in chosen.sent]

    async def read(self, stored: StoredEvent) -> ReadEvent | None:
        """The event; None for one that cannot be read, which is dead."""
        try:
            webhook = decode(Webhook, stored.fields.get("webhook", b""))
            type_of(webhook, stored.ends)
        except (WireError, ValueError) as error:
            log.error("webhook event %s cannot be read: %s", stored.id, error)
            await self.settle(stored, "", DEAD, "the event cannot be read")
            return None
        return ReadEvent(stored, webhook)

    def begin(self, events: Sequence[ReadEvent]) -> None:
        for event in events:
            task = asyncio.create_task(self.deliver_or_fail(event))
            self.sending[task] = event.receiver
            task.add_done_callback(self.sending.pop)

    async def deliver_or_fail(self, event: ReadEvent) -> None:
        """Deliver an event. One that cannot be sent, whatever it is, counts as one that nobody takes, so that
        its attempts end.
        """
        try:
            await self.deliver(event)
        except Exception as error:
            log.exception("webhook event %s", event.stored.id)
            made = Attempt(False, f"the event cannot be sent: {type(error).__name__}")
            await self.settle_attempt(event.stored, event.stored.text("type"), made)

    async def deliver(self, event: ReadEvent) -> None:
        """Send an event once, and write what became of it."""
        stored, webhook = event
        try:
            event_type = stored.text("type") or await self.find_type(event)
        except ApiError as error:  # the event is due again when its lease is over
            log.warning("webhook event %s waits: %s", stored.id, error)
            return
        if webhook.events and event_type not in webhook.events:
            await self.settle(stored, event_type, UNWANTED, "")
            return
        made_s = stored.number("made_ms") // 1000
        payload = payload_of(stored.id, event_type, webhook, made_s)
        headers = signed_headers(webhook.secret, stored.id, int(self.client.clock.now_s()), payload)
        made = await post(webhook.url, headers, payload, self.settings.webhook_allowed_hosts)
        await self.settle_attempt(stored, event_type, made)

    async def find_type(self, event: ReadEvent) -> str:
        """The type of an event that no attempt has sent: what the response says of itself, while it is kept.
        Raises ApiError (503).
        """
        stored, webhook = event
        status = await self.read_status(webhook.object_id) if webhook.kind == RESPONSE else ""
        return f"{RESPONSE}.{status}" if status else type_of(webhook, stored.ends)

    async def settle_attempt(self, event: StoredEvent, event_type: str, made: Attempt) -> None:
        if made.is_delivered:
            await self.settle(event, event_type, DELIVERED, made.said)
            return
        since_ms = event.number("retried_ms") or event.number("made_ms")
        wait_s = next_wait_s(
            event.number("failures") + 1,
            self.client.clock.now_s() - since_ms / 1000,
            self.settings.webhook_retry_s,
            random.random,
        )
        if made.is_gone or wait_s is None:
            await self.settle(event, event_type, DEAD, made.said)
        else:
            await self.settle(event, event_type, FAILED, made.said, wait_s)

    async def settle(
        self, event: StoredEvent, event_type: str, outcome: str, said: str, wait_s: float = 0.0
    ) -> None:
        """Write what became of an attempt, however long the broker is away."""
        kept_ms = round(1000 * self.settings.dead_ttl_s) if outcome == DEAD else DELIVERED_TTL_MS
        call = settle_webhook(
            self.client.keys,
            event,
            outcome,
            event_type=event_type,
            said=said,
            wait_ms=round(1000 * wait_s),
            ttl_ms=kept_ms,
            max_dead=self.settings.max_dead,
        )
        if await attempt(partial(self.client.run, call), retry_forever):
            WEBHOOKS.add(1, outcome)
            log.info("webhook event %s: %s %s", event.id, outcome, said)
