"""API keys: who may ask, for which tenant, and how much; what people may say of a key; and the records of
keys in Redis, which `tokenfleet keys` and the admin routes change and gateways watch.

Records are in one hash, key id → record, beside the field `version`, which changes with each of them.
"""

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from datetime import time as day_time
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from common.broker.keys import Keys
from common.broker.lua import Args, ScriptCall, call_script
from common.broker.pool_client import VERSION, ChangeRefused, PoolClient
from common.ids import KEY_ID, TENANT
from common.messages.codec import decode, decode_fields, encode, wire_field
from common.settings.fields import MAX_NUMBER, first_error, key_of_secret
from common.settings.settings import MAX_WEIGHT, MIN_WEIGHT

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


Limit = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Names = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=256)]
LATEST_S = 32_503_680_000
"""The year 3000."""


def to_unix_s(value: Any) -> Any:
    """Unix time of a date or a time in ISO 8601, which is UTC if it names no zone."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError as error:
            raise PydanticCustomError("date", "{why}", {"why": "must be a date, as 2027-01-31"}) from error
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, day_time())
    if isinstance(value, datetime):
        return int((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp())
    return value


class KeyFields(BaseModel):
    """The fields of a key that people choose, as in `ApiKey`. 0 is no limit."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(default="", max_length=128)
    tenant: str = Field(default="", pattern=f"^({TENANT.pattern})?$")
    service_class: Literal["", "interactive", "standard", "batch"] = ""
    weight: float = Field(default=1.0, ge=MIN_WEIGHT, le=MAX_WEIGHT)
    max_concurrent: Limit = 0
    requests_per_minute: Limit = 0
    tokens_per_minute: Limit = 0
    budget_tokens: Limit = 0
    models: Names = []
    adapters: Names = []
    expires_at: Annotated[int, BeforeValidator(to_unix_s), Field(ge=0, le=LATEST_S)] = 0
    admin: bool = False
    webhook: str = Field(default="", max_length=2048, pattern=r"^(https?://[\x21-\x7e]+)?$")
    webhook_secret: str = ""

    @field_validator("webhook_secret")
    @classmethod
    def check_secret(cls, secret: str) -> str:
        if secret:
            key_of_secret(secret)
        return secret

    @model_validator(mode="after")
    def check_webhook(self) -> "KeyFields":
        if bool(self.webhook) != bool(self.webhook_secret):
            raise ValueError("`webhook` and `webhook_secret` need each other")
        return self


def read_fields(given: dict[str, Any]) -> KeyFields:
    """Raises ValueError that names the field at fault."""
    try:
        return KeyFields.model_validate(given)
    except ValidationError as error:
        raise ValueError(first_error(error)) from error


log = logging.getLogger(__name__)

MAX_KEYS = 10_000
FORGOTTEN_S = 90 * 86_400
"""A key that was revoked, or has expired, is listed for this time, and then until another is added."""


class IssuedKey(NamedTuple):
    """A key and its record. The text is nowhere else."""

    text: str
    record: ApiKey


async def read_keys(client: PoolClient) -> dict[str, ApiKey]:
    """All keys, by id, the oldest first. A record that cannot be read is no key."""
    fields = await client.redis.hgetall(client.keys.api_keys)  # type: ignore[misc]
    found = decode_fields(ApiKey, fields)
    for name in {name.decode(errors="replace") for name in fields} - {*found, VERSION}:
        log.error("the API key %r cannot be read", name)
    return {one.key_id: one for one in sorted(found.values(), key=lambda one: (one.created_at, one.key_id))}


async def add_key(client: PoolClient, fields: KeyFields) -> IssuedKey:
    """Raises ChangeRefused."""
    text, now_s = new_key(), int(await client.read_time())
    own = {"key_id": f"key_{secrets.token_hex(6)}", "digest": digest_of(text)}
    record = ApiKey(**own | fields.model_dump(), created_at=now_s)
    if not record.tenant:  # a key is a tenant of its own: no other sees its requests
        record = replace(record, tenant=record.key_id)
    known = await read_keys(client)
    old = [one.key_id for one in known.values() if is_forgotten(one, now_s)]
    changed = await client.run(change_key(client.keys, record.key_id, b"", record, old))
    if changed < 0:
        raise ChangeRefused(f"there are {MAX_KEYS} keys, which is the most")
    if not changed:
        raise ChangeRefused(f"there is a key {record.key_id} already: try again")
    return IssuedKey(text, record)


def is_forgotten(key: ApiKey, now_s: float) -> bool:
    ended_s = key.revoked or key.expires_at
    return key.state(now_s) != "active" and ended_s + FORGOTTEN_S < now_s


async def revoke_key(client: PoolClient, key_id: str) -> ApiKey:
    """Revoke a key for ever; one that was revoked stays as it is. Raises ChangeRefused."""
    return await edit_key(client, key_id, lambda key, now_s: replace(key, revoked=key.revoked or int(now_s)))


async def rotate_key(client: PoolClient, key_id: str) -> IssuedKey:
    """Give a key another text; the old one counts no more. Raises ChangeRefused."""
    text = new_key()

    def rotated(key: ApiKey, now_s: float) -> ApiKey:
        if (state := key.state(now_s)) != "active":
            raise ChangeRefused(f"the key {key_id} is {state}: add another one")
        return replace(key, digest=digest_of(text))

    return IssuedKey(text, await edit_key(client, key_id, rotated))


async def edit_key(client: PoolClient, key_id: str, edit: Callable[[ApiKey, float], ApiKey]) -> ApiKey:
    """Change a record as `edit` says, and return it. Raises ChangeRefused."""
    data = await client.redis.hget(client.keys.api_keys, key_id)  # type: ignore[misc]
    if data is None or key_id == VERSION or not KEY_ID.fullmatch(key_id):
        raise ChangeRefused(f"there is no key {key_id[:64]!r}; `tokenfleet keys list` shows all", True)
    key = decode(ApiKey, data)
    edited = edit(key, await client.read_time())
    if edited != key and not await client.run(change_key(client.keys, key_id, data, edited)):
        raise ChangeRefused(f"somebody else has just changed the key {key_id}: try again")
    return edited


def change_key(
    keys: Keys, key_id: str, old: bytes, record: ApiKey, removed: Iterable[str] = ()
) -> ScriptCall[int]:
    """Write a record if the one in Redis is still `old`, b"" for none."""
    args: Args = {"key_id": key_id, "old": old, "new": encode(record), "max_keys": MAX_KEYS}
    return call_script("change_key", int, keys, args=args, more_args=[*removed])
