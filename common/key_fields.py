"""Key fields: what people may say of an API key, in a file, on the command line and over HTTP."""

from datetime import UTC, date, datetime
from datetime import time as day_time
from typing import Annotated, Any, Literal

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

from common.api_keys import ApiKey
from common.ids import KEY_ID, TENANT
from common.settings.settings import MAX_WEIGHT, MIN_WEIGHT
from common.settings.types import MAX_NUMBER
from common.webhook_secret import key_of_secret

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

    def to_key(self, key_id: str, digest: str, created_at: int = 0) -> ApiKey:
        """The record of a key. A key without a tenant is a tenant of its own: no other sees its requests."""
        fields = self.model_dump() | {"tenant": self.tenant or key_id}
        return ApiKey(key_id=key_id, digest=digest, created_at=created_at, **fields)


class FileKeyFields(KeyFields):
    """A key in a file: its text, or its SHA-256."""

    key_id: str = Field(pattern=f"^{KEY_ID.pattern}$")
    key: str | None = Field(default=None, min_length=16, max_length=256, pattern="^[\\x21-\\x7e]+$")
    digest: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")


def read_fields(given: dict[str, Any]) -> KeyFields:
    """Raises ValueError that names the field at fault."""
    try:
        return KeyFields.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(f"`{'.'.join(map(str, problem['loc']))}`: {problem['msg']}") from error
