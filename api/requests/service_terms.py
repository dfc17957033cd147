"""Terms of a request: before which others, for which tenant and until when it is served; how long its answer
waits for its client; which pool serves it. Headers give them, and fields of bodies. A header comes before a
field: a proxy in front sets it.
"""

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from starlette.requests import Request
from starlette.types import Scope

from api.answers.answer import AnswerTerms
from api.errors import ApiError, invalid, quoted, refuse
from api.http import body
from api.http.auth import key_of, sent_key
from api.http.body import idempotency_key
from api.http.openapi import header
from api.requests.fields import RESUMES_S, TIERS, ServedFields
from api.requests.pool import Pool
from api.requests.registry import PoolRegistry
from common.adapters import adapter_name
from common.api_keys import ApiKey
from common.broker.keys import RESULT_TTL_MS
from common.ids import CLIENTS_REQUEST_ID, TENANT
from common.messages.request import DEFAULT_CLASS, SERVICE_CLASSES, Generate, UsageAccount
from common.settings.ranges import Range
from common.settings.settings import Settings

NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,8})")
NUMBERS = {"minimum": -999_999_999, "maximum": 999_999_999}
PRIORITY, TENANT_NAME, DEADLINE = "x-priority", "x-tenant", "x-deadline-ms"
MAX_DEADLINE_MS = 7 * 86_400_000
DEADLINES_MS = Range(1, MAX_DEADLINE_MS)
REQUEST_ID_HEADER = "x-request-id"

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

    def apply(self, requests: Iterable[Generate], settings: Settings, adapter: str = "") -> list[Generate]:
        """Requests as they are served on these terms, with an adapter, if this is the key of one."""
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
                adapter=adapter or request.adapter,
                account=UsageAccount(
                    adapter_name(adapter or request.adapter) or settings.model_name,
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
            f"Given: {quoted(value)}"
        )
    return value


def read_tenant(tenant: str, name: str) -> str:
    """Raises ApiError (422)."""
    if not TENANT.fullmatch(tenant):
        raise invalid(
            f"`{name}` must be 1 to 64 letters, digits and . _ : @ / + ~ -. Given: {quoted(tenant)}"
        )
    return tenant


def read_deadline(value: str | int, name: str) -> int:
    """Milliseconds. Raises ApiError (422)."""
    text = str(value).strip()
    if NUMBER.fullmatch(text) is None or not DEADLINES_MS.holds(int(text)):
        raise invalid(f"`{name}` must be {DEADLINES_MS} milliseconds. Given: {quoted(text)}")
    return int(text)


def chosen_class(priority: str | int | None, tier: str | None, default: str = DEFAULT_CLASS) -> str:
    """The class that a body asks for: by `priority`, or else by `service_tier`. Raises ApiError (422)."""
    if tier is not None and tier not in TIERS:
        tiers = ", ".join(TIERS)
        raise invalid(f"`service_tier` must be one of {tiers}. Given: {quoted(tier)}")
    tier_class = default if tier in (None, "auto") else TIERS[tier]
    return tier_class if priority is None else read_class(priority, "priority")


# --- ids ----------------------------------------------------------------------------------------------------


def client_request_id(scope: Scope) -> str:
    """The id that the client sent; empty if it sent none, or one that cannot be echoed."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER.encode() and CLIENTS_REQUEST_ID.fullmatch(value):
            return cast(bytes, value).decode()
    return ""


def request_id(request: Request) -> str:
    """The request's id inside the fleet; choice n has this id and `.{n}`."""
    return cast(str, request.state.request_id)


# --- over HTTP ----------------------------------------------------------------------------------------------


def read_service(
    request: Request, priority: str | int | None = None, service_tier: str | None = None
) -> ServiceTerms:
    """The terms that a client asks for. Raises ApiError (422).

    Args:
        priority, service_tier: the fields of the body.
    """
    given, key = request.headers, key_of(request)
    own = given.get(PRIORITY)
    chosen = chosen_class(priority, service_tier, default_class(key))
    return ServiceTerms(
        read_class(int(own) if NUMBER.fullmatch(own) else own, PRIORITY) if own is not None else chosen,
        tenant_of(request),
        read_deadline(given[DEADLINE], DEADLINE) if DEADLINE in given else None,
        key,
    )


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


# --- life of an answer --------------------------------------------------------------------------------------


RESUME_HEADER = "x-resume-seconds"


def read_terms(
    request: Request, request_id: str, streamed: bool, resume_s: float | None, detached: bool | None
) -> AnswerTerms:
    """To whom the answer belongs, and how long it waits for a client that comes back. Raises ApiError (422).

    Args:
        resume_s, detached: the fields of the body.
    """
    given = request.headers.get(RESUME_HEADER)
    name, seconds = "resume_s" if given is None else RESUME_HEADER, resume_s
    field = "detached" if detached else name
    if given is not None:
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0  # it is refused as any number that is too low
    refuse(
        (
            None not in (given, resume_s),
            f"give the header `{RESUME_HEADER}` or the field `resume_s`, not both",
            "resume_s",
        ),
        (seconds is not None and not RESUMES_S.holds(seconds), f"`{name}` must be {RESUMES_S} seconds"),
        (detached and seconds is not None, f"`detached` waits for no client: leave `{name}` out", name),
        (not streamed and (seconds or detached), f"`{field}` needs a stream: only its client can come back"),
    )
    return AnswerTerms(
        owner_of(request, request_id),
        goes_on_s=math.inf if detached else seconds,
        kept_s=RESULT_TTL_MS / 1000 if detached else seconds or 0.0,
    )


def owner_of(request: Request, request_id: str) -> str:
    """Digest of a client's tenant, or without such keys of the API key that it sent, another one for each
    request; empty without a key. Raises ApiError as `tenant_of`.
    """
    owner = owner_bytes(request)
    salt = request_id.encode()[: hashlib.blake2b.MAX_KEY_SIZE]
    return hashlib.blake2b(owner, key=salt, digest_size=16).hexdigest() if owner else ""


def owner_bytes(request: Request) -> bytes:
    """A client's tenant, or without such keys the API key that it sent. Raises ApiError as `tenant_of`."""
    return b"tenant " + tenant_of(request).encode() if key_of(request) else sent_key(request)[1]


def answer_id(request: Request) -> str:
    """The id of a request's answer: that of the request, or with an `Idempotency-Key` the id that the key and
    its owner have. Raises ApiError: 400, and as `tenant_of`.
    """
    if not (key := idempotency_key(request)):
        return request_id(request)
    owner = hashlib.blake2b(owner_bytes(request)).digest()
    return hashlib.blake2b(key.encode(), key=owner, digest_size=16).hexdigest()


# --- which pool ---------------------------------------------------------------------------------------------


Shape = TypeVar("Shape", bound=ServedFields)


def pools_of(request: Request) -> PoolRegistry:
    return cast(PoolRegistry, request.app.state.pools)


def own_pool(request: Request) -> Pool:
    """The gateway's own pool, whatever model the request names."""
    return pools_of(request).own


async def read_body(request: Request, shape: type[Shape]) -> Shape:
    """The body of a route that names a model. Raises ApiError."""
    parsed = await body.read(request, shape, own_pool(request).max_body_bytes)
    parsed.check()
    return parsed


async def pool_for(request: Request, model: str | None = None) -> Pool:
    """A pool that serves `model`, by default the gateway's own. Raises ApiError: 403 if the request's API key
    may not use that model, and as `PoolRegistry.find`.
    """
    pools = pools_of(request)
    pool = await pools.find(model) if model else pools.own
    await pool.adapter_of(pools.resolve(model), key_of(request))
    return pool
