"""Hermes' calls, which Qwen 2.5, Qwen 3 and many more write: a JSON object between marks."""

from collections.abc import Generator, Sequence

from api.tool_calls.reading.call_object import read_call
from api.tool_calls.reading.deltas import Tool
from api.tool_calls.reading.reader import Reader

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def read_hermes(reader: Reader, tools: Sequence[Tool]) -> Generator[None, None, None]:
    while (yield from reader.content_until(OPEN)):
        yield from reader.skip()
        if not (yield from read_call(reader)):
            reader.reject()
            continue
        yield from reader.skip()
        yield from reader.literal(CLOSE)
