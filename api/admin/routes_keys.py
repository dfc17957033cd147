"""Admin routes of API keys: GET and POST /admin/keys, and POST /admin/keys/{key_id}/revoke and …/rotate. They
do what `tokenfleet keys` does. A key's text is in the answer that makes it, and nowhere else.
"""

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel
from starlette.responses import Response

from api.errors import ApiError, asking_broker
from api.http import body
from api.http.openapi import (
    FLEET,
    TGI_ERRORS,
    ErrorResponse,
    Responses,
    error_responses,
    json_body,
    only,
)
from api.json import fresh_json
from api.requests.on_pool import own_pool
from api.requests.pool import Pool
from api.webhooks import check_url
from common import api_keys
from common.api_keys import ApiKey, IssuedKey, KeyChangeError, KeyFields, KeyState

ERRORS: Responses = only(TGI_ERRORS, 401, 403, 422, 503)
ERRORS |= error_responses(
    ErrorResponse,
    {404: "There is no such key", 409: "The key has ended, or the keys are in API_KEYS_FILE"},
)
router = APIRouter(responses=ERRORS, tags=[FLEET])
EXAMPLE = {"name": "reports", "tenant": "acme", "requests_per_minute": 60}
KeyId = Annotated[str, Path(description="Its `key_id`.")]


class KeyInfo(BaseModel):
    """A key without its text; 0 is no limit, and an empty list all names."""

    key_id: str
    name: str
    tenant: str
    state: KeyState
    service_class: str
    weight: float
    max_concurrent: int
    requests_per_minute: int
    tokens_per_minute: int
    budget_tokens: int
    models: list[str]
    adapters: list[str]
    created_at: int
    expires_at: int
    revoked: int
    admin: bool
    webhook: str


class KeyList(BaseModel):
    """All keys, the oldest first."""

    keys: list[KeyInfo]


class NewKey(KeyInfo):
    """A key with its text, which is shown this once."""

    key: str


@router.get("/admin/keys", summary="List API keys", response_model=KeyList)
async def list_keys(request: Request) -> Response:
    """Returns all keys, revoked and expired ones, too."""
    pool = checked_pool(request)
    if pool.settings.api_keys_file:
        known = pool.keys.by_id
    else:
        async with asking_broker():
            known = await api_keys.read_keys(pool.client)
    return fresh_json({"keys": [describe(pool, key) for key in known.values()]})


@router.post(
    "/admin/keys",
    summary="Add an API key",
    openapi_extra=json_body(KeyFields, EXAMPLE),
    response_model=NewKey,
)
async def create_key(request: Request) -> Response:
    """Adds a key, and returns it with its text. From the first one on every request needs a key."""
    pool = changeable(request)
    fields = await body.read(request, KeyFields, pool.settings.payload_limit)
    if fields.webhook:
        check_url(fields.webhook, pool.settings, "webhook")
    with change_errors():
        async with asking_broker():
            return respond_issued(pool, await api_keys.add_key(pool.client, fields))


@router.post("/admin/keys/{key_id}/revoke", summary="Revoke an API key", response_model=KeyInfo)
async def revoke(request: Request, key_id: KeyId) -> Response:
    """Ends a key for ever. Gateways refuse it within seconds, and its running requests end."""
    pool = changeable(request)
    with change_errors():
        async with asking_broker():
            return fresh_json(describe(pool, await api_keys.revoke_key(pool.client, key_id)))


@router.post("/admin/keys/{key_id}/rotate", summary="Give an API key another text", response_model=NewKey)
async def rotate(request: Request, key_id: KeyId) -> Response:
    """Returns the key with its new text; gateways refuse the old one within seconds. Its running requests go
    on.
    """
    pool = changeable(request)
    with change_errors():
        async with asking_broker():
            return respond_issued(pool, await api_keys.rotate_key(pool.client, key_id))


def checked_pool(request: Request) -> Pool:
    """The gateway's own pool. Raises ApiError (403) while requests need no key: then nobody is an admin."""
    pool = own_pool(request)
    if pool.keys.is_open:
        why = "There is no admin yet: set API_KEY, or run `tokenfleet keys add --admin`"
        raise ApiError(403, "forbidden", why)
    return pool


def changeable(request: Request) -> Pool:
    """The gateway's own pool. Raises ApiError: 403 as `checked_pool`, 409 if its keys are in a file."""
    pool = checked_pool(request)
    if pool.settings.api_keys_file:
        raise ApiError(409, "conflict", "The API keys of this fleet are in API_KEYS_FILE: change that file")
    return pool


@contextlib.contextmanager
def change_errors() -> Iterator[None]:
    """Turn a change that is refused into ApiError: 404 for an unknown key, else 409."""
    try:
        yield
    except KeyChangeError as error:
        status, kind = (404, "not_found") if error.is_unknown else (409, "conflict")
        raise ApiError(status, kind, str(error)) from error


def describe(pool: Pool, key: ApiKey) -> dict[str, Any]:
    fields = {name: getattr(key, name) for name in KeyInfo.model_fields if name != "state"}
    return KeyInfo(**fields, state=key.state(pool.client.clock.now_s())).model_dump()


def respond_issued(pool: Pool, issued: IssuedKey) -> Response:
    return fresh_json(describe(pool, issued.record) | {"key": issued.text})
