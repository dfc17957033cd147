"""Events of webhooks: to whom an end is told, the types of events, and the scripts of the outbox.

The hash of a request, job or batch has its webhook until the end comes; the script that writes the end makes
the event (common/broker/webhooks.lua). So both are there, or neither.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.broker.keys import Keys
from common.broker.lua import Args, ScriptCall, call_script
from common.messages.codec import decode, encode, wire_field
from common.messages.events import FINISHED

REQUEST, RESPONSE, JOB, BATCH = "request", "response", "job", "batch"
"""What ends: the first word of an event's type."""
WHOLE = ("eos_token", "stop_sequence")
"""Reasons of a response that was not cut."""
DELIVERED, FAILED, DEAD = "delivered", "failed", "dead"
"""What becomes of an attempt."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where an event goes.

    Attributes:
        kind: what ends: REQUEST, RESPONSE, JOB or BATCH.
        object_id: its id.
        events: empty; gateways of an earlier version read it.
    """

    url: str = wire_field("u")
    secret: str = wire_field("s")
    kind: str = wire_field("k")
    object_id: str = wire_field("i")
    events: list[str] = wire_field("e", default_factory=list)

    def text(self, made: str, place: int = 0, number: int = 1) -> bytes:
        """The webhook as scripts read it (`note_end` in webhooks.lua). An object has one
        end, and so one event.

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
        is_cut = webhook.kind == RESPONSE and any(reason not in WHOLE for reason in ends)
        end = "incomplete" if is_cut else "completed"
    else:
        was_cancelled = all(reason in FINISHED or reason == "cancelled" for reason in ends)
        end = "cancelled" if was_cancelled else "failed"
    return f"{webhook.kind}.{end}"


def claim_webhooks(keys: Keys, *, max_events: int, lease_ms: int) -> ScriptCall[list[StoredEvent]]:
    """Claim events that are due; after `lease_ms` they are due again."""
    args: Args = {"max_events": max_events, "lease_ms": lease_ms}

    def read(reply: list[Any]) -> list[StoredEvent]:
        return [
            StoredEvent(name.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))
            for name, fields in reply
        ]

    return call_script("claim_webhooks", read, keys, args=args)


def settle_webhook(
    keys: Keys,
    event: StoredEvent,
    outcome: str,
    *,
    event_type: str,
    said: str,
    wait_ms: int,
    ttl_ms: int,
    max_dead: int,
) -> ScriptCall[bool]:
    """Write what became of an attempt. False if a later one has begun.

    Args:
        outcome: DELIVERED, FAILED or DEAD.
        event_type: that the receiver was sent; empty if it is not known.
        said: what the receiver answered.
        wait_ms: until the next attempt of an event that failed.
        ttl_ms: how long one that was delivered or is dead is kept.
    """
    args: Args = {
        "event_id": event.id,
        "attempt": event.text("attempt"),
        "type": event_type,
        "outcome": outcome,
        "said": said,
        "wait_ms": wait_ms,
        "ttl_ms": ttl_ms,
        "max_dead": max_dead,
    }
    return call_script("settle_webhook", bool, keys, args=args)


def retry_webhook(keys: Keys, event_id: str) -> ScriptCall[bool]:
    """Send an event that waits or is dead at once. False if there is none."""
    return call_script("retry_webhook", bool, keys, args={"event_id": event_id})
