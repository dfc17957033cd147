"""POST /requests/streams: several answers on one connection, which do not wait for each other."""

import re
from typing import Any

import httpx

from deploy.launcher.embedded_broker import Broker
from tests.integration.api.resume.test_resume import BODY, LONG, read_frames, two_gateways
from tests.support.fleet.gateways import ready, serving
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.sse import numbered
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_until

NUM_STREAMS = 8
"""More than the connections that a browser opens."""


async def begin(client: httpx.AsyncClient, count: int = 0, **fields: Any) -> tuple[str, bytes]:
    """Begin an answer, and hang up after `count` frames. Returns its id and the frames."""
    frames, place = await read_frames(client, "/generate_stream", BODY | fields, count)
    return place.split("/")[2], frames


def by_answer(merged: bytes) -> dict[str, bytes]:
    """The frames of each answer, with their own ids again."""
    frames: dict[str, bytes] = {}
    for frame in merged.split(b"\n\n")[:-1]:
        found = re.fullmatch(rb"id: ([0-9a-f]{32})/(.*)", frame, re.DOTALL)
        assert found is not None, frame
        frames[found[1].decode()] = frames.get(found[1].decode(), b"") + b"id: " + found[2] + b"\n\n"
    return frames


async def test_each_answer_goes_on_after_its_last_frame_at_any_gateway(broker: Broker) -> None:
    async with two_gateways(broker.url) as (worker, gateway, client, other):
        begun = [await begin(client if i % 2 else other, i) for i in range(NUM_STREAMS)]
        places = [f"{answer_id}/{i}" if i else answer_id for i, (answer_id, _) in enumerate(begun)]
        merged = await other.post("/requests/streams", json={"streams": places})
        assert merged.headers["content-type"].startswith("text/event-stream")
        rests = by_answer(merged.content)
        for answer_id, first in begun:
            whole, _ = await read_frames(client, f"/requests/{answer_id}/stream", None)
            assert first + rests[answer_id] == whole
        seen = [f"{answer_id}/{len(numbered(first + rests[answer_id]))}" for answer_id, first in begun]
        assert (await client.post("/requests/streams", json={"streams": seen})).status_code == 204
        assert len(worker.seen) == NUM_STREAMS
        await wait_until(lambda: not gateway.pool.relay.streams)


async def test_an_answer_that_pauses_holds_up_no_other(broker: Broker) -> None:
    """Unlike the choices of one answer."""
    text = ids(" one two three four")
    async with (
        serving(broker.url) as (gateway, client),
        working(broker.url, TOKENIZER, lambda asked: Answer(text, ends=asked.stopping.max_new_tokens > 50)),
    ):
        await ready(gateway)
        paused, _ = await begin(client, parameters={"max_new_tokens": 50})
        other, _ = await begin(client)
        async with client.stream("POST", "/requests/streams", json={"streams": [paused, other]}) as response:
            seen = b""
            async for chunk in response.aiter_raw():
                seen += chunk
                if b'"generated_text":" one two three four"' in seen:
                    break
        assert len(numbered(by_answer(seen)[paused])) == len(text)


async def test_a_client_that_leaves_cancels_nothing_that_waits_for_it(broker: Broker) -> None:
    async with two_gateways(broker.url, LONG, step_s=0.05) as (worker, gateway, client, other):
        begun = [await begin(client) for _ in range(2)]
        ids_of_answers = [answer_id for answer_id, _ in begun]
        async with other.stream("POST", "/requests/streams", json={"streams": ids_of_answers}) as response:
            await anext(response.aiter_raw())
        worker.step_s = 0.0
        merged = by_answer((await client.post("/requests/streams", json={"streams": ids_of_answers})).content)
        assert len({len(numbered(frames)) for frames in merged.values()}) == 1
        await wait_until(lambda: not gateway.pool.relay.streams)


async def test_what_cannot_be_read_is_refused_by_name(broker: Broker) -> None:
    async with two_gateways(broker.url) as (_, _, client, _):
        known, _ = await begin(client)
        _, place = await read_frames(client, "/generate_stream", {"inputs": "Hi"}, 1)
        wrong: list[tuple[Any, int, str]] = [
            ([], 422, "`streams`"),
            (["5"], 422, "`streams`"),
            ([known, f"{known}/1"], 422, "twice"),
            ([known, f"{known[:-1]}{'1' if known[-1] == '0' else '0'}"], 404, "no streamed answer"),
            ([f"{known}/99999"], 422, "Last-Event-ID"),
            ([known] * 65, 422, "64"),
        ]
        for streams, status, words in wrong:
            refused = await client.post("/requests/streams", json={"streams": streams})
            assert (refused.status_code, words in refused.json()["error"]) == (status, True), refused.text
        assert place
