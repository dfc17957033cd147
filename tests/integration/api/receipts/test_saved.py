"""`tokenfleet replay FILE`: a file keeps an answer and its request, and any fleet computes it again."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.replay import main
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.receipts.test_receipts import SAMPLED, WHOLE
from tests.support.answers.openai_frames import CHAT
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids

ANSWER = Answer(ids(" one two three"))
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *WHOLE,
    ("/", {"inputs": "Hi", "parameters": SAMPLED, "stream": False}),
    ("/v1/chat/completions", CHAT | SAMPLED | {"n": 2}),
    ("/v1/completions", {"prompt": ["a", "b"], "receipt": True, "temperature": 0}),
]


def save(path: Path, request: Any, answer: Any) -> Path:
    path.write_text(json.dumps({"request": request, "answer": answer}))
    return path


async def test_the_same_request_is_sent_with_the_same_seed_and_compared(
    broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    async with answering(broker.url, ANSWER) as (worker, _, client):
        for route, body in REQUESTS:
            with subtests.test(route=route, body=body):
                worker.seen.clear()
                answer = (await client.post(route, json=body)).raise_for_status().json()
                first, worker.seen = worker.seen, []
                file = save(tmp_path / "saved.json", body, answer)
                assert await asyncio.to_thread(main, [str(file), "--url", str(client.base_url)]) == 0
                assert "equal, all 4 tokens" in capsys.readouterr().out
                asked, again = (
                    sorted((one.prompt_ids, str(one.sampling)) for one in seen)
                    for seen in (first, worker.seen)
                )
                assert asked == again


async def test_what_differs_is_named(
    broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with answering(broker.url, ANSWER) as (worker, _, client):
        route, body = WHOLE[1]
        answer = (await client.post(route, json=body)).raise_for_status().json()
        answer["receipt"]["builds"][0]["weights_sha256"] = "def"
        worker.answer = lambda _: Answer(ids(" one two"))
        file = save(tmp_path / "saved.json", body | {"prompt": "Ho"}, answer)
        assert await asyncio.to_thread(main, [str(file), "--url", str(client.base_url)]) == 1
        out = capsys.readouterr().out
    assert "weights_sha256: def then, abc now" in out and "its tokens may differ: prompts differs" in out
    assert "choice 0: differs: 4 tokens then, 3 now" in out


RECEIPT = {"choices": [{"seed": 1}, {"seed": 2}]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "must be an object with `request` and `answer`"),
        ({"answer": {}}, "`request` must be the body"),
        ({"request": {"prompt": "a"}, "answer": []}, "`answer` must be the whole answer"),
        ({"request": {"prompt": "a"}, "answer": {"object": "text_completion"}}, "`answer` has no receipt"),
        ({"request": {}, "answer": {"receipt": RECEIPT}}, "`request` must have `inputs`"),
        ({"request": {"prompt": "a"}, "answer": {"receipt": RECEIPT}}, "`answer` must have `generated_text`"),
        ({"request": {"inputs": "a"}, "answer": {"receipt": RECEIPT}}, "choices of 2 seeds"),
        ({"request": {"inputs": "a"}, "answer": {"receipt": {"a": 1}}}, "a receipt of an unknown shape"),
    ],
)
def test_a_fault_of_the_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, why: str
) -> None:
    file = tmp_path / "saved.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    assert main([str(file)]) == 1
    error = capsys.readouterr().err
    assert str(file) in error and why in error
