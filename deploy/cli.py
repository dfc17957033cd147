"""The command `tokenfleet`: one word for the whole fleet, one for each kind of process, and what people ask
of a fleet.
"""

import difflib
import functools
import importlib
import io
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import NoReturn

import setproctitle

from common.process.parent_death import die_with_parent
from common.settings.flags import FlagParser
from common.settings.settings import SettingError, Settings, exit_when_unservable
from deploy.serve import checks, launcher
from deploy.serve.fleet import MODULES, command

KINDS = {"api": "gateway", "batcher": "batcher", "worker": "worker", "jobs": "jobs"}
WITH_MODEL = ("gateway", "worker")
"""Who reads files of the model."""


def main() -> int:
    print_anything()
    try:
        with exit_when_unservable():
            return run(sys.argv[1:])
    except KeyboardInterrupt:
        return 130


def print_anything() -> None:
    """What a terminal's encoding has no sign for is shown as a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run(argv: Sequence[str]) -> int:
    """Runs one command. Returns the exit code."""
    os.environ.setdefault("PARENT_PID", "0")  # a person started us, and may log out
    match list(argv):
        case ["--version" | "-V"]:
            print(f"tokenfleet {version('tokenfleet')}")
        case [] | ["--help" | "-h" | "help"]:
            print(usage())
        case [word, *rest]:
            if word not in COMMANDS:
                [near] = difflib.get_close_matches(word, [*COMMANDS, "--help", "--version"], n=1, cutoff=0.0)
                raise SettingError("command", f"{word!r} is none of ours; the nearest is {near}")
            return COMMANDS[word][2](rest)
    return 0


def serve(argv: list[str]) -> int:
    settings = checks.read_settings(argv, "tokenfleet serve")
    if {"--env", "-e"} & set(argv):
        lazily("doctor.command", argv)
    die_with_parent()
    setproctitle.setproctitle("tokenfleet serve")
    return launcher.serve(settings)


def become(word: str, argv: list[str]) -> NoReturn:
    """Turns into one process of a kind, so that whoever started us sees and ends that process."""
    kind = KINDS[word]
    parser = FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--name", default=f"{kind[0]}0")
    own, rest = parser.parse_known_args(argv)
    parent = {"PARENT_PID": os.environ["PARENT_PID"]}
    die_with_parent()
    settings = Settings.read(rest, prog=f"tokenfleet {word}")
    checks.check_broker(settings)
    if kind in WITH_MODEL:
        settings = checks.with_model(settings)
    names = {"PROCESS_NAME": own.name, "INCARNATION": f"{own.name}-{secrets.token_hex(4)}"}
    words = command(MODULES[kind])
    os.execve(words[0], words, os.environ | settings.environ() | names | parent)


def lazily(module: str, argv: list[str]) -> int:
    """`main` of one of our files, which is read only now: no command pays for another's libraries."""
    code: int = importlib.import_module(f"deploy.{module}").main(argv)
    return code


COMMANDS: dict[str, tuple[str, str, Callable[[list[str]], int]]] = {
    "serve": ("[MODEL]", "the whole fleet on this machine: broker, gateway, batcher, worker, jobs", serve),
    "api": (
        "",
        "one gateway            (these four need REDIS_URL, and accept --name)",
        functools.partial(become, "api"),
    ),
    "batcher": ("", "one batcher", functools.partial(become, "batcher")),
    "worker": ("", "one worker", functools.partial(become, "worker")),
    "jobs": ("", "one arq worker with the jobs `generate` and `chat`", functools.partial(become, "jobs")),
    "status": ("", "what the fleet does now, as a live table", functools.partial(lazily, "commands.status")),
    "chat": ("", "talks with the model in this terminal", functools.partial(lazily, "commands.chat")),
    "bench": (
        "",
        "a minute of load on this fleet, beside another server",
        functools.partial(lazily, "bench.command"),
    ),
    "explain": ("REQUEST_ID", "the life of one request", functools.partial(lazily, "commands.explain")),
    "doctor": (
        "",
        "what of this machine and its settings would not work, and the fix",
        functools.partial(lazily, "doctor.command"),
    ),
    "download-weights": (
        "MODEL_ID",
        "fetches a model now, so that no start waits for it",
        functools.partial(lazily, "commands.download"),
    ),
}
"""Word → what follows it, what it does, who does it. Each takes the words after its own and returns the exit
code.
"""


def usage() -> str:
    rows = [f"  {f'{word} {operand}':<27} {help}" for word, (operand, help, _) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tokenfleet COMMAND [--setting value …]\n",
            *rows,
            "  --version\n",
            "A setting is a flag (--port 8080) or a variable (PORT=8080); `tokenfleet serve --help` lists them.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
