"""Reasoning: the part of an answer in which the model thinks, by the names that REASONING_PARSER takes."""

from dataclasses import dataclass

from api.tool_calls.reading.scanner import SPACE, Scan, Scanner


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

    def is_closed(self, prompt: str) -> bool:
        """Whether this prompt ends with thinking that is over: the answer has none."""
        return prompt.rstrip(SPACE).endswith(self.close)

    def begins_inside(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins inside of thinking."""
        ends_open = prompt.rstrip(SPACE).endswith(self.open)
        return ends_open or (self.always and not self.is_closed(prompt))


THINK = ("<think>", "</think>")
REASONING_FORMATS = {
    form.name: form
    for form in (
        ReasoningFormat("deepseek_r1", *THINK, always=True),
        ReasoningFormat("deepseek_v3", *THINK),
        ReasoningFormat("qwen3", *THINK),
        ReasoningFormat("glm45", *THINK),
        ReasoningFormat("hunyuan_a13b", *THINK),
        ReasoningFormat("holo2", *THINK),
        ReasoningFormat("kimi_k2", *THINK),
        ReasoningFormat("minimax_m2", *THINK, always=True),
        ReasoningFormat("ernie45", *THINK),
        ReasoningFormat("nemotron_v3", *THINK),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    )
}


def read_reasoning(scanner: Scanner, form: ReasoningFormat, begins_inside: bool) -> Scan:
    """Read thinking, if the answer begins with it."""
    yield from scanner.skip()
    if not (yield from scanner.literal(form.open)) and not begins_inside:
        scanner.position = 0
        return
    scanner.forget(scanner.position)
    scanner.trim()
    yield from scanner.pass_until(scanner.add_reasoning, form.close)
    scanner.trim()
