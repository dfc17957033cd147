"""Files and batches on an S3 store: moto's server plays S3."""

from collections.abc import Iterator
from typing import Any

import pytest

from deploy.launcher.embedded_broker import Broker
from tests.integration.api.batches.test_batches import (
    answer,
    chat_line,
    jsonl,
    lines,
    openai_client,
    run_batch,
)
from tests.support.fleet.gateways import answering

pytest.importorskip("s3fs", reason="s3fs is not installed")
moto = pytest.importorskip("moto.server", reason="moto is not installed")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket, which only the variables of S3's clients lead to."""
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


@pytest.mark.slow
async def test_a_batch_is_read_from_s3_and_written_to_it(broker: Broker, bucket: str) -> None:
    async with answering(broker.url, answer, files_dir=bucket) as (_, _, http):
        client = openai_client(http)
        wrong = chat_line(20, temperature=-1)
        batch = await run_batch(client, jsonl([*(chat_line(number) for number in range(20)), wrong]))
        assert batch.status == "completed"
        output, errors = await lines(client, batch.output_file_id), await lines(client, batch.error_file_id)
        assert [line["custom_id"] for line in output] == [f"line-{number}" for number in range(20)]
        assert [line["custom_id"] for line in errors] == ["line-20"]
        files = {file.id async for file in client.files.list()}
        assert {batch.input_file_id, batch.output_file_id, batch.error_file_id} == files
        for file_id in files:
            assert (await client.files.delete(file_id)).deleted
        assert [file.id async for file in client.files.list()] == []
