"""The grammar of a whole answer in Harmony."""

from collections.abc import Sequence

from api.structured_output.lark import TEXT, Lark, literal, one_of
from api.tool_calls.forcing.offer import ForcedTools
from api.tool_calls.formats.harmony import CHANNEL, CONSTRAIN, ENDS, FUNCTIONS, MESSAGE, START


def harmony_answer(lark: Lark, forced: ForcedTools, is_required: bool) -> str:
    """Analysis, then a call; where none is required also preambles, and the answer ends in any message."""
    channel, message = lark.mark(CHANNEL), lark.mark(MESSAGE)
    names = [(literal(f"{FUNCTIONS}{tool.name}"), lark.json(schema)) for tool, schema in forced.tools]
    before = [f'" to=" {name} {channel} "commentary json" {message} {value}' for name, value in names]
    after = [
        f'{channel} "commentary to=" {name} " " {lark.mark(CONSTRAIN)} "json" {message} {value}'
        for name, value in names
    ]
    if is_required:
        return f"({aside(lark, ['analysis'])})* {one_of([*before, *after])}"
    asides = ["analysis", "commentary"]
    last = [message_of(lark, asides, TEXT), final_message(lark, TEXT)]
    return f"({aside(lark, asides)})* {one_of([*before, *after, *last])}"


def harmony_final(lark: Lark, content: str) -> str:
    """Analysis, then the final answer, with this content."""
    return f"({aside(lark, ['analysis'])})* {final_message(lark, content)}"


def aside(lark: Lark, channels: Sequence[str]) -> str:
    """A message that is no answer, and the beginning of the next one."""
    return f'{message_of(lark, channels, lark.until(ENDS[0]))} {lark.mark(START)} "assistant"'


def message_of(lark: Lark, channels: Sequence[str], content: str) -> str:
    names = one_of(literal(channel) for channel in channels)
    return f"{lark.mark(CHANNEL)} {names} {lark.mark(MESSAGE)} {content}"


def final_message(lark: Lark, content: str) -> str:
    return f'{lark.mark(CHANNEL)} "final" {lark.mark(MESSAGE)} {content}'
