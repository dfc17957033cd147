import dataclasses
import re
from pathlib import Path
from typing import Any

from common.settings import Settings

README = (Path(__file__).parent.parent / "README.md").read_text()


def table() -> str:
    rows = ["| setting | default | |", "|---|---|---|"]
    for item in dataclasses.fields(Settings):
        unit = f" ({item.metadata['unit']})" if item.metadata["unit"] else ""
        rows.append(f"| `{item.name.upper()}` | {shown(item.default)} | {item.metadata['help']}{unit} |")
    return "\n".join(rows)


def shown(default: Any) -> str:
    if default in (None, ()):
        return ""
    return f"{default:_}" if type(default) is int and default >= 100_000 else str(default)


def test_the_table_of_settings_is_the_settings() -> None:
    found = re.search(r"<!-- settings -->\n(.*)\n<!-- /settings -->", README, re.DOTALL)
    assert found is not None
    assert found[1] == table(), f"the README should say:\n{table()}"
