"""Flags and variables: the texts that a person wrote, by field of Settings; and the help.

argparse reads the flags. With pydantic-settings (2.16) a switch of TGI either stands alone or has a value,
while TGI takes both (`--sharded`, `--sharded false`). Its errors name the field (`max_total_tokens`); ours
repeat the name that the person wrote (`--max-model-len`). Its `Settings()` reads the environment by itself,
which a test must not.
"""

import argparse
import ast
import difflib
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from pydantic import BaseModel

from common.settings.compat import (
    ALIASES,
    ANY,
    FLAG_ALIASES,
    IMPLIED,
    OPTIONS,
    SHORT,
    VARIABLE_ALIASES,
    Option,
)
from common.settings.types import SettingError, convert

SECTIONS = {
    "model_id": "Model",
    "hostname": "Gateway",
    "payload_limit": "Limits",
    "pool": "Workers and other processes",
    "max_batch_size": "Batching",
    "device": "Device",
    "heartbeat_s": "Recovery",
    "log_level": "Logging and metrics",
}
"""The first field of each section of the help → the section's title."""
OTHERS = "options of text-generation-inference and vLLM"


class GivenValue(NamedTuple):
    """One text that a person gave, with the name that the person used."""

    name: str
    text: str


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError("flags", message)


def read(
    cls: type[BaseModel], argv: Sequence[str], environ: Mapping[str, str], prog: str
) -> dict[str, GivenValue]:
    """Field or option → what is given for it: a flag wins over a variable, a variable of ours over another's
    name for it.

    Raises:
        SettingError: an unknown flag (the nearest of ours is named).
    """
    own = {
        name: name
        for name in (*cls.model_fields, *(option.name for option in OPTIONS.values() if option.variable))
    }
    given = {
        target: GivenValue(name, environ[name.upper()].strip())
        for name, target in (VARIABLE_ALIASES | ALIASES | own).items()  # our own last: the last one wins
        if environ.get(name.upper())
    }
    given |= read_flags(cls, argv, prog) if argv else {}
    for (name, text), (target, implied) in IMPLIED.items():
        if name in given and given[name].text == text:
            given[target] = GivenValue(given[name].name, implied)
    return given


def read_flags(cls: type[BaseModel], argv: Sequence[str], prog: str) -> dict[str, GivenValue]:
    parser = flag_parser(cls, prog, everything="--help-all" in argv)
    found, unknown = parser.parse_known_args(list(argv))
    if unknown and not unknown[0].startswith("-"):
        raise SettingError("arguments", f"{unknown[0]!r} is not expected")
    if unknown:
        flag = unknown[0].split("=")[0]
        raise SettingError(flag, f"unknown flag{nearest(flag, parser)}")
    given: dict[str, GivenValue] = {}
    for name, texts in vars(found).items():
        target = (FLAG_ALIASES | ALIASES).get(name, name)
        if target in given:
            raise SettingError(
                flag_of(name), f"means the same as {flag_of(given[target].name)}, which is given, too"
            )
        field = cls.model_fields.get(name)
        text = ",".join(texts) if field and field.annotation == tuple[str, ...] else texts[-1]
        given[target] = GivenValue(name if name == target else flag_of(name), text.strip())
    return given


def flag_parser(cls: type[BaseModel], prog: str, everything: bool) -> FlagParser:
    """The parser of all flags. Its help has the options of other servers only with `everything`."""
    parser = FlagParser(prog=prog, usage="%(prog)s [--setting X …]", allow_abbrev=False)
    parser.add_argument("--help-all", action="help", help=f"show this help and the {OTHERS}")
    texts = help_texts(cls)
    for name, field in cls.model_fields.items():
        if name in SECTIONS:
            section = parser.add_argument_group(SECTIONS[name])
        default = "" if field.default in (None, ()) else f", default {str(field.default).lower()}"
        add(section, name, f"{texts[name]} [{name.upper()}{default}]", field.annotation is bool)
    others = parser.add_argument_group(f"Understood, too: {OTHERS}")
    for option in OPTIONS.values():
        if option.flag:
            add(others, option.name, option.answer if everything else None, option.kind is bool)
    for name, target in (ALIASES | FLAG_ALIASES).items():
        is_switch = target in OPTIONS and OPTIONS[target].kind is bool
        add(others, name, f"see {flag_of(target)}" if everything else None, is_switch)
    return parser


def help_texts(cls: type[BaseModel]) -> dict[str, str]:
    """Field → the string after it (pydantic's use_attribute_docstrings costs each process 20 ms)."""
    [body] = (node.body for node in ast.parse(inspect.getsource(cls)).body if isinstance(node, ast.ClassDef))
    return {
        field.target.id: str(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        if isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def add(parser: Any, name: str, help: str | None, is_switch: bool) -> None:
    names = [short for short, target in SHORT.items() if target == name] + [flag_of(name)]
    switch: dict[str, Any] = {"nargs": "?", "const": "true"} if is_switch else {}
    text = argparse.SUPPRESS if help is None else help.replace("%", "%%")
    parser.add_argument(
        *names, dest=name, action="append", help=text, default=argparse.SUPPRESS, metavar="X", **switch
    )


def check_option(option: Option, given: GivenValue, own: Any) -> None:
    """Raises SettingError where the option asks for what is not the case."""
    value = convert(option.kind, given.text, given.name)
    if option.accepts is not ANY and value not in option.accepts and (own is None or value != own):
        raise SettingError(given.name, f"{'…' if option.secret else given.text} is not served: {option.why}")


def flag_of(name: str) -> str:
    return f"--{name.removeprefix('--').replace('_', '-')}"


def nearest(flag: str, parser: argparse.ArgumentParser) -> str:
    flags = [name for name in parser._option_string_actions if name.startswith("--")]
    match = difflib.get_close_matches(flag, flags, n=1)
    return f"; the nearest is {match[0]}" if match else "; --help lists them"
