"""Lua: loads the scripts, in files `*.lua` beside the modules that call them, and calls them with named keys
and arguments.

A file holds several scripts, each after a line with its name. The comment at the top of a script names its
keys and arguments in order; in the script the names are locals:

    --- admit
    -- KEYS requests, places, request
    -- ARGV payload, max_requests, ...

A key has the name of its method in `Keys`. `...` stands for any number of others, from KEYS[first_key] or
ARGV[first_arg] on. Each script has one function, whose signature tells what it takes, in the module
beside it.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, NoScriptError

from common.broker.keys import Keys

ROOT = Path(__file__).parents[2]
PLACES = ("common/broker/*.lua", "api/*/*.lua", "batcher/*.lua", "gpu_worker/*.lua")
SECTION = re.compile(r"^--- ([\w/]+)\n", re.MULTILINE)


def read_sections(text: str) -> dict[str, str]:
    """Return the scripts of a file by name; each begins with the line `--- name`."""
    _, *parts = SECTION.split(text)
    return {name: script.rstrip("\n") + "\n" for name, script in zip(parts[::2], parts[1::2], strict=True)}


SCRIPTS = {
    name: text
    for place in PLACES
    for path in sorted(ROOT.glob(place))
    for name, text in read_sections(path.read_text()).items()
}
"""Texts by name, read when the process starts: a version that is installed while it runs may have scripts
that do not take what this process sends.
"""

Argument = str | bytes | int | float
Args = dict[str, Argument]
Fields = Mapping[str, str | int | bytes]
"""Fields of a hash."""
T = TypeVar("T")
Reply = TypeVar("Reply")


class Names(NamedTuple):
    """Names of a script's keys, or of its arguments, in their order; and whether others follow."""

    given: tuple[str, ...]
    has_more: bool

    def locals(self, array: str, first: str) -> str:
        """Return the Lua statement that makes the names locals, and `first` the index of what follows."""
        values = {name: f"{array}[{i}]" for i, name in enumerate(self.given, 1)}
        values |= {first: str(len(self.given) + 1)} if self.has_more else {}
        return f"local {', '.join(values)} = {', '.join(values.values())}\n" if values else ""


class ScriptCall(NamedTuple, Generic[Reply]):
    """A script with its keys and arguments, whichever client sends it.

    Attributes:
        read: turns the broker's reply into what it means.
    """

    name: str
    keys: Sequence[str]
    args: Sequence[Argument]
    read: Callable[[Any], Reply]

    @property
    def command(self) -> tuple[Argument, ...]:
        return ("EVALSHA", script_digest(self.name), len(self.keys), *self.keys, *self.args)

    @property
    def command_with_text(self) -> tuple[Argument, ...]:
        """The command for a broker that does not know the script."""
        return ("EVAL", load_script(self.name), len(self.keys), *self.keys, *self.args)


def call_script(
    name: str,
    read: Callable[[Any], Reply],
    keys: Keys,
    *owner: str,
    args: Mapping[str, Argument] = MappingProxyType({}),
    more_keys: Sequence[str] = (),
    more_args: Sequence[Argument] = (),
) -> ScriptCall[Reply]:
    """Return the call of a script. Raises TypeError or KeyError for other arguments than it takes.

    Args:
        read: turns the broker's reply into what it means.
        owner: the request, job, worker or process whose keys it takes, beside those of the pool.
    """
    key_names, arg_names = script_names(name)
    is_more = (more_keys and not key_names.has_more) or (more_args and not arg_names.has_more)
    if is_more or len(args) != len(arg_names.given):
        raise TypeError(f"{name} takes {key_names} and {arg_names}, not {(*args, *more_keys, *more_args)}")
    found = [getattr(keys, key) for key in key_names.given]
    all_keys = [key if isinstance(key, str) else key(*owner) for key in found]
    all_args = [args[one] for one in arg_names.given]
    all_keys += more_keys
    all_args += more_args
    return ScriptCall(name, all_keys, all_args, read)


def in_pairs(fields: Fields) -> list[str | int | bytes]:
    return [part for pair in fields.items() for part in pair]


def decode_all(reply: list[bytes]) -> list[str]:
    return [one.decode() for one in reply]


async def run_script(redis: Redis, call: ScriptCall[Reply]) -> Reply:
    """Return what a script's reply means; the broker is sent a script that it does not know."""
    try:
        reply = await redis.execute_command(*call.command)  # type: ignore[no-untyped-call]
    except NoPermissionError as error:  # it does not say to which key
        raise NoPermissionError(f"{error}; script {call.name}, keys {' '.join(call.keys)}") from error
    except NoScriptError:
        reply = await redis.execute_command(*call.command_with_text)  # type: ignore[no-untyped-call]
    return call.read(reply)


@functools.cache
def script_names(name: str) -> tuple[Names, Names]:
    """Return the names of a script's keys and of its arguments."""
    return read_names("KEYS", SCRIPTS[name]), read_names("ARGV", SCRIPTS[name])


def read_names(array: str, text: str) -> Names:
    found = re.search(rf"^-- {array} (.+(?:\n--  .+)*)", text, re.MULTILINE)
    names = re.findall(r"\w+|\.\.\.", found[1]) if found else []
    return Names(tuple(name for name in names if name != "..."), "..." in names)


@functools.cache
def load_script(name: str) -> str:
    """Return the text of a script, its names as locals, preceded by the scripts that its first line needs.

    That line is `-- needs: lib/one, lib/other`.
    """
    text = SCRIPTS[name]
    needs = re.match(r"-- needs: ([\w/, ]+)\n", text)
    needed = [load_script(other) + "\n" for other in (needs[1].split(", ") if needs else ())]
    keys, args = script_names(name)
    return "".join([*needed, keys.locals("KEYS", "first_key"), args.locals("ARGV", "first_arg"), text])


@functools.cache
def script_digest(name: str) -> str:
    return hashlib.sha1(load_script(name).encode()).hexdigest()
