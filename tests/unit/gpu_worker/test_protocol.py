"""Frames of the protocol: decoded whole wherever their bytes are cut; other bytes are refused."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.plan import WorkerCapacity
from common.messages.request import SamplingParams
from gpu_worker.protocol import (
    SAMPLE,
    AdapterAnswer,
    EngineFailure,
    Frame,
    FrameDecoder,
    LoadProgress,
    ProtocolError,
    SetAdapter,
    StepResult,
    encode,
)
from tests.support.engine.row_steps import plan, start_row

SAMPLING = SamplingParams(0.7, top_k=5, seed=2**63, logit_bias=[(7, -1.5)], bad_words=[[5, 6]])
FRAMES: list[Frame] = [
    LoadProgress("loading"),
    WorkerCapacity("", "", "m", "float32", 16, 100, 64, 2048, b"1234", 2, token_ms=0.5),
    plan(5, 64),
    plan(
        9,
        64,
        (
            start_row(1, [5], 4, ignore_eos=True),
            start_row(2, [7], 9, 1, sampling=SAMPLING, top_n_tokens=2, prompt_logprobs=0),
        ),
        blocks=[(1, b"more")],
    ),
    plan(9, 64, stops=[(2, "cancelled")], mixed_prefill_tokens=16, max_rows=8),
    StepResult(1, prompt_logprobs=[(1, 1, b"1234", b"1234", b"5678")]),
    StepResult(
        2,
        SAMPLE.pack(1, 0, 504, -0.5),
        [(0, b"1234", b"5678")],
        [],
        [(1, 7)],
        [(1, "length", 1)],
        [(1, 7)],
        12.5,
        64,
    ),
    EngineFailure("dtype", "float7 is none"),
    SetAdapter("sql", "/cache/sql", "org/sql@main", "ab"),
    AdapterAnswer("sql", "/adapters/sql has no adapter_config.json"),
    SetAdapter("sql"),
    AdapterAnswer("sql"),
]


@given(st.lists(st.sampled_from(FRAMES), max_size=8), st.data())
def test_frames_arrive_whole_wherever_their_bytes_are_cut(sent: list[Frame], data: st.DataObject) -> None:
    whole = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)))))
    frames, received = FrameDecoder(), []
    for first, last in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        frames.feed(whole[first:last])
        received += list(frames)
    assert [*map(encode, received)] == [*map(encode, sent)]


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"\xc1", "FormatError"),
        (b"GET / HTTP/1.1", "cannot unpack"),
        (msgpack.packb(["leap", 1]), "'leap'"),
        (msgpack.packb(["LoadProgress", "a", "b"]), "takes 2 positional arguments"),
        (msgpack.packb(["StepResult"]), "missing 1 required positional argument: 'step'"),
        (msgpack.packb(["Plan", msgpack.packb({"v": 1, "e": "no"})]), "Plan.epoch"),
    ],
)
def test_bytes_that_are_not_a_frame_raise_protocol_error(data: bytes, cause: str) -> None:
    frames = FrameDecoder()
    frames.feed(encode(FRAMES[0]) + data)
    assert next(frames) == FRAMES[0]
    with pytest.raises(ProtocolError, match=f"^not a frame: .*{cause}"):
        next(frames)


def test_a_field_above_the_limit_raises_protocol_error() -> None:
    """Its announced length does not matter."""
    frames = FrameDecoder(max_field_bytes=1000)
    for _ in range(3):
        frames.feed(encode(LoadProgress("x" * 900)))
        assert len(list(frames)) == 1
    endless = encode(LoadProgress("x" * 10**6))
    frames.feed(endless[:900])
    assert next(frames, None) is None
    with pytest.raises(ProtocolError, match="a field of a frame has more than 1000 bytes"):
        frames.feed(endless[900:1100])
