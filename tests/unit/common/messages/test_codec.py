"""Codec: every message on the wire. A change of its format must be seen here."""

from typing import Any

import msgpack
import pytest

from api.answers.answer import AnswerTrace, HttpAnswer, InferOutputs, Reading, Rendering, VectorAnswer
from common.messages.codec import WireError, decode, encode
from common.messages.events import Events, Terminal, Timeline, TimelineEvent, TokenColumns, Tokens
from common.messages.kept_answer import KeeperMessage, KeptAnswer, KeptRequests
from common.messages.plan import HeldRow, NewRow, Plan, Report, WorkerCapacity, WorkerDied
from common.messages.records import RECORD, pack_floats, pack_ids, pack_records, unpack_ids
from common.messages.request import Cancel, Generate, PoolingParams, Resume, SamplingParams, StoppingParams

SAMPLING = SamplingParams(
    0.5,
    3,
    0.9,
    0.1,
    0.8,
    1.1,
    0.2,
    0.3,
    0.4,
    7,
    1,
    [(5, -1.0)],
    [[6]],
    0.7,
    0.01,
    [8],
    True,
    "start: A",
)
HELD = HeldRow(1, "r1", 2, 3, 5, b"", 9, 8, num_cached=16)
GENERATE = Generate(
    "r1",
    "d1",
    pack_ids([1, 258]),
    StoppingParams(7, 2, ["x"], [9], True),
    SAMPLING,
    3,
    2,
    1000,
    "ch",
    "g",
    30,
    60,
    "batch",
    "t",
    5,
    "salt",
    b"hashes",
    4,
    traceparent="00-1-2-01",
    key_id="k1",
    pooling=PoolingParams(4),
)
TOKENS_MAP = {"id": "r1", "a": 2, "i": 3, "t": b"\x05\0\0\0", "l": b"\0\0\0\xbf", "x": ["hi"]} | {
    "ti": b"",
    "tl": b"",
    "ss": 7,
    "nc": 16,
    "sp": 0,
}
TOKENS = Tokens("r1", 2, 3, pack_ids([5]), pack_floats([-0.5]), ["hi"], since_start_ms=7, num_cached=16)
RECORDS = pack_records(pack_ids([5, 6]), pack_floats([-0.5, -1.0]), b"", b"")
EXAMPLES = [
    (
        GENERATE,
        {
            "v": 1,
            "id": "r1",
            "dg": "d1",
            "p": b"\x01\0\0\0\x02\x01\0\0",
            "sp": {"mx": 7, "mn": 2, "st": ["x"], "si": [9], "ie": True},
            "tp": 3,
            "pl": 2,
        }
        | {
            "sa": {
                "t": 0.5,
                "k": 3,
                "p": 0.9,
                "m": 0.1,
                "y": 0.8,
                "r": 1.1,
                "f": 0.2,
                "e": 0.3,
                "l": 0.4,
                "s": 7,
                "c": 1,
                "b": [[5, -1.0]],
                "w": [[6]],
                "d": 0.7,
                "n": 0.01,
                "i": [8],
                "x": True,
                "g": "start: A",
                "a": [],
                "wd": 0.0,
                "wg": 0.0,
                "rl": False,
            }
        }
        | {"tl": 1000}
        | {"ch": "ch", "gw": "g", "gr": 30, "rt": 60, "cl": "batch", "tn": "t", "sh": 5}
        | {
            "cs": "salt",
            "bh": b"hashes",
            "ns": 4,
            "bm": None,
            "lo": None,
            "tr": "00-1-2-01",
            "ky": "k1",
            "we": 0.0,
            "ac": None,
            "ad": "",
            "pi": [],
            "po": {"ps": 4},
            "wh": b"",
        },
    ),
    (Cancel("r1", "client"), {"v": 1, "id": "r1", "w": "client"}),
    (Resume("r1"), {"v": 1, "id": "r1"}),
    (
        HttpAnswer(
            *("r1", "/x", True, 5, "m", "f", 1, [b"\x01\0\0\0"], [GENERATE], ["P"]),
            Rendering(details=True, reading=Reading("hermes", "qwen3", "<think>", [("f", "{}")])),
            infer=InferOutputs("own", [("x", False, [2, 1])]),
            trace=AnswerTrace("00-1-2-01", "2", 9),
            vectors=VectorAnswer("rerank", num_queries=1, texts=["t"]),
        ),
        {"v": 1, "id": "r1", "ro": "/x", "st": True, "cr": 5, "mo": "m", "fp": "f", "n": 1}
        | {"pr": [b"\x01\0\0\0"], "rq": [msgpack.unpackb(encode(GENERATE))], "px": ["P"]}
        | {
            "re": {"dt": True, "lp": False, "us": False, "ru": False, "sk": True, "is": False, "po": False}
            | {
                "rd": {"ca": "hermes", "re": "qwen3", "pe": "<think>", "to": [["f", "{}"]], "na": False}
                | {"pa": True, "ol": False, "sr": True, "ei": False}
            }
            | {"ti": False, "ni": False, "pt": None, "js": False, "sf": False}
        }
        | {"tm": {"ow": "", "rs": None, "de": False, "so": 0, "rt": 0, "bo": ""}, "rp": None}
        | {"in": {"i": "own", "o": [["x", False, [2, 1]]]}}
        | {"tr": {"r": "00-1-2-01", "p": "2", "s": 9}}
        | {
            "ve": {
                "f": "rerank",
                "b": False,
                "d": 0,
                "n": True,
                "q": 1,
                "r": False,
                "t": 0,
                "x": ["t"],
            }
        },
    ),
    (WorkerDied("w0-1"), {"v": 1, "i": "w0-1"}),
    (
        Plan(
            9,
            2,
            40,
            64,
            [NewRow(1, 1, 0, b"", b"\x01\0\0\0", GENERATE, 16)],
            [(1, b"\x02\0\0\0")],
            [(3, "client")],
            8,
            False,
            16,
            8,
            24,
            True,
        ),
        {"v": 1, "e": 9, "n": 2, "u": 40, "pt": 64, "mp": 16, "mr": 8, "ra": 24, "me": True, "bt": 0}
        | {
            "s": [
                {"r": 1, "a": 1, "b": 0, "s": b"", "k": b"\x01\0\0\0", "q": msgpack.unpackb(encode(GENERATE))}
                | {"nc": 16}
            ]
        }
        | {"b": [[1, b"\x02\0\0\0"]], "x": [[3, "client"]], "k": 8, "t": False},
    ),
    (
        Report(
            *(4, 9, 2, 11, [(1, 8, 10)], [(2, "length", 7)], [(2, 9)], True, [HELD], 7, True, [(2, b"h")]),
            step_times=[(3, 2, 64, 7.5)],
            round_trips=[12.5],
            lengths=[(1, 12, 11)],
            snapshots=[3, -4],
        ),
        {
            "v": 1,
            "q": 4,
            "e": 9,
            "n": 2,
            "s": 11,
            "p": [[1, 8, 10]],
            "x": [[2, "length", 7]],
            "r": [[2, 9]],
            "t": True,
            "h": [
                {"r": 1, "id": "r1", "a": 2, "b": 3, "n": 5, "k": b"", "kv": 9, "s": 8, "x": False, "nc": 16}
            ],
            "lr": 7,
            "l": True,
            "bh": [[2, b"h"]],
            "st": [[3, 2, 64, 7.5]],
            "ln": [[1, 12, 11]],
            "rt": [12.5],
            "sn": [3, -4],
        },
    ),
    (
        WorkerCapacity(
            *("w0-1", "w0", "m", "float32", 16, 10, 64, 2048, pack_ids([2]), 1, "cpu", "dir/m", True, True),
            tokenizer_name="dir/t",
            pooling="embed",
        ),
        {
            "v": 1,
            "i": "w0-1",
            "nm": "w0",
            "m": "m",
            "d": "float32",
            "bs": 16,
            "nb": 10,
            "pt": 64,
            "c": 2048,
            "eo": b"\x02\0\0\0",
            "w": 1,
            "mi": "dir/m",
        }
        | {"dv": "cpu", "pc": True, "sb": True, "tn": "dir/t", "vs": 0, "sn": [], "pi": False}
        | {"mr": 0, "po": "embed", "la": 0, "lr": 0},
    ),
    (
        Events("w0-1", 6, [TOKENS], [Terminal("r1", "error", 4, "why", "generation")], 9),
        {
            "v": 1,
            "s": "w0-1",
            "q": 6,
            "t": [TOKENS_MAP],
        }
        | {"x": [{"id": "r1", "w": "error", "n": 4, "e": "why", "y": "generation"}], "f": 9, "c": None},
    ),
    (
        Events("w0-1", 6, flush=9, columns=TokenColumns(["r1", "r2"], [2, 1], [3, 8], RECORDS, ["hi", ""])),
        {"v": 1, "s": "w0-1", "q": 6, "t": [], "x": [], "f": 9}
        | {"c": {"id": ["r1", "r2"], "a": [2, 1], "i": [3, 8], "r": RECORDS, "x": ["hi", ""]}},
    ),
    (
        Timeline([TimelineEvent(5, "ended", "w0-1", 2, 37, "length", 16)]),
        {"v": 1, "h": [{"t": 5, "w": "ended", "i": "w0-1", "a": 2, "n": 37, "y": "length", "c": 16}]},
    ),
    (
        KeptAnswer(
            *("r1", 7, "1", 2, 3, b"HTTP", b":", [9], [(b"origin", b"o")], [("x-a", "b")]),
            KeptRequests("p", "ch", ["d"], b"a", True),
            "1.0",
        ),
        {"v": 1, "id": "r1", "b": 7, "f": "1", "cn": 2, "ns": 3, "h": b"HTTP", "ct": b":", "c": [9]}
        | {"hd": [[b"origin", b"o"]], "x": [["x-a", "b"]]}
        | {"rq": {"p": "p", "ch": "ch", "dg": ["d"], "a": b"a", "o": True}}
        | {"hv": "1.0"},
    ),
    (
        KeeperMessage(KeptAnswer("r1", 7, "1"), "d", "r", True, "l"),
        {
            "v": 1,
            "k": {"id": "r1", "b": 7, "f": "1", "cn": 0, "ns": 0, "h": b"", "ct": b""}
            | {"c": [], "hd": [], "x": [], "rq": None, "hv": "1.1"},
        }
        | {"d": "d", "r": "r", "t": True, "l": "l"},
    ),
]


def without_versions(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_versions(item) for key, item in value.items() if key != "v"}
    return [without_versions(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("message", "wire"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_each_message_has_its_bytes_and_is_read_back(message: Any, wire: dict[str, Any]) -> None:
    data = encode(message)
    assert msgpack.unpackb(data)["v"] == 1
    assert without_versions(msgpack.unpackb(data)) == without_versions(wire)
    assert decode(type(message), data) == message


def test_bytes_of_a_message_never_change() -> None:
    assert encode(Cancel("r1", "client")) == b"\x83\xa1v\x01\xa2id\xa2r1\xa1w\xa6client"
    assert RECORD.pack(258, -0.5) == b"\x02\x01\0\0\0\0\0\xbf"
    assert unpack_ids(b"\xff\xff\xff\xff") == [-1]


@pytest.mark.parametrize(("message", "wire"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_unknown_fields_are_ignored(message: Any, wire: dict[str, Any]) -> None:
    body = msgpack.unpackb(encode(message))
    assert decode(type(message), msgpack.packb(body | {"new": [1, {"a": 2}]})) == message


@pytest.mark.parametrize(("message", "wire"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_wrong_types_are_refused_by_name(message: Any, wire: dict[str, Any]) -> None:
    body = msgpack.unpackb(encode(message))
    for name in body:
        if name == "v":
            continue
        wrong = 1.5 if not isinstance(body[name], float) else "x"
        with pytest.raises(WireError, match=type(message).__name__):
            decode(type(message), msgpack.packb(body | {name: wrong}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"garbage",
        msgpack.packb([1]),
        msgpack.packb({"v": 1}),
        msgpack.packb({"v": 2, "id": "r", "w": "x"}),
    ],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(Cancel, data)


def test_bools_are_no_ints() -> None:
    with pytest.raises(WireError, match=r"^Report\.step: Input should be a valid integer$"):
        decode(Report, msgpack.packb({"v": 1, "q": 1, "e": 1, "n": 1, "s": True}))


TOKEN = {"id": "r", "a": 1, "i": 0, "t": b"", "l": b""}


@pytest.mark.parametrize(
    ("token", "fault"),
    [
        (TOKEN | {"x": ["a", 1]}, ".texts.1: Input should be a valid string"),
        ({}, ".request_id: Field required"),
        (1, ": Input should be a dictionary or an instance of Tokens"),
    ],
)
def test_a_fault_is_named_by_the_fields_that_lead_to_it(token: Any, fault: str) -> None:
    with pytest.raises(WireError, match=f"^Events.tokens.1{fault}$"):
        decode(Events, msgpack.packb({"v": 1, "s": "w", "q": 1, "t": [TOKEN, token]}))


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ({"r": [[1, 2], [1]]}, "released.1.1: Field required"),
        ({"r": [[1, True]]}, "released.0.1: Input should be a valid integer"),
        ({"r": [3]}, "released.0: Input should be a valid tuple"),
        ({"x": [[1, 2, 3]]}, "ended.0.1: Input should be a valid string"),
    ],
)
def test_a_tuple_has_as_many_values_as_its_type_and_of_these_types(rows: Any, fault: str) -> None:
    with pytest.raises(WireError, match=f"^Report.{fault}$"):
        decode(Report, msgpack.packb({"v": 1, "q": 1, "e": 1, "n": 1, "s": 1} | rows))
