"""The command `tokenfleet`: one word for the whole fleet, and one for each kind of process."""

import difflib
import os
import secrets
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

import setproctitle

from common.lifeline import die_with_parent
from common.settings import FlagParser, SettingError, Settings, exit_when_unservable
from deploy import checks, launcher
from deploy.fleet import MODULES, command

USAGE = """usage: tokenfleet COMMAND [--setting value …]

  serve [MODEL]   the whole fleet on this machine: broker, gateway, batcher, worker
  api             one gateway            (these three need REDIS_URL, and accept --name)
  batcher         one batcher
  worker          one worker
  --version

A setting is a flag (--port 8080) or a variable (PORT=8080); `tokenfleet serve --help` lists them."""
KINDS = {"api": "gateway", "batcher": "batcher", "worker": "worker"}


def main() -> int:
    try:
        with exit_when_unservable():
            return run(sys.argv[1:])
    except KeyboardInterrupt:
        return 130


def run(argv: Sequence[str]) -> int:
    """Runs one command. Returns the exit code."""
    os.environ.setdefault("PARENT_PID", "0")  # a person started us, and may log out
    match list(argv):
        case ["serve", *rest]:
            return serve(rest)
        case [("api" | "batcher" | "worker") as name, *rest]:
            become(name, rest)
        case ["--version" | "-V"]:
            print(f"tokenfleet {version('tokenfleet')}")
        case [] | ["--help" | "-h" | "help"]:
            print(USAGE)
        case [word, *_]:
            commands = ["serve", *KINDS, "--help", "--version"]
            near = difflib.get_close_matches(word, commands, n=1, cutoff=0.0)
            raise SettingError("command", f"{word!r} is none of ours; the nearest is {near[0]}")
    return 0


def serve(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        argv = ["--model-id", *argv]
    settings = Settings.read(argv, prog="tokenfleet serve")
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
    settings = checks.with_model(settings)
    names = {"PROCESS_NAME": own.name, "INCARNATION": f"{own.name}-{secrets.token_hex(4)}"}
    words = command(MODULES[kind])
    os.execve(words[0], words, os.environ | settings.environ() | names | parent)


if __name__ == "__main__":
    sys.exit(main())
