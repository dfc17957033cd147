"""Events of webhooks: their types, what a receiver is sent, and its signature (standardwebhooks.com). All of
it is pure.
"""

import base64
import hashlib
import hmac
from collections.abc import Collection

from api.json import to_json
from common.messages.events import FINISHED
from common.webhook_secret import key_of_secret
from common.webhooks.webhook import BATCH, JOB, REQUEST, RESPONSE, Webhook

EVENTS = {
    RESPONSE: ("completed", "incomplete", "failed", "cancelled"),
    REQUEST: ("completed", "failed", "cancelled"),
    JOB: ("completed", "failed", "cancelled"),
    BATCH: ("completed", "failed", "expired", "cancelled"),
}
"""What ends → how: an event's type is both, with a dot."""


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


WHOLE = ("eos_token", "stop_sequence")
"""Reasons of a response that was not cut."""


def payload_of(event_id: str, event_type: str, webhook: Webhook, made_s: int) -> bytes:
    """What a receiver is sent, in OpenAI's form: ids alone; it fetches the text with its own key."""
    return to_json(
        {
            "id": event_id,
            "object": "event",
            "created_at": made_s,
            "type": event_type,
            "data": {"id": webhook.object_id},
        }
    )


# --- signatures ---------------------------------------------------------------------------------------------


def signed_headers(secret: str, event_id: str, sent_s: int, payload: bytes) -> dict[str, str]:
    """The headers by which a receiver knows an event, and that it is ours."""
    signed = f"{event_id}.{sent_s}.".encode() + payload
    digest = hmac.digest(key_of_secret(secret), signed, hashlib.sha256)
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(sent_s),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
