"""What cannot be served is refused by the name of its field, before a worker gets anything. That each route
refuses what it cannot read shows test_routes.py.
"""

import json
from math import inf, nan
from typing import Any

import httpx
import pytest

from api.errors import anthropic, invalid, openai, tgi
from api.protocols.table import protocol_at
from deploy.launcher.embedded_broker import Broker
from tests.support.answers import CHAT as ONE_TURN
from tests.support.answers import post
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import IM_END, ids, model_tokenizer, tokenizer_with

Rows = list[tuple[dict[str, Any], str, str]]
"""Fields beside those that would be served; the field that the error names, and words of the error."""
SIZE = model_tokenizer().size


def user(content: object, **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": content} | fields]}


def allowed(**fields: object) -> dict[str, Any]:
    choice = {"type": "allowed_tools", "allowed_tools": fields}
    return {"tools": [FUNCTION], "tool_choice": choice}


FUNCTION = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}
PARTS = "Input should be a string, or a list of parts, each an object with a `type`"
EITHER = "Input should be a string or an object"
OBJECT = "must be the JSON schema of an object"
SECOND = "messages[1].content"
NAMED = {"name": "s", "schema": {"type": "array", "not": {"type": "null"}}}
SCHEMA_WITH_NOT = {"response_format": {"type": "json_schema", "json_schema": NAMED}}
TIERS: Rows = [({"priority": "urgent"}, "priority", ""), ({"service_tier": "gold"}, "service_tier", "")]
VARIABLES: Rows = [({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot have")]
CHAT: Rows = [
    *TIERS,
    *VARIABLES,
    ({"max_completion_tokens": 10_000}, "max_completion_tokens", "1024"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "at most 2"),
    ({"stop": list("abcde")}, "stop", "up to 4"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a.[key]", "integer"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "`stream`"),
    ({"max_new_tokens": 5}, "max_new_tokens", "not a field of this route"),
    ({"receipt": True}, "receipt", "is not served any more"),
    (SCHEMA_WITH_NOT, "response_format.json_schema.schema", "not"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tools": [FUNCTION | {"type": "custom"}]}, "tools[0].type", "be 'function'. Given: 'custom'"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools", "the name 'f' twice"),
    ({"tools": [FUNCTION] * 1025}, "tools", "at most 1024 items"),
    ({"tool_choice": "required"}, "tool_choice", "only allowed with `tools`"),
    ({"tools": [FUNCTION], "tool_choice": "g"}, "tool_choice", "names 'g', which is not among f"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "x"}}, "tool_choice", "one of none, auto, required"),
    ({"tool_choice": 3}, "tool_choice", f"`tool_choice`: {EITHER}"),
    (allowed(mode="some", tools=[FUNCTION]), "tool_choice.allowed_tools.mode", "must be"),
    (allowed(tools=[{"type": "function", "name": "z"}]), "tool_choice.allowed_tools.tools[0]", ""),
    (allowed(mode="auto", tools=[3]), "tool_choice.allowed_tools.tools[0]", ""),
    ({"tools": [FUNCTION], "functions": [{"name": "f"}]}, "functions", "exclude each other"),
    *(
        ({"functions": [{"name": "a", "parameters": {"type": one}}]}, "functions.a.parameters", OBJECT)
        for one in ("array", ["array", "null"], 3)
    ),
    ({"reasoning_effort": "vast"}, "reasoning_effort", "should be 'none', 'minimal'"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [3]}, "messages[0]", "`messages[0]`: Input should be an object"),
    ({"messages": [CALL]}, "messages[0].tool_calls[0].function.arguments", EITHER),
    (user(None), SECOND, "required"),
    (user(None, role="assistant"), SECOND, "required"),
    (user(None, refusal="x"), SECOND, "required"),
    (user(3), SECOND, f"`{SECOND}`: {PARTS}"),
    (user([3]), SECOND, f"`{SECOND}`: {PARTS}"),
    (user("a", role="wizard"), "messages[1].role", "'wizard'"),
    (user("a", tool_calls=[{"function": {"name": "f"}}]), "messages[1].tool_calls", "the role `assistant`"),
    (user([{"type": "text", "text": "What is this?"}, IMAGE]), SECOND, "this model takes text only"),
    (user([{"type": "text"}]), SECOND, "text` is required"),
    (user([{"type": "refusal", "refusal": "x"}]), SECOND, "is of type 'refusal'"),
    (user([{"type": "refusal"}], role="assistant"), SECOND, "content[0].refusal` is required"),
    *((user([{"type": kind}]), SECOND, kind) for kind in ("input_audio", "video_url", "file", "input_file")),
    ({"prompt_logprobs": 21}, "prompt_logprobs", ""),
    ({"stream": True, "return_generation_logits": True}, "return_generation_logits", "must be false when"),
    *(({"allowed_token_ids": one}, "allowed_token_ids", "") for one in ([], [10**6])),
    ({"allowed_token_ids": [7, 11]} | {"response_format": {"type": "json_object"}}, "allowed_token_ids", ""),
    ({"allowed_token_ids": [IM_END], "min_tokens": 2}, "allowed_token_ids", ""),
]
BEAMS_OF_BOTH: Rows = [
    ({"beam_width": 9}, "beam_width", "Input should be less than or equal to 8. Given: 9"),
    ({"beam_width": 2, "length_penalty": inf}, "length_penalty", "Input should be a finite number"),
    ({"beam_width": 2, "early_stopping": "often"}, "early_stopping", 'should be true, false, "never"'),
    ({"beam_width": 2, "temperature": 0.5}, "temperature", "and a beam search exclude each other: it draws"),
    ({"length_penalty": 2}, "length_penalty", "needs a beam search: set `beam_width`"),
]
COMPLETIONS: Rows = [
    *BEAMS_OF_BOTH,
    ({"beam_width": 2, "n": 3}, "n", "must be at least 1 and at most 2 (the beam width). Given: 3"),
    ({"beam_width": 2, "best_of": 3}, "best_of", "must be equal to `beam_width` in a beam search"),
    ({"beam_width": 2, "use_beam_search": False}, "use_beam_search", "false and `beam_width` exclude"),
    ({"use_beam_search": True, "n": 9}, "n", "must be at least 1 and at most 8"),
    ({"beam_width": 2, "logprobs": 1}, "logprobs", "and a beam search exclude each other"),
    (
        {"prompt": [[28] * 1000], "max_tokens": 1, "use_beam_search": True, "n": 4},
        "n",
        "must be at most 2 with this prompt: a worker's KV cache",
    ),
    ({"prompt": []}, "prompt", "must have 1 to"),
    ({"prompt": [10**6]}, "prompt", "1000000"),
    ({"prompt": ["a", 1]}, "prompt", "a list of token ids"),
    ({"max_completion_tokens": 6}, "max_completion_tokens", "not a field of this route"),
    ({"receipt": True}, "receipt", "is not served any more"),
    ({"suffix": "a"}, "suffix", "not supported yet"),
    ({"resume_s": -1, "stream": True}, "resume_s", ""),
    ({"resume_s": 5, "detached": True, "stream": True}, "resume_s", "`detached`"),
    ({"resume_s": 5, "stream": False}, "resume_s", ""),
    ({"detached": True, "stream": False}, "detached", ""),
    *TIERS,
    ({"best_of": 2}, "best_of", "1 or equal to `n`"),
    ({"stream": True, "prompt_logprobs": 2}, "prompt_logprobs", ""),
    ({"prompt_logprobs": -1}, "prompt_logprobs", ""),
    ({"stream": True, "return_context_logits": True}, "return_context_logits", "must be false when tokens"),
    ({"logits_dtype": "model"}, "logits_dtype", "needs `return_context_logits` or"),
    ({"logits_dtype": "int8", "return_context_logits": True}, "logits_dtype", "be 'float32' or 'model'"),
    ({"logprobs_mode": "raw"}, "logprobs_mode", "Input should be 'raw_logprobs'"),
]


def said(role: str, *parts: object) -> dict[str, Any]:
    return {"input": [{"role": role, "content": [*parts]}]}


CALLED = {"type": "function_call", "name": "f", "arguments": "{}"}
ANSWERED = {"type": "function_call_output", "call_id": "c", "output": 5}
RESPONSES_TOOL = {"type": "function", "name": "get_time"}


def in_namespace(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "namespace", "name": "n", **fields}]}


SEARCH = {"type": "web_search", "external_web_access": False}
RESPONSES: Rows = [
    *TIERS,
    *VARIABLES,
    ({"background": True, "store": False}, "background", ""),
    ({"conversation": "conv_1"}, "conversation", ""),
    ({"prompt": {"id": "p"}}, "prompt", ""),
    ({"context_management": [{"type": "compaction"}]}, "context_management", ""),
    ({"receipt": True}, "receipt", ""),
    ({"beam_width": 2}, "beam_width", "is not supported yet"),
    *(
        ({name: 5}, name, "is not a field of this route")
        for name in ("return_generation_logits", "max_tokens", "stop", "max_new_tokens")
    ),
    ({"include": ["message.input_audio.data"]}, "include[0]", ""),
    ({"previous_input_messages": []}, "previous_input_messages", "is not supported yet"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", ""),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", ""),
    ({"input": [CALLED]}, "input[0].call_id", ""),
    ({"input": [ANSWERED]}, "input[0].output", ""),
    (said("critic"), "input[0].role", ""),
    (said("user", {"type": "input_image", "image_url": "x"}), "input[0].content[0]", "text only"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", ""),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", ""),
    ({"metadata": {"k": "v" * 513}}, "metadata.k", ""),
    ({"truncation": "auto"}, "truncation", ""),
    (
        {"stream_options": {"include_obfuscation": True}, "stream": True},
        "stream_options.include_obfuscation",
        "",
    ),
    ({"tools": [{"type": "functoin"}]}, "tools[0].type", ""),
    ({"tools": [RESPONSES_TOOL, SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice", ""),
    ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice", ""),
    ({"tools": [{"type": "function"}]}, "tools[0].name", ""),
    (in_namespace(name=3, tools=[]), "tools[0].name", "must be a string"),
    (in_namespace(tools={}), "tools[0].tools", "must be a list of tools"),
    (in_namespace(tools=[{"type": "functoin"}]), "tools[0].tools[0].type", "must be function"),
    (in_namespace(tools=[{"type": "function"}]), "tools[0].tools[0].name", ""),
    (in_namespace(tools=[{"type": "function", "name": 5}]), "tools[0].tools[0].name", ""),
    (in_namespace(tools=[RESPONSES_TOOL] * 1025), "tools", "at most 1024 tools"),
    ({"tools": [RESPONSES_TOOL], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice", ""),
    ({"tool_choice": "required"}, "tool_choice", ""),
    ({"reasoning": {"effort": "vast"}}, "reasoning.effort", ""),
    ({"reasoning": {"summary": "vast"}}, "reasoning.summary", ""),
]
TOOL = {"name": "a", "input_schema": {"type": "object", "properties": {}}}
FILE = {"type": "image", "source": {"type": "file"}}
NEVER = {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}
MESSAGES: Rows = [
    *VARIABLES,
    (user([{"type": "text"}]), "messages[1].content[0].text", "is required"),
    (user([{"type": "tool_reference"}]), "messages[1].content[0].tool_name", "is required"),
    (user([{"type": "video"}]), "messages[1].content[0].type", "must be one"),
    (user([FILE]), "source.type", ""),
    ({"system": [{"type": "image"}]}, "system[0].type", "must be one of text"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "is required"),
    ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "tools.a.input_schema", "must be"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice", "names 'b'"),
    ({"mcp_servers": [{}]}, "mcp_servers", "is not supported yet"),
    ({"stop": "a"}, "stop", "is not a field of this route"),
    ({"receipt": True}, "receipt", "is not served any more"),
    ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type", "one of json_schema"),
    ({"output_format": {"type": "regex"}}, "output_format.type", "one of json_schema"),
    ({"output_format": NEVER}, "output_format.schema", "uniqueItems"),
    ({"output_format": NEVER, "output_config": {"format": NEVER}}, "output_format", "means the same as"),
    ({"service_tier": "gold"}, "service_tier", ""),
]
DRAWN = {"best_of": 2, "do_sample": True}
GENERATE: Rows = [
    *BEAMS_OF_BOTH,
    ({"beam_width": 2, "best_of": 2}, "best_of", ""),
    ({"beam_width": 2, "top_n_tokens": 1}, "top_n_tokens", "and a beam search exclude each other"),
    ({"beam_width": 2, "decoder_input_details": True}, "decoder_input_details", "and a beam search"),
    (
        {"beam_width": 8, "max_new_tokens": 1000},
        "max_new_tokens",
        "must be at most 128 with this prompt and `beam_width`: a worker's KV cache holds the prompt once, "
        "and the new tokens of each sequence. Given: 1000",
    ),
    ({"max_new_tokens": 0}, "parameters.max_new_tokens", "be greater than or equal to 1. Given: 0"),
    *(
        ({"max_new_tokens": wrong}, "parameters.max_new_tokens", "Input should be a valid integer")
        for wrong in (1.5, "2", True, [2])
    ),
    ({"stop_token_ids": [1, 2.5]}, "parameters.stop_token_ids[1]", "Input should be a valid integer"),
    (
        {"max_new_tokens": 1024},
        "max_new_tokens",
        "must be at most 1024. Given: 1 `inputs` tokens and 1024 `max_new_tokens`",
    ),
    ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens", "must be at most 4. Given: 5"),
    ({"stop": ["a"] * 5}, "stop", "supports up to 4 stop sequences. Given: 5"),
    ({"stop": [""]}, "parameters.stop[0]", "String should have at least 1 character"),
    ({"stop_token_ids": [1, SIZE]}, "stop_token_ids", f"of at least 0 and below {SIZE}. Given: {SIZE}"),
    ({"logit_bias": {str(SIZE): 1}}, "logit_bias", f"of at least 0 and below {SIZE}. Given: {SIZE}"),
    ({"top_p_reset_ids": [-1]}, "top_p_reset_ids", "must have token ids of at least 0"),
    ({"truncate": 1024}, "truncate", "must be at most 1023. Given: 1024"),
    ({"seed": 2**64}, "parameters.seed", "Input should be less than"),
    ({"logit_bias": {"5": 101}}, "parameters.logit_bias.5", "less than or equal to 100. Given: 101"),
    ({"logit_bias": {"five": 1}}, "parameters.logit_bias.five", ""),
    ({"logit_bias": {"1": nan}}, "parameters.logit_bias.1", "Input should be a finite number"),
    ({"temperature": inf}, "parameters.temperature", "Input should be a finite number"),
    ({"bad_words": [" "]}, "parameters.bad_words[0]", "String should match"),
    ({"bad_words": ["a" * 201]}, "parameters.bad_words[0]", "String should have at most 200 characters"),
    ({"best_of": 3, "do_sample": True}, "best_of", "must be at most 2. Given: 3"),
    ({"best_of": 2}, "best_of", "above 1 needs sampling"),
    (DRAWN | {"temperature": 0}, "best_of", "above 1 needs sampling"),
    (DRAWN | {"seed": 1}, "seed", "must not be set when `best_of` is above 1"),
    (DRAWN | {"return_context_logits": True}, "best_of", "must be 1"),
    (DRAWN | {"logprobs_mode": "raw_logits"}, "logprobs_mode", "must not be logits"),
    ({"top_n_tokens": 21}, "top_n_tokens", "must be at most 20. Given: 21"),
    ({"adapter_id": "a"}, "adapter_id", "there is no adapter 'a'"),
    ({"grammar": {"type": "json_object"}}, "grammar.value", "is required"),
    ({"grammar": {"type": "regex", "value": "("}}, "grammar.value", "cannot be compiled: "),
    ({"stream": True}, "stream", "must be false on this path: see …/generate_stream"),
    ({"max_tokens": 5}, "max_tokens", "is not a field of this route"),
    ({"receipt": True}, "receipt", "is not served any more"),
    ({"response_format": {"type": "json_object"}}, "response_format", "is not a field of this route"),
]
STREAM: Rows = [
    (DRAWN, "best_of", "must be 1 when tokens are streamed. Given: 2"),
    ({"stream": False}, "stream", "must be true on this path: see …/generate"),
    ({"return_generation_logits": True}, "return_generation_logits", "must be false when tokens are"),
    ({"decoder_input_details": True}, "decoder_input_details", "must be false when tokens are streamed"),
]
GOOD = {"inputs": "a"}
HOOK = {"url": "https://example.org/", "secret": "whsec_" + "A" * 32}


def of(*instances: dict[str, Any]) -> dict[str, Any]:
    return {"instances": [*instances]}


VERTEX: Rows = [
    (of(), "instances", "1 to 2 items. Given: 0"),
    (of(GOOD, GOOD, GOOD), "instances", "Given: 3"),
    (of(GOOD, {"inputs": ""}), "", "`inputs` cannot be empty"),
    (of(GOOD, {"parameters": {}}), "instances[1]", "`inputs`: Field required"),
    (of(GOOD, GOOD | {"parameters": {"best_of": 2}}), "instances[1]", "`best_of` must be 1"),
    (of(GOOD | {"parameters": {"return_context_logits": True}}), "", "is not a field of this route"),
    (of(GOOD | {"resume_s": 5}), "instances[0]", "`resume_s` needs a stream"),
    (of(GOOD | {"webhook": HOOK}), "webhook", "stands beside `instances`"),
    (of(ONE_TURN | {"stream": True}), "instances[0]", "`stream` must be false"),
    (of(ONE_TURN | {"beam_width": 2, "n": 2}), "instances[0]", "`n` must be 1"),
]


def tensor(*data: Any, **fields: Any) -> dict[str, Any]:
    own = {"name": "a", "shape": [len(data)], "datatype": "BYTES", "data": [*data]}
    return {"inputs": [own | fields]}


BINARY = [{"name": "x", "parameters": {"binary_data": True}}]
KSERVE: Rows = [
    ({"text_input": ""}, "text_input", "cannot be empty"),
    ({"max_tokens": 0}, "max_tokens", "Input should be"),
    ({"stream": True}, "stream", "see …/generate_stream"),
    ({"max_tokens": 3, "max_new_tokens": 4}, "max_tokens", "means the same as `max_new_tokens`"),
    ({"parameters": {"adapter_id": "x"}}, "adapter_id", ""),
]
INFER: Rows = [
    ({"inputs": []}, "", "Inputs and outputs length mismatch"),
    ({"inputs": [], "outputs": []}, "inputs", "must have 1 to 2 items. Given: 0"),
    (tensor(*"abc"), "inputs", "Given: 3"),
    ({"inputs": 2 * tensor("one")["inputs"], "outputs": [{"name": "x"}]}, "", "length mismatch"),
    (tensor("one", shape=[2]), "inputs[0].shape", "means 2 texts"),
    (tensor("one", datatype="INT32"), "inputs[0].datatype", ""),
    *((tensor(one, shape=[1]), "inputs[0].data", "must be texts") for one in (300, 255, {"a": 1})),
    (tensor(""), "inputs[0].data", "cannot be empty"),
    (tensor("one") | {"parameters": {"details": True}}, "details", "has no place"),
    (tensor("one") | {"outputs": BINARY}, "outputs[0].parameters.binary_data", "must be false"),
]
REFUSED: dict[str, tuple[dict[str, Any], Rows]] = {
    "/v1/chat/completions": (ONE_TURN, CHAT),
    "/v1/completions": ({"prompt": "Hi"}, COMPLETIONS),
    "/v1/responses": ({"input": "Hi"}, RESPONSES),
    "/v1/messages": (ONE_TURN | {"max_tokens": 9}, MESSAGES),
    "/generate": (GOOD, GENERATE),
    "/generate_stream": (GOOD, STREAM),
    "/": (GOOD | {"stream": True}, STREAM),
    "/vertex": ({}, VERTEX),
    "/v2/models/tgi/generate": ({"text_input": "a"}, KSERVE),
    "/v2/models/tgi/generate_stream": ({"text_input": "a"}, [({"stream": False}, "stream", "…/generate")]),
    "/v2/models/tgi/infer": ({}, INFER),
}


async def refused(client: httpx.AsyncClient, path: str, body: dict[str, Any], name: str, words: str) -> None:
    content = json.dumps(body).replace("Infinity", "1e999")
    answer = await client.post(path, content=content, headers={"content-type": "application/json"})
    row, error = protocol_at(path), answer.json()
    assert row is not None and answer.status_code == row.error(invalid("x"))[0], answer.text
    text = error["error"]["message"] if row.error in (openai, anthropic) else error["error"]
    assert words in text and name in text, error
    assert text.count("Input should") <= 1, "it is named once"
    if row.error is tgi:
        assert error["error_type"] == "validation" and text.startswith("Input validation error: ")
    if row.error is openai:
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["param"] == name and f"`{name}" in text


@pytest.mark.parametrize("path", REFUSED)
async def test_what_cannot_be_served_is_refused_by_name(
    broker: Broker, subtests: pytest.Subtests, path: str
) -> None:
    """Whole and streamed."""
    base, rows = REFUSED[path]
    row = protocol_at(path)
    assert row is not None
    async with answering(broker.url, Answer(ids("x")), max_client_batch_size=2) as (worker, _, client):
        for fields, name, words in rows:
            with subtests.test(fields=fields):
                in_parameters = path in ("/generate", "/generate_stream", "/")
                body = base | ({"parameters": fields} if in_parameters else fields)
                await refused(client, path, body, name, words)
                if row.error in (openai, anthropic) and not {"stream", "stream_options"} & {*fields}:
                    await refused(client, path, body | {"stream": True}, name, words)
        assert not worker.seen


async def test_where_tokens_are_not_bytes_no_grammar_is_served(broker: Broker) -> None:
    """Tools that a model may call are, unforced."""
    async with answering(broker.url, Answer(ids("x")), tool_call_parser="hermes") as (
        worker,
        gateway,
        client,
    ):
        gateway.pool.tokenizer = tokenizer_with(takes_grammars=False)
        with_tools, path = ONE_TURN | {"tools": [FUNCTION]}, "/v1/chat/completions"
        await post(client, path, with_tools)
        [seen] = worker.seen
        assert seen.sampling is None or not seen.sampling.grammar
        words = "is not served with this model"
        json_object = {"response_format": {"type": "json_object"}}
        await refused(client, path, ONE_TURN | json_object, "response_format", words)
        await refused(client, path, with_tools | {"tool_choice": "required"}, "tools", words)
        assert len(worker.seen) == 1


async def test_tokens_without_an_embedding_are_refused_where_a_tokenizer_has_more_than_the_model(
    broker: Broker,
) -> None:
    """As ids and in a text."""
    [common], [without] = ids("a"), ids("Hi")
    assert common < without
    async with answering(broker.url, Answer(ids("x"))) as (worker, gateway, client):
        gateway.pool.tokenizer = tokenizer_with(num_embedded=without)
        words = f"must have token ids of at least 0 and below {without}. Given: {without}"
        await refused(client, "/v1/completions", {"prompt": [common, without]}, "prompt", words)
        await refused(client, "/v1/completions", {"prompt": "Hi"}, "prompt", words)
        await refused(client, "/generate", {"inputs": "Hi"}, "inputs", words)
        await post(client, "/v1/completions", {"prompt": "a", "logit_bias": {str(without): 1}})
        assert len(worker.seen) == 1
