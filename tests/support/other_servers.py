"""A server that speaks as a Tokenfleet and as vLLM do, without a model, in a thread, on a free port."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync

WORDS = "The sky is blue because light scatters, and \u2028 lines may hold any sign.".split(" ")


@dataclass
class Server:
    """A server, and what it was asked.

    Attributes:
        bodies: of all POSTs, in order; `keys`: their authorization headers.
        num_closed: streams that their client closed before the end.
        pause_s: between two tokens.
        num_thoughts: so many words of a chat's stream are reasoning.
        endless: the stream says the words again and again.
        refusal: status and body of every POST, instead of a stream.
    """

    port: int = field(default_factory=free_port)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    num_closed: int = 0
    pause_s: float = 0.0
    num_thoughts: int = 0
    endless: bool = False
    refusal: tuple[int, Any] | None = None
    late_error: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> Starlette:
        paths = ["/v1/models", "/v1/completions", "/v1/chat/completions"]
        return Starlette(routes=[Route(path, self.answer, methods=["GET", "POST"]) for path in paths])

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        if request.method == "GET":
            return JSONResponse({"data": [{"id": "tiny"}]})
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        if self.refusal:
            status, said = self.refusal
            return JSONResponse(said, status)
        return StreamingResponse(self.frames(path, body), media_type="text/event-stream")

    async def frames(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        num = 10**9 if self.endless else body.get("max_tokens") or len(WORDS)
        try:
            for i in range(num):
                await asyncio.sleep(self.pause_s)
                name = "reasoning_content" if i < self.num_thoughts else "content"
                yield frame(token(path, WORDS[i % len(WORDS)] + " ", name))
                if self.late_error:
                    yield frame(self.late_error)
                    return
        except asyncio.CancelledError:
            self.num_closed += 1
            raise
        usage = {"prompt_tokens": len(str(body.get("prompt", "")).split()), "completion_tokens": num}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield frame({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def token(path: str, text: str, name: str) -> dict[str, Any]:
    if "chat" in path:
        return {"choices": [{"index": 0, "delta": {name: text}}]}
    return {"choices": [{"index": 0, "text": text}]}


def frame(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


FLEET: dict[str, Any] = {
    "pool": "default",
    "model": "tiny",
    "version": "0.1.0",
    "health": {"state": "good", "text": "1 worker ready"},
    "requests": {"live": 3, "waiting": 1, "running": 2, "limit": 1024},
    "processes": [
        {"kind": "worker", "id": "w0-aaaa", "host": "here", "pid": 41, "state": "ready", "age_s": 0.2}
        | {"rows": 2, "max_rows": 256, "blocks": 12, "num_blocks": 4096, "tokens": 1000, "step": 77},
        {"kind": "gateway", "id": "g0-bbbb", "host": "here", "pid": 42, "state": "ready", "age_s": 0.1}
        | {"streams": 3},
        {"kind": "batcher", "id": "b0-cccc", "host": "here", "pid": 43, "state": "active", "age_s": 3.5}
        | {"active": True, "waiting": 1},
    ],
    "time_s": 1000.0,
}


@contextlib.contextmanager
def in_thread(app: Starlette, port: int) -> Iterator[None]:
    """Serve an application. The end of the context ends it and its streams."""
    quiet: dict[str, Any] = {"log_level": "critical", "timeout_graceful_shutdown": 0}
    http = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, **quiet))
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    try:
        wait_until_sync(lambda: http.started)
        yield
    finally:
        http.should_exit = http.force_exit = True
        thread.join(10)


@contextlib.contextmanager
def running(**about: Any) -> Iterator[Server]:
    server = Server(**about)
    with in_thread(server.app(), server.port):
        yield server
