"""Table of the commands, `commands.toml`: their words, help and flags, what does them; and their parsers."""

import argparse
import importlib
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from common.settings.flags import FlagParser

TABLE = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))


class Command(NamedTuple):
    """A row of the table.

    Attributes:
        words: as typed, such as `jobs list`.
        argv: the function that reads the words of the command line itself; empty for the others.
        run: the function that does it, and words that it gets last; empty if the next word says what to do.
        flags: names of flags, besides the one that finds the fleet.
        by: that flag; empty for what needs no fleet.
        read_s: how long the gateway may take to answer.
        path: what it is asked for, with names of operands in braces.
        rows, table: the field of its answer with rows, and the table that shows them.
        none: what is printed where there are no rows.
        page: most rows of one answer.
        said: what is printed when it has done so.
    """

    words: str
    help: str
    operand: str = ""
    argv: str = ""
    run: str = ""
    flags: str = ""
    by: str = ""
    read_s: float = 30.0
    path: str = ""
    rows: str = ""
    table: str = ""
    none: str = ""
    page: int = 0
    said: str = ""

    @property
    def changes(self) -> bool:
        """Whether it changes something."""
        return self.words.split()[-1] not in READING


READING = ("list", "dead", "show", "usage", "explain", "status", "chat")
"""Last words of commands that change nothing."""
SECTIONS = {
    title: [Command(word, **row) for word, row in section.items()]
    for title, section in TABLE["sections"].items()
}
COMMANDS = {one.words: one for section in SECTIONS.values() for one in section}
ACTIONS = [Command(words, **row) for words, row in TABLE["actions"].items()]
"""Commands of two words."""


def find(name: str) -> Any:
    """What is at `package.module.name`, or a type of Python. A module is imported only now: no command waits
    for the libraries of another.
    """
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module or "builtins"), own)


def call(run: str, *args: Any) -> Any:
    """Call the function that `run` begins with; the words after that are its last arguments."""
    name, *words = run.split()
    return find(name)(*args, *words)


def describe(command: str) -> str:
    text = COMMANDS[command].help
    return f"{text[:1].upper()}{text[1:]}."


def new_parser(command: str) -> FlagParser:
    parser = FlagParser(prog=f"tokenfleet {command}", description=describe(command), allow_abbrev=False)
    if COMMANDS[command].run:
        add_flags(parser, COMMANDS[command])
        return parser
    actions = {one.words.split()[1]: one for one in ACTIONS if one.words.split()[0] == command}
    words = parser.add_subparsers(required=True, metavar="|".join(actions), parser_class=FlagParser)
    for word, action in actions.items():
        own = words.add_parser(word, help=action.help, description=action.help, allow_abbrev=False)
        add_flags(own, action._replace(by=COMMANDS[command].by))
    return parser


def add_flags(parser: argparse.ArgumentParser, action: Command) -> None:
    parser.set_defaults(action=action)
    command, flags = action.words.split()[0], TABLE["flags"]
    for flag in f"{action.by} {action.flags}".split():
        options = {**(flags.get(f"{command} {flag}") or flags[flag])}
        if "type" in options:
            options["type"] = find(options["type"])
        parser.add_argument(*flag.split("/"), **options)
