"""Grammar of a chat's answer: its structured output, the calls that it must have, and reasoning before."""

from api.chat.tools import ToolChoice
from api.errors import invalid
from api.inference.tokenizer import ModelTokenizer
from api.structured_output.grammar import Grammar
from common.messages.answer import Reading


async def answer_grammar(
    grammar: Grammar | None, tools: ToolChoice | None, reading: Reading | None, tokenizer: ModelTokenizer
) -> Grammar | None:
    """Raises ApiError."""
    if tools is not None and tools.is_forced:
        raise invalid("`tool_choice` that forces a call is not supported yet", "tool_choice")
    return grammar
