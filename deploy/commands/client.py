"""What the commands that speak HTTP share: where the server is, how its frames are read, and what went wrong
in one line.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import orjson

from common.settings.settings import SettingError, Settings

CONNECT_S = 5.0
MAX_MESSAGE = 500
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Client = TypeVar("Client", httpx.Client, httpx.AsyncClient)
CONTROL = {code: None for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(range(127, 160))


class Trouble(Exception):
    """The server cannot be asked, or refuses. `str()` is the one line that a person sees."""


def complain(trouble: Trouble) -> int:
    """Says it. Returns the exit code."""
    print(f"tokenfleet: {trouble}", file=sys.stderr)
    return 1


def add_url(parser: argparse.ArgumentParser) -> None:
    port = Settings.read([], {"PORT": os.environ.get("PORT", "")}).port
    parser.add_argument(
        "--url",
        type=base_url,
        default=f"http://127.0.0.1:{port}",
        help="the server (default: %(default)s, by PORT)",
    )


def base_url(text: str) -> str:
    """The URL that `localhost:3000`, `http://host/` or `http://host/v1` means. Raises SettingError."""
    url = text if "://" in text else f"http://{text}"
    url = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url
    except ValueError:
        pass
    raise SettingError("url", f"{text!r} is no address of a server, as http://127.0.0.1:3000 is one")


def new_client(kind: type[Client], url: str, read_s: float, key: str | None) -> Client:
    """A client of httpx for one server. Raises Trouble.

    A proxy of the environment is no way to our own machine.
    """
    if key is not None and not key.isascii():
        raise Trouble("a key for the server (API_KEY) has letters that no header can carry")
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
    timeout, limits = (
        httpx.Timeout(read_s, connect=CONNECT_S),
        httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )
    proxies = urlsplit(url).hostname not in LOOPBACK
    try:
        return kind(base_url=url, timeout=timeout, limits=limits, headers=headers, trust_env=proxies)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise Trouble(f"{url} cannot be asked: {error}") from error


def api_key() -> str | None:
    return os.environ.get("API_KEY")


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """What goes wrong with the connection inside is raised as Trouble."""
    try:
        yield
    except httpx.ConnectError as error:
        raise Trouble(
            f"no server answers at {url} ({error}); `tokenfleet serve` starts one, --url names another"
        ) from error
    except httpx.TimeoutException as error:
        raise Trouble(f"{url} does not answer ({type(error).__name__})") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Trouble(f"the connection to {url} broke off: {error or type(error).__name__}") from error


@contextlib.contextmanager
def unexpected(frame: Any) -> Iterator[None]:
    """What cannot be read inside is the frame's fault, and raised as Trouble."""
    try:
        yield
    except (LookupError, AttributeError, TypeError) as error:
        raise Trouble(f"the server sent a frame of an unknown shape: {shown(str(frame))}") from error


def check(status: int, body: bytes) -> None:
    """Raises Trouble with the server's own message, unless it accepted."""
    if status != 200:
        raise Trouble(f"the server answers {status}: {message(body)}")


def message(body: bytes) -> str:
    """The text in an error object of OpenAI's or TGI's family, or what else was answered."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return shown(body.decode(errors="replace")) or "(an empty answer)"
    return shown(said(found) or body.decode(errors="replace"))


def said(frame: Any) -> str:
    """The error in a JSON answer or a frame; empty when it is none."""
    error = frame.get("error") if isinstance(frame, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or str(error)
    detail = frame.get("detail") if isinstance(frame, dict) else None
    return str(error or detail or "")


def shown(text: str) -> str:
    """One line, not too long."""
    return " ".join(harmless(text).split())[:MAX_MESSAGE]


def harmless(text: str) -> str:
    """Without the control characters that move a terminal's cursor or change its colours."""
    return text.translate(CONTROL)


class Frames:
    """Server-sent events, whole or in pieces: `feed` yields the objects that a chunk of bytes completes;
    `[DONE]` is none.

    Lines end with a line feed only: a JSON text may hold the other characters at which `str.splitlines` would
    cut.
    """

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if not data or data == b"[DONE]":
                continue
            try:
                frame = orjson.loads(data)
            except orjson.JSONDecodeError as error:
                raise Trouble(
                    f"the server sent a frame that is not JSON: {shown(data.decode(errors='replace'))}"
                ) from error
            if isinstance(frame, dict):
                yield frame
