"""`python -m common.settings.table`: the tables of docs/settings.md."""

from typing import Any

from common.settings.flags import SECTIONS, help_texts
from common.settings.settings import Settings


def tables() -> str:
    """One table in Markdown for each section of the help."""
    lines = []
    texts = help_texts()
    for name, field in Settings.model_fields.items():
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
