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
SAME = "same"
"""The answer for an option that is a setting of the same name."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option with a fixed answer.

    Attributes:
        accepts: values that ask for what is the case; `ANY` where all do.
        why: what is the case.
        known: if not empty, the only values that the other server knows, in small letters; the part before a
            colon counts, and dashes are as underscores.
        kind: type of its values.
        variable: whether the variable is read.
        flag: whether there is a flag.
        secret: its value is not repeated.
    """

    name: str
    accepts: tuple[str, ...]
    why: str
    kind: Any
    variable: bool
    flag: bool
    secret: bool
    known: tuple[str, ...]

    @property
    def outcome(self) -> str:
        """What becomes of the option, for the help."""
        if self.accepts is ANY:
            return f"accepted: {self.why}"
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
    for row in read_rows(text):
        for word in row.names.split() if row.answer != SAME else ():
            if row.target is None:
                option = to_option(word, row)
                table.options[option.name] = option
            elif word.startswith("-"):
                table.short[word] = row.target
            else:
                table.flags |= {word: row.target} if row.flag else {}
                table.variables |= {word: row.target} if row.variable else {}
    return table


class OptionRow(NamedTuple):
    """A row of the table, of the section of one server; `flag` and `variable` say what its names are."""

    server: str
    flag: bool
    variable: bool
    names: str
    answer: str
    note: str

    @property
    def target(self) -> str | None:
        """The setting or option of which the names are other names."""
        return self.answer[2:] if self.answer.startswith("= ") else None


def read_rows(text: str) -> Iterator[OptionRow]:
    server = kinds = note = ""
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            server, _, kinds = line.strip("[]").partition(": ")
        elif not line.startswith("#"):
            names, answer, *notes = (cell.strip() for cell in line.split("|"))
            note = "".join(notes) or note
            yield OptionRow(server, "flags" in kinds, "variables" in kinds, names, answer, note)


def to_option(word: str, row: OptionRow) -> Option:
    name, _, kind = word.partition(":")
    values, _, known = row.answer.partition(" of ")
    accepts = ANY if values == "any" else () if values == "none" else tuple(values.split(" or "))
    is_secret = kind == "secret"
    kind_of = KINDS[kind]
    return Option(name, accepts, row.note, kind_of, row.variable, row.flag, is_secret, tuple(known.split()))


OTHERS = read_table(TABLE.read_text(encoding="utf-8"))
"""The options of text-generation-inference, SageMaker and vLLM."""
IMPLIED = {
    ("cuda_graphs", "0"): ("enforce_eager", "true"),
    ("disable_uvicorn_access_log", "true"): ("access_log_rate", "0"),
    ("disable_access_log", "true"): ("access_log_rate", "0"),
    ("task", "generate"): ("runner", "generate"),
    **{
        ("task", kind): ("runner", "pooling")
        for kind in ("embed", "embedding", "classify", "score", "reward")
    },
    ("convert", "embed"): ("runner", "pooling"),
}
"""An option and its value → the setting of ours that it gives a value."""


class GivenValue(NamedTuple):
    """One text that a person gave, with the name that the person used."""

    name: str
    text: str


def check_option(option: Option, given: GivenValue) -> None:
    """Raises SettingError where the option asks for what is not the case."""
    value = convert(option.kind, given.text, given.name)
    if option.known and with_underscores(given.text.split(":")[0]) not in map(with_underscores, option.known):
        known = ", ".join(option.known)
        raise SettingError(given.name, f"{given.text} is not one of {known}")
    if option.accepts is ANY:
        return
    accepted = [convert(option.kind, text, given.name) for text in option.accepts]
    if value not in accepted:
        raise SettingError(given.name, f"{'…' if option.secret else given.text} is not served: {option.why}")


def with_underscores(name: str) -> str:
    return name.lower().replace("-", "_")
