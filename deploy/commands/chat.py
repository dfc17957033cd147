"""`tokenfleet chat`: a conversation in the terminal; with a piped stdin, one answer on stdout."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
from rich.console import Console

from common.settings.flags import FlagParser
from common.settings.settings import SettingError
from deploy.commands.client import (
    Frames,
    Trouble,
    add_url,
    api_key,
    check,
    complain,
    explained,
    harmless,
    new_client,
    said,
    shown,
    unexpected,
)

ANSWER_S = 600.0
PROMPT = "› "
HELP = (
    "/reset forgets the conversation · /system TEXT sets the system prompt · "
    "/exit or Ctrl-D ends · Ctrl-C stops an answer"
)

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


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 when the server cannot be asked. Raises SettingError for flags that are not ours."""
    flags = read(argv)
    try:
        with new_client(httpx.Client, flags.url, ANSWER_S, api_key()) as client:
            fields = {"temperature": flags.temperature, "max_tokens": flags.max_tokens, "seed": flags.seed}
            asked = {"model": model(client)} | {
                name: value for name, value in fields.items() if value is not None
            }
            conversation = Conversation(client, asked, flags.system)
            if sys.stdin.isatty():
                talk(conversation)
            else:
                answer_once(conversation)
    except Trouble as trouble:
        return complain(trouble)
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def read(argv: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(prog="tokenfleet chat", allow_abbrev=False, description=__doc__, epilog=HELP)
    add_url(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0 takes the likeliest token always (default: the server's)",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of one answer (default: the server's)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answer")
    return parser.parse_args(list(argv))


def model(client: httpx.Client) -> str:
    """The name of the model that is served. Raises Trouble."""
    with explained(str(client.base_url)):
        answer = client.get("/v1/models")
    check(answer.status_code, answer.content)
    try:
        return str(orjson.loads(answer.content)["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise Trouble(f"{client.base_url} names no model at /v1/models") from error


def answer_once(conversation: Conversation) -> None:
    """All of stdin is one message; its answer goes to stdout, and nothing else does."""
    text = sys.stdin.buffer.read().decode(errors="replace").strip()
    if not text:
        raise SettingError(
            "stdin", "is empty: pipe a message into it, or start `tokenfleet chat` in a terminal"
        )
    conversation.ask(text, plainly)
    plainly("\n")


def plainly(text: str) -> None:
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def talk(conversation: Conversation) -> None:
    """Until /exit or Ctrl-D. Ctrl-C stops an answer; errors are shown, and the conversation goes on."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives `input` its editing and history
    console = Console(highlight=False)
    console.print(harmless(conversation.fields["model"]), style="bold", markup=False, end="  ")
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
                conversation.turns.clear()
                console.print("forgotten", style="dim")
            case ["/system", *text]:
                conversation.system = "".join(text).strip()
                console.print("system prompt " + ("set" if conversation.system else "removed"), style="dim")
            case [word, *_] if word.startswith("/") and word[1:].isalpha():
                console.print(f"{word} is no command of ours. {HELP}", style="yellow", markup=False)
            case _:
                reply(conversation, line, console)


def next_line(console: Console) -> str | None:
    """What a person typed; None when they are done."""
    while True:
        console.print()
        try:
            return input(PROMPT)
        except EOFError:
            console.print()
            return None
        except KeyboardInterrupt:
            console.print("\nCtrl-D or /exit ends", style="dim")


def reply(conversation: Conversation, text: str, console: Console) -> None:
    def show(piece: str) -> None:
        console.file.write(harmless(piece))
        console.file.flush()

    console.print()
    try:
        answer = conversation.ask(text, show)
        console.print(f"\n{answer.figures}", style="dim", markup=False)
    except KeyboardInterrupt:
        console.print("\nstopped", style="yellow")
    except Trouble as trouble:
        console.print(f"\n{trouble}", style="red", markup=False)
