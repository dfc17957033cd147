"""Work that takes long is done in a thread, so that no stream waits for it."""

import importlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from api.event_loop import LONG_SIZE, offload
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import TOKENIZER


async def test_long_work_runs_in_a_thread_and_its_error_comes_back() -> None:
    here = threading.get_ident()
    assert await offload(LONG_SIZE - 1, threading.get_ident) == here
    assert await offload(LONG_SIZE, threading.get_ident) != here
    with pytest.raises(ZeroDivisionError):
        await offload(LONG_SIZE, lambda: 1 / 0)


CHAT = [{"role": "user", "content": "a"}] * 200
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("/tokenize", "api.http.body", "parse_body", {"inputs": "a " * LONG_SIZE}),
    ("/tokenize", "api.tgi.routes_tokenize", "simple_tokens", {"inputs": "a " * LONG_SIZE}),
    (
        "/generate",
        "api.http.body",
        "parse_body",
        {"inputs": "a", "parameters": {"stop_token_ids": [1] * LONG_SIZE}},
    ),
    (
        "/generate",
        "api.tgi.render",
        "render_response",
        {"inputs": "a", "parameters": {"details": True, "top_n_tokens": 20}},
    ),
    ("/v1/completions", "api.http.body", "parse_body", {"prompt": [1] * LONG_SIZE}),
    ("/v1/chat/completions", "api.openai.params", "render_prompt", {"messages": CHAT}),
    ("/chat_tokenize", "api.openai.params", "render_prompt", {"messages": CHAT}),
]


@pytest.mark.parametrize(
    ("path", "module", "name", "body"), CASES, ids=[f"{path} {name}" for path, _, name, _ in CASES]
)
async def test_large_requests_are_parsed_and_rendered_in_threads(
    broker: Broker, path: str, module: str, name: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, seen = threading.get_ident(), set[int]()
    place = importlib.import_module(module)
    work: Callable[..., Any] = getattr(place, name)

    def watched(*args: Any) -> Any:
        seen.add(threading.get_ident())
        return work(*args)

    monkeypatch.setattr(place, name, watched)
    answer = Answer([TOKENIZER.token_to_id("a")] * (LONG_SIZE // 20))  # type: ignore[list-item]
    async with answering(broker.url, answer) as (_, _, client):
        await client.post(path, json=body)
    assert seen and here not in seen
