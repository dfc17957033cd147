"""OtlpExporter: what a receiver of the real protocol gets, and what happens without one."""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from common import otlp, tracing
from common.otlp import CLOSE_S, OtlpExporter
from common.process import logs, startup
from common.settings.settings import SettingError, Settings
from common.tracing import SpanEvent, TraceSpan, derive_span, derive_trace_id, span_name
from tests.support.traces import Receiver, traceparent

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
