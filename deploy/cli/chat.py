"""`tokenfleet chat`: a conversation in the terminal; with a piped stdin, one answer on stdout."""

import argparse
import contextlib
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
    answer_errors,
    check_status,
    model_name,
    printable,
)

RECONNECT_TIMEOUT_S = 30.0
RECONNECT_PAUSE_S = 0.2
PROMPT = "› "
HELP = "/reset forgets the conversation · /exit or Ctrl-D ends · Ctrl-C stops an answer"


@dataclass(slots=True)
class Conversation:
    """The history of a chat.

    Attributes:
        fields: what every request holds besides messages: model, temperature …
    """

    client: httpx.Client
    fields: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def send(self, text: str, show: Callable[[str], None]) -> str:
        """Send a message, show the answer as it comes, and return it. Raises ServerError.

        An exception (Ctrl-C) closes the connection. The answer stays in the history, without its reasoning;
        if nothing came, the history stays as it was.
        """
        self.messages.append({"role": "user", "content": text})
        answer = reasoning = ""
        try:
            with answer_errors(str(self.client.base_url)), contextlib.closing(self.frames()) as frames:
                for frame in frames:
                    choices = frame.get("choices") or [{}]
                    delta = choices[0].get("delta") or {}
                    thought, piece = delta.get("reasoning_content") or "", delta.get("content") or ""
                    if thought or (reasoning and piece and not answer):
                        show_thought(thought or "\n")
                    reasoning += thought
                    answer += piece
                    show(piece)
        finally:
            if answer or reasoning:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()
        return answer

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
            headers = {"last-event-id": str(num_seen)} if num_seen else {}
            return self.client.stream("GET", place, headers=headers)
        body = {**self.fields, "stream": True, "messages": self.messages}
        return self.client.stream("POST", "/v1/chat/completions", json=body)


def run(client: httpx.Client, flags: argparse.Namespace) -> None:
    fields = {"temperature": flags.temperature, "max_tokens": flags.max_tokens, "seed": flags.seed}
    given = {name: value for name, value in fields.items() if value is not None}
    system = [{"role": "system", "content": flags.system}] if flags.system else []
    model = model_name(client.get("/v1/models"))
    conversation = Conversation(client, {"model": model} | given, system)
    if sys.stdin.isatty():
        run_terminal(conversation)
    else:
        answer_once(conversation)


def answer_once(conversation: Conversation) -> None:
    """Send all of stdin as one message, and print the answer and nothing else on stdout."""
    text = sys.stdin.buffer.read().decode(errors="replace").strip()
    if not text:
        raise SettingError(
            "stdin", "is empty: pipe a message into it, or start `tokenfleet chat` in a terminal"
        )
    conversation.send(text, show)
    show("\n")


def show(text: str) -> None:
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def show_thought(text: str) -> None:
    """Show reasoning dimmed; on stderr where stdout is no terminal."""
    console = Console(stderr=not sys.stdout.isatty(), highlight=False, soft_wrap=True)
    console.print(printable(text), style="dim", end="", markup=False, emoji=False)


def run_terminal(conversation: Conversation) -> None:
    """Talk with the user until /exit or Ctrl-D. Ctrl-C stops one answer; an error does not end the talk."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives `input` its editing and history
    begin = [*conversation.messages]
    print(f"{printable(conversation.fields['model'])}  {conversation.client.base_url}\n{HELP}")
    while (line := next_line()) not in (None, "/exit"):
        if line == "/reset":
            conversation.messages = [*begin]
            print("forgotten")
        elif line:
            try:
                conversation.send(line, show)
                print()
            except KeyboardInterrupt:
                print("\nstopped")
            except ServerError as error:
                print(f"\n{error}")


def next_line() -> str | None:
    """Return the line that the user typed; None at Ctrl-D."""
    while True:
        try:
            return input(f"\n{PROMPT}").strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\nCtrl-D or /exit ends")
