"""Messages: their form on the wire, which processes of two versions share; what is packed comes out."""

import dataclasses
import importlib
import types
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.codec import WireError, decode, encode
from common.messages.events import (
    REPEATED_FOR_S,
    ChannelSequences,
    Events,
)
from common.messages.plan import Report
from common.messages.records import (
    RECORD,
    BeamSequence,
    pack_floats,
    pack_ids,
    pack_records,
    pack_sequences,
    unpack_columns,
    unpack_ids,
    unpack_records,
)
from common.messages.request import Cancel, block_names, extend_hashes, root_hash
from tests.support.events import unpack_sequences

# --- codec --------------------------------------------------------------------------------------------------

MODULES = """
api.answers.answer api.webhooks common.adapters common.api_keys common.broker.directory common.messages.events
common.messages.kept_answer common.messages.plan common.messages.request
""".split()
WIRE = """
Reading ca re pe to na pa ol sr ei
Rendering dt lp us ru sk is po rd ti ni pt js
AnswerTerms ow rs de so rt bo go ke
ResponseParts f b i
InferOutputs i o
VectorAnswer f b d n q r t x
AnswerTrace r p s
HttpAnswer id ro st cr mo fp n pr rq px re tm rp in tr ve nu
PoolAdapter n p d s r b a f
HeldAdapters l r
AdapterLoad r
ApiKey id dg tn cl w mc rm tm bt ms ad ex rv am nm ca wu ws
PoolEntry a m mi tn r l w rw c s ad
Tokens id a i t l x ti tl ss nc sp
TokenColumns id a i r x
Terminal id w n e y
Events s q t x f c
TimelineEvent t w i a n y c
Timeline h
KeptRequests p ch dg a o
KeptAnswer id b f cn ns h ct c hd x rq hv
KeeperMessage k d r t l
NewRow r a b s k q nc ct
Plan e n u pt s b x k t mp mr ra bt
HeldRow r id a b n k kv s x nc
Report q e n s p x r t h lr l bh st ln rt sn
WorkerCapacity i nm m d bs nb pt c eo w dv mi pc sb tn vs sn la lr pi mr po ap tm
WorkerDied i
LogitsParams c g d v
PoolingParams ps
SamplingParams t k p m y r f e l s c b w d n i x g a wd wg rl
BeamParams w l e d n
StoppingParams mx mn st si ie
UsageAccount m pp bt
Picture d s n
Generate id dg p sp sa tp pl tl ch gw gr rt cl tn sh cs bh ns bm lo tr ky we ac ad pi po wh
Cancel id w
Resume id
Webhook u s k i e
"""
"""Of each message the short names of its fields, in order: new ones come last and have a default."""
EXAMPLES: dict[Any, Any] = {bool: True, int: 258, float: -0.5, str: "é", bytes: b"\xff\0", type(None): None}


def messages() -> dict[str, Any]:
    """The classes of all messages by their names."""
    found = {}
    for name in MODULES:
        for item in vars(importlib.import_module(name)).values():
            if isinstance(item, type) and dataclasses.is_dataclass(item) and item.__module__ == name:
                fields = dataclasses.fields(item)
                if fields and all("wire" in one.metadata for one in fields):
                    found[item.__name__] = item
    return found


MESSAGES = messages()
EVERY_MESSAGE = pytest.mark.parametrize(
    "name", sorted(MESSAGES.keys() - {"LogitsParams"})
)  # "v" is a field of it


def example(kind: Any) -> Any:
    """A value of a type, with a value in each field and each list."""
    inner = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return typing.cast(Any, kind)(
            **{one.name: example(hints[one.name]) for one in dataclasses.fields(kind)}
        )
    match typing.get_origin(kind):
        case typing.Union | types.UnionType:
            return example(inner[0])
        case origin if origin is list:
            return [example(inner[0])]
        case origin if origin is tuple:
            return tuple(map(example, inner))
        case origin if origin is dict:
            return {example(inner[0]): example(inner[1])}
        case typing.Literal:
            return inner[0]
    return EXAMPLES[kind]


def test_fields_keep_their_names_on_the_wire() -> None:
    found = {
        name: " ".join(one.metadata["wire"] for one in dataclasses.fields(cls))
        for name, cls in MESSAGES.items()
    }
    assert found == dict(line.split(" ", 1) for line in WIRE.strip().splitlines())


@EVERY_MESSAGE
def test_a_message_is_read_back_unknown_fields_are_ignored_and_wrong_types_refused_by_name(name: str) -> None:
    message = example(MESSAGES[name])
    body = msgpack.unpackb(encode(message), strict_map_key=False)
    assert body.pop("v") == 1
    assert decode(type(message), msgpack.packb(body | {"v": 1, "new": [1, {"a": 2}]})) == message
    for field, value in body.items():
        wrong = 1.5 if not isinstance(value, float) else "x"
        with pytest.raises(WireError, match=name):
            decode(type(message), msgpack.packb(body | {"v": 1, field: wrong}))


def test_bytes_of_a_message_never_change() -> None:
    assert encode(Cancel("r1", "client")) == b"\x83\xa1v\x01\xa2id\xa2r1\xa1w\xa6client"
    assert RECORD.pack(258, -0.5) == b"\x02\x01\0\0\0\0\0\xbf"
    assert unpack_ids(b"\xff\xff\xff\xff") == [-1]


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
        ({"s": True}, "step: Input should be a valid integer"),
    ],
)
def test_a_tuple_has_as_many_values_as_its_type_and_of_these_types(rows: Any, fault: str) -> None:
    with pytest.raises(WireError, match=f"^Report.{fault}$"):
        decode(Report, msgpack.packb({"v": 1, "q": 1, "e": 1, "n": 1, "s": 1} | rows))


# --- records ------------------------------------------------------------------------------------------------


def columns(num_tokens: int, num_top: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Packed ids, log-probabilities, and those of the likeliest tokens; all different."""
    num = num_tokens * num_top
    return (
        pack_ids(range(num_tokens)),
        pack_floats([-float(i) for i in range(num_tokens)]),
        pack_ids(range(1000, 1000 + num)),
        pack_floats([-1000.0 - i for i in range(num)]),
    )


def test_records_are_a_token_and_its_likeliest_in_order() -> None:
    top_ids, top_logprobs = pack_ids([7, 8, 9, 10]), pack_floats([-1.0, -2.0, -3.0, -4.0])
    packed = pack_records(pack_ids([1, 2]), pack_floats([-0.5, -0.25]), top_ids, top_logprobs)
    pairs = [(1, -0.5), (7, -1.0), (8, -2.0), (2, -0.25), (9, -3.0), (10, -4.0)]
    assert packed == b"".join(RECORD.pack(*pair) for pair in pairs)
    likeliest = [[(7, -1.0), (8, -2.0)], [(9, -3.0), (10, -4.0)]]
    assert unpack_records(packed, 3) == ([1, 2], [-0.5, -0.25], likeliest)


@pytest.mark.parametrize("num_top", [0, 1, 3])
@given(num_tokens=st.integers(1, 5), skipped=st.integers(0, 4))
def test_columns_come_back_from_any_token_on(num_top: int, num_tokens: int, skipped: int) -> None:
    ids, logprobs, top_ids, top_logprobs = columns(num_tokens, num_top)
    first = min(skipped, num_tokens - 1)
    width = 1 + num_top
    packed = bytearray(pack_records(ids, logprobs, top_ids, top_logprobs))
    assert unpack_columns(packed, first * width * RECORD.size, width) == (
        ids[4 * first :],
        logprobs[4 * first :],
        top_ids[4 * first * num_top :],
        top_logprobs[4 * first * num_top :],
    )


# --- beams --------------------------------------------------------------------------------------------------

SEQUENCES = [
    BeamSequence([5, 6, 7], [-0.5, -0.25, -1.0], -0.5, "eos_token"),
    BeamSequence([], [], 0.0, "stop_sequence"),
    BeamSequence([0], [-2.0], -2.0, "length"),
]


def test_sequences_come_out_as_they_were_packed() -> None:
    assert unpack_sequences(pack_sequences(SEQUENCES)) == SEQUENCES


# --- block hashes -------------------------------------------------------------------------------------------

IDS = list(range(70))


def hashes_of(ids: list[int], salt: str = "") -> bytes:
    return extend_hashes(root_hash(salt), pack_ids(ids))


def test_a_hash_depends_on_all_tokens_before_it() -> None:
    names, others = block_names(hashes_of(IDS), 16), block_names(hashes_of([*IDS[:20], 0, *IDS[21:]]), 16)
    assert [one == other for one, other in zip(names, others, strict=True)] == [True, False, False, False]
    assert not set(names) & set(block_names(hashes_of(IDS, "salt"), 16))


def test_a_larger_block_has_the_name_of_its_last_hash() -> None:
    assert block_names(hashes_of(IDS), 32) == block_names(hashes_of(IDS), 16)[1::2]
    assert block_names(hashes_of(IDS), 64) == block_names(hashes_of(IDS), 16)[3:]


def test_hashes_are_the_same_in_every_version() -> None:
    """Workers and gateways of two versions may run at once."""
    assert hashes_of(IDS[:16]).hex() == "cae66941d9efbd404e4d88758ea67670724f387046a7ef1970878eae3ed5c2d2"


# --- events sequences ---------------------------------------------------------------------------------------


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that `sequences` sees, in its one element."""
    now = [1000.0]
    monkeypatch.setattr("common.messages.events.time.monotonic", lambda: now[0])
    return now


def repeated(channels: ChannelSequences) -> dict[str, Events]:
    return {channel: decode(Events, payload) for channel, payload in channels.repeated_messages()}


def test_the_last_number_is_repeated_without_tokens() -> None:
    channels = ChannelSequences("w0-1")
    for name in ("a", "a", "b"):
        channels.next_number(name)
    expected = {"a": Events("w0-1", 2), "b": Events("w0-1", 1)}
    assert repeated(channels) == expected
    assert repeated(channels) == expected, "a repetition is no new message"


def test_an_idle_channel_is_repeated_no_more(now_s: list[float]) -> None:
    channels = ChannelSequences("w0-1")
    channels.next_number("idle")
    now_s[0] += 1.0
    channels.next_number("used")
    now_s[0] += REPEATED_FOR_S - 0.5
    assert list(repeated(channels)) == ["used"]


def test_a_channel_that_had_a_message_just_now_is_not_repeated(now_s: list[float]) -> None:
    channels = ChannelSequences("w0-1")
    channels.next_number("silent")
    now_s[0] += 0.25
    channels.next_number("busy")
    assert [channel for channel, _ in channels.repeated_messages(0.25)] == ["silent"]
