"""docs/not-built.md is the one list of what is missing: requests and settings for it are refused by name."""

import re
from pathlib import Path
from typing import Any

import pytest

from common.settings.settings import SettingError, Settings
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids

PAGE = Path(__file__).parents[3] / "docs" / "not-built.md"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def user(content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


SEARCH = {"type": "web_search"}


def beams(**fields: object) -> dict[str, Any]:
    return {"prompt": "Hi", "max_tokens": 4, "beam_width": 2, **fields}


def logits(**fields: object) -> dict[str, Any]:
    return {"prompt": "Hi", "max_tokens": 4, "return_generation_logits": True, **fields}


def schema(keyword: str, value: object) -> dict[str, Any]:
    json_schema = {"name": "s", "schema": {"type": "array", keyword: value}}
    return user("Hi") | {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def tag(tag_format: dict[str, Any]) -> dict[str, Any]:
    return user("Hi") | {"response_format": {"type": "structural_tag", "format": tag_format}}


REQUESTS: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "receipts and replays": [
        (COMPLETIONS, {"prompt": "a", "receipt": True}, "`receipt`"),
        (CHAT, user("a") | {"receipt": True}, "`receipt`"),
        (RESPONSES, {"input": "a", "receipt": True}, "`receipt`"),
        ("/v1/messages", user("a") | {"max_tokens": 4, "receipt": True}, "`receipt`"),
        ("/generate", {"inputs": "a", "parameters": {"receipt": True}}, "`receipt`"),
        ("/requests/r1/replay", {}, "the same `seed` gives the same tokens"),
    ],
    "audio, video and files": [
        (CHAT, user([{"type": kind}]), kind) for kind in ("input_audio", "video_url", "file", "input_file")
    ],
    "drawing among beams": [(COMPLETIONS, beams(temperature=0.5), "`temperature`")],
    "beside it": [
        (COMPLETIONS, beams(logprobs=2), "`logprobs`"),
        (COMPLETIONS, beams(prompt_logprobs=1), "`prompt_logprobs`"),
        (COMPLETIONS, beams(return_context_logits=True), "`return_context_logits`"),
        ("/generate", {"inputs": "a", "parameters": {"beam_width": 2, "watermark": True}}, "`watermark`"),
    ],
    "in a stream": [(COMPLETIONS, logits(stream=True), "`return_generation_logits`")],
    "(`best_of`)": [
        (
            "/generate",
            {
                "inputs": "a",
                "parameters": {"best_of": 2, "do_sample": True, "return_context_logits": True},
            },
            "`best_of`",
        )
    ],
    "on `/v1/responses`": [
        (RESPONSES, {"input": "a", "beam_width": 2}, "beam_width"),
        (RESPONSES, {"input": "a", "return_generation_logits": True}, "return_generation_logits"),
    ],
    "running built-in tools": [
        (RESPONSES, {"input": "a", "tools": [SEARCH], "tool_choice": SEARCH}, "web_search")
    ],
    "`conversation`": [(RESPONSES, {"input": "a", "conversation": "c"}, "`conversation`")],
    "`prompt`": [(RESPONSES, {"input": "a", "prompt": {"id": "p"}}, "`prompt`")],
    "`truncation: auto`": [(RESPONSES, {"input": "a", "truncation": "auto"}, "`truncation`")],
    "`context_management`": [
        (RESPONSES, {"input": "a", "context_management": [{"type": "compaction"}]}, "`context_management`")
    ],
    "styles of single models": [(CHAT, tag({"type": "qwen_xml", "json_schema": {}}), "qwen_xml")],
    "formats that": [(CHAT, tag({"type": "dispatch", "rules": []}), "dispatch")],
    "keywords that llguidance lacks": [
        (CHAT, schema("not", {}), "not"),
        (CHAT, schema("uniqueItems", True), "uniqueItems"),
        (CHAT, schema("if", {}), "if"),
    ],
}
"""Words of the page → route, body, and words of the error."""
SETTINGS: dict[str, list[tuple[list[str], str]]] = {
    "prices and budgets of money": [(["--model-prices", "m=1/2"], "LiteLLM")],
}
"""Words of the page → command line, and words of the error."""
NOT_ASKED = {
    "a load pauses its worker": "it is slower, not refused",
    "which adapter answered": "nothing there asks for it",
    "functions within": "they are left out",
    "`custom` tools": "they are left out",
    "`mcp_servers`": "tests/integration/api/anthropic",
    "`container`": "tests/integration/api/anthropic",
    "files as sources": "tests/integration/api/anthropic",
    "documents": "tests/integration/api/anthropic",
    "Anthropic's built-in tools": "tests/integration/api/anthropic",
    "`budget_tokens`": "they are accepted",
    "batches of messages": "there is no such route",
    "in lines for": "tests/integration/api/batches",
    "`/v1/uploads`": "there is no such route",
    "batches of other pools": "no request can ask for it",
    "a time before which": "no request can ask for it",
    "a list of jobs": "there is no such route",
    "fewer batch rows": "callers wait longer, nothing is refused",
    "moving a scheduled job": "no request can ask for it",
    "chains of jobs": "no request can ask for it",
    "`file_id`": "tests/integration/api/pictures asks a model that sees",
    "storing responses": "tests/integration/api/pictures asks a model that sees",
    "the rank of a token": "null stands in its place",
    "any_order": "a field inside a format: tests/unit/api/grammar",
    "a regex that could go on": "tests/unit/api/grammar",
    "retrieving as a stream": "tests/integration/api/responses",
    "`standard`": "no request can ask for it",
    "only one gateway knew": "no request can ask for it",
    "actions on the command line": "they write no line",
    "budgets while Redis is away": "no request can ask for it",
    "limits over pools on several brokers": "docs/several-brokers.md says so",
    "a row that moves": "it is slower, not refused",
    "vLLM's `/sleep`": "there is no such route",
    "sleep in memory with several ranks": "they sleep on disk",
    "jobs for further models": "docs/many-models.md says so",
    "balance of jobs": "no request can ask for it",
    "the page does not list": "nothing there asks for it",
    "cloud metadata": "docs/runbook.md says so",
    "a gateway that inherits": "it is slower, not refused",
    "digests of third-party images": "they are names in docker-compose.yml",
    "one Redis password": "docs/kubernetes.md says so",
    "Redis Cluster": "tests/fleet and tests/unit/common/broker ask a node",
    "the image for CUDA": "it needs a GPU",
    "what never ran on a GPU": "it needs a GPU",
    "the tokens of a row that are checked in one step": "it is slower, not refused",
    "whose heads FlashInfer does not serve": "it needs a GPU",
    "latents of other sizes": "it needs a GPU",
    "ALiBi": "it needs a GPU",
    "dynamic rotary frequencies": "it needs a GPU",
    "prompts over latents": "it needs a GPU",
    "captured graphs in a pipeline": "it is slower, not refused",
    "a worker on several machines over NCCL": "it needs a GPU",
    "the manifests for several machines": "they need several machines",
    "another `logprobs_mode`": "prompts show the raw one",
    "KServe over gRPC": "no port of this server speaks it",
    "its binary tensors": "tests/integration/api/kserve",
    "`tracestate`": "spans go without it",
    "SIGTERM to one machine": "no request can ask for it",
    "vLLM's metrics of single steps": "/metrics lacks their names",
    "a pool that is scaled to zero": "docs/kubernetes.md says so",
    "int8 activations": "no setting asks for it",
    "the matrix unit for float16 and float32": "it is slower, not refused",
    "a preloaded worker's KV cache": "it is memory, not refused",
    "Its compiler came": "it says how an image was built",
    "All are refused by name": "it says how",
    "quantised experts": "dequantised at load",
    "DoRA, QA-LoRA": "tests/unit/gpu_worker/engine/adapters",
    "`adapter_model.bin`": "tests/unit/common/adapters",
    "merging at download": "tests/unit/deploy/cli",
    "adapters of the mixers": "tests/unit/gpu_worker/engine/states",
    "DETERMINISTIC on CUDA beside them": "it needs a GPU",
    "PaliGemma's": "a model of that family is needed",
    "Gemma 3's with FlashInfer": "it needs a GPU",
    "of GGUF files": "the model is served for text",
    "with DETERMINISTIC on CUDA": "it needs a GPU",
    "a tile is encoded": "it is slower, not refused",
    "by heads or EAGLE-3": "tests/unit/gpu_worker/engine/drafting",
    "by models with PIPELINE": "tests/unit/common/settings",
    "EAGLE-3 without": "tests/unit/gpu_worker/engine/drafting",
    "MTP layers": "tests/unit/gpu_worker/engine/drafting",
    "a repository of heads": "it is refused as a model",
    "trees of proposals": "no setting asks for it",
    "encoding a long prompt in parts": "it is slower, not refused",
    "`forced_eos_token_id`": "docs/models.md says so",
    "logits of their prompts": "tests/unit/api/requests",
    "reuse of a system prompt alone": "it is slower, not refused",
    "DETERMINISTIC with states": "tests/unit/gpu_worker/engine/states",
    "sparse vectors": "there is no such route",
    "chats or pictures as input": "tests/integration/api/pooling",
    "pooled otherwise than": "tests/unit/gpu_worker/engine/pooling",
    "encoders with relative positions": "tests/unit/gpu_worker/engine/encoder",
    "encoders that are quantised": "tests/unit/gpu_worker/engine/encoder",
    "score templates": "docs/embeddings.md says so",
    "several ranks": "tests/unit/gpu_worker/engine/model",
    "quantised weights and caches": "tests/unit/gpu_worker/engine/model",
    "proposals": "they are off, with a line in the log",
}
"""Words of the page → why no test here asks for it."""


def missing_things() -> list[str]:
    """What the page's table lists, each thing by itself."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")][2:]
    return [thing for row in rows for thing in re.split(r"[;.] ", row.split("|")[2].strip()) if thing]


def test_each_missing_thing_is_asked_for() -> None:
    """A thing that the page names has a request or a setting here, or a reason why none can ask."""
    known = [*REQUESTS, *SETTINGS, *NOT_ASKED]
    text = PAGE.read_text()
    assert [words for words in known if words not in text] == []
    assert [thing for thing in missing_things() if not any(words in thing for words in known)] == []


@pytest.mark.parametrize("words", REQUESTS)
async def test_a_request_for_it_is_refused_by_name(broker: Broker, words: str) -> None:
    async with answering(broker.url, Answer(ids("x"))) as (worker, _, client):
        for path, body, name in REQUESTS[words]:
            response = await client.post(path, json=body)
            assert response.status_code in (400, 404, 422), response.text
            assert name in response.text
        assert not worker.seen


@pytest.mark.parametrize("words", SETTINGS)
def test_a_setting_for_it_is_refused_by_name(words: str) -> None:
    for arguments, name in SETTINGS[words]:
        with pytest.raises(SettingError, match=name):
            Settings.read(arguments, {})
