"""Exposition: metrics in Prometheus' text format, by prometheus_client; a process's server at METRICS_PORT;
and the sums of the whole pool, a hash in the broker to which every process adds what it counts. The sums
outlive the processes.

TGI's counters have no suffix `_total`.
"""

import asyncio
import contextlib
import http.server
import logging
import os
import re
import socket
import socketserver
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.utils import floatToGoString

from common.broker.client import ERRORS, describe_error
from common.broker.keys import METRICS_TTL_MS
from common.broker.pool_client import PoolClient
from common.metrics.catalogue import (
    BY_NAME,
    COUNTED,
    POOL,
    SEPARATOR,
    SUM,
    Counter,
    Histogram,
    Labels,
    Metric,
)
from common.process.event_loop import until_beat
from common.settings.settings import SettingError, Settings

log = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 10.0
"""Time after which a client that sends nothing is disconnected."""
WAITS_FOR_PORT = "WAITS_FOR_METRICS_PORT"
"""Variable of a process that starts beside the one that it replaces: METRICS_PORT becomes free later."""
RETRY_S = 0.5
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TGI_COUNTER = re.compile(rb"^(# (?:HELP|TYPE) tgi_\w+)_total ", re.MULTILINE)

Sample = tuple[str, dict[str, str], float]
Values = Mapping[str, float]
Series = dict[Labels, dict[str, float]]
Gauges = Mapping[str, Mapping[Labels, float]]


def own_values() -> dict[str, float]:
    """Return the counts of this process, under the names that `Metric.field` returns."""
    return {name: value for metric in COUNTED for name, value in metric.fields()}


def render(pool: str, metrics: Iterable[Metric], values: Values, gauges: Gauges) -> bytes:
    """Return metrics as text; our own have the label `pool`. Unknown fields are left out."""
    series, families = by_metric(values), []
    for metric in metrics:
        family = Family(metric.name, metric.help, metric.kind)
        own = {} if is_of_tgi(metric) else {POOL: pool}
        for suffix, labels, value in samples(metric, series.get(metric.name, {}), gauges):
            family.add_sample(f"{metric.name}{suffix}", own | labels, value)
        families.append(family)
    registry: Any = SimpleNamespace(collect=lambda: families)
    return TGI_COUNTER.sub(rb"\1 ", generate_latest(registry))


def samples(metric: Metric, series: Series, gauges: Gauges) -> Iterator[Sample]:
    """Yield suffix of the name, labels and value of each sample of a metric."""
    if not isinstance(metric, Counter | Histogram):
        for values, gauge in gauges[metric.name].items():
            yield "", dict(zip(metric.labels, values, strict=True)), gauge
        return
    # label values that the catalogue knows, and those that have occurred
    for values in sorted({*product(*metric.labels.values()), *series}):
        labels, parts = dict(zip(metric.labels, values, strict=True)), series.get(values, {})
        if isinstance(metric, Histogram):
            yield from histogram(metric, labels, parts)
        else:
            yield "" if is_of_tgi(metric) else "_total", labels, parts.get("", 0.0)


def is_of_tgi(metric: Metric) -> bool:
    return metric.name.startswith("tgi_")


def by_metric(values: Values) -> dict[str, Series]:
    """Return values by metric, label values and part."""
    found: dict[str, Series] = defaultdict(lambda: defaultdict(dict))
    for name, value in values.items():
        first, *labels = name.split(SEPARATOR)
        metric = BY_NAME.get(first)
        if (
            metric is not None
            and len(labels) == len(metric.labels) + 1
            and is_part(metric, part := labels.pop())
        ):
            found[first][tuple(labels)][part] = value
    return found


def is_part(metric: Metric, part: str) -> bool:
    if isinstance(metric, Counter):
        return part == ""
    try:
        return part == SUM or float(part) >= 0
    except ValueError:
        return False


def histogram(metric: Histogram, labels: dict[str, str], parts: Mapping[str, float]) -> Iterator[Sample]:
    """Yield the samples of one series: cumulative buckets, then the number of all values and their sum.

    The bounds are those of this process and of processes that had others.
    """
    counts = dict.fromkeys(metric.bounds, 0.0) | {
        float(part): count for part, count in parts.items() if part not in (SUM, "")
    }
    total = 0.0
    for bound in sorted(counts):
        total += counts[bound]
        yield "_bucket", labels | {"le": floatToGoString(bound)}, total  # type: ignore[no-untyped-call]
    yield "_count", labels, total
    yield "_sum", labels, parts.get(SUM, 0.0)


def start_metrics_server(settings: Settings, is_ready: Callable[[], bool]) -> None:
    """Serve this process's own `GET /metrics` and probes, from a thread until the process ends. `/readyz`
    (and `/health`) asks `is_ready`; `/livez` is 200 as long as the process is there.

    Raises SettingError if METRICS_PORT is taken, unless the process waits for its predecessor's port.
    """
    if not settings.metrics_port:
        return

    class MetricsHandler(http.server.BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            match self.path.split("?")[0]:
                case "/metrics":
                    counts = render(settings.pool, COUNTED, own_values(), {})
                    self.respond(200, CONTENT_TYPE, counts + generate_latest(REGISTRY))
                case "/livez":
                    self.respond(200, "text/plain", b"live\n")
                case "/health" | "/readyz" if is_ready():
                    self.respond(200, "text/plain", b"ready\n")
                case "/health" | "/readyz":
                    self.respond(503, "text/plain", b"not ready yet\n")
                case _:
                    self.send_error(404)

        def respond(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class MetricsServer(socketserver.ThreadingTCPServer):  # http.server's own class asks the DNS first
        address_family = socket.AF_INET6 if ":" in settings.listen_host else socket.AF_INET
        allow_reuse_address = daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A line of the log, where socketserver prints a traceback. A client may leave at any time."""
            if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
                log.exception("the answer to %s failed", client_address)

    def listen() -> MetricsServer:
        return MetricsServer((settings.listen_host, settings.metrics_port), MetricsHandler)

    def serve_later() -> None:
        while True:
            with contextlib.suppress(OSError):
                return listen().serve_forever()
            time.sleep(RETRY_S)

    serve: Callable[[], None] = serve_later
    try:
        serve = listen().serve_forever
    except OSError as error:
        if not os.environ.get(WAITS_FOR_PORT):
            raise SettingError(
                "metrics_port",
                f"cannot listen on {settings.listen_host}:{settings.metrics_port}: {error.strerror}",
            ) from error
    threading.Thread(target=serve, name="metrics", daemon=True).start()


ADD_S = 1.0
"""Time between two additions."""
FINAL_ADD_S = 1.0
"""Time limit of the last addition, at the end of the process."""


class MetricsPublisher:
    """Adds this process's counts to the pool's hash.

    What is counted while the broker is away is added when it is back. If a reply of the broker is lost, one
    second may be counted twice.

    Attributes:
        added: the values that have been added so far.
    """

    def __init__(self, pool: PoolClient) -> None:
        self.pool = pool
        self.added = own_values()

    async def run(self, stopped: asyncio.Event) -> None:
        """Add every ADD_S seconds, and a last time after `stopped` is set. (A cancelled task could not know
        whether the broker has added what was sent.)
        """
        last = False
        while not last:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_beat(ADD_S)):
                    await stopped.wait()
            last = stopped.is_set()
            try:
                await self.add()
            except ERRORS as error:
                log.debug("metrics are added later: %s", describe_error(error))

    async def add(self) -> None:
        """Add the counts since the last call. A field that the broker refuses, since something else wrote to
        it, is tried again; other fields are added all the same.
        """
        changed = {name: value for name, value in own_values().items() if value != self.added.get(name, 0.0)}
        if not changed:
            return
        async with self.pool.redis.pipeline(transaction=False) as pipe:
            for name, value in changed.items():
                pipe.hincrbyfloat(self.pool.keys.metrics, name, value - self.added.get(name, 0.0))
            pipe.pexpire(self.pool.keys.metrics, METRICS_TTL_MS)
            *sums, _ = await pipe.execute(raise_on_error=False)
        self.added |= {
            name: value
            for (name, value), total in zip(changed.items(), sums, strict=True)
            if not isinstance(total, Exception)
        }


@contextlib.asynccontextmanager
async def publishing_metrics(pool: PoolClient) -> AsyncIterator[None]:
    """Add this process's counts to the pool's hash while the context is open, and a last time at its end."""
    stopped = asyncio.Event()
    task = asyncio.create_task(MetricsPublisher(pool).run(stopped))
    try:
        yield
    finally:
        stopped.set()
        await asyncio.wait([task], timeout=FINAL_ADD_S)
        task.cancel()
