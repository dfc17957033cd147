"""An OpenAI-compatible server that drops, repeats and changes tokens as a test tells it, in a thread."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.machine.http_thread import serving_in_thread
from tests.support.machine.ports import free_port

Fault = Callable[[list[str]], Sequence[str | None]]
"""Changes the tokens of an answer. None: the connection breaks off here."""
TOKEN_S = 0.002


def tokens_of(prompt: str, num_tokens: int) -> list[str]:
    """The right answer to a prompt: words that do not come twice."""
    return [f" {prompt.split()[1].rstrip(':')}w{i}" for i in range(num_tokens)]


@dataclass
class BadServer:
    """A server whose answers are right until `fault` is set.

    Attributes:
        routes: OpenAI's routes that it has.
        resumes: whether it lets clients come back, as a Tokenfleet does.
        fault, refusal: what it does to each answer; the status of each.
        alternates: whether answers to a prompt differ from one to the next.
        num_requests, returns: of all routes; the `last-event-id` of each client that came back.
    """

    port: int = field(default_factory=free_port)
    routes: Sequence[str] = ("/v1/completions",)
    resumes: bool = False
    fault: Fault | None = None
    refusal: int = 0
    alternates: bool = False
    num_requests: int = 0
    returns: list[int] = field(default_factory=list)
    answers: dict[str, list[str | None]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> Starlette:
        routes = [Route(path, self.answer, methods=["POST"]) for path in self.routes]
        models = Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "tiny"}]}))
        return Starlette(routes=[*routes, models, Route("/again/{name}", self.go_on)])

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.num_requests += 1
        if self.refusal:
            return JSONResponse({"error": {"message": "not now"}}, self.refusal)
        is_chat = "messages" in body
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        tokens: Sequence[str | None] = tokens_of(f"{prompt} x", body["max_tokens"])
        if self.alternates:
            tokens = [f"{token}{self.num_requests}" for token in tokens]
        if self.fault and body["max_tokens"] > 1:
            tokens = self.fault([token for token in tokens if token is not None])
        name = str(self.num_requests)
        self.answers[name] = [*tokens]
        headers = {"content-location": f"/again/{name}"} if self.resumes else {}
        return StreamingResponse(self.frames(name, 0, is_chat), headers=headers)

    async def go_on(self, request: Request) -> Response:
        seen = int(request.headers.get("last-event-id", 0))
        self.returns.append(seen)
        return StreamingResponse(self.frames(request.path_params["name"], seen, False))

    async def frames(self, name: str, begin: int, is_chat: bool) -> AsyncIterator[bytes]:
        tokens = self.answers[name]
        for token in tokens[begin:]:
            await asyncio.sleep(TOKEN_S)
            if token is None:
                raise ConnectionError("as the test wants it")
            yield frame({"delta": {"content": token}} if is_chat else {"text": token})
        end: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        yield frame(end | {"finish_reason": "length"})
        yield b"data: [DONE]\n\n"


def frame(choice: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0} | choice]}).encode() + b"\n\n"


@contextlib.contextmanager
def bad_server(**about: Any) -> Iterator[BadServer]:
    """Run a server; the end of the context ends it."""
    server = BadServer(**about)
    with serving_in_thread(server.app(), server.port):
        yield server
