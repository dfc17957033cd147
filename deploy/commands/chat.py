"""`tokenfleet chat`: a conversation in the terminal; with a piped stdin, one answer on stdout."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

import httpx
import orjson
from rich.console import Console

from common.settings.flags import FlagParser
from common.settings.settings import SettingError
from deploy.commands.client import (
    Trouble,
    add_url,
    api_key,
    check,
    complain,
    explained,
    harmless,
    new_client,
)
from deploy.commands.conversation import Conversation

ANSWER_S = 600.0
PROMPT = "› "
HELP = (
    "/reset forgets the conversation · /system TEXT sets the system prompt · "
    "/exit or Ctrl-D ends · Ctrl-C stops an answer"
)


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
