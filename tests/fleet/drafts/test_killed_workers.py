"""A draft model in a whole fleet: workers that die under streams cost no token, and drafts go on."""

import json
import re
from pathlib import Path

import httpx
import pytest

from benchmarks.models.speculation import save_faded, save_first_layers
from tests.support.engine import tiny_models
from tests.support.engine.reference import prompt_ids
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load, body, kill_both_workers
from tests.support.waiting import wait_until

NEW_TOKENS = 100
STREAMS = 4
NUM_BUSY = 6
SETTINGS = {"num_workers": 2, "num_gateways": 1, "debug_kv": True, "kv_cache_bytes": "128MiB"}
QUICK = {"worker_ttl_s": 3, "stopped_grace_s": 0, "dtype": "float32", "threads": 1, "device": "cpu"}


@pytest.mark.slow
async def test_killed_workers_with_a_draft_model_have_the_ids_of_generate(tmp_path: Path) -> None:
    """An agent, then the other worker's engine, is killed while rows are ahead of one token a step. The draft
    has the layers of the model that change anything: it is always right, takes about a third of the model's
    time, and so pays.
    """
    model_folder, draft = tmp_path / "model", tmp_path / "draft"
    save_faded(model_folder, "smollm2", NUM_BUSY, 0.0)
    save_first_layers(draft, str(model_folder), NUM_BUSY)
    config = json.dumps({"model": str(draft), "num_speculative_tokens": 3})
    async with Fleet(**SETTINGS, **QUICK, model_id=model_folder, speculative_config=config) as fleet:
        await wait_until(lambda: fleet.workers_ready() == 2)
        load = Load(fleet, NEW_TOKENS, STREAMS)
        await kill_both_workers(fleet, load)
        found = await load.whole()
        shown = re.compile(r"^tokenfleet_accepted_tokens_total\{.*\} [1-9]", re.MULTILINE)
        await wait_until(lambda: shown.search(httpx.get(f"{fleet.base_url}/metrics").text) is not None)
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, attn_implementation="eager"
    )
    prompts = prompt_ids([body(number, NEW_TOKENS)["inputs"] for number in range(STREAMS)])
    assert found == [tiny_models.generate(model, prompt, NEW_TOKENS) for prompt in prompts]
