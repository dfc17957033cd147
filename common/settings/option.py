"""Option: a setting of another server that is none of ours, and its fixed answer.

Where what it asks for is what happens anyway, it is accepted; else the start is refused with the reason.
Nothing is ignored.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from common.settings.types import SettingError, convert

ANY: tuple[Any, ...] = ("*",)


@dataclass(frozen=True, slots=True)
class Option:
    """An option with a fixed answer.

    Attributes:
        accepts: values that ask for what is the case; `ANY` where all do.
        why: what is the case.
        known: if not empty, the only values that the other server knows, in small letters; the part before a
            colon counts, and dashes are as underscores.
        kind: type of its values.
        same_as: a setting whose own value is accepted, too.
        variable: whether the variable is read.
        flag: whether there is a flag.
        secret: its value is not repeated.
    """

    name: str
    accepts: tuple[Any, ...]
    why: str
    kind: Any = str
    same_as: str = ""
    variable: bool = True
    flag: bool = True
    secret: bool = False
    known: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """What becomes of the option, for the help."""
        if self.accepts is ANY:
            return f"accepted: {self.why}"
        if self.same_as:
            return f"only what --{self.same_as.replace('_', '-')} says: {self.why}"
        accepted = " or ".join(str(value).lower() for value in self.accepts)
        return f"{f'only {accepted}' if accepted else 'refused'}: {self.why}"


def options(
    names: str, accepts: tuple[Any, ...], why: str, kind: Any = str, **more: Any
) -> tuple[Option, ...]:
    """Options that have one answer."""
    return tuple(Option(name, accepts, why, kind, **more) for name in names.split())


OFF = (False,)
ON = (True,)
NONE: tuple[Any, ...] = ()


class GivenValue(NamedTuple):
    """One text that a person gave, with the name that the person used."""

    name: str
    text: str


def check_option(option: Option, given: GivenValue, own: Any) -> None:
    """Raises SettingError where the option asks for what is not the case."""
    value = convert(option.kind, given.text, given.name)
    if option.known and with_underscores(given.text.split(":")[0]) not in map(with_underscores, option.known):
        known = ", ".join(option.known)
        raise SettingError(given.name, f"{given.text} is not one of {known}")
    if option.accepts is not ANY and value not in option.accepts and (own is None or value != own):
        raise SettingError(given.name, f"{'…' if option.secret else given.text} is not served: {option.why}")


def with_underscores(name: str) -> str:
    return name.lower().replace("-", "_")
