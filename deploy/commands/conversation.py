"""Conversation: the history of a chat, and its requests to the server."""

import contextlib
import json
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import httpx

from deploy.commands.client import Frames, Trouble, check, explained, said, shown, unexpected

Message = dict[str, str]


@dataclass(slots=True)
class ChatAnswer:
    """One streamed answer, as far as it has come.

    Attributes:
        asked_s, first_s, last_s: monotonic times of the request, and of the first and last text.
        num_tokens: the server's own count, else the number of frames with text.
    """

    asked_s: float
    text: str = ""
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0

    def take(self, text: str, now_s: float) -> None:
        self.first_s = self.first_s or now_s
        self.last_s = now_s
        self.text += text
        self.num_tokens += 1

    @property
    def figures(self) -> str:
        if not self.first_s:
            return "no text"
        words = f"{self.num_tokens} token{'s' * (self.num_tokens != 1)}"
        words += f" · first token {self.first_s - self.asked_s:.2f} s"
        seconds = self.last_s - self.first_s
        return (
            f"{(self.num_tokens - 1) / seconds:.1f} tokens/s · {words}"
            if seconds > 0 and self.num_tokens > 1
            else words
        )


@dataclass(slots=True)
class Conversation:
    """The history, and how to ask.

    Attributes:
        fields: of every request: model, temperature …
        turns: what was said, without the system prompt.
    """

    client: httpx.Client
    fields: dict[str, Any]
    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def body(self) -> bytes:
        system = [{"role": "system", "content": self.system}] if self.system else []
        how = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(self.fields | how | {"messages": system + self.turns}).encode()

    def ask(self, text: str, show: Callable[[str], None]) -> ChatAnswer:
        """Shows the answer as it comes. Leaving early closes the connection; what was shown stays in the
        history.

        Raises Trouble. A question to which there is no text at all leaves the history as it was.
        """
        self.turns.append({"role": "user", "content": text})
        answer = ChatAnswer(time.monotonic())
        try:
            with explained(str(self.client.base_url)), contextlib.closing(self.pieces(answer)) as pieces:
                for piece in pieces:
                    show(piece)
        finally:
            if answer.text:
                self.turns.append({"role": "assistant", "content": answer.text})
            else:
                self.turns.pop()
        return answer

    def pieces(self, answer: ChatAnswer) -> Generator[str, None, None]:
        headers = {"content-type": "application/json"}
        with self.client.stream(
            "POST", "/v1/chat/completions", content=self.body(), headers=headers
        ) as response:
            if response.status_code != 200:
                check(response.status_code, response.read())
            frames = Frames()
            for chunk in response.iter_raw():
                for frame in frames.feed(chunk):
                    if error := said(frame):
                        raise Trouble(f"the server ends the answer: {shown(error)}")
                    with unexpected(frame):
                        text, num_tokens = content(frame), (frame.get("usage") or {}).get("completion_tokens")
                    if text:
                        answer.take(text, time.monotonic())
                        yield text
                    answer.num_tokens = num_tokens or answer.num_tokens


def content(frame: dict[str, Any]) -> str:
    """The text of a chunk; empty in the first one, in the last, and in the one with the usage."""
    choices = frame.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""
