"""Calibration: the text whose tokens show what the inputs of layers are, and the part of it that is held out
to compute perplexities.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from common.quantize_job import QuantizeJob
from common.settings.settings import SettingError

BUNDLED = Path(__file__).with_name("calibration.txt")
LONGEST = 2048
"""Tokens of a sequence."""
NUM_PARTS = 8
"""A text is cut into at least that many sequences; of every NUM_PARTS, the last is held out."""
LEAST = 16
"""Tokens of the shortest sequences."""


@dataclass(frozen=True)
class Calibration:
    """Sequences of tokens: int64 [1, tokens] each."""

    sequences: list[torch.Tensor]
    held_out: list[torch.Tensor]

    @property
    def all(self) -> list[torch.Tensor]:
        return self.sequences + self.held_out


def read_calibration(
    job: QuantizeJob, tokenizer: Tokenizer, context: int, device: torch.device
) -> Calibration:
    """Raises SettingError if the text cannot be read or is too short."""
    path = Path(job.calibration) if job.calibration else BUNDLED
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("--calibration", f"{path} cannot be read as text: {error}") from error
    ids = tokenizer.encode(text).ids[: job.max_tokens]
    length = min(LONGEST, context, len(ids) // NUM_PARTS)
    if length < LEAST:
        raise SettingError(
            "--calibration", f"{path} has {len(ids)} tokens, and at least {LEAST * NUM_PARTS} are needed"
        )
    rows = [
        torch.tensor([ids[begin : begin + length]], device=device)
        for begin in range(0, len(ids) - length + 1, length)
    ]
    is_held_out = [number % NUM_PARTS == NUM_PARTS - 1 for number in range(len(rows))]
    pairs = list(zip(rows, is_held_out, strict=True))
    return Calibration([row for row, held in pairs if not held], [row for row, held in pairs if held])


def sum_of_losses(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Of predicting each token from those before it: logits float32 [1, tokens, vocabulary], ids int64 [1,
    tokens]
    """
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum"))
