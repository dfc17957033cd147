"""Options of other servers that are no settings of ours: other names for a setting, and fixed answers.

Where what an option asks for is what happens anyway, it is accepted; else the start is refused with the
reason. Nothing is ignored. All of them stand in the table `common/settings/options.txt`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common.settings.types import SettingError, convert

TABLE = Path(__file__).with_name("options.txt")
KINDS: dict[str, Any] = {"": str, "int": int, "float": float, "switch": bool, "secret": str}
ANY = ("any",)


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
    accepts: tuple[str, ...]
    why: str
    kind: Any
    same_as: str
    variable: bool
    flag: bool
    secret: bool
    known: tuple[str, ...]

    @property
    def outcome(self) -> str:
        """What becomes of the option, for the help."""
        if self.accepts is ANY:
            return f"accepted: {self.why}"
        if self.same_as:
            return f"only what --{self.same_as.replace('_', '-')} says: {self.why}"
        accepted = " or ".join(self.accepts)
        return f"{f'only {accepted}' if accepted else 'refused'}: {self.why}"


@dataclass
class OptionTable:
    """What the table says.

    Attributes:
        options: by their names.
        flags, variables: other names → the setting or option that they mean, as flag and as variable.
        short: flags of one dash → the same.
    """

    options: dict[str, Option] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    short: dict[str, str] = field(default_factory=dict)


def read_table(text: str) -> OptionTable:
    table = OptionTable()
    for section, names, answer, note in read_rows(text):
        flag, variable = "flags" in section, "variables" in section
        for word in names.split():
            if not answer.startswith("= "):
                option = to_option(word, answer, note, flag, variable)
                table.options[option.name] = option
            elif word.startswith("-"):
                table.short[word] = answer[2:]
            else:
                table.flags |= {word: answer[2:]} if flag else {}
                table.variables |= {word: answer[2:]} if variable else {}
    return table


def read_rows(text: str) -> Iterator[tuple[str, str, str, str]]:
    """The section, the names, the answer and the note of each row."""
    section = note = ""
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            section = line.partition(":")[2]
        elif not line.startswith("#"):
            names, answer, *notes = (cell.strip() for cell in line.split("|"))
            note = "".join(notes) or note
            yield section, names, answer, note


def to_option(word: str, answer: str, note: str, flag: bool, variable: bool) -> Option:
    name, _, kind = word.partition(":")
    values, _, known = answer.partition(" of ")
    same_as = values.removeprefix("as ") if values.startswith("as ") else ""
    accepts = ANY if values == "any" else () if same_as or values == "none" else tuple(values.split(" or "))
    is_secret = kind == "secret"
    return Option(
        name, accepts, note, KINDS[kind], same_as, variable, flag, is_secret, known=tuple(known.split())
    )


OTHERS = read_table(TABLE.read_text(encoding="utf-8"))
"""The options of text-generation-inference, SageMaker and vLLM."""
IMPLIED = {("cuda_graphs", "0"): ("enforce_eager", "true")}
"""An option and its value → the setting of ours that it gives a value."""


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
    if option.accepts is ANY:
        return
    accepted = [own, *(convert(option.kind, text, given.name) for text in option.accepts)]
    if value not in accepted:
        raise SettingError(given.name, f"{'…' if option.secret else given.text} is not served: {option.why}")


def with_underscores(name: str) -> str:
    return name.lower().replace("-", "_")
