"""Jobs of other services and of arq clients on a whole fleet: the examples of docs/ are true, and a killed
gateway or job worker loses and repeats nothing.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import redis
from arq import create_pool
from arq.connections import RedisSettings

from common.broker.keys import Keys
from tests.support import brokers
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until_sync

ROOT = Path(__file__).parents[3]
KEYS = Keys("default")
BODY = {
    "inputs": "One, two, three,",
    "parameters": {"max_new_tokens": 6, "ignore_eos": True, "details": True},
}
LONG_TOKENS = 60
LONG = {
    "inputs": "One, two, three,",
    "parameters": {"max_new_tokens": LONG_TOKENS, "ignore_eos": True, "details": True},
}
SUBMIT_JS = """
import { createClient } from 'redis';
const client = await createClient({ url: process.argv[2] }).connect();
const listener = await client.duplicate().connect();
const frames = [];
await listener.subscribe('tf:{default}:ext:node', frame => frames.push(JSON.parse(frame)));
const job = { id: 'node', reply_to: 'ext:node', reply: 'stream', ...JSON.parse(process.argv[3]) };
await client.xAdd('tf:{default}:submit', '*', { job: JSON.stringify(job) });
let result = null;
while (result === null || frames.length < 6) {
  await new Promise(resolve => setTimeout(resolve, 20));
  result = await client.get('tf:{default}:result:node');
}
const kept = await client.xRange('tf:{default}:reply:node', '-', '+');
const stored = kept.map(entry => JSON.parse(entry.message.frame));
console.log(JSON.stringify({ result: JSON.parse(result), frames, kept: stored }));
await listener.close();
await client.close();
"""


@pytest.fixture
def client(fleet: Fleet) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fleet.redis_url) as one:
        yield one


def submit(client: redis.Redis, **job: Any) -> str:
    entry: Any = client.xadd(KEYS.submit, {"job": json.dumps(job)})
    return str(entry.decode())


def result(client: redis.Redis, job_id: str) -> Any:
    return json.loads(wait_until_sync(lambda: client.get(KEYS.result(job_id))))


VARYING = ("id", "created", "logprob", "cached_tokens")


def plain(body: Any) -> Any:
    """Strip an answer of what differs each time: names, times, cached tokens of the prompt, and
    log-probabilities, which round differently in another batch.
    """
    if isinstance(body, list):
        return [plain(one) for one in body]
    if isinstance(body, dict):
        return {name: plain(value) for name, value in body.items() if name not in VARYING} | tokens(body)
    return body


def tokens(body: Any) -> dict[str, Any]:
    return {"token": body["id"]} if "logprob" in body else {}


def test_a_job_gets_the_answer_that_http_gives(fleet: Fleet, client: redis.Redis) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
    entry_id = submit(client, **BODY)
    submit(client, id="chat", messages=chat["messages"], parameters={"max_tokens": 3, "temperature": 0})
    submit(client, id="sampled", inputs="a", parameters={"do_sample": True, "seed": 7, "max_new_tokens": 4})
    with httpx.Client(base_url=fleet.base_url, timeout=60) as http:
        assert plain(result(client, entry_id)) == plain(http.post("/generate", json=BODY).json())
        assert plain(result(client, "chat")) == plain(http.post("/v1/chat/completions", json=chat).json())
        sampled = {"inputs": "a", "parameters": {"do_sample": True, "seed": 7, "max_new_tokens": 4}}
        assert result(client, "sampled") == http.post("/generate", json=sampled).json()


@pytest.mark.slow
def test_jobs_of_a_killed_gateway_continue(fleet: Fleet, client: redis.Redis) -> None:
    """Another gateway takes the job over and sends the rest: each frame comes exactly once."""
    submit(client, id="undisturbed", **LONG)
    expected = result(client, "undisturbed")
    with client.pubsub() as pubsub:  # type: ignore[no-untyped-call]
        pubsub.subscribe(KEYS.channel("ext:k"))
        submit(client, id="k", **LONG, reply_to="ext:k", reply="stream")
        frames: list[Any] = []
        for message in pubsub.listen():
            if message["type"] == "message":
                frames.append(json.loads(message["data"]))
                if len(frames) == 3:
                    [holder] = busy_consumers(client)
                    pid: Any = client.hget(KEYS.gateway(holder), "pid")
                    os.kill(int(pid), signal.SIGKILL)
                if frames[-1].get("generated_text") or "error" in frames[-1]:
                    break
    assert [frame["index"] for frame in frames] == list(range(1, 1 + LONG_TOKENS))
    assert plain([frame["token"] for frame in frames]) == plain(expected["details"]["tokens"])
    kept: Any = client.xrange(KEYS.reply("k"))
    assert [json.loads(fields[b"frame"]) for _, fields in kept] == frames
    assert plain(result(client, "k")) == plain(expected)
    wait_until_sync(lambda: client.xlen(KEYS.submit) == 0)
    assert not busy_consumers(client)


def busy_consumers(client: redis.Redis) -> list[str]:
    """Return the gateways that hold a job."""
    found: Any = client.xinfo_consumers(KEYS.submit, "gateways")
    return [one["name"].decode() for one in found if one["pending"]]


@pytest.mark.slow
async def test_jobs_of_a_killed_job_worker_continue(fleet: Fleet, client: redis.Redis) -> None:
    submit(client, id="calm", **LONG)
    expected = result(client, "calm")
    pool = await create_pool(
        RedisSettings.from_dsn(fleet.redis_url),
        job_serializer=msgpack.packb,
        job_deserializer=msgpack.unpackb,
        default_queue_name=KEYS.arq_queue,
    )
    job = await pool.enqueue_job("generate", LONG["inputs"], LONG["parameters"], _job_id="arq")
    assert job is not None

    def holders() -> list[int]:
        records: Any = [client.hgetall(key) for key in client.scan_iter(KEYS.process("jobworker", "j*"))]
        return [int(one[b"pid"]) for one in records if one[b"running"] == b"1"]

    [holder] = wait_until_sync(lambda: client.hexists(KEYS.job("arq"), "choices") and holders())
    os.kill(holder, signal.SIGKILL)
    assert plain(await job.result(timeout=120)) == plain(expected)
    await pool.aclose()


# --- docs ---------------------------------------------------------------------------------------------------


def console_blocks(page: str) -> list[str]:
    return re.findall(r"```console\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def looks_like(expected: str, printed: str) -> bool:
    """Compare two texts: `…` stands for anything, and ids of entries in `submit` may differ."""
    pattern = re.escape(expected.strip()).replace("…", ".*").replace("1760000000000\\-", r"\d+\-")
    return re.fullmatch(re.sub(r"(\\d\+\\-)\d", r"\1\\d+", pattern), printed.strip(), re.DOTALL) is not None


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli on this machine")
def test_the_redis_cli_session_of_the_docs_is_true(fleet: Fleet, tmp_path: Path) -> None:
    cli = ["redis-cli", "--no-raw", "-u", brokers.open_port(fleet.redis_url)]
    listeners_output = tmp_path / "heard"

    def is_printed(text: str) -> bool:
        return looks_like(f"…{text.strip()}…", listeners_output.read_text())

    with listeners_output.open("w") as out:
        listeners: list[subprocess.Popen[bytes]] = []
        try:
            for block in console_blocks("redis.md"):
                if not block.startswith("> "):
                    wait_until_sync(partial(is_printed, block))
                for step in block.split("> ")[1:] if block.startswith("> ") else []:
                    command, _, expected = step.partition("\n")
                    if command.startswith("SUBSCRIBE"):
                        listeners.append(subprocess.Popen([*cli, *shlex.split(command)], stdout=out))
                        wait_until_sync(partial(is_printed, expected))
                        continue

                    def printed(command: str = command) -> str:
                        return subprocess.run(
                            [*cli, *shlex.split(command)], capture_output=True, text=True, check=True
                        ).stdout

                    output = wait_until_sync(lambda: "(nil)" not in (text := printed()) and text)
                    assert looks_like(expected, output), f"{command}\n{output}"
        finally:
            for listener in listeners:
                listener.kill()
                listener.wait()


def test_the_first_arq_example_of_the_docs_is_true(fleet: Fleet, tmp_path: Path) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "arq.md").read_text(), re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(code.replace("redis://127.0.0.1:6379/0", fleet.redis_url))
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    generated, chatted = done.stdout.splitlines()[:2]
    assert generated == "{'generated_text': ' Paris.'}"
    assert chatted


@pytest.mark.slow
def test_node_submits_a_job(fleet: Fleet, client: redis.Redis, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("no npm on this machine")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    install = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "redis"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    if install.returncode:
        pytest.skip(f"npm cannot install the package redis: {install.stderr[-200:]}")
    (tmp_path / "submit.js").write_text(SUBMIT_JS)
    command = ["node", "submit.js", brokers.open_port(fleet.redis_url), json.dumps(BODY)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    submitted = json.loads(done.stdout)
    assert submitted["frames"] == submitted["kept"]
    assert [frame["token"] for frame in submitted["frames"]] == submitted["result"]["details"]["tokens"]
    submit(client, id="py", **BODY)
    assert plain(submitted["result"]) == plain(result(client, "py"))
