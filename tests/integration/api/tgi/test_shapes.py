"""Shapes that text-generation-inference's own integration tests compare: paths of answers, with types.

Of its 203 snapshots those of text models have 30 shapes, many of which differ only in what its Python client
adds as null. Ours may have more paths. Five differ on purpose: an id of an answer is not empty, functions
that are called have no `description`, a delta has no null `tool_calls`, the first and the last chunk of a
stream with tools have neither text nor a call, and a streamed completion says its usage only where that is
wished.
"""

from collections.abc import Iterator
from typing import Any

from deploy.launcher.embedded_broker import Broker
from tests.support.answers.openai_frames import CHAT, CHAT_PATH, frames, streamed
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids

KNOWN = "id:str object:str created:int model:str system_fingerprint:str"
CHOICE = "choices[].index:int choices[].logprobs:null choices[].finish_reason:str"
USAGE = "usage.prompt_tokens:int usage.completion_tokens:int usage.total_tokens:int"
MESSAGE = "choices[].message.role:str choices[].message.content:str"
TOKEN = (
    "details.tokens[].id:int details.tokens[].text:str details.tokens[].special:bool "
    "details.tokens[].logprob:float"
)
DETAILS = "details.finish_reason:str details.generated_tokens:int details.seed:int details.prefill[]"
CALL = "choices[].message.tool_calls[]"
CALLED = f"{CALL}.id:str {CALL}.type:str {CALL}.function.name:str {CALL}.function.arguments:str"
DELTA = "choices[].delta.tool_calls[]"
DELTAS = f"{DELTA}.index:int {DELTA}.id:str {DELTA}.type:str {DELTA}.function.name:str"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ASKED = {"name": "f", "arguments": "{}"}
NO_CALL = {"tools": TOOLS, "tool_choice": "none"}
NAMED = {"tools": TOOLS, "tool_choice": "f"}
CONTINUED = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "Oh,"}]}
RESULT = {
    "messages": [
        *CHAT["messages"],
        {"role": "assistant", "tool_calls": [{"id": "0", "type": "function", "function": ASKED}]},
        {"role": "tool", "tool_call_id": "0", "content": "sunny"},
    ]
}
PARAMETERS = {
    "max_new_tokens": 10,
    "return_full_text": True,
    "stop": ["zzz"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 10,
    "truncate": 5,
    "typical_p": 0.9,
    "watermark": True,
    "details": True,
    "seed": 0,
}
SCORED = {"decoder_input_details": True, "max_new_tokens": 4, "top_n_tokens": 2}
BEST = {"best_of": 2, "do_sample": True, "details": True, "max_new_tokens": 4}
PREFILL = (
    "details.prefill[].id:int details.prefill[].text:str details.prefill[].logprob:float "
    "details.prefill[].logprob:null"
)
GREEDY = "details.finish_reason:str details.generated_tokens:int details.seed:null details.prefill[]"
TOPS = "details.top_tokens[][].id:int details.top_tokens[][].text:str details.top_tokens[][].logprob:float"
OTHER = "details.best_of_sequences[]"
OTHERS = f"{OTHER}.generated_text:str {OTHER}.finish_reason:str {OTHER}.seed:int {OTHER}.tokens[].id:int"
REGEX = {"grammar": {"type": "regex", "value": " one two"}, "max_new_tokens": 4, "details": True}
WEATHER = {"type": "object", "properties": {"unit": {"type": "string"}}, "required": ["unit"]}
SHAPED = {"response_format": {"type": "json_schema", "value": {"name": "w", "schema": WEATHER}}}
WHOLE: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"inputs": "Hi", "parameters": PARAMETERS}, f"generated_text:str {DETAILS} {TOKEN}"),
    ("/generate", {"inputs": "Hi", "parameters": {"details": True}}, f"generated_text:str {GREEDY} {TOKEN}"),
    ("/v1/completions", {"prompt": ["a", "b"]}, f"{KNOWN} {CHOICE} choices[].text:str {USAGE}"),
    ("/v1/completions", {"prompt": "Hi", "temperature": 0.0}, f"{KNOWN} {CHOICE} choices[].text:str {USAGE}"),
    (CHAT_PATH, CHAT | {"seed": 1337}, f"{KNOWN} {CHOICE} {MESSAGE} {USAGE}"),
    (CHAT_PATH, CONTINUED, f"{KNOWN} {CHOICE} {MESSAGE} {USAGE}"),
    (CHAT_PATH, RESULT, f"{KNOWN} {CHOICE} {MESSAGE} {USAGE}"),
    (CHAT_PATH, CHAT | NO_CALL, f"{KNOWN} {CHOICE} {MESSAGE} {USAGE}"),
    (CHAT_PATH, CHAT | NAMED, f"{KNOWN} {CHOICE} {CALLED} choices[].message.content:null {USAGE}"),
    (CHAT_PATH, CHAT | {"tools": TOOLS}, f"{KNOWN} {CHOICE} {CALLED} choices[].message.content:null {USAGE}"),
    ("/generate", {"inputs": "Hi there you", "parameters": SCORED}, f"generated_text:str {PREFILL} {TOPS}"),
    ("/generate", {"inputs": "Hi", "parameters": BEST}, f"generated_text:str {OTHERS} {TOKEN}"),
    ("/generate", {"inputs": "Hi", "parameters": REGEX}, f"generated_text:str {TOKEN}"),
    *(
        (CHAT_PATH, CHAT | {"response_format": {"type": kind, "value": value}}, f"{KNOWN} {CHOICE} {MESSAGE}")
        for kind, value in (
            ("json", WEATHER),
            ("json_object", WEATHER),
            ("json_schema", {"name": "weather", "strict": True, "schema": WEATHER}),
        )
    ),
]
CHUNK = f"{KNOWN} choices[].index:int choices[].logprobs:null choices[].finish_reason:null"
STREAMED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": ["a", "b"]}, f"{CHUNK} choices[].text:str choices[].finish_reason:str"),
    (CHAT_PATH, CHAT, f"{CHUNK} choices[].delta.role:str choices[].delta.content:str"),
    (CHAT_PATH, CHAT | {"stream_options": {"include_usage": True}}, f"{CHUNK} choices[] usage:null {USAGE}"),
    (CHAT_PATH, CHAT | NO_CALL, f"{CHUNK} choices[].delta.role:str choices[].delta.content:str"),
    (CHAT_PATH, CHAT | SHAPED, f"{CHUNK} choices[].delta.role:str choices[].delta.content:str"),
    (CHAT_PATH, CHAT | NAMED, f"{CHUNK} {DELTAS} {DELTA}.function.arguments:str"),
    (CHAT_PATH, CHAT | {"tools": TOOLS}, f"{CHUNK} {DELTAS} {DELTA}.function.arguments:str"),
]


def paths(value: Any, before: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from paths(inner, f"{before}.{name}" if before else name)
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, f"{before}[]")
        if not value:
            yield f"{before}[]"
    else:
        yield f"{before}:{'null' if value is None else type(value).__name__}"


def calls(body: dict[str, Any]) -> bool:
    return "tools" in body and body.get("tool_choice") != "none"


async def test_answers_have_the_shapes_of_tgi(broker: Broker) -> None:
    text, call = Answer(ids(" one two")), Answer(ids('{"name": "f", "parameters": {"a": "b c d"}}'))
    for answer, with_tools in ((text, False), (call, True)):
        async with answering(broker.url, answer) as (worker, _, client):
            for path, body, expected in WHOLE:
                if calls(body) is with_tools:
                    response = await client.post(path, json={"model": "tgi"} | body)
                    assert response.status_code == 200, response.text
                    assert set(expected.split()) - {*paths(response.json())} == set(), path
            for path, body, expected in STREAMED:
                if calls(body) is with_tools:
                    chunks = frames(await streamed(client, path, {"model": "tgi"} | body))
                    found = {place for chunk in chunks for place in paths(chunk)}
                    assert set(expected.split()) - found == set(), path
        if not with_tools:
            sampling = worker.seen[0].sampling
            assert sampling is not None and sampling.watermark_delta == 2.0


async def test_without_stream_options_each_chunk_has_one_choice_and_no_usage(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(" one two"))) as (_, _, client):
        plain = frames(await streamed(client, CHAT_PATH, CHAT))
        wished = frames(await streamed(client, CHAT_PATH, CHAT | {"stream_options": {"include_usage": True}}))
    assert all(len(chunk["choices"]) == 1 and chunk.get("usage") is None for chunk in plain)
    assert [bool(chunk["usage"]) for chunk in wished] == [False] * (len(wished) - 1) + [True]
    assert wished[-1]["choices"] == []
