"""Pooling: what a request asks for that ends with its prompt, and has one vector or scores as its answer.

The vector travels and is kept as logits of one position (logits.py), the prompt's last: it is computed, lost
and computed again like these.
"""

from dataclasses import dataclass

from common.messages.codec import wire_field
from common.messages.logits import LogitsParams

EMBED, CLASSIFY = "embed", "classify"
"""What a model makes of a text: a vector that stands for it, or a score."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a prompt is pooled.

    Attributes:
        pair_start: of a pair of texts the position at which the second begins; 0 is a single text.
    """

    pair_start: int = wire_field("ps", default=0)

    def logits(self, size: int) -> LogitsParams:
        """How the values of its answer travel; `size` is their number."""
        return LogitsParams(False, True, "float32", size)
