"""Webhook messages: to whom the event of the end of a request, response, job or batch goes.

The hash of a request, job or batch has a webhook until the end comes; the script that writes the end makes
the event (common/broker/webhooks.lua). So both are there, or neither.
"""

import hashlib
from dataclasses import dataclass

from common.messages.codec import encode, wire_field

REQUEST, RESPONSE, JOB, BATCH = "request", "response", "job", "batch"
"""What ends: the first word of an event's type."""


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
        """The webhook as scripts read it (`note_end` in webhooks.lua).

        Args:
            made: tells the object from another of its id; the same for all who make this text.
            place, number: of the request among those of its answer, and how many these are.
        """
        event_id = event_id_of(self.kind, self.object_id, made)
        return f"{place} {number} {event_id}\n".encode() + encode(self)


def event_id_of(kind: str, object_id: str, made: str) -> str:
    """The id of an event, which receivers know it by. An object has one end, and so one event."""
    name = f"{kind} {object_id} {made}".encode()
    return "evt_" + hashlib.blake2b(name, digest_size=16).hexdigest()
