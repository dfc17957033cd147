"""Vectors of a decoder on several ranks."""

from pathlib import Path

import torch

from gpu_worker.engine.parallel.communicator import Communicator
from tests.support.engine import tiny_models
from tests.support.engine.multi_rank_engine import SETTINGS, Led, prompts
from tests.support.pooling.pooled_rows import pool_rows


@torch.inference_mode()
def check_vectors(ranks: Communicator, folder: Path) -> None:
    """Vectors are the last states of transformers' model, whole and in chunks."""
    model = tiny_models.save(folder, *tiny_models.FAMILIES["Llama"])
    rows = dict(enumerate(prompts(tiny_models.VOCAB), 1))
    states = {row: model.base_model(input_ids=torch.tensor([ids])) for row, ids in rows.items()}
    with Led(ranks, model_id=str(folder), threads=1, runner="pooling", **SETTINGS) as engine:
        for prefill_tokens in (1000, 7):
            found = pool_rows(engine, rows, prefill_tokens=prefill_tokens)
            for row, vector in found.items():
                expected = states[row].last_hidden_state[0, -1]
                torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-4)
