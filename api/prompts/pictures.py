"""Pictures of prompts: where a client says that one is (a URL, in a part of a message or as `![](…)` in a
text); how it is fetched, checked and kept in the broker; and what stands in the prompt for it.
"""

import asyncio
import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote_to_bytes, urljoin

import httpcore

from api.errors import ApiError, asking_broker, invalid, not_one_of, overloaded, quoted
from api.outbound import DEFAULT_PORTS, PublicHosts, TargetUrl, UrlError, is_address, is_allowed, read_url
from api.prompts.chat_template import Rendered
from api.prompts.picture_layouts import PictureLayout, expanded, placed
from common.broker.keys import Keys
from common.broker.lua import Args, ScriptCall, call_script
from common.broker.pool_client import PoolClient
from common.messages.request import Generate, Picture
from common.pictures import PictureError, check_pixels, read_size
from common.settings.settings import Settings

PICTURE_TYPES = ("image_url", "input_image", "image")
"""Types of parts that are pictures: OpenAI's in chats and in responses, and transformers'."""
DETAILS = ("auto", "low", "high", "original")
INLINE = "![]("
"""What begins a picture in a text, as TGI has it: Markdown's without a description."""
URL_STARTS = ("data:", "https://", "http://")


@dataclass(frozen=True, slots=True)
class PictureSource:
    """One picture of a prompt.

    Attributes:
        field: the name of the field that has it, for errors.
    """

    url: str
    field: str


def is_data(url: str) -> bool:
    """Whether a URL has the picture's bytes in it."""
    return url[:5].lower() == "data:"


def is_picture(kind: str) -> bool:
    return kind in PICTURE_TYPES


def read_part(part: Mapping[str, Any], field: str) -> PictureSource:
    """The source of a part that is a picture. Raises ApiError."""
    kind = part.get("type")
    if part.get("file_id") is not None:
        raise invalid(f"`{field}.file_id` is not supported: there is no store of files")
    given = part.get("image_url") if kind != "image" else part.get("url", part.get("image"))
    detail = part.get("detail")
    name = f"{field}.{'image_url' if kind != 'image' else 'url'}"
    if isinstance(given, Mapping):
        detail = given.get("detail", detail)
        given, name = given.get("url"), f"{name}.url"
    if not isinstance(given, str):
        raise invalid(f"`{name}` must be a string, the URL of a picture")
    if detail is not None and detail not in DETAILS:
        raise not_one_of(f"{field}.detail", DETAILS, detail)
    return PictureSource(given, name)


def unknown_part(kind: object, name: str, field: str, sees: bool) -> ApiError:
    """The error of a part that is no text, and no picture that this model sees."""
    takes = "text and pictures only" if sees else "text only"
    return invalid(f"`{name}` is of type {quoted(kind)}: this model takes {takes}", field)


def split_text(text: str) -> Iterator[tuple[str, str]]:
    """The parts of a text between its pictures, each with the URL of the picture after it; "" at the end. It
    takes linear time, whatever the text.
    """
    done = place = 0
    while (place := text.find(INLINE, place)) >= 0:
        start = place + len(INLINE)
        if text.startswith(URL_STARTS, start):
            if (end := text.find(")", start)) < 0:
                break
            yield text[done:place], text[start:end]
            done = end + 1
            start = done
        place = start
    yield text[done:], ""


# --- fetch --------------------------------------------------------------------------------------------------


SETTING = "ALLOWED_MEDIA_DOMAINS"
SCHEMES = ("https:", "http:")
MAX_REDIRECTS = 3
MAX_CONNECTIONS = 16
"""Of one gateway; further pictures wait."""
REDIRECTS = (301, 302, 303, 307, 308)
KINDS = ("image/", "application/octet-stream", "binary/octet-stream")
"""How content types of pictures begin; stores of objects often know no better."""
HEADERS = [("accept", "image/*"), ("accept-encoding", "identity"), ("user-agent", "tokenfleet")]


class PictureFetcher:
    """Fetches pictures over HTTP, without cookies, proxies and credentials."""

    def __init__(self, domains: Iterable[str], max_bytes: int, timeout_s: float) -> None:
        self.domains = [*domains]
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self.permits = asyncio.Semaphore(MAX_CONNECTIONS)
        hosts = [domain.rpartition(":")[0] or domain for domain in self.domains]
        named = [host.strip("[]") for host in (*hosts, *self.domains) if is_address(host.strip("[]"))]
        self.backend = PublicHosts(named)

    async def fetch(self, url: str) -> bytes:
        """The bytes at a URL. Raises PictureError."""
        if not self.domains:
            raise PictureError(f"must be a data: URL: nothing is fetched here ({SETTING} is empty)")
        if not url.lower().startswith(SCHEMES):
            raise PictureError("must be a URL that begins with data:, https: or http:")
        try:
            async with asyncio.timeout(self.timeout_s), self.permits:
                return await self.follow(read_url(url))
        except UrlError as error:
            raise PictureError(str(error)) from error
        except TimeoutError as error:
            text = f"could not be fetched within {self.timeout_s:g} s"
            raise PictureError(text) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            raise PictureError(f"could not be fetched: {type(error).__name__}") from error

    async def follow(self, target: TargetUrl) -> bytes:
        """The bytes at a target, or where it redirects to. Each target is checked."""
        for _ in range(MAX_REDIRECTS + 1):
            check_allowed(target, self.domains)
            found = await self.get(target)
            if isinstance(found, bytes):
                return found
            target = found
        raise PictureError(f"could not be fetched: there were more than {MAX_REDIRECTS} redirects")

    async def get(self, target: TargetUrl) -> bytes | TargetUrl:
        """The bytes of a target, or the one that it redirects to."""
        headers = [("host", target.host_header), *HEADERS]
        async with (
            self.backend.connections() as connections,
            connections.stream("GET", target.url, headers=headers) as response,
        ):
            known = {
                name.decode("latin-1").lower(): text.decode("latin-1") for name, text in response.headers
            }
            if response.status in REDIRECTS and "location" in known:
                own = f"{target.scheme}://{target.host_header}{target.path}"
                return read_url(urljoin(own, known["location"]))
            check_head(response.status, known)
            return await self.read(response, known.get("content-length", ""))

    async def read(self, response: httpcore.Response, announced: str) -> bytes:
        """The body, as far as it is no larger than a picture may be."""
        too_large = PictureError(f"has more than {self.max_bytes} bytes (MAX_PICTURE_BYTES)")
        if announced.isdecimal() and int(announced) > self.max_bytes:
            raise too_large
        content = bytearray()
        async for chunk in response.aiter_stream():
            content += chunk
            if len(content) > self.max_bytes:
                raise too_large
        return bytes(content)


def check_allowed(target: TargetUrl, domains: Iterable[str]) -> None:
    """Raises PictureError if the setting does not allow a host and its port."""
    if not any(is_allowed(target, domain) for domain in domains):
        where = target.host_header if target.port != DEFAULT_PORTS[target.scheme] else target.host
        raise PictureError(f"is at {where}, from which nothing is fetched here ({SETTING})")


def check_head(status: int, headers: Mapping[str, str]) -> None:
    """Raises PictureError for a response that is no picture."""
    if status != 200:
        raise PictureError(f"could not be fetched: the host answers with status {status}")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise PictureError("could not be fetched: the host compresses it, though it was asked not to")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind.startswith(KINDS):
        raise PictureError(f"has the content type {kind[:80]!r}, which is none of a picture")


# --- keep ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadedPicture:
    """A picture that can be shown to the model.

    Attributes:
        digest: SHA-256 of its bytes, in hexadecimal digits.
        text: what stands in the prompt for it.
    """

    content: bytes
    digest: str
    text: str


PICTURE_GONE = "picture_gone"
"""Type of the error of a request whose picture the broker has lost."""
HELD_MARGIN_MS = 600_000
"""How much longer than its request a picture is kept if no gateway lives to let go of it: deadlines are told
by a clock that stops while no batcher works.
"""


def digests_of(request: Generate) -> list[str]:
    return [picture.digest for picture in request.pictures]


def keep_picture(
    keys: Keys, digest: str, *, content: bytes, max_bytes: int
) -> ScriptCall[Literal["kept", "missing", "full"]]:
    """Keep a picture's bytes until a request holds it, for a moment.

    Args:
        content: b"" to ask whether the bytes are there.
        max_bytes: of all pictures of the pool.
    """
    args: Args = {"digest": digest, "content": content, "max_bytes": max_bytes}
    return call_script("keep_picture", lambda reply: reply.decode(), keys, digest, args=args)


def hold_pictures(keys: Keys, request_id: str, digests: Iterable[str], *, life_ms: int) -> ScriptCall[bool]:
    """Keep a request's pictures while it lives. False if one of them is not there."""
    each = [*dict.fromkeys(digests)]
    args: Args = {"request_id": request_id, "life_ms": life_ms}
    return call_script(
        "hold_pictures", bool, keys, args=args, more_keys=picture_keys(keys, each), more_args=each
    )


def let_go_pictures(keys: Keys, request_id: str, digests: Iterable[str]) -> ScriptCall[bool]:
    """Let go of the pictures of a request that has ended."""
    each = [*dict.fromkeys(digests)]
    args: Args = {"request_id": request_id}
    return call_script(
        "let_go_pictures", bool, keys, args=args, more_keys=picture_keys(keys, each), more_args=each
    )


def picture_keys(keys: Keys, digests: Iterable[str]) -> list[str]:
    """Return the keys of each picture: its bytes, and who holds them."""
    return [key for digest in digests for key in (keys.picture(digest), keys.picture_holders(digest))]


# --- load ---------------------------------------------------------------------------------------------------


MAX_PIXELS = 2**25
"""Of one picture; it is refused before it is decoded."""
FETCH_TIMEOUT_S = 10.0
"""Redirects included."""
MAX_KEPT_BYTES = 512 * 2**20
"""Pictures of all live requests in the broker; each is there once."""

DATA = re.compile(r"data:(?P<kind>[^;,]*)(?:;[^;,=]+=[^;,]*)*(?P<base64>;base64)?,", re.IGNORECASE)
NUM_THREADS = 2
MAX_REQUEST_BYTES = 2**27
"""Of all pictures of one prompt: the worker's agent sends them to its engine in one message."""


def read_data(url: str, max_bytes: int) -> bytes:
    """The bytes in a data: URL. Raises PictureError."""
    head = DATA.match(url)
    if head is None or not head["base64"]:
        raise PictureError("must be a data: URL with base64, as data:image/png;base64,…")
    kind = head["kind"].lower()
    if not kind.startswith("image/"):
        raise PictureError(f"has the media type {kind[:80]!r}, which is none of a picture")
    given: bytes | str = url[head.end() :]
    if "%" in url[head.end() :]:
        given = unquote_to_bytes(url[head.end() :])
    if len(given) * 3 // 4 > max_bytes + 2:
        raise PictureError(f"has more than {max_bytes} bytes (MAX_PICTURE_BYTES)")
    try:
        content = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"is no base64: {error}") from error
    if len(content) > max_bytes:
        raise PictureError(f"has more than {max_bytes} bytes (MAX_PICTURE_BYTES)")
    return content


# --- prompts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShownPictures:
    """The pictures of a prompt whose text has their placeholders.

    Attributes:
        prompt: with the pictures' texts in place of markers.
    """

    prompt: Rendered
    loaded: Sequence[LoadedPicture]
    layout: PictureLayout

    def place(self, ids: Sequence[int]) -> list[Picture]:
        """Where the pictures are in the prompt's ids. Raises ApiError."""
        digests, texts = [one.digest for one in self.loaded], [one.text for one in self.loaded]
        try:
            return placed(ids, self.layout, digests, texts)
        except PictureError as error:
            raise invalid(f"`prompt`: {error}") from error


class PicturePrompts:
    """Shows the model of one pool the pictures of prompts, and keeps them, each once."""

    def __init__(self, client: PoolClient, settings: Settings, layout: PictureLayout | None) -> None:
        self.client = client
        self.settings = settings
        self.layout = layout
        self.fetcher = PictureFetcher(
            settings.allowed_media_domains, settings.max_picture_bytes, FETCH_TIMEOUT_S
        )
        self.threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pictures")

    # --- show -----------------------------------------------------------------------------------------------

    async def show(self, prompt: Rendered, sources: Sequence[PictureSource], sees: bool) -> ShownPictures:
        """Load pictures, and put their placeholders into the prompt. Raises ApiError.

        Args:
            sees: whether a worker computes pictures.
        """
        layout, first = self.layout, sources[0].field
        if layout is None or not sees:
            raise invalid(f"`{first}` is a picture: this model takes text only")
        loaded = await self.load(sources, layout)
        try:
            text = expanded(prompt.guarded, layout.marker, [one.text for one in loaded])
        except PictureError as error:
            raise invalid(f"`prompt`: {error}") from error
        return ShownPictures(prompt._replace(guarded=text), loaded, layout)

    def inline(self, text: str) -> tuple[str, list[PictureSource]]:
        """A text with markers in place of TGI's `![](URL)`, and these pictures. For a model that sees none
        they are text, as in TGI.
        """
        if self.layout is None or "![](" not in text:
            return text, []
        parts = [*split_text(text)]
        marked = "".join(before + self.layout.inline * bool(url) for before, url in parts)
        return marked, [PictureSource(url, "prompt") for _, url in parts if url]

    # --- load -----------------------------------------------------------------------------------------------

    async def load(self, sources: Sequence[PictureSource], layout: PictureLayout) -> list[LoadedPicture]:
        """The pictures of a prompt. Raises ApiError (422) that names the field of the first one at fault."""
        number, most = len(sources), self.settings.max_pictures
        if number > most:
            field = sources[most].field
            raise invalid(f"a request may have {most} pictures (MAX_PICTURES). Given: {number}", field)
        loading = (self.load_one(source, number, layout) for source in sources)
        found = await asyncio.gather(*loading, return_exceptions=True)
        loaded = []
        for one in found:
            if isinstance(one, BaseException):
                raise one
            loaded.append(one)
        num_bytes = sum(len(one.content) for one in loaded)
        if num_bytes > MAX_REQUEST_BYTES:
            text = f"all pictures of a request have at most {MAX_REQUEST_BYTES} bytes. Given: {num_bytes}"
            raise invalid(text, sources[-1].field)
        return loaded

    async def load_one(self, source: PictureSource, number: int, layout: PictureLayout) -> LoadedPicture:
        """One of `number` pictures of a prompt, all of whose pixels can be decoded. Raises ApiError."""
        is_own = is_data(source.url)

        def check(content: bytes) -> LoadedPicture:
            if is_own:
                content = read_data(source.url, self.settings.max_picture_bytes)
            height, width = read_size(content)
            if (most := MAX_PIXELS) < height * width:
                raise PictureError(f"has {width} x {height} pixels: at most {most} are allowed")
            if not height * width:
                raise PictureError("has no pixels")
            check_pixels(content)
            text = layout.picture_text((height, width), number)
            return LoadedPicture(content, hashlib.sha256(content).hexdigest(), text)

        try:
            content = b"" if is_own else await self.fetcher.fetch(source.url)
            return await asyncio.get_running_loop().run_in_executor(self.threads, check, content)
        except PictureError as error:
            raise invalid(f"`{source.field}` {error}") from error

    # --- keep -----------------------------------------------------------------------------------------------

    async def keep(self, pictures: Iterable[LoadedPicture]) -> None:
        """Keep pictures for a moment. Raises ApiError: 429, 503."""
        for picture in {one.digest: one for one in pictures}.values():
            if await self.offer(picture.digest, b"") == "missing":  # most bytes of a second turn are there
                outcome = await self.offer(picture.digest, picture.content)
                if outcome == "full":
                    raise overloaded(": the pictures of live requests take all room")

    async def offer(self, digest: str, content: bytes) -> str:
        call = keep_picture(self.client.keys, digest, content=content, max_bytes=MAX_KEPT_BYTES)
        async with asking_broker():
            return await self.client.run(call)

    async def hold(self, request: Generate) -> None:
        """Keep a request's pictures while it lives; called before it is admitted. Raises ApiError (503)."""
        call = hold_pictures(
            self.client.keys,
            request.request_id,
            digests_of(request),
            life_ms=request.ttl_ms + HELD_MARGIN_MS,
        )
        if not await self.client.run(call):
            text = "the broker has lost a picture of the request: send it again"
            raise ApiError(503, PICTURE_GONE, text, code=PICTURE_GONE)

    async def let_go(self, request: Generate) -> None:
        """A request with pictures has ended. Raises what the broker raises."""
        await self.client.run(let_go_pictures(self.client.keys, request.request_id, digests_of(request)))
