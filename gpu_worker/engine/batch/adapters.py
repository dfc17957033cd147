"""Adapters as rows see them: which adapter a row has, and which tokens of a step have one. No tensors."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gpu_worker.engine.batch.step_result import Int32


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


@dataclass(frozen=True, slots=True)
class AdaptedTokens:
    """Which tokens of a step have an adapter.

    Attributes:
        slots: int32 [tokens]; where the weights of a token's adapter lie; -1: it has none.
        order: int32 [tokens with an adapter]; their places, those of one slot next to each other.
        starts: int32 [slots up to the last one with tokens + 1]; where the tokens of each begin in `order`.
    """

    slots: Int32
    order: Int32
    starts: Int32

    @classmethod
    def of(cls, slots: Int32) -> "AdaptedTokens":
        """slots int32 [tokens]"""
        by_slot = np.argsort(slots, kind="stable")
        order: Int32 = by_slot[np.count_nonzero(slots < 0) :].astype(np.int32)
        starts = np.searchsorted(slots[order], np.arange(slots.max(initial=-1) + 2))
        return cls(slots, order, starts.astype(np.int32))


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
