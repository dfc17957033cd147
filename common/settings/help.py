"""Help: what settings are for, for `--help` and for docs/settings.md.

`python -m common.settings.help` prints the tables of docs/settings.md.
"""

import ast
import inspect
import itertools
from typing import Any

from common.settings.fields import SettingFields

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
    [body] = (
        node.body
        for node in ast.parse(inspect.getsource(SettingFields)).body
        if isinstance(node, ast.ClassDef)
    )
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


if __name__ == "__main__":
    print(tables())
