"""The cases with LoRA of text-generation-inference's own integration tests, by their names: each request as
its test sends it, and the shape of the answer. That an adapter changes the ids as PEFT does is tested where
engines are (tests/unit/gpu_worker/engine/adapters, tests/fleet/adapters).
"""

import asyncio
from pathlib import Path
from typing import Any

from deploy.launcher.embedded_broker import Broker
from tests.integration.api.tgi.test_shapes import GREEDY, PREFILL, TOKEN, paths
from tests.support.adapters.files import write_adapter
from tests.support.adapters.fleet import adapter_fleet
from tests.support.waiting import wait_until

DBPEDIA, SUPPORT, HUGCODE = (
    "predibase/dbpedia",
    "predibase/customer_support",
    "smangrul/starcoder-3b-hugcoder",
)
ARTICLE = (
    "You are given the title and the body of an article below.\n### Title: Great White Whale\n\n### Type:"
)
WORDS = "What are 3 unique words that describe you?"
CODE = "def print_hello"
SCORED = {"max_new_tokens": 10, "decoder_input_details": True}
LONG = {"max_new_tokens": 40, "details": True}
SAMPLED = {"max_new_tokens": 60, "temperature": 0.6, "top_p": 0.95, "seed": 0, "details": True}
LOAD = 4
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "test_lora_mistral": ("Test request", SCORED, ""),
    "test_lora_mistral_without_adapter": (ARTICLE, LONG, ""),
    "test_lora_mistral_with_dbpedia_adapter": (ARTICLE, LONG, DBPEDIA),
    "test_lora_mistral_with_customer_support_adapter": (WORDS, LONG, SUPPORT),
    "test_lora_mistral_without_customer_support_adapter": (WORDS, LONG, ""),
    "test_flash_starcoder2": (CODE, SCORED, ""),
    "test_flash_starcoder2_default_params": ("who are you?", SAMPLED, ""),
    "test_flash_starcoder2_load": ("who are you?", {"max_new_tokens": 10, "details": True}, ""),
    "test_flash_starcoder2_with_hugcode_adapter": (CODE, {"max_new_tokens": 10, "details": True}, HUGCODE),
}
"""Case → its prompt, its parameters, and its `adapter_id`."""


async def test_prompts_with_adapters(broker: Broker, tmp_path: Path) -> None:
    names = (DBPEDIA, SUPPORT, HUGCODE)
    words = tuple(f"{name}={write_adapter(tmp_path / name.replace('/', '-'))}" for name in names)
    async with adapter_fleet(broker.url, lora_adapters=words) as (worker, _, client):
        await wait_until(lambda: len(worker.held.loaded) == len(names))
        for case, (prompt, parameters, adapter) in CASES.items():
            given = parameters | ({"adapter_id": adapter} if adapter else {})
            body, times = {"inputs": prompt, "parameters": given}, LOAD if case.endswith("_load") else 1
            answers = await asyncio.gather(*(client.post("/generate", json=body) for _ in range(times)))
            expected = PREFILL if "decoder_input_details" in given else f"{GREEDY} {TOKEN}"
            expected = expected.replace("details.seed:null", "details.seed:int" if "seed" in given else "")
            for answer in answers:
                assert answer.status_code == 200, answer.text
                found = {*paths(answer.json())}
                assert {"generated_text:str", *expected.split()} - found == set(), case
            assert [one.adapter.partition("@")[0] for one in worker.seen[-times:]] == times * [adapter], case
