"""A real browser for tests of the page, and what every page must keep to.
A scripted gateway for the page: the page's files as they are, and a fleet that does what a test says.

It needs no broker and no model, so a test of what the page shows takes a second. Whole fleets are in
tests/fleet/test_page.py.
"""

import contextlib
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from playwright.sync_api import Browser, Page, expect, sync_playwright

from api.admin.routes_health import PAGE_FILES, PAGE_HEADERS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
LAPTOP = {"width": 1400, "height": 900}


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """Chromium; what a test expects of a page may take long while all other tests run."""
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser: Browser, url: str, is_quiet: bool = False, **context_options: Any) -> Iterator[Page]:
    """A page. In the end it must not have raised an error nor violated the Content Security Policy; one that
    is quiet has no error at all in the browser's console, as a response of 403 is.
    """
    context = browser.new_context(**{"viewport": LAPTOP} | context_options)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda message: (
            errors.append(message.text)
            if "Content Security Policy" in message.text or (is_quiet and message.type == "error")
            else None
        ),
    )
    page.goto(url)
    yield page
    context.close()
    assert not errors


# --- scripted gateway ---------------------------------------------------------------------------------------

KINDS = {
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
    "html": "text/html; charset=utf-8",
}
Reply = tuple[int, Any]
Route = Callable[[str, Any], Reply]


def worker(name: str, **figures: Any) -> dict[str, Any]:
    return {
        "kind": "worker",
        "id": f"{name}-{abs(hash(name)) % 16**8:08x}",
        "host": "vm",
        "pid": 100,
        "state": "ready",
        "age_s": 0.1,
        "rows": 0,
        "max_rows": 256,
        "blocks": 0,
        "num_blocks": 91,
        "tokens": 0,
        "known": 0,
        "cached": 0,
        "device": "cpu",
        "dtype": "float32",
    } | figures


def others() -> list[dict[str, Any]]:
    """A gateway, a batcher and the broker."""
    common = {"host": "vm", "pid": 7, "state": "ready", "age_s": 0.1}
    return [
        common | {"kind": "gateway", "id": "g0-1", "streams": 0},
        common
        | {"kind": "batcher", "id": "b0-1", "state": "active", "active": True, "waiting": 0, "rows": 0},
        common | {"kind": "broker", "id": "broker", "clients": 9, "memory_bytes": 2**21, "commands_per_s": 0},
    ]


class ScriptedGateway:
    """`with ScriptedGateway(num_workers=2) as gateway:` serves the page at `gateway.url`.

    Streams of `text` bring a token every `gap_s`; they are placed on the workers in turns. A killed worker's
    streams go on at the first worker that is left, after `pause_s`.

    Attributes:
        routes: (method, path) → (path, body) → (status, JSON): further routes, which a test adds.
        asked: (method, path, body) of every request but those of files and of `/fleet`.
        most: a stream that has so many tokens waits until this is more.
        cut_after: the connection of several answers is cut once, after this frame of one of them.
    """

    def __init__(
        self,
        num_workers: int = 2,
        text: str = "",
        gap_s: float = 0.01,
        pause_s: float = 0.3,
        demo: bool = True,
    ) -> None:
        self.workers = [worker(f"w{i}") for i in range(num_workers)]
        self.tokens = text.split(" ")
        self.gap_s, self.pause_s, self.demo = gap_s, pause_s, demo
        self.runs: dict[str, list[tuple[int, str]]] = {}
        self.paused_until_s: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.made: Counter[str] = Counter()
        self.routes: dict[tuple[str, str], Route] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.cut_after, self.most = 0, 10**6
        self.is_over = threading.Event()
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                gateway.answer(self)

            def do_POST(self) -> None:
                gateway.answer(self)

            def do_DELETE(self) -> None:
                gateway.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_over.set()
        self.server.shutdown()
        self.server.server_close()

    # --- routes ---------------------------------------------------------------------------------------------

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        length = int(handler.headers.get("content-length") or 0)
        body = json.loads(handler.rfile.read(length) or b"null")
        if path == "/page/access":
            access = self.routes.get(("GET", path))
            shown = access(path, body) if access else (200, {"status": 200, "has_keys": True})
            self.send_json(handler, *shown)
        elif path == "/" or path.startswith("/page/"):
            self.send_file(handler, "page.html" if path == "/" else path.removeprefix("/page/"))
        elif path == "/fleet" and ("GET", path) not in self.routes:
            self.send_json(handler, 200, self.fleet())
        else:
            self.asked.append((handler.command, path, body))
            self.answer_call(handler, path, body)

    def answer_call(self, handler: BaseHTTPRequestHandler, path: str, body: Any) -> None:
        if route := self.routes.get((handler.command, path)):
            self.send_json(handler, *route(path, body))
        elif path == "/v1/chat/completions":
            self.send_stream(handler, {self.admit(): 0})
        elif path == "/requests/streams":
            places = [place.partition("/") for place in body["streams"]]
            self.send_stream(handler, {name: int(seen or 0) for name, _, seen in places}, merged=True)
        elif path.startswith("/fleet/requests/"):
            self.send_json(handler, 200, self.timeline(path.rpartition("/")[2]))
        elif path.endswith("/kill"):
            self.send_json(handler, 202, self.kill(path.split("/")[3]))
        else:
            self.send_json(handler, 404, {"error": "Not Found"})

    def send_file(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        content = PAGE_FILES[name].read_bytes()
        self.send_head(handler, 200, KINDS[name.rpartition(".")[2]], PAGE_HEADERS, len(content))
        handler.wfile.write(content)

    def send_json(self, handler: BaseHTTPRequestHandler, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_head(handler, status, "application/json", {}, len(data))
        handler.wfile.write(data)

    def send_head(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        kind: str,
        headers: dict[str, str],
        length: int | None,
    ) -> None:
        handler.send_response(status)
        sized = {"connection": "close"} if length is None else {"content-length": str(length)}
        for name, value in ({"content-type": kind} | headers | sized).items():
            handler.send_header(name, value)
        handler.end_headers()

    # --- the fleet ------------------------------------------------------------------------------------------

    def fleet(self) -> dict[str, Any]:
        live = [worker for worker in self.workers if worker["state"] == "ready"]
        for one in live:
            one["tokens"] = self.made[one["id"]]
            one["rows"] = len(self.held_by(one["id"]))
            one["blocks"] = 4 * one["rows"]
        running = sum(one["rows"] for one in live)
        processes = [*self.workers, *others()]
        for process in processes:
            if process["kind"] == "batcher":
                process["rows"] = running
        return {
            "pool": "default",
            "model": "smollm2",
            "version": "1",
            "time_s": time.time(),
            "demo": self.demo,
            "health": {"state": "good", "text": f"{len(live)} workers ready"},
            "requests": {"live": running, "waiting": 0, "running": running, "limit": 1024},
            "processes": processes,
        }

    def held_by(self, worker_id: str) -> list[str]:
        return [
            name
            for name, runs in self.runs.items()
            if runs[-1][1] == worker_id and self.counts[name] < len(self.tokens)
        ]

    def admit(self) -> str:
        name = f"{len(self.runs):032x}"
        self.counts[name] = 0
        self.runs[name] = [(0, self.workers[len(self.runs) % len(self.workers)]["id"])]
        return name

    def kill(self, worker_id: str) -> dict[str, str]:
        names = self.held_by(worker_id)
        left = [worker for worker in self.workers if worker["id"] != worker_id]
        self.workers = left or [self.workers[0] | {"id": f"{worker_id}0"}]
        for name in names:
            self.paused_until_s[name] = time.monotonic() + self.pause_s
            self.runs[name].append((self.counts[name], self.workers[0]["id"]))
        return {"killed": worker_id}

    def timeline(self, name: str) -> dict[str, Any]:
        events = [
            {"at_ms": 0, "what": "placed", "worker": held, "attempt": i, "num_tokens": begin}
            for i, (begin, held) in enumerate(self.runs[name])
        ]
        return {"request_id": name, "timelines": {name: events}}

    # --- streams --------------------------------------------------------------------------------------------

    def send_stream(
        self, handler: BaseHTTPRequestHandler, places: dict[str, int], merged: bool = False
    ) -> None:
        """Send the frames of answers; each after the number of those that the page has."""
        first = next(iter(places))
        place = {"content-location": f"/requests/{first}/stream", "x-request-id": first}
        self.send_head(handler, 200, "text/event-stream", place, None)
        handler.close_connection = True
        frames, sent = {name: self.frames(name, seen) for name, seen in places.items()}, dict(places)
        with contextlib.suppress(OSError):  # the page has hung up
            while frames and not self.is_over.wait(self.gap_s):
                for name in [*frames]:
                    is_held = sent[name] > self.most
                    if is_held or self.paused_until_s.get(name, 0.0) > time.monotonic():
                        continue
                    number, data = next(frames[name], (0, ""))
                    if not number:
                        del frames[name]
                        continue
                    sent[name] = number
                    frame_id = f"{name}/{number}" if merged else str(number)
                    handler.wfile.write(f"id: {frame_id}\ndata: {data}\n\n".encode())
                    if merged and number == self.cut_after:
                        self.cut_after = 0
                        return
                handler.wfile.flush()

    def frames(self, name: str, seen: int) -> Iterator[tuple[int, str]]:
        deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": (" " if i else "") + token} for i, token in enumerate(self.tokens)]
        for number, delta in enumerate(deltas[seen:], seen + 1):
            if number - 1 > self.counts[name]:
                self.counts[name] = number - 1
                self.made[self.runs[name][-1][1]] += 1
            ending = "stop" if number == len(deltas) else None
            choice = {"index": 0, "delta": delta, "finish_reason": ending}
            yield number, json.dumps({"choices": [choice]})
        yield len(deltas) + 1, "[DONE]"
