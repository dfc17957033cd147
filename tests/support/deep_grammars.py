"""Grammars that refer from one definition or rule to the next, deeper than the usual stack of a thread."""

import json
from typing import Any

from api.grammar.compile import Grammar

DEFS = "#/$defs/"


def chain(length: int, link: Any) -> dict[str, Any]:
    """A schema of so many definitions; `link` makes one that refers to the reference."""
    defs = {f"a{i}": link({"$ref": f"{DEFS}a{i + 1}"}) for i in range(length)}
    return {"$ref": f"{DEFS}a0", "$defs": defs | {f"a{length}": {"type": "boolean"}}}


SCHEMA = chain(1000, lambda ref: {"type": "object", "properties": {"x": ref}, "required": ["x"]})
"""Of the case that ended gateways."""


def rules(length: int, name: str, between: str) -> str:
    """A grammar in Lark of so many rules."""
    lines = [f"{name}{i}: {between} {name}{i + 1}" for i in range(length)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{length}: "b"'])


DEEP = {
    "properties": Grammar("json", json.dumps(SCHEMA), "f"),
    "items": Grammar("json", json.dumps(chain(4000, lambda ref: {"type": "array", "items": ref})), "f"),
    "allOf": Grammar("json", json.dumps(chain(4000, lambda ref: {"allOf": [ref]})), "f"),
    "references": Grammar("json", json.dumps(chain(5000, lambda ref: ref)), "f"),
    "rules": Grammar("grammar", rules(5000, "r", '"a"'), "f"),
    "terminals": Grammar("grammar", rules(12_000, "R", '"a"'), "f"),
    "a schema in rules": Grammar("grammar", f"start: %json {json.dumps(SCHEMA)}", "f"),
}
