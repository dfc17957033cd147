"""Engines with a model that proposes tokens, and what they answer to rows of all kinds."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from common.messages.request import SamplingParams
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import SINGLE_RANK, Communicator
from tests.support.engine.batch_player import Player
from tests.support.engine.tiny_engine import SETTINGS, prompts
from tests.support.engine.tiny_models import VOCAB

NUM_DRAFTED = 4
NEW_TOKENS = 40
SEEDED = SamplingParams(temperature=0.7, seed=11)
ROWS: dict[int, SamplingParams | None] = {
    0: None,
    1: SEEDED,
    2: replace(SEEDED, top_p=0.8, repetition_penalty=1.3, frequency_penalty=0.3),
    3: SamplingParams(repetition_penalty=1.2, logit_bias=[(7, 3.0)]),
}
"""Sampling parameters of row n."""


def engine_settings(folder: Path, speculative: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    config = json.dumps(speculative) if speculative else None
    return SETTINGS | {"model_id": str(folder), "block_size": 16, "speculative_config": config} | settings


def drafting_engine(
    folder: Path,
    speculative: dict[str, Any] | None,
    communicator: Communicator = SINGLE_RANK,
    **settings: Any,
) -> Engine:
    """An engine in which drafts cost next to nothing, so that it always drafts."""
    engine = Engine(Settings(**engine_settings(folder, speculative, **settings)), communicator=communicator)
    engine.costs.set(1.0, 0.01, 0.0, 0.0)
    return engine


@dataclass
class Drafted:
    """What rows were answered, and what became of the drafts.

    Attributes:
        tops: of row and index the likeliest tokens.
    """

    ids: dict[int, list[int]]
    tops: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    num_steps: int = 0
    num_proposed: int = 0

    @property
    def answer(self) -> tuple[dict[int, list[int]], dict[tuple[int, int], dict[int, float]]]:
        return self.ids, self.tops

    @property
    def share_right(self) -> float:
        """Of the proposals, those that were right: a row has one token a step by itself."""
        num_tokens = sum(map(len, self.ids.values()))
        return (num_tokens - self.num_steps) / max(1, self.num_proposed)


def play_rows(
    engine: Any,
    shown: dict[int, list[int]] | None = None,
    prefill_tokens: int = 1000,
    num_blocks: int | None = None,
    rows: dict[int, SamplingParams | None] = ROWS,
    new_tokens: int = NEW_TOKENS,
    vocab_size: int = VOCAB,
    **run: Any,
) -> Drafted:
    """All rows, resumed after the tokens that were `shown`."""
    shown = shown or {}
    free = list(range(1, 1 + (num_blocks or engine.ready.num_blocks)))
    played = Player(engine, free, prefill_tokens, until=engine.rows.step)
    numbered = [[token % vocab_size for token in prompt] for prompt in prompts()]
    ids = played.run(
        [
            played.start(
                row,
                numbered[row % len(numbered)] + shown.get(row, []),
                new_tokens,
                len(shown.get(row, [])),
                sampling=sampling,
                top_n_tokens=row % 3,
                ignore_eos=True,
            )
            for row, sampling in rows.items()
        ],
        **run,
    )
    num_steps = sum(len({row for row, *_ in step.sampled}) for step in played.steps)
    return Drafted(ids, played.top_logprobs, num_steps, sum(step.proposed_tokens for step in played.steps))


def noted_drafts(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """(ids so far, drafts) of greedy rows, as they are made."""
    noted: list[tuple[list[int], list[int]]] = []
    assert engine.drafter
    take: Callable[[torch.Tensor], None] = engine.drafter.take

    def note(drafts: torch.Tensor) -> None:
        assert engine.drafter
        take(drafts)
        for one in engine.drafter.asked:
            text = one.proposer.text
            if one.row.sampling_state is None and one.proposer.drafted:
                noted.append((text.known[: text.length].tolist(), list(one.proposer.drafted)))

    engine.drafter.take = note  # type: ignore[method-assign]
    return noted
