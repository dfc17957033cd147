"""Command line: the commands of `tokenfleet`, which start a fleet or one of its processes, or use a fleet."""

import difflib
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import NoReturn

import setproctitle

from common.process import logs
from common.process.launch import die_with_parent
from common.process.logs import new_incarnation
from common.process.startup import exit_when_unservable
from common.rank import launcher_of
from common.settings import flags
from common.settings.settings import SettingError, Settings
from deploy.cli.table import COMMANDS, SECTIONS, TABLE, call, describe
from deploy.launcher import launcher, prepare
from deploy.launcher.launcher import KINDS, MODULES, command

log = logging.getLogger(__name__)


def main(translate: Callable[[Sequence[str]], Sequence[str]]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what the terminal's encoding lacks is a question mark
    with exit_when_unservable():
        return run(translate(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command. Returns the exit code."""
    if launcher_of(os.environ):
        os.environ["PARENT_PID"] = str(os.getppid())  # whatever variables mpirun has passed on from its own
    os.environ.setdefault("PARENT_PID", "0")  # a user started it, and may log out
    for word in argv:
        if word.encode(errors="replace").decode() != word:
            raise SettingError("command", f"{word!r} has bytes that are not UTF-8")
    match list(argv):
        case ["--version" | "-V"]:
            print(f"tokenfleet {version('tokenfleet')}")
        case [] | ["--help" | "-h" | "help"]:
            print(usage())
        case [word, *rest]:
            action = " ".join(argv[:2])
            name = action if action in TABLE["gone"] else word
            if name not in COMMANDS:
                raise SettingError("command", f"{name!r} is not a command{suggestion(name)}")
            reader = COMMANDS[word].argv
            return int(call(reader, rest) if reader else call("deploy.cli.admin.main", argv))
    return 0


def suggestion(word: str) -> str:
    if word in TABLE["gone"]:
        return f"; {TABLE['gone'][word]}"
    near = difflib.get_close_matches(word, [*COMMANDS, "--help", "--version"], n=1)
    return f"; the nearest is {near[0]}" if near else "; `tokenfleet --help` lists them"


def serve(argv: list[str]) -> int:
    settings = Settings.read(argv, prog="tokenfleet serve", description=describe("serve"))
    logs.set_up("serve", settings.log_level, settings.json_output)
    for line in flags.unheeded(argv):
        log.warning("%s", line)
    if {"--env", "-e"} & set(argv):
        call("deploy.cli.doctor.main", argv)
    die_with_parent()
    setproctitle.setproctitle("tokenfleet serve")
    return launcher.serve(settings)


def replace_process(argv: list[str], word: str) -> NoReturn:
    """Replace this process by one of the fleet, so that our parent watches and ends that one."""
    kind = KINDS[word]
    parent = {"PARENT_PID": os.environ["PARENT_PID"]}
    die_with_parent()
    description = f"Start {COMMANDS[word].help}. It needs REDIS_URL. "
    name, settings = launcher.read_process(kind, argv, f"tokenfleet {word}", description)
    setproctitle.setproctitle(f"tokenfleet {word}")  # others can read a command line, and this one has a key
    incarnation = new_incarnation(name)
    logs.set_up(name, settings.log_level, settings.json_output, incarnation)
    settings = prepare.prepare(settings, kind)
    names = {"PROCESS_NAME": name, "INCARNATION": incarnation}
    words = command(MODULES[kind])
    os.execve(words[0], words, os.environ | settings.environ() | names | parent)


def usage() -> str:
    lines = ["usage: tokenfleet COMMAND [--setting value …]"]
    for title, section in SECTIONS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {f'{it.words} {it.operand}':<27} {it.help}" for it in section]
    lines += ["", "Options:", "  --help", "  --version", ""]
    lines += ["A setting is a flag (--port 8080) or a variable (PORT=8080): `tokenfleet serve --help-all`."]
    return "\n".join(lines)
