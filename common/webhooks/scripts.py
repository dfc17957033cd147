"""Scripts of webhooks: one function for each Lua script that gateways run for events."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from common.broker.keys import Keys
from common.broker.lua import Args, ScriptCall, call_script

DELIVERED, FAILED, DEAD, UNWANTED = "delivered", "failed", "dead", "unwanted"
"""What becomes of an attempt; an event whose type its receiver does not want is not sent."""


class StoredEvent(NamedTuple):
    """What Redis has of an event."""

    id: str
    fields: Mapping[str, bytes]

    def number(self, name: str) -> int:
        return int(self.fields.get(name, b"0"))

    @property
    def ends(self) -> list[str]:
        """How the requests of an answer have ended, or a batch."""
        return [value.decode() for name, value in self.fields.items() if name.startswith("end:")]

    def text(self, name: str) -> str:
        return self.fields.get(name, b"").decode()


def stored_event(event_id: str, fields: Mapping[bytes, bytes]) -> StoredEvent:
    return StoredEvent(event_id, {name.decode(): value for name, value in fields.items()})


def claim_webhooks(keys: Keys, *, max_events: int, lease_ms: int) -> ScriptCall[list[StoredEvent]]:
    """Claim events that are due; after `lease_ms` they are due again."""
    args: Args = {"max_events": max_events, "lease_ms": lease_ms}
    return call_script("claim_webhooks", read_claimed, keys, args=args)


def read_claimed(reply: list[Any]) -> list[StoredEvent]:
    return [
        stored_event(event_id.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))
        for event_id, fields in reply
    ]


def postpone_webhooks(keys: Keys, events: Iterable[tuple[str, int]]) -> ScriptCall[None]:
    """Give claimed events back: each is due after so many ms."""
    parts = [part for event in events for part in event]
    return call_script("postpone_webhooks", lambda _: None, keys, args={}, more_args=parts)


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


def retry_webhook(keys: Keys, event_id: str, *, ttl_ms: int) -> ScriptCall[bool]:
    """Send an event that waits or is dead at once. False if there is none."""
    return call_script("retry_webhook", bool, keys, args={"event_id": event_id, "ttl_ms": ttl_ms})
