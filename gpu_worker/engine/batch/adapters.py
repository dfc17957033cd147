"""Adapters as rows see them: which adapter a row has, and whose rows take part in a step. No tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gpu_worker.engine.batch.step_result import Int32

TURN_STEPS = 32
"""Steps after which an adapter gives its place in the steps to one that waits."""


@dataclass(slots=True, eq=False)
class Adapter:
    """A LoRA adapter that rows may have.

    Attributes:
        folder: where it was read.
        stamp: what its files were then (adapters/weights.py).
        slot: where its weights lie on the device; -1: nowhere.
    """

    name: str
    folder: str = ""
    stamp: tuple[int, ...] = ()
    slot: int = -1


@dataclass(slots=True)
class AdapterTurns:
    """Chooses the adapters of a step if rows want more than fit: in turns, so that none waits for ever.

    Attributes:
        most: adapters that a step may have.
        taken: steps in a row in which an adapter was chosen.
        line: adapters that wait, the longest wait first.
    """

    most: int
    taken: dict[Adapter, int] = field(default_factory=dict)
    line: list[Adapter] = field(default_factory=list)

    def choose(self, wanted: Iterable[Adapter]) -> set[Adapter]:
        """Choose among the adapters that rows of the next step want, each named once or more."""
        asked = dict.fromkeys(wanted)
        kept = [adapter for adapter in self.taken if adapter in asked]
        self.line = [adapter for adapter in self.line if adapter in asked and adapter not in self.taken]
        self.line += [adapter for adapter in asked if adapter not in kept and adapter not in self.line]
        over = max(0, len(kept) + len(self.line) - self.most)
        tired = [adapter for adapter in kept if self.taken[adapter] >= TURN_STEPS][:over]
        kept = [adapter for adapter in kept if adapter not in tired]
        free = self.most - len(kept)
        chosen = kept + self.line[:free]
        self.line = self.line[free:] + tired
        self.taken = {adapter: self.taken.get(adapter, 0) + 1 for adapter in chosen}
        return set(chosen)


@dataclass(frozen=True, slots=True)
class AdaptedTokens:
    """Which tokens of a step have an adapter.

    Attributes:
        slots: int32 [tokens]; where the weights of a token's adapter lie; -1: it has none.
        order: int32 [tokens with an adapter]; their places, those of one slot next to each other.
        groups: (slot, begin in `order`, end) of each slot that has tokens.
    """

    slots: Int32
    order: Int32
    groups: Sequence[tuple[int, int, int]]

    @classmethod
    def of(cls, slots: Int32) -> "AdaptedTokens":
        """slots int32 [tokens]"""
        by_slot = np.argsort(slots, kind="stable")
        order: Int32 = by_slot[np.count_nonzero(slots < 0) :].astype(np.int32)
        found, counts = np.unique(slots[order], return_counts=True)
        ends = np.cumsum(counts)
        groups = zip(found.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
        return cls(slots, order, list(groups))


class AdaptedStep(NamedTuple):
    """A step in which some tokens have an adapter.

    Attributes:
        tokens: all.
        kept: the tokens whose logits are needed.
    """

    tokens: AdaptedTokens
    kept: AdaptedTokens

    @classmethod
    def of(cls, slots: Int32, kept: Any) -> "AdaptedStep":
        """slots int32 [tokens]; kept int64 [num_logits]: places of the tokens whose logits are needed."""
        return cls(AdaptedTokens.of(slots), AdaptedTokens.of(slots[kept]))


NO_TOKENS = AdaptedStep.of(np.zeros(0, np.int32), np.zeros(0, np.int64))
"""Of a step that is captured or compiled as one with adapters."""
