"""The field `webhook` of request bodies: where a client wants the event of its request's end."""

import uuid
from collections.abc import Iterable
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field

from api.errors import asking_broker, invalid, overloaded, quoted
from api.outbound import TargetUrl, UrlError, check_literal, is_allowed, read_url
from common.api_keys import ApiKey
from common.broker.pool_client import PoolClient
from common.messages.request import Generate
from common.settings.settings import Settings
from common.webhook_secret import key_of_secret
from common.webhooks import RESPONSE, Webhook, types_of

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
    events: list[str] | None = Field(
        default=None,
        description="Types of events that are sent, as `response.completed`. Default: all.",
        json_schema_extra={"minItems": 1},
    )
    secret: str | None = Field(
        default=None,
        description="Signs the events: `whsec_` and the base64 of 24 to 64 bytes. Default: WEBHOOK_SECRET.",
        json_schema_extra={"pattern": "^whsec_"},
    )


def find_webhook(
    field: WebhookField | None, key: ApiKey | None, settings: Settings, kind: str, object_id: str
) -> Webhook | None:
    """The webhook of an object that ends: that of its body, or else that of its client's API key, which has
    all events. Raises ApiError (422).
    """
    if field is not None:
        return read_webhook(field, settings, kind, object_id)
    if key is not None and key.webhook:
        return Webhook(key.webhook, key.webhook_secret, [], kind, object_id)
    return None


def read_webhook(field: WebhookField, settings: Settings, kind: str, object_id: str) -> Webhook:
    """The webhook that a body names. Raises ApiError (422) that names the part at fault."""
    check_url(field.url, settings)
    events, known = field.events, types_of(kind)
    if events is not None and (not events or set(events) - set(known)):
        wrong = next((one for one in events if one not in known), "")
        text = f"`webhook.events` must be some of {', '.join(known)}. Given: {quoted(wrong)}"
        raise invalid(text, "webhook.events")
    secret = field.secret or settings.webhook_secret
    if not secret:
        text = "`webhook.secret` must be given: this server has none of its own (WEBHOOK_SECRET)"
        raise invalid(text, "webhook.secret")
    try:
        key_of_secret(secret)
    except ValueError as error:
        raise invalid(f"`webhook.secret` {error}", "webhook.secret") from error
    return Webhook(field.url, secret, list(dict.fromkeys(events or [])), kind, object_id)


def check_url(url: str, settings: Settings, field: str = "webhook.url") -> None:
    """Raises ApiError (422) for a URL to which nothing will be sent."""
    if len(url) > MAX_URL:
        raise invalid(f"`{field}` is longer than {MAX_URL} characters", field)
    try:
        check_target(read_url(url), settings.webhook_allowed_hosts)
    except UrlError as error:
        raise invalid(f"`{field}` {error}", field) from error


def check_target(target: TargetUrl, allowed_hosts: Iterable[str]) -> None:
    """Raises UrlError for http: and for an address that is not public, unless WEBHOOK_ALLOWED_HOSTS names the
    host.
    """
    if is_named(target, allowed_hosts):
        return
    if target.scheme != "https":
        raise UrlError("must begin with https:, as its host is not in WEBHOOK_ALLOWED_HOSTS")
    check_literal(target.host)


def is_named(target: TargetUrl, allowed_hosts: Iterable[str]) -> bool:
    return any(is_allowed(target, host) for host in allowed_hosts)


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
