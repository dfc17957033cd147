"""`tokenfleet batch FILE`: answers the requests of a file, by the server's Files and Batch API."""

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import orjson

from common.settings.settings import SettingError
from deploy.cli.client import Unavailable, ask, check_status, fetch_json, one_line

POLL_S = 1.0
AWAY_S = 600.0
"""The longest time that a server may be away while its batch is waited for."""
MAX_LINE_BYTES = 2**24
ENDED = ("completed", "failed", "expired", "cancelled")


def run(client: httpx.Client, flags: argparse.Namespace) -> int:
    """Returns 1 if a request has failed. Raises SettingError, ServerError."""
    source: Path | None = flags.input or flags.file
    if (source is None) == (flags.id is None):
        raise SettingError("-i", "either a file of requests or the --id of a batch must be given")
    flags.output.open("ab").close()  # not only after hours is it found that no file can be there
    batch_id = flags.id if source is None else begin(client, source, flags.window)
    return finish(client, wait(client, batch_id), flags.output)


def begin(client: httpx.Client, source: Path, window: str) -> str:
    """Upload the requests, and create their batch. Returns its id. Raises ServerError, SettingError."""
    with source.open("rb") as file:
        endpoint = read_endpoint(file.readline(MAX_LINE_BYTES))
        file.seek(0)
        form = {"purpose": "batch"}
        uploaded = ask(client, "POST", "/v1/files", data=form, files={"file": (source.name, file)}).json()
    asked = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
    batch = ask(client, "POST", "/v1/batches", json=asked).json()
    print(f"batch {batch['id']}; after an interruption, --id {batch['id']} goes on", file=sys.stderr)
    return str(batch["id"])


def read_endpoint(line: bytes) -> str:
    """The endpoint of the first request. Raises SettingError."""
    with contextlib.suppress(orjson.JSONDecodeError, LookupError, TypeError):
        return str(orjson.loads(line)["url"])
    raise SettingError("-i", "the first line is no JSON object with a `url`")


def wait(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    """The batch when it has ended; its progress goes to stderr. A server that is away is asked again. Raises
    ServerError, and httpx.TransportError if it is away for longer than AWAY_S.
    """
    shown, heard_s = "", time.monotonic()
    while True:
        try:
            batch: dict[str, Any] = fetch_json(client, f"/v1/batches/{batch_id}")
        except (httpx.TransportError, Unavailable) as error:
            if time.monotonic() - heard_s > AWAY_S:
                raise
            batch = {"status": ""}
            line = f"asking again: {one_line(str(error)) or type(error).__name__}"
        else:
            heard_s, counts = time.monotonic(), batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            line = f"{batch['status']}: {done} of {counts['total']}, {counts['failed']} failed"
        if line != shown:
            print(line, file=sys.stderr)
            shown = line
        if batch["status"] in ENDED:
            return batch
        time.sleep(POLL_S)


def finish(client: httpx.Client, batch: dict[str, Any], output: Path) -> int:
    """Write the files of a batch, and say what failed. Returns the exit code."""
    errors = output.with_name(f"{output.stem}.errors.jsonl")
    for file_id, path in ((batch["output_file_id"], output), (batch["error_file_id"], errors)):
        if file_id is not None:
            download(client, file_id, path)
    for fault in (batch["errors"] or {"data": []})["data"]:
        print(f"line {fault['line']}: {fault['message']}", file=sys.stderr)
    if batch["error_file_id"] is not None:
        print(f"requests that failed: {errors}", file=sys.stderr)
    return int(batch["status"] != "completed" or batch["error_file_id"] is not None)


def download(client: httpx.Client, file_id: str, path: Path) -> None:
    """Write a file as it comes. Raises ServerError."""
    with client.stream("GET", f"/v1/files/{file_id}/content") as answer, path.open("wb") as file:
        if answer.status_code != 200:
            check_status(answer.status_code, answer.read())
        for chunk in answer.iter_bytes():
            file.write(chunk)
