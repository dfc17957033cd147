"""Batch: its state in Redis, as OpenAI's object, and the choice of those that are served first."""

import dataclasses
import hashlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from api.errors import INSUFFICIENT_QUOTA, OPENAI_TYPES, ApiError
from api.jobs.files import StoredFile
from api.jobs.job import Job, JobBody, digest_of
from api.json import TooDeep, is_too_deep
from api.protocols.table import protocol_of
from api.requests.service_terms import ServiceTerms
from common.broker.pool_client import PoolClient

WINDOWS_S = {"1h": 3600, "24h": 86_400, "best_effort": None}
"""Completion windows → their seconds; None for no deadline."""
NO_DEADLINE_S = 10 * 365 * 86_400
"""What stands for the deadline of `best_effort`, in the order of service alone."""
ENDED = ("completed", "failed", "expired", "cancelled")
TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
FILES = ("output", "error")
WEBHOOK = b"webhook"
"""The field that says where the event of its end goes: for the script that writes the end."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What Redis has of a batch. `fields`: those that change.

    Attributes:
        tenant, key_id: who made it; requests are of that tenant, and count for that key.
        owner: whose it is.
        made_ms: Unix time; the lines' answers have it as `created`.
        digest: of the request that made it, if that had an `Idempotency-Key`.
    """

    id: str
    owner: str
    key_id: str
    endpoint: str
    input_file_id: str
    window: str
    made_ms: int
    metadata: dict[str, str]
    output_ttl_s: int | None
    fields: Mapping[str, str]
    digest: str = ""

    @property
    def member(self) -> str:
        return f"{self.owner} {self.id}"

    @property
    def deadline_s(self) -> float | None:
        """Unix time at which the batch expires."""
        seconds = WINDOWS_S[self.window]
        return None if seconds is None else self.made_ms / 1000 + seconds

    @property
    def order_ms(self) -> int:
        return self.made_ms + 1000 * (WINDOWS_S[self.window] or NO_DEADLINE_S)

    @property
    def status(self) -> str:
        status = self.fields["status"]
        return "cancelling" if status not in ENDED and "cancelling_at" in self.fields else status

    def number(self, name: str) -> int:
        return int(self.fields.get(name, "0"))

    def made(self) -> dict[str, str]:
        """The fields that never change, and the first status."""
        record = {
            "owner": self.owner,
            "key_id": self.key_id,
            "endpoint": self.endpoint,
            "input_file_id": self.input_file_id,
            "window": self.window,
            "made_ms": self.made_ms,
            "metadata": self.metadata,
            "output_ttl_s": self.output_ttl_s,
            "digest": self.digest,
        }
        return {"record": orjson.dumps(record).decode(), "status": "validating"}

    def file_id(self, kind: str) -> str:
        """The id of the output or the error file: the same whoever writes it."""
        return f"file-{self.id.removeprefix('batch_')}{kind}"

    def parts(self, kind: str) -> list[tuple[str, int]]:
        """Committed parts of a file, in order."""
        found = sorted((name, value) for name, value in self.fields.items() if name.startswith(f"{kind}:"))
        return [(value.split()[0], int(value.split()[1])) for _, value in found]

    def file(self, kind: str, now_s: int) -> StoredFile | None:
        """The record of a file that is made now; None if it has no lines."""
        parts = self.parts(kind)
        if not parts:
            return None
        return StoredFile(
            id=self.file_id(kind),
            owner=self.owner,
            filename=f"{self.id}_{kind}.jsonl",
            purpose="batch_output",
            num_bytes=sum(size for _, size in parts),
            created_at=now_s,
            expires_at=now_s + self.output_ttl_s if self.output_ttl_s else None,
            parts=parts,
        )

    def render(self) -> dict[str, Any]:
        """OpenAI's object."""
        fields = self.fields
        deadline_s = self.deadline_s
        counts = {name: self.number(name) for name in ("total", "completed", "failed")}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": orjson.loads(fields["errors"]) if "errors" in fields else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.window,
            "status": self.status,
            **{f"{kind}_file_id": fields.get(f"{kind}_file_id") for kind in FILES},
            "created_at": self.made_ms // 1000,
            "expires_at": None if deadline_s is None else int(deadline_s),
            **{name: int(fields[name]) if name in fields else None for name in TIMES},
            "request_counts": counts,
            "metadata": self.metadata or None,
        }


async def read_batch(client: PoolClient, batch_id: str) -> Batch | None:
    """None for a batch that is not there or cannot be read. Raises one of ERRORS."""
    return parse_batch(batch_id, await client.redis.hgetall(client.keys.batch(batch_id)))  # type: ignore[misc]


def parse_batch(batch_id: str, found: Mapping[bytes, bytes]) -> Batch | None:
    """A batch from its hash; None if it cannot be read. Fields of a later version are ignored."""
    try:
        record = orjson.loads(found[b"record"])
        given = {one.name: record[one.name] for one in dataclasses.fields(Batch) if one.name in record}
        rest = {name: value for name, value in found.items() if name not in (b"record", WEBHOOK)}
        fields = {name.decode(): value.decode() for name, value in rest.items()}
        return Batch(**given | {"id": batch_id, "fields": fields})
    except (KeyError, TypeError, ValueError):
        return None


async def needed_files(client: PoolClient) -> dict[str, str]:
    """Files that a batch which has not ended reads or writes → the id of that batch. Raises one of
    ERRORS.
    """
    members = await client.redis.zrange(client.keys.live_batches, 0, -1)
    ids = [member.decode().rpartition(" ")[2] for member in members]
    async with client.redis.pipeline(transaction=False) as pipe:
        for batch_id in ids:
            pipe.hget(client.keys.batch(batch_id), "record")
        records = await pipe.execute()
    read = [parse_batch(one, {b"record": record}) for one, record in zip(ids, records, strict=True)]
    batches = [batch for batch in read if batch is not None]
    return {name: one.id for one in batches for name in (one.input_file_id, *map(one.file_id, FILES))}


def choose_batches(live: Sequence[tuple[str, str]], max_batches: int) -> list[str]:
    """Which batches are served: tenants take turns, and each tenant's come by their deadlines.

    Args:
        live: owner and id, by deadline.
    """
    by_owner: defaultdict[str, deque[str]] = defaultdict(deque)
    for owner, batch_id in live:
        by_owner[owner].append(batch_id)
    turns, chosen = deque(by_owner.values()), list[str]()
    while turns and len(chosen) < max_batches:
        waiting = turns.popleft()
        chosen.append(waiting.popleft())
        if waiting:
            turns.append(waiting)
    return chosen


# --- lines --------------------------------------------------------------------------------------------------


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
