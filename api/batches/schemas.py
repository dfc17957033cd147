"""Bodies of /v1/files and /v1/batches, as OpenAI has them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.http.openapi import ApiObject
from api.protocols.table import BATCHES
from api.webhooks.field import WebhookField

MAX_METADATA, MAX_NAME, MAX_VALUE = 16, 64, 512


class OutputExpiry(BaseModel):
    """When the files of answers expire."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class BatchRequest(BaseModel):
    """The body of POST /v1/batches."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str
    endpoint: Literal[BATCHES]  # type: ignore[valid-type]
    completion_window: Literal["1h", "24h", "best_effort"]
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None
    webhook: WebhookField | None = None


class FileObject(ApiObject):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(ApiObject):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(ApiObject):
    id: str
    object: Literal["file"]
    deleted: bool


class RequestCounts(ApiObject):
    total: int
    completed: int
    failed: int


class BatchErrors(ApiObject):
    object: Literal["list"]
    data: list[dict[str, Any]]


class BatchObject(ApiObject):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(ApiObject):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
