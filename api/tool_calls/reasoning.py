"""Reasoning: the part of an answer in which the model thinks, by the names of vLLM's `--reasoning-parser`."""

from collections.abc import Generator
from dataclasses import dataclass

from api.tool_calls.reading.reader import SPACE, Reader, end_of_certain, find_mark


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model thinks: between two marks at the beginning of its answer.

    Attributes:
        always: an answer begins with thinking, even without the first mark.
    """

    name: str
    open: str
    close: str
    always: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return self.open, self.close

    def is_open(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins inside of thinking."""
        opened, closed = prompt.rfind(self.open), prompt.rfind(self.close)
        if prompt.rstrip(SPACE).endswith(self.close):
            return False
        return self.always or (opened > closed and not prompt[opened + len(self.open) :].strip(SPACE))


THINK = ("<think>", "</think>")
REASONING_FORMATS = {
    "deepseek_r1": ReasoningFormat("deepseek_r1", *THINK, always=True),
    "qwen3": ReasoningFormat("qwen3", *THINK),
}


def read_reasoning(reader: Reader, form: ReasoningFormat, is_open: bool) -> Generator[None, None, None]:
    """Reads thinking, if the answer begins with it."""
    yield from reader.skip()
    if not (yield from reader.literal(form.open)) and not is_open:
        reader.position = 0
        return
    reader.forget(reader.position)
    reader.trim()
    while True:
        found = find_mark(reader.text, (form.close,), 0, reader.ended)
        end = (
            found[0]
            if found
            else len(reader.text)
            if reader.ended
            else end_of_certain(reader.text, [form.close], 0)
        )
        reader.add_reasoning(reader.text[:end])
        reader.forget(end + len(form.close) if found else end)
        if found or reader.ended:
            reader.trim()
            return
        yield
