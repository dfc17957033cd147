"""A real browser for tests of the page, and what every page must keep to.
A scripted gateway for the page: the page's files as they are, and a fleet that does what a test says.

It needs no broker and no model, so a test of what the page shows takes a second. Whole fleets are in
tests/fleet/test_page.py.
"""

import asyncio
import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

from fastapi import FastAPI
from playwright.sync_api import Browser, Page, expect, sync_playwright
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from api.admin.routes_health import page_router
from tests.support.machine.ports import free_port
from tests.support.other_servers import FLEET, in_thread

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

Reply = tuple[int, Any]
Route = Callable[[str, Any], Reply]


def worker(name: str, **figures: Any) -> dict[str, Any]:
    known = {
        "id": f"{name}-{abs(hash(name)) % 16**8:08x}",
        "num_blocks": 91,
        "device": "cpu",
        "dtype": "float32",
    }
    nothing = dict.fromkeys(("rows", "blocks", "tokens", "known", "cached"), 0)
    return dict(FLEET["processes"][0] | known | nothing | figures)


def others() -> list[dict[str, Any]]:
    """A gateway, a batcher and the broker."""
    broker = {"kind": "broker", "id": "broker", "state": "ready", "age_s": 0.1, "pid": 7}
    broker |= {"clients": 9, "memory_bytes": 2**21, "commands_per_s": 0}
    return [*FLEET["processes"][1:], broker]


class ScriptedGateway:
    """`with ScriptedGateway(num_workers=2) as gateway:` serves the page at `gateway.url`.

    Streams of `text` bring a token every `gap_s`; they are placed on the workers in turns. A killed worker's
    streams go on at the first worker that is left, after `pause_s`.

    Attributes:
        routes: (method, path) → (path, body) → (status, JSON): further routes, which a test adds.
        asked: (method, path, body) of every request but those of the page and of its `/fleet`.
        num_thoughts: so many tokens of each stream are reasoning.
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
        self.cut_after, self.most, self.num_thoughts = 0, 10**6, 0
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        app = FastAPI()
        app.add_route("/page/access", self.access)
        app.include_router(page_router)
        app.add_route("/{path:path}", self.answer, ["GET", "POST", "DELETE"])
        self.serving = in_thread(app, port)

    def __enter__(self) -> Self:
        self.serving.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.serving.__exit__(*error)

    # --- routes ---------------------------------------------------------------------------------------------

    async def access(self, request: Request) -> Response:
        status, content = 200, {"status": 200, "has_keys": True}
        if route := self.routes.get(("GET", "/page/access")):
            status, content = route("/page/access", None)
        return JSONResponse(content, status)

    async def answer(self, request: Request) -> Response:
        path = request.scope["raw_path"].decode()
        body = json.loads(await request.body() or b"null")
        route = self.routes.get((request.method, path))
        if path == "/fleet" and not route:
            return JSONResponse(self.fleet())
        self.asked.append((request.method, path, body))
        if route:
            status, content = route(path, body)
            return JSONResponse(content, status)
        if path == "/v1/chat/completions":
            return self.stream({self.admit(): 0})
        if path == "/requests/streams":
            places = [place.partition("/") for place in body["streams"]]
            return self.stream({name: int(seen or 0) for name, _, seen in places}, merged=True)
        if path.startswith("/fleet/requests/"):
            return JSONResponse(self.timeline(path.rpartition("/")[2]))
        if path.endswith("/kill"):
            return JSONResponse(self.kill(path.split("/")[3]), 202)
        return JSONResponse({"error": "Not Found"}, 404)

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
        return FLEET | {
            "model": "smollm2",
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

    def stream(self, places: dict[str, int], merged: bool = False) -> Response:
        """Send the frames of answers; each after the number of those that the page has."""
        first = next(iter(places))
        place = {"content-location": f"/requests/{first}/stream", "x-request-id": first}
        return StreamingResponse(self.sent(places, merged), headers=place, media_type="text/event-stream")

    async def sent(self, places: dict[str, int], merged: bool) -> AsyncIterator[str]:
        frames, sent = {name: self.frames(name, seen) for name, seen in places.items()}, dict(places)
        while frames:
            await asyncio.sleep(self.gap_s)
            for name in [*frames]:
                is_held = sent[name] > self.most
                if is_held or self.paused_until_s.get(name, 0.0) > time.monotonic():
                    continue
                number, data = next(frames[name], (0, ""))
                if not number:
                    del frames[name]
                    continue
                sent[name] = number
                yield f"id: {f'{name}/{number}' if merged else number}\ndata: {data}\n\n"
                if merged and number == self.cut_after:
                    self.cut_after = 0
                    return

    def frames(self, name: str, seen: int) -> Iterator[tuple[int, str]]:
        deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}]
        deltas += [
            {"reasoning_content" if i < self.num_thoughts else "content": (" " if i else "") + token}
            for i, token in enumerate(self.tokens)
        ]
        for number, delta in enumerate(deltas[seen:], seen + 1):
            if number - 1 > self.counts[name]:
                self.counts[name] = number - 1
                self.made[self.runs[name][-1][1]] += 1
            ending = "stop" if number == len(deltas) else None
            choice = {"index": 0, "delta": delta, "finish_reason": ending}
            yield number, json.dumps({"choices": [choice]})
        yield len(deltas) + 1, "[DONE]"
