"""The metrics catalogue: names, types, labels, buckets, and sums over many processes.
OtlpExporter: what a receiver of the real protocol gets, and what happens without one.
"""

import asyncio
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio.client import Pipeline

from api.admin.routes_fleet import read_totals, render_fleet
from common import otlp, tracing
from common.broker.pool_client import PoolClient
from common.metrics import catalogue, exposition
from common.metrics.catalogue import INFINITY, Histogram
from common.metrics.exposition import MetricsPublisher, publishing_metrics
from common.otlp import CLOSE_S, OtlpExporter
from common.process import logs, startup
from common.settings.settings import SettingError, Settings
from common.tracing import SpanEvent, TraceSpan, derive_span, derive_trace_id, span_name
from tests.support.broker_state import KEYS
from tests.support.traces import Receiver, traceparent

DURATIONS = [
    f"tgi_request{part}_duration"
    for part in ("", "_validation", "_queue", "_inference", "_mean_time_per_token")
]
BATCH_DURATIONS = [f"tgi_batch_{part}_duration" for part in ("inference", "forward", "decode", "filter")]
BATCH_COUNTERS = [f"tgi_batch_inference_{part}" for part in ("count", "success", "failure")]
GAUGES = (
    "tgi_queue_size",
    "tgi_batch_current_size",
    "tgi_batch_current_max_tokens",
    "tgi_batch_max_total_tokens",
    "tgi_batch_total_tokens",
)
TGI_FAILURES = ("overloaded", "validation", "incomplete", "generation", "dropped", "template")
TGI = {
    **{name: ("counter", {}) for name in ("tgi_request_count", "tgi_request_success")},
    "tgi_request_failure": (
        "counter",
        {"err": {*TGI_FAILURES, "unavailable", "timeout"}},
    ),
    **{name: ("histogram", {}) for name in DURATIONS},
    **{
        f"tgi_request_{name}": ("histogram", {})
        for name in ("input_length", "max_new_tokens", "generated_tokens", "skipped_tokens")
    },
    **{name: ("gauge", {}) for name in GAUGES},
    "tgi_batch_next_size": ("histogram", {}),
    **{name: ("counter", {"method": {"prefill", "decode"}}) for name in BATCH_COUNTERS},
    **{name: ("histogram", {"method": {"prefill", "decode"}}) for name in BATCH_DURATIONS},
    "tgi_batch_concat_duration": ("histogram", {"method": {"decode"}}),
    "tgi_batch_concat": ("counter", {"reason": {"backpressure", "wait_exceeded", "chunking"}}),
}
"""As text-generation-inference has them, but for the skipped tokens: its dashboard reads a histogram, and it
exports a summary.
"""


def whole_text(values: dict[str, float] | None = None) -> str:
    """With every gauge known."""
    return render_fleet(
        "p",
        values or {},
        {one.name: {("x",) * len(one.labels): 1} for one in catalogue.TABLE if one.kind == "gauge"},
    ).decode()


def numbers(text: str) -> dict[str, float]:
    """Value by name and labels, as they stand in the text."""
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if not line.startswith("#")
    }


def test_tgi_metrics_have_tgi_s_names_types_and_labels() -> None:
    text = whole_text()
    types = dict(re.findall(r"^# TYPE (tgi_\w+) (\w+)$", text, re.MULTILINE))
    assert types == {name: kind for name, (kind, _) in TGI.items()}
    for name, (_, labels) in TGI.items():
        lines = re.findall(rf"^{name}(?:_bucket|_sum|_count)?(?:{{(.*)}})? ", text, re.MULTILINE)
        pairs = {pair for line in lines for pair in re.findall(r'(\w+)="([^"]*)"', line)} - {("le", "")}
        found = {
            label: {value for name, value in pairs if name == label}
            for label in {label for label, _ in pairs} - {"le", "quantile"}
        }
        assert found == labels, name
    assert not re.search(r"tgi_\w+_total\b", text)


def test_tgi_histograms_have_tgi_s_buckets() -> None:
    catalogue.INPUT_LENGTH.fit(1000)
    families = {family.name: family for family in text_string_to_metric_families(whole_text())}

    def bounds(name: str) -> list[float]:
        return sorted(
            {float(sample.labels["le"]) for sample in families[name].samples if "le" in sample.labels}
        )

    for name in (*DURATIONS, *BATCH_DURATIONS, "tgi_batch_concat_duration"):
        assert bounds(name) == pytest.approx([*(0.0001 * 1.5**k for k in range(1, 36)), INFINITY])
    assert bounds("tgi_batch_next_size") == [*range(1, 1025), INFINITY]
    assert bounds("tgi_request_skipped_tokens") == [*range(16), INFINITY]
    assert bounds("tgi_request_input_length") == [*range(10, 1001, 10), INFINITY]


def test_every_metric_of_ours_is_in_the_docs_with_its_type_and_labels() -> None:
    text = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(tokenfleet_\w+)(?:{([\w, ]+)})?` \| (\w+) \|", text, re.MULTILINE)
    ours = [metric for metric in catalogue.TABLE if metric.name.startswith("tokenfleet_")]
    assert sorted(rows) == sorted(
        (metric.name + "_total" * (metric.kind == "counter"), ", ".join(metric.labels), metric.kind)
        for metric in ours
    )


def test_a_histogram_counts_values_and_its_buckets_are_cumulative() -> None:
    one = Histogram("tgi_batch_next_size", "", bounds=(1.0, 2.0, 4.0, INFINITY))
    one.observe(1)
    one.observe(1.5, times=3)
    one.observe(100)
    assert dict(one.fields()) == {
        "tgi_batch_next_size|1.0": 1,
        "tgi_batch_next_size|2.0": 3,
        "tgi_batch_next_size|inf": 1,
        "tgi_batch_next_size|sum": 105.5,
    }
    found = numbers(whole_text(dict(one.fields())))
    assert found['tgi_batch_next_size_bucket{le="1.0"}'] == 1
    assert found['tgi_batch_next_size_bucket{le="3.0"}'] == 4
    assert found['tgi_batch_next_size_bucket{le="+Inf"}'] == found["tgi_batch_next_size_count"] == 5
    assert found["tgi_batch_next_size_sum"] == 105.5


async def test_sums_add_up_over_processes_and_outlive_them(
    redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two publishers stand for two processes: each adds only what is new."""
    mine = {"tgi_request_count|": 10.0}
    monkeypatch.setattr(exposition, "own_values", mine.copy)
    one, other = MetricsPublisher(PoolClient(redis, KEYS)), MetricsPublisher(PoolClient(redis, KEYS))
    mine |= {"tgi_request_count|": 13.0, "tgi_request_duration|0.1": 1.0}
    await one.add()
    await one.add()
    await other.add()
    mine["tgi_request_count|"] = 15.0
    await one.add()
    assert await read_totals(PoolClient(redis, KEYS)) == {
        "tgi_request_count|": 8.0,
        "tgi_request_duration|0.1": 2.0,
    }
    assert await redis.pttl(KEYS.metrics) > 0
    await redis.hset(KEYS.metrics, mapping={"tgi_request_count|x": "no number", b"\xff": "1"})
    assert len(await read_totals(PoolClient(redis, KEYS))) == 2


async def test_counts_in_flight_at_the_end_are_added_once(
    redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine: dict[str, float] = {}
    sent, answered = asyncio.Event(), asyncio.Event()
    real = Pipeline.execute

    async def slow(*words: Any, **options: Any) -> Any:
        answer = await real(*words, **options)
        sent.set()
        await answered.wait()
        return answer

    monkeypatch.setattr(exposition, "own_values", mine.copy)
    monkeypatch.setattr(exposition, "ADD_S", 0.01)
    monkeypatch.setattr(Pipeline, "execute", slow)
    async with publishing_metrics(PoolClient(redis, KEYS)):
        mine["tgi_request_count|"] = 3.0
        await sent.wait()
        asyncio.get_running_loop().call_later(0.05, answered.set)
    assert await read_totals(PoolClient(redis, KEYS)) == {"tgi_request_count|": 3.0}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_process_serves_its_own_metrics_on_metrics_port(host: str) -> None:
    code = """
import sys, urllib.request
from common.metrics import catalogue, exposition
from common.settings.settings import Settings
from tests.support.machine.ports import free_port
host, port = sys.argv[1], free_port()
exposition.start_metrics_server(Settings(metrics_port=port, hostname=host), lambda: True)
catalogue.PLANS.add(7)
print(urllib.request.urlopen(f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics").read().decode())
try:
    exposition.start_metrics_server(Settings(metrics_port=port, hostname=host), lambda: True)
except Exception as error:
    print("#", error)
"""
    said = subprocess.run(
        [sys.executable, "-c", code, host], capture_output=True, text=True, check=True
    ).stdout
    found = numbers("\n".join(line for line in said.splitlines() if line))
    assert found['tokenfleet_plans_total{pool="default"}'] == 7
    assert f"# METRICS_PORT: cannot listen on {host}:" in said
    if sys.platform == "linux":
        assert found["process_resident_memory_bytes"] > 0


# --- otlp ---------------------------------------------------------------------------------------------------

TRACE_ID = derive_trace_id("r1")
PARENT = span_name(TRACE_ID, "00000000000000aa")
OWN = derive_span(PARENT, "infer", "2")


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().listening() as receiver:
        yield receiver


def span(name: str = "infer", own: str = OWN, **fields: Any) -> TraceSpan:
    return TraceSpan(own, name, 1_000, 2_000, "00000000000000aa", **fields)


def make(endpoint: str | None, **settings: Any) -> OtlpExporter:
    return OtlpExporter(Settings(otlp_endpoint=endpoint, **settings), "g0-1")


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_span_arrives_as_it_was_made(
    protocol: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-who=me")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "zone=a")
    exporter = make(receiver.grpc_url if protocol == "grpc" else receiver.http_url, otlp_service_name="s")
    before = derive_span(PARENT, "infer", "1")
    event = SpanEvent(1_500, "resume", {"n": 2})
    exporter.export(span(attributes={"a": "b", "l": ["x"]}, events=[event], links=[before], error="died"))
    exporter.close()
    [found] = receiver.spans
    assert (found.trace_id, found.span_id, found.parent_id) == (TRACE_ID, OWN[36:52], "00000000000000aa")
    assert (found.name, found.start_ns, found.end_ns, found.error) == ("infer", 1_000, 2_000, "died")
    assert found.attributes == {"a": "b", "l": ["x"]}
    assert found.events == [("resume", {"n": 2}, 1_500)]
    assert found.links == [before[36:52]]
    assert found.resource["service.name"] == "s"
    assert found.resource["service.instance.id"] == "g0-1"
    assert found.resource["zone"] == "a"
    assert receiver.headers[-1]["x-who"] == "me"


def test_the_endpoint_and_the_name_of_opentelemetry_hold(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.http_url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    for name in ("named", ""):
        monkeypatch.setenv("OTEL_SERVICE_NAME", name)
        exporter = make(None)
        exporter.export(span())
        exporter.close()
    assert [found.resource["service.name"] for found in receiver.spans] == ["named", "tokenfleet"]


def test_a_receiver_that_hangs_holds_nobody(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "CLOSE_S", 0.2)
    receiver.answers.clear()
    exporter = make(receiver.grpc_url)
    begun_s = time.monotonic()
    for _ in range(5000):
        exporter.export(span())
    exporter.close()
    assert time.monotonic() - begun_s < CLOSE_S + 2


@pytest.mark.parametrize(
    ("sampler", "flags", "is_sampled"),
    [
        ("", "01", True),
        ("", "00", False),
        ("always_off", "01", False),
        ("parentbased_traceidratio", "01", True),
        ("always_on", "00", True),
    ],
)
def test_the_decision_of_traceparent_holds_as_the_sampler_says(
    sampler: str, flags: str, is_sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler or "parentbased_always_on")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    exporter = make("http://127.0.0.1:1")
    given = {"traceparent": traceparent(TRACE_ID, flags)}
    found = exporter.sample(given, derive_trace_id("r2"), "POST /generate", "SERVER", {})
    assert found == ((TRACE_ID, "00f067aa0ba902b7") if is_sampled else None)
    exporter.close()


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon", "must be grpc or http/protobuf"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "7", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "cannot start"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    name: str, value: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=what):
        make("http://127.0.0.1:1")


def test_the_password_of_an_endpoint_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make("http://me:secret@127.0.0.1:1").close()
    assert "to http://127.0.0.1:1 by grpc" in caplog.text
    for url in ("me:secret@127.0.0.1:1", "ftp://me:secret@127.0.0.1:1"):
        with pytest.raises(SettingError, match=r"'(ftp://)?127\.0\.0\.1:1' is no URL"):
            Settings.read([], {"OTLP_ENDPOINT": url})


# --- tracing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "environ", "is_on"),
    [
        (None, {}, False),
        ("http://x:4317", {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, True),
        (None, {"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ("http://x:4317", {"OTEL_TRACES_EXPORTER": "none"}, False),
        ("http://x:4317", {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_what_turns_traces_on(endpoint: str | None, environ: dict[str, str], is_on: bool) -> None:
    assert tracing.is_wanted(Settings(otlp_endpoint=endpoint), environ) is is_on


def test_spans_of_a_task_are_parts_of_each_other(receiver: Receiver) -> None:
    with startup.exporting_spans(Settings(otlp_endpoint=receiver.grpc_url), "g0-1"):
        assert tracing.is_on()
        with tracing.span("outside"):
            pass
        token = logs.TRACEPARENT.set(PARENT)
        with pytest.raises(ValueError), tracing.span("validate"), tracing.span("tokenize"):
            raise ValueError("too long")
        logs.TRACEPARENT.reset(token)
    assert not tracing.is_on()
    inner, outer = receiver.spans
    assert (inner.name, outer.name) == ("tokenize", "validate")
    assert (inner.parent_id, outer.parent_id) == (outer.span_id, "00000000000000aa")
    assert inner.error == outer.error == "too long"
