"""Service terms: before which others, for which tenant and until when a request is served."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from api.errors import invalid, quoted
from common.messages.request import Generate
from common.messages.service_class import DEFAULT_CLASS, SERVICE_CLASSES
from common.settings.settings import Settings

TENANT = r"[A-Za-z0-9._:@/+~-]{1,64}"
"""Pattern of a tenant's name; `=` and `,` divide TENANT_WEIGHTS."""
NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,8})")
MAX_DEADLINE_MS = 7 * 86_400_000
TIERS = {
    "auto": "standard",
    "default": "standard",
    "flex": "batch",
    "priority": "interactive",
    "scale": "interactive",
}
"""OpenAI's service tiers → classes."""


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """What a client asks for.

    Attributes:
        service_class: one of SERVICE_CLASSES.
        tenant: who shares the fleet with others; empty for all who do not say.
        deadline_ms: time to live from the admission; None for REQUEST_TIMEOUT_S, which is the most.
    """

    service_class: str = DEFAULT_CLASS
    tenant: str = ""
    deadline_ms: int | None = None

    def apply(self, requests: Iterable[Generate], settings: Settings) -> list[Generate]:
        """Requests as they are served on these terms."""
        most_ms = round(settings.request_timeout_s * 1000)
        ttl_ms = most_ms if self.deadline_ms is None else min(self.deadline_ms, most_ms)
        return [
            replace(request, class_name=self.service_class, tenant=self.tenant, ttl_ms=ttl_ms)
            for request in requests
        ]


def read_class(value: str | int, name: str) -> str:
    """The class that a name, or vLLM's number (the lower, the sooner; 0 is in the middle), asks for. Raises
    ApiError (422).
    """
    if isinstance(value, int):
        return SERVICE_CLASSES[(value >= 0) + (value > 0)]
    if value not in SERVICE_CLASSES:
        classes = ", ".join(SERVICE_CLASSES)
        raise invalid(
            f"`{name}` must be one of {classes}, or a whole number (the lower, the sooner). "
            f"Given: {quoted(value)}",
            name,
        )
    return value


def read_tenant(tenant: str, name: str) -> str:
    """Raises ApiError (422)."""
    if re.fullmatch(TENANT, tenant) is None:
        raise invalid(
            f"`{name}` must be 1 to 64 letters, digits and . _ : @ / + ~ -. Given: {quoted(tenant)}", name
        )
    return tenant


def read_deadline(value: str | int, name: str) -> int:
    """Milliseconds. Raises ApiError (422)."""
    text = str(value).strip()
    if NUMBER.fullmatch(text) is None or not 1 <= int(text) <= MAX_DEADLINE_MS:
        raise invalid(f"`{name}` must be 1 to {MAX_DEADLINE_MS} milliseconds. Given: {quoted(text)}", name)
    return int(text)


def chosen_class(priority: str | int | None, tier: str | None, default: str = DEFAULT_CLASS) -> str:
    """The class that a body asks for: by `priority`, or else by `service_tier`. Raises ApiError (422)."""
    if tier is not None and tier not in TIERS:
        tiers = ", ".join(TIERS)
        raise invalid(f"`service_tier` must be one of {tiers}. Given: {quoted(tier)}", "service_tier")
    tier_class = default if tier in (None, "auto") else TIERS[tier]
    return tier_class if priority is None else read_class(priority, "priority")
