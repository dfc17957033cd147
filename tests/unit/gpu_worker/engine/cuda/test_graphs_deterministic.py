"""DETERMINISTIC on CUDA: every step goes through one graph of a fixed shape."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.messages.request import SamplingParams
from common.settings.settings import Settings
from gpu_worker.engine.cuda.graphs import FixedShapeGraph
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model.load import nondeterministic_because
from gpu_worker.engine.parallel.communicator import SINGLE_RANK
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.tiny_engine import NEW_TOKENS, prompts
from tests.support.engine.tiny_models import FAMILIES
from tests.support.speculation.knowing_proposer import KnowingProposers


def bits(
    engine: Engine, rows: list[int], prefill_tokens: int, resumed: dict[int, list[int]]
) -> dict[int, tuple[list[int], bytes]]:
    """The ids of rows that draw, and the bits of their log-probabilities."""
    played = Player(
        engine, list(range(1, engine.ready.num_blocks + 1)), prefill_tokens, until=engine.rows.step
    )
    sampling = [
        None,
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=4),
        None,
    ]
    options = {
        row: {"base": len(resumed.get(row, [])), "ignore_eos": True, "sampling": sampling[row]}
        for row in rows
    }
    starts = [
        played.start(row, prompts()[row] + resumed.get(row, []), NEW_TOKENS, **options[row])  # type: ignore[arg-type]
        for row in rows
    ]
    ids, logprobs = played.run(starts), dict.fromkeys(rows, b"")
    for step in played.steps:
        for row, _, _, logprob in step.sampled:
            logprobs[row] += np.float32(logprob).tobytes()
    return {row: (ids[row], logprobs[row]) for row in rows}


def test_steps_that_are_planned_are_refused(tmp_path: Path, like_cuda: Callable[..., Engine]) -> None:
    """FlashInfer splits a row by the lengths of all rows, where XQA does not serve the card."""
    tiny_models.save(tmp_path, *FAMILIES["Qwen2"])
    loaded = like_cuda(tmp_path, generation=8).loaded
    loaded.device = torch.device("cuda")
    why = nondeterministic_because(Settings(), loaded, 0, SINGLE_RANK)
    assert why == "attention is split by the lengths of all rows in a step"


@pytest.mark.slow
def test_bits_do_not_depend_on_the_batch(tmp_path: Path, like_cuda: Callable[..., Engine]) -> None:
    """All tokens go through one graph of 12, which rows and chunks do not fill: ids are right, and bits of a
    row do not depend on other rows.
    """
    model = tiny_models.save(tmp_path, *FAMILIES["Qwen2"])
    engine, rows = like_cuda(tmp_path, deterministic=True), list(range(len(prompts())))
    assert isinstance(engine.graphs, FixedShapeGraph) and list(engine.graphs.graphs.graphs) == [12]
    alone = {row: bits(engine, [row], 1000, {})[row] for row in rows}
    assert alone[0][0] == tiny_models.generate(model, prompts()[0], NEW_TOKENS)
    assert bits(engine, rows, 1000, {}) == alone, "batched"
    assert bits(engine, rows[::-1], 7, {}) == alone, "chunked, in another order"
    answers = {tuple(prompts()[row]): alone[row][0] for row in rows}
    engine.rows.make_proposer = KnowingProposers(answers, 0.3)
    assert bits(engine, rows, 1000, {}) == alone, "with proposals"
    resumed = bits(engine, rows, 1000, {row: alone[row][0][: 5 + row] for row in rows})
    assert resumed == {
        row: (ids[5 + row :], logprobs[4 * (5 + row) :]) for row, (ids, logprobs) in alone.items()
    }, "resumed"
