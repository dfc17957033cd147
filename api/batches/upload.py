"""Upload: the form of POST /v1/files, which is written to the store while it comes.

Starlette's `request.form()` does not serve: it spools a whole file to /tmp, which is memory in our containers
(tmpfs), bounds no file, and takes a form that ends early for an empty one.
"""

from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from api.batches.store import PART_BYTES, FileStore, StoredFile, new_id
from api.errors import ApiError, invalid, quoted
from api.http.body import announces_more
from common.settings.settings import Settings

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


async def upload(request: Request, store: FileStore, settings: Settings, owner: str) -> StoredFile:
    """Keep the file of a form. Raises ApiError: 400, 413, 415, 422, 503."""
    reader, file_id, parts = (
        FormReader(read_boundary(request)),
        new_id("file-", store.clock.now_s()),
        list[tuple[str, int]](),
    )
    if announces_more(request, settings.max_file_bytes + MAX_FORM_BYTES):
        raise too_large(settings)

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
            if size > settings.max_file_bytes or read > settings.max_file_bytes + MAX_FORM_BYTES:
                raise too_large(settings)
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


def too_large(settings: Settings) -> ApiError:
    text = f"`file` is larger than {settings.max_file_bytes} bytes (MAX_FILE_BYTES)"
    return ApiError(413, "payload_too_large", text, "file")
