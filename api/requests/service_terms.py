"""Service terms: before which others, for which tenant and until when a request is served. Headers give them,
and fields of OpenAI's and vLLM's bodies. A header comes before a field: a proxy in front sets it.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from starlette.requests import Request

from api.errors import ApiError, invalid, quoted
from api.http.auth import key_of, sent_key
from api.http.openapi import header
from common.adapters import adapter_name
from common.api_keys import ApiKey
from common.ids import TENANT
from common.messages.request import DEFAULT_CLASS, SERVICE_CLASSES, Generate, UsageAccount
from common.settings.ranges import Range
from common.settings.settings import Settings

NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,8})")
NUMBERS = {"minimum": -999_999_999, "maximum": 999_999_999}
PRIORITY, TENANT_NAME, DEADLINE = "x-priority", "x-tenant", "x-deadline-ms"
MAX_DEADLINE_MS = 7 * 86_400_000
DEADLINES_MS = Range(1, MAX_DEADLINE_MS)
TIERS = {
    "auto": "standard",
    "default": "standard",
    "flex": "batch",
    "priority": "interactive",
    "scale": "interactive",
}
"""OpenAI's service tiers → classes."""

SERVICE_HEADERS = [
    header(
        PRIORITY,
        "The class of the request: `interactive` before `standard` (the default) before `batch`. Or vLLM's "
        "number: below 0, 0, above 0.",
        anyOf=[{"enum": list(SERVICE_CLASSES)}, {"type": "integer", **NUMBERS}],
    ),
    header(
        TENANT_NAME,
        "Whose request it is: tenants have fair shares. Default: the tenant of the API key. With another "
        "than an admin's key, it must be that one.",
        type="string",
        pattern=f"^{TENANT.pattern}$",
    ),
    header(
        DEADLINE,
        "The request ends with an error if it is not finished after this many milliseconds. Default, and "
        "the most: REQUEST_TIMEOUT_S.",
        type="integer",
        **DEADLINES_MS.schema,
    ),
    header(  # quotes around a key do not count
        "Idempotency-Key",
        "A random text, the same when the request is sent again: the answer is computed once, and each "
        "attempt gets it. It is forgotten after ANSWER_TTL_S.",
        type="string",
        maxLength=255,
        pattern=r"^[!-~]*[!#-~][!-~]*$",
    ),
]


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """What a client asks for.

    Attributes:
        service_class: one of SERVICE_CLASSES.
        tenant: who shares the fleet with others; empty for all who do not say.
        deadline_ms: time to live from the admission; None for REQUEST_TIMEOUT_S, the longest.
        key: of the client; None where there are no keys.
    """

    service_class: str = DEFAULT_CLASS
    tenant: str = ""
    deadline_ms: int | None = None
    key: ApiKey | None = None

    def apply(self, requests: Iterable[Generate], settings: Settings) -> list[Generate]:
        """Requests as they are served on these terms."""
        most_ms = round(settings.request_timeout_s * 1000)
        ttl_ms = most_ms if self.deadline_ms is None else min(self.deadline_ms, most_ms)
        key_id, weight = (self.key.key_id, self.key.weight) if self.key else ("", 0.0)
        return [
            replace(
                request,
                class_name=self.service_class,
                tenant=self.tenant,
                ttl_ms=ttl_ms,
                key_id=key_id,
                weight=weight,
                account=UsageAccount(
                    adapter_name(request.adapter) or settings.model_name,
                    budget_tokens=self.key.budget_tokens if self.key else 0,
                    pays_prompt=i % request.num_choices == 0,
                ),
            )
            for i, request in enumerate(requests)
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
    if not TENANT.fullmatch(tenant):
        raise invalid(
            f"`{name}` must be 1 to 64 letters, digits and . _ : @ / + ~ -. Given: {quoted(tenant)}", name
        )
    return tenant


def read_deadline(value: str | int, name: str) -> int:
    """Milliseconds. Raises ApiError (422)."""
    text = str(value).strip()
    if NUMBER.fullmatch(text) is None or not DEADLINES_MS.holds(int(text)):
        raise invalid(f"`{name}` must be {DEADLINES_MS} milliseconds. Given: {quoted(text)}", name)
    return int(text)


def chosen_class(priority: str | int | None, tier: str | None, default: str = DEFAULT_CLASS) -> str:
    """The class that a body asks for: by `priority`, or else by `service_tier`. Raises ApiError (422)."""
    if tier is not None and tier not in TIERS:
        tiers = ", ".join(TIERS)
        raise invalid(f"`service_tier` must be one of {tiers}. Given: {quoted(tier)}", "service_tier")
    tier_class = default if tier in (None, "auto") else TIERS[tier]
    return tier_class if priority is None else read_class(priority, "priority")


# --- over HTTP ----------------------------------------------------------------------------------------------


def on_terms(
    request: Request,
    requests: Iterable[Generate],
    settings: Settings,
    priority: str | int | None = None,
    service_tier: str | None = None,
) -> list[Generate]:
    """The requests on the terms that their client asks for. Raises ApiError (422).

    Args:
        priority, service_tier: the fields of the body.
    """
    given, key = request.headers, key_of(request)
    own = given.get(PRIORITY)
    chosen = chosen_class(priority, service_tier, default_class(key))
    terms = ServiceTerms(
        read_class(int(own) if NUMBER.fullmatch(own) else own, PRIORITY) if own is not None else chosen,
        tenant_of(request),
        read_deadline(given[DEADLINE], DEADLINE) if DEADLINE in given else None,
        key,
    )
    return terms.apply(requests, settings)


def tenant_of(request: Request) -> str:
    """Whose request it is: the tenant that its header names, or else that of its key. Raises ApiError: 422;
    403 if the key is another tenant's.
    """
    given, key = request.headers.get(TENANT_NAME), key_of(request)
    named = "" if given is None else read_tenant(given, TENANT_NAME)
    own = key.tenant if key else ""
    tenant = checked_tenant(key, named, TENANT_NAME) or own
    _, sent = sent_key(request)
    return tenant or (hashlib.blake2b(sent, digest_size=8).hexdigest() if sent else "")


def checked_tenant(key: ApiKey | None, named: str, field: str) -> str:
    """The tenant that a client names. Raises ApiError (403) if its key may not."""
    if key is not None and not key.admin and named not in ("", key.tenant):
        why = f"`{field}` names the tenant {quoted(named)}, and the key {key.key_id} is of {key.tenant!r}"
        raise ApiError(403, "forbidden", why, field)
    return named


def default_class(key: ApiKey | None, default: str = DEFAULT_CLASS) -> str:
    """The class of a request that names none."""
    return (key.service_class if key else "") or default
