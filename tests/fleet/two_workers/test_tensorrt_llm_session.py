"""What TensorRT-LLM's GPT session offers, a test for each row of its runtime guide: inputs, outputs, sampling
parameters, session, KV cache and world, as docs/from-tensorrt-llm.md names them here.
"""

import asyncio
import base64
import json
import math
from typing import Any

import httpx
import pytest

from common.messages.records import pack_ids, unpack_floats
from common.settings.settings import SettingError, Settings
from gpu_worker.loading import capacity
from gpu_worker.protocol import Ready
from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.fleet.http_calls import PROMPT, generate, post
from tests.support.prompts import FEW, PROMPTS

EOS = 2
NUM_TOKENS = 12
IDS = [prompt_ids([PROMPTS[place]])[0] for place in FEW[:2]]
"""Two prompts of different lengths."""


async def complete_ids(http: httpx.AsyncClient, prompt: Any, **fields: Any) -> list[list[int]]:
    """Return the generated ids of each choice: greedy, unless `fields` say otherwise."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    answer = await post(http, "/v1/completions", body | fields)
    return [choice["token_ids"] for choice in answer["choices"]]


def ready(num_blocks: int = 64, block_size: int = 16) -> Ready:
    return Ready("m", "float32", "cpu", block_size, num_blocks, 512, 2048, pack_ids([EOS]))


# --- inputs -------------------------------------------------------------------------------------------------


async def test_end_id(http: httpx.AsyncClient) -> None:
    """The model's end ids end a sequence, and so does any id that a request names; or none does."""
    plain = await generate(http)
    ended = await generate(http, logit_bias={EOS: 100})
    assert (ended["ids"], ended["reason"]) == ([EOS], "eos_token")
    named = await generate(http, stop_token_ids=[plain["ids"][3]])
    assert (named["ids"], named["reason"]) == (plain["ids"][:4], "stop_sequence")
    never = await generate(http, logit_bias={EOS: 100}, ignore_eos=True)
    assert never["ids"] == [EOS] * NUM_TOKENS


async def test_packed_input_of_several_lengths_needs_no_pad_id(http: httpx.AsyncClient) -> None:
    """Ids of several lengths, in one request, give the ids that each gives alone with transformers."""
    expected = [ids[:NUM_TOKENS] for ids in reference_ids(IDS, 40)]
    assert len(IDS[0]) != len(IDS[1])
    assert await complete_ids(http, IDS) == expected


async def test_embedding_bias(http: httpx.AsyncClient) -> None:
    assert (await generate(http, logit_bias={500: 100}))["ids"] == [500] * NUM_TOKENS


async def test_bad_words_of_each_sequence(http: httpx.AsyncClient) -> None:
    plain = await generate(http)
    word = plain["details"]["tokens"][1]["text"].strip()
    banned, free = await asyncio.gather(generate(http, bad_words=[word]), generate(http))
    assert word not in banned["generated_text"].split()
    assert free["ids"] == plain["ids"]


async def test_stop_words_of_each_sequence(http: httpx.AsyncClient) -> None:
    plain = await generate(http)
    third = plain["details"]["tokens"][2]["text"]
    stopped, free = await asyncio.gather(generate(http, stop=[third]), generate(http))
    assert (stopped["ids"], stopped["reason"]) == (plain["ids"][:3], "stop_sequence")
    assert free["ids"] == plain["ids"]


async def test_max_new_tokens(http: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(generate(http, max_new_tokens=count) for count in (1, 5, 30)))
    assert [len(answer["ids"]) for answer in answers] == [1, 5, 30]
    assert {answer["reason"] for answer in answers} == {"length"}


# --- outputs ------------------------------------------------------------------------------------------------


async def test_ids_and_log_probabilities_of_generated_tokens(http: httpx.AsyncClient) -> None:
    tokens = (await generate(http))["details"]["tokens"]
    assert [token["id"] for token in tokens] == reference_ids(prompt_ids([PROMPT]), 40)[0][:NUM_TOKENS]
    assert all(token["logprob"] <= 0 and math.isfinite(token["logprob"]) for token in tokens)


async def test_on_token_generated(http: httpx.AsyncClient) -> None:
    """The callback's ids, step and `finished` come as events, one a step."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, "details": True}}
    async with http.stream("POST", "/generate_stream", json=body) as answer:
        lines = [line async for line in answer.aiter_lines() if line.startswith("data:")]
    events = [json.loads(line.removeprefix("data:")) for line in lines]
    assert [event["index"] for event in events] == [1, 2, 3, 4, 5]
    assert [event["token"]["id"] for event in events] == (await generate(http))["ids"][:5]
    assert [event["details"] is not None for event in events] == [False] * 4 + [True]


async def test_ids_scores_and_log_probabilities_of_each_beam(http: httpx.AsyncClient) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "beam_width": 3, "return_token_ids": True}
    choices = (await post(http, "/v1/completions", body))["choices"]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    scores = [choice["beam_score"] for choice in choices]
    assert scores == sorted(scores, reverse=True)
    for choice in choices:
        length = len(choice["token_ids"])
        assert choice["beam_score"] == pytest.approx(choice["cumulative_logprob"] / length, rel=1e-4)


async def test_context_and_generation_logits(http: httpx.AsyncClient) -> None:
    """Row i of the context's logits is behind token i of the prompt; the last one gives the first token."""
    both = {"return_context_logits": True, "return_generation_logits": True}
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True} | both
    [choice] = (await post(http, "/v1/completions", body))["choices"]
    context, generation = (unpack_rows(choice[f"{name}_logits"]) for name in ("context", "generation"))
    assert len(context) == len(prompt_ids([PROMPT])[0])
    assert [row.index(max(row)) for row in generation] == choice["token_ids"]
    assert context[-1] == pytest.approx(generation[0], abs=1e-3)


def unpack_rows(field: dict[str, Any]) -> list[list[float]]:
    """The rows of logits in a field of a response."""
    values, (num_rows, width) = unpack_floats(base64.b64decode(field["data"])), field["shape"]
    assert (field["dtype"], len(values)) == ("float32", num_rows * width)
    return [values[i * width : (i + 1) * width] for i in range(num_rows)]


# --- sampling -----------------------------------------------------------------------------------------------

DRAWN = {"do_sample": True, "seed": 5, "max_new_tokens": 32, "ignore_eos": True}
NUCLEUS = DRAWN | {"temperature": 1.5, "top_p": 0.95}
DECAYING = NUCLEUS | {"top_p_decay": 0.5}
GREEDY = {"max_new_tokens": 32, "ignore_eos": True}
COMMON_IDS = [
    ids[0] for ids in prompt_ids([*",.", " the", " a", " and", " to", " of", " was", " in", " who"])
]
SAMPLING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": (DRAWN, {"temperature": 2.0}),
    "repetition_penalty": (GREEDY, {"repetition_penalty": 3.0}),
    "presence_penalty": (GREEDY, {"presence_penalty": 2.0}),
    "random_seed_of_64_bits": (DRAWN, {"seed": 2**63 - 1}),
    "top_k": (DRAWN, {"top_k": 3}),
    "top_p": (DRAWN, {"top_p": 0.3}),
    "top_p_decay": (NUCLEUS, {"top_p_decay": 0.5}),
    "top_p_min": (DECAYING, {"top_p_min": 0.9}),
    "top_p_reset_ids": (DECAYING, {"top_p_reset_ids": COMMON_IDS}),
}
"""Parameter → the parameters beside it, and its own value."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLING)
async def test_sampling(http: httpx.AsyncClient, name: str) -> None:
    """A parameter changes the sequence that has it and none beside it, and gives the same ids again."""
    others, own = SAMPLING[name]
    bodies = (others | own, others, others | own, others)
    answers = await asyncio.gather(*(generate(http, **body) for body in bodies))
    changed, plain, changed_again, plain_again = (answer["ids"] for answer in answers)
    assert changed == changed_again
    assert plain == plain_again
    assert changed != plain


async def test_min_length(http: httpx.AsyncClient) -> None:
    short, late = await asyncio.gather(
        generate(http, logit_bias={EOS: 100}), generate(http, logit_bias={EOS: 100}, min_new_tokens=7)
    )
    assert short["ids"] == [EOS]
    assert EOS not in late["ids"][:7] and late["ids"][7:] == [EOS]


async def test_top_k_and_top_p_of_zero_are_greedy(http: httpx.AsyncClient) -> None:
    """Without `do_sample` on TGI's route, and with `temperature` 0 on OpenAI's."""
    expected = (await generate(http))["ids"]
    assert (await generate(http, top_k=0))["ids"] == expected
    assert await complete_ids(http, PROMPT, top_k=0) == [expected]


# --- beam search --------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_beam_width_length_penalty_diversity_and_early_stopping(http: httpx.AsyncClient) -> None:
    """Width 1 is greedy; each parameter changes what a wider search finds, or how it scores it."""
    assert await complete_ids(http, PROMPT, beam_width=1) == await complete_ids(http, PROMPT)
    body = {"prompt": PROMPT, "max_tokens": 10, "beam_width": 3, "logit_bias": {str(EOS): 6}}
    variants: list[dict[str, Any]] = [
        {},
        {"length_penalty": 3.0},
        {"diversity": 5.0},
        {"early_stopping": True},
        {"early_stopping": "never"},
    ]
    answers = await asyncio.gather(*(post(http, "/v1/completions", body | one) for one in variants))
    found = [[(choice["text"], choice["beam_score"]) for choice in answer["choices"]] for answer in answers]
    assert found[1] != found[0] != found[2]
    assert all(len(sequences) == 3 for sequences in found)


async def test_max_beam_width(http: httpx.AsyncClient) -> None:
    most = (await http.get("/info")).json()["max_beam_width"]
    answer = await http.post("/v1/completions", json={"prompt": PROMPT, "beam_width": most + 1})
    assert answer.status_code == 400
    assert f"at most {most}" in answer.json()["error"]["message"]


# --- session, KV cache, model, world ------------------------------------------------------------------------


@pytest.mark.slow
async def test_requests_join_a_batch_that_runs(http: httpx.AsyncClient) -> None:
    """In-flight batching: a request that comes later joins, and ends before the one that runs."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 200, "ignore_eos": True, "details": True}}
    async with http.stream("POST", "/generate_stream", json=body) as answer:
        lines = (line async for line in answer.aiter_lines() if line.startswith("data:"))
        first = json.loads((await anext(lines)).removeprefix("data:"))
        short = await generate(http, ignore_eos=True)
        rest = [json.loads(line.removeprefix("data:")) async for line in lines]
    assert [event["token"]["id"] for event in [first, *rest]][:NUM_TOKENS] == short["ids"]
    assert rest[-1]["details"]["generated_tokens"] == 200


async def test_max_batch_size_and_max_sequence_length_are_shown(http: httpx.AsyncClient) -> None:
    info = (await http.get("/info")).json()
    assert info["max_total_tokens"] > info["max_input_tokens"] > 0
    too_long = {"inputs": PROMPT, "parameters": {"max_new_tokens": info["max_total_tokens"]}}
    answer = await http.post("/generate", json=too_long)
    assert answer.status_code == 422
    assert str(info["max_total_tokens"]) in answer.json()["error"]


def test_kv_cache_is_limited_by_a_number_of_tokens(tmp_path: Any) -> None:
    """`maxTokens` is MAX_BATCH_TOTAL_TOKENS, and `tokensPerBlock` is BLOCK_SIZE."""
    limited = Settings(max_batch_total_tokens=160)
    assert capacity(limited, ready(block_size=16), "w0", "w0@1", tmp_path).num_blocks == 10
    assert capacity(limited, ready(block_size=32), "w0", "w0@1", tmp_path).num_blocks == 5
    assert capacity(Settings(), ready(), "w0", "w0@1", tmp_path).num_blocks == 64
    with pytest.raises(SettingError, match="less than one block"):
        capacity(Settings(max_batch_total_tokens=8), ready(), "w0", "w0@1", tmp_path)


def test_kv_cache_is_limited_by_a_share_of_the_gpu() -> None:
    """`freeGpuMemoryFraction` is CUDA_MEMORY_FRACTION; it is a share of all memory, as in TGI."""
    assert Settings.read([], {"CUDA_MEMORY_FRACTION": "0.85"}).cuda_memory_fraction == 0.85
    with pytest.raises(SettingError, match="CUDA_MEMORY_FRACTION"):
        Settings.read([], {"CUDA_MEMORY_FRACTION": "1.5"})
