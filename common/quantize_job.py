"""QuantizeJob: what `tokenfleet quantize` asks of the process that computes it."""

import dataclasses
import json
from dataclasses import dataclass

GROUP_SIZES = (128, 64, 32)
"""Sizes of groups that are tried in this order where none is given."""
WHOLE_ROW = -1
"""The size of a group that has all inputs of a layer."""


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """A model to quantise.

    Attributes:
        source: the directory of the plain model.
        output: the directory that is made.
        bits: of a weight.
        group_size: inputs that share a scale; None: the largest that divides all layers, of GROUP_SIZES.
        damping: what GPTQ adds to the diagonal of its Hessian, as a share of the diagonal's mean.
        act_order: GPTQ rounds the inputs with the largest values first.
        calibration: a text file; None: the text that we bring along.
        max_tokens: how many tokens of it are used.
    """

    source: str
    output: str
    bits: int = 4
    group_size: int | None = None
    damping: float = 0.01
    act_order: bool = True
    calibration: str | None = None
    max_tokens: int = 65_536

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "QuantizeJob":
        return cls(**json.loads(text))
