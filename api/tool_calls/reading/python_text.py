"""Read Python's literals, and write them as JSON."""

import ast
import json
from collections.abc import Generator

from api.tool_calls.reading.scanner import Scanner

OPENING = "([{"
CLOSING = ")]}"


def read_literal(scanner: Scanner) -> Generator[None, None, str | None]:
    """A value up to the comma or bracket after it, as JSON. None if it is no literal."""
    start, depth, quote = scanner.position, 0, ""
    while True:
        char = yield from scanner.char()
        if not char:
            return None
        if quote:
            if char == "\\":
                scanner.position += 1
                if not (yield from scanner.char()):
                    return None
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in OPENING:
            depth += 1
        elif depth == 0 and char in ",)]}":
            return as_json(scanner.text[start : scanner.position])
        elif char in CLOSING:
            depth -= 1
        scanner.position += 1


def as_json(text: str) -> str | None:
    """The JSON text of a literal, which may be JSON itself."""
    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        pass
    else:
        return text.strip()
    try:
        return json.dumps(ast.literal_eval(text.strip()), allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def refuse(constant: str) -> None:
    """NaN and Infinity are no JSON."""
    raise ValueError(constant)
