"""File store: the files of /v1/files, in a folder or any store that fsspec has.

A file is a record, which never changes, and parts, which follow each other. Its record is written last. A
part is at most PART_BYTES and one line of a batch, so no process ever holds a whole file.
"""

import asyncio
import logging
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import orjson
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from api.errors import ApiError, invalid, quoted, unavailable
from api.http.body import announces_more
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

    async def call(self, work: Callable[[], Done]) -> Done:
        """The result of `work` on the store, in a thread. Raises ApiError (503)."""
        try:
            return await asyncio.to_thread(work)
        except FileNotFoundError:
            raise
        except Exception as error:  # each store has its own
            log.error("the file store: %s", error)
            raise unavailable(f"the file store failed ({type(error).__name__})") from error

    def folder(self, owner: str) -> str:
        return f"{self.root}/of-{quote(owner, safe='')}"

    def parts_path(self, owner: str, file_id: str) -> str:
        """The folder of a file's parts. Whatever is no id has none: it could lead to another owner's. Raises
        ApiError (404).
        """
        if not FILE_ID.fullmatch(file_id):
            raise no_file(file_id)
        return f"{self.folder(owner)}/{file_id}"

    def part_path(self, owner: str, file_id: str, part: str) -> str:
        """Raises ApiError (404)."""
        if not FILE_PART.fullmatch(part):
            raise no_file(file_id)
        return f"{self.parts_path(owner, file_id)}/{part}"

    def record_path(self, owner: str, file_id: str) -> str:
        """Raises ApiError (404)."""
        return f"{self.parts_path(owner, file_id)}.json"

    async def put_part(self, owner: str, file_id: str, part: str, data: bytes) -> None:
        """Write a part; whoever writes it again writes it whole. Raises ApiError (503)."""
        path = self.part_path(owner, file_id, part)
        await self.call(lambda: self.put(path, data))

    def put(self, path: str, data: bytes) -> None:
        """Write an object; readers find all of it or nothing."""
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fresh = f"{path}.{uuid.uuid4().hex}.new"
        self.fs.pipe_file(fresh, data)
        self.fs.mv(fresh, path)

    async def put_record(self, file: StoredFile) -> None:
        """Raises ApiError (503)."""
        path = self.record_path(file.owner, file.id)
        await self.call(lambda: self.put(path, orjson.dumps(asdict(file))))

    async def find(self, owner: str, file_id: str) -> StoredFile:
        """Raises ApiError: 404, also for a file that has expired, 503."""
        found = await self.find_kept(owner, file_id)
        if found.expired(self.clock.now_s()):
            raise no_file(file_id)
        return found

    async def find_kept(self, owner: str, file_id: str) -> StoredFile:
        """A file, which may have expired. Raises ApiError: 404, 503."""
        path = self.record_path(owner, file_id)
        try:
            return await self.call(lambda: self.read_record(path))
        except FileNotFoundError as error:
            raise no_file(file_id) from error

    def read_record(self, path: str) -> StoredFile:
        """Raises ValueError for what is not the record of a file that has this path."""
        try:
            fields: dict[str, Any] = orjson.loads(self.fs.cat_file(path))
            file = StoredFile(**fields | {"parts": [(name, size) for name, size in fields["parts"]]})
            is_own = path.endswith(self.record_path(file.owner, file.id).removeprefix(self.root))
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
            return list(record_ids(self.fs.ls(folder, detail=False)))

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
            path = self.part_path(file.owner, file.id, part)
            try:
                data: bytes = await self.call(lambda path=path: self.fs.cat_file(path))  # type: ignore[misc]
            except FileNotFoundError as error:
                text = f"a part of the file {file.id} is missing in the file store"
                raise ApiError(404, "not_found", text, "id") from error
            yield data[offset:]
            offset = 0

    async def delete(self, file: StoredFile) -> None:
        """Delete the record, then the parts. Raises ApiError: 404 if somebody else has, 503."""
        path = self.record_path(file.owner, file.id)
        try:
            await self.call(lambda: self.fs.rm_file(path))
        except FileNotFoundError as error:
            raise no_file(file.id) from error
        await self.remove_parts(file.owner, file.id)

    async def remove_parts(self, owner: str, file_id: str) -> None:
        path = self.parts_path(owner, file_id)

        def remove() -> None:
            if self.fs.exists(path):
                self.fs.rm(path, recursive=True)

        await self.call(remove)

    async def delete_expired(self, now_s: float, needed: Collection[str] = ()) -> int:
        """Delete the files whose time is over, but for those `needed` by batches. Returns their number.
        Raises ApiError (503).
        """

        def expired() -> list[StoredFile]:
            self.fs.invalidate_cache()
            records = self.fs.glob(f"{self.root}/of-*/*.json")
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
        cause = error.strerror or error
        raise SettingError("FILES_DIR", f"{settings.files_dir} cannot be written to: {cause}") from error
    except ImportError as error:
        cause = f"needs its store, as `pip install 'tokenfleet[cloud]'` has of gs:// and s3:// ({error})"
        raise SettingError("FILES_DIR", f"{settings.files_dir} {cause}") from error
    except ValueError as error:
        raise SettingError("FILES_DIR", f"{settings.files_dir} cannot be used: {error}") from error


def record_ids(paths: list[str]) -> Iterator[str]:
    for path in paths:
        name = path.rpartition("/")[2]
        if name.endswith(".json"):
            yield name.removesuffix(".json")


def no_file(file_id: str) -> ApiError:
    return ApiError(404, "not_found", f"No such File object: {file_id[:100]}", "id")


async def lines_of(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """The lines of a file, without their ends. A line beyond the limit comes cut, one byte too long."""
    rest = bytearray()
    async for chunk in chunks:
        *lines, tail = chunk.split(b"\n")
        for line in lines:
            yield bytes(rest + line)[: max_bytes + 1]
            rest.clear()
        rest += tail[: max_bytes + 1 - len(rest)]
    if rest:
        yield bytes(rest)


# --- upload -------------------------------------------------------------------------------------------------


MAX_FILE_BYTES = 200 * 2**20
PURPOSES = ("batch", "user_data", "assistants", "evals", "fine-tune", "vision")
"""Purposes that OpenAI's clients name; only files for `batch` are of use here, the others are kept alone."""
BATCH_TTL_S = 30 * 86_400
"""Of a file for a batch whose client names no time, as at OpenAI."""
MIN_TTL_S, MAX_TTL_S = 3600, 2_592_000
MAX_FIELD_BYTES = 1000
MAX_FORM_BYTES = 2**20
"""Of a form besides its file."""


@dataclass(slots=True)
class FormPart:
    """One part of a form."""

    name: str = ""
    filename: str | None = None
    data: bytearray = field(default_factory=bytearray)


class FormReader:
    """Reads the parts of a form: small fields whole, the file as it comes.

    Attributes:
        fields: those that have ended.
        file: bytes of the file that nobody has taken.
        filename: None before the file has come.
    """

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.file = bytearray()
        self.filename: str | None = None
        self.part = FormPart()
        self.header = bytearray()
        self.value = bytearray()
        self.ended = False
        self.parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self.begin_part,
                "on_header_field": lambda data, start, end: self.header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self.value.extend(data[start:end]),
                "on_header_end": self.end_header,
                "on_part_data": self.add_data,
                "on_part_end": self.end_part,
                "on_end": self.end_form,
            },
        )

    def begin_part(self) -> None:
        self.part = FormPart()

    def end_header(self) -> None:
        if self.header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self.value))
            self.part.name = options.get(b"name", b"").decode(errors="replace")
            if b"filename" in options:
                self.part.filename = options[b"filename"].decode(errors="replace")
        self.header.clear()
        self.value.clear()
        if self.part.name == "file":
            if self.part.filename is None:
                raise invalid("`file` must be a file with a name", "file")
            self.filename = self.part.filename

    def add_data(self, data: bytes, start: int, end: int) -> None:
        if self.part.name == "file":
            self.file += data[start:end]
            return
        self.part.data += data[start:end]
        if len(self.part.data) > MAX_FIELD_BYTES:
            raise invalid(f"`{self.part.name[:100]}` is longer than {MAX_FIELD_BYTES} bytes", self.part.name)

    def end_part(self) -> None:
        if self.part.name != "file":
            self.fields[self.part.name] = self.part.data.decode(errors="replace")

    def end_form(self) -> None:
        self.ended = True


def read_boundary(request: Request) -> bytes:
    """Raises ApiError (415)."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(415, "unsupported_media_type", "Expected a form: `Content-Type: multipart/form-data`")
    return boundary


async def upload(request: Request, store: FileStore, owner: str) -> StoredFile:
    """Keep the file of a form. Raises ApiError: 400, 413, 415, 422, 503."""
    reader, file_id, parts = (
        FormReader(read_boundary(request)),
        new_id("file-", store.clock.now_s()),
        list[tuple[str, int]](),
    )
    if announces_more(request, MAX_FILE_BYTES + MAX_FORM_BYTES):
        raise too_large()

    async def put(num_bytes: int) -> None:
        part = f"{len(parts):09d}"
        await store.put_part(owner, file_id, part, bytes(reader.file[:num_bytes]))
        parts.append((part, num_bytes))
        del reader.file[:num_bytes]

    kept = False
    try:
        read = 0
        async for chunk in request.stream():
            read += len(chunk)
            feed(reader, chunk)
            size = sum(size for _, size in parts) + len(reader.file)
            if size > MAX_FILE_BYTES or read > MAX_FILE_BYTES + MAX_FORM_BYTES:
                raise too_large()
            while len(reader.file) >= PART_BYTES:
                await put(PART_BYTES)
        if not reader.ended:
            raise ApiError(400, "invalid_form", "The form is not complete")
        purpose, ttl_s = read_purpose(reader.fields), read_ttl(reader.fields)
        if reader.filename is None:
            raise invalid("`file` must be given", "file")
        if reader.file:
            await put(len(reader.file))
        if not parts:
            raise invalid("`file` must not be empty", "file")
        file = describe(file_id, owner, reader.filename, purpose, ttl_s, parts, int(store.clock.now_s()))
        await store.put_record(file)
        kept = True
        return file
    finally:
        if not kept:
            await store.remove_parts(owner, file_id)


def feed(reader: FormReader, chunk: bytes) -> None:
    """Raises ApiError (400)."""
    try:
        if chunk:
            reader.parser.write(chunk)
    except FormParserError as error:
        raise ApiError(400, "invalid_form", f"The form cannot be read: {error}") from error


def describe(
    file_id: str,
    owner: str,
    filename: str,
    purpose: str,
    ttl_s: int | None,
    parts: list[tuple[str, int]],
    now_s: int,
) -> StoredFile:
    return StoredFile(
        id=file_id,
        owner=owner,
        filename=filename[:512],
        purpose=purpose,
        num_bytes=sum(size for _, size in parts),
        created_at=now_s,
        expires_at=None if ttl_s is None else now_s + ttl_s,
        parts=parts,
    )


def read_purpose(fields: dict[str, str]) -> str:
    purpose = fields.get("purpose", "")
    if purpose not in PURPOSES:
        raise invalid(f"`purpose` must be one of {', '.join(PURPOSES)}. Given: {quoted(purpose)}", "purpose")
    return purpose


def read_ttl(fields: dict[str, str]) -> int | None:
    """Seconds that the file is kept; None for good."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return BATCH_TTL_S if fields["purpose"] == "batch" else None
    if anchor != "created_at":
        raise invalid("`expires_after.anchor` must be created_at", "expires_after.anchor")
    if seconds is None or not seconds.isdecimal() or not MIN_TTL_S <= int(seconds) <= MAX_TTL_S:
        limits = f"{MIN_TTL_S} to {MAX_TTL_S}"
        raise invalid(f"`expires_after.seconds` must be {limits}", "expires_after.seconds")
    return int(seconds)


def too_large() -> ApiError:
    text = f"`file` is larger than {MAX_FILE_BYTES} bytes"
    return ApiError(413, "payload_too_large", text, "file")
