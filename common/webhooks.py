"""Events of webhooks: to whom an end is told, the types of events, and the scripts of the outbox.

The hash of a request, job or batch has its webhook until the end comes; the script that writes the end makes
the event (common/broker/webhooks.lua). So both are there, or neither.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.broker.keys import Keys
from common.broker.lua import Args, ScriptCall, call_script
from common.messages.codec import encode, wire_field
from common.messages.events import FINISHED

REQUEST, RESPONSE, JOB, BATCH = "request", "response", "job", "batch"
"""What ends: the first word of an event's type."""
EVENTS = {
    RESPONSE: ("completed", "incomplete", "failed", "cancelled"),
    REQUEST: ("completed", "failed", "cancelled"),
    JOB: ("completed", "failed", "cancelled"),
    BATCH: ("completed", "failed", "expired", "cancelled"),
}
"""What ends → how: an event's type is both, with a dot."""
WHOLE = ("eos_token", "stop_sequence")
"""Reasons of a response that was not cut."""
DELIVERED, FAILED, DEAD, UNWANTED = "delivered", "failed", "dead", "unwanted"
"""What becomes of an attempt; an event whose type its receiver does not want is not sent."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where an event goes.

    Attributes:
        events: types that are sent; empty for all.
        kind: what ends: REQUEST, RESPONSE, JOB or BATCH.
        object_id: its id.
    """

    url: str = wire_field("u")
    secret: str = wire_field("s")
    events: list[str] = wire_field("e")
    kind: str = wire_field("k")
    object_id: str = wire_field("i")

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
    def ends(self) -> list[str]:
        """How the requests of an answer have ended, or a batch."""
        return [value.decode() for name, value in self.fields.items() if name.startswith(b"end:")]


def types_of(kind: str) -> list[str]:
    return [f"{kind}.{end}" for end in EVENTS[kind]]


def type_of(webhook: Webhook, ends: Collection[str]) -> str:
    """The type of an event, by how its requests have ended. A response that ended within a call, or as a
    whole JSON at its last token, says otherwise of itself: see `WebhookSender.find_type`.

    Args:
        ends: the status of the job or batch, or the reason of each request's terminal.
    """
    if webhook.kind in (JOB, BATCH):
        [status] = ends
        return f"{webhook.kind}.{status}"
    if all(reason in FINISHED for reason in ends):
        is_cut = webhook.kind == RESPONSE and any(reason not in WHOLE for reason in ends)
        return f"{webhook.kind}.{'incomplete' if is_cut else 'completed'}"
    was_cancelled = all(reason in FINISHED or reason == "cancelled" for reason in ends)
    return f"{webhook.kind}.{'cancelled' if was_cancelled else 'failed'}"


def claim_webhooks(keys: Keys, *, max_events: int, lease_ms: int) -> ScriptCall[list[StoredEvent]]:
    """Claim events that are due; after `lease_ms` they are due again."""
    args: Args = {"max_events": max_events, "lease_ms": lease_ms}
    return call_script("claim_webhooks", read_claimed, keys, args=args)


def read_claimed(reply: list[Any]) -> list[StoredEvent]:
    return [
        StoredEvent(event_id.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))
        for event_id, fields in reply
    ]


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
        outcome: DELIVERED, FAILED, DEAD or UNWANTED.
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
