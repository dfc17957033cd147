"""Webhook sender: delivers the events of the pool that are due.

Any gateway claims an event for a while; if it dies, the event is due again. So an event arrives at least
once, and a receiver knows by its id whether it has it. The event leaves the queue with the receiver's answer.
"""

import asyncio
import logging
import random
import time
from functools import partial

from api.event_loop import attempt, repeat_forever, retry_forever
from api.webhooks.events import payload_of, signed_headers, type_of
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
    settle_webhook,
)
from common.webhooks.webhook import Webhook

log = logging.getLogger(__name__)

POLL_S = 0.5
LEASE_MS = 30_000
"""Longer than an attempt may take: while it runs, no other gateway sends the event."""
MAX_SENDING = 32
"""Events that one gateway sends at once."""
DELIVERED_TTL_MS = 3_600_000
"""How long a delivered event is known: its end is not noted twice."""
CLOSE_TIMEOUT_S = 2.0


class WebhookSender:
    """Sends events of one pool.

    Attributes:
        sending: attempts that run.
    """

    def __init__(self, client: PoolClient, settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.sending: set[asyncio.Task[None]] = set()

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
        free = MAX_SENDING - len(self.sending)
        due = await self.claim(free) if free else []
        for event in due:
            task = asyncio.create_task(self.deliver(event))
            self.sending.add(task)
            task.add_done_callback(self.sending.discard)
        if len(self.sending) < MAX_SENDING:
            await asyncio.sleep(until_beat(POLL_S))
        else:
            await asyncio.wait(self.sending, return_when=asyncio.FIRST_COMPLETED)

    async def claim(self, max_events: int) -> list[StoredEvent]:
        call = claim_webhooks(self.client.keys, max_events=max_events, lease_ms=LEASE_MS)
        return await self.client.run(call)

    async def deliver(self, event: StoredEvent) -> None:
        """Send an event once, and write what became of it."""
        try:
            webhook = decode(Webhook, event.fields.get("webhook", b""))
            event_type = type_of(webhook, event.ends)
        except (WireError, ValueError) as error:
            log.error("webhook event %s cannot be read: %s", event.id, error)
            await self.settle(event, DEAD, "the event cannot be read")
            return
        if webhook.events and event_type not in webhook.events:
            await self.settle(event, UNWANTED, "")
            return
        made_s = event.number("made_ms") // 1000
        payload = payload_of(event.id, event_type, webhook, made_s)
        headers = signed_headers(webhook.secret, event.id, int(time.time()), payload)
        made = await post(webhook.url, headers, payload, self.settings.webhook_allowed_hosts)
        await self.settle_attempt(event, made)

    async def settle_attempt(self, event: StoredEvent, made: Attempt) -> None:
        if made.is_delivered:
            await self.settle(event, DELIVERED, made.said)
            return
        since_ms = event.number("retried_ms") or event.number("made_ms")
        wait_s = next_wait_s(
            event.number("failures") + 1,
            time.time() - since_ms / 1000,
            self.settings.webhook_retry_s,
            random.random,
        )
        if made.is_gone or wait_s is None:
            await self.settle(event, DEAD, made.said)
        else:
            await self.settle(event, FAILED, made.said, wait_s)

    async def settle(self, event: StoredEvent, outcome: str, said: str, wait_s: float = 0.0) -> None:
        """Write what became of an attempt, however long the broker is away."""
        kept_ms = round(1000 * self.settings.webhook_dead_ttl_s) if outcome == DEAD else DELIVERED_TTL_MS
        call = settle_webhook(
            self.client.keys,
            event,
            outcome,
            said=said,
            wait_ms=round(1000 * wait_s),
            ttl_ms=kept_ms,
            max_dead=self.settings.max_dead_webhooks,
        )
        if await attempt(partial(self.client.run, call), retry_forever):
            WEBHOOKS.add(1, outcome)
            log.info("webhook event %s: %s %s", event.id, outcome, said)
