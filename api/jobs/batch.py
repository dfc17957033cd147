"""Batches: their state in Redis, their lines and answers, and the routes of Batch and Files APIs."""

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response, StreamingResponse

from api.errors import ApiError, asking_broker, cut, invalid, overloaded
from api.http import body
from api.http.auth import key_of
from api.http.body import REPLAYED, check_same, idempotency_key, noted_digest, schema_error
from api.http.openapi import (
    OPENAI,
    OPENAI_ERRORS,
    OpenAIError,
    Shape,
    answer,
    error_responses,
    json_body,
    json_schema,
)
from api.jobs.files import MAX_TTL_S, MIN_TTL_S, FileStore, StoredFile, UploadForm, new_id, upload
from api.jobs.job import Job, JobBody, digest_of
from api.json import TooDeep, is_too_deep, list_object, place_of
from api.protocols.table import BATCHES, protocol_of
from api.requests.fields import Labels
from api.requests.pool import Pool
from api.requests.service_terms import ServiceTerms, answer_id, own_pool, tenant_of
from api.webhooks import BATCH, WebhookField, check_room, find_webhook
from common.broker.keys import BATCH_TTL_MS
from common.broker.lua import Args, call_script, in_pairs
from common.broker.pool_client import PoolClient
from common.ids import BATCH_ID

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
    def status(self) -> str:
        status = self.fields["status"]
        return "cancelling" if status not in ENDED and "cancelling_at" in self.fields else status

    def number(self, name: str) -> int:
        return int(self.fields.get(name, "0"))

    def made(self) -> dict[str, str]:
        """The fields that never change, and the first status."""
        names = [one.name for one in dataclasses.fields(self) if one.name not in ("id", "fields")]
        record = {name: getattr(self, name) for name in names}
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


def choose_batches(live: Iterable[str], max_batches: int) -> list[str]:
    """Which batches are served: tenants take turns, and each tenant's come by their deadlines.

    Args:
        live: members of `live_batches`, by deadline.
    """
    by_owner = defaultdict[str, list[str]](list)
    for member in live:
        by_owner[member.rpartition(" ")[0]].append(member)
    return [one for turn in zip_longest(*by_owner.values()) for one in turn if one][:max_batches]


# --- lines --------------------------------------------------------------------------------------------------


class InputLine(BaseModel):
    """A line of the input."""

    model_config = ConfigDict(strict=True, extra="forbid")

    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of a batch; one with a `fault` is answered with it."""

    custom_id: str
    body: Mapping[str, Any]
    fault: ApiError | None = None


def line_fault(code: str, message: str, param: str | None = None) -> ApiError:
    """What is wrong with the input of a batch, which fails."""
    return ApiError(422, "validation", message, param, code)


def read_line(text: bytes, endpoint: str, max_bytes: int) -> BatchLine:
    """Raises ApiError: a `line_fault`."""
    if len(text) > max_bytes:
        raise line_fault("line_too_long", f"This line is longer than {max_bytes} bytes.")
    try:
        line = InputLine.model_validate(orjson.loads(text))
    except orjson.JSONDecodeError as error:
        raise line_fault("invalid_json_line", f"This line is not parseable as valid JSON: {error}") from error
    except ValidationError as error:
        fault = schema_error(error)
        what = fault.param if fault.param in InputLine.model_fields else "request"
        raise line_fault(f"invalid_{what}", fault.text, fault.param) from error
    if line.url != endpoint:
        raise line_fault("mismatched_url", f"`url` must be the batch's endpoint, {endpoint}.", "url")
    if line.body.get("stream"):
        raise line_fault("invalid_body", "`body.stream` must be false or left out.", "body.stream")
    if is_too_deep(text):
        return BatchLine(line.custom_id, {}, ApiError(400, "invalid_json", f"Invalid JSON: {TooDeep()}"))
    return BatchLine(line.custom_id, line.body)


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
        fault=line.fault or (None if isinstance(model, str | None) else invalid("`model` must be a text")),
    )


def job_id_of(batch_id: str, number: int) -> str:
    return f"{batch_id}/{number}"


# --- answers ------------------------------------------------------------------------------------------------


def render_line(
    job_id: str, custom_id: str, status: int, answer: bytes, unserved: tuple[str, str] | None
) -> bytes:
    """The line of the output or of the error file.

    Args:
        unserved: code and message of a request that was not served; else None.
    """
    response = {"status_code": status, "request_id": job_id, "body": orjson.Fragment(answer)}
    ended: dict[str, Any] = {"response": response, "error": None}
    if unserved is not None:
        ended = {"response": None, "error": dict(zip(("code", "message"), unserved, strict=True))}
    name = f"batch_req_{job_id.removeprefix('batch_').replace('/', '_')}"
    return orjson.dumps({"id": name, "custom_id": custom_id, **ended}) + b"\n"


# --- schemas ------------------------------------------------------------------------------------------------


MAX_BATCHES = 10_000
"""Batches that the pool keeps; those that have ended leave first."""
MAX_FILES = 10_000
"""Of one tenant."""


class OutputExpiry(BaseModel):
    """When the files of answers expire."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_TTL_S, le=MAX_TTL_S)


class BatchRequest(BaseModel):
    """The body of POST /v1/batches."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str
    endpoint: Literal[BATCHES]  # type: ignore[valid-type]
    completion_window: Literal["1h", "24h", "best_effort"]
    metadata: Labels | None = None
    output_expires_after: OutputExpiry | None = None
    webhook: WebhookField | None = None


def page_of(name: str, item: Shape) -> Shape:
    ids = {"first_id": (item.example["id"], None), "last_id": (item.example["id"], None)}
    return Shape(name, {"object": "list", "data": [item.example], **ids, "has_more": False})


SHOWN_FILE = StoredFile("file-abc", "", "lines.jsonl", "batch", 140, 1764000000, None, [])
FILE = Shape("FileObject", SHOWN_FILE.render() | {"expires_at": (None, 1766592000)})
DELETED_FILE = Shape("DeletedFile", {"id": "file-abc", "object": "file", "deleted": True})
SHOWN_BATCH = Batch(
    "batch_abc", "", "", BATCHES[0], "file-abc", "24h", 1764000000000, {}, None, {"status": "in_progress"}
)
BATCH_SHAPE = Shape(
    "BatchObject",
    SHOWN_BATCH.render()
    | {
        "errors": (None, {"object": "list", "data": [{}]}),
        "status": (*ENDED, "validating", "in_progress", "finalizing", "cancelling"),
        "output_file_id": ("file-def", None),
        "error_file_id": (None, "file-ghi"),
        **dict.fromkeys(("expires_at", *TIMES), (1764000060, None)),
        "metadata": (None, {}),
    },
)


# --- routes -------------------------------------------------------------------------------------------------


router = APIRouter(
    responses=OPENAI_ERRORS
    | error_responses(
        OpenAIError,
        {
            404: "There is no such object, or it is another tenant's",
            409: "A batch that has not ended needs the file",
            501: "FILES_DIR names no place for files",
        },
    ),
    tags=[OPENAI],
)
FileId = Annotated[str, Path(description="The `id` of a file.")]
BatchId = Annotated[str, Path(description="The `id` of a batch.")]
EXAMPLE = {"input_file_id": "file-abc", "endpoint": BATCHES[0], "completion_window": "24h"}
FORM = {
    "requestBody": {
        "required": True,
        "content": {"multipart/form-data": {"schema": json_schema(UploadForm, "validation")}},
    }
}


def store_of(request: Request) -> FileStore:
    """Raises ApiError (501) where no place for files is set."""
    store: FileStore | None = request.app.state.files
    if store is None:
        text = "This server keeps no files: FILES_DIR names no folder or store for them"
        raise ApiError(501, "no_file_store", text, code="no_file_store")
    return store


# --- files --------------------------------------------------------------------------------------------------


@router.post("/v1/files", summary="Upload a file", responses=answer(FILE), openapi_extra=FORM)
async def create_file(request: Request) -> dict[str, Any]:
    """Keeps a file, by default 30 days if it is for a batch."""
    store, owner = store_of(request), tenant_of(request)
    if len(await store.names(owner)) >= MAX_FILES:
        raise ApiError(400, "too_many_files", f"A tenant may keep {MAX_FILES} files", "file")
    return (await upload(request, store, owner)).render()


@router.get("/v1/files", summary="List files", responses=answer(page_of("FileList", FILE)))
async def list_files(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
    purpose: str | None = None,
) -> dict[str, Any]:
    """Lists the caller's files, the newest first. The list begins after the file with the id `after`."""
    store, owner = store_of(request), tenant_of(request)
    names = sorted(await store.names(owner), reverse=order == "desc")
    found = list[StoredFile]()
    for name in names[place_of(names, after, "after") + 1 :]:
        try:
            file = await store.find(owner, name)
        except ApiError as error:
            if error.status != 404:
                raise
            continue
        if purpose in (None, file.purpose):
            found.append(file)
        if len(found) > limit:
            break
    return list_object([file.render() for file in found], limit)


@router.get("/v1/files/{file_id}", summary="Retrieve a file", responses=answer(FILE))
async def retrieve_file(request: Request, file_id: FileId) -> dict[str, Any]:
    """Returns what is known of a file."""
    return (await store_of(request).find(tenant_of(request), file_id)).render()


@router.delete("/v1/files/{file_id}", summary="Delete a file", responses=answer(DELETED_FILE))
async def delete_file(request: Request, file_id: FileId) -> dict[str, Any]:
    """Deletes a file. It is refused while a batch that has not ended needs the file."""
    store = store_of(request)
    file = await store.find(tenant_of(request), file_id)
    async with asking_broker():
        needed = await needed_files(own_pool(request).client)
    if file.id in needed:
        text = f"The batch {needed[file.id]} needs this file: cancel the batch, or wait for its end"
        raise ApiError(409, "conflict", text, "file_id", code="file_in_use")
    await store.delete(file)
    return {"id": file_id, "object": "file", "deleted": True}


@router.get(
    "/v1/files/{file_id}/content",
    summary="Retrieve the content of a file",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
    },
)
async def retrieve_content(request: Request, file_id: FileId) -> Response:
    """Sends the bytes of a file."""
    store = store_of(request)
    file = await store.find(tenant_of(request), file_id)
    headers = {"content-length": str(file.num_bytes)}
    return StreamingResponse(store.read(file), 200, headers, "application/octet-stream")


# --- batches ------------------------------------------------------------------------------------------------


@router.post(
    "/v1/batches",
    summary="Create a batch",
    responses=answer(BATCH_SHAPE),
    openapi_extra=json_body(BatchRequest, EXAMPLE),
)
async def create_batch(request: Request, response: Response) -> dict[str, Any]:
    """Answers all requests of a file, in the gaps that other requests leave. The answers come as a file. With
    the `Idempotency-Key` of an earlier request, the batch is the one that was made then.
    """
    store, pool, owner = store_of(request), own_pool(request), tenant_of(request)
    asked = await body.read(request, BatchRequest, pool.max_body_bytes)
    async with asking_broker():
        now_s = await pool.client.read_time()
    batch_id = id_by_key(request, owner) if idempotency_key(request) else new_id("batch_", now_s)
    if (earlier := await read_earlier(request, batch_id)) is None:
        file = await store.find(owner, asked.input_file_id)
        if file.purpose != "batch":
            text = f"`input_file_id` must be a file for `batch`, not for {file.purpose}"
            raise invalid(text, "input_file_id")
        key = key_of(request)
        batch = Batch(
            id=batch_id,
            owner=owner,
            key_id=key.key_id if key else "",
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            window=asked.completion_window,
            made_ms=int(1000 * now_s),
            metadata=asked.metadata or {},
            output_ttl_s=asked.output_expires_after.seconds if asked.output_expires_after else None,
            fields={"status": "validating"},
            digest=noted_digest(request),
        )
        if webhook := find_webhook(asked.webhook, key, pool.settings, BATCH, batch_id):
            await check_room(pool.client)
        if await keep(pool, batch, webhook.text("") if webhook else b""):
            return batch.render()
        earlier = await read_earlier(request, batch_id)
        assert earlier is not None, "it has just been seen, and stays for days"
    response.headers[REPLAYED] = "true"
    return earlier.render()


def id_by_key(request: Request, owner: str) -> str:
    """The id that a batch has by its `Idempotency-Key` and its owner. Raises ApiError (400)."""
    digest = hashlib.blake2b(f"{answer_id(request)} {owner}".encode(), digest_size=16)
    return f"batch_{digest.hexdigest()}"


async def read_earlier(request: Request, batch_id: str) -> Batch | None:
    """The batch of an earlier request with this `Idempotency-Key`; None without a key. Raises ApiError: 409
    if that request had another body, 503.
    """
    if not idempotency_key(request):
        return None
    async with asking_broker():
        batch = await read_batch(own_pool(request).client, batch_id)
    if batch is not None:
        check_same(request, batch.digest)
    return batch


async def keep(pool: Pool, batch: Batch, webhook: bytes) -> bool:
    """Keep a new batch, and where the event of its end goes; False if one with its id was kept meanwhile.
    Raises ApiError: 429, 503.
    """
    args: Args = {
        "member": batch.member,
        "made_ms": batch.made_ms,
        "deadline_ms": batch.made_ms + 1000 * (WINDOWS_S[batch.window] or NO_DEADLINE_S),
        "ttl_ms": BATCH_TTL_MS,
        "max_batches": MAX_BATCHES,
    }
    fields = in_pairs(batch.made() | ({"webhook": webhook} if webhook else {}))
    call = call_script("create_batch", bytes.decode, pool.client.keys, batch.id, args=args, more_args=fields)
    async with asking_broker():
        kept = await pool.client.run(call)
    if kept == "full":
        raise overloaded(f": {MAX_BATCHES} batches have not ended", 60)
    return kept == "new"


@router.get("/v1/batches", summary="List batches", responses=answer(page_of("BatchList", BATCH_SHAPE)))
async def list_batches(
    request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> dict[str, Any]:
    """Lists the caller's batches, the newest first. The list begins after the batch with the id `after`."""
    store_of(request)
    pool, owner = own_pool(request), tenant_of(request)
    async with asking_broker():
        members = await pool.client.redis.zrange(pool.client.keys.batches, 0, -1, desc=True)
        pairs = [member.decode().rpartition(" ") for member in members]
        names = [name for whose, _, name in pairs if whose == owner]
        begin = place_of(names, after, "after") + 1
        found = [await read_batch(pool.client, name) for name in names[begin : begin + limit + 1]]
    return list_object([batch.render() for batch in found if batch is not None], limit)


@router.get("/v1/batches/{batch_id}", summary="Retrieve a batch", responses=answer(BATCH_SHAPE))
async def retrieve_batch(request: Request, batch_id: BatchId) -> dict[str, Any]:
    """Returns how far a batch is."""
    return (await find_batch(request, batch_id)).render()


@router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch", responses=answer(BATCH_SHAPE))
async def cancel_batch(request: Request, batch_id: BatchId) -> dict[str, Any]:
    """Ends a batch. Requests that are answered already stay in its files."""
    batch, pool = await find_batch(request, batch_id), own_pool(request)
    args: Args = {"member": batch.member, "cancelling_at": int(pool.client.clock.now_s())}
    call = call_script("cancel_batch", bool, pool.client.keys, batch_id, args=args)
    async with asking_broker():
        await pool.client.run(call)
    return (await find_batch(request, batch_id)).render()


async def find_batch(request: Request, batch_id: str) -> Batch:
    """The caller's batch. Raises ApiError: 404, 503."""
    store_of(request)
    batch = None
    if BATCH_ID.fullmatch(batch_id):
        async with asking_broker():
            batch = await read_batch(own_pool(request).client, batch_id)
    if batch is None or batch.owner != tenant_of(request):
        raise ApiError(404, "not_found", f"No batch found with id '{cut(batch_id)}'.", "batch_id")
    return batch
