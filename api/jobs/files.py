"""File store: the files of /v1/files, in a folder or any store that fsspec has.

A file is a record, which never changes, and parts, which follow each other. Its record is written last. A
part is at most PART_BYTES and one line of a batch, so no process ever holds a whole file.
"""

import asyncio
import contextlib
import logging
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

import orjson
from pydantic import BaseModel, Field, ValidationError, WithJsonSchema
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from api.errors import ApiError, invalid, overloaded, unavailable
from api.http.body import read_chunks, schema_error
from common.broker.pool_client import BrokerClock
from common.ids import FILE_ID, FILE_PART
from common.settings.settings import SettingError, Settings

log = logging.getLogger(__name__)

PART_BYTES = 4 * 2**20
Done = TypeVar("Done")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The record of a file.

    Attributes:
        owner: the tenant whose it is; empty for all that do not say.
        expires_at: Unix time, or None.
        parts: name and size of each, in order.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None
    parts: list[tuple[str, int]]

    def expired(self, now_s: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now_s

    def render(self) -> dict[str, Any]:
        """OpenAI's object."""
        shown = ("id", "created_at", "expires_at", "filename", "purpose")
        of_openai = {"object": "file", "bytes": self.num_bytes, "status": "processed", "status_details": None}
        return {name: getattr(self, name) for name in shown} | of_openai


def new_id(prefix: str, now_s: float) -> str:
    """An id; ids sort as they were made."""
    return f"{prefix}{int(1000 * now_s):012x}{uuid.uuid4().hex[:20]}"


class FileStore:
    """Files of all tenants; each has a folder."""

    def __init__(self, url: str, clock: BrokerClock) -> None:
        """Raises ValueError or ImportError for a URL of an unknown kind."""
        from fsspec.core import url_to_fs  # its import takes a gateway without files 50 ms

        self.clock = clock
        self.fs, root = url_to_fs(url)
        self.root = root.rstrip("/")

    async def call(self, work: Callable[[], Done], gone: ApiError | None = None) -> Done:
        """The result of `work` on the store, in a thread. Raises ApiError: 503; `gone` if it is not there."""
        try:
            return await asyncio.to_thread(work)
        except FileNotFoundError as error:
            raise gone or error from error
        except Exception as error:  # each store has its own
            log.error("the file store: %s", error)
            raise unavailable(f"the file store failed ({type(error).__name__})") from error

    def folder(self, owner: str) -> str:
        return f"{self.root}/of-{quote(owner, safe='')}"

    def path(self, owner: str, file_id: str, part: str = "") -> str:
        """The path of a part of a file, or of its record. Whatever is no id has none: it could lead to
        another owner's. Raises ApiError (404).
        """
        if not FILE_ID.fullmatch(file_id) or (part and not FILE_PART.fullmatch(part)):
            raise no_file(file_id)
        return f"{self.folder(owner)}/{file_id}" + (f"/{part}" if part else ".json")

    async def put_part(self, owner: str, file_id: str, part: str, data: bytes) -> None:
        """Write a part; whoever writes it again writes it whole. Raises ApiError (503)."""
        path = self.path(owner, file_id, part)
        await self.call(lambda: self.put(path, data))

    def put(self, path: str, data: bytes) -> None:
        """Write an object; readers find all of it or nothing."""
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fresh = f"{path}.{uuid.uuid4().hex}.new"
        self.fs.pipe_file(fresh, data)
        self.fs.mv(fresh, path)

    async def put_record(self, file: StoredFile) -> None:
        """Raises ApiError (503)."""
        path = self.path(file.owner, file.id)
        await self.call(lambda: self.put(path, orjson.dumps(asdict(file))))

    async def find(self, owner: str, file_id: str) -> StoredFile:
        """Raises ApiError: 404, also for a file that has expired, 503."""
        found = await self.find_kept(owner, file_id)
        if found.expired(self.clock.now_s()):
            raise no_file(file_id)
        return found

    async def find_kept(self, owner: str, file_id: str) -> StoredFile:
        """A file, which may have expired. Raises ApiError: 404, 503."""
        path = self.path(owner, file_id)
        return await self.call(lambda: self.read_record(path), no_file(file_id))

    def read_record(self, path: str) -> StoredFile:
        """Raises ValueError for what is not the record of a file that has this path."""
        try:
            fields: dict[str, Any] = orjson.loads(self.fs.cat_file(path))
            file = StoredFile(**fields | {"parts": [(name, size) for name, size in fields["parts"]]})
            is_own = path.endswith(self.path(file.owner, file.id).removeprefix(self.root))
        except (KeyError, TypeError, ValueError, ApiError) as error:
            raise ValueError(f"the record {path} cannot be read: {error}") from error
        if not is_own:
            raise ValueError(f"the record {path} is that of another file")
        return file

    async def names(self, owner: str) -> list[str]:
        """Ids of an owner's files; some may have expired. Raises ApiError (503)."""

        def look() -> list[str]:
            folder = self.folder(owner)
            self.fs.invalidate_cache(folder)
            names = [path.rpartition("/")[2] for path in self.fs.ls(folder, detail=False)]
            return [name.removesuffix(".json") for name in names if name.endswith(".json")]

        try:
            return await self.call(look)
        except FileNotFoundError:
            return []

    async def read(self, file: StoredFile, offset: int = 0) -> AsyncIterator[bytes]:
        """The bytes of a file from an offset on, a part at a time. Raises ApiError: 404 if a part is gone,
        503.
        """
        for part, size in file.parts:
            if offset >= size:
                offset -= size
                continue
            text = f"a part of the file {file.id} is missing in the file store"
            read = partial(self.fs.cat_file, self.path(file.owner, file.id, part))
            yield (await self.call(read, ApiError(404, "not_found", text, "id")))[offset:]
            offset = 0

    async def delete(self, file: StoredFile) -> None:
        """Delete the parts, then the record: as long as that is there, they can be found. Raises ApiError:
        404 if somebody else has, 503.
        """
        path = self.path(file.owner, file.id)
        await self.remove_parts(file.owner, file.id)
        await self.call(lambda: self.fs.rm_file(path), no_file(file.id))

    async def remove_parts(self, owner: str, file_id: str) -> None:
        path = self.path(owner, file_id).removesuffix(".json")
        await self.call(lambda: self.remove(path))

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(path, recursive=True)

    async def delete_expired(self, now_s: float, needed: Collection[str] = ()) -> int:
        """Delete the files whose time is over, but for those `needed` by batches. Returns their number.
        Delete, too, what has had no record for BATCH_TTL_S: of uploads that broke off, and of batches that
        the broker has lost. Raises ApiError (503).
        """

        def expired() -> list[StoredFile]:
            self.fs.invalidate_cache()
            paths = {*self.fs.glob(f"{self.root}/of-*/*")}
            records = {path for path in paths if path.endswith(".json")}
            for path in paths - records - {record.removesuffix(".json") for record in records}:
                file_id = path.rpartition("/")[2].partition(".")[0]
                if file_id not in needed and self.is_older(path, now_s - BATCH_TTL_S):
                    self.remove(path)
            found = [file for path in records if (file := self.try_record(path))]
            return [file for file in found if file.expired(now_s) and file.id not in needed]

        found = await self.call(expired)
        for file in found:
            try:
                await self.delete(file)
            except ApiError as error:
                if error.status != 404:  # another gateway has deleted it
                    raise
        return len(found)

    def is_older(self, path: str, before_s: float) -> bool:
        """Whether all that a folder has was written before a Unix time."""
        found = self.fs.find(path)
        return bool(found) and max(map(self.fs.modified, found)).timestamp() < before_s

    def try_record(self, path: str) -> StoredFile | None:
        """The record of a file; None if it is gone, or is no record."""
        try:
            return self.read_record(path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            log.error("the file store: %s", error)
            return None


def open_store(settings: Settings, clock: BrokerClock) -> FileStore | None:
    """The store that FILES_DIR names; None without one. Raises SettingError, also for a folder on this disk
    that cannot be made or written to.
    """
    if not settings.files_dir:
        return None
    try:
        store = FileStore(settings.files_dir, clock)
        if "file" in store.fs.protocol:
            store.fs.makedirs(store.root, exist_ok=True)
            tempfile.TemporaryFile(dir=store.root).close()
        return store
    except OSError as error:
        cause = f"cannot be written to: {error.strerror or error}"
    except ImportError as error:
        cause = f"needs its store, as `pip install 'tokenfleet[cloud]'` has of gs:// and s3:// ({error})"
    except ValueError as error:
        cause = f"cannot be used: {error}"
    raise SettingError("FILES_DIR", f"{settings.files_dir} {cause}")


def no_file(file_id: str) -> ApiError:
    return ApiError(404, "not_found", f"No such File object: {file_id[:100]}", "id")


async def lines_of(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[tuple[bytes, int]]:
    """The lines of a file, without their ends, and the size of each in the file, without its end. A line
    beyond the limit comes cut, one byte too long.
    """
    rest, size = bytearray(), 0
    async for chunk in chunks:
        *lines, tail = chunk.split(b"\n")
        for line in lines:
            yield bytes(rest + line)[: max_bytes + 1], size + len(line)
            rest.clear()
            size = 0
        rest += tail[: max_bytes + 1 - len(rest)]
        size += len(tail)
    if rest:
        yield bytes(rest), size


# --- upload -------------------------------------------------------------------------------------------------


MAX_FILE_BYTES = 200 * 2**20
BATCH_TTL_S = 30 * 86_400
"""Of a file for a batch whose client names no time, as at OpenAI."""
MIN_TTL_S, MAX_TTL_S = 3600, 2_592_000
MAX_FIELDS, MAX_FIELD_BYTES = 16, 1000
FIELD_TOO_LONG = f"`file` must have a file name, and other fields at most {MAX_FIELD_BYTES} bytes"
MAX_FORM_BYTES = 2**20
"""Of a form besides its file."""
MAX_UPLOADS = 4
"""Files that one gateway takes at once: each lies in its temporary folder until its form has been read."""
UPLOADS = asyncio.Semaphore(MAX_UPLOADS)


class UploadForm(BaseModel):
    """The fields of an upload. Of OpenAI's purposes only `batch` is of use here; others are only kept."""

    file: Annotated[Any, WithJsonSchema({"type": "string", "format": "binary"})]
    purpose: Literal["batch", "user_data", "assistants", "evals", "fine-tune", "vision"]
    anchor: Literal["created_at"] | None = Field(None, alias="expires_after[anchor]")
    seconds: int | None = Field(None, alias="expires_after[seconds]", ge=MIN_TTL_S, le=MAX_TTL_S)

    @classmethod
    def read(cls, form: FormData) -> "UploadForm":
        """Raises ApiError (422)."""
        try:
            return cls.model_validate({"file": None, **form})
        except ValidationError as error:
            raise schema_error(error) from error

    @property
    def ttl_s(self) -> int | None:
        """Seconds that the file is kept; None for good."""
        return self.seconds or (BATCH_TTL_S if self.purpose == "batch" else None)


async def upload(request: Request, store: FileStore, owner: str) -> StoredFile:
    """Keep the file of a form. Raises ApiError: 400, 413, 415, 422, 429, 503."""
    if UPLOADS.locked():
        raise overloaded(f": {MAX_UPLOADS} files are being uploaded")
    async with UPLOADS, reading_form(request) as form:
        asked, file = UploadForm.read(form), form.get("file")
        if not isinstance(file, UploadFile) or not file.size:
            raise invalid("`file` must be given, as a file with a name, and not be empty")
        if file.size > MAX_FILE_BYTES:
            raise too_large()
        now_s, parts = store.clock.now_s(), list[tuple[str, int]]()
        kept = StoredFile(
            id=new_id("file-", now_s),
            owner=owner,
            filename=(file.filename or "")[:512],
            purpose=asked.purpose,
            num_bytes=file.size,
            created_at=int(now_s),
            expires_at=int(now_s) + asked.ttl_s if asked.ttl_s else None,
            parts=parts,
        )
        try:
            while data := await file.read(PART_BYTES):
                parts.append((f"{len(parts):09d}", len(data)))
                await store.put_part(owner, kept.id, parts[-1][0], data)
            await store.put_record(kept)
        except BaseException:
            await store.remove_parts(owner, kept.id)
            raise
        return kept


@contextlib.asynccontextmanager
async def reading_form(request: Request) -> AsyncIterator[FormData]:
    """The fields of a form, and its file until the context closes. Raises ApiError: 400, 413, 415."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ApiError(415, "unsupported_media_type", "Expected a form: `Content-Type: multipart/form-data`")
    chunks = read_chunks(request, MAX_FILE_BYTES + MAX_FORM_BYTES, too_large())
    limits: Any = {"max_files": 1, "max_fields": MAX_FIELDS, "max_part_size": MAX_FIELD_BYTES}
    try:
        form = await MultiPartParser(request.headers, chunks, **limits).parse()
    except MultiPartException as error:
        why = FIELD_TOO_LONG if error.message.startswith("Part exceeded") else error.message
        raise ApiError(400, "invalid_form", f"The form cannot be read: {why}") from error
    try:
        yield form
    finally:
        await form.close()


def too_large() -> ApiError:
    text = f"`file` is larger than {MAX_FILE_BYTES} bytes"
    return ApiError(413, "payload_too_large", text, "file")
