"""The HTTP client of the commands: the server's URL, its stream of events, and its errors in one line.

Output: what commands print for people and for other programs.
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
from rich.console import Console, RenderableType

from common.settings.settings import SettingError, Settings

WIDE = 240


def print_lines(*parts: RenderableType) -> None:
    """Print texts and tables. Where the output is no terminal, lines are as long as what they say: none is
    folded, and none ends with spaces.
    """
    if sys.stdout.isatty():
        Console(highlight=False).print(*parts, sep="\n")
        return
    console = Console(highlight=False, width=WIDE)
    with console.capture() as capture:
        console.print(*parts, sep="\n")
    for line in capture.get().splitlines():
        print(line.rstrip())


CONNECT_S = 5.0
MAX_MESSAGE = 500
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Client = TypeVar("Client", httpx.Client, httpx.AsyncClient)
CONTROL_CHARACTERS = {code: None for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(
    range(127, 160)
)


class ServerError(Exception):
    """The server cannot be reached, or refuses. `str()` is the one line that a person sees."""


def print_error(error: ServerError) -> int:
    """Print the error in one line. Returns the exit code."""
    print(f"tokenfleet: {error}", file=sys.stderr)
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
    raise SettingError("url", f"{text!r} is not the address of a server, such as http://127.0.0.1:3000")


def new_client(kind: type[Client], url: str, read_s: float, key: str | None) -> Client:
    """Make a client of httpx for one server. Raises ServerError.

    Proxies that the environment names are not used for this machine's own addresses.
    """
    if key is not None and not key.isascii():
        raise ServerError("API_KEY has characters that are not ASCII, which no HTTP header can carry")
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
    timeout, limits = (
        httpx.Timeout(read_s, connect=CONNECT_S),
        httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )
    proxies = urlsplit(url).hostname not in LOOPBACK
    try:
        return kind(base_url=url, timeout=timeout, limits=limits, headers=headers, trust_env=proxies)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ServerError(f"{url} cannot be used: {error}") from error


def api_key() -> str | None:
    return os.environ.get("API_KEY")


@contextlib.contextmanager
def connection_errors(url: str) -> Iterator[None]:
    """Raise a failed connection to `url` as ServerError."""
    try:
        yield
    except httpx.ConnectError as error:
        raise ServerError(
            f"no server answers at {url} ({error}); `tokenfleet serve` starts one, --url names another"
        ) from error
    except httpx.TimeoutException as error:
        raise ServerError(f"{url} does not answer ({type(error).__name__})") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"the connection to {url} broke off: {error or type(error).__name__}") from error


def fetch_json(client: httpx.Client, path: str) -> Any:
    """What is at a path. Raises ServerError."""
    with connection_errors(str(client.base_url)):
        answer = client.get(path)
    check_status(answer.status_code, answer.content)
    try:
        return orjson.loads(answer.content)
    except orjson.JSONDecodeError as error:
        raise ServerError(f"{client.base_url} answers {path}, but not as a Tokenfleet does") from error


@contextlib.contextmanager
def frame_errors(frame: Any) -> Iterator[None]:
    """Raise an error in reading `frame` as ServerError: the frame has an unknown shape."""
    try:
        yield
    except (LookupError, AttributeError, TypeError) as error:
        raise ServerError(f"the server sent a frame of an unknown shape: {one_line(str(frame))}") from error


def check_status(status: int, body: bytes) -> None:
    """Raise ServerError with the server's own message, unless the status is 200."""
    if status != 200:
        raise ServerError(f"the server answers {status}: {error_message(body)}")


def error_message(body: bytes) -> str:
    """Return the message in an error of OpenAI's or TGI's form; of another body, the body."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return one_line(body.decode(errors="replace")) or "(an empty answer)"
    return one_line(error_text(found) or body.decode(errors="replace"))


def error_text(frame: Any) -> str:
    """Return the error in a JSON body or a frame; empty where there is none."""
    error = frame.get("error") if isinstance(frame, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or str(error)
    detail = frame.get("detail") if isinstance(frame, dict) else None
    return str(error or detail or "")


def one_line(text: str) -> str:
    """Return the text as one line of at most MAX_MESSAGE characters."""
    return " ".join(printable(text).split())[:MAX_MESSAGE]


def printable(text: str) -> str:
    """Remove the control characters that move a terminal's cursor or change its colours."""
    return text.translate(CONTROL_CHARACTERS)


class SseDecoder:
    """Decoder of server-sent events: `feed` yields the objects that a chunk of bytes completes. `[DONE]` is
    not one.

    Attributes:
        num_events: events that came, over all responses.
        ended: whether `[DONE]` came.

    Lines end with a line feed only: a JSON text may hold the other characters at which `str.splitlines` would
    cut.
    """

    def __init__(self) -> None:
        self.reset()
        self.num_events = 0
        self.ended = False

    def reset(self) -> None:
        """Begin another response: what is left of the last one is no whole frame."""
        self.rest = b""

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            self.num_events += bool(data)
            self.ended = self.ended or data == b"[DONE]"
            if not data or data == b"[DONE]":
                continue
            try:
                frame = orjson.loads(data)
            except orjson.JSONDecodeError as error:
                raise ServerError(
                    f"the server sent a frame that is not JSON: {one_line(data.decode(errors='replace'))}"
                ) from error
            if isinstance(frame, dict):
                yield frame
