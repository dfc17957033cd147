"""Stream: one answer of a server, received, cut by this client, and gone on with where that is possible."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from deploy.cli.client import ServerError, SseDecoder, error_message, error_text, frame_errors, one_line

RECONNECT_PAUSE_S = 0.1
NOT_YET = (502, 503, 504)
"""Statuses of a place whose gateway, or whose broker, is about to come back."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests are sent, and what each of them has.

    Attributes:
        fields: of every body: the model, the number of tokens, whether the end of a text is ignored.
        resume_s: how long after a lost connection the answer is to go on; 0: this client never comes back.
    """

    client: httpx.AsyncClient
    path: str
    fields: dict[str, Any]
    resume_s: float = 0.0

    def body(self, prompt: str) -> bytes:
        """Return a greedy, streamed request."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.is_chat else {"prompt": prompt}
        options = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        return orjson.dumps(self.fields | options | asked)

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")


@dataclass(slots=True)
class ReceivedAnswer:
    """What a client has of an answer.

    Attributes:
        user: which of the streams that run at once it belongs to.
        sent_s, ended_s: monotonic times of the request and of its end, good or bad.
        frames, times_s: texts, and when each came.
        num_tokens: as the server counts them; None if it does not.
        finish_reason: why it ended; empty while it has not.
        error: why it failed; empty if it did not.
        num_cuts: how often this client cut the connection.
        num_returns: how often it came back after a cut or a lost connection, and the answer went on.
        given_up: this client cut the connection, and the server does not let it come back.
    """

    prompt: int
    user: int
    sent_s: float
    ended_s: float = 0.0
    frames: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    num_tokens: int | None = None
    finish_reason: str = ""
    error: str = ""
    num_cuts: int = 0
    num_returns: int = 0
    given_up: bool = False

    @property
    def text(self) -> str:
        return "".join(self.frames)

    @property
    def is_whole(self) -> bool:
        return not (self.error or self.given_up)

    def add(self, frame: dict[str, Any], now_s: float) -> None:
        """Add one frame. Raises ServerError if it is an error, or has an unknown shape."""
        if error := error_text(frame):
            raise ServerError(f"an error in the stream: {one_line(error)}")
        with frame_errors(frame):
            self.num_tokens = (frame.get("usage") or {}).get("completion_tokens") or self.num_tokens
            for choice in frame.get("choices") or []:
                delta = choice.get("delta") or {}
                text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
                if text:
                    self.frames.append(text)
                    self.times_s.append(now_s)
                self.finish_reason = choice.get("finish_reason") or self.finish_reason


class Receiver:
    """Receives one answer over as many connections as it takes.

    Attributes:
        place: where the answer goes on, as the header `content-location` says; empty: it cannot.
        cut_after: this client cuts the connection once, after so many frames with text; 0: it does not.
    """

    def __init__(self, endpoint: Endpoint, answer: ReceivedAnswer, cut_after: int = 0) -> None:
        self.endpoint = endpoint
        self.answer = answer
        self.cut_after = cut_after
        self.frames = SseDecoder()
        self.place = ""

    async def receive(self, content: bytes) -> None:
        """Send the request, and fill in the answer until it ends. Nothing is sent twice: a client that comes
        back asks for the rest of the answer that it has begun.
        """
        try:
            await self.connect("POST", self.endpoint.path, content)
            while not self.has_ended():
                await self.come_back()
        except ServerError as error:
            self.answer.error = str(error)
        self.answer.ended_s = time.monotonic()

    def has_ended(self) -> bool:
        return self.frames.ended or self.answer.given_up or bool(self.answer.finish_reason and not self.place)

    async def come_back(self) -> None:
        """Connect again until a frame comes, or the time for it is over. Raises ServerError."""
        if not self.place:
            raise ServerError("the stream ended before the answer")
        until_s, seen = time.monotonic() + self.endpoint.resume_s, self.frames.num_events
        while self.frames.num_events == seen:
            if time.monotonic() > until_s:
                raise ServerError(f"no server went on within {self.endpoint.resume_s:g} s")
            await self.connect("GET", self.place, b"")
            if self.frames.num_events == seen:
                await asyncio.sleep(RECONNECT_PAUSE_S)
        self.answer.num_returns += 1

    async def connect(self, method: str, path: str, content: bytes) -> None:
        """Read what one connection brings. Raises ServerError, unless the answer can go on elsewhere."""
        self.frames.reset()
        try:
            async with self.endpoint.client.stream(
                method, path, content=content, headers=self.headers()
            ) as response:
                await self.read(response)
        except httpx.TransportError as error:
            if not self.place:
                raise ServerError(describe(error)) from error

    def headers(self) -> dict[str, str]:
        found = {"content-type": "application/json"}
        if self.endpoint.resume_s:
            found["x-resume-seconds"] = f"{self.endpoint.resume_s:.0f}"
        if self.frames.num_events:
            found["last-event-id"] = str(self.frames.num_events)
        return found

    async def read(self, response: httpx.Response) -> None:
        if self.place and response.status_code in NOT_YET:
            return
        if response.status_code != httpx.codes.OK:
            reason = error_message(await response.aread())
            raise ServerError(f"status {response.status_code}: {reason}")
        if self.endpoint.resume_s:
            self.place = response.headers.get("content-location", self.place)
        async for chunk in response.aiter_raw():
            now_s = time.monotonic()
            for frame in self.frames.feed(chunk):
                self.answer.add(frame, now_s)
                if len(self.answer.frames) == self.cut_after and not self.answer.num_cuts:
                    self.answer.num_cuts, self.answer.given_up = 1, not self.place
                    return


def describe(error: httpx.TransportError) -> str:
    """Return what became of a connection, without what differs from one to the next."""
    match error:
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return "no connection"
        case httpx.TimeoutException():
            return "no token in time"
    return "the connection broke off"
