"""An encoder-decoder model in a whole fleet: workers that die under streams cost no token."""

from pathlib import Path

import pytest

from tests.support.engine import tiny_models
from tests.support.engine.reference import prompt_ids
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load, body, kill_both_workers
from tests.support.waiting import wait_until

NEW_TOKENS = 100
STREAMS = 6
VOCAB = 49_152
T5 = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}


@pytest.mark.slow
async def test_rows_of_killed_workers_are_encoded_and_decoded_again(tmp_path: Path) -> None:
    """An agent, then the other worker's engine, is killed: what was encoded is gone with it, and the ids are
    those of transformers' `generate`.
    """
    folder = tiny_models.save_with_tokenizer(tmp_path, "T5", T5)
    settings = {"dtype": "float32", "debug_kv": True, "threads": 1, "worker_ttl_s": 3, "stopped_grace_s": 0}
    fleet = Fleet(num_workers=2, model_id=folder, device="cpu", kv_cache_bytes="8MiB", **settings)
    async with fleet:
        await wait_until(lambda: fleet.workers_ready() == 2)
        load = Load(fleet, NEW_TOKENS, STREAMS)
        await kill_both_workers(fleet, load)
        found = await load.whole()
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager")
    prompts = prompt_ids([body(number, NEW_TOKENS)["inputs"] for number in range(STREAMS)])
    expected = [tiny_models.generate(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert len({tuple(ids) for ids in expected}) > 1
    assert found == expected
