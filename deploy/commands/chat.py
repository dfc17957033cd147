"""`tokenfleet chat`: a conversation in the terminal; with a piped stdin, one answer on stdout."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

import httpx
from rich.console import Console

from common.settings.flag_parser import FlagParser
from common.settings.settings import SettingError
from deploy.commands.client import (
    ServerError,
    add_url,
    api_key,
    fetch_json,
    new_client,
    print_error,
    printable,
)
from deploy.commands.conversation import Conversation

ANSWER_S = 600.0
PROMPT = "› "
DESCRIPTION = "Talk with the model in this terminal; with a piped stdin, print one answer on stdout."
HELP = (
    "/reset forgets the conversation · /system TEXT sets the system prompt · "
    "/exit or Ctrl-D ends · Ctrl-C stops an answer"
)


def main(argv: Sequence[str]) -> int:
    """Return 0, or 1 when the server cannot be asked. Raises SettingError for an unknown flag."""
    flags = read_flags(argv)
    try:
        with new_client(httpx.Client, flags.url, ANSWER_S, api_key()) as client:
            fields = {"temperature": flags.temperature, "max_tokens": flags.max_tokens, "seed": flags.seed}
            request_fields = {"model": fetch_model_name(client)} | {
                name: value for name, value in fields.items() if value is not None
            }
            conversation = Conversation(client, request_fields, flags.system)
            if sys.stdin.isatty():
                run_terminal(conversation)
            else:
                answer_once(conversation)
    except ServerError as error:
        return print_error(error)
    except BrokenPipeError:  # the reader of our output closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(prog="tokenfleet chat", allow_abbrev=False, description=DESCRIPTION, epilog=HELP)
    add_url(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0 always takes the most likely token (default: the server's)",
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens of one answer (default: the server's)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="makes sampling repeatable: the same seed gives the same answer"
    )
    return parser.parse_args(list(argv))


def fetch_model_name(client: httpx.Client) -> str:
    """Return the name of the model that is served. Raises ServerError."""
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
    """Talk with the person until /exit or Ctrl-D. Ctrl-C stops an answer; after an error the conversation
    goes on.
    """
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
    """Return the line that the person typed, None at Ctrl-D."""
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
