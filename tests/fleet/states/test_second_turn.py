"""A chat with a model that has states: its second turn starts where the first ended."""

from pathlib import Path

import httpx
import pytest

from tests.support.engine import tiny_models
from tests.support.engine.reference import prompt_ids
from tests.support.fleet.fleet import Fleet
from tests.support.states.hybrid_models import HYBRIDS
from tests.support.waiting import wait_until

VOCAB = 49_152
NEW_TOKENS = 40


@pytest.mark.slow
async def test_a_second_turn_starts_from_a_snapshot(tmp_path: Path) -> None:
    family, sizes = HYBRIDS["Granite4"]
    sizes = sizes | {"vocab_size": VOCAB, "max_position_embeddings": 512}
    folder = tiny_models.save_with_tokenizer(tmp_path, family, sizes)
    settings = {"dtype": "float32", "debug_kv": True, "threads": 1, "kv_cache_bytes": "8MiB"}
    fleet = Fleet(num_workers=1, model_id=folder, device="cpu", **settings)
    first = "Once upon a time there was a ship that sailed to an island far away in the sea, and"
    async with fleet, httpx.AsyncClient(base_url=fleet.base_url, timeout=60) as client:
        await wait_until(lambda: fleet.workers_ready() == 1)
        answers, cached = list[str](), list[int]()
        for _ in range(2):
            prompt = first + "".join(answers) + (" Then they came home." if answers else "")
            body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
            answer = (await client.post("/v1/completions", json=body | {"ignore_eos": True})).json()
            answers.append(answer["choices"][0]["text"])
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    [ids] = prompt_ids([prompt])
    assert answers[1] == tokenizer.decode(tiny_models.generate(model, ids, NEW_TOKENS))
    assert cached[0] == 0 and cached[1] >= len(prompt_ids([first])[0]) // 16 * 16 > 0
