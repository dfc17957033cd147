"""Parse: reads requests and names from stream entries."""

import msgpack

from batcher.inbox import StreamEntry
from batcher.lease import LeaseLost, WritesLost
from batcher.scheduling.sequence import Sequence
from common.messages.codec import WireError, decode
from common.messages.plan import Report
from common.messages.request import Generate


def queued_ms(entry: StreamEntry, now_ms: int) -> int:
    """Return what the pool's clock showed when a `requests` entry was queued; `now_ms` if it does not say."""
    try:
        return min(int(entry.fields[b"clock"]), now_ms)
    except (KeyError, ValueError):
        return now_ms


def sequence(entry: StreamEntry, queued_ms: int) -> Sequence:
    """Return the sequence of a `requests` entry; its time to live counts from `queued_ms`.

    Raises WireError.
    """
    request = decode(Generate, entry.data)
    if not request.prompt_ids or len(request.prompt_ids) % 4:
        raise WireError("Generate.prompt_ids: empty, or no multiple of 4 bytes")
    check_positive("stopping.max_new_tokens", request.stopping.max_new_tokens)
    check_positive("ttl_ms", request.ttl_ms)
    check_positive("result_ttl_ms", request.result_ttl_ms)
    return Sequence(request, entry.id, queued_ms + request.ttl_ms)


def check_positive(field: str, value: int) -> None:
    """Raises WireError if the value of a request's field is not positive."""
    if value < 1:
        raise WireError(f"Generate.{field}: {value} is not positive")


def report(data: bytes, incarnation: str, epoch: int) -> Report:
    """Return a worker's report. Raises WireError; LeaseLost or WritesLost if it ends our `epoch`."""
    report = decode(Report, data)
    if report.epoch > epoch:
        raise LeaseLost(f"worker {incarnation} obeys epoch {report.epoch}")
    if report.reports_lost and report.epoch == epoch and not report.takeover:
        raise WritesLost(f"the broker lost reports of worker {incarnation}")
    return report


def incarnation(data: bytes) -> str:
    """Return a worker's incarnation. Raises WireError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"no incarnation: {error}") from error


def request_id(data: bytes) -> str | None:
    """Return the request id in a payload that is no valid `Generate`, if one can be read."""
    try:
        found = msgpack.unpackb(data)["id"]
    except Exception:  # the payload may be any bytes at all
        return None
    return found if isinstance(found, str) else None
