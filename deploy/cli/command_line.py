"""Command line: the commands of `tokenfleet`, which start a fleet or one of its processes, or use a fleet."""

import difflib
import importlib
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import NamedTuple, NoReturn

import setproctitle

from common.process import logs
from common.process.launch import die_with_parent
from common.process.logs import new_incarnation
from common.process.startup import exit_when_unservable
from common.rank import launcher_of
from common.settings import flags
from common.settings.settings import SettingError, Settings
from deploy.launcher import launcher, prepare
from deploy.launcher.fleet import KINDS, MODULES, command

log = logging.getLogger(__name__)


class Command(NamedTuple):
    """A command. `run` takes its name and the words after that, and returns the exit code."""

    operand: str
    help: str
    run: Callable[[str, list[str]], int]


def main(translate: Callable[[Sequence[str]], Sequence[str]]) -> int:
    replace_unprintable()
    with exit_when_unservable():
        return run(translate(sys.argv[1:]))


def replace_unprintable() -> None:
    """Have characters that the terminal's encoding lacks printed as question marks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run(argv: Sequence[str]) -> int:
    """Run one command. Returns the exit code."""
    if launcher_of(os.environ):
        os.environ["PARENT_PID"] = str(os.getppid())  # whatever variables mpirun has passed on from its own
    os.environ.setdefault("PARENT_PID", "0")  # a user started it, and may log out
    match list(argv):
        case ["--version" | "-V"]:
            print(f"tokenfleet {version('tokenfleet')}")
        case [] | ["--help" | "-h" | "help"]:
            print(usage())
        case [word, *rest]:
            if word not in COMMANDS:
                raise SettingError("command", f"{word!r} is not a command{suggestion(word)}")
            return COMMANDS[word].run(word, rest)
    return 0


def suggestion(word: str) -> str:
    if word in GONE_COMMANDS:
        return f"; {GONE_COMMANDS[word]}"
    near = difflib.get_close_matches(word, [*COMMANDS, "--help", "--version"], n=1)
    return f"; the nearest is {near[0]}" if near else "; `tokenfleet --help` lists them"


def serve(word: str, argv: list[str]) -> int:
    settings = Settings.read(argv, prog="tokenfleet serve", description=describe(word))
    logs.set_up("serve", settings.log_level, settings.json_output)
    for line in flags.unheeded(argv):
        log.warning("%s", line)
    if {"--env", "-e"} & set(argv):
        run_module("deploy.cli.doctor", argv)
    die_with_parent()
    setproctitle.setproctitle("tokenfleet serve")
    return launcher.serve(settings)


def replace_process(word: str, argv: list[str]) -> NoReturn:
    """Replace this process by one of the fleet, so that our parent watches and ends that one."""
    kind = KINDS[word]
    parent = {"PARENT_PID": os.environ["PARENT_PID"]}
    die_with_parent()
    description = f"Start {COMMANDS[word].help}. It needs REDIS_URL. "
    name, settings = launcher.read_process(kind, argv, f"tokenfleet {word}", description)
    setproctitle.setproctitle(
        f"tokenfleet {word}"
    )  # other users can read a command line, and this one has a key
    incarnation = new_incarnation(name)
    logs.set_up(name, settings.log_level, settings.json_output, incarnation)
    settings = prepare.prepare(settings, kind)
    names = {"PROCESS_NAME": name, "INCARNATION": incarnation}
    words = command(MODULES[kind])
    os.execve(words[0], words, os.environ | settings.environ() | names | parent)


def describe(word: str) -> str:
    return f"{COMMANDS[word].help[:1].upper()}{COMMANDS[word].help[1:]}."


def run_module(module: str, argv: list[str]) -> int:
    """Call `main` of a module, imported only now: no command waits for the libraries of another."""
    return int(importlib.import_module(module).main(argv))


def of_module(module: str) -> Callable[[str, list[str]], int]:
    return lambda _, argv: run_module(module, argv)


def admin(word: str, argv: list[str]) -> int:
    return run_module("deploy.cli.admin", [word, *argv])


GONE_COMMANDS = {
    "chaos": "`python -m benchmarks.chaos`, in a checkout, kills a fleet's processes and counts lost tokens",
    "plan": "measure with `tokenfleet bench`; /metrics says how full workers are",
    "replay": "the same request with the same `seed` gives the same tokens",
}
"""Commands that have left → what serves in their place."""
SECTIONS = {
    "Start a fleet": {
        "serve": Command(
            "[MODEL]", "start everything on this machine: broker, gateway, batcher, worker, job worker", serve
        ),
        "doctor": Command(
            "",
            "check this machine and the settings, and say how to fix what would not work",
            of_module("deploy.cli.doctor"),
        ),
        "download-weights": Command(
            "MODEL_ID", "fetch a model before the first start", of_module("deploy.cli.download")
        ),
        "quantize": Command(
            "MODEL OUT",
            "make a quantised checkpoint (GPTQ) of a plain one",
            of_module("deploy.cli.quantize"),
        ),
    },
    "Use a running fleet": {
        "chat": Command("", "talk with the model in this terminal", admin),
        "status": Command("", "show the processes and what they do, as a live table", admin),
        "explain": Command("REQUEST_ID", "show what happened to one request, and when", admin),
        "batch": Command("FILE", "answer the requests of a file, beside other work", admin),
        "usage": Command("", "show what API keys, tenants and models have used", admin),
        "drain": Command("WORKER", "make a worker hand its requests to others and leave", admin),
        "models": Command("list|set|unset", "share the requests of a model out over pools", admin),
        "adapters": Command("list|load|…", "list, load and unload LoRA adapters", admin),
        "roll": Command(
            "", "replace the processes of the fleet on this machine one by one, without a cut", admin
        ),
        "keys": Command("add|list|…", "make, list, revoke and rotate API keys", admin),
        "jobs": Command("list|dead|…", "list, search, cancel and retry jobs", admin),
        "webhooks": Command("list|dead|…", "list events of webhooks, and send them again", admin),
        "bench": Command("", "measure speed for a minute, beside another server", admin),
    },
    "Start one process (these need REDIS_URL)": {
        "api": Command("", "a gateway", replace_process),
        "batcher": Command("", "a batcher", replace_process),
        "worker": Command("", "a worker", replace_process),
        "jobworker": Command("", "a job worker: the arq jobs `generate` and `chat`", replace_process),
        "supervise": Command(
            "KIND",
            "one of these (api, batcher, worker, jobworker), kept alive",
            of_module("deploy.launcher.launcher"),
        ),
    },
}
COMMANDS = {word: command for section in SECTIONS.values() for word, command in section.items()}


def usage() -> str:
    lines = ["usage: tokenfleet COMMAND [--setting value …]"]
    for title, section in SECTIONS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {f'{word} {it.operand}':<27} {it.help}" for word, it in section.items()]
    lines += ["", "Options:", "  --help", "  --version", ""]
    lines += ["A setting is a flag (--port 8080) or a variable (PORT=8080): `tokenfleet serve --help-all`."]
    return "\n".join(lines)
