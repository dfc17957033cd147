"""Lines of a batch: what a line of its input asks for, and the line of its answer. All of it is pure, so
every gateway makes the same bytes.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from api.errors import INSUFFICIENT_QUOTA, OPENAI_TYPES, ApiError
from api.jobs.job import Job, JobBody, digest_of
from api.json import TooDeep, is_too_deep
from api.protocols.table import protocol_of
from api.requests.service_terms import ServiceTerms

LINE_FIELDS = {"custom_id", "method", "url", "body"}
MAX_CUSTOM_ID = 512
STATUS_OF_TYPE = {kind: status for status, kind in OPENAI_TYPES.items()}
STATUS_OF_TYPE |= {INSUFFICIENT_QUOTA: 429, "server_error": 500}
STATUS_OF_CODE = {"model_not_found": 404, "unavailable": 503}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A valid line of the input; one with a `fault` is answered with it."""

    custom_id: str
    body: dict[str, Any]
    fault: ApiError | None = None


class LineFault(Exception):
    """A line that no batch can have: its code, what is wrong, and the field at fault."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def render(self, number: int) -> dict[str, Any]:
        """The fault as an item of a batch's `errors`. `number` counts from 1."""
        return {"code": self.code, "line": number, "message": self.message, "param": self.param}


def read_line(text: bytes, endpoint: str, max_bytes: int) -> BatchLine:
    """Raises LineFault."""
    if len(text) > max_bytes:
        raise LineFault("line_too_long", f"This line is longer than {max_bytes} bytes.")
    try:
        line = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise LineFault("invalid_json_line", f"This line is not parseable as valid JSON: {error}") from error
    if not isinstance(line, dict):
        raise LineFault("invalid_request", "This line is not a JSON object.")
    custom_id, body = line.get("custom_id"), line.get("body")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        why = f"`custom_id` must be a text of 1 to {MAX_CUSTOM_ID} characters."
        raise LineFault("invalid_custom_id", why, "custom_id")
    if line.get("method") != "POST":
        raise LineFault("invalid_method", "`method` must be POST.", "method")
    if line.get("url") != endpoint:
        raise LineFault("mismatched_url", f"`url` must be the batch's endpoint, {endpoint}.", "url")
    if unknown := sorted(line.keys() - LINE_FIELDS):
        raise LineFault("unknown_field", f"`{unknown[0][:100]}` is no field of a line.", unknown[0][:100])
    if not isinstance(body, dict):
        raise LineFault("missing_body", "`body` must be an object.", "body")
    if body.get("stream"):
        raise LineFault("invalid_body", "`body.stream` must be false or left out.", "body.stream")
    if is_too_deep(text):
        return BatchLine(custom_id, {}, ApiError(400, "invalid_json", f"Invalid JSON: {TooDeep()}"))
    return BatchLine(custom_id, body)


def make_job(line: BatchLine, job_id: str, entry_ms: int, number: int, terms: ServiceTerms, url: str) -> Job:
    """The job of a line. Its id and times are the same at every gateway and at every attempt."""
    protocol = protocol_of(url)
    own = {name: line.body.get(name) for name in protocol.prompt}
    given = {name: value for name, value in line.body.items() if name not in (*own, "model", "stream")}
    model = line.body.get("model")
    fields: dict[str, Any] = {**own, "parameters": given, "model": model}
    return Job(
        id=job_id,
        entry_id=f"{entry_ms}-{number}",
        digest=digest_of(fields),
        protocol=protocol,
        body=JobBody.model_construct(**fields),
        terms=terms,
        fault=line.fault or (None if model is None or isinstance(model, str) else bad_model()),
    )


def bad_model() -> ApiError:
    return ApiError(422, "validation", "`model` must be a text", "model")


def job_id_of(batch_id: str, number: int) -> str:
    return f"{batch_id}/{number}"


def digest_of_id(custom_id: str) -> bytes:
    """A digest of a custom id; a set of 50,000 takes some megabytes, however long the ids are."""
    return hashlib.blake2b(custom_id.encode(), digest_size=12).digest()


# --- answers ------------------------------------------------------------------------------------------------


def status_of(body: Mapping[str, Any]) -> int:
    """The status with which HTTP would give this answer."""
    error = body.get("error")
    if not isinstance(error, dict):
        return 200
    code, kind = error.get("code"), error.get("type")
    return STATUS_OF_CODE.get(str(code)) or STATUS_OF_TYPE.get(str(kind), 400)


def was_broken_off(answer: bytes) -> bool:
    """Whether a request did not finish for another reason than its own fault, as when it is cancelled."""
    return status_of(orjson.loads(answer)) >= 500


def render_answer(job_id: str, custom_id: str, answer: bytes) -> tuple[bool, bytes]:
    """Whether the request succeeded, and its line of the output or of the error file."""
    status = status_of(orjson.loads(answer))
    head = {"id": request_name(job_id), "custom_id": custom_id}
    response = {"status_code": status, "request_id": job_id, "body": orjson.Fragment(answer)}
    return status == 200, orjson.dumps(head | {"response": response, "error": None}) + b"\n"


def render_unserved(job_id: str, custom_id: str, code: str, message: str) -> bytes:
    """The line of the error file of a request that was not served."""
    head = {"id": request_name(job_id), "custom_id": custom_id, "response": None}
    return orjson.dumps(head | {"error": {"code": code, "message": message}}) + b"\n"


def request_name(job_id: str) -> str:
    return f"batch_req_{job_id.removeprefix('batch_').replace('/', '_')}"
