"""A job as another service writes it: JSON in the stream `submit`."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from api.errors import ApiError, invalid
from api.http.body import shaped

NAME = r"[A-Za-z0-9._:@/+=~-]{1,128}"
"""An id or a channel. Requests of a job are named `{id}#{choice}`, which is no name of a job."""
ADDRESS = ("id", "reply_to", "reply")
"""Fields that say where an answer goes: all others are the content."""


class JobBody(BaseModel):
    """The field `job`. Unlike bodies of HTTP it must not have other fields: whoever misspells `reply_to`
    would wait for ever.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str | None = Field(default=None, pattern=f"^{NAME}$")
    inputs: Any = None
    messages: Any = None
    parameters: dict[str, Any] | None = None
    model: str | None = None
    reply_to: str | None = Field(default=None, pattern=f"^ext:{NAME}$")
    reply: Literal["stream"] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A job that can be answered.

    Attributes:
        digest: of the content; the same id with another digest is a conflict.
        reply_to: where frames are published; empty where nowhere.
        in_stream: whether frames are kept in a stream.
        body: what is asked, unless `fault` says what is wrong with it.
    """

    id: str
    entry_id: str
    digest: str
    reply_to: str
    in_stream: bool
    is_chat: bool
    body: JobBody | None
    fault: ApiError | None = None

    @property
    def seed(self) -> int:
        """For a job that gives none: whoever serves it, and however often, draws the same."""
        return int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=8).digest(), "big") >> 1

    @property
    def created_s(self) -> int:
        """Unix time; of the entry, so that all who serve the job say the same."""
        return int(self.entry_id.partition("-")[0]) // 1000


def read(entry_id: str, fields: Mapping[bytes, bytes], max_bytes: int) -> Job:
    """The job of an entry. One with a fault has the entry's id, unless its own can be read."""
    try:
        given = content(fields, max_bytes)
    except ApiError as error:
        return Job(entry_id, entry_id, "", "", False, False, None, error)
    job_id, reply_to = given.get("id"), given.get("reply_to")
    known_id = job_id if isinstance(job_id, str) and re.fullmatch(NAME, job_id) else entry_id
    known_channel = reply_to if isinstance(reply_to, str) and re.fullmatch(f"ext:{NAME}", reply_to) else ""
    in_stream = given.get("reply") == "stream"
    body: JobBody | None = None
    fault: ApiError | None = None
    try:
        body = shaped(JobBody, orjson.dumps(given))
        check(body)
    except ApiError as error:
        fault = error
    return Job(known_id, entry_id, digest(given), known_channel, in_stream, "messages" in given, body, fault)


def content(fields: Mapping[bytes, bytes], max_bytes: int) -> dict[str, Any]:
    """Raises ApiError: 413, 400, 422."""
    data = fields.get(b"job")
    if data is None:
        raise invalid("the entry has no field `job`", "job")
    if len(data) > max_bytes:
        raise ApiError(413, "payload_too_large", f"The job is larger than {max_bytes} bytes")
    try:
        given = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "invalid_json", f"`job` is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise invalid("`job` must be an object", "job")
    try:
        orjson.dumps(given)
    except orjson.JSONEncodeError as error:
        raise invalid("`job` is nested too deeply", "job") from error
    return given


def check(body: JobBody) -> None:
    if (body.inputs is None) == (body.messages is None):
        raise invalid("either `inputs` or `messages` must be given", "inputs")


def digest(given: Mapping[str, Any]) -> str:
    asked = {name: value for name, value in given.items() if name not in ADDRESS}
    return hashlib.blake2b(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()
