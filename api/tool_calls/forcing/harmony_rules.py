"""The grammar of a whole answer in Harmony."""

from collections.abc import Sequence

from api.structured_output.lark import TEXT, Lark, literal, one_of
from api.tool_calls.forcing.offer import Offer
from api.tool_calls.formats import harmony

END = harmony.ENDS[0]
MAX_ANALYSES = 3
"""Messages of analysis before a final answer of a given form: without a bound no ending would be found."""


def harmony_answer(lark: Lark, offer: Offer, is_required: bool) -> str:
    """Analysis, then a call; where none is required also preambles, and the final answer."""
    channel, message = lark.mark(harmony.CHANNEL), lark.mark(harmony.MESSAGE)
    names = [(literal(f"{harmony.FUNCTIONS}{name}"), lark.json(schema)) for name, schema in offer.pairs()]
    before = [f'" to=" {name} {channel} "commentary json" {message} {value}' for name, value in names]
    after = [
        f'{channel} "commentary to=" {name} " " {lark.mark(harmony.CONSTRAIN)} "json" {message} {value}'
        for name, value in names
    ]
    final = [] if is_required else [final_message(lark, TEXT)]
    asides = ["analysis"] if is_required else ["analysis", "commentary"]
    return f"({aside(lark, asides)})* {one_of([*before, *after, *final])}"


def harmony_final(lark: Lark, content: str) -> str:
    """Analysis, then the final answer, with this content."""
    return f"({aside(lark, ['analysis'])}){{0,{MAX_ANALYSES}}} {final_message(lark, content)}"


def aside(lark: Lark, channels: Sequence[str]) -> str:
    """A message that is no answer, and the beginning of the next one."""
    names = one_of(literal(channel) for channel in channels)
    text = f"{lark.mark(harmony.MESSAGE)} {lark.until(END)}"
    return f'{lark.mark(harmony.CHANNEL)} {names} {text} {lark.mark(harmony.START)} "assistant"'


def final_message(lark: Lark, content: str) -> str:
    return f'{lark.mark(harmony.CHANNEL)} "final" {lark.mark(harmony.MESSAGE)} {content}'
