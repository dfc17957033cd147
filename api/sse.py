"""Server-sent events: frames of TGI's shape, keep-alive comments, and the end of whoever reads them."""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.types import Receive, Scope, Send

from api.errors import Refusal, encode, failed
from api.stream import Stream

KEEP_ALIVE_S = 15
HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}

AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]  # streams in flight are finished, not cut, when the server is told to stop


class TokenStream(EventSourceResponse):
    """The frames of a stream as an answer. `leave` is called once, when it is sent or its client is gone."""

    def __init__(self, stream: Stream, details: bool, headers: Mapping[str, str], leave: Callable[[Stream], None]) -> None:
        super().__init__(
            frames(stream, details), headers=HEADERS | dict(headers), sep="\n", ping=KEEP_ALIVE_S, ping_message_factory=keep_alive
        )
        self.stream, self.leave = stream, leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.leave(self.stream)

    async def _stream_response(self, send: Send) -> None:
        """As the library does it, without what it does for every chunk: these are bytes already, and to send them has no deadline."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self.body_iterator:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        async with self._send_lock:
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def keep_alive() -> ServerSentEvent:
    return ServerSentEvent(comment="", sep="\n")


async def frames(stream: Stream, details: bool) -> AsyncIterator[bytes]:
    """The frames that are ready, as often as there are new ones, up to the last."""
    shown = 0
    while True:
        await stream.changed.wait()
        stream.changed.clear()
        ready, ended = stream.num_ready, stream.terminal is not None
        new = [frame(frame_body(stream, i)) for i in range(shown, ready)]
        shown = max(shown, ready)
        if ended:
            new.append(last_frame(stream, shown, details))
        if new:
            yield b"".join(new)
        if ended:
            return


def frame(body: bytes) -> bytes:
    return b"data: %b\n\n" % body


def frame_body(stream: Stream, i: int, text: str | None = None, details: dict[str, Any] | None = None) -> bytes:
    return encode({"index": i + 1, "token": token(stream, i), "generated_text": text, "details": details})


def last_frame(stream: Stream, shown: int, details: bool) -> bytes:
    """The last token with the whole text, or the error."""
    assert stream.terminal is not None
    if not stream.finished:
        return frame(failed(stream.terminal).body)
    if shown == stream.num_tokens:  # an end that nothing announced: no token is shown twice
        return frame(Refusal(500, "incomplete_generation_stream", "Incomplete generation stream").body)
    return frame(frame_body(stream, stream.num_tokens - 1, stream.text, summary(stream) if details else None))


def token(stream: Stream, i: int) -> dict[str, Any]:
    token_id = stream.ids[i]
    special = token_id in stream.vocabulary.special_ids
    return {"id": token_id, "text": stream.texts[i], "logprob": stream.logprobs[i], "special": special}


def summary(stream: Stream) -> dict[str, Any]:
    """`details` of the last frame."""
    assert stream.terminal is not None
    return {
        "finish_reason": stream.terminal.reason,
        "generated_tokens": stream.num_tokens,
        "seed": None,
        "input_length": len(stream.prompt_ids),
    }
