"""Flags and variables: the texts that a person wrote, by field of Settings; their help; and options of other
servers that are no settings of ours: other names for a setting, and fixed answers.

Where what an option asks for is what happens anyway, it is accepted; else the start is refused with the
reason. Nothing is ignored. All of them stand in the table `common/settings/options.txt`.

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
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from common.settings.fields import SettingError, SettingFields, convert

TABLE = Path(__file__).with_name("options.txt")
KINDS: dict[str, Any] = {"": str, "int": int, "float": float, "switch": bool, "secret": str}
ANY = ("any",)
SAME = "same"
"""The answer for an option that is a setting of the same name."""


class Option(NamedTuple):
    """A name in the table, of an option of another server.

    Attributes:
        word: the name, with its kind after a colon; `-x` is a short flag.
        answer, why: its setting or answer, and the note.
        flag, variable: whether there is a flag of this name, and whether the variable is read.
    """

    word: str
    answer: str
    why: str
    flag: bool
    variable: bool

    @property
    def name(self) -> str:
        return self.word.partition(":")[0]

    @property
    def kind(self) -> Any:
        """The type of its values."""
        return KINDS[self.word.partition(":")[2]]

    @property
    def is_secret(self) -> bool:
        """Whether its value is not repeated."""
        return self.word.endswith(":secret")

    @property
    def target(self) -> str | None:
        """The setting or option of which it is another name."""
        return self.answer[2:] if self.answer.startswith("= ") else None

    @property
    def accepts(self) -> tuple[str, ...]:
        """The values that ask for what is the case; `ANY` where all do."""
        return () if self.answer == "none" else tuple(self.answer.split(" or "))

    @property
    def outcome(self) -> str:
        """What becomes of the option, for the help."""
        if self.accepts == ANY:
            return f"accepted: {self.why}"
        accepted = " or ".join(self.accepts)
        return f"{f'only {accepted}' if accepted else 'refused'}: {self.why}"


def read_rows(text: str) -> Iterator[tuple[str, list[Option]]]:
    """Yield the options of each row, after the server in whose section it stands."""
    server = kinds = why = ""
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            server, _, kinds = line.strip("[]").partition(": ")
        elif not line.startswith("#"):
            names, answer, *notes = (cell.strip() for cell in line.split("|"))
            why = "".join(notes) or why
            places = "flags" in kinds, "variables" in kinds
            yield server, [Option(word, answer, why, *places) for word in names.split()]


ROWS = [*read_rows(TABLE.read_text(encoding="utf-8"))]
"""The options of text-generation-inference, SageMaker and vLLM."""
NAMES = [one for _, row in ROWS for one in row if one.answer != SAME]
OPTIONS = {one.name: one for one in NAMES if one.target is None}
"""Those with a fixed answer."""
SHORT = {one.name: one.target for one in NAMES if one.target and one.name.startswith("-")}
FLAGS = {one.name: one.target for one in NAMES if one.target and one.flag and one.name not in SHORT}
VARIABLES = {one.name: one.target for one in NAMES if one.target and one.variable and one.name not in SHORT}
"""Other names, as flags of one dash, as flags and as variables → the setting or option that they mean."""
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
    if option.accepts == ANY:
        return
    accepted = [convert(option.kind, text, given.name) for text in option.accepts]
    if value not in accepted:
        raise SettingError(
            given.name, f"{'…' if option.is_secret else given.text} is not served: {option.why}"
        )


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
OF_OTHERS = "options of text-generation-inference and vLLM"


def help_texts() -> dict[str, str]:
    """Field → the string after it (pydantic's use_attribute_docstrings costs each process 20 ms)."""
    nodes = ast.parse(inspect.getsource(SettingFields)).body
    [body] = (node.body for node in nodes if isinstance(node, ast.ClassDef))
    return {
        field.target.id: str(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        if isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


FIRST_WEEK = (
    *("model_id", "served_model_name", "lora_adapters", "quantize", "hostname", "port", "api_key"),
    *("max_input_tokens", "max_total_tokens", "redis_url", "num_workers", "num_shard", "max_batch_size"),
    *("device", "kv_cache_bytes"),
)
"""Settings that `--help` shows; `--help-all` shows all."""


class FlagParser(argparse.ArgumentParser):
    """A parser whose errors are SettingErrors that name the flag at fault."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse says, as `argument -p/--port: expected one argument`."""
        what, _, rest = message.partition(": ")
        if what == "unrecognized arguments":
            refuse_unknown(rest.split(), self)
        if what == "the following arguments are required":
            raise SettingError(rest, f"is missing; `{self.prog} --help` says what it is")
        raise SettingError(what.removeprefix("argument ").split("/")[-1], rest)


def refuse_unknown(words: Sequence[str], parser: argparse.ArgumentParser, hint: str = "") -> None:
    """Raise SettingError for the first of the words that a parser does not know, if there are any."""
    if words and not words[0].startswith("-"):
        raise SettingError("arguments", f"{words[0]!r} is not expected{hint}")
    if words:
        flag = words[0].split("=")[0]
        raise SettingError(flag, f"unknown flag{nearest(flag, parser)}")


def nearest(flag: str, parser: argparse.ArgumentParser) -> str:
    flags = [name for name in parser._option_string_actions if name.startswith("--")]
    matches = difflib.get_close_matches(flag, flags, n=1, cutoff=0.83)
    return f"; the nearest is {matches[0]}" if matches else "; --help lists them"


def read(
    argv: Sequence[str], environ: Mapping[str, str], prog: str, description: str = ""
) -> dict[str, GivenValue]:
    """Field or option → what is given for it: a flag wins over a variable, a variable of ours over another's
    name for it.

    Raises:
        SettingError: an unknown flag (the nearest of ours is named).
    """
    own = {
        name: name
        for name in (
            *SettingFields.model_fields,
            *(option.name for option in OPTIONS.values() if option.variable),
        )
    }
    given = {
        target: GivenValue(name, environ[name.upper()].strip())
        for name, target in (VARIABLES | own).items()  # our own last: the last one wins
        if environ.get(name.upper())
    }
    given |= read_flags(argv, prog, description) if argv else {}
    for (name, text), (target, implied) in IMPLIED.items():
        if name in given and given[name].text == text:
            given[target] = GivenValue(given[name].name, implied)
    return given


def read_flags(argv: Sequence[str], prog: str, description: str = "") -> dict[str, GivenValue]:
    parser = flag_parser(prog, everything="--help-all" in argv, description=description)
    found, unknown = parser.parse_known_args(spell_as_ours(argv, parser))
    models = own_words(unknown)
    refuse_unknown([word for word in unknown if word not in models], parser)
    refuse_unknown(models[1:], parser, f"; the model is {models[0]!r}" if models else "")
    given: dict[str, GivenValue] = {}
    for name, texts in vars(found).items():
        target = FLAGS.get(name, name)
        if target in given:
            raise SettingError(
                flag_of(name), f"means the same as {flag_of(given[target].name)}, which is given, too"
            )
        text = ",".join(texts) if is_list(target) else texts[-1]
        given[target] = GivenValue(name if name == target else flag_of(name), text.strip())
    if models and "model_id" in given:
        raise SettingError(
            "arguments", f"{models[0]!r} and {flag_of(given['model_id'].name)} both name a model"
        )
    return given | ({"model_id": GivenValue("model_id", models[0])} if models else {})


def own_words(unknown: Sequence[str]) -> list[str]:
    """The words that belong to no flag: one may be there, the model."""
    return [word for word in unknown if not word.startswith("-")]


def spell_as_ours(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The words of a command line with underscores in flags as dashes, `--no-x` of a switch as `--x=false`,
    and `--config FILE` as the flags that the file has.
    """
    words = [spelled for word in argv for spelled in spell_flag(word, parser)]
    if "--config" not in words:
        return words
    i = words.index("--config")
    rest = words[:i] + words[i + 2 :]
    given = {word.split("=")[0] for word in rest}
    if own_words(parser.parse_known_args(rest)[1]):
        given |= {"--model-id", "--model"}
    in_file = config_flags(words[i + 1] if i + 1 < len(words) else "")
    return [*(flag for flag in in_file if flag.split("=")[0] not in given), *rest]


def spell_flag(word: str, parser: argparse.ArgumentParser) -> list[str]:
    if not word.startswith("-"):
        return [word]
    name, equals, value = word.partition("=")
    if name.startswith("--"):
        name = name.replace("_", "-")
    whole, dot, _ = name.partition(".")
    known = parser._option_string_actions
    if dot and name not in known and whole in known:  # --structured-outputs-config.backend: a part of it
        name = whole
    if name == "--config" and equals:
        return [name, value]
    switch = known.get("--" + name.removeprefix("--no-"))
    if name not in known and switch is not None and switch.nargs == "?" and not equals:
        return [f"{switch.option_strings[-1]}=false"]
    return [name + equals + value]


def config_flags(path: str) -> list[str]:
    """The flags in a YAML file of vLLM's kind: a mapping of flags, without their dashes, to values.

    Raises:
        SettingError: the file cannot be read.
    """
    import yaml  # only here: it costs each process 10 ms

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingError("--config", f"{path!r} cannot be read: {error}".split("\n")[0]) from error
    if not isinstance(values, dict):
        raise SettingError("--config", f"{path!r} is not a mapping of flags to values")
    return [f"{flag_of(str(name))}={config_text(value)}" for name, value in values.items()]


def config_text(value: object) -> str:
    """The text of a value, as a person would write it after the flag."""
    if isinstance(value, list):
        return ",".join(map(config_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_list(name: str) -> bool:
    return (
        name in SettingFields.model_fields and SettingFields.model_fields[name].annotation == tuple[str, ...]
    )


def is_switch(name: str) -> bool:
    if name in OPTIONS:
        return OPTIONS[name].kind is bool
    return SettingFields.model_fields[name].annotation in (bool, bool | None)


def unheeded(argv: Sequence[str]) -> list[str]:
    """A line for each flag that is accepted whatever its value is, because it changes nothing here."""
    options = [OPTIONS[name] for name in read_flags(argv, prog="") if name in OPTIONS]
    return [
        f"{flag_of(option.name)} changes nothing: {option.why}"
        for option in options
        if option.accepts == ANY and option.flag and option.name != "env"
    ]


def flag_parser(prog: str, everything: bool, description: str = "") -> FlagParser:
    """The parser of all flags. Its help has more than those of a first week only with `everything`."""
    parser = FlagParser(
        prog=prog, usage="%(prog)s [MODEL] [--setting X …]", description=description, allow_abbrev=False
    )
    parser.add_argument("--help-all", action="help", help=f"show all flags, with {OF_OTHERS}")
    own = f"tokenfleet {version('tokenfleet')}"
    parser.add_argument("-V", "--version", action="version", version=own, help="show the version")
    texts = help_texts()
    for name, field in SettingFields.model_fields.items():
        if name in SECTIONS:
            section = parser.add_argument_group(SECTIONS[name])
        default = "" if field.default in (None, ()) else f", default {str(field.default).lower()}"
        help = f"{texts[name]} [{name.upper()}{default}]" if everything or name in FIRST_WEEK else None
        add(section, name, name, help)
    others = parser.add_argument_group(f"Understood, too: {OF_OTHERS}")
    for option in OPTIONS.values():
        if option.flag:
            add(others, option.name, option.name, option.outcome if everything else None)
    for name, target in FLAGS.items():
        add(others, name, target, f"see {flag_of(target)}" if everything else None)
    return parser


def add(parser: Any, name: str, target: str, help: str | None) -> None:
    """Add a flag, whose values are those of the setting or option `target`."""
    nargs = "?" if is_switch(target) else "+" if is_list(target) else None
    names = [short for short, target in SHORT.items() if target == name] + [flag_of(name)]
    values: dict[str, Any] = {"action": "extend" if nargs == "+" else "append", "nargs": nargs}
    values |= {"const": "true"} if nargs == "?" else {}
    text = argparse.SUPPRESS if help is None else help.replace("%", "%%")
    parser.add_argument(*names, dest=name, help=text, default=argparse.SUPPRESS, metavar="X", **values)


def flag_of(name: str) -> str:
    return f"--{name.removeprefix('--').replace('_', '-')}"
