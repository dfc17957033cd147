"""A launched step, until the host has read what it sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gpu_worker.engine.batch.outcome import Told
from gpu_worker.engine.batch.rows import Part
from gpu_worker.engine.batch.sampling_state import Turn
from gpu_worker.engine.sampling.multinomial import Drawn
from gpu_worker.engine.sampling.sample import Sampled, read


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose forward was launched.

    Attributes:
        number: of the step.
        logits: [wanted, vocabulary]; on CUDA they may still be computed.
        began_s: monotonic time.
    """

    number: int
    parts: Sequence[Part]
    logits: torch.Tensor
    began_s: float

    @property
    def turns(self) -> list[Turn | None]:
        """How its rows choose, once the host has read the step before."""
        return [part.turn if part.row.manner else None for part in self.parts if part.samples]


class Flight:
    """A step whose choice was launched, too; what it chose is on its way to the host."""

    def __init__(
        self, launched: Launched, turns: Sequence[Turn | None], drawn: Drawn, prompts: Sequence[Drawn]
    ) -> None:
        self.number, self.parts, self.began_s = launched.number, launched.parts, launched.began_s
        self.turns, self.ids = turns, drawn.ids
        self.columns, self.prompts = down(drawn), [down(one) for one in prompts]
        self.here = torch.cuda.Event() if drawn.ids.is_cuda else None  # type: ignore[no-untyped-call]
        if self.here:
            self.here.record()

    def read(self) -> Sampled:
        """Waits for it: the one time in a step that the host waits for the device."""
        if self.here:
            self.here.synchronize()
        return replace(read(self.columns, self.turns), prompts=[told(one) for one in self.prompts])


def down(drawn: Drawn) -> Drawn:
    """On its way to the host."""
    return Drawn(*(column.to("cpu", non_blocking=True) for column in drawn))


def told(drawn: Drawn) -> Told:
    columns = (drawn.logprobs.float(), drawn.top_ids.int(), drawn.top_logprobs.float())
    return Told(*(column.numpy().tobytes() for column in columns))
