"""Terms of a request: before which others, for which tenant and until when it is served; how long its answer
waits for its client; which pool serves it. Headers give them, and fields of bodies. A header comes before a
field: a proxy in front sets it.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

from pydantic import Field, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.types import Scope

from api.answers.answer import AnswerTerms
from api.errors import ApiError, quoted, refuse
from api.http import body
from api.http.auth import key_of, sent_key
from api.http.body import idempotency_key
from api.http.openapi import header
from api.requests.fields import NO_CLASS, RESUMES, TIERS, ClassName
from api.requests.pool import Pool
from api.requests.registry import PoolRegistry
from common.adapters import adapter_name
from common.api_keys import ApiKey
from common.broker.keys import RESULT_TTL_MS
from common.ids import CLIENTS_REQUEST_ID, TENANT
from common.messages.request import DEFAULT_CLASS, SERVICE_CLASSES, Generate, UsageAccount
from common.settings.settings import Settings

PRIORITY, TENANT_NAME, DEADLINE = "x-priority", "x-tenant", "x-deadline-ms"
RESUME_HEADER = "x-resume-seconds"
MAX_DEADLINE_MS = 7 * 86_400_000
REQUEST_ID_HEADER = "x-request-id"
TenantName = Annotated[str, Field(pattern=f"^{TENANT.pattern}$")]
HEADERS: Mapping[str, TypeAdapter[Any]] = {
    PRIORITY: TypeAdapter(Annotated[int | ClassName, NO_CLASS]),
    TENANT_NAME: TypeAdapter(TenantName),
    DEADLINE: TypeAdapter(Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)]),
    RESUME_HEADER: TypeAdapter(Annotated[float, Field(**RESUMES)]),
}
"""Headers that say how a request is served → what they may be, which /docs shows."""
DESCRIBED = {
    PRIORITY: "The class of the request: `interactive` before `standard` (the default) before `batch`. Or "
    "vLLM's number: below 0, 0, above 0.",
    TENANT_NAME: "Whose request it is: tenants have fair shares. Default: the tenant of the API key. With "
    "another than an admin's key, it must be that one.",
    DEADLINE: "The request ends with an error if it is not finished after this many milliseconds. Default, "
    "and the most: REQUEST_TIMEOUT_S.",
}
SERVICE_HEADERS = [
    *(header(name, words, **HEADERS[name].json_schema()) for name, words in DESCRIBED.items()),
    header(  # quotes around a key do not count
        "Idempotency-Key",
        "A random text, the same when the request is sent again: the answer is computed once, and each "
        "attempt gets it. It is forgotten after ANSWER_TTL_S.",
        type="string",
        maxLength=255,
        pattern=r"^[!-~]*[!#-~][!-~]*$",
    ),
]


def read_header(request: Request, name: str) -> Any:
    """What one of HEADERS says; None without it. Raises ApiError (422)."""
    if (given := request.headers.get(name)) is None:
        return None
    try:
        return HEADERS[name].validate_python(given)
    except ValidationError as error:
        raise body.schema_error(error, name) from error


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """What a client asks for.

    Attributes:
        service_class: one of SERVICE_CLASSES.
        tenant: who shares the fleet with others; empty for all who do not say.
        deadline_ms: time to live from the admission; None for REQUEST_TIMEOUT_S, the longest, or of a job for
            MAX_DEADLINE_MS.
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


def class_of(priority: str | int | None, tier: str | None, default: str = DEFAULT_CLASS) -> str:
    """The class that is asked for: by its name, or vLLM's number (the lower, the sooner; 0 is in the middle);
    or else by OpenAI's `service_tier`.
    """
    if isinstance(priority, int):
        return SERVICE_CLASSES[(priority >= 0) + (priority > 0)]
    return priority or (default if tier in (None, "auto") else TIERS[tier])


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
    key, own = key_of(request), read_header(request, PRIORITY)
    return ServiceTerms(
        class_of(priority if own is None else own, service_tier, default_class(key)),
        tenant_of(request),
        read_header(request, DEADLINE),
        key,
    )


def tenant_of(request: Request) -> str:
    """Whose request it is: the tenant that its header names, or else that of its key. Raises ApiError: 422;
    403 if the key is another tenant's.
    """
    key = key_of(request)
    named = checked_tenant(key, read_header(request, TENANT_NAME) or "", TENANT_NAME)
    tenant = named or (key.tenant if key else "")
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


def read_terms(
    request: Request, request_id: str, streamed: bool, resume_s: float | None, detached: bool | None
) -> AnswerTerms:
    """To whom the answer belongs, and how long it waits for a client that comes back. Raises ApiError (422).

    Args:
        resume_s, detached: the fields of the body.
    """
    given = read_header(request, RESUME_HEADER)
    name, seconds = ("resume_s", resume_s) if given is None else (RESUME_HEADER, given)
    field = "detached" if detached else name
    refuse(
        (
            None not in (given, resume_s),
            f"give the header `{RESUME_HEADER}` or the field `resume_s`, not both",
            "resume_s",
        ),
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


def pools_of(request: Request) -> PoolRegistry:
    return cast(PoolRegistry, request.app.state.pools)


def own_pool(request: Request) -> Pool:
    """The gateway's own pool, whatever model the request names."""
    return pools_of(request).own


async def pool_for(request: Request, model: str | None = None) -> Pool:
    """A pool that serves `model`, by default the gateway's own. Raises ApiError: 403 if the request's API key
    may not use that model, and as `PoolRegistry.find`.
    """
    pools = pools_of(request)
    pool = await pools.find(model) if model else pools.own
    await pool.adapter_of(pools.resolve(model), key_of(request))
    return pool
