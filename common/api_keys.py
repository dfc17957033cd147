"""API keys: who may ask, for which tenant, and how much."""

import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal

from common.messages.codec import wire_field

STATIC_KEY_ID = "api_key"
"""Public name of the key in API_KEY, where there are other keys as well."""
KeyState = Literal["active", "revoked", "expired"]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of an API key. The key itself is not kept.

    Attributes:
        key_id: its public name.
        digest: SHA-256 of the key, in hexadecimal. A key has 256 random bits, so nobody can guess one that
            fits, and a slow hash would add nothing.
        tenant: whose requests it makes.
        service_class: class of its requests that name none; empty for the default.
        weight: share of its tenant among others, as in TENANT_WEIGHTS.
        max_concurrent: requests that are live at once; 0 is no limit, here and below.
        requests_per_minute, tokens_per_minute: rates; tokens of prompts and of answers.
        budget_tokens: tokens a calendar month (UTC).
        models, adapters: names that it may ask for; empty is all.
        expires_at: Unix time in seconds after which it is refused; 0 is never.
        revoked: Unix time in seconds at which it was revoked; 0 if it was not.
        admin: whether it may manage keys and see the usage of all tenants.
        name: what people call it.
        created_at: Unix time in seconds; 0 if it stands in a file.
        webhook: URL that is told of the end of all that it asks for; empty for none.
        webhook_secret: signs these events.
    """

    key_id: str = wire_field("id")
    digest: str = wire_field("dg")
    tenant: str = wire_field("tn", default="")
    service_class: str = wire_field("cl", default="")
    weight: float = wire_field("w", default=1.0)
    max_concurrent: int = wire_field("mc", default=0)
    requests_per_minute: int = wire_field("rm", default=0)
    tokens_per_minute: int = wire_field("tm", default=0)
    budget_tokens: int = wire_field("bt", default=0)
    models: list[str] = wire_field("ms", default_factory=list)
    adapters: list[str] = wire_field("ad", default_factory=list)
    expires_at: int = wire_field("ex", default=0)
    revoked: int = wire_field("rv", default=0)
    admin: bool = wire_field("am", default=False)
    name: str = wire_field("nm", default="")
    created_at: int = wire_field("ca", default=0)
    webhook: str = wire_field("wu", default="")
    webhook_secret: str = wire_field("ws", default="")

    def state(self, now_s: float) -> KeyState:
        """Whether the key counts at this Unix time, and why not."""
        if self.revoked:
            return "revoked"
        return "expired" if 0 < self.expires_at <= now_s else "active"


def digest_of(key: str | bytes) -> str:
    """SHA-256 of a key, in hexadecimal, by which a key is looked up.

    A slow hash protects words that people choose: it makes each guess dear. A key has 256 random bits, so
    guessing fails whatever a guess costs, and a slow hash would only cost each request its time. Who sends a
    guess chooses no prefix of its digest, so the time of a look-up by digest tells nothing of other keys.
    """
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def new_key() -> str:
    """A key with 256 random bits."""
    return f"tf-{secrets.token_urlsafe(32)}"


def new_key_id() -> str:
    return f"key_{secrets.token_hex(6)}"
