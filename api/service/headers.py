"""Service terms over HTTP: headers, and fields of OpenAI's and vLLM's bodies. A header comes before a field:
it is what a proxy in front sets.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from api.http.openapi import json_body
from api.service.terms import (
    MAX_DEADLINE_MS,
    NUMBER,
    TENANT,
    ServiceTerms,
    chosen_class,
    read_class,
    read_deadline,
    read_tenant,
)
from common.messages.request import Generate
from common.messages.service_class import SERVICE_CLASSES
from common.settings.settings import Settings

PRIORITY, TENANT_NAME, DEADLINE = "x-priority", "x-tenant", "x-deadline-ms"
NUMBERS = {"minimum": -999_999_999, "maximum": 999_999_999}
SERVICE_HEADERS: list[dict[str, Any]] = [
    {
        "name": PRIORITY,
        "in": "header",
        "description": "The class of the request: `interactive` before `standard` (the default) before "
        "`batch`. Or vLLM's number: below 0, 0, above 0.",
        "schema": {"anyOf": [{"enum": list(SERVICE_CLASSES)}, {"type": "integer", **NUMBERS}]},
    },
    {
        "name": TENANT_NAME,
        "in": "header",
        "description": "Whose request it is: tenants have fair shares. Default: a digest of the API key.",
        "schema": {"type": "string", "pattern": f"^{TENANT}$"},
    },
    {
        "name": DEADLINE,
        "in": "header",
        "description": "The request ends with an error if it is not finished after so many milliseconds. "
        "Default, and the most: REQUEST_TIMEOUT_S.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_DEADLINE_MS},
    },
]


def generation_body(shape: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    """A route's `openapi_extra`, as of `json_body`, for a route that generates."""
    return json_body(shape, example) | {"parameters": SERVICE_HEADERS}


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
    given = request.headers
    chosen = chosen_class(priority, service_tier)
    terms = ServiceTerms(
        read_class(number_or_name(given[PRIORITY]), PRIORITY) if PRIORITY in given else chosen,
        read_tenant(given[TENANT_NAME], TENANT_NAME) if TENANT_NAME in given else key_digest(request),
        read_deadline(given[DEADLINE], DEADLINE) if DEADLINE in given else None,
    )
    return terms.apply(requests, settings)


def number_or_name(text: str) -> int | str:
    return int(text) if NUMBER.fullmatch(text) else text


def key_digest(request: Request) -> str:
    """A name for the owner of the API key that a client sent; empty without a key."""
    key = request.headers.get("authorization", "").partition(" ")[2].strip()
    return hashlib.blake2b(key.encode("latin-1"), digest_size=8).hexdigest() if key else ""
