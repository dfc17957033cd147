"""Bodies of /v1/files and /v1/batches, as OpenAI has them."""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response, StreamingResponse

from api.errors import ApiError, asking_broker, cut, invalid, overloaded, quoted
from api.http import body
from api.http.auth import key_of
from api.http.body import REPLAYED, check_same, idempotency_key, noted_digest
from api.http.openapi import OPENAI, OPENAI_ERRORS, OpenAIError, Shape, answer, error_responses, json_body
from api.jobs import scripts as job_scripts
from api.jobs.batch import Batch, needed_files, read_batch
from api.jobs.files import MAX_TTL_S, MIN_TTL_S, PURPOSES, FileStore, StoredFile, new_id, upload
from api.protocols.table import BATCHES
from api.requests.pool import Pool
from api.requests.service_terms import answer_id, own_pool, tenant_of
from api.webhooks import BATCH, WebhookField, check_room, find_webhook
from common.api_keys import ApiKey
from common.ids import BATCH_ID

MAX_BATCHES = 10_000
"""Batches that the pool keeps; those that have ended leave first."""
MAX_FILES = 10_000
"""Of one tenant."""
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


def page_of(name: str, item: Shape) -> Shape:
    ids = {"first_id": (item.example["id"], None), "last_id": (item.example["id"], None)}
    return Shape(name, {"object": "list", "data": [item.example], **ids, "has_more": False})


FILE = Shape(
    "FileObject",
    {
        "id": "file-abc",
        "object": "file",
        "bytes": 140,
        "created_at": 1764000000,
        "expires_at": (None, 1766592000),
        "filename": "lines.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    },
)
DELETED_FILE = Shape("DeletedFile", {"id": "file-abc", "object": "file", "deleted": True})
ENDED = ("completed", "failed", "expired", "cancelled")
TIMES = ("expires", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
BATCH_SHAPE = Shape(
    "BatchObject",
    {
        "id": "batch_abc",
        "object": "batch",
        "endpoint": BATCHES[0],
        "errors": (None, {"object": "list", "data": [{}]}),
        "input_file_id": "file-abc",
        "completion_window": "24h",
        "status": (*ENDED, "validating", "in_progress", "finalizing", "cancelling"),
        "output_file_id": ("file-def", None),
        "error_file_id": (None, "file-ghi"),
        "created_at": 1764000000,
        **{f"{name}_at": (1764000060, None) for name in TIMES},
        "request_counts": {"total": 2, "completed": 2, "failed": 0},
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
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"enum": list(PURPOSES)},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": MIN_TTL_S,
                            "maximum": MAX_TTL_S,
                        },
                    },
                }
            }
        },
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
    """Keeps a file, by default 30 days if it is for a batch. It is written while it comes."""
    store, owner = store_of(request), tenant_of(request)
    if len(await store.names(owner)) >= MAX_FILES:
        raise ApiError(400, "too_many_files", f"A tenant may keep {MAX_FILES} files", "file")
    return render_file(await upload(request, store, owner))


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
    names = names_after(await store.names(owner), order, after)
    found = list[StoredFile]()
    for name in names:
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
    return render_list([render_file(file) for file in found], limit)


@router.get("/v1/files/{file_id}", summary="Retrieve a file", responses=answer(FILE))
async def retrieve_file(request: Request, file_id: FileId) -> dict[str, Any]:
    """Returns what is known of a file."""
    return render_file(await store_of(request).find(tenant_of(request), file_id))


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


@router.get("/v1/files/{file_id}/content", summary="Retrieve the content of a file")
async def retrieve_content(request: Request, file_id: FileId) -> Response:
    """Sends the bytes of a file."""
    store = store_of(request)
    file = await store.find(tenant_of(request), file_id)
    headers = {"content-length": str(file.num_bytes)}
    return StreamingResponse(store.read(file), 200, headers, "application/octet-stream")


def render_file(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


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
    check_batch(asked)
    async with asking_broker():
        now_s = await pool.client.read_time()
    batch_id = id_by_key(request, owner) if idempotency_key(request) else new_id("batch_", now_s)
    if (earlier := await read_earlier(request, batch_id)) is None:
        file = await store.find(owner, asked.input_file_id)
        if file.purpose != "batch":
            text = f"`input_file_id` must be a file for `batch`, not for {file.purpose}"
            raise invalid(text, "input_file_id")
        batch = new_batch(request, asked, batch_id, owner, now_s)
        if await keep(pool, batch, await webhook_of(asked, key_of(request), pool, batch_id)):
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


def new_batch(request: Request, asked: BatchRequest, batch_id: str, owner: str, now_s: float) -> Batch:
    key = key_of(request)
    return Batch(
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


async def keep(pool: Pool, batch: Batch, webhook: dict[str, bytes]) -> bool:
    """Keep a new batch; False if one with its id was kept meanwhile. Raises ApiError: 429, 503."""
    call = job_scripts.create_batch(
        pool.client.keys,
        batch.id,
        batch.member,
        {**batch.made(), **webhook},
        made_ms=batch.made_ms,
        deadline_ms=batch.order_ms,
        max_batches=MAX_BATCHES,
    )
    async with asking_broker():
        kept = await pool.client.run(call)
    if kept == "full":
        raise overloaded(f": {MAX_BATCHES} batches have not ended", 60)
    return kept == "new"


async def webhook_of(asked: BatchRequest, key: ApiKey | None, pool: Pool, batch_id: str) -> dict[str, bytes]:
    """The field of a batch that says where the event of its end goes. Raises ApiError: 422, 429, 503."""
    webhook = find_webhook(asked.webhook, key, pool.settings, BATCH, batch_id)
    if webhook is None:
        return {}
    await check_room(pool.client)
    return {"webhook": webhook.text("")}


def check_batch(asked: BatchRequest) -> None:
    """Raises ApiError (422)."""
    metadata = asked.metadata or {}
    if len(metadata) > MAX_METADATA or any(
        len(name) > MAX_NAME or len(value) > MAX_VALUE for name, value in metadata.items()
    ):
        raise invalid(
            f"`metadata` has up to {MAX_METADATA} pairs: names of {MAX_NAME} characters, "
            f"values of {MAX_VALUE}",
            "metadata",
        )


@router.get("/v1/batches", summary="List batches", responses=answer(page_of("BatchList", BATCH_SHAPE)))
async def list_batches(
    request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> dict[str, Any]:
    """Lists the caller's batches, the newest first. The list begins after the batch with the id `after`."""
    store_of(request)
    pool, owner = own_pool(request), tenant_of(request)
    async with asking_broker():
        members = await pool.client.redis.zrange(pool.client.keys.batches, 0, -1)
        pairs = [member.decode().rpartition(" ") for member in members]
        names = names_after([name for whose, _, name in pairs if whose == owner], "desc", after)
        found = [await read_batch(pool.client, name) for name in names[: limit + 1]]
    return render_list([batch.render() for batch in found if batch is not None], limit)


@router.get("/v1/batches/{batch_id}", summary="Retrieve a batch", responses=answer(BATCH_SHAPE))
async def retrieve_batch(request: Request, batch_id: BatchId) -> dict[str, Any]:
    """Returns how far a batch is."""
    return (await find_batch(request, batch_id)).render()


@router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch", responses=answer(BATCH_SHAPE))
async def cancel_batch(request: Request, batch_id: BatchId) -> dict[str, Any]:
    """Ends a batch. Requests that are answered already stay in its files."""
    batch, pool = await find_batch(request, batch_id), own_pool(request)
    now_s = int(pool.client.clock.now_s())
    call = job_scripts.cancel_batch(pool.client.keys, batch_id, batch.member, cancelling_at=now_s)
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


# --- lists --------------------------------------------------------------------------------------------------


def names_after(names: Sequence[str], order: str, after: str | None) -> list[str]:
    """Ids in the order that is asked for, after one of them. Raises ApiError (422)."""
    ordered = sorted(names, reverse=order == "desc")
    if after is None:
        return ordered
    if after not in ordered:
        raise invalid(f"`after`: there is no {quoted(after)}", "after")
    return ordered[ordered.index(after) + 1 :]


def render_list(items: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }
