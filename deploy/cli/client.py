"""What commands share: the HTTP client of a fleet, its errors in one line, output for terminals
and files.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import orjson
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from common.settings.settings import SettingError
from deploy.launcher.control_socket import running_fleets

CONNECT_TIMEOUT_S = 5.0
MAX_ERROR_CHARACTERS = 500
PIPE_COLUMNS = 240
LOOPBACK = ("127.0.0.1", "localhost", "::1")
CONTROL_CHARACTERS = {code: None for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(
    range(127, 160)
)
Client = TypeVar("Client", httpx.Client, httpx.AsyncClient)


class ServerError(Exception):
    """The server cannot be reached, or refuses. `str()` is the one line that a person sees."""


class Unavailable(ServerError):
    """The server, or a proxy before it, says that it cannot answer now."""


def parse_url(text: str) -> str:
    """Read a server's URL: `localhost:3000`, `http://host/` or `http://host/v1`. Raises SettingError."""
    url = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1")
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url
    raise SettingError("url", f"{text!r} is not the address of a server, such as http://127.0.0.1:3000")


def new_client(kind: type[Client], url: str, read_s: float, key: str | None) -> Client:
    """Make an httpx client for one server. Proxies from the environment are not used for this machine's own
    addresses. Raises ServerError.
    """
    if key is not None and not key.isascii():
        raise ServerError("API_KEY has characters that are not ASCII, which no HTTP header can carry")
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
    timeout = httpx.Timeout(read_s, connect=CONNECT_TIMEOUT_S)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    proxies = urlsplit(url).hostname not in LOOPBACK
    try:
        return kind(base_url=url, timeout=timeout, limits=limits, headers=headers, trust_env=proxies)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ServerError(f"{url} cannot be used: {error}") from error


@contextlib.contextmanager
def answer_errors(url: str) -> Iterator[None]:
    """Raise a failed connection to `url`, and an answer that nobody here can read, as ServerError; a file of
    this machine that cannot be used as SettingError.
    """
    try:
        yield
    except httpx.ConnectError as error:
        fleets = [f"{one.url} ({one.folder})" for one in running_fleets() if one.url]
        cure = f"your fleet is at {', '.join(fleets)}" if fleets else "`tokenfleet serve` starts one"
        raise ServerError(f"no server answers at {url} ({error}); {cure}; --url names another") from error
    except httpx.TimeoutException as error:
        raise ServerError(f"{url} does not answer ({type(error).__name__})") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"the connection to {url} broke off: {error or type(error).__name__}") from error
    except (LookupError, AttributeError, TypeError, orjson.JSONDecodeError) as error:
        cause = one_line(f"{type(error).__name__}: {error}")
        raise ServerError(f"{url} answers in a form that is not known here ({cause})") from error
    except OSError as error:
        if error.filename is None:
            raise
        raise SettingError("file", f"{error.filename} cannot be used: {error.strerror}") from error


def fetch_json(client: httpx.Client, path: str) -> Any:
    """GET a path, and return its JSON. Raises ServerError for any status but 200."""
    return orjson.loads(ask(client, "GET", path).content)


def print_json(value: Any) -> None:
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def ask(client: httpx.Client, method: str, path: str, **content: Any) -> httpx.Response:
    """Send a request with `content`, as httpx takes it. Raises ServerError for any status but 200."""
    answer = client.request(method, path, **content)
    check_status(answer.status_code, answer.content)
    return answer


def model_name(answer: httpx.Response) -> str:
    """The first model of a server's answer to GET /v1/models. Raises ServerError."""
    check_status(answer.status_code, answer.content)
    return str(orjson.loads(answer.content)["data"][0]["id"])


def check_status(status: int, body: bytes) -> None:
    """Raise ServerError with the server's own message, unless the status is 200."""
    if status != 200:
        cure = "; set API_KEY to a key of this server" if status == 401 else ""
        kind = Unavailable if status in (502, 503, 504) else ServerError
        raise kind(f"the server answers {status}: {error_message(body)}{cure}")


def error_message(body: bytes) -> str:
    """Return the message of an error in OpenAI's or TGI's form; of any other body, the body itself."""
    found = None
    with contextlib.suppress(orjson.JSONDecodeError):
        found = orjson.loads(body)
    return one_line(error_text(found) or body.decode(errors="replace")) or "(an empty answer)"


def error_text(frame: Any) -> str:
    """Return the error in a JSON body or a frame; empty if there is none."""
    if not isinstance(frame, dict):
        return ""
    error = frame.get("error") or frame.get("detail") or ""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def one_line(text: str) -> str:
    """Return the text as one line of at most MAX_ERROR_CHARACTERS."""
    return " ".join(printable(text).split())[:MAX_ERROR_CHARACTERS]


def printable(text: str) -> str:
    """Remove the control characters that move a terminal's cursor or change its colours."""
    return text.translate(CONTROL_CHARACTERS)


def new_table(**options: bool) -> Table:
    """A table without lines, as commands show lists."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", **options)  # type: ignore[arg-type]


Columns = Mapping[str, Callable[[Any], str]]
"""Title → what makes the text of a row."""
NUMBER = re.compile(r"[\d.,×– ]*")
LONG = ("why", "said", "workers", "limits", "broker", "host")
"""Titles of columns whose texts may be folded."""


def table_of(rows: Iterable[Any], columns: Columns) -> Table:
    """A line for each row; numbers stand at the right."""
    table = new_table()
    lines = [[printable(of(row)) for of in columns.values()] for row in rows]
    for title, cells in zip(columns, zip(*lines, strict=True) if lines else [()] * len(columns), strict=True):
        justify: Any = "right" if lines and all(map(NUMBER.fullmatch, cells)) else "left"
        fold = title in LONG
        table.add_column(title, justify=justify, no_wrap=not fold, overflow="fold" if fold else "ellipsis")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def print_lines(*parts: RenderableType) -> None:
    """Print texts and tables. In a pipe or file no line is folded, and none ends with spaces."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    with console.capture() as capture:
        console.print(*parts, sep="\n")
    for line in capture.get().splitlines():
        print(line.rstrip())


class SseDecoder:
    """Decoder of server-sent events: `feed` yields the objects that a chunk of bytes completes, and raises an
    error among them as ServerError.

    Lines end with a line feed only: JSON may hold other characters at which `str.splitlines` would cut.

    Attributes:
        num_events: events of all responses so far.
        ended: whether `[DONE]` came.
    """

    def __init__(self) -> None:
        self.reset()
        self.num_events = 0
        self.ended = False

    def reset(self) -> None:
        """Begin another response, and forget an incomplete frame of the last one."""
        self.rest = b""

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            self.num_events += bool(data)
            self.ended = self.ended or data == b"[DONE]"
            if not data or data == b"[DONE]":
                continue
            frame = orjson.loads(data)
            if error := error_text(frame):
                raise ServerError(f"the server ends the answer: {one_line(error)}")
            yield frame
