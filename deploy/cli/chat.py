"""`tokenfleet chat`: a conversation in the terminal; with a piped stdin, one answer on stdout."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

from common.settings.settings import SettingError
from deploy.cli.client import (
    ServerError,
    SseDecoder,
    check_status,
    connection_errors,
    error_text,
    fetch_json,
    frame_errors,
    one_line,
    printable,
)

Message = dict[str, str]

RECONNECT_TIMEOUT_S = 30.0
RECONNECT_PAUSE_S = 0.2
PROMPT = "› "
HELP = (
    "/reset forgets the conversation · /system TEXT sets the system prompt · "
    "/exit or Ctrl-D ends · Ctrl-C stops an answer"
)


@dataclass(slots=True)
class ChatAnswer:
    """One streamed answer, as far as it has been received.

    Attributes:
        sent_s, first_s, last_s: monotonic times of the request, and of the first and last text.
        num_tokens: the server's own count; without one, the number of frames with text.
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
        fields: what every request holds besides messages: model, temperature …
        system: the system prompt; empty: none.
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
        """Send a message, and show the answer as it comes. Raises ServerError.

        An exception (Ctrl-C) closes the connection. What was shown stays in the history; if no text came,
        the history stays as it was.
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
        """Yield the frames of an answer. After a lost connection another one goes on after the last frame, if
        the server has named a place for that. By then the place may be at a new gateway.
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
            until_s = until_s or time.monotonic() + RECONNECT_TIMEOUT_S
            if not decoder.ended and time.monotonic() > until_s:
                wait = f"{RECONNECT_TIMEOUT_S:.0f} s"
                raise ServerError(f"the connection was lost, and no gateway went on within {wait}")
            if not decoder.ended:
                time.sleep(RECONNECT_PAUSE_S)

    def request(self, place: str, num_seen: int) -> contextlib.AbstractContextManager[httpx.Response]:
        """Ask for an answer, or for its rest at the place that the server named."""
        if place:
            return self.client.stream(
                "GET", place, headers={"last-event-id": str(num_seen)} if num_seen else {}
            )
        headers = {"content-type": "application/json"}
        return self.client.stream("POST", "/v1/chat/completions", content=self.body(), headers=headers)


def content(frame: dict[str, Any]) -> str:
    """Return the text of a chunk; the first, the last and the one with the usage have none."""
    choices = frame.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def run(client: httpx.Client, flags: argparse.Namespace) -> None:
    fields = {"temperature": flags.temperature, "max_tokens": flags.max_tokens, "seed": flags.seed}
    given = {name: value for name, value in fields.items() if value is not None}
    conversation = Conversation(client, {"model": fetch_model_name(client)} | given, flags.system)
    try:
        if sys.stdin.isatty():
            run_terminal(conversation)
        else:
            answer_once(conversation)
    except BrokenPipeError:  # the reader of our output closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fetch_model_name(client: httpx.Client) -> str:
    """Return the name of the served model. Raises ServerError."""
    models = fetch_json(client, "/v1/models")
    try:
        return str(models["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise ServerError(f"{client.base_url} names no model at /v1/models") from error


def answer_once(conversation: Conversation) -> None:
    """Send all of stdin as one message, and print the answer and nothing else on stdout."""
    text = sys.stdin.buffer.read().decode(errors="replace").strip()
    if not text:
        raise SettingError(
            "stdin", "is empty: pipe a message into it, or start `tokenfleet chat` in a terminal"
        )
    conversation.send(text, write_plain)
    write_plain("\n")


def write_plain(text: str) -> None:
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def run_terminal(conversation: Conversation) -> None:
    """Talk with the user until /exit or Ctrl-D. Ctrl-C stops one answer; an error does not end the talk."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives `input` its editing and history
    console = Console(highlight=False)
    console.print(printable(conversation.fields["model"]), style="bold", markup=False, end="  ")
    console.print(f"{conversation.client.base_url}\n{HELP}", style="dim", markup=False)
    while (line := next_line(console)) is not None:
        match line.split(maxsplit=1):
            case []:
                pass
            case ["/exit" | "/quit"]:
                return
            case ["/help"]:
                console.print(HELP, style="dim", markup=False)
            case ["/reset"]:
                conversation.messages.clear()
                console.print("forgotten", style="dim")
            case ["/system", *text]:
                conversation.system = "".join(text).strip()
                console.print("system prompt " + ("set" if conversation.system else "removed"), style="dim")
            case [word, *_] if word.startswith("/") and word[1:].isalpha():
                console.print(f"{word} is not a command. {HELP}", style="yellow", markup=False)
            case _:
                show_answer(conversation, line, console)


def next_line(console: Console) -> str | None:
    """Return the line that the user typed; None at Ctrl-D."""
    while True:
        try:
            console.print()
            return input(PROMPT)
        except EOFError:
            console.print()
            return None
        except KeyboardInterrupt:
            console.print("\nCtrl-D or /exit ends", style="dim")


def show_answer(conversation: Conversation, text: str, console: Console) -> None:
    def show(piece: str) -> None:
        console.file.write(printable(piece))
        console.file.flush()

    console.print()
    try:
        answer = conversation.send(text, show)
        console.print(f"\n{answer.figures}", style="dim", markup=False)
    except KeyboardInterrupt:
        console.print("\nstopped", style="yellow")
    except ServerError as error:
        console.print(f"\n{error}", style="red", markup=False)
