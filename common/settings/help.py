"""Help: what settings are for, for `--help` and for docs/settings.md; and what becomes of TGI's options.

`python -m common.settings.help` prints the tables of docs/settings.md and docs/from-tgi.md.
"""

import ast
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from common.settings.fields import SettingFields
from common.settings.option import OTHERS, SAME, TABLE, OptionRow, read_rows

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


def tables() -> str:
    """One table in Markdown for each section of the help."""
    lines = []
    texts = help_texts()
    for name, field in SettingFields.model_fields.items():
        if name in SECTIONS:
            lines += ["", f"## {SECTIONS[name]}", "", "| setting | default | |", "|---|---|---|"]
        lines.append(f"| `{name.upper()}` | {shown(field.default)} | {texts[name]} |")
    return "\n".join(lines[1:])


def shown(default: Any) -> str:
    if default in (None, ()):
        return ""
    return f"{default:_}" if type(default) is int and default >= 100_000 else str(default).lower()


def table_of_tgi() -> str:
    """A table in Markdown of all options of text-generation-inference, as rows of equal answers."""
    lines = ["| option of TGI | here |", "|---|---|"]
    for names, outcome in options_of_tgi():
        lines.append(f"| {' '.join(f'`{name}`' for name in names)} | {outcome} |")
    return "\n".join(lines)


def options_of_tgi() -> Iterator[tuple[list[str], str]]:
    """Names of options of text-generation-inference, and what becomes of them."""
    for row in read_rows(TABLE.read_text(encoding="utf-8")):
        if not row.server.startswith(("vLLM", "earlier")):
            names = [word.partition(":")[0] for word in row.names.split()]
            yield [shown_name(name, row) for name in names], outcome_of(names[0], row)


def shown_name(name: str, row: OptionRow) -> str:
    if name.startswith("-"):
        return name
    return f"--{name.replace('_', '-')}" if row.flag else name.upper()


def outcome_of(name: str, row: OptionRow) -> str:
    if row.answer == SAME:
        return "the same"
    if row.target is not None:
        return f"`--{row.target.replace('_', '-')}`"
    return OTHERS.options[name].outcome.replace("|", "\\|")


if __name__ == "__main__":
    print(f"{tables()}\n\n{table_of_tgi()}")
