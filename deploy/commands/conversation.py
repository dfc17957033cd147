"""Conversation: the history of a chat, and its requests to the server."""

import contextlib
import json
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import httpx

from deploy.commands.client import (
    ServerError,
    SseDecoder,
    check_status,
    connection_errors,
    error_text,
    frame_errors,
    one_line,
)

Message = dict[str, str]
RETURN_S = 30.0
RETURN_PAUSE_S = 0.2


@dataclass(slots=True)
class ChatAnswer:
    """One streamed answer, as far as it has come.

    Attributes:
        sent_s, first_s, last_s: monotonic times of the request, and of the first and last text.
        num_tokens: the server's own count, else the number of frames with text.
    """

    sent_s: float
    text: str = ""
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0

    def add(self, text: str, now_s: float) -> None:
        self.first_s = self.first_s or now_s
        self.last_s = now_s
        self.text += text
        self.num_tokens += 1

    @property
    def figures(self) -> str:
        if not self.first_s:
            return "no text"
        words = f"{self.num_tokens} token{'s' * (self.num_tokens != 1)}"
        words += f" · first token {self.first_s - self.sent_s:.2f} s"
        seconds = self.last_s - self.first_s
        return (
            f"{(self.num_tokens - 1) / seconds:.1f} tokens/s · {words}"
            if seconds > 0 and self.num_tokens > 1
            else words
        )


@dataclass(slots=True)
class Conversation:
    """The history of a chat, and the fields of its requests.

    Attributes:
        fields: of every request: model, temperature …
        messages: of the user and of the model, without the system prompt.
    """

    client: httpx.Client
    fields: dict[str, Any]
    system: str = ""
    messages: list[Message] = field(default_factory=list)

    def body(self) -> bytes:
        system = [{"role": "system", "content": self.system}] if self.system else []
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(self.fields | options | {"messages": system + self.messages}).encode()

    def send(self, text: str, show: Callable[[str], None]) -> ChatAnswer:
        """Send a message, and show the answer as it comes. An exception (Ctrl-C) closes the connection; what
        was shown stays in the history.

        Raises ServerError. Where no text came, the history stays as it was.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ChatAnswer(time.monotonic())
        try:
            with (
                connection_errors(str(self.client.base_url)),
                contextlib.closing(self.stream(answer)) as pieces,
            ):
                for piece in pieces:
                    show(piece)
        finally:
            if answer.text:
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()
        return answer

    def stream(self, answer: ChatAnswer) -> Generator[str, None, None]:
        with contextlib.closing(self.frames()) as frames:
            for frame in frames:
                if error := error_text(frame):
                    raise ServerError(f"the server ends the answer: {one_line(error)}")
                with frame_errors(frame):
                    text, num_tokens = content(frame), (frame.get("usage") or {}).get("completion_tokens")
                if text:
                    answer.add(text, time.monotonic())
                    yield text
                answer.num_tokens = num_tokens or answer.num_tokens

    def frames(self) -> Generator[dict[str, Any], None, None]:
        """Yield the frames of an answer. A lost connection is followed by another, behind the last frame, if
        the server has said where; it may be a new gateway by then.
        """
        decoder, place, until_s = SseDecoder(), "", 0.0
        while not decoder.ended:
            decoder.reset()
            try:
                with self.request(place, decoder.num_events) as response:
                    if response.status_code != 200 and not (place and response.status_code == 503):
                        check_status(response.status_code, response.read())
                    place = response.headers.get("content-location", place)
                    for chunk in response.iter_raw() if response.status_code == 200 else []:
                        until_s = 0.0
                        yield from decoder.feed(chunk)
                if not place:
                    return
            except httpx.TransportError:
                if not place:
                    raise
            until_s = until_s or time.monotonic() + RETURN_S
            if not decoder.ended and time.monotonic() > until_s:
                raise ServerError(f"the connection was lost, and no gateway went on within {RETURN_S:.0f} s")
            if not decoder.ended:
                time.sleep(RETURN_PAUSE_S)

    def request(self, place: str, num_seen: int) -> contextlib.AbstractContextManager[httpx.Response]:
        """Ask for an answer, or for the rest of one at the place that the server named."""
        if place:
            return self.client.stream(
                "GET", place, headers={"last-event-id": str(num_seen)} if num_seen else {}
            )
        headers = {"content-type": "application/json"}
        return self.client.stream("POST", "/v1/chat/completions", content=self.body(), headers=headers)


def content(frame: dict[str, Any]) -> str:
    """Return the text of a chunk: empty in the first, in the last, and in the one with the usage."""
    choices = frame.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""
