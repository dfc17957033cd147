"""Logits of an answer: which positions a request returns them for, and the bytes that they take.

Position p is the token whose logits say what comes at p + 1. The context's logits are those of all positions
of the prompt; the generation's are those that each generated token was chosen from, the first one from the
prompt's last position. So the rows of both are neighbours, and are kept as one run of rows.
"""

from dataclasses import dataclass

from common.messages.codec import wire_field

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one logit, by dtype."""


@dataclass(frozen=True, slots=True)
class LogitsParams:
    """Which logits a request returns: the model's own, before penalties and temperature.

    Attributes:
        context: those of the prompt.
        generation: those of the generated tokens.
        dtype: of ITEM_BYTES; values are little-endian.
        vocab_size: logits of one position.
    """

    context: bool = wire_field("c")
    generation: bool = wire_field("g")
    dtype: str = wire_field("d")
    vocab_size: int = wire_field("v")

    @property
    def row_bytes(self) -> int:
        """Bytes of one position."""
        return self.vocab_size * ITEM_BYTES[self.dtype]

    def first_position(self, num_prompt: int) -> int:
        return 0 if self.context else num_prompt - 1

    def end_position(self, num_prompt: int, num_tokens: int) -> int:
        """The position after the last one, of an answer with `num_tokens` generated tokens."""
        return num_prompt + (max(num_tokens, 1) - 1 if self.generation else 0)

    def num_rows(self, num_prompt: int, num_tokens: int) -> int:
        """Positions whose logits are kept."""
        return self.end_position(num_prompt, num_tokens) - self.first_position(num_prompt)

    def num_bytes(self, num_prompt: int, num_tokens: int) -> int:
        return self.num_rows(num_prompt, num_tokens) * self.row_bytes
