"""Picture marks: where the pictures of a client's messages are, until the chat template takes them.

A mark is a text within a message's content, so all that joins and moves texts moves pictures, too. Templates
of models that see take a content in parts, or as one text with the model's own marker for each picture.
"""

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

MARK = "".join(chr(secrets.choice(range(0x100000, 0x10FFFE))) for _ in range(8))
"""Private-use characters: no client can guess a text of some that were drawn at random."""


def parts_of(content: str) -> Iterator[dict[str, str]]:
    """A content in the parts that templates know."""
    first, *others = content.split(MARK)
    if first or not others:
        yield {"type": "text", "text": first}
    for text in others:
        yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


def in_parts(message: Mapping[str, Any], always: bool) -> Mapping[str, Any]:
    """A message with its content in parts where it has pictures, or `always`."""
    content = message.get("content")
    if not isinstance(content, str) or not (always or MARK in content):
        return message
    return {**message, "content": [*parts_of(content)]}


def in_text(message: Mapping[str, Any], inline: str) -> Mapping[str, Any]:
    """A message with a model's own text for each picture."""
    content = message.get("content")
    if not isinstance(content, str) or MARK not in content:
        return message
    return {**message, "content": content.replace(MARK, inline)}
