"""Pictures in prompts: the model gets the ids of transformers' processor and the bytes beside them, which the
broker keeps while a request that has them lives.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api.app import Gateway
from api.errors import ApiError
from api.prompts.pictures import hold_pictures, keep_picture, let_go_pictures
from api.prompts.tokenizer import ModelTokenizer
from api.streams.stream import new_stream
from common.broker.lua import run_script
from common.messages.records import unpack_ids
from common.messages.request import Generate
from common.pictures import Size
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from tests.support.answers import post
from tests.support.broker_state import KEYS
from tests.support.fleet.gateways import serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker
from tests.support.jobs import Service
from tests.support.pictures import (
    CHAT_TEMPLATES,
    data_url,
    image_part,
    make_processor,
    png,
    processed_ids,
    showing,
    user,
)
from tests.support.waiting import wait_for, wait_until

Shown = tuple[Any, FakeWorker, httpx.AsyncClient]
ANSWER = Answer([40, 41])
CHAT = "/v1/chat/completions"
RED, BLUE = png((60, 90)), png((60, 90), "blue")
SIZE = (60, 90)


@pytest.fixture(params=CHAT_TEMPLATES)
async def shown(request: pytest.FixtureRequest, broker: Broker, tmp_path: Path) -> AsyncIterator[Shown]:
    processor = make_processor(request.param, tmp_path)
    async with showing(broker.url, tmp_path, ANSWER) as (worker, _, client):
        yield processor, worker, client


async def last_request(worker: FakeWorker, answered: httpx.Response) -> Generate:
    assert answered.status_code == 200, answered.text
    return worker.seen[-1]


def expected_ids(processor: Any, messages: list[dict[str, Any]], sizes: list[Size]) -> list[int]:
    """The ids of a chat in transformers."""
    chat = [
        {
            "role": one["role"],
            "content": [{**part, "type": part["type"].removesuffix("_url")} for part in one["content"]],
        }
        for one in messages
    ]
    template = CHAT_TEMPLATES["qwen2_vl" if "Qwen" in type(processor).__name__ else "idefics3"]
    text = processor.tokenizer.apply_chat_template(
        chat, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return processed_ids(processor, text, sizes)


def spans(request: Generate, placeholder_id: int) -> list[tuple[int, int]]:
    """First and last place of each picture, which are placeholders; all placeholders are in one of them."""
    ids = unpack_ids(request.prompt_ids)
    found = [(one.start, one.start + one.num_tokens - 1) for one in request.pictures]
    places = [i for i, token_id in enumerate(ids) if token_id == placeholder_id]
    assert {end for span in found for end in span} <= {*places}
    assert all(any(first <= place <= last for first, last in found) for place in places)
    return found


async def test_a_chat_with_pictures(shown: Shown) -> None:
    """Each picture is in its place, and each one's bytes are at the broker, once."""
    processor, worker, client = shown
    messages = user(
        "What is", image_part(data_url(RED)), "and\n", image_part(data_url(BLUE), detail="low"), "?"
    )
    messages += [{"role": "assistant", "content": [{"type": "text", "text": "Red."}]}]
    messages += user(image_part(data_url(RED)), "And this?")
    answered = await client.post(CHAT, json={"messages": messages})
    request = await last_request(worker, answered)
    assert unpack_ids(request.prompt_ids) == expected_ids(processor, messages, [SIZE] * 3)
    assert len(spans(request, processor.tokenizer.convert_tokens_to_ids(processor.image_token))) == 3
    red, blue, again = request.pictures
    assert red.digest == again.digest != blue.digest
    contents = [await worker.redis.get(worker.keys.picture(one.digest)) for one in (red, blue)]
    assert contents == [RED, BLUE]
    assert answered.json()["usage"]["prompt_tokens"] == len(unpack_ids(request.prompt_ids))


async def test_a_control_text_in_a_message_stays_text_beside_a_picture(shown: Shown) -> None:
    processor, worker, client = shown
    messages = user(f"Say {processor.image_token}", image_part(data_url(RED)))
    request = await last_request(worker, await client.post(CHAT, json={"messages": messages}))
    ids = unpack_ids(request.prompt_ids)
    plain = expected_ids(processor, user("Say ", image_part("")), [SIZE])
    assert len(ids) > len(plain)
    placeholder = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    assert ids.count(placeholder) == plain.count(placeholder)


async def test_a_text_with_pictures_as_tgi_has_them(shown: Shown) -> None:
    processor, worker, client = shown
    inputs = f"![]({data_url(RED)})What is this?![a text](x)"
    answered = await client.post("/generate", json={"inputs": inputs})
    request = await last_request(worker, answered)
    marker = (
        "<|vision_start|><|image_pad|><|vision_end|>" if "Qwen" in type(processor).__name__ else "<image>"
    )
    text = f"{marker}What is this?![a text](x)"
    assert unpack_ids(request.prompt_ids) == processed_ids(processor, text, [SIZE])
    assert [one.digest for one in request.pictures] != []


async def test_tokenize_counts_placeholders(shown: Shown) -> None:
    processor, _, client = shown
    messages = user("What?", image_part(data_url(RED)))
    answered = await client.post("/tokenize", json={"messages": messages})
    assert answered.json()["tokens"] == expected_ids(processor, messages, [SIZE])


async def test_what_cannot_be_shown_is_refused_by_its_field(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.prompts.pictures.MAX_PIXELS", 10_000)
    make_processor("qwen2_vl", tmp_path)
    limits: dict[str, Any] = {"max_pictures": 2, "max_picture_bytes": 3000}
    bomb = png((200, 400))
    part = "messages[0].content[0].image_url.url"
    cases: list[tuple[dict[str, Any], str, str]] = [
        (image_part("data:image/png;base64,A*AA"), part, "is no base64"),
        (image_part("data:text/html;base64,AAAA"), part, "has the media type 'text/html'"),
        (image_part("data:image/png,x"), part, "must be a data: URL with base64"),
        (image_part("https://x.org/y.png"), part, "nothing is fetched here (ALLOWED_MEDIA_DOMAINS is empty)"),
        (image_part(data_url(bytes(4000))), part, "has more than 3000 bytes (MAX_PICTURE_BYTES)"),
        (
            image_part(data_url(bomb)),
            part,
            "has 400 x 200 pixels: at most 10000 are allowed",
        ),
        (
            image_part(data_url(RED), detail="hd"),
            "messages[0].content[0].detail",
            "must be one of auto, low, high",
        ),
        ({"type": "image_url"}, "messages[0].content[0].image_url", "must be a string"),
        (
            {"type": "image_url", "file_id": "x"},
            "messages[0].content[0].file_id",
            "there is no store of files",
        ),
        (
            {"type": "input_audio", "input_audio": {}},
            "messages[0].content",
            "this model takes text and pictures only",
        ),
        ({"type": "video_url", "video_url": {}}, "messages[0].content", "'video_url'"),
    ]
    async with showing(broker.url, tmp_path, ANSWER, **limits) as (worker, _, client):
        for one, param, words in cases:
            answered = await client.post(CHAT, json={"messages": user(one, "?")})
            error = answered.json()["error"]
            assert (answered.status_code, error["param"]) == (400, param), error
            assert words in error["message"]
        three = user(*[image_part(data_url(png()))] * 3)
        answered = await client.post(CHAT, json={"messages": three})
        assert "a request may have 2 pictures (MAX_PICTURES). Given: 3" in answered.text
        cut = await client.post("/generate", json={"inputs": f"![]({data_url(RED[:90])})"})
        assert (cut.status_code, cut.json()["error_type"]) == (422, "validation")
        assert "`inputs` is damaged" in cut.json()["error"]
        assert worker.seen == []
        assert await worker.redis.exists(worker.keys.pictures) == 0


async def test_bodies_are_as_large_as_pictures_need_where_the_model_sees(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.requests.pool.PICTURE_PAYLOAD_LIMIT", 5000)
    make_processor("qwen2_vl", tmp_path)
    limits: dict[str, Any] = {"payload_limit": 1000}
    tokenizer = ModelTokenizer(Settings(model_id=str(tmp_path)))
    async with serving(broker.url, tokenizer=tokenizer, **limits) as (_, client):
        early = await client.post("/generate", json={"inputs": "a", "pad": "a" * 4000})
        assert early.status_code == 503, "no worker is ready"
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    async with serving(broker.url, models=(f"b={tmp_path}",), **limits) as (_, client):
        for model, num_bytes, status in (("b", 4000, 400), ("b", 6000, 413), ("tgi", 4000, 413)):
            body = {"model": model, "prompt": "a", "max_tokens": 101, "pad": "a" * num_bytes}
            assert (await client.post("/v1/completions", json=body)).status_code == status
        counted = {"model": "b", "messages": user("a"), "max_tokens": 1, "metadata": {"user_id": "a" * 4000}}
        assert (await client.post("/v1/messages/count_tokens", json=counted)).status_code != 413
    async with showing(broker.url, tmp_path, ANSWER, **limits) as (_, _, client):
        assert (await client.get("/info")).json()["model_pipeline_tag"] == "image-text-to-text"
        assert (await client.post("/generate", json={"inputs": "a", "pad": "a" * 4000})).status_code == 200
        assert (await client.post("/generate", json={"inputs": "a", "pad": "a" * 6000})).status_code == 413


async def test_a_text_about_pictures_begins_with_its_prompt_only_if_asked(
    broker: Broker, tmp_path: Path
) -> None:
    """Those of other models begin with it on these routes, as in TGI."""
    make_processor("qwen2_vl", tmp_path)
    async with showing(broker.url, tmp_path, ANSWER) as (_, _, client):
        for path in ("/", "/invocations"):
            for asked in (None, True):
                body = {"inputs": "Hi", "parameters": {"return_full_text": asked}}
                [found] = await post(client, path, body)
                assert found["generated_text"].startswith("Hi") == bool(asked)


@pytest.mark.parametrize("sees", (True, False))
async def test_models_that_see_none_refuse_pictures(broker: Broker, tmp_path: Path, sees: bool) -> None:
    """So does a model that sees where its workers do not: those of an earlier version say nothing of it."""
    make_processor("qwen2_vl", tmp_path)
    if sees:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    async with showing(broker.url, tmp_path, ANSWER, sees=sees) as (_, _, client):
        answered = await client.post(CHAT, json={"messages": user(image_part(data_url(RED)))})
        assert answered.status_code == 400
        assert "this model takes text only" in answered.json()["error"]["message"]
        assert (await client.post(CHAT, json={"messages": user("Hi")})).status_code == 200
        as_text = await client.post("/generate", json={"inputs": f"![]({data_url(png((2, 2)))})"})
        assert as_text.status_code == (200 if sees else 422)


async def test_the_same_prompt_with_another_picture_has_other_blocks(broker: Broker, tmp_path: Path) -> None:
    make_processor("qwen2_vl", tmp_path)
    async with showing(broker.url, tmp_path, ANSWER) as (worker, _, client):
        for content in (RED, BLUE, RED):
            await client.post(
                CHAT, json={"messages": user("x" * 40, image_part(data_url(content)), "y" * 40)}
            )
        red, blue, again = (request.block_hashes for request in worker.seen)
        assert red == again
        assert red[:32] == blue[:32]  # the text before it
        assert red[-16:] != blue[-16:]


async def test_a_response_to_pictures(broker: Broker, tmp_path: Path) -> None:
    """The same prompt as in a chat. Its pictures are not stored, so neither is the response."""
    processor = make_processor("qwen2_vl", tmp_path)
    part = {"type": "input_image", "image_url": data_url(RED), "detail": "auto"}
    text = {"type": "input_text", "text": "What is this?"}
    body: dict[str, Any] = {"input": [{"role": "user", "content": [text, part]}]}
    async with showing(broker.url, tmp_path, ANSWER) as (worker, _, client):
        answered = await client.post("/v1/responses", json=body)
        request = await last_request(worker, answered)
        messages = user("What is this?", image_part(data_url(RED)))
        assert unpack_ids(request.prompt_ids) == expected_ids(processor, messages, [SIZE])
        assert answered.json()["store"] is False
        assert (await client.get(f"/v1/responses/{answered.json()['id']}")).status_code == 404
        for more, param in (
            ({"store": True}, "store"),
            ({"background": True}, "background"),
            (
                {"input": [{"role": "user", "content": [{**part, "file_id": "f"}]}]},
                "input[0].content[0].file_id",
            ),
            ({"input": [{"role": "user", "content": [{**part, "image_url": "data:,"}]}]}, "input"),
            ({"input": [{"role": "assistant", "content": [part]}]}, "input[0].content[0]"),
        ):
            refused = await client.post("/v1/responses", json=body | more)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"].startswith(param), refused.text


async def test_a_message_with_pictures(broker: Broker, tmp_path: Path) -> None:
    """The same prompt as in a chat; its tokens are counted with those of the picture."""
    processor = make_processor("qwen2_vl", tmp_path)
    kind, data = data_url(RED).removeprefix("data:").split(";base64,")
    source = {"type": "base64", "media_type": kind, "data": data}
    content = [{"type": "text", "text": "What is this?"}, {"type": "image", "source": source}]
    body: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    async with showing(broker.url, tmp_path, ANSWER) as (worker, _, client):
        request = await last_request(worker, await client.post("/v1/messages", json=body))
        messages = user("What is this?", image_part(data_url(RED)))
        expected = expected_ids(processor, messages, [SIZE])
        assert unpack_ids(request.prompt_ids) == expected
        counted = await client.post("/v1/messages/count_tokens", json=body)
        assert counted.json() == {"input_tokens": len(expected)}
        source["data"] = ""
        refused = await client.post("/v1/messages", json=body)
        assert refused.status_code == 400 and "`messages`" in refused.json()["error"]["message"]


async def test_a_job_with_a_picture(broker: Broker, tmp_path: Path) -> None:
    make_processor("qwen2_vl", tmp_path)
    async with showing(broker.url, tmp_path, ANSWER) as (worker, _, _):
        messages = user("What?", image_part(data_url(RED)))
        job = {"id": "j1", "messages": messages, "parameters": {"max_tokens": 2}}
        service = Service(worker.redis)
        await service.submit(**job)
        assert (await service.result("j1"))["choices"][0]["finish_reason"]
        assert len(worker.seen[-1].pictures) == 1


LINGER_MS = 30_000
ENDLESS = Answer([40], ends=False)
MAX = 1000


def body(content: bytes, **more: Any) -> dict[str, Any]:
    return {"messages": user("What?", image_part(data_url(content))), "max_tokens": 9, **more}


async def keep(redis: Redis, digest: str, content: bytes, max_bytes: int = MAX) -> str:
    return await run_script(redis, keep_picture(KEYS, digest, content=content, max_bytes=max_bytes))


async def left_ms(redis: Redis, digest: str) -> int:
    return int(await redis.pttl(KEYS.picture(digest)))


async def test_a_picture_is_kept_as_long_as_the_last_request_that_holds_it(redis: Redis) -> None:
    assert await keep(redis, "a", b"") == "missing"
    assert await keep(redis, "a", b"red") == "kept"
    assert 0 < await left_ms(redis, "a") <= LINGER_MS
    for name, life_ms in (("r1", 100_000), ("r2", 200_000), ("r3", 50_000)):
        assert await run_script(redis, hold_pictures(KEYS, name, ["a", "a"], life_ms=life_ms))
    assert 190_000 < await left_ms(redis, "a") <= 200_000
    assert await keep(redis, "a", b"") == "kept"  # another request has it, and shortens nothing
    assert await left_ms(redis, "a") > 190_000
    await run_script(redis, let_go_pictures(KEYS, "r2", ["a"]))
    assert 90_000 < await left_ms(redis, "a") <= 100_000
    for name in ("r1", "r3"):
        await run_script(redis, let_go_pictures(KEYS, name, ["a"]))
    assert 0 < await left_ms(redis, "a") <= LINGER_MS
    assert await redis.exists(KEYS.picture_holders("a")) == 0
    assert 0 < await redis.pttl(KEYS.pictures) <= LINGER_MS


async def test_pictures_that_have_expired_or_were_lost_take_no_room(redis: Redis) -> None:
    assert [await keep(redis, name, b"red", 6) for name in "abc"] == ["kept", "kept", "full"]
    await redis.zadd(KEYS.pictures, {"a 3": 1})
    await redis.delete(KEYS.picture("a"))
    assert [await keep(redis, name, b"red", 6) for name in "cd"] == ["kept", "full"]
    assert int(await redis.get(KEYS.picture_bytes)) == 6
    await redis.delete(KEYS.picture("b"))
    assert await keep(redis, "b", b"red", 9) == "kept"
    assert await keep(redis, "d", b"red", 9) == "kept"  # b, once lost, counts once


async def test_a_request_holds_all_of_its_pictures_or_none(redis: Redis) -> None:
    await keep(redis, "a", b"red")
    assert not await run_script(redis, hold_pictures(KEYS, "r1", ["a", "lost"], life_ms=99_000))
    assert await left_ms(redis, "a") <= LINGER_MS
    await run_script(redis, let_go_pictures(KEYS, "r1", ["a", "lost"]))
    assert await redis.exists(KEYS.picture("lost")) == 0


async def test_pictures_live_with_their_requests(broker: Broker, tmp_path: Path) -> None:
    """Two requests with one picture: the bytes are there until both have ended."""
    make_processor("qwen2_vl", tmp_path)
    async with showing(broker.url, tmp_path, ENDLESS, request_timeout_s=500) as (worker, gateway, client):
        content = png()
        tasks = [asyncio.create_task(client.post(CHAT, json=body(content))) for _ in range(2)]
        await wait_until(lambda: len(worker.live) == 2)
        digest = worker.seen[0].pictures[0].digest
        assert await worker.redis.zcard(KEYS.picture_holders(digest)) == 2
        assert await left_ms(worker.redis, digest) > 500_000
        await refuse_repetition(gateway, replace(worker.seen[0], request_id="twice"))
        for task, num_left in zip(tasks, (1, 0), strict=True):
            task.cancel()
            await held_by(num_left, worker, digest)
        assert 0 < await left_ms(worker.redis, digest) <= LINGER_MS
        await wait_until(lambda: not gateway.pool.cleanups)


async def refuse_repetition(gateway: Gateway, request: Generate) -> None:
    """Try to admit a request whose id another one has, at another gateway: that one's pictures stay."""
    redis, holders = gateway.pool.client.redis, KEYS.picture_holders(request.pictures[0].digest)
    await redis.hset(KEYS.request("twice"), "digest", "another's")  # type: ignore[misc]
    await gateway.pool.pictures.hold(request)
    with pytest.raises(ApiError, match="id"):
        await gateway.pool.admit(new_stream(request, gateway.pool.tokenizer), None)
    gateway.pool.relay.streams.pop("twice")
    assert await redis.zscore(holders, "twice")
    await redis.zrem(holders, "twice")


async def held_by(number: int, worker: FakeWorker, digest: str) -> None:
    """Wait until so many requests hold a picture."""

    await wait_for(lambda: worker.redis.zcard(KEYS.picture_holders(digest)), number)


async def test_a_pool_whose_pictures_take_all_room_asks_to_wait(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_processor("qwen2_vl", tmp_path)
    small, large = png(), png((80, 90))
    monkeypatch.setattr("api.prompts.pictures.MAX_KEPT_BYTES", len(small) + 20)
    async with showing(broker.url, tmp_path, Answer([40])) as (worker, _, client):
        assert (await client.post(CHAT, json=body(small))).status_code == 200
        refused = await client.post(CHAT, json=body(large))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "pictures of live requests take all room" in refused.text
        assert len(worker.seen) == 1


async def test_a_refused_request_lets_go_of_its_pictures(broker: Broker, tmp_path: Path) -> None:
    make_processor("qwen2_vl", tmp_path)
    async with showing(broker.url, tmp_path, ENDLESS, max_concurrent_requests=1) as (worker, _, client):
        first = asyncio.create_task(client.post(CHAT, json=body(png())))
        await wait_until(lambda: len(worker.live) == 1)
        refused = await client.post(CHAT, json=body(png(color="blue")))
        assert refused.status_code == 429
        digests = {one.digest for request in worker.seen for one in request.pictures}
        members = [member.decode().split()[0] for member in await worker.redis.zrange(KEYS.pictures, 0, -1)]
        other = next(digest for digest in members if digest not in digests)
        assert await worker.redis.zcard(KEYS.picture_holders(other)) == 0
        first.cancel()


async def test_a_picture_that_the_broker_loses_before_admission_is_asked_for_again(
    broker: Broker, tmp_path: Path
) -> None:
    make_processor("qwen2_vl", tmp_path)
    async with showing(broker.url, tmp_path, Answer([40])) as (worker, gateway, client):
        hold = gateway.pool.pictures.hold

        async def lose(request: Generate) -> None:
            await worker.redis.delete(*(KEYS.picture(one.digest) for one in request.pictures))
            await hold(request)

        gateway.pool.pictures.hold = lose  # type: ignore[method-assign]
        answered: httpx.Response = await client.post(CHAT, json=body(png()))
        assert answered.status_code == 503
        assert "the broker has lost a picture of the request: send it again" in answered.text
        assert worker.seen == []
