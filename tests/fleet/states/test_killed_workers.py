"""A model with states in a whole fleet: a worker that dies under streams costs no token."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.engine import tiny_models
from tests.support.engine.reference import prompt_ids
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load, body
from tests.support.states.hybrid_models import HYBRIDS
from tests.support.waiting import wait_until

NEW_TOKENS = 100
STREAMS = 4
VOCAB = 49_152


@pytest.mark.slow
async def test_rows_of_a_killed_worker_are_computed_again(tmp_path: Path) -> None:
    """Their states are gone with it: prompt and committed tokens are computed again, with the ids of
    transformers' `generate`. Memory has room for the states of two rows, so the others wait for them.
    """
    family, sizes = HYBRIDS["Granite4"]
    sizes = sizes | {"vocab_size": VOCAB, "max_position_embeddings": 512}
    folder = tiny_models.save_with_tokenizer(tmp_path, family, sizes)
    settings = {"dtype": "float32", "debug_kv": True, "threads": 1, "worker_ttl_s": 3}
    fleet = Fleet(num_workers=2, model_id=folder, device="cpu", kv_cache_bytes="150KiB", **settings)
    async with fleet:
        await wait_until(lambda: fleet.workers_ready() == 2)
        load = Load(fleet, NEW_TOKENS, STREAMS)
        await wait_until(lambda: max(len(one.frames) for one in load.streams) > 5)
        [engine] = fleet.engines("w0")
        os.kill(engine.pid, signal.SIGKILL)
        found = await load.whole()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    prompts = prompt_ids([body(number, NEW_TOKENS)["inputs"] for number in range(STREAMS)])
    assert found == [tiny_models.generate(model, prompt, NEW_TOKENS) for prompt in prompts]
