"""Formats of structural tags, as clients send them."""

from typing import Any


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def tag(content: Any, begin: Any = "<t>", end: Any = "</t>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
