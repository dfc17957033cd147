"""Files and batches, through the unmodified `openai` package, in a folder and on S3."""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest
from redis.asyncio import Redis

from api.event_loop import LONG_SIZE
from api.jobs import batch_run
from api.jobs.batch import BatchLine, needed_files, read_line
from api.jobs.batch_run import BatchRun
from common.broker.keys import Keys
from common.messages.request import Generate
from deploy.cli import admin
from deploy.launcher.embedded_broker import Broker
from tests.support.answers import check_response, post
from tests.support.fleet.gateways import answering, ready, serving
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.keys.issued import add_key, bearer, known
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_for, wait_until

CHAT: Any = "/v1/chat/completions"
NUM_LINES = 160
ENDED = ("completed", "failed", "expired", "cancelled")


def answer(request: Generate) -> Answer:
    """An answer that depends on the prompt."""
    return Answer(ids(f" one two {len(request.prompt_ids)}"))


def chat_line(number: int, **fields: Any) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": "Count. " * (number + 1)}], "max_tokens": 20}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": chat | fields}


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def openai_client(client: httpx.AsyncClient, tenant: str = "acme") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{client.base_url}/v1",
        api_key="none",
        default_headers={"x-tenant": tenant},
        max_retries=0,
    )


async def begin(client: openai.AsyncOpenAI, content: bytes, **asked: Any) -> Any:
    """A batch of this input."""
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    own: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h"} | asked
    return await client.batches.create(input_file_id=file.id, **own)


async def run_batch(client: openai.AsyncOpenAI, content: bytes, **asked: Any) -> Any:
    """The batch of this input, when it has ended."""
    return await ended(client, (await begin(client, content, **asked)).id)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async def has_ended() -> bool:
        return (await client.batches.retrieve(batch_id)).status in ENDED

    await wait_until(has_ended)
    return await client.batches.retrieve(batch_id)


async def lines(client: openai.AsyncOpenAI, file_id: str) -> list[Any]:
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket, which only the variables of S3's clients lead to."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    server: Any = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    yield "s3://bucket/files"
    server.stop()


@pytest.mark.parametrize("place", ["tmp_path", pytest.param("bucket", marks=pytest.mark.slow)])
async def test_a_batch_of_chats_is_answered_in_the_order_of_its_input(
    broker: Broker, request: pytest.FixtureRequest, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are on a disk, or in S3."""
    holds_loop = set[bool]()

    def read(text: bytes, *limits: Any) -> BatchLine:
        holds_loop.add(len(text) >= LONG_SIZE and threading.current_thread() is threading.main_thread())
        return read_line(text, *limits)

    monkeypatch.setattr(batch_run, "read_line", read)
    monkeypatch.setattr(batch_run, "COMMIT_S", 0.0)
    monkeypatch.setattr(batch_run, "PARTS_A_SECOND", 0.001)
    files_dir = str(request.getfixturevalue(place))
    async with answering(broker.url, answer, files_dir=files_dir) as (worker, _, http):
        client = openai_client(http)
        wrong = chat_line(600, temperature=-1)
        content = jsonl([*(chat_line(number) for number in range(40)), wrong])
        batch = await run_batch(client, content, metadata={"a": "b"})
        output, errors = await lines(client, batch.output_file_id), await lines(client, batch.error_file_id)
        single = await post(http, CHAT, chat_line(3)["body"])
        stored = await worker.redis.hkeys(worker.keys.batch(batch.id))  # type: ignore[misc]
        assert len([name for name in stored if name.startswith(b"output:")]) == 2, "each part delays the next"
        assert {one.class_name for one in worker.seen[:40]} == {"batch"}
        assert {one.tenant for one in worker.seen[:40]} == {"acme"}
        left = [key.decode() for key in await worker.redis.keys("*job:*")]
        files = {file.id async for file in client.files.list()}
        for file_id in files:
            assert (await client.files.delete(file_id)).deleted
        assert [file.id async for file in client.files.list()] == []
    assert batch.status == "completed" and batch.metadata == {"a": "b"}
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        41,
        40,
        1,
    )
    assert [line["custom_id"] for line in output] == [f"line-{number}" for number in range(40)]
    assert output[3]["response"]["body"]["choices"] == single["choices"]
    assert (output[3]["response"]["status_code"], output[3]["error"]) == (200, None)
    assert [line["custom_id"] for line in errors] == ["line-600"]
    assert errors[0]["response"]["status_code"] == 400
    assert errors[0]["response"]["body"]["error"]["param"] == "temperature"
    assert left == [], "what is committed leaves Redis"
    assert holds_loop == {False}, "long lines are read in threads"
    assert {batch.input_file_id, batch.output_file_id, batch.error_file_id} == files


async def test_responses_are_those_of_the_route_but_for_ids(broker: Broker, tmp_path: Path) -> None:
    async with answering(broker.url, answer, files_dir=str(tmp_path)) as (worker, _, http):
        client = openai_client(http)
        turns = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}]
        bodies: list[dict[str, Any]] = [
            {"input": "One", "instructions": "Be brief.", "max_output_tokens": 9, "metadata": {"a": "b"}},
            {"input": [*turns, {"role": "user", "content": "Three"}], "temperature": 0.5},
            {"input": "One", "previous_response_id": "resp_" + 32 * "0"},
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            {"input": "One", "background": True},
            {"input": "One", "top_logprobs": 2},
            {"input": "One", "model": "no"},
        ]
        content = jsonl(
            {"custom_id": str(i), "method": "POST", "url": "/v1/responses", "body": body}
            for i, body in enumerate(bodies)
        )
        batch = await run_batch(client, content, endpoint="/v1/responses", completion_window="best_effort")
        output, errors = await lines(client, batch.output_file_id), await lines(client, batch.error_file_id)
        served = sorted((one.prompt_ids for one in worker.seen), key=len)
        worker.seen.clear()
        for line, body in zip(output, bodies, strict=False):
            single = await post(http, "/v1/responses", body | {"store": False})
            made = line["response"]["body"]
            assert check_response(made).status == "completed"
            different = {name for name in single if made[name] != single[name]}
            assert different <= {"id", "created_at", "completed_at", "output", "service_tier"}
            assert text_in(made) == text_in(single)
        assert sorted((one.prompt_ids for one in worker.seen), key=len) == served
    assert [line["response"]["body"]["error"]["param"] for line in errors] == [
        "previous_response_id",
        "input[0].type",
        "background",
        "top_logprobs",
        "model",
    ]
    assert batch.expires_at is None
    assert errors[-1]["response"]["status_code"] == 404
    assert "The model `no` does not exist" in errors[-1]["response"]["body"]["error"]["message"]


def text_in(response: dict[str, Any]) -> list[str]:
    return [part["text"] for item in response["output"] for part in item["content"]]


async def test_a_faulty_input_fails_the_batch_with_all_its_faults(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.jobs.batch_run.MAX_LINES", 2)
    content = jsonl([chat_line(0), chat_line(0), chat_line(1) | {"url": "/v1/embeddings"}]) + b"{no\n"
    async with answering(broker.url, answer, files_dir=str(tmp_path)) as (_, _, http):
        client = openai_client(http)
        batch = await run_batch(client, content)
        long = await run_batch(client, jsonl(chat_line(number) for number in range(3)))
    assert batch.status == "failed"
    faults = [(fault.line, fault.code) for fault in batch.errors.data]
    assert faults == [(2, "duplicate_custom_id"), (3, "mismatched_url"), (4, "invalid_json_line")]
    assert [fault.code for fault in long.errors.data] == ["too_many_tasks"]


async def test_a_batch_is_its_tenants(broker: Broker, tmp_path: Path) -> None:
    async with answering(broker.url, answer, files_dir=str(tmp_path)) as (_, _, http):
        client, other = openai_client(http), openai_client(http, "other")
        batch = await run_batch(client, jsonl([chat_line(0)]))
        assert [one.id async for one in client.batches.list()] == [batch.id]
        assert {one.id async for one in client.files.list()} == {batch.input_file_id, batch.output_file_id}
        assert [one async for one in other.batches.list()] == []
        assert [one async for one in other.files.list()] == []
        for ask in (
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.files.retrieve(batch.output_file_id),
            other.files.delete(batch.output_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await ask
        await client.files.delete(batch.output_file_id)
        with pytest.raises(openai.NotFoundError):
            await client.files.content(batch.output_file_id)


async def test_what_is_no_id_leads_to_no_file(broker: Broker, redis: Redis, tmp_path: Path) -> None:
    """Another tenant's file, or another file of the machine, cannot be read, deleted, or told to exist."""
    (tmp_path / "other.json").write_text("{}")
    alice, bob = await add_key(redis, tenant="alice"), await add_key(redis, tenant="bob")
    async with answering(broker.url, answer, files_dir=f"{tmp_path}/files") as (_, gateway, http):
        await known([gateway], bob)
        ids = []
        for key in (alice, bob):
            sent: dict[str, Any] = {
                "files": {"file": ("in.jsonl", jsonl([chat_line(0)]))},
                "data": {"purpose": "batch"},
            }
            ids.append((await http.post("/v1/files", headers=bearer(key), **sent)).json()["id"])
        own, bobs = ids
        forged = [f"../of-bob/{bobs}", f"{own}/../../of-bob/{bobs}", "../../other", f"./{own}", f"{own}\n"]
        for file_id in [*forged, own.upper(), f"{own[:-1]}*", f"%2e%2e%2fof-bob%2f{bobs}", bobs, ""]:
            body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
            answers = [await http.post("/v1/batches", json=body, headers=bearer(alice))]
            path = f"/v1/files/{quote(file_id, safe='')}"
            if file_id:
                for method, url in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
                    answers.append(await http.request(method, url, headers=bearer(alice)))
            assert {one.status_code for one in answers} == {404}, file_id
        listed = (await http.get("/v1/files", headers=bearer(bob))).json()["data"]
        for batch_id in ("live", f"batch_{0:032x}", f"../{own}"):
            path = f"/v1/batches/{quote(batch_id, safe='')}"
            assert (await http.get(path, headers=bearer(alice))).status_code == 404
    assert [one["id"] for one in listed] == [bobs]


@pytest.mark.slow
async def test_a_cancelled_batch_keeps_what_was_answered(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.jobs.batch_run.WINDOW", 4)

    def some(request: Generate) -> Answer:
        return Answer(ids(" one two" * (1 if len(worker.seen) < 8 else 190)))

    async with (
        working(broker.url, TOKENIZER, some, 0.02) as worker,
        serving(broker.url, files_dir=str(tmp_path)) as (gateway, http),
    ):
        await ready(gateway)
        client = openai_client(http)
        content = jsonl(chat_line(number, max_tokens=400) for number in range(30))
        batch = await begin(client, content)
        await wait_until(lambda: len(worker.seen) >= 10)
        cancelled = await client.batches.cancel(batch.id)
        assert cancelled.status == "cancelling"
        batch = await ended(client, batch.id)
        output = await lines(client, batch.output_file_id)
        errors = await lines(client, batch.error_file_id)
    assert batch.status == "cancelled"
    assert {line["custom_id"] for line in output + errors} == {f"line-{number}" for number in range(30)}
    assert len(output + errors) == 30
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}


@pytest.mark.slow
async def test_another_gateway_goes_on_with_a_batch_and_writes_the_same_bytes(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway that writes the batch ends again and again; each line is once in the output."""
    monkeypatch.setattr("api.jobs.batch_run.WINDOW", 16)
    content = jsonl(chat_line(number) for number in range(NUM_LINES))
    options: dict[str, Any] = {"files_dir": str(tmp_path)}
    async with working(broker.url, TOKENIZER, answer, 0.002) as worker:
        async with serving(broker.url, name="g0", **options) as (gateway, http):
            await ready(gateway)
            client = openai_client(http)
            undisturbed = await run_batch(client, content)
            expected = (await client.files.content(undisturbed.output_file_id)).text
            batch = await begin(client, content)
            seen = len(worker.seen)
            await wait_until(lambda: len(worker.seen) > seen + NUM_LINES // 8)
        for number in range(1, 4):
            async with serving(broker.url, name=f"g{number}", **options) as (gateway, http):
                await ready(gateway)
                seen = len(worker.seen)
                await wait_until(lambda seen=seen: len(worker.seen) > seen + NUM_LINES // 8)  # type: ignore[misc]
        async with serving(broker.url, name="last", **options) as (gateway, http):
            client = openai_client(http)
            ended_batch = await ended(client, batch.id)
            output = (await client.files.content(ended_batch.output_file_id)).text
        asked = [one.request_id for one in worker.seen]
    assert len(asked) == len(set(asked)) == 2 * NUM_LINES, "nothing is computed twice"
    times = {json.loads(text.splitlines()[0])["response"]["body"]["created"] for text in (output, expected)}
    first, second = (
        text.replace(one.id, "ID").replace(one.id.removeprefix("batch_"), "ID")
        for text, one in ((output, ended_batch), (expected, undisturbed))
    )
    for created in times:
        first, second = (text.replace(f'"created":{created}', '"created":0') for text in (first, second))
    assert first == second


async def test_what_a_batch_needs_stays_and_its_loss_is_said(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input of a batch that runs is not deleted and does not expire. Where it is gone all the same, the
    next gateway does not take the batch for answered.
    """
    monkeypatch.setattr("api.jobs.batch_run.WINDOW", 4)
    options: dict[str, Any] = {"files_dir": str(tmp_path)}
    async with working(broker.url, TOKENIZER, answer) as worker:
        worker.most_tokens = 0
        async with serving(broker.url, **options) as (gateway, http):
            await ready(gateway)
            client = openai_client(http)
            content = jsonl(chat_line(number) for number in range(30))
            batch = await begin(client, content)
            await wait_until(lambda: len(worker.seen) == 4)
            with pytest.raises(openai.ConflictError, match=batch.id):
                await client.files.delete(batch.input_file_id)
            [record] = tmp_path.rglob(f"{batch.input_file_id}.json")
            record.write_text(json.dumps(json.loads(record.read_text()) | {"expires_at": 1}))
            store = gateway.files
            assert store and await store.delete_expired(2, await needed_files(gateway.pool.client)) == 0
            worker.most_tokens = sys.maxsize
            await wait_until(lambda: len(worker.seen) > 8)
            worker.most_tokens = 0
        record.unlink()
        worker.most_tokens = sys.maxsize
        async with serving(broker.url, name="g1", **options) as (gateway, http):
            client = openai_client(http)
            batch = await ended(client, batch.id)
            output = await lines(client, batch.output_file_id) if batch.output_file_id else []
    counts = batch.request_counts
    assert (batch.status, counts.total) == ("failed", 30)
    assert counts.completed == len(output) < 30 and counts.completed + counts.failed == 30
    assert [fault.code for fault in batch.errors.data] == ["input_file_missing"]


async def test_a_gateway_whose_clock_is_wrong_ends_and_deletes_nothing(
    broker: Broker, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All deadlines are told by the broker's clock: of batches, files and keys."""
    leases = set[bytes | None]()
    monkeypatch.setattr("api.jobs.batch_run.WINDOW", 4)
    monkeypatch.setattr(batch_run, "POLL_S", 0.05)

    async def looked_again() -> bool:
        names = ["leased_until_ms", "status"]
        lease, status = await redis.hmget(Keys("default").batch(batch["id"]), names)  # type: ignore[misc]
        leases.add(lease)
        return len(leases) > 5 or status != b"in_progress"

    true_s, began_s = time.time(), time.monotonic()
    fields: dict[str, Any] = {"tenant": "acme", "expires_at": int(true_s) + 1800}
    key = await add_key(redis, **fields)
    sent: dict[str, Any] = {
        "headers": bearer(key),
        "files": {"file": ("in.jsonl", jsonl(chat_line(number) for number in range(9)))},
        "data": {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"},
    }
    async with answering(broker.url, answer, files_dir=str(tmp_path)) as (worker, gateway, http):
        worker.most_tokens = 0
        file = (await http.post("/v1/files", **sent)).json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "1h"}
        gateway.keys.was_read.clear()  # as before they are read for the first time
        gateway.keys.by_id, gateway.keys.seen = {}, None
        batch = (await http.post("/v1/batches", json=body, headers=bearer(key))).json()
        await wait_until(lambda: len(worker.seen) == 4)
        monkeypatch.setattr(time, "time", lambda: time.monotonic() - began_s + true_s + 7200)
        monkeypatch.setattr(batch_run, "SWEEP_S", 0.05)
        monkeypatch.setattr(batch_run, "RENEW_S", 0.05)
        async with serving(broker.url, name="g1-wrong", files_dir=str(tmp_path)) as (gateway, wrong):
            await known([gateway], key)
            store = gateway.files
            assert store and store.clock.offset_s is not None
            later = (await wrong.post("/v1/files", **sent)).json()
            await wait_until(looked_again)
            worker.most_tokens = sys.maxsize
            client = openai.AsyncOpenAI(base_url=f"{wrong.base_url}/v1", api_key=key.text, max_retries=0)
            done = await ended(client, batch["id"])
            listed = {one.id async for one in client.files.list()}
    assert (done.status, done.request_counts.completed) == ("completed", 9)
    assert {file["id"], later["id"]} <= listed
    assert abs(later["created_at"] - true_s) < 600 and abs(done.completed_at - true_s) < 600


async def test_batches_that_cannot_go_on_end(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold up no other batch of the pool."""

    async def commit_or_fail(self: BatchRun) -> None:
        if self.batch.metadata == {"a": "b"}:
            raise RecursionError
        await commit(self)

    commit = BatchRun.commit
    monkeypatch.setattr(BatchRun, "commit", commit_or_fail)
    monkeypatch.setattr(batch_run, "POLL_S", 0.05)
    async with answering(broker.url, answer, files_dir=str(tmp_path)) as (_, _, http):
        client = openai_client(http)
        file = await client.files.create(file=("in.jsonl", jsonl([chat_line(0)])), purpose="batch")
        asked: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "1h"}
        made = [await client.batches.create(**asked, metadata={"a": "b"}) for _ in range(4)]
        made.append(await client.batches.create(**asked | {"completion_window": "24h"}))
        batches = [await ended(client, batch.id) for batch in made]
    assert [batch.status for batch in batches] == [*4 * ["failed"], "completed"]
    assert {batch.request_counts.failed for batch in batches[:4]} == {1}
    assert [fault.code for fault in batches[0].errors.data] == ["server_error"]


async def test_parts_that_the_broker_has_lost_are_written_again(
    broker: Broker, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a failover: the new primary has the batch as it was two parts ago."""
    before: list[dict[bytes, bytes]] = []

    async def commit_and_lose(self: BatchRun) -> None:
        key = self.pool.client.keys.batch(self.batch.id)
        await commit(self)
        before.append(await redis.hgetall(key))  # type: ignore[misc]
        if len(before) == 4:
            await redis.pipeline().delete(key).hset(key, mapping=before[1]).execute()  # type: ignore[union-attr]

    commit = BatchRun.commit
    monkeypatch.setattr(BatchRun, "commit", commit_and_lose)
    monkeypatch.setattr(batch_run, "COMMIT_BYTES", 0)
    async with answering(broker.url, answer, files_dir=str(tmp_path)) as (_, _, http):
        client = openai_client(http)
        content = jsonl(chat_line(number) for number in range(9))
        batch = await begin(client, content)
        batch = await ended(client, batch.id)
        found = await lines(client, batch.output_file_id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 9)
    assert [one["custom_id"] for one in found] == [f"line-{number}" for number in range(9)]


async def test_a_record_that_cannot_be_read_ends_its_batch_and_no_gateway(
    broker: Broker, tmp_path: Path
) -> None:
    """One of a later version is read without the fields that this version does not know."""
    async with answering(broker.url, answer, files_dir=str(tmp_path)) as (worker, _, http):
        client = openai_client(http)
        batch = await begin(client, jsonl([chat_line(0)]))
        redis: Any = worker.redis
        record = json.loads(await redis.hget(worker.keys.batch(batch.id), "record"))
        later, spoiled, none = [f"batch_{number:032x}" for number in range(3)]
        for name, text in {later: json.dumps(record | {"new": 1}), spoiled: "[", none: "{}"}.items():
            await redis.hset(worker.keys.batch(name), mapping={"record": text, "status": "validating"})
            await redis.zadd(worker.keys.live_batches, {f"acme {name}": 1})

        await wait_for(lambda: redis.zcard(worker.keys.live_batches), 0)
        states = [await redis.hget(worker.keys.batch(name), "status") for name in (later, spoiled)]
        assert states == [b"completed", b"failed"]
        assert (await ended(client, batch.id)).status == "completed"


async def test_files_have_limits(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.jobs.batch.MAX_FILES", 2)
    monkeypatch.setattr("api.jobs.files.MAX_FILE_BYTES", 9_000_000)
    async with answering(broker.url, answer, files_dir=str(tmp_path)) as (
        _,
        _,
        http,
    ):
        client = openai_client(http)
        large = b"x" * 8_999_999 + b"\n"
        file = await client.files.create(file=("a.jsonl", large), purpose="batch")
        assert (file.bytes, file.filename, file.purpose) == (9_000_000, "a.jsonl", "batch")
        assert (await client.files.content(file.id)).content == large
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=("a.jsonl", large + b"x"), purpose="batch")
        assert refused.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="`file` must have a file name, and other fields"):
            await client.files.create(file=("", b"x" * 1001), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=("a.jsonl", b"x"), purpose="no")  # type: ignore[arg-type]
        kept = await client.files.create(
            file=("b.txt", b"x"),
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert kept.expires_at == kept.created_at + 3600
        with pytest.raises(openai.BadRequestError, match="may keep 2 files"):
            await client.files.create(file=("c.txt", b"x"), purpose="user_data")
        with pytest.raises(openai.BadRequestError, match="for user_data"):
            await client.batches.create(input_file_id=kept.id, endpoint=CHAT, completion_window="24h")
        page = await client.files.list(limit=1)
        assert [one.id for one in page.data] == [kept.id] and page.has_more
        assert len(list(Path(tmp_path).rglob("*.json"))) == 2


async def test_without_a_place_there_are_no_files(broker: Broker) -> None:
    async with answering(broker.url, answer) as (_, _, http):
        response = await http.get("/v1/files")
    assert response.status_code == 501 and "FILES_DIR" in response.json()["error"]["message"]


async def test_the_command_answers_a_file(broker: Broker, tmp_path: Path) -> None:
    """`tokenfleet batch run` exits with 1 if a request has failed, and writes both files."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl([chat_line(0), chat_line(1, temperature=-1), chat_line(2)]))
    async with answering(broker.url, answer, files_dir=f"{tmp_path}/files") as (_, _, http):
        words = ["-i", str(source), "-o", str(output), "--url", str(http.base_url)]
        code = await asyncio.to_thread(admin.main, ["batch", *words])
    found = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    failed = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    assert (code, found) == (1, ["line-0", "line-2"])
    assert [json.loads(line)["custom_id"] for line in failed] == ["line-1"]


async def test_a_batch_that_is_asked_for_again_with_its_key_is_made_once(
    broker: Broker, tmp_path: Path
) -> None:
    async with answering(broker.url, answer, files_dir=str(tmp_path)) as (_, _, http):
        client = openai_client(http)
        file = await client.files.create(file=("in.jsonl", jsonl([chat_line(1)])), purpose="batch")
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        headers = {"x-tenant": "acme", "idempotency-key": "nightly"}
        again = [await http.post("/v1/batches", json=body, headers=headers) for _ in range(2)]
        again += await asyncio.gather(
            *(
                http.post("/v1/batches", json=body, headers=headers | {"idempotency-key": "twice"})
                for _ in range(4)
            )
        )
        made = [one.json()["id"] for one in again]
        assert len({*made[:2]}) == len({*made[2:]}) == 1 and made[0] != made[2]
        assert [one.headers.get("idempotency-replayed") for one in again[:2]] == [None, "true"]
        assert [one.id async for one in client.batches.list()] == [made[2], made[0]], "the newest first"
        other = await http.post("/v1/batches", json=body | {"metadata": {"a": "b"}}, headers=headers)
        assert other.status_code == 409 and other.json()["error"]["code"] == "idempotency_key_reused"
        elsewhere = await http.post("/v1/batches", json=body, headers=headers | {"x-tenant": "other"})
        assert elsewhere.status_code == 404, "a key belongs to a tenant, and the file is another one's"
