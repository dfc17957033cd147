"""The grammar of a whole answer in Harmony."""

from api.tool_calls.forcing.lark import Lark, literal, one_of
from api.tool_calls.forcing.offer import Offer
from api.tool_calls.formats import harmony

END = harmony.ENDS[0]


def harmony_answer(lark: Lark, offer: Offer, is_required: bool) -> str:
    """Analysis, then a call; where none is required also preambles, and the final answer."""
    channel, message = lark.mark(harmony.CHANNEL), lark.mark(harmony.MESSAGE)
    names = [(literal(f"{harmony.FUNCTIONS}{name}"), lark.json(schema)) for name, schema in offer.pairs()]
    before = [f'" to=" {name} {channel} "commentary json" {message} {value}' for name, value in names]
    after = [
        f'{channel} "commentary to=" {name} " " {lark.mark(harmony.CONSTRAIN)} "json" {message} {value}'
        for name, value in names
    ]
    text = lark.until(END)
    asides = one_of(['"analysis"'] if is_required else ['"analysis"', '"commentary"'])
    aside = f'{channel} {asides} {message} {text} {lark.mark(harmony.START)} "assistant"'
    final = [] if is_required else [f'{channel} "final" {message} /(.|\\n)*/']
    return f"({aside})* {one_of([*before, *after, *final])}"
