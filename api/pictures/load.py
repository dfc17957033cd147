"""Load: the bytes of a prompt's pictures, checked to the last pixel before anything is computed.

Checks run in threads: Pillow, hashing and base64 work outside of the interpreter's lock for most of their
time, and processes would have to be sent each picture. Two of them bound the memory that pixels take.
"""

import asyncio
import base64
import binascii
import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from api.errors import invalid
from api.pictures.fetch import PictureFetcher
from api.pictures.layouts import PictureLayout, PictureText
from api.pictures.source import PictureSource, is_data
from common.pictures import PictureError, Size, check_pixels, read_size
from common.settings.settings import Settings

DATA = re.compile(r"data:(?P<kind>[^;,]*)(?:;[^;,=]+=[^;,]*)*(?P<base64>;base64)?,", re.IGNORECASE)
NUM_THREADS = 2
MAX_REQUEST_BYTES = 2**27
"""Of all pictures of one prompt: the worker's agent sends them to its engine in one message."""


@dataclass(frozen=True, slots=True)
class LoadedPicture:
    """A picture that can be shown to the model.

    Attributes:
        digest: SHA-256 of its bytes, in hexadecimal digits.
        size: of the upright picture.
    """

    content: bytes
    digest: str
    size: Size


class PictureLoader:
    """Loads pictures for one gateway."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.fetcher = PictureFetcher(
            settings.allowed_media_domains, settings.max_picture_bytes, settings.picture_fetch_timeout_s
        )
        self.threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pictures")

    async def load(self, sources: Sequence[PictureSource]) -> list[LoadedPicture]:
        """The pictures of a prompt. Raises ApiError (422) that names the field of the first one at fault."""
        most = self.settings.max_pictures
        if len(sources) > most:
            field = sources[most].field
            raise invalid(f"a request may have {most} pictures (MAX_PICTURES). Given: {len(sources)}", field)
        found = await asyncio.gather(*map(self.load_one, sources), return_exceptions=True)
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

    async def load_one(self, source: PictureSource) -> LoadedPicture:
        loop = asyncio.get_running_loop()
        try:
            if is_data(source.url):
                return await loop.run_in_executor(self.threads, self.check_data, source.url)
            content = await self.fetcher.fetch(source.url)
            return await loop.run_in_executor(self.threads, self.check, content)
        except PictureError as error:
            raise invalid(f"`{source.field}` {error}", source.field) from error

    def check_data(self, url: str) -> LoadedPicture:
        return self.check(read_data(url, self.settings.max_picture_bytes))

    def check(self, content: bytes) -> LoadedPicture:
        """A picture whose pixels can all be decoded. Raises PictureError."""
        height, width = read_size(content)
        if (most := self.settings.max_picture_pixels) < height * width:
            raise PictureError(f"has {width} x {height} pixels: at most {most} are allowed")
        if not height * width:
            raise PictureError("has no pixels")
        check_pixels(content)
        return LoadedPicture(content, hashlib.sha256(content).hexdigest(), (height, width))


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


def text_of(layout: PictureLayout, picture: LoadedPicture, number: int, field: str) -> PictureText:
    """What stands in the prompt for one of `number` pictures. Raises ApiError."""
    try:
        return layout.picture_text(picture.size, number)
    except PictureError as error:
        raise invalid(f"`{field}` {error}", field) from error
