"""Requests of every route that asks for tokens, streamed and whole."""

from typing import Any

from tests.support.answers.openai_frames import CHAT

USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TENSOR = {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
STREAMED: list[tuple[str, dict[str, Any]]] = [
    ("/generate_stream", {"inputs": "Hi", "parameters": {"details": True, "top_n_tokens": 2}}),
    ("/", {"inputs": "Hi", "stream": True, "parameters": {"seed": 3, "do_sample": True}}),
    ("/v1/chat/completions", CHAT | {"stream": True, "n": 2, "logprobs": True, "top_logprobs": 2} | USAGE),
    ("/v1/chat/completions", CHAT | {"stream": True, "stop": ["zzz", " six"], "skip_special_tokens": False}),
    (
        "/v1/completions",
        {"prompt": ["a é", "b"], "stream": True, "n": 2, "echo": True, "logprobs": 1} | USAGE,
    ),
    ("/v2/models/tgi/generate_stream", {"text_input": "Hi", "parameters": {"details": True}}),
]
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "Hi", "parameters": {"details": True, "top_n_tokens": 2}}),
    ("/", {"inputs": "Hi"}),
    ("/v1/chat/completions", CHAT | {"n": 2}),
    ("/v1/completions", {"prompt": "a", "logprobs": 1, "prompt_logprobs": 2, "return_token_ids": True}),
    ("/v1/completions", {"prompt": ["a", "b c"], "return_generation_logits": True}),
    ("/v1/responses", {"input": "Hi"}),
    ("/vertex", {"instances": [{"inputs": "a"}, CHAT]}),
    ("/v2/models/tgi/infer", {"id": "5", "inputs": [TENSOR], "parameters": {"return_full_text": True}}),
]
